"""``vitlab report``, ``compare`` and ``judge``: reports on a study, on two, and on results of other programs."""

import sys
from pathlib import Path
from typing import Any

import click

from vitlab.cli import print_json, wants_json
from vitlab.cli.completion import complete_study
from vitlab.cli.options import (
    PATH,
    loading_plugin_option,
    out_option,
    parse_changes,
    parse_numbers,
    set_option,
    study_argument,
)
from vitlab.report import FORMATS, render
from vitlab.report.api import open_study

_format_option = click.option(
    "--format",
    "form",
    type=click.Choice(tuple(FORMATS)),
    default="terminal",
    callback=lambda context, parameter, value: value if context.obj is None else "json",  # --json is short for it
    help="latex: the arms, in the width of a paper; latex-all: every table with all its columns.",
)


@click.command()
@study_argument
@out_option
@set_option
@loading_plugin_option
@_format_option
def report_command(study: Path, out: Path, changes: tuple[str, ...], form: str) -> None:
    """Print the report of STUDY: of the version that its file is, or of the latest run where its name is given.

    NAME@VERSION is an earlier version; 'vitlab studies' lists them.
    """
    plan, store = open_study(study, out=out, changes=parse_changes(changes))
    _print_report(render(plan, store, form), form)


@click.command()
@click.argument("first", type=PATH, shell_complete=complete_study)
@click.argument("second", type=PATH, shell_complete=complete_study)
@out_option
@_format_option
def compare_command(first: Path, second: Path, out: Path, form: str) -> None:
    """Compare every arm of SECOND with the arm of that name in FIRST (their files or folders)."""
    from vitlab.report.two_studies import compare_studies

    _print_report(compare_studies(open_study(first, out=out), open_study(second, out=out)).render(form), form)


EXAMPLES = """\b
Examples:
  vitlab judge results.csv --arm model --seed seed --metric acc
  vitlab judge sqlite:///mlflow.db#EXPERIMENT --arm model --seed seed --metric acc
  vitlab judge http://HOST:5000/#/experiments/ID --arm model --seed seed --metric acc
"""


@click.command(epilog=EXAMPLES)
@click.argument("results", type=click.Path(readable=False))  # or an address
@click.option("--metric", help="Column of the metric; of a table with a column per arm, its name.  [required]")
@click.option("--arm", help="Column of the arms; by default the one that is called so, or else every column is an arm.")
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
@click.option("--alpha", type=float, default=0.05, help="Family-wise error rate.")
@click.option("--images", type=int, help="Images that the metric counts: one is its smallest step.")
@click.option(
    "--chance",
    type=float,
    help="What guesses reach, in the column's units, as 10 in percent of 10 classes; lost seeds are judged with it.",
)
@click.option(
    "--looks",
    type=parse_numbers,
    metavar="N,N,...",
    help="Numbers of seeds at which results were looked at, and now, as 3,5,10.",
)
@_format_option
def judge_command(results: str, form: str, **options: Any) -> None:
    """Judge RESULTS of other programs as 'vitlab report' judges a study's.

    RESULTS is a table (.csv, .tsv, .json, .jsonl, .parquet, .xlsx) or an experiment of MLflow. Every row or run is one
    training. The columns of an experiment are the parameters, tags and metrics of its runs, whose last values count.
    """
    from vitlab.judging.judgement import judge

    _print_report(judge(results, **options).render(form), form)


def _print_report(rendered: str | bytes, form: str) -> None:
    if wants_json():
        print_json(rendered)
        return
    if isinstance(rendered, bytes) and sys.stdout.isatty():
        raise click.UsageError(f"{form} cannot be printed on a terminal; redirect it to a file")
    data = rendered if isinstance(rendered, bytes) else f"{rendered.removesuffix(chr(10))}\n".encode()
    sys.stdout.buffer.write(data)
