"""What models look at: pictures that ``vitlab run`` stored in the folders of trials for ``run.explain``."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from vitlab.planning.values import Plan
from vitlab.report.sections import Findings, Image, Section, section
from vitlab.store.files import read_json, require_mapping
from vitlab.store.folders import Store


@dataclass(frozen=True)
class StoredMap:
    """A stored picture."""

    arm: str  #: the arm
    seed: int  #: its first seed
    image: int  #: index in the test split
    of: str  #: the token whose attention it shows, ``mean`` of the patches, or ``attribution`` to a class
    file: str  #: its file, below the output folder


@section.register("explained")
class Explained(Section[StoredMap]):
    """Maps of the first seed of each arm: its attention, and the patches for and against the class that it predicts."""

    heading = "What models look at"
    place = 110
    row = StoredMap
    about = (
        "The image, and over it a map of each model, its prediction, and the probability of the class without the "
        "map's largest patches and without random ones. Attention is of a token, over all blocks: the mark on the "
        "scale is the mean, the uniform share. It shows where a model looks, and is no proof why. Colours of "
        "two pictures are not comparable, because each has its own scale. The check counts the random choices of as "
        "many patches that leave a higher probability than the largest patches do; 'vitlab explain' writes a page that "
        "explains each number."
    )

    def inputs(self, plan: Plan, store: Store) -> object:
        return [asdict(row) for row in _iter_maps(plan, store)], _read_reasons(plan, store)

    def rows(self, findings: Findings) -> list[StoredMap]:
        return list(_iter_maps(findings.plan, findings.store)) if findings.store else []

    def notes(self, rows: Sequence[StoredMap], findings: Findings) -> Iterator[str]:
        for reason, arms in (_read_reasons(findings.plan, findings.store) if findings.store else {}).items():
            yield f"Missing in {self.heading}: {'; '.join(arms)}: {reason.rstrip('.')}."

    def images(self, rows: Sequence[StoredMap], store: Store) -> Iterator[Image]:
        for row in sorted(rows, key=lambda row: (row.image, row.of == "attribution", row.of)):
            titles = {"mean": "attention of the patches", "attribution": "patches for and against the class"}
            heading = f"Test image {row.image}, {titles.get(row.of, f'attention of the {row.of} token')}"
            yield Image(file=store.root / row.file, caption=f"{row.arm}, seed {row.seed}; own scale", heading=heading)


def reasons_file(plan: Plan, store: Store) -> Path:
    """Return the file with the reasons, by arm, why the last run that was to explain a study's arms did not."""
    return store.study(plan.study) / "unexplained.json"


def _read_reasons(plan: Plan, store: Store) -> dict[str, list[str]]:
    """Return the reasons why arms are not explained, each with its arms."""
    arms = defaultdict[str, list[str]](list)
    for arm, reason in (read_json(reasons_file(plan, store), require_mapping) or {}).items():
        if arm in plan.first_trials:
            arms[reason].append(arm)
    return arms


def _iter_maps(plan: Plan, store: Store) -> Iterator[StoredMap]:
    if not reasons_file(plan, store).exists():  # maps of a trial that another study explained
        return
    for arm, planned in plan.first_trials.items():
        # Those of attribution.png and rollout_*.png; test-12 after test-3.
        files = store.folder(planned.trial).path.glob("explain/test-[0-9]*/[ar]*.png")
        for file in sorted(files, key=lambda file: (len(file.parent.name), file)):
            image, of = int(file.parent.name.removeprefix("test-")), file.stem.removeprefix("rollout_")
            yield StoredMap(arm, planned.seed, image, of, file.relative_to(store.root).as_posix())
