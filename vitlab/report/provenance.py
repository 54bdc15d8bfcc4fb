"""Provenance: how the numbers of a report were made, and how to make them again."""

import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import yaml

from vitlab.errors import format_count, public
from vitlab.planning import study_folder
from vitlab.planning.values import Plan
from vitlab.report.frame import StoredTrial, read_predictions
from vitlab.report.phrasing import format_duration
from vitlab.store.folders import Store
from vitlab.store.result import Ending


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
    trained: int  #: with a result
    diverged: int  #: among these
    failed: int
    images: Sequence[str] = ()  #: training and evaluation images of one training
    study: str = ""  #: the study with the changes of the command line, in YAML; empty if it cannot be read

    def lines(self) -> list[tuple[str, str]]:
        """Return the provenance as pairs of heading and text."""
        training = (
            f"{format_count(self.trained + self.failed, 'training')}, any for tuning or teachers included"
            f"{f', {self.diverged} of them diverged' * bool(self.diverged)}"
            f"{f', {self.failed} of them failed' * bool(self.failed)}; "
            f"their times add up to {format_duration(self.wall_s)}"
        )
        commit = f" The folder of the study was at git commit {self.commit}." if self.commit else ""
        lines = [
            (
                "To reproduce",
                f"{self.place}: {self.command}.{commit} Results that are stored there are not trained again; results "
                "equal to the bit need the data, numerics and versions named here.",
            ),
            ("Study", self.study and f"\n{self.study}"),
            ("Data", "; ".join(f"{item['set']} ({item['identity'] or 'not here yet'})" for item in self.data)),
            ("Images", ", ".join(self.images)),
            ("Training", training + (f"; ended {self.ended}" if self.ended else "")),
            ("Numerics", ", ".join(f"{name} {value}" for name, value in self.numerics.items())),
            ("Versions", ", ".join(f"{name} {value}" for name, value in self.versions.items())),
            ("Plugins", "; ".join(origin for origin in self.components if origin.split(" ")[1:2] != ["vitlab"])),
        ]
        return [(head, text) for head, text in lines if text]


def collect_provenance(plan: Plan, store: Store, trials: Sequence[StoredTrial]) -> Provenance:
    """Return the provenance: command, versions, data, time, and counts of distinct trainings."""
    trials = list({item.planned.trial.name: item for item in trials}.values())
    results = [item.result for item in trials if item.result is not None]
    version = study_folder.read_version(store.study(plan.study), plan.version)
    specs = [item.planned.trial for item in trials]
    data = {(trial.spec.data.type, trial.data) for trial in specs}
    last = max((result.circumstances.ended for result in results), default=None)
    place, command, commit = rerun_instructions(version, store)
    # Not the file: its run section may have addresses with passwords, and it lacks the changes of the command line.
    content = version and version.content
    study = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, allow_unicode=True) if content else ""
    return Provenance(
        command,
        place,
        commit,
        versions=merge_distinct_values(result.circumstances.versions for result in results),
        numerics=merge_distinct_values(result.circumstances.numerics for result in results),
        components=sorted({origin for trial in specs for origin in trial.origins}),
        data=[{"set": name, "identity": identity} for name, identity in sorted(data, key=str)],
        wall_s=sum(result.circumstances.wall_s for result in results),
        ended=None if last is None else datetime.fromtimestamp(last, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        trained=len(results),
        diverged=sum(result.status == Ending.DIVERGED for result in results),
        failed=sum(item.status == Ending.FAILED and item.kind != "prerequisite" for item in trials),
        images=[*_count_images(trials)],
        study=public(study),
    )


def _count_images(trials: Sequence[StoredTrial]) -> Iterator[str]:
    """Yield the numbers of images of the last training that is done."""
    for item, result in [(item, item.result) for item in trials if item.result and item.status == Ending.DONE][-1:]:
        for last in result.outcome.history[-1:]:
            yield (
                f"{item.planned.arm}, seed {item.planned.seed}: {round(last.images / last.epoch):,} training images "
                "an epoch"
            )
        for split in ("val", "test"):
            if table := read_predictions(item.folder, split, ["id"]):
                yield f"{len(table):,} {split} images"


def merge_distinct_values(mappings: Iterable[Mapping[str, object]], separator: str = " and ") -> dict[str, str]:
    """Return each name with the distinct values that the mappings have for it."""
    values = defaultdict(set)
    for mapping in mappings:
        for name, value in mapping.items():
            if str(value):  # a model without attention has no kernel
                values[name].add(str(value))
    return {name: separator.join(sorted(distinct)) for name, distinct in sorted(values.items())}


def describe_version(plan: Plan, store: Store) -> Iterator[str]:
    """Yield sentences that name the version of the study, if it has changes or there are others; else none."""
    study = store.study(plan.study)
    this, versions = study_folder.read_version(study, plan.version), study_folder.read_versions(study)
    if this is None or not versions:
        return
    if this.set_options_text:
        yield f"Version {this.name[:8]} of this study was run with {this.set_options_text}."
    is_latest = this.name == versions[0].name
    for other in versions[1:2] if is_latest else versions[:1]:
        role = "one before" if is_latest else "latest"
        earlier, later = (other.content, this.content) if is_latest else (this.content, other.content)
        changes = ""
        if earlier is not None and later is not None:
            changes = f" (changes since the earlier one: {study_folder.format_differences(earlier, later)})"
        yield (
            f"This is version {this.name[:8]} of the study, run {this.when}; the {role} is "
            f"{other.name[:8]}, run {other.when}{changes}. 'vitlab report {plan.study}@{other.name[:8]}' prints its "
            "report."
        )


def rerun_instructions(version: study_folder.Version | None, store: Store) -> tuple[str, str, str]:
    """Return folder, command and git commit to run the study again; executor and tracker do not affect the results."""
    run = study_folder.RunRecord() if version is None else version.run
    place = Path(run.folder)
    if not place.is_absolute() or not place.is_dir():
        place = store.root.parent

    def quoted(path: Path) -> str:
        return shlex.quote(str(path.relative_to(place)) if path.is_relative_to(place) else str(path))

    command = ["vitlab run"]
    if version is not None:
        command += [quoted(version.folder.resolve() / "study.yaml"), f"--out {quoted(store.root)}"]
        command += [f"--plugin {quoted(Path(plugin))}" for plugin in run.plugins]
        command.append(version.set_options_text)
    place_name = f"In the folder that holds {store.root.name}" if place == store.root.parent else f"In {place}"
    return place_name, " ".join(filter(None, command)), run.commit
