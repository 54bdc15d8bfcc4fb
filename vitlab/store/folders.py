"""The store: one folder per trial, shared by all studies; the authoritative record of the trial.

    trials/<key>/<code>/
        spec.json          what the trial is; once it has ended, beside weights alone, for result.json says it, too
        lock               held by the process that writes here; see locks.py
        events.jsonl       the journal, one event per line
        checkpoint/        the state to resume from
        weights.safetensors  the final weights, if kept; weights-NAME.safetensors the best ones, or those of a step
        predictions.parquet
        result.json        written last, atomically
        failure.json       why the last attempt ended without a result
        log.txt            what its workers have printed, if anything

Files are written atomically, and damaged ones count as absent (:mod:`vitlab.store.files`).
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vitlab.errors import UserError
from vitlab.spec.tree import Tree, parse_as, type_adapter
from vitlab.store.files import (
    DAMAGED,
    DRIVER_LOCK,
    append_json,
    check_safetensors_header,
    display_path,
    find_abandoned_files,
    fsync_all,
    parse_json,
    read_complete_lines,
    read_json,
    read_stored,
    remove,
    require_mapping,
    set_aside,
    set_aside_damaged,
    to_safe_name,
    truncate_torn_line,
    write_json,
)
from vitlab.store.locks import Busy, hold_lock, is_locked, raise_if_lock_lost
from vitlab.store.result import Count, Ending, Failure, Measurement, Millis, TrialResult

if TYPE_CHECKING:
    from vitlab.identity.trial import Trial


class Keep(NamedTuple):
    """The weights that stay after a trial, as ``run.keep`` says."""

    last: bool = True
    every: int = 0  #: steps between further ones; 0 for none
    best: tuple[str, str] | None = None  #: metric and goal, ``max`` or ``min``, of the best ones; None for none

    @property
    def best_name(self) -> str:
        """Name of the best weights, with the metric: studies that share a trial may choose by different ones."""
        assert self.best is not None
        return f"best-{to_safe_name(self.best[0].removeprefix('val/'))}"


LAST = Keep()
PAUSED = "paused"  #: state of a trial with a checkpoint, from which the next run goes on
OPEN = ("running", PAUSED, "missing")  #: statuses of trials that have not ended
STATUSES = (Ending.DONE, Ending.DIVERGED, Ending.FAILED, *OPEN)
CHECKPOINT = "last.safetensors"  #: in the folder of checkpoints
OUT = Path("vitlab-runs")
"""Default output folder."""


@dataclass(frozen=True)
class Event:
    """One line of a journal.  ``t`` is the time of the event in milliseconds since 1970."""

    t: int
    kind: str  #: start, metrics, artifact, end
    body: Tree


@dataclass(frozen=True)
class TrialFolder:
    """The folder of one trial under one version of the code."""

    path: Path

    @property
    def checkpoint(self) -> Path:
        """Path of the checkpoint."""
        return self.path / "checkpoint"

    @property
    def weights_file(self) -> Path:
        """Path of the weights."""
        return self.path / "weights.safetensors"

    @property
    def predictions(self) -> Path:
        """Path of the predictions."""
        return self.path / "predictions.parquet"

    @property
    def spec(self) -> Path:
        """Path of the spec."""
        return self.path / "spec.json"

    def result(self) -> TrialResult | None:
        """Return the result, or None if the trial has not ended or its result is damaged."""
        return read_stored(self.path / "result.json", self._parse_own_result)

    def done(self) -> bool:
        """Return True if the trial has a result."""
        return self.result() is not None

    def state(self) -> str:
        """Return one of ``STATUSES``."""
        if (result := self.result()) is not None:
            return result.status
        if self.is_locked():
            return "running"
        if self.failure() is not None:
            return Ending.FAILED
        return PAUSED if self.checkpoint.exists() else "missing"

    def expected_weights_files(self, keep: Keep, steps: int) -> list[Path]:
        """Return the files of weights, beside the last ones, that a training of so many steps leaves."""
        names = [keep.best_name] if keep.best is not None else []
        names += [f"step-{step}" for step in range(keep.every, steps + 1, keep.every)] if keep.every else []
        return [self.path / f"weights-{name}.safetensors" for name in names]

    def result_unless_weights_lost(self, keep: Keep) -> TrialResult | None:
        """Return the result; None if there is none, or if ``run.keep`` asks for weights and they are missing."""
        result = self.result()
        if result is None or not keep.last or result.status != Ending.DONE:
            return result
        files = self.expected_weights_files(keep, result.outcome.steps)
        is_kept = self.has_weights() and all(read_stored(file, check_safetensors_header) is not None for file in files)
        return result if is_kept else None

    def has_weights(self) -> bool:
        """Return True if another trial can start from this one: it has ended, and its weights exist undamaged."""
        return self.done() and read_stored(self.weights_file, check_safetensors_header) is not None and self._has_spec()

    def _has_spec(self) -> bool:
        return read_json(self.spec, require_mapping) is not None

    def _parse_own_result(self, file: Path) -> TrialResult:
        """Parse a result.

        Raises:
            ValueError: If it is damaged, or belongs to another trial.
        """
        # In one pass, because every trial of a study is read by commands that only count them.
        result: TrialResult = type_adapter(TrialResult).validate_json(file.read_bytes())
        trials, key, code = self.path.parts[-3:] if len(self.path.parts) > 3 else ("", "", "")
        if trials == "trials" and (key, code) != (result.key, result.code):
            raise ValueError(f"it is the result of trial {result.key[:16]}/{result.code[:16]}")
        return result

    def write_result(self, result: TrialResult) -> None:
        """Write the result last, after all other files of the trial are synced to the disk.

        It says what the trial is, so that spec.json stays only beside weights: large studies count files.
        """
        weights = [*self.path.glob("weights*.safetensors")]
        fsync_all([file for file in (self.spec, self.predictions, *weights) if file.exists()])
        self.raise_if_lock_lost()
        write_json(self.path / "result.json", {**asdict(result), "trial": read_json(self.spec, require_mapping)})
        if not weights:
            self.spec.unlink(missing_ok=True)
        self.clear_failure()

    def remove_checkpoint_and_restore_spec(self, spec: Tree | None = None) -> None:
        """Remove the checkpoint of a trial that has ended, and restore a damaged or missing spec.json beside weights.

        A checkpoint remains if a worker was killed between writing the result and deleting it.

        Args:
            spec: The trial in JSON values, if known.
        """
        lacks_spec = spec is not None and self.weights_file.exists() and not self._has_spec()
        if (lacks_spec or self.checkpoint.exists()) and self.done():
            with suppress(Busy, OSError, UserError), self.lease():
                remove(self.checkpoint)
                if lacks_spec:
                    write_json(self.spec, spec)

    def remove_empty_log(self) -> None:
        """Delete the log of a worker that has printed nothing."""
        log = self.path / "log.txt"
        with suppress(OSError):  # it does not exist
            if not log.lstat().st_size:
                log.unlink()

    def failure(self) -> Failure | None:
        """Return the stored failure of the last attempt; None if none is stored."""
        return read_json(self.path / "failure.json", partial(parse_as, Failure))

    def write_failure(self, failure: str, traceback: str = "", kind: Ending = Ending.ERROR) -> None:
        """Write failure.json: why an attempt ended without a result."""
        self.raise_if_lock_lost()
        write_json(self.path / "failure.json", asdict(Failure(failure, kind, traceback, time.time())))

    def mark_failed(self, failure: str, kind: Ending) -> None:
        """Mark the trial as failed for good, so that it is not tried again.

        The given failure is used if the worker left none.  Without this mark a failure ends one attempt alone, and
        the next driver tries again.
        """
        last = self.failure() or Failure(failure, kind, "", time.time())
        write_json(self.path / "failure.json", {**asdict(last), "has_failed_for_good": True})

    def has_failed_for_good(self) -> bool:
        """Return True if the trial failed and runs again only on request."""
        failure = self.failure()
        return failure is not None and failure.has_failed_for_good

    def clear_failure(self) -> None:
        """Delete failure.json, so that the trial can run again.  A damaged one is set aside."""
        file = self.path / "failure.json"
        if self.failure() is None:
            set_aside_damaged(file)
        else:
            file.unlink(missing_ok=True)

    @property
    def lock(self) -> Path:
        """Path of the lock."""
        return self.path / "lock"

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Hold the lock of the trial while writing to its folder; see :func:`vitlab.store.locks.hold_lock`.

        Raises:
            Busy: if another process holds it.
        """
        with hold_lock(self.lock):
            yield
            if (self.path / "result.json").exists():  # nothing is written any more; large studies count files
                self.lock.unlink(missing_ok=True)

    def raise_if_lock_lost(self) -> None:
        """Check that no other process has taken over the lock of this process; nothing may be written then.

        Raises:
            LockLost: If another process has.
        """
        raise_if_lock_lost(self.lock)

    def is_locked(self) -> bool:
        """Return True if a process holds the lock.  Nothing is written, so that read-only folders work."""
        return is_locked(self.lock)

    # -- journal -------------------------------------------------------------------------------------------------------

    def emit(self, kind: str, **body: Any) -> None:
        """Append an event to the journal in one ``write``, so that only the last line of a killed worker can be torn.

        Raises:
            OSError: If the disk is full; the journal is then unchanged.
        """
        self.raise_if_lock_lost()
        append_json(self.journal, {"t": int(time.time() * 1000), "kind": kind, **body})

    def prepare_for_attempt(self) -> None:
        """Prepare the folder for an attempt; call it first after taking the lock.

        Truncate a torn last line of the journal, delete temporary files of killed writers, set damaged files aside and
        delete an earlier failure.

        Raises:
            LockLost: If another process has taken the trial over; then nothing is changed.
        """
        self.raise_if_lock_lost()
        self.clear_failure()
        if self.result() is None:
            set_aside_damaged(self.path / "result.json")
        if self.checkpoint.exists() and not self.checkpoint.is_dir():
            set_aside(self.checkpoint)
        truncate_torn_line(self.journal)
        names = (self.weights_file.name, self.predictions.name, self.spec.name, "result.json", "failure.json")
        temporary_prefixes = (".weights-", *(f".{name}." for name in names))
        for name in os.listdir(self.path) if self.path.is_dir() else ():
            if name.startswith(temporary_prefixes):
                remove(self.path / name)

    @property
    def journal(self) -> Path:
        """Path of the journal."""
        return self.path / "events.jsonl"

    def journal_size(self) -> int:
        """Return the size of the journal in bytes; 0 if there is none."""
        try:
            return self.journal.stat().st_size
        except FileNotFoundError:
            return 0

    def events(self, offset: int = 0) -> tuple[list[Event], int]:
        """Return the events of the journal from a byte offset on, and the offset for the next call.

        A torn last line is left for the next call.  Damaged lines are skipped; the result holds their metrics too.
        """
        lines, offset = read_complete_lines(self.journal, offset)
        events = []
        for line in lines:
            with suppress(ValueError, LookupError, AttributeError, TypeError, RecursionError):
                events.append(_parse_event(parse_json(line)))
        return events, offset


