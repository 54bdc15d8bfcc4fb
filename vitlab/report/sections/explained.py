"""What models look at: attention-rollout pictures that ``vitlab explain`` stored in the folders of trials."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from vitlab.planning.values import Plan
from vitlab.report.sections import Findings, Image, Section, section
from vitlab.store.folders import Store

MAX_EMBEDDED = 12  #: pictures embedded in a page; report.json lists all


@dataclass(frozen=True)
class Rollout:
    """A stored picture."""

    arm: str  #: the arm
    seed: int  #: its first seed
    image: int  #: index in the test split
    of: str  #: the token whose attention it shows, or ``mean`` of the patches
    file: str  #: its file, below the output folder


@section.register("explained")
class Explained(Section[Rollout]):
    """Attention of the first seed of each arm, rolled out over all blocks."""

    heading = "What models look at"
    place = 110
    row = Rollout
    about = (
        "The image, and over it the attention of a token rolled out over all blocks, and the prediction. The mark on "
        "the scale is the mean, the uniform share. Attention shows where a model looks, and is no proof why."
    )

    def inputs(self, plan: Plan, store: Store) -> object:
        return [asdict(row) for row in _iter_rollout_pictures(plan, store)]

    def rows(self, findings: Findings) -> list[Rollout]:
        return list(_iter_rollout_pictures(findings.plan, findings.store)) if findings.store else []

    def notes(self, rows: Sequence[Rollout], findings: Findings) -> Iterator[str]:
        missing = findings.plan.first_trials.keys() - {row.arm for row in rows}
        if rows and missing:
            arms = "; ".join(sorted(missing))
            yield f"Not in {self.heading}: {arms}. 'vitlab explain {findings.plan.study} --arm NAME' says why."

    def images(self, rows: Sequence[Rollout], store: Store) -> Iterator[Image]:
        for row in sorted(rows, key=lambda row: (row.image, row.of))[:MAX_EMBEDDED]:
            token = "patches" if row.of == "mean" else f"{row.of} token"
            heading = f"Test image {row.image}, attention of the {token}"
            yield Image(file=store.root / row.file, caption=f"{row.arm}, seed {row.seed}", heading=heading)


def _iter_rollout_pictures(plan: Plan, store: Store) -> Iterator[Rollout]:
    for arm, planned in plan.first_trials.items():
        files = store.folder(planned.trial).path.glob("explain/test-[0-9]*/rollout_*.png")
        for file in sorted(files, key=lambda file: (len(file.parent.name), file)):  # test-12 after test-3
            image, of = int(file.parent.name.removeprefix("test-")), file.stem.removeprefix("rollout_")
            yield Rollout(arm, planned.seed, image, of, file.relative_to(store.root).as_posix())
