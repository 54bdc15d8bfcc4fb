"""Provenance: how the numbers of a report were made, and how to make them again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from vitlab.errors import count
from vitlab.plan import versions
from vitlab.plan.values import Plan
from vitlab.report.frame import StoredTrial
from vitlab.report.phrasing import duration
from vitlab.store.folders import Store
from vitlab.store.result import Ending

BUILT_IN = "vitlab"


@dataclass(frozen=True)
class Provenance:
    """The origin of the results of a report; each training counts once."""

    command: str  #: to run the study again
    place: str  #: where to run it, as ``In FOLDER``
    commit: str  #: git commit of the folder of the study; empty if there is none
    versions: Mapping[str, str]  #: library to the versions that trained
    numerics: Mapping[str, str]  #: setting that affects the last bits to its values
    components: Sequence[str]  #: origins of the components
    data: Sequence[Mapping[str, str | None]]  #: ``set`` and ``identity`` of the data
    wall_s: float  #: of all trainings together
    ended: str | None
    trained: int  #: in the last run
    cached: int  #: taken from earlier runs
    failed: int

    def lines(self) -> list[tuple[str, str]]:
        """Return the provenance as pairs of heading and text."""
        total = self.trained + self.cached + self.failed
        counts = {
            "trained in the last run": self.trained,
            "taken from earlier runs": self.cached,
            "failed": self.failed,
        }
        parts = [f"{number} {text}" for text, number in counts.items() if number]
        plugins = [origin for origin in self.components if origin.split(" ")[1:2] != [BUILT_IN]]
        training = f"{count(total, 'trial')}, whose training times add up to {duration(self.wall_s)}"
        training += f": {', '.join(parts)}" if len(parts) > 1 else ""
        lines = [
            ("To reproduce", self._reproduction()),
            ("Data", "; ".join(f"{item['set']} ({item['identity'] or 'not here yet'})" for item in self.data)),
            ("Training", training + (f"; ended {self.ended}" if self.ended else "")),
            ("Numerics", ", ".join(f"{name} {value}" for name, value in self.numerics.items())),
            ("Versions", ", ".join(f"{name} {value}" for name, value in self.versions.items())),
            ("Plugins", "; ".join(plugins)),
        ]
        return [(head, text) for head, text in lines if text]

    def _reproduction(self) -> str:
        commit = f" The folder of the study was at git commit {self.commit}." if self.commit else ""
        return (
            f"{self.place}: {self.command}.{commit} Results that are stored there are not trained again; equal bits "
            "need the data, numerics and versions named here"
        )


def provenance(plan: Plan, store: Store, trials: Sequence[StoredTrial]) -> Provenance:
    """Return the provenance: command, versions, data, time, and counts of distinct trainings."""
    trials = list({(item.planned.trial.key, item.planned.trial.code): item for item in trials}.values())
    results = [item.result for item in trials if item.result is not None]
    version = versions.version(store.study(plan.study), plan.version)
    fresh = sum(version is not None and result.circumstances.ended >= version.time for result in results)
    installed: dict[str, set[str]] = {}
    numerics: dict[str, set[str]] = {}
    for result in results:
        for name, value in result.circumstances.versions.items():
            installed.setdefault(name, set()).add(str(value))
        for name, value in result.circumstances.numerics.items():
            if str(value):  # a model without attention has no kernel
                numerics.setdefault(name, set()).add(str(value))
    data = {
        (trial.spec.data.type, None if trial.data is None else str(trial.data))
        for trial in (item.planned.trial for item in trials)
    }
    last = max((result.circumstances.ended for result in results), default=None)
    place, command, commit = _source(version, store)
    return Provenance(
        command,
        place,
        commit,
        versions={name: ", ".join(sorted(values)) for name, values in sorted(installed.items())},
        numerics={name: ", ".join(sorted(values)) for name, values in sorted(numerics.items())},
        components=sorted({origin for item in trials for origin in item.planned.trial.origins}),
        data=[{"set": name, "identity": identity} for name, identity in sorted(data, key=str)],
        wall_s=sum(result.circumstances.wall_s for result in results),
        ended=None if last is None else datetime.fromtimestamp(last, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        trained=fresh,
        cached=len(results) - fresh,
        failed=sum(item.status == Ending.FAILED for item in trials),
    )


def of_version(plan: Plan, store: Store) -> list[str]:
    """Return sentences that name the version of the study, if it has changes or is not the latest; else none."""
    study = store.study(plan.study)
    this, latest = versions.version(study, plan.version), versions.version(study)
    if this is None or latest is None:
        return []
    notes = [f"Version {this.name[:8]} of this study was run with {this.set_options}."] if this.set_options else []
    if this.name != latest.name:
        both_recorded = this.content is not None and latest.content is not None
        difference = f": {versions.differences(this.content or {}, latest.content or {})}" if both_recorded else ""
        notes.append(
            f"This is an earlier version of the study ({this.name[:8]}, run {this.when}); the latest is "
            f"{latest.name[:8]}, run {latest.when}{difference}."
        )
    return notes


def _source(version: versions.Version | None, store: Store) -> tuple[str, str, str]:
    """Return the folder, the command and the git commit to run the study again.

    Executor and tracker options are left out, because they do not affect the results.
    """
    run = {} if version is None else version.run
    place = Path(run.get("folder", ""))
    if not place.is_absolute() or not place.is_dir():
        place = store.root.parent

    def quoted(path: Path) -> str:
        return shlex.quote(str(path.relative_to(place)) if path.is_relative_to(place) else str(path))

    command = ["vitlab run"]
    if version is not None:
        command += [quoted(version.folder.resolve() / "study.yaml"), f"--out {quoted(store.root)}"]
        command += [f"--plugin {quoted(Path(plugin))}" for plugin in run.get("plugins", ())]
        command += [version.set_options] if version.set_options else []
    place_name = f"In the folder that holds {store.root.name}" if place == store.root.parent else f"In {place}"
    return place_name, " ".join(command), str(run.get("commit", ""))