@dataclass(frozen=True)
class Store:
    """The output folder: trials of all studies, and one folder per study."""

    root: Path

    def command(self, name: str, study: str) -> str:
        """Return the command line of a vitlab command that reads a study here: ``vitlab status NAME --out FOLDER``."""
        root = display_path(self.root)
        return shlex.join(["vitlab", name, study, *([] if root == str(OUT) else ["--out", root])])

    def trial(self, key: str, code: str) -> TrialFolder:
        """Return the folder of a trial under a digest of the code."""
        return TrialFolder(self.root / "trials" / key / code)

    def folder(self, trial: Trial) -> TrialFolder:
        """Return the folder of a trial."""
        return self.trial(trial.key, trial.code)

    def folders_of_codes(self, key: str) -> list[TrialFolder]:
        """Return the folders of a trial under all digests of the code."""
        return list(map(TrialFolder, _list_folders(self.root / "trials" / key))) if key else []

    def study(self, name: str) -> Path:
        """Return the path of a study's folder."""
        return self.root / "studies" / name

    def driver_lock(self, study: str) -> Path:
        """Return the lock file of a study's driver."""
        return self.study(study) / DRIVER_LOCK

    def trial_folders(self) -> Iterator[TrialFolder]:
        """Yield the folders of all trials, in order; files such as .DS_Store are left out, and no link is followed."""
        for key in _list_folders(self.root / "trials"):
            yield from self.folders_of_codes(key.name)

    def find_leftover_files(self) -> list[Path]:
        """Return the files that nothing reads: abandoned temporary files, and damaged files that were set aside."""
        folders = [self.root]
        for top in (self.root / "studies", self.root / "trials"):
            folders += [Path(folder) for folder, _, _ in os.walk(top)]  # follows no link
        damaged = [path for folder in folders for path in folder.glob(f"*{DAMAGED}*")]
        return sorted({*damaged, *(file for folder in folders for file in find_abandoned_files(folder))})


def _list_folders(folder: Path) -> list[Path]:
    """Return the folders in a folder, in order, without links to folders; empty if it cannot be read."""
    with suppress(OSError), os.scandir(folder) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    return []


def _parse_event(body: Any) -> Event:
    """Return the event of a line of a journal.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: if the line is damaged.
    """
    t, kind = type_adapter(Millis).validate_python(body.pop("t")), body.pop("kind")
    if kind == "metrics":
        parse_as(Measurement, {"images": 0, **body})  # readers need no number of images
    elif kind == "start":
        for name in ("step", "steps"):
            type_adapter(Count).validate_python(body.get(name, 0))
    elif not isinstance(kind, str):
        raise TypeError("a kind is text")
    return Event(t, kind, body)
