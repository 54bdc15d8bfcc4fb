"""A trial's pictures as MLflow shows images: by key and step, side by side for the runs of a page.

The step of a confusion matrix is the training's last one; that of an explanation is the number of its test image, so
that the page's slider goes from image to image.

MLflow's own client gives each file a random name, by which a second delivery would show a picture twice.  Here the
name follows from what is shown.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pandas as pd
    from PIL.Image import Image

FOLDER = "images"  #: of a run's artifacts, where the page looks
TAG = "mlflow.loggedImages"  #: says that it has something to look for
SMALL = 256  #: pixels along the longer side of what the page shows of a picture
KEY = re.compile(r"[a-zA-Z0-9_\-./ ]+")  #: what the page can read
LABELS = 30  #: classes of a confusion matrix that are named


class Picture(NamedTuple):
    """One image of a run."""

    key: str
    step: int
    image: Image


def write(pictures: Iterable[Picture], t: int, into: Path) -> dict[str, int]:
    """Write pictures under the names the page reads them by, each whole and small.

    Args:
        pictures: of one run.
        t: milliseconds since 1970, when the trial ended.
        into: a folder.

    Returns:
        key to its first step.
    """
    steps: dict[str, int] = {}
    for key, step, image in pictures:
        name = f"{key.replace('/', '~')}+step+{step}+timestamp+{t}+{uuid.uuid5(uuid.NAMESPACE_URL, f'{key} {step}')}"
        image.save(into / f"{name}.png")
        small = image.copy()
        small.thumbnail((SMALL, SMALL))
        small.save(into / f"{name}+compressed.webp")
        steps[key] = min(step, steps.get(key, step))
    return steps


def explained(folder: Path) -> Iterator[Picture]:
    """The pictures of the test images that a trial's model was explained on."""
    from PIL import Image

    for place in sorted(folder.glob("explain/test-*")):
        number = place.name.removeprefix("test-")
        for file in sorted(place.glob("*.png")):
            key = f"explain/{file.stem}"
            if number.isdecimal() and KEY.fullmatch(key):
                with Image.open(file) as image:
                    yield Picture(key, int(number), image.convert("RGB"))


def confusion(split: str, step: int, table: pd.DataFrame) -> Picture:
    """A confusion matrix, each row as shares of its label."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    classes = [str(name) for name in table.index]
    figure = Figure(figsize=(5, 4.5))
    axes = figure.add_axes((0.13, 0.12, 0.66, 0.8))  # a layout solved for would take three times as long
    shares = table.to_numpy() / table.to_numpy().sum(1, keepdims=True).clip(1)
    shown = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(shown, cax=figure.add_axes((0.82, 0.12, 0.03, 0.8)), label="share of the label")
    if len(classes) <= LABELS:
        axes.set_xticks(range(len(classes)), classes, rotation=90 if max(map(len, classes)) > 3 else 0)
        axes.set_yticks(range(len(classes)), classes)
    axes.set(xlabel="prediction", ylabel="label", title=split)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return Picture(f"confusion/{split}", step, Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB"))
