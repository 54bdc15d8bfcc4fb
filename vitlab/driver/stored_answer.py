"""The stored answer of a finished study, which ``vitlab run`` prints without planning if nothing has changed.

``studies/<name>/answer.json`` holds the printed answer and a digest of everything that it depends on:

- the request: the study file, the changes and plugins of the command line, the folders and the environment;
- the code: the files of vitlab, of plugins and of other modules that were imported, and the installed distributions;
- the data: the files that the identities of the data sets follow from;
- the output: results by content, and all other files of the trials, of the study, its report and its tracker.

Results and small inputs are compared by content, all other files by modification time, size and inode.  If anything
differs, cannot be checked (:meth:`Dataset.identity_files`, :meth:`Tracker.files`), or was changed while the study ran,
the study is planned as usual.  Nothing here imports torch, MLflow, pandas, matplotlib
or, before an answer is stored, pydantic.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.machinery import all_suffixes
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitlab._version import __version__
from vitlab.errors import count
from vitlab.imports import INSTALLED, last_import, stamp_of
from vitlab.store.files import DRIVER_LOCK, write_json
from vitlab.store.locks import is_locked

if TYPE_CHECKING:
    from vitlab.plan.values import Plan
    from vitlab.report.answer import Answer
    from vitlab.trackers import Tracker

FORMAT_VERSION = 2
FILE = "answer.json"
SMALL = 2**20  #: bytes up to which inputs are compared by content
PACKAGE = Path(__file__).parents[1]
IGNORED = frozenset({FILE, "driver.log", "log.txt", "lock"})
"""Names of files that no answer depends on; nor does one on hidden files, locks and folders of earlier versions."""
VARIABLES = ("VITLAB_", "MLFLOW_", "HOME", "XDG_CACHE_HOME", "CUDA_VISIBLE_DEVICES")
"""Beginnings of the names of environment variables that a plan or a delivery may depend on."""
TERMINAL = ("NO_COLOR", "FORCE_COLOR", "TERM", "COLORTERM", "PYTHONIOENCODING", "LC_ALL", "LANG")
"""Environment variables that the printed answer depends on, besides the terminal's width."""


