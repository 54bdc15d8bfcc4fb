"""``digits``, which come with scikit-learn, and ``digit_scenes``: the same at random positions, every pixel labelled.

N images or scenes, H rows and W columns of the canvas, S rows or columns of a digit's own grid.
"""

import hashlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import AfterValidator, Field, PositiveInt
from torch import Tensor

from vitlab import noise
from vitlab.data.datasets.base import Dataset, Images, Size, Split, dataset, require_ascending
from vitlab.errors import DataError
from vitlab.geometry import DataInfo

TRAIN, TEST = 1437, 360
"""The test split is the last 360 images in file order, so that no writer is in both splits."""

DIGEST = "3add1ae1fa53cc89d7599167a31c4e88"
"""BLAKE2b over images and labels as stored, one byte each."""


SHEETS = 20
"""Number of groups ("sheets") of training digits, in file order.  A scene takes its digits from one sheet, and a sheet
is either for training or for validation, so no digit, and hardly a writer, is in both."""

INK = 64
"""Lowest level of a pixel that belongs to a digit: a quarter of full ink.  Lower levels are background."""

CHUNK = 2048
"""Scenes drawn per batch."""


Range = Annotated[tuple[PositiveInt, PositiveInt], AfterValidator(require_ascending)]
"""Minimum and maximum, both included."""


@dataset.register("digits")
class Digits(Dataset):
    """1797 real handwritten digits of 8x8 pixels, 16 grey levels; 1437 to train on and the last 360 to test on.

    Reference: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI 1998 (its test half, as bundled).
    """

    validation = 0.2

    def info(self) -> DataInfo:
        return DataInfo(
            image=(8, 8),
            channels=1,
            classes=10,
            identity=f"digits:{DIGEST}",
            labels=tuple(map(str, range(10))),
        )

    def read(self, split: Split) -> Images:
        level_NHW, y_N = _load_digits()
        part = slice(None, -TEST) if split == "train" else slice(-TEST, None)
        x_NHW = (level_NHW[part].astype(np.int32) * 255 + 8) // 16
        return Images(torch.from_numpy(x_NHW.astype(np.uint8))[:, None], torch.from_numpy(y_N[part].astype(np.int64)))


@cache
def _load_digits() -> tuple[np.ndarray, np.ndarray]:
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
    level_NHW, y_N = table[:, :-1].reshape(-1, 8, 8), table[:, -1]
    digest = hashlib.blake2b(level_NHW.tobytes() + y_N.tobytes(), digest_size=16).hexdigest()
    if digest != DIGEST:
        raise DataError(
            f"digits: scikit-learn's bundled images have the digest {digest}, not {DIGEST} as published; reinstall "
            "scikit-learn"
        )
    return level_NHW, y_N


