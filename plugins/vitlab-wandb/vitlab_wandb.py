"""Weights & Biases as a tracker: one run per trial, written when the trial has ended.

W&B cannot continue an offline run, so a trial is delivered whole.  A run's id follows from the trial and the beginning
of its training: a delivery that is repeated replaces the run, and a retrained trial has a new one.  W&B's own process
writes the file of an offline run, mostly after ``write_study`` has returned, so a delivery waits for its end.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitlab.plugin import Cursor, Plan, Replay, RunSpec, Store, TrialUpdate, records

if TYPE_CHECKING:
    from wandb.proto.wandb_internal_pb2 import Record

WAIT_S = 30.0  #: time within which W&B's process is to complete the file of an ended run
BLOCK, HEADER = 32768, 7  #: bytes of a block of W&B's files, which are LevelDB logs, and of a record's header


class WandB(Replay):
    """Runs of Weights & Biases: curves by step, final values, every option of the trial, and its arm as the group.

    Args:
        plan: the study.
        store: the output folder.
        run: where and how trials run.
        mode: ``offline`` writes folders that ``wandb sync`` sends; ``online`` sends each trial as it ends, with the
            key of ``wandb login`` or WANDB_API_KEY, and is not set by a study file.
        project: the project; by default the study's name.
        entity: user or team; by default the user's.
    """

    title = "wandb"
    whole_trials = True

    def __init__(
        self,
        plan: Plan,
        store: Store,
        run: RunSpec,
        *,
        mode: Literal["offline", "online"] = "offline",
        project: str | None = None,
        entity: str | None = None,
    ) -> None:
        super().__init__(plan, store, run)
        self.mode, self.project, self.entity = mode, project or plan.study, entity

    @classmethod
    def reason_to_confirm(cls, option: str, value: Any, root: Path) -> str:
        """Return why ``mode: online`` must be confirmed."""
        sends = (option, value) == ("mode", "online")
        return "it sends results to a server; give it as --set run.tracker.mode=online" if sends else ""

    def place(self) -> str:
        """Return the mode and the project."""
        return f"{self.mode}:{self.entity or ''}/{self.project}"

    def write(self, news: TrialUpdate, mark: Cursor | None) -> Cursor:
        """Write the run of an ended trial, and return its id."""
        import wandb

        item, end = news.item, news.end
        name = hashlib.blake2b(f"{item.identity}/{news.began}".encode(), digest_size=8).hexdigest()
        for earlier in {name, mark or name}:
            self.remove_trial(earlier)
        run = wandb.init(
            **{"project": self.project, "entity": self.entity, "id": name, "name": item.name, "dir": self.store.root},
            **{"group": item.planned.arm or item.kind, "job_type": item.kind, "config": dict(item.params)},
            **{"mode": self.mode, "resume": "allow" if self.mode == "online" else None, "reinit": "create_new"},
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
                x_disable_meta=True,
            ),
        )
        values = dict[int, dict[str, float]]()
        for event in news.events:
            if event.kind == "metrics":
                at_step = values.setdefault(event.body["step"], {})
                at_step.update((point.name, point.value) for point in records.points(event))
        # The best weights are measured last, at an earlier step, and W&B drops what comes after a later one.
        for step in sorted(values):
            run.log(values[step], step=step)
        if end is not None and end.result is not None:
            finals = records.final_points(end.result, self.plan.analysis)
            run.summary.update({point.name: point.value for point in finals})
        run.finish(exit_code=0 if end is not None and end.how == "done" else 1)
        if self.mode == "offline":
            self._await_end(name)
        return name

    def write_study(self, report: Sequence[Path]) -> str:
        """Return the command that sends the runs, or W&B's address."""
        if self.mode == "online":
            return os.environ.get("WANDB_BASE_URL", "https://wandb.ai")
        return f"wandb sync {self.store.root}/wandb/offline-run-*"

    def holds(self, mark: Cursor) -> bool:
        """Return True if an offline run is there; what W&B's server has is not asked."""
        return self.mode == "online" or bool(self._folders(mark))

    def remove_trial(self, mark: Cursor) -> None:
        """Delete an offline run."""
        for folder in self._folders(mark):
            shutil.rmtree(folder)

    def stored_points(self, mark: Cursor) -> Iterator[tuple[str, float, int]]:
        """Yield the measurements of an offline run."""
        for record in self._records(mark):
            for item in record.history.item:
                key = item.key or "/".join(item.nested_key)
                if not key.startswith("_"):
                    yield key, float(json.loads(item.value_json)), record.history.step.num

    def _await_end(self, mark: Cursor) -> None:
        """Wait until the file of an offline run has the run's end.

        Raises:
            TimeoutError: if it does not have it in time; the trial is then delivered again.
        """
        until = time.monotonic() + WAIT_S
        while not any(record.HasField("exit") for record in self._records(mark)):
            if time.monotonic() > until:
                raise TimeoutError(f"W&B has not written the end of run {mark} within {WAIT_S:.0f} s")
            time.sleep(0.005)

    def _records(self, mark: Cursor) -> Iterator[Record]:
        """Yield what the file of an offline run has."""
        from wandb.proto.wandb_internal_pb2 import Record

        for folder in self._folders(mark):
            yield from map(Record.FromString, records_of((folder / f"run-{mark}.wandb").read_bytes()))

    def _folders(self, mark: Cursor) -> list[Path]:
        """Return the folders of an offline run; a mark of foreign results may be anything."""
        is_id = isinstance(mark, str) and re.fullmatch(r"[0-9a-f]{16}", mark)
        return sorted((self.store.root / "wandb").glob(f"offline-run-*-{mark}")) if is_id else []


def records_of(data: bytes) -> Iterator[bytes]:
    """Yield the complete records of a LevelDB log, which may lie in several blocks."""
    place, record = HEADER, b""  # W&B's own header is as long as a record's
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (1, 4) and place <= len(data):  # whole, or the last part
            yield record
            record = b""