@dataclass(frozen=True)
class StoredAnswer:
    """The printed answer of a study with nothing to train, deliver or draw."""

    folder: Path  #: of the study
    head: str  #: the size of the plan in a sentence
    text: str  #: the report for this terminal
    cached: int
    tracker: str
    link: str | None
    trained: int = 0
    failed: int = 0

    @property
    def json(self) -> str:
        """Return the report as JSON."""
        return (self.folder / "report" / "report.json").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Request:
    """The arguments and the environment of a run, and the time at which it began."""

    root: Path  #: the output folder
    file: Path  #: the study file
    digest: str
    time_ns: int  #: files of a later time have been modified since

    @classmethod
    def of(
        cls, file: str | Path, out: str | Path, changes: Mapping[str, Any] = {}, plugins: Sequence[str | Path] = ()
    ) -> Request:
        """Return the request for a study file, see :func:`vitlab.run`, with the environment of this process."""
        now, path = time.time_ns(), Path(file)
        variables = {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
        software = [FORMAT_VERSION, __version__, sys.version, sys.path, str(PACKAGE)]
        places = [str(Path.cwd()), str(Path(out).resolve()), os.path.realpath(path)]
        parts = [
            *(software, places, _content(path), sorted(variables.items())),
            *(repr(dict(changes)), [str(Path(plugin).resolve()) for plugin in plugins]),  # applied in their order
        ]
        return cls(Path(out).resolve(), path, _digest(parts), now)


def find(request: Request) -> StoredAnswer | None:
    """Return the stored answer to a request; None if there is none that is known to be valid."""
    for file in request.root.glob(f"studies/*/{FILE}"):
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            data = json.loads(file.read_bytes())
            if data["request"] != request.digest or data["terminal"] != _terminal():
                continue
            if is_locked(file.with_name(DRIVER_LOCK)):
                continue
            if data["state"] == _state(request.root, file.parent, data["trials"], data["files"]):
                return StoredAnswer(file.parent, **data["answer"])
    return None


def keep(answer: Answer, request: Request, tracker: Tracker) -> None:
    """Store the answer of a study that has just been run, or delete the stored one if it could not be checked."""
    store, plan = answer.store, answer.plan
    file = store.study(plan.study) / FILE
    with suppress(OSError):
        file.unlink(missing_ok=True)
        files = _inputs(plan, request)
        delivered = tracker.files() if answer.link is not None or not answer.tracker else None
        if answer.failed or plan.pending or files is None or delivered is None:
            return
        from vitlab import report
        from vitlab.driver.progress import size_of

        text = report.read_report(plan, store, "terminal")
        trials = sorted({f"{trial.key}/{trial.code}" for trial in _trials(plan)})
        if text is None or not all(store.trial(*name.split("/")).done() for name in trials):
            return
        files += [str(path) for path in delivered]
        skipped = sum(1 for arm in plan.arms if arm.skip)
        head = f"{plan.study}: {size_of(plan, (), store)}" + (f", {count(skipped, 'arm')} skipped" if skipped else "")
        stored = StoredAnswer(file.parent, head, str(text), answer.trained + answer.cached, answer.tracker, answer.link)
        content = {name: value for name, value in asdict(stored).items() if name not in ("folder", "trained", "failed")}
        data = {
            "request": request.digest,
            "terminal": _terminal(),
            "trials": trials,
            "files": files,
            "state": _state(store.root, file.parent, trials, files),
            "answer": content,
        }
        write_json(file, data, fsync=False)


def _state(root: Path, study: Path, trials: Sequence[str], files: Sequence[str]) -> str:
    """Return a digest of the state of everything that an answer depends on besides the request."""
    folders = [root / "trials" / name for name in trials]
    results = [hashlib.sha256((folder / "result.json").read_bytes()).hexdigest() for folder in folders]
    parts = [
        [list(_files(folder)) for folder in folders],
        list(_files(study, ("report",))),
        results,
        [(name, stamp_of(name), _content(Path(name))) for name in files],
        [(str(path), stamp_of(path)) for path in sorted(_package())],
        _distributions(),
    ]
    return _digest(parts)


def _inputs(plan: Plan, request: Request) -> list[str] | None:
    """Return the files of data and of code outside vitlab that a plan follows from.

    Returns:
        None if they are not known, or if one of them, vitlab or the study file was changed after the request.
    """
    data, code = _data_files(plan), _code_files(plan)
    if data is None or code is None:
        return None
    if any(_changed_ns(path) >= request.time_ns for path in (request.file, *data, *code, *_package())):
        return None
    for name, file in imported_files().items():
        if (last := last_import(name)) is not None and last.stamp != stamp_of(file):
            return None
    return sorted({str(path.absolute()) for path in (*data, *code)})


def _data_files(plan: Plan) -> list[Path] | None:
    """Return the files that the identities of data sets and checkpoints follow from; None if they are not known."""
    from vitlab.registry import slot

    if any(trial.files for trial in _trials(plan)):  # a checkpoint's path may lead through links
        return None
    files: list[Path] = []
    for data in {str(trial.spec.data): trial.spec.data for trial in _trials(plan)}.values():
        component = slot("dataset").build(data)
        if not _lists_its_files(type(component)):
            return None
        with suppress(Exception):  # of a plugin
            of_set = component.identity_files()
            if of_set is not None:
                files += map(Path, of_set)
                continue
        return None
    return files


def _code_files(plan: Plan) -> list[Path] | None:
    """Return the files of modules, other than vitlab's and installed ones, that the trials or this process use.

    Returns:
        None if a module has no file, such as one of a notebook.
    """
    from vitlab.identity.code import RUNNER, closure, modules_of_spec
    from vitlab.identity.source import file_of

    roots = frozenset[str]().union(
        *(modules_of_spec(trial.spec) for trial in {trial.code: trial for trial in _trials(plan)}.values())
    )
    files = {name: file_of(name) for name in closure({RUNNER, *roots}) if "==" not in name}
    for name, file in imported_files().items():
        if INSTALLED.isdisjoint(file.parts):
            files.setdefault(name, file)
    library = Path(os.__file__).parent
    own: list[Path] = []
    for name, path in files.items():
        if path is None:
            return None
        if not path.is_relative_to(PACKAGE) and (
            not path.is_relative_to(library) or not INSTALLED.isdisjoint(path.parts)
        ):
            own += [path, *_earlier_places(name, path)]
    return own


def imported_files() -> dict[str, Path]:
    """Return module to file for every module of this process that has a file."""
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    return {name: Path(file) for name, file in files.items() if isinstance(file, str)}


def _earlier_places(module: str, file: Path) -> Iterator[Path]:
    """Yield the files, none of which exists, that would be imported in place of a module's top-level package."""
    name = module.partition(".")[0]
    for place in sys.path:
        folder = Path(place or ".").absolute()
        if file.is_relative_to(folder):
            return
        yield from (folder / name / "__init__.py", *(folder / f"{name}{suffix}" for suffix in all_suffixes()))


def _lists_its_files(dataset: type) -> bool:
    """Return whether a class of data sets has files of its own; a plugin's that inherits them may read other ones."""
    for cls in dataset.__mro__:
        if "identity_files" in vars(cls):
            return True
        if cls.__module__.partition(".")[0] != PACKAGE.name:
            return False
    return False


def _trials(plan: Plan) -> list[Any]:
    """Return all trials of a plan, those of tunings and prerequisites included."""
    rivals = [planned.trial for tuning in plan.tuning for planned in tuning.trials]
    return [*(planned.trial for planned in plan.trials), *rivals, *plan.prerequisites]


def _files(folder: Path, folders: Sequence[str] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the path and stamp of every compared file below a folder.

    Args:
        folder: the folder.
        folders: names of the folders in it to enter; None for all.
    """
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name in IGNORED or entry.name.startswith(".") or entry.name.endswith((".lock", ".held")):
            continue
        if not entry.is_dir():
            yield entry.path, stamp_of(entry.path)
        elif folders is None or entry.name in folders:
            yield from _files(Path(entry.path))


def _package() -> Iterator[Path]:
    """Yield the files of vitlab."""
    for folder, folders, names in os.walk(PACKAGE):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (Path(folder, name) for name in names)


def _distributions() -> list[tuple[str, int]]:
    """Return the metadata of every installed distribution, which names its version, and its modification time."""
    found: list[tuple[str, int]] = []
    for place in sys.path:
        with suppress(OSError):
            entries = [entry for entry in os.scandir(place or ".") if entry.name.endswith((".dist-info", ".egg-info"))]
            found += [(entry.path, entry.stat().st_mtime_ns) for entry in entries]
    return sorted(found)


def _terminal() -> list[Any]:
    """Return the properties of the terminal that the text of an answer depends on."""
    width = shutil.get_terminal_size((120, 24)).columns
    is_terminal = getattr(sys.stdout, "isatty", None)
    return [width, bool(is_terminal and is_terminal()), [os.environ.get(name) for name in TERMINAL]]


def _content(file: Path) -> str | None:
    """Return a digest of a small file; None if it is large, or cannot be read, which planning reports."""
    try:
        small = os.path.isfile(file) and file.stat().st_size <= SMALL
        return hashlib.sha256(file.read_bytes()).hexdigest() if small else None
    except OSError:
        return None


def _changed_ns(file: str | os.PathLike[str]) -> int:
    """Return the time of the last change of a file or of the link to it; -1 if there is no such file."""
    try:
        return max(os.stat(file).st_ctime_ns, os.lstat(file).st_ctime_ns)
    except (OSError, ValueError):
        return -1


def _digest(parts: Iterable[Any]) -> str:
    return hashlib.sha256(json.dumps(list(parts), default=str).encode()).hexdigest()
