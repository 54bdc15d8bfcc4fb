"""A trial's pictures as MLflow images: by key and step, side by side for the runs of a page.

The step of a confusion matrix is the last training step.  The step of an explanation is the number of its test image:
the page's slider moves from image to image.

MLflow's ``log_image`` gives each file a random name, so a second delivery would show a picture twice.  Here the name is
derived from key and step.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vitlab.store.damage import read_stored

if TYPE_CHECKING:
    import pandas as pd
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

FOLDER = "images"  #: artifact folder in which the page expects images
TAG = "mlflow.loggedImages"  #: tag of runs that have images
SMALL = 256  #: longer side of the page's thumbnails in pixels
KEY = re.compile(r"[a-zA-Z0-9_\-./ ]+")  #: keys that the page supports

FIELD, GAP, TITLE = 480, 6, 26  #: side of a confusion matrix, space beside its labels, and height of a line, in pixels
RATIO = 1.15  #: width to height; the page cuts the lower edge of pictures that are narrower
NAMED, COUNTED = 40, 20  #: maximum number of classes whose names, and whose counts, are drawn
NAME, TITLED = 18, 50  #: letters of a class name, and of a trial's name, that are drawn


class Picture(NamedTuple):
    """One image of a run."""

    key: str
    step: int
    image: Image


def write(pictures: Iterable[Picture], t: int, into: Path) -> dict[str, int]:
    """Write pictures, each in full size and as a thumbnail, under the file names that the page expects.

    Args:
        pictures: pictures of one run.
        t: end of the trial in milliseconds since 1970.
        into: the destination folder, which is created.

    Returns:
        The first step of each key.
    """
    into.mkdir()
    steps: dict[str, int] = {}
    for key, step, image in pictures:
        name = f"{key.replace('/', '~')}+step+{step}+timestamp+{t}+{uuid.uuid5(uuid.NAMESPACE_URL, f'{key} {step}')}"
        image.save(into / f"{name}.png", compress_level=1)
        image.thumbnail((SMALL, SMALL))
        image.save(into / f"{name}+compressed.webp", method=0)
        steps[key] = min(step, steps.get(key, step))
    return steps


def explanations(folder: Path) -> Iterator[Picture]:
    """Yield the pictures under a trial's ``explain`` folder; the step of each is the number of its test image.

    Damaged ones are reported and left out.
    """
    for file in sorted(folder.glob("explain/test-*/*.png")):
        key, number = f"explain/{file.stem}", file.parent.name.removeprefix("test-")
        if number.isdecimal() and KEY.fullmatch(key):
            image = read_stored(file, _load)
            if image is not None:
                yield Picture(key, int(number), image)


def _load(file: Path) -> Image:
    from PIL import Image

    with Image.open(file) as image:
        return image.convert("RGB")


def confusion(trial: str, split: str, step: int, table: pd.DataFrame) -> Picture:
    """Draw a confusion matrix: counts of images as numbers, their shares of the label as colours.

    Pillow draws it in a tenth of the time that matplotlib needs, and a study has two for every trial.
    """
    import numpy as np
    from matplotlib import colormaps
    from PIL import Image, ImageDraw

    counts, classes = table.to_numpy(), [str(name)[:NAME] for name in table.index]
    shares = counts / counts.sum(1, keepdims=True).clip(1)
    cell = FIELD / len(classes)
    font, small = _font(14), _font(max(8, min(14, int(cell / 3))))
    names = classes if len(classes) <= NAMED else []
    margin = 2 * GAP + int(max((small.getlength(name) for name in names), default=0))
    height = TITLE + FIELD + margin
    image = Image.new("RGB", (int(height * RATIO), height), "white")
    draw = ImageDraw.Draw(image)
    draw.text((GAP, TITLE / 2), f"{trial[:TITLED]}, {split}: labels by predictions", "black", font, "lm")
    colours = Image.fromarray((colormaps["Blues"](shares)[..., :3] * 255).round().astype(np.uint8))
    image.paste(colours.resize((FIELD, FIELD), Image.Resampling.NEAREST), (margin, TITLE))
    beside = Image.new("RGB", (margin, FIELD), "white")
    for row, name in enumerate(names):
        ImageDraw.Draw(beside).text((beside.width - GAP, (row + 0.5) * cell), name, "black", small, "rm")
    image.paste(beside, (0, TITLE))
    image.paste(beside.transpose(Image.Transpose.ROTATE_90), (margin, TITLE + FIELD))
    for (row, column), count in np.ndenumerate(counts):
        if count and len(classes) <= COUNTED:
            ink = "white" if shares[row, column] > 0.5 else "black"
            at = margin + (column + 0.5) * cell, TITLE + (row + 0.5) * cell
            draw.text(at, str(count), ink, small, "mm")
    return Picture(f"confusion/{split}", step, image)


@cache
def _font(size: int) -> FreeTypeFont:
    import matplotlib
    from PIL import ImageFont

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), size)
