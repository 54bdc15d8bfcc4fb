"""``vitlab judge``: a report on a table of results that other programs have trained."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import click

from vitlab.cli.compare import FORMATS
from vitlab.cli.options import format_option


class FiniteRange(click.FloatRange):
    """A range of finite numbers; click's accepts ``nan`` in every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or fail as click does."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


@click.command()
@click.argument("table", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--metric", required=True, help="Column of the metric; of a table with a column per arm, its name.")
@click.option("--arm", help="Column of the arms. Without it, every column is an arm and every row a seed.")
@click.option("--seed", help="Column of the seeds, which pair the arms. Without it, long tables are not paired.")
@click.option("--baseline", help="Arm that the others are compared with; by default 'baseline', or else the first.")
@click.option("--baselines", help="Column of the arm that each is compared with, in place of --baseline.")
@click.option("--goal", type=click.Choice(["max", "min"]), help="Better direction; by default that of the name.")
@click.option("--margin", type=FiniteRange(0, min_open=True), help="Largest difference that counts as none.")
@click.option(
    "--alpha",
    type=FiniteRange(0, 0.5, min_open=True, max_open=True),
    default=0.05,
    show_default=True,
    help="Family-wise error rate.",
)
@click.option("--images", type=click.IntRange(1), help="Images that the metric counts: one is its smallest step.")
@format_option(FORMATS)
def command(
    table: Path,
    metric: str,
    arm: str | None,
    seed: str | None,
    baseline: str | None,
    baselines: str | None,
    goal: str | None,
    margin: float | None,
    alpha: float,
    images: int | None,
    form: str,
) -> None:
    """Judge the results in TABLE (.csv, .tsv, .parquet, .jsonl) as 'vitlab report' judges a study's.

    Every row is one training:  vitlab judge results.csv --arm model --seed seed --metric acc
    """
    from vitlab.report import render_between
    from vitlab.report.external import judge

    comparison = judge(
        table,
        metric=metric,
        arm=arm,
        seed=seed,
        baseline=baseline,
        baselines=baselines,
        goal=None if goal is None else "max" if goal == "max" else "min",
        margin=margin,
        alpha=alpha,
        images=images,
    )
    sys.stdout.buffer.write(render_between(comparison, form).encode())
