"""``vitlab explain``: what a trained model looks at."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitlab.cli.options import out_option
from vitlab.cli.weights import parse_size
from vitlab.errors import UserError

if TYPE_CHECKING:
    from vitlab.models.contract import Model
    from vitlab.training.artifacts import Transform


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--image", required=True, help="A picture, or test:17 for an image of the trial's own test split.")
@click.option(
    "--to",
    "target",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("explained"),
    show_default=True,
    help="Folder for pictures and numbers.",
)
@click.option("--arm", default="baseline", show_default=True, help="Of the study, where CHECKPOINT is one.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--fusion",
    type=click.Choice(["mean", "max", "min"]),
    default="mean",
    show_default=True,
    help="How the heads become one map in the rollout.",
)
@click.option(
    "--discard",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    show_default=True,
    help="Share of the smallest attention weights the rollout leaves out.",
)
@click.option("--heads", type=click.IntRange(min=1), help="Of a file of weights, where the file does not say.")
@click.option("--grid", metavar="HxW", help="Patches that the positions in a file of weights are for.")
@click.option(
    "--normalize",
    type=click.Choice(["half", "imagenet", "unit"]),
    help="Of a file of weights, if not as is the custom.",
)
@out_option
def command(
    checkpoint: Path,
    image: str,
    target: Path,
    arm: str,
    seed: int,
    fusion: Any,
    discard: float,
    heads: int | None,
    grid: str | None,
    normalize: str | None,
    out: Path,
) -> None:
    """Write pictures of what the model of CHECKPOINT sees in an image, and the numbers behind them.

    CHECKPOINT is a study that has been run (its file or folder; see --arm and --seed), the folder of a trial, or a
    file of weights in any format that 'vitlab weights inspect' knows.
    """
    spec = None
    if _is_study(checkpoint) or checkpoint.is_dir():
        model, transform, spec = _open(checkpoint, arm, seed, out)
    else:
        model, transform = _open_file(checkpoint, heads, grid, normalize)
    x_BCHW = transform(_image(image, spec))

    from vitlab.explain.one_image import explain
    from vitlab.models.vit import ViT

    if not isinstance(model, ViT):
        raise UserError(f"only a ViT has attention to explain; this is a {type(model).__name__}")
    seen_HWC = transform.seen(x_BCHW)[0].permute(1, 2, 0)
    files = explain(model, x_BCHW, seen_HWC, transform.sight.info.labels, target, fusion=fusion, discard=discard)
    for file in files:
        click.echo(str(file))


def _open(checkpoint: Path, arm: str, seed: int, out: Path) -> tuple[Model, Transform, dict[str, Any]]:
    """The model of a trial, the transform from images to its input, and what the trial is."""
    from vitlab.findings import open_study
    from vitlab.store import TrialFolder, read_json
    from vitlab.trial.models import load_model

    if _is_study(checkpoint):
        plan, store = open_study(checkpoint, out=out)
        trial = plan.find(arm, seed)
        folder = store.trial(trial.key, trial.code)
    else:
        folder = TrialFolder(checkpoint)
    return *load_model(folder), read_json(folder.spec)


def _is_study(checkpoint: Path) -> bool:
    return checkpoint.suffix in (".yaml", ".yml") or (checkpoint / "plan.json").exists()


def _open_file(file: Path, heads: int | None, grid: str | None, normalize: str | None) -> tuple[Model, Transform]:
    """The model in a file of weights, and the transform from images to its input; what was assumed goes to stderr."""
    from vitlab.data.options import NORMALIZATIONS
    from vitlab.models.weights import Known, open_model
    from vitlab.training.artifacts import Sight, Transform

    mean, std = NORMALIZATIONS[normalize] if normalize else (None, None)
    opened = open_model(file, said=Known(heads=heads, grid=parse_size("--grid", grid), mean=mean, std=std))
    for note in opened.notes:
        click.echo(note, err=True)
    return opened.model, Transform(Sight(opened.info, opened.mean, opened.std))


def _image(image: str, trial: dict[str, Any] | None) -> Any:
    split, _, index = image.partition(":")
    if split == "test" and index.isdecimal():
        if trial is None:
            raise UserError("--image test:N is an image of a trial's own data; a file of weights has none")
        from vitlab.examination import test_images

        return test_images(trial, [int(index)])
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(image) as picture:
            return picture.convert(picture.mode if picture.mode == "L" else "RGB")
    except (OSError, UnidentifiedImageError) as error:
        raise UserError(f"--image {image} is no picture that can be read: {error}") from None
