"""Metrics beside the judged one: of each head of an arm, and on corrupted test images."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vitlab.report.phrasing import PLUS_MINUS, Column, Scale
from vitlab.report.sections import Findings, Section, Table, finite_or_none, section
from vitlab.statistics.replicates import NAN
from vitlab.store.result import Ending

if TYPE_CHECKING:
    import pandas as pd

    from vitlab.report.report import Report

ERROR = "test/mce"
"""Mean error over corruptions; ``test/mce_NAME`` is the error on one of them."""
RELATIVE = "relative to the baseline"
MAX_COLUMNS = 5  #: of more metrics, such as one for each class, each has a line
MAX_LINES = 20  #: of more metrics, a terminal shows the first


@dataclass(frozen=True)
class MetricOfArm:
    """A metric of an arm over its seeds."""

    arm: str  #: the arm
    metric: str  #: its column in the results; of corrupted images also ``relative to the baseline``
    mean: float | None  #: mean over the seeds that are done; missing where the arm does not have the metric
    sd: float | None  #: their sample standard deviation; missing for one


class FurtherMetrics(Section[MetricOfArm]):
    """A table of metrics by arm: a line for each arm, or for each of many metrics."""

    row = MetricOfArm
    of_seeds = True
    caption: ClassVar[str]

    def metrics_frame(self, findings: Findings, done: pd.DataFrame) -> pd.DataFrame:
        """Return the metrics, one column each, of the trials that are done."""
        raise NotImplementedError

    def rows(self, findings: Findings) -> Iterator[MetricOfArm]:
        """Return the mean and the standard deviation of each metric over the seeds of each arm."""
        frame = findings.results.frame
        done = frame[frame["status"] == Ending.DONE]
        for arm, values in self.metrics_frame(findings, done).groupby(done["arm"], sort=False):
            if values.notna().any(axis=None):
                means, sds = (finite_or_none(column.to_dict()) for column in (values.mean(), values.std()))
                yield from (MetricOfArm(str(arm), name, mean, sds[name]) for name, mean in means.items())

    def table(self, rows: Sequence[MetricOfArm], report: Report) -> Table:
        by_metric = defaultdict[str, list[MetricOfArm]](list)  # each has every arm
        for row in rows:
            by_metric[row.metric].append(row)
        names = [name for name, of_arms in by_metric.items() if any(row.mean is not None for row in of_arms)]
        many = len(names) > MAX_COLUMNS
        caveat = f"A terminal shows the first {MAX_LINES} of {len(names)} metrics." * (len(names) > MAX_LINES)
        lines = [("metric" if many else "arm", *dict.fromkeys(row.arm for row in rows))]
        for name in names:
            scale = Scale.of(name, report.units)
            decimals = scale.decimals_for_values([row.mean for row in by_metric[name]], 1, 3)
            cells = (scale.mean_with_sd(row.mean, row.sd, decimals) for row in by_metric[name])
            lines.append((scale.title.removeprefix("test mce_"), *cells))
        columns = [
            Column(title, tuple(cells), min(place, 4), right=place > 0)
            for place, (title, *cells) in enumerate(zip(*lines, strict=True) if many else lines)
        ]
        caption = f"{self.caption}: mean {PLUS_MINUS} standard deviation over seeds. No verdict rests on them. {caveat}"
        return Table(columns, caption.rstrip(), caveat, MAX_LINES if many else None)


@section.register("heads")
class Heads(FurtherMetrics):
    """Metrics of arms with several heads, and those that a study asks for by ``train.metrics``."""

    heading = "Further metrics"
    place = 70
    caption = "Metrics that train.metrics asks for, or of each head of an arm"

    def metrics_frame(self, findings: Findings, done: pd.DataFrame) -> pd.DataFrame:
        """Return accuracies and cosine of heads; with ``train.metrics``, all metrics but the usual and the judged.

        Metrics are of the split of the judged one, and of test images.
        """
        split, _, judged = findings.plan.analysis.metric.partition("/")
        named = {
            choice.bare_name.replace("top_k", f"top{choice.options.get('k')}")
            for planned in findings.plan.trials
            for choice in planned.trial.spec.train.metrics
        }
        if named:
            left_out = {judged, f"{judged}@best", *({"loss", "ece", "top5"} - named)}
            return done[
                [
                    name
                    for name in done.columns
                    if name.startswith((f"{split}/", "test/"))
                    and name.partition("/")[2] not in left_out
                    and not name.startswith(ERROR)
                ]
            ]
        accuracies = [name for name in done.columns if name.startswith(f"{split}/accuracy_")]
        return done.reindex(columns=[*accuracies, f"{split}/token_cosine"] if accuracies else [])


@section.register("corrupted")
class Corrupted(FurtherMetrics):
    """Errors of every arm on corrupted test images."""

    heading = "Corrupted test images"
    place = 80
    caption = (
        "Mean error over corruptions and severities; its ratio to the baseline's at the same seed, averaged over "
        "corruptions (arXiv:1903.12261, with the baseline in the place of AlexNet); and the error on each corruption"
    )

    def metrics_frame(self, findings: Findings, done: pd.DataFrame) -> pd.DataFrame:
        """Return the mean error, its ratio to the baseline's, and the error on each corruption."""
        import pandas as pd

        kinds = [name for name in done.columns if name.startswith(f"{ERROR}_")]
        if not kinds:
            return done[[]]
        errors = done.set_index(["arm", "seed"])[kinds]
        # At the same seed both arms saw the same batches, so that the ratio scatters less than either error.
        of_baselines = errors.reindex(pd.MultiIndex.from_frame(done[["baseline", "seed"]]))
        ratios = (errors.to_numpy() / of_baselines.to_numpy()).mean(axis=1)
        relative = pd.Series(ratios, done.index).replace(math.inf, NAN)  # of a baseline without errors
        return done[[ERROR, *kinds]].assign(**{RELATIVE: relative})[[ERROR, RELATIVE, *kinds]]
