"""Everything vitlab raises on purpose.

VitlabError                  exit code 3
├── UserError                exit code 2: something the user wrote; one clear sentence each, never a traceback
│   ├── SpecError            a study file is wrong; carries every Problem found, with its place
│   ├── UnknownComponent     no component of that name in the slot
│   ├── ClashError           two sources offer one name
│   ├── OptionError          a component does not accept these options
│   ├── GeometryError        sizes that do not divide
│   ├── DataError            a data set is missing, or its files are not as expected
│   ├── WeightsError         a checkpoint that cannot be read or does not fit
│   └── UnknownName          a mapping returned by vitlab has no such name; also a KeyError
├── BrokenComponent          exit code 3: a plugin that fails to import or breaks the contract of its slot
├── Refused                  exit code 4: the code or the versions are not the plan's; plan again
├── TrialFailed              exit code 4: trials failed or are missing
└── Interrupted              exit code 130: the user pressed Ctrl-C; everything computed so far is kept

try:
    vitlab.run("ablation.yaml")
except vitlab.SpecError as error:
    for problem in error.problems:
        print(problem)
"""

from __future__ import annotations

import os
import re
import shutil
import textwrap
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, ClassVar, TextIO

Path = tuple[str | int, ...]
"""A place in a YAML document: the keys and indices that lead to it."""

Fault = tuple[Path, str]
"""The path of a mistake, which may begin below a known place, and a sentence."""


class VitlabError(Exception):
    """Base of all errors raised on purpose.

    Attributes:
        kind: the word for it in the JSON of the command line.
        result: JSON of what the command has found all the same.
    """

    exit_code: ClassVar[int] = 3
    kind: ClassVar[str] = "internal"
    result: object = None

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))

    @property
    def mistakes(self) -> Sequence[Problem]:
        """Every mistake, which has a place if it is one of a file."""
        return [each if isinstance(each, Problem) else Problem("", 0, 0, str(each)) for each in self.args]


class UserError(VitlabError):
    """Something the user wrote is wrong; ``args`` has a sentence for every mistake, and the message a line.

    A SpecError has them in ``problems``, with their places.
    """

    exit_code = 2
    kind = "user"

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows in place of a traceback."""
        return [f"{type(self).__name__}: {self}"]


@contextmanager
def collecting_mistakes(mistakes: list[str]) -> Iterator[None]:
    """Append a mistake to others, so that all are reported at once."""
    try:
        yield
    except UserError as error:
        mistakes.append(str(error))


@dataclass(frozen=True, order=True)
class Problem:
    """One mistake and its place; ``line`` and ``column`` count from 1, 0 means the whole file."""

    file: str
    line: int
    column: int
    message: str
    source: str = field(default="", compare=False, repr=False)  #: the line of the file
    path: Path = field(default=(), compare=False, repr=False)
    value: object = field(default=None, compare=False, repr=False)  #: the value there

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{place}: {self.message}" if place else self.message

    def excerpt(self, width: int = 0, style: Callable[..., str] = lambda text, **_: text) -> str:
        """Return the mistake above its line, of which a long one is cut, and carets below the wrong value.

        Args:
            width: columns in which the mistake is wrapped; 0 leaves it on one line.
            style: colours a text; it takes the arguments of ``click.style``.
        """
        from rich.cells import cell_len

        message, source = public(str(self)), public(self.source)
        place = message[: -len(public(self.message)) - 2]
        lines = wrap_text(message, width)
        if lines.startswith(place):
            lines = style(place, bold=True) + lines[len(place) :]
        if not source.strip():
            return lines
        # An invisible separator must not break the line.
        source = "".join(character if character in "\t" or character.isprintable() else "?" for character in source)
        number, start = str(self.line), self.column - 1
        value = re.match(r"\"[^\"]*\"|'[^']*'|[\w.+/-]+|.", source[start:])
        carets = "^" * max(1, cell_len(value[0]) if value else 1)
        room = (width or 120) - len(number) - 10  # beside the margin and two ellipses
        if cell_len(source) > room:  # cut around the mistake
            first = max(0, start - room // 3)
            source = f"{'...' if first else ''}{source[first : first + room]}..."
            start -= first - len("...") if first else 0
        before = "".join("\t" if character == "\t" else " " * cell_len(character) for character in source[:start])
        margin, bar = " " * len(number), style("|", fg="blue")
        carets = style(carets[:room], fg="red", bold=True)
        return f"{lines}\n {style(number, fg='blue')} {bar} {source}\n {margin} {bar} {before}{carets}"


def is_about_key(path: Path, message: str) -> bool:
    """Return whether the message on a mistake at ``path`` is about the key, which it then quotes, not the value."""
    return bool(path) and f"'{path[-1]}'" in message


class SpecError(UserError):
    """A study file is wrong.

    Attributes:
        problems: every mistake found, in the order of the file.
    """

    kind = "study"

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = sorted(set(problems))
        super().__init__(*self.problems)

    def __str__(self) -> str:
        return "\n".join(problem.excerpt() for problem in self.problems)


class UnknownComponent(UserError):
    """No component of that name is installed in the slot."""


class ClashError(UserError):
    """Two sources offer one name in one slot."""


class OptionError(UserError):
    """Options that a component does not accept.

    Attributes:
        faults: paths inside the options and sentences.
        sound: the choice with defaults in the place of ``wrong`` options; None if one of them has no default.
        wrong: names of options.
    """

    def __init__(self, faults: Sequence[Fault], sound: object = None, wrong: Collection[str | int] = ()) -> None:
        self.faults = faults
        self.sound = sound
        self.wrong = wrong
        super().__init__("; ".join(f"{'.'.join(map(str, path))}: {text}" if path else text for path, text in faults))


class GeometryError(UserError):
    """Sizes that do not divide.

    Attributes:
        faults: options of the model that do not fit each other, the one to change first, and sentences.
    """

    def __init__(self, *faults: Fault) -> None:
        self.faults = faults
        super().__init__("; ".join(message for _, message in faults))


class DataError(UserError):
    """A data set is missing, or its files are not as expected."""


class WeightsError(UserError):
    """A checkpoint cannot be read or does not fit the model."""


class BrokenComponent(VitlabError):
    """A plugin failed to import, or what it offers does not keep the contract of its slot."""

    kind = "plugin"


class TrialFailed(VitlabError):
    """Trials failed or are missing."""

    exit_code = 4
    kind = "trials"


class Refused(VitlabError):
    """The code or the versions of a trial are not the plan's; the study has to be planned again."""

    exit_code = 4
    kind = "refused"