@dataset.register("digit_scenes")
@dataclass(kw_only=True)
class DigitScenes(Dataset):
    """Segmentation of overlapping digits of ``digits``, of random sizes at random positions.

    A pixel has the label of the digit with the darkest ink there (1 to 10 for the digits 0 to 9), or background (0).
    Test scenes contain only test digits of ``digits``, and a scene takes its digits from one of 20 groups of
    training digits, of which some are held out for validation, so validation and test scenes show no training digit.
    Every scene is a function of ``seed`` and its index, so a larger set begins with the scenes of a smaller one.  All
    arithmetic is in integers and equal on every machine, so the digits and the options are the identity.

    Args:
        image_size: pixels of the canvas.
        train_images: scenes of training digits, including validation.
        test_images: scenes of test digits.
        digits_per_image: minimum and maximum number of digits in a scene, uniformly drawn.
        digit_size: minimum and maximum side of a digit in pixels, uniformly drawn; the source digits have 8.
        seed: the seed of all random draws.
    """

    validation = 0.2

    image_size: Size = (32, 32)
    train_images: Annotated[int, Field(ge=SHEETS)] = 2000
    test_images: PositiveInt = 500
    digits_per_image: Range = (1, 4)
    digit_size: Range = (8, 16)
    seed: int = 0

    def info(self) -> DataInfo:
        if self.digit_size[1] > min(self.image_size):
            raise DataError(
                f"digit_scenes: a digit of {self.digit_size[1]} pixels (digit_size) does not fit on a canvas of "
                f"{self.image_size[0]} by {self.image_size[1]} (image_size); change one of them"
            )
        return DataInfo(
            image=self.image_size,
            channels=1,
            classes=11,
            task="segmentation",
            identity=f"digit_scenes:1:{DIGEST}",
            labels=("background", *map(str, range(10))),
        )

    def groups(self) -> Tensor:
        """Return for each training image the index of its sheet, the part of the digits that it is composed of."""
        return torch.arange(self.train_images) % SHEETS

    def read(self, split: Split) -> Images:
        self.info()  # checks the options
        source, count = Digits().read(split), self.train_images if split == "train" else self.test_images
        parts = [self._compose_scenes(split, source, id_N) for id_N in torch.split(torch.arange(count), CHUNK)]
        return Images(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def _compose_scenes(self, split: Split, source: Images, id_N: Tensor) -> Images:
        """Draw scenes, digit by digit, each on all scenes at once."""
        level_NHW = torch.zeros(len(id_N), *self.image_size, dtype=torch.int64)
        y_NHW = torch.zeros_like(level_NHW)
        height, width = self.image_size
        for source_N, top_N, left_N, side_N in self._draw_places(split, id_N):
            visible_N = source_N >= 0
            row_NHS = _enlargement_weights(top_N, side_N, height)
            column_NWS = _enlargement_weights(left_N, side_N, width)
            digit_NSS = source.x_NCHW[source_N.clamp(min=0), 0].long() * visible_N[:, None, None]
            # The weights of rows and columns are in units of 1 / (2 * side) each; half a unit more rounds.
            whole_N11 = (2 * side_N[:, None, None]) ** 2
            ink_NHW = (row_NHS @ digit_NSS @ column_NWS.mT + whole_N11 // 2) // whole_N11
            label_N11 = source.y_N[source_N.clamp(min=0)][:, None, None] + 1
            on_top_NHW = (ink_NHW >= INK) & (ink_NHW > level_NHW)
            y_NHW = torch.where(on_top_NHW, label_N11, y_NHW)
            level_NHW = torch.maximum(level_NHW, ink_NHW)
        return Images(level_NHW.to(torch.uint8)[:, None], y_NHW.to(torch.uint8))

    def _draw_places(self, split: Split, id_N: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield, digit by digit, its index in the split (-1 for none), top, left and side on every scene, (N,) each."""
        least, most = self.digits_per_image
        key = noise.key(self.seed, "digit_scenes", split)
        count_N = least + noise.integers(noise.fold(key, 0), id_N, 1, most - least + 1)[:, 0]
        # The first digit (included) and the last (excluded) that a scene may contain.
        low_N, high_N = torch.zeros_like(id_N), torch.full_like(id_N, TEST)
        if split == "train":
            low_N, high_N = (sheet_N * TRAIN // SHEETS for sheet_N in (id_N % SHEETS, id_N % SHEETS + 1))
        least_side, most_side = self.digit_size
        sides_N = torch.full_like(id_N, most_side - least_side + 1)
        which_below_N2 = torch.stack([high_N - low_N, sides_N], 1)
        for place in range(most):
            which_N2 = noise.integers(noise.fold(key, 2 * place + 1), id_N, 2, which_below_N2)
            side_N = least_side + which_N2[:, 1]
            start_below_N2 = torch.tensor(self.image_size) - side_N[:, None] + 1
            start_N2 = noise.integers(noise.fold(key, 2 * place + 2), id_N, 2, start_below_N2)
            source_N = torch.where(place < count_N, low_N + which_N2[:, 0], -1)
            yield source_N, start_N2[:, 0], start_N2[:, 1], side_N


def _enlargement_weights(start_N: Tensor, length_N: Tensor, size: int) -> Tensor:
    """Return the weights of a digit's rows in the canvas's rows, int64 (N, size, 8), in units of 1 / (2 * length).

    Bilinear interpolation with half-pixel centres, edges repeated, nothing outside of the digit.
    """
    offset_NO = torch.arange(size) - start_N[:, None]
    part_N1 = 2 * length_N[:, None]
    center_NO = (8 * (2 * offset_NO + 1) - length_N[:, None]).clamp(min=0)  # from the centre of the first row
    center_NO = torch.minimum(center_NO, 7 * part_N1)
    distance_NOS = (center_NO[..., None] - torch.arange(8) * part_N1[..., None]).abs()
    inside_NO1 = ((offset_NO >= 0) & (offset_NO < length_N[:, None]))[..., None]
    return (part_N1[..., None] - distance_NOS).clamp(min=0) * inside_NO1
