"""``vitlab weights``: inspect and convert weight files of other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitlab.cli import print_json, say, wants_json
from vitlab.cli.options import PATH

if TYPE_CHECKING:
    from vitlab.weights.architecture import Architecture
    from vitlab.weights.conversion import Inspection

FORMATS = ("timm", "torchvision", "hf", "google")
RESAMPLINGS = ("timm", "google", "deit", "torchvision", "hf")

_file = click.argument("file", type=PATH)
_from = click.option("--from", "form", type=click.Choice(FORMATS), help="Recognised without it.")
_heads = click.option("--heads", type=click.IntRange(min=1), help="Attention heads, which the tensors do not show.")


def parse_size(text: str) -> tuple[int, int]:
    """Parse a size such as ``14x14``, or ``14`` for a square."""
    sides = text.lower().split("x")
    if not (len(sides) in (1, 2) and all(side.isdecimal() and int(side) > 0 for side in sides)):
        raise click.BadParameter(f"'{text}' is no size; write HxW, such as 14x14, or one number for a square.")
    return int(sides[0]), int(sides[-1])


_source_grid = click.option(
    "--source-grid",
    "grid",
    type=parse_size,
    metavar="HxW",
    help="Grid of patches of the positions in the file, if it is not square.",
)


@click.group()
def weights_command() -> None:
    """Inspect and convert files of weights: .safetensors, .pth, .pt, .bin and Google's .npz."""


@weights_command.command()
@_file
@_from
@_heads
@_source_grid
def inspect(file: Path, form: str | None, **facts: Any) -> None:
    """Show what is in a file of weights.

    That is its format, the model it belongs to, and what does not fit. FILE may be timm:NAME or hub:ORG/NAME, which
    are fetched.
    """
    from vitlab.weights.architecture import ModelFacts
    from vitlab.weights.conversion import inspect as look

    inspected = look(_fetch_if_named(file), form, ModelFacts(**facts))
    rows = _inspection_rows(inspected)
    if wants_json():
        print_json({name.replace(" ", "_"): value for name, value in rows.items()})
        return
    for name, value in rows.items():
        lines = value if isinstance(value, list) else [value]
        for index, line in enumerate(lines):
            click.echo(f"{name if index == 0 else '':18} {f'{line:,}' if isinstance(line, int) else line}".rstrip())


@weights_command.command()
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@_from
@click.option("--to", required=True, type=click.Choice(FORMATS))
@click.option(
    "--image", type=parse_size, metavar="HxW", help="Resample positions to this image size; one number for a square."
)
@click.option("--resample", default="timm", type=click.Choice(RESAMPLINGS), help="Library whose method is used.")
@click.option(
    "--head", type=click.Choice(["keep", "drop"]), default="keep", help="Also of a hidden layer (pre-logits) before it."
)
@click.option(
    "--classes",
    type=PATH,
    help="File with one index a line: the outputs of the head to keep, such as ImageNet-1k's in a head of 21k.",
)
@_heads
@_source_grid
def convert(
    source: Path,
    target: Path,
    form: str | None,
    to: str,
    heads: int | None,
    grid: tuple[int, int] | None,
    **options: Any,
) -> list[str]:
    """Write weights in another format.

    SOURCE is read and TARGET written, whose suffix decides the container. Tensors are left out only on request; a
    tensor that the other format cannot hold is an error. SOURCE may be timm:NAME or
    hub:ORG/NAME, which are fetched.
    """
    from vitlab.weights.architecture import ModelFacts
    from vitlab.weights.conversion import convert_weights_file as write

    files, notes = write(
        _fetch_if_named(source),
        target,
        to,
        source_format=form,
        facts=ModelFacts(heads=heads, grid=grid),
        **options,
    )
    for note in notes:
        say(note)
    return [str(file) for file in files]


def _fetch_if_named(file: Path) -> Path:
    """Return a file, fetched if it is ``timm:NAME`` or ``hub:ORG/NAME``."""
    kind, _, name = str(file).partition(":")
    if kind not in ("timm", "hub") or file.exists():
        return file
    from vitlab.weights.opening import fetch_by_name

    return fetch_by_name("timm" if kind == "timm" else "hub", name)


def _inspection_rows(inspected: Inspection) -> dict[str, Any]:
    from vitlab.weights.architecture import format_sides

    checkpoint, model = inspected.checkpoint, inspected.architecture
    contents, anatomy = checkpoint.contents, model.anatomy
    g = anatomy.geometry
    dtypes = sorted({str(value.dtype).removeprefix("torch.") for value in contents.tensors.values()})
    has_head = "head.weight" in checkpoint.state
    rows: dict[str, Any] = {
        "file": str(contents.file),
        "format": f"{checkpoint.form.name} ({contents.container}, {', '.join(dtypes)})",
        "tensors": len(contents.tensors),
        "parameters": sum(value.numel() for value in checkpoint.state.values()),
        "dim": g.dim,
        "depth": g.depth,
        "heads": g.heads,
        "patch": f"{format_sides(g.patch)} of {g.channels} channels, {anatomy.patch.type}",
        "grid": f"{format_sides(g.grid)} (images of {format_sides(g.image)})",
        "prefix": ", ".join(g.prefix) or "none",
        "head": anatomy.head.type if has_head else "none in the file",
        "classes": model.info.classes if has_head else 0,
        "normalised by": f"mean {_format_numbers(model.mean)}, std {_format_numbers(model.std)}",
        "model": _model_yaml(model),
    }
    remarks = {
        "opened": checkpoint.wrapper_note,
        "not read": list(checkpoint.unread),
        "assumed": list(model.assumed),
        "left out": list(checkpoint.dropped),
        **inspected.faults,
    }
    return rows | {name: value for name, value in remarks.items() if value}


def _model_yaml(model: Architecture) -> str:
    """Return the model as a study's file has it, without options at their defaults."""
    import yaml

    from vitlab.registry import slot

    options = slot("model").resolve_choice({"type": "vit", **model.options}).hashed()
    text: str = yaml.safe_dump(options, default_flow_style=True, sort_keys=False, width=10**6)
    return text.strip()


def _format_numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:g}" for value in values)