class Interrupted(VitlabError):
    """The user asked to stop.  Everything computed so far is kept, and the next run goes on from there."""

    exit_code = 130
    kind = "interrupted"


class UnknownName(UserError, KeyError):
    """A name that an object of Python does not have."""


class ByName(dict[str, Any]):
    """Parts of an object by their names, for whom an unknown name is answered by those that there are."""

    def __missing__(self, name: object) -> Any:
        raise UnknownName(f"no '{name}' here.{nearest(str(name), self)} Names: {', '.join(self) or 'none'}.")


SYNONYMS: Mapping[str, str] = {
    "lr": "learningrate baselr",
    "weight_decay": "wd",
    "batch_size": "bs minibatch",
    "epochs": "duration length",
    "steps": "iterations",
    "loss": "criterion nll",
    "evaluations": "evalevery",
    "fp32": "float32",
    "fp64": "float64",
    "bf16": "mixed",
    "fp16": "mixed float16 half",
    "cuda": "gpu",
    "resources": "gpus gpu",
    "max": "maximize maximise higher",
    "min": "minimize minimise lower",
    "accuracy": "acc top1",
    "acc": "accuracy top1",
    "auto": "softmax mha mhsa multihead multiheadattention selfattention vanilla",
    "sdpa": "flash flashattention",
    "constant": "none",
    "image_folder": "imagenet imagenet1k imagefolder",
    "rope2d": "rotary",
    "learned": "ape",
    "depth": "numlayers nlayers layers",
    "dim": "embeddim hiddensize dmodel width",
    "model": "network",
    "seeds": "replicates",
    "cross_entropy": "ce",
    "macs": "flops",
    "compare": "report",
    "plan": "validate",
    "results": "status",
    "list_components": "list",
}
"""What things are called here, and elsewhere, in lower case without ``_``, ``-`` and spaces; the likeliest first.

Names that spelling finds, such as ``num_heads`` for ``heads``, need no entry."""


