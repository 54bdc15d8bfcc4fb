"""Everything vitlab raises on purpose.

VitlabError                  exit code 3
├── UserError                exit code 2: something the user wrote; one clear sentence each, never a traceback
│   ├── SpecError            a study file is wrong; carries every Problem found, with its place
│   ├── UnknownComponent     no component of that name in the slot
│   ├── ClashError           two sources offer one name
│   ├── OptionError          a component does not accept these options
│   ├── GeometryError        sizes that do not divide
│   ├── DataError            a data set is not where it was said to be, or is not what it was said to be
│   └── WeightsError         a checkpoint that cannot be read or does not fit
├── BrokenComponent          exit code 3: a plugin that fails to import, or is not what it claims to be
├── Refused                  exit code 4: the trial is not, here, what it was planned to be; nothing is wrong with it
├── TrialFailed              exit code 4: trials failed or are missing
│   ├── OutOfMemory          a trial needs more memory than there was
│   └── Lost                 a process of a trial died; nothing is wrong with the trial
└── Interrupted              exit code 130: the user pressed Ctrl-C; everything computed so far is kept

try:
    vitlab.run("ablation.yaml")
except vitlab.SpecError as error:
    for problem in error.problems:
        print(problem)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import ClassVar

Path = tuple[str | int, ...]
"""A place in a YAML document: the keys and indices that lead to it."""


class VitlabError(Exception):
    """Base of all errors raised on purpose."""

    exit_code: ClassVar[int] = 3


class UserError(VitlabError):
    """Something the user wrote cannot be meant."""

    exit_code: ClassVar[int] = 2


@dataclass(frozen=True, order=True)
class Problem:
    """One mistake and its place; ``line`` and ``column`` count from 1, 0 means the whole file."""

    file: str
    line: int
    column: int
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{place}: {self.message}"


class SpecError(UserError):
    """A study file is wrong.  ``problems`` lists every mistake found, in the order of the file."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: Sequence[Problem] = sorted(set(problems))
        super().__init__("\n".join(map(str, self.problems)))


class UnknownComponent(UserError):
    """No component of that name is installed in the slot."""


class ClashError(UserError):
    """Two sources offer one name in one slot."""


class OptionError(UserError):
    """Options a component does not accept.  ``faults`` pairs the path inside the options with a sentence."""

    def __init__(self, faults: Sequence[tuple[Path, str]]) -> None:
        self.faults = faults
        super().__init__("; ".join(f"{'.'.join(map(str, path))}: {text}" if path else text for path, text in faults))


class GeometryError(UserError):
    """Sizes that do not divide.  ``option`` names the option of the model to blame."""

    def __init__(self, option: str, message: str) -> None:
        self.option = option
        super().__init__(message)


class DataError(UserError):
    """A data set is not where it was said to be, or is not what it was said to be."""


class WeightsError(UserError):
    """A checkpoint cannot be read or does not fit the model."""


class BrokenComponent(VitlabError):
    """A plugin failed to import, or what it offers does not keep the contract of its slot."""


class TrialFailed(VitlabError):
    """Trials failed or are missing."""

    exit_code: ClassVar[int] = 4


class OutOfMemory(TrialFailed):
    """A trial needs more memory than there was."""


class Lost(TrialFailed):
    """A process of a trial died; trying again may well succeed."""


class Refused(VitlabError):
    """A trial is not, here and now, what it was planned to be: its code was changed since.  Plan again."""

    exit_code: ClassVar[int] = 4


class Interrupted(VitlabError):
    """The user asked to stop.  Everything computed so far is kept, and the next run goes on from there."""

    exit_code: ClassVar[int] = 130


def nearest(name: str, allowed: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` with the closest of ``allowed``, or nothing where none is close."""
    close = get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""
