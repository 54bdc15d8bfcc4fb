"""Weights & Biases as a tracker: one run per trial, written when the trial has ended.

W&B cannot continue an offline run, so a trial is delivered whole.  A run's id follows from the trial and the beginning
of its training: a delivery that is repeated replaces the run, and a retrained trial has a new one.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from vitlab.plugin import Cursor, Plan, Replay, RunSpec, Store, TrialUpdate, records


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
    def unconfirmed(cls, option: str, value: Any, root: Path) -> str:
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
            self.drop(earlier)
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
        for event in news.events:
            if event.kind == "metrics":
                run.log({point.name: point.value for point in records.points(event)}, step=event.body["step"])
        if end is not None and end.result is not None:
            finals = records.final_points(end.result, self.plan.analysis)
            run.summary.update({point.name: point.value for point in finals})
        run.finish(exit_code=0 if end is not None and end.how == "done" else 1)
        return name

    def finish(self, report: Sequence[Path]) -> str:
        """Return the command that sends the runs, or W&B's address."""
        if self.mode == "online":
            return os.environ.get("WANDB_BASE_URL", "https://wandb.ai")
        return f"wandb sync {self.store.root}/wandb/offline-run-*"

    def holds(self, mark: Cursor) -> bool:
        """Return True if an offline run is there; what W&B's server has is not asked."""
        return self.mode == "online" or bool(self._folders(mark))

    def drop(self, mark: Cursor) -> None:
        """Delete an offline run."""
        for folder in self._folders(mark):
            shutil.rmtree(folder)

    def _folders(self, mark: Cursor) -> list[Path]:
        """Return the folders of an offline run; a mark of foreign results may be anything."""
        is_id = isinstance(mark, str) and re.fullmatch(r"[0-9a-f]{16}", mark)
        return sorted((self.store.root / "wandb").glob(f"offline-run-*-{mark}")) if is_id else []