def closest(name: str, allowed: Iterable[str]) -> str | None:
    """Return the one of ``allowed`` that ``name`` most likely means, by synonym, spelling or part; None if none."""
    names = list(allowed)
    plain = _normalise_name(str(name))  # what a program passes may be no text
    by_plain = {_normalise_name(one): one for one in reversed(names)}
    if plain in by_plain:
        return by_plain[plain]
    for name_here, elsewhere in SYNONYMS.items():
        if plain in elsewhere.split() and name_here in names:
            return name_here
    anagrams = [one for one in by_plain if sorted(one) == sorted(plain)]  # letters in a wrong order
    # Of three letters, such as mcc and mce, two alike mean nothing.
    close = anagrams or get_close_matches(plain, by_plain, n=1, cutoff=0.6 if len(plain) > 3 else 0.7)
    if close:
        return by_plain[close[0]]
    # A value in the name of an arm, such as rope2d in position=rope2d, or a metric in the name of a column: val_acc.
    parts = [
        one for one in names if len(plain) > 2 and re.search(rf"(?<![^\W_]){re.escape(str(name))}(?![^\W_])", str(one))
    ]
    return parts[0] if len(parts) == 1 else None


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` with the closest of ``allowed``, or nothing where none is close."""
    close = closest(name, allowed)
    return f" Did you mean '{close}'?" if close is not None else ""


def _normalise_name(name: str) -> str:
    """Return a name for comparison: lower case, no separators."""
    return re.sub("[-_ ]", "", name.casefold())


def format_count(n: int, noun: str) -> str:
    """Return a number with its noun in singular or plural: ``1 seed``, ``5,000 seeds``."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def one_line(text: object) -> str:
    """Return a text, or the message of an error, on one line."""
    return " ".join(str(text).split())


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of an error's message on one line, or the error's type if it has no message."""
    return one_line(error).partition(". ")[0].rstrip(".") or type(error).__name__


def list_some(names: Iterable[str], most: int = 5, separator: str = ", ") -> str:
    """Return the first of ``names``, and the number of the others: ``a, b and 3 more``."""
    listed = list(names)
    more = f" and {len(listed) - most:,} more" if len(listed) > most else ""
    return separator.join(listed[:most]) + more


def lookalike_note(text: str) -> str:
    """Return a sentence on a character of ``text`` that looks like another or is invisible, or nothing."""
    for character in text:
        name = unicodedata.name(character, "a character without a name")
        is_foreign = name.startswith(("CYRILLIC", "GREEK")) or "QUOTATION" in name
        is_invisible = character.isspace() or unicodedata.category(character) in ("Cf", "Zs")
        if not character.isascii() and (is_foreign or is_invisible):
            kind = "an invisible character" if is_invisible else f"'{character}', which is not what it looks like"
            return f" It has {kind} (U+{ord(character):04X}, {name}); type it anew."
    return ""


def line_width(stream: TextIO) -> int:
    """Return the columns of a terminal, elsewhere those of the variable COLUMNS; 0 for lines of any length."""
    return shutil.get_terminal_size().columns if stream.isatty() or "COLUMNS" in os.environ else 0


def wrap_text(text: str, width: int, indent: str = "  ") -> str:
    """Return text in lines of at most ``width`` columns, broken between words; 0 leaves it as it is."""
    if not width:
        return text
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    )


def public(text: str) -> str:
    """Mask user names, passwords and tokens of the addresses in a text."""
    without_users = re.sub(_USER, rf"\1{MASK}@", text)
    return re.sub(_SECRET, rf"\1{MASK}", re.sub(_NO_PORT, rf"\1{MASK}", without_users))


MASK = "***"  #: in place of what :func:`public` hides
_USER = re.compile(r"(://)[^\s'\"]*@")  # up to the last @, because a password may contain an unescaped one
# What follows a host and is no port: a password, if the @ after it was forgotten.
_NO_PORT = re.compile(r"(://[^\s'\"/:@\[]*:)(?!\d*(?:[/?#:;,.)\s'\"]|$))[^\s'\"]+")
# The key of a view in MLflow is none.
_SECRET = re.compile(
    r"([?&;](?!viewStateShareKey)(?:\w*(?:password|passwd|pwd|token|secret|key))=)[^&;#\s'\"]+", re.IGNORECASE
)
