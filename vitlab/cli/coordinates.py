"""``vitlab coordinates FILE``: the coordinate check of a study's base."""

from __future__ import annotations

from pathlib import Path

import click

from vitlab.cli import print_lines, say
from vitlab.cli.options import Numbers, parse_changes, study_file, study_options


@click.command()
@study_options
@click.option("--widths", type=Numbers(), default="32,64,128,256", help="Values of model.dim.")
@click.option("--steps", type=click.IntRange(1), default=4, help="Optimizer steps of a training.")
@click.option("--seeds", type=click.IntRange(1), default=3, help="Seeds, over which is averaged.")
@click.option(
    "--factor",
    type=click.FloatRange(1),
    default=2.0,
    help="Largest change over widths, relative to the smallest, that counts as none.",
)
@click.pass_context
def coordinates_command(
    context: click.Context,
    file: Path,
    out: Path,
    changes: tuple[str, ...],
    plugins: tuple[Path, ...],
    widths: tuple[int, ...],
    steps: int,
    seeds: int,
    factor: float,
) -> list[str]:
    """Say whether the outputs of layers change equally at all widths, in the base of FILE (coordinate check).

    The base is trained on the CPU for a few steps at a constant rate, at every width, with model.parametrization
    standard and mup.  Exit code 1 if mup is beyond the factor.
    """
    if len(set(widths)) < 2 or min(widths) < 1:
        raise click.BadParameter("give at least two different positive widths", param_hint="--widths")
    file, widths = study_file(file), tuple(sorted(set(widths)))
    say("importing PyTorch")
    from vitlab.driver.coordinates import check_coordinates

    results = check_coordinates(
        file,
        widths,
        steps=steps,
        seeds=seeds,
        changes=parse_changes(changes),
        plugins=plugins,
        out=out,
        say=say,
    )
    head = "".join(f"{width:>11}" for width in widths)
    lines = [f"Mean absolute change of outputs after {steps} steps, by model.dim; last, largest over smallest."]
    for one in results:
        lines += ["", f"{one.parametrization:20}{head}{'ratio':>9}"]
        for layer, by_width in one.changes.items():
            numbers = "".join(f"{by_width[width]:11.3g}" for width in widths)
            lines.append(f"{layer:20}{numbers}{one.ratio(layer):9.3g}")
    lines += ["", *(one.sentence(factor) for one in results)]
    if any(one.parametrization == "mup" and one.ratio(one.worst) > factor for one in results):
        print_lines(lines)
        context.exit(1)
    return lines
