"""``vitlab judge``: a report on results that other programs have trained, in a table or in MLflow."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import CompletionItem

from vitlab.cli.options import Numbers, format_option, print_report
from vitlab.report.formats import FORMATS


def _complete_file(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Have the shell complete the path of a table."""
    return [CompletionItem(incomplete, type="file")]


EXAMPLES = """\b
Examples:
  vitlab judge results.csv --arm model --seed seed --metric acc
  vitlab judge sqlite:///mlflow.db#EXPERIMENT --arm model --seed seed --metric acc
  vitlab judge http://HOST:5000/#/experiments/ID --arm model --seed seed --metric acc
"""


@click.command(epilog=EXAMPLES)
@click.argument("results", shell_complete=_complete_file)
@click.option("--metric", required=True, help="Column of the metric; of a table with a column per arm, its name.")
@click.option("--arm", help="Column of the arms. Without it, every column is an arm and every row a seed.")
@click.option("--seed", help="Column of the seeds, which pair the arms; by default the one that is called so.")
@click.option("--block", help="Column of data sets, or of other conditions under which every arm is trained.")
@click.option(
    "--over-blocks",
    type=click.Choice(["difference", "relative"]),
    help="What is averaged over blocks: differences, or those relative to the baseline's error.",
)
@click.option("--baseline", help="Arm that the others are compared with; by default 'baseline', or else the first.")
@click.option("--baselines", help="Column of the arm that each is compared with, in place of --baseline.")
@click.option("--goal", type=click.Choice(["max", "min"]), help="Better direction, if the name does not tell it.")
@click.option("--margin", help="Largest difference that counts as none, in the column's units or as '0.5 points'.")
@click.option("--alpha", type=float, default=0.05, show_default=True, help="Family-wise error rate.")
@click.option("--images", type=int, help="Images that the metric counts: one is its smallest step.")
@click.option("--chance", type=float, help="What guesses reach, in the column's units; lost seeds are judged with it.")
@click.option("--classes", type=int, help="Number of classes, in place of --chance for accuracies and errors.")
@click.option("--looks", type=Numbers(), help="Numbers of seeds at which results were looked at, and now, as 3,5,10.")
@format_option(tuple(FORMATS))
def command(results: str, form: str, **options: Any) -> None:
    """Judge RESULTS of other programs as 'vitlab report' judges a study's.

    RESULTS is a table (.csv, .tsv, .json, .jsonl, .parquet, .xlsx) or an experiment of MLflow. Every row or run is one
    training. The columns of an experiment are the parameters, tags and metrics of its runs, whose last values count.
    """
    from vitlab.judging.judgement import judge

    print_report(judge(results, **options).render(form), form)
