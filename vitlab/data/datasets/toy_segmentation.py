"""``digit_scenes``: real handwritten digits at random positions on a canvas, every pixel labelled.

N scenes, D digits, H rows and W columns of the canvas, S rows or columns of a digit's own grid.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from vitlab import noise
from vitlab.data.datasets import digits
from vitlab.data.datasets.base import Dataset, Images, Size, Split, dataset
from vitlab.errors import DataError
from vitlab.geometry import DataInfo, Pair

SHEETS = 20
"""Number of groups ("sheets") of training digits, in file order.  A scene takes its digits from one sheet, and a sheet
is either for training or for validation, so no digit, and hardly a writer, is in both."""

INK = 64
"""Lowest level of a pixel that belongs to a digit: a quarter of full ink.  Lower levels are background."""

CHUNK = 2048
"""Scenes drawn per batch."""


def _ordered(value: tuple[int, int]) -> tuple[int, int]:
    if value[0] > value[1]:
        raise ValueError(f"write the smaller number first; found {list(value)}")
    return value


Range = Annotated[tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]], AfterValidator(_ordered)]
"""Minimum and maximum, both included."""


@dataset.register("digit_scenes")
class DigitScenes(Dataset):
    """Segmentation of overlapping digits of ``digits``, of random sizes at random positions.

    A pixel has the label of the digit with the darkest ink there (1 to 10 for the digits 0 to 9), or background (0).
    Test scenes contain only test digits of ``digits``, and validation is held out by :data:`SHEETS` of training
    digits, so validation and test scenes show no training digit.  Every scene is a function of ``seed`` and its
    index, so a larger set begins with the scenes of a smaller one.  All arithmetic is in integers and equal on every
    machine, so the digits and the options are the identity.

    Args:
        image_size: pixels of the canvas.
        train_images: scenes of training digits, including validation.
        test_images: scenes of test digits.
        digits_per_image: minimum and maximum number of digits in a scene, uniformly drawn.
        digit_size: minimum and maximum side of a digit in pixels, uniformly drawn; the source digits have 8.
        seed: of all random draws.
    """

    validation = 0.2
    generated = True

    def __init__(
        self,
        *,
        image_size: Size = (32, 32),
        train_images: Annotated[int, Field(ge=SHEETS)] = 2000,
        test_images: Annotated[int, Field(ge=1)] = 500,
        digits_per_image: Range = (1, 4),
        digit_size: Range = (8, 16),
        seed: int = 0,
    ) -> None:
        self.image_size: Pair = image_size
        self.images = {"train": train_images, "test": test_images}
        self.digits_per_image = digits_per_image
        self.digit_size = digit_size
        self.seed = seed

    def info(self) -> DataInfo:
        """Return the facts of the data set, after checking that its digits fit on the image."""
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
            identity=f"digit_scenes:1:{digits.DIGEST}",
            labels=("background", *map(str, range(10))),
        )

    def groups(self) -> Tensor:
        """Return for each training image the index of its sheet, the part of the digits that it is composed of."""
        return torch.arange(self.images["train"]) % SHEETS

    def read(self, split: Split) -> Images:
        """Compose the scenes of a split."""
        self.info()  # checks the options
        source = digits.Digits().read(split)
        parts = [
            self._scenes(split, source, torch.arange(start, min(start + CHUNK, self.images[split])))
            for start in range(0, self.images[split], CHUNK)
        ]
        return Images(torch.cat([part.x_NCHW for part in parts]), torch.cat([part.y_N for part in parts]))

    def contents(self, split: Split) -> Tensor:
        """Return the indices of each scene's digits in the split of ``digits``, int64 (N, D); -1 for none."""
        return self._placement(split, torch.arange(self.images[split])).source_ND

    def _scenes(self, split: Split, source: Images, id_N: Tensor) -> Images:
        """Draw scenes, digit by digit, each on all scenes at once."""
        placement = self._placement(split, id_N)
        level_NHW = torch.zeros(len(id_N), *self.image_size, dtype=torch.int64)
        y_NHW = torch.zeros_like(level_NHW)
        for place in range(placement.source_ND.shape[1]):
            source_N, side_N = placement.source_ND[:, place], placement.side_ND[:, place]
            visible_N = source_N >= 0
            row_NHS, column_NWS = (
                _weights(start_ND[:, place], side_N, size)
                for start_ND, size in zip((placement.top_ND, placement.left_ND), self.image_size, strict=True)
            )
            digit_NSS = source.x_NCHW[source_N.clamp(min=0), 0].long() * visible_N[:, None, None]
            whole_N11 = (2 * side_N[:, None, None]) ** 2
            ink_NHW = (row_NHS @ digit_NSS @ column_NWS.mT + whole_N11 // 2) // whole_N11
            label_N11 = source.y_N[source_N.clamp(min=0)][:, None, None] + 1
            on_top_NHW = (ink_NHW >= INK) & (ink_NHW > level_NHW)
            y_NHW = torch.where(on_top_NHW, label_N11, y_NHW)
            level_NHW = torch.maximum(level_NHW, ink_NHW)
        return Images(level_NHW.to(torch.uint8)[:, None], y_NHW.to(torch.uint8))

    def _placement(self, split: Split, id_N: Tensor) -> _Placement:
        """Draw the digits of some scenes, their positions and their sizes."""
        least, most = self.digits_per_image
        key = noise.key(self.seed, "digit_scenes", split)
        count_N = least + noise.integers(noise.fold(key, 0), id_N, 1, most - least + 1)[:, 0]
        low_N, high_N = _sheet(split, id_N)
        columns: list[_Placement] = []
        for place in range(most):
            word_N2 = _words(noise.fold(key, 2 * place + 1), id_N, 2)
            source_N = low_N + _below(word_N2[:, 0], high_N - low_N)
            side_N = self.digit_size[0] + _below(word_N2[:, 1], self.digit_size[1] - self.digit_size[0] + 1)
            corner_N2 = _words(noise.fold(key, 2 * place + 2), id_N, 2)
            top_N, left_N = (_below(corner_N2[:, axis], size - side_N + 1) for axis, size in enumerate(self.image_size))
            columns.append(_Placement(torch.where(place < count_N, source_N, -1), top_N, left_N, side_N))
        return _Placement(*(torch.stack(column_DN, 1) for column_DN in zip(*columns, strict=True)))


class _Placement(NamedTuple):
    """Positions of digits on scenes: (N, D), or (N,) for one digit."""

    source_ND: Tensor  #: index of the digit in its split; -1 for none
    top_ND: Tensor
    left_ND: Tensor
    side_ND: Tensor


def _sheet(split: Split, id_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first digit (included) and the last (excluded) that a scene may contain."""
    if split == "test":
        return torch.zeros_like(id_N), torch.full_like(id_N, digits.TEST)
    sheet_N = id_N % SHEETS
    return sheet_N * digits.TRAIN // SHEETS, (sheet_N + 1) * digits.TRAIN // SHEETS


def _words(k: noise.Key, id_N: Tensor, n: int) -> Tensor:
    """Return uniform draws from [0, 2^32), int64 (N, n)."""
    return noise.bits(k, id_N, n).long() & 0xFFFFFFFF


def _below(word: Tensor, bound: Tensor | int) -> Tensor:
    """Map a 32-bit word to [0, bound)."""
    return word * bound >> 32


def _weights(start_N: Tensor, length_N: Tensor, size: int) -> Tensor:
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
