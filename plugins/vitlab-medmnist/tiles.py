"""Two data sets of MedMNIST's form, made without a download of data: tiles of pictures, to be told apart by picture.

``python tiles.py FOLDER`` writes ``textures.npz`` (grey) and ``photographs.npz`` (colour).  The pictures are files of
the package scikit-image (``pip install --no-deps scikit-image``), which is not imported.

A picture is cut into regions of 56x56 pixels.  Of its regions, drawn once, a fifth is for validation and a fifth for
the test.  A region gives nine tiles of 28x28, 14 pixels apart: tiles of one split overlap, tiles of two splits do not.

N images, H rows, W columns, C channels.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from vitlab_medmnist import SETS, SIDE

REGION, STEP = 2 * SIDE, SIDE // 2


def tiles(picture: np.ndarray, rng: np.random.Generator) -> dict[str, list[np.ndarray]]:
    """Return the tiles of a picture (H, W) or (H, W, C), by split."""
    rows, columns = (length // REGION for length in picture.shape[:2])
    order = rng.permutation(rows * columns)
    fifth = len(order) // 5
    regions = {"train": order[2 * fifth :], "val": order[:fifth], "test": order[fifth : 2 * fifth]}
    return {
        split: [
            picture[top : top + SIDE, left : left + SIDE]
            for region in numbers
            for top in range(region // columns * REGION, (region // columns + 1) * REGION - SIDE + 1, STEP)
            for left in range(region % columns * REGION, (region % columns + 1) * REGION - SIDE + 1, STEP)
        ]
        for split, numbers in regions.items()
    }


def arrays(names: tuple[str, ...], folder: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a set whose classes are the pictures ``NAME.png`` of a folder."""
    rng = np.random.default_rng(0)
    of_pictures = [tiles(np.asarray(Image.open(folder / f"{name}.png")), rng) for name in names]
    result = {}
    for split in ("train", "val", "test"):
        counts = [len(by_split[split]) for by_split in of_pictures]
        result[f"{split}_images"] = np.stack([tile for by_split in of_pictures for tile in by_split[split]])
        result[f"{split}_labels"] = np.repeat(np.arange(len(names), dtype=np.uint8), counts)[:, None]
    return result


if __name__ == "__main__":
    package = importlib.util.find_spec("skimage")
    if len(sys.argv) != 2 or package is None or package.origin is None:
        sys.exit("usage: python tiles.py FOLDER; it needs: pip install --no-deps scikit-image")
    for name in ("textures", "photographs"):
        np.savez(Path(sys.argv[1], name), **arrays(SETS[name].labels, Path(package.origin).parent / "data"))
