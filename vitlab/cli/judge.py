"""``vitlab judge``: a report on results that other programs have trained, in a table or in MLflow."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

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


def _complete_file(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Have the shell complete the path of a table."""
    return [CompletionItem(incomplete, type="file")]


@click.command()
@click.argument("results", shell_complete=_complete_file)
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
    results: str,
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
    r"""Judge RESULTS of other programs as 'vitlab report' judges a study's.

    RESULTS is a table (.csv, .tsv, .parquet, .jsonl) or an experiment of MLflow. Every row or run is one training:

    \b
    vitlab judge results.csv --arm model --seed seed --metric acc
    vitlab judge sqlite:///mlflow.db#EXPERIMENT --arm model --seed seed --metric acc
    vitlab judge http://HOST:5000/#/experiments/ID --arm model --seed seed --metric acc

    The columns of an experiment are the parameters, tags and metrics of its runs, of which the last values count.
    """
    from vitlab.report import render_between
    from vitlab.report.external import judge
    from vitlab.report.external_table import read_table, table_of_runs

    if "://" in results:
        from vitlab.trackers.experiment import read_experiment

        table = table_of_runs(read_experiment(results), metric=metric, arm=arm, seed=seed, baselines=baselines)
    else:
        table = read_table(Path(results))
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
