"""``vitlab similarity STUDY``: linear CKA between the features of a study's arms."""

from __future__ import annotations

from pathlib import Path

import click

from vitlab.cli.options import arms_option, out_option, study_argument, to_option
from vitlab.store.files import folder_name


@click.command()
@study_argument
@arms_option
@click.option("--images", type=click.IntRange(4), default=512, show_default=True, help="Number of validation images.")
@to_option("similarity", each="for each study")
@out_option
def command(study: Path, arms: tuple[str, ...], images: int, target: Path, out: Path) -> list[str]:
    """Compare the features of the arms of STUDY, block by block, on the same validation images (linear CKA).

    1 means equal up to rotation and scale. Every pair of arms is drawn beside the seeds of each, because no two arms
    are expected to be more alike than two seeds of one.
    """
    from vitlab.report.api import open_study

    plan, store = open_study(study, out=out)
    click.echo("importing PyTorch", err=True)
    from vitlab.driver.similarity import compare_features, write

    similarities = compare_features(
        plan, store, arms, images=images, say=lambda sentence: click.echo(sentence, err=True)
    )
    files = write(similarities, plan.study, target / folder_name(plan.study))
    head = "CKA of the last blocks' tokens, mean and range over pairs of seeds:"
    return [head, *(f"  {each.sentence()}" for each in similarities), *map(str, files)]
