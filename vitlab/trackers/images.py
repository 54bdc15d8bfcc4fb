"""A trial's pictures as MLflow images: by key and step, side by side for the runs of a page.

The step of a confusion matrix is the last training step; that of an explanation is the number of its test image, so
that the page's slider moves from image to image.

MLflow's client gives each file a random name, so a second delivery would show a picture twice.  Here the name is
derived from key and step.
"""

from __future__ import annotations

import re
import struct
import uuid
import zlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vitlab.store.damage import read_stored

if TYPE_CHECKING:
    import pandas as pd
    from PIL.Image import Image

FOLDER = "images"  #: artifact folder in which the page expects images
TAG = "mlflow.loggedImages"  #: tag of runs that have images
SMALL = 256  #: longer side of the page's thumbnails in pixels
KEY = re.compile(r"[a-zA-Z0-9_\-./ ]+")  #: keys that the page supports
RGB, UP = 2, 2  #: PNG's codes of the colour type and of the filter of rows
LABELS = 30  #: maximum number of classes whose names are drawn in a confusion matrix


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
        into: the destination folder.

    Returns:
        The first step of each key.
    """
    steps: dict[str, int] = {}
    for key, step, image in pictures:
        name = f"{key.replace('/', '~')}+step+{step}+timestamp+{t}+{uuid.uuid5(uuid.NAMESPACE_URL, f'{key} {step}')}"
        (into / f"{name}.png").write_bytes(png(image))
        small = image.copy()
        small.thumbnail((SMALL, SMALL))
        small.save(into / f"{name}+compressed.webp", method=0)
        steps[key] = min(step, steps.get(key, step))
    return steps


def png(image: Image) -> bytes:
    """Return an RGB picture as a PNG whose rows are stored as differences from the row above.

    Pillow tries five filters for every row, which takes up to three times as long; its files are 3 % smaller at most.
    """
    import numpy as np

    rows = np.asarray(image).reshape(image.height, -1)
    filtered = np.full((rows.shape[0], rows.shape[1] + 1), UP, np.uint8)
    filtered[0, 1:] = rows[0]
    np.subtract(rows[1:], rows[:-1], out=filtered[1:, 1:])  # modulo 256
    header = struct.pack(">IIBBBBB", image.width, image.height, 8, RGB, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(filtered.data, 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def explanations(folder: Path) -> Iterator[Picture]:
    """Yield the pictures under a trial's ``explain`` folder; the step of each is the number of its test image.

    Damaged ones are reported and left out.
    """
    for place in sorted(folder.glob("explain/test-*")):
        number = place.name.removeprefix("test-")
        for file in sorted(place.glob("*.png")):
            key = f"explain/{file.stem}"
            if number.isdecimal() and KEY.fullmatch(key):
                image = read_stored(file, _load)
                if image is not None:
                    yield Picture(key, int(number), image)


def _load(file: Path) -> Image:
    from PIL import Image

    with Image.open(file) as image:
        return image.convert("RGB")


def confusion(split: str, step: int, table: pd.DataFrame) -> Picture:
    """Draw a confusion matrix whose rows are normalised to shares of the label."""
    import numpy as np
    from matplotlib import colormaps
    from PIL import Image

    shares = table.to_numpy() / table.to_numpy().sum(1, keepdims=True).clip(1)
    frame, (left, top, right, bottom) = _frame(split, tuple(str(name) for name in table.index))
    cells = Image.fromarray(np.asarray(colormaps["Blues"](shares, bytes=True))[..., :3])
    image = frame.copy()
    image.paste(cells.resize((right - left, bottom - top), Image.Resampling.NEAREST), (left, top))
    return Picture(f"confusion/{split}", step, image)


@lru_cache(maxsize=16)
def _frame(split: str, classes: tuple[str, ...]) -> tuple[Image, tuple[int, int, int, int]]:
    """Return the picture of an empty confusion matrix, and the box of its cells in pixels.

    Drawing axes takes much longer than filling the cells, and equals for all trials of a study.
    """
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(5, 4.5))
    axes = figure.add_axes((0.13, 0.12, 0.66, 0.8))  # a fixed layout is three times as fast as a solved one
    axes.set(xlim=(-0.5, len(classes) - 0.5), ylim=(len(classes) - 0.5, -0.5), aspect="equal")
    colours = ScalarMappable(Normalize(0, 1), "Blues")
    figure.colorbar(colours, cax=figure.add_axes((0.82, 0.12, 0.03, 0.8)), label="share of the label")
    if len(classes) <= LABELS:
        axes.set_xticks(range(len(classes)), classes, rotation=90 if max(map(len, classes)) > 3 else 0)
        axes.set_yticks(range(len(classes)), classes)
    axes.set(xlabel="prediction", ylabel="label", title=split)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    frame = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    x0, y0, x1, y1 = axes.bbox.extents  # the spines are drawn along it
    return frame, (round(x0) + 2, frame.height - round(y1) + 2, round(x1) - 1, frame.height - round(y0) - 1)
