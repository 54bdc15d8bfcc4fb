"""``digits``: handwritten digits that come with scikit-learn, so they need no download."""

from __future__ import annotations

import hashlib
import importlib.util
from functools import cache
from pathlib import Path

import numpy as np
import torch

from vitlab.data.datasets.base import Dataset, Images, Split, dataset
from vitlab.errors import DataError
from vitlab.geometry import DataInfo

TRAIN, TEST = 1437, 360
"""The test split is the last 360 images in file order, so that no writer is in both splits."""

DIGEST = "3add1ae1fa53cc89d7599167a31c4e88"
"""BLAKE2b over images and labels as stored, one byte each."""


@dataset.register("digits")
class Digits(Dataset):
    """1797 real handwritten digits of 8x8 pixels, 16 grey levels; 1437 to train on and the last 360 to test on.

    Reference: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI 1998 (its test half, as bundled).
    """

    validation = 0.2

    def info(self) -> DataInfo:
        """Return the facts of the data set."""
        return DataInfo(
            image=(8, 8),
            channels=1,
            classes=10,
            identity=f"digits:{DIGEST}",
            labels=tuple(map(str, range(10))),
            test_images=TEST,
        )

    def read(self, split: Split) -> Images:
        """Read a split; the last images are the test images."""
        level_NHW, y_N = _load()
        part = slice(None, -TEST) if split == "train" else slice(-TEST, None)
        x_NHW = (level_NHW[part].astype(np.int32) * 255 + 8) // 16
        return Images(torch.from_numpy(x_NHW.astype(np.uint8))[:, None], torch.from_numpy(y_N[part].astype(np.int64)))


@cache
def _load() -> tuple[np.ndarray, np.ndarray]:
    """Return images in levels 0 to 16, (N, 8, 8), and labels, (N,), of all digits."""
    # Read the file directly: importing sklearn.datasets takes a second and starts a thread in every worker.
    library = importlib.util.find_spec("sklearn")
    assert library is not None and library.origin is not None
    file = Path(library.origin).parent / "datasets" / "data" / "digits.csv.gz"
    try:
        table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    except OSError as error:
        raise DataError(
            f"digits: scikit-learn's bundled images cannot be read: {error}; reinstall scikit-learn"
        ) from None
    level_NHW, y_N = np.ascontiguousarray(table[:, :-1]).reshape(-1, 8, 8), np.ascontiguousarray(table[:, -1])
    digest = hashlib.blake2b(level_NHW.tobytes() + y_N.tobytes(), digest_size=16).hexdigest()
    if digest != DIGEST:
        raise DataError(
            f"digits: scikit-learn's bundled images have the digest {digest}, not {DIGEST} as published; reinstall "
            "scikit-learn"
        )
    return level_NHW, y_N
