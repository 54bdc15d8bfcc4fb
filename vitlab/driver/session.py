"""A session: what the parts of a run share, and the observer that shows its progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vitlab.identity.trial import Trial
from vitlab.plan.values import Plan, Planned
from vitlab.spec import RunSpec
from vitlab.store.folders import Store, TrialFolder
from vitlab.store.result import Ending
from vitlab.trackers import Tracker, Untracked


class Watch:
    """Observer of a run.  The methods of the base class do nothing."""

    def on_plan(self, plan: Plan, todo: Sequence[Planned], store: Store) -> None:
        """Handle the plan; ``todo`` are the trials to train."""

    def on_start(self, planned: Planned) -> None:
        """Handle the submission of a trial to a worker."""

    def on_end(self, planned: Planned, ending: Ending, detail: str) -> None:
        """Handle the end of a trial (done, failed, refused or stopped), or of an attempt that is tried again."""

    def tick(self) -> None:
        """Refresh the display; called regularly."""

    def say(self, sentence: str) -> None:
        """Show a message."""

    def close(self) -> None:
        """Close the display."""


@dataclass(frozen=True)
class Session:
    """One run of a study: where its trials are stored, how they run, and who is told about them."""

    store: Store
    run: RunSpec
    plugins: Sequence[str | Path] = ()  #: files of components
    watch: Watch = field(default_factory=Watch)
    tracker: Tracker = field(default_factory=Untracked)

    def folder(self, trial: Trial) -> TrialFolder:
        """Return the folder of a trial."""
        return self.store.trial(trial.key, trial.code)

    @property
    def plugin_files(self) -> tuple[str, ...]:
        """Paths of the files of components, for workers in other folders."""
        return tuple(str(Path(plugin).resolve()) for plugin in self.plugins)


def name_of(trial: Trial) -> str:
    """Return ``key/code``, by which a training is named."""
    return f"{trial.key}/{trial.code}"
