"""``digit_scenes``: real handwritten digits strewn over a canvas, every pixel labelled.

N scenes, D digits, H rows and W columns of the canvas, S places of a digit's own grid.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from vitlab import noise
from vitlab.data.datasets import digits
from vitlab.data.datasets.base import Dataset, Images, Split, dataset
from vitlab.data.options import Size
from vitlab.errors import DataError
from vitlab.geometry import DataInfo, Pair

SHEETS = 20
"""The training digits lie on this many sheets, in file order.  A scene takes its digits from one of them, and a sheet
is trained on or validated on; so no digit, and hardly a writer, is on both sides."""

ATTEMPTS = 20
"""Places drawn for a digit that is not to touch another, before it is left out."""

INK = 64
"""The level from which a pixel belongs to its digit: a quarter of full ink.  Fainter is background."""

CHUNK = 2048
"""Scenes drawn at a time."""


def _ordered(value: tuple[int, int]) -> tuple[int, int]:
    if value[0] > value[1]:
        raise ValueError(f"the smaller number comes first, found {list(value)}")
    return value


Range = Annotated[tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]], AfterValidator(_ordered)]
"""The least and the most, both included."""


@dataset.register("digit_scenes")
class DigitScenes(Dataset):
    """Segmentation: the digits of ``digits``, of many sizes, at random places, one on top of another.

    A pixel is labelled with the digit whose ink is darkest there (1 to 10 for the digits 0 to 9), or as background (0).
    Test scenes are made of the test digits of ``digits`` alone, and validation is held out by :data:`SHEETS` of
    training digits, so no scene that is judged shows a digit that was trained on.  Every scene is a function of
    ``seed`` and its number: more scenes begin with the same ones.  Whole numbers throughout, so that they are the same
    on every machine; so the digits and the options are its identity.
    """

    validation = 0.2

    def __init__(
        self,
        *,
        image_size: Size = (32, 32),
        train_images: Annotated[int, Field(ge=SHEETS)] = 2000,
        test_images: Annotated[int, Field(ge=1)] = 500,
        digits_per_image: Range = (1, 4),
        digit_size: Range = (8, 16),
        overlap: Literal["allowed", "none"] = "allowed",
        seed: int = 0,
    ) -> None:
        """
        Args:
            image_size: pixels of the canvas.
            train_images: scenes made of training digits, of which validation is held out.
            test_images: scenes made of test digits.
            digits_per_image: the least and the most digits of a scene, every number equally often.
            digit_size: the least and the most pixels of a digit's side, every number equally often; the digits
                themselves have 8.
            overlap: ``allowed``, or ``none``: a digit that finds no free place in twenty attempts is left out.
            seed: of all draws.
        """
        self.image_size: Pair = image_size
        self.images = {"train": train_images, "test": test_images}
        self.digits_per_image = digits_per_image
        self.digit_size = digit_size
        self.overlap: Literal["allowed", "none"] = overlap
        self.seed = seed

    def info(self) -> DataInfo:
        if self.digit_size[1] > min(self.image_size):
            raise DataError(
                f"digit_scenes: a digit of {self.digit_size[1]} pixels (digit_size) does not fit on a canvas of "
                f"{self.image_size[0]} by {self.image_size[1]} (image_size)"
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
        return torch.arange(self.images["train"]) % SHEETS

    def read(self, split: Split) -> Images:
        self.info()  # which says what does not fit
        source = digits.Digits().read(split)
        parts = [
            self._scenes(split, source, torch.arange(start, min(start + CHUNK, self.images[split])))
            for start in range(0, self.images[split], CHUNK)
        ]
        return Images(torch.cat([part.x_NCHW for part in parts]), torch.cat([part.y_N for part in parts]))

    def contents(self, split: Split) -> Tensor:
        """int64 (N, D): which digits of ``digits`` stand on each scene, by their number in its split; -1 for none."""
        return self._placed(split, torch.arange(self.images[split])).source_ND

    def _scenes(self, split: Split, source: Images, id_N: Tensor) -> Images:
        """Digit after digit, each on all scenes at once."""
        placed = self._placed(split, id_N)
        level_NHW = torch.zeros(len(id_N), *self.image_size, dtype=torch.int64)
        y_NHW = torch.zeros_like(level_NHW)
        for place in range(placed.source_ND.shape[1]):
            source_N, side_N = placed.source_ND[:, place], placed.side_ND[:, place]
            shown_N = source_N >= 0
            row_NHS, column_NWS = (
                _weights(start_ND[:, place], side_N, size)
                for start_ND, size in zip((placed.top_ND, placed.left_ND), self.image_size, strict=True)
            )
            digit_NSS = source.x_NCHW[source_N.clamp(min=0), 0].long() * shown_N[:, None, None]
            whole_N11 = (2 * side_N[:, None, None]) ** 2
            ink_NHW = (row_NHS @ digit_NSS @ column_NWS.mT + whole_N11 // 2) // whole_N11
            label_N11 = source.y_N[source_N.clamp(min=0)][:, None, None] + 1
            on_top_NHW = (ink_NHW >= INK) & (ink_NHW > level_NHW)
            y_NHW = torch.where(on_top_NHW, label_N11, y_NHW)
            level_NHW = torch.maximum(level_NHW, ink_NHW)
        return Images(level_NHW.to(torch.uint8)[:, None], y_NHW.to(torch.uint8))

    def _placed(self, split: Split, id_N: Tensor) -> _Placed:
        """Which digits stand where."""
        least, most = self.digits_per_image
        key = noise.key(self.seed, "digit_scenes", split)
        count_N = least + noise.integers(noise.fold(key, 0), id_N, 1, most - least + 1)[:, 0]
        low_N, high_N = _sheet(split, id_N)
        columns: list[_Placed] = []
        for place in range(most):
            word_N2 = _words(noise.fold(key, 2 * place + 1), id_N, 2)
            source_N = low_N + _below(word_N2[:, 0], high_N - low_N)
            side_N = self.digit_size[0] + _below(word_N2[:, 1], self.digit_size[1] - self.digit_size[0] + 1)
            attempts = ATTEMPTS if self.overlap == "none" else 1
            word_NA2 = _words(noise.fold(key, 2 * place + 2), id_N, 2 * attempts).view(-1, attempts, 2)
            top_NA, left_NA = (
                _below(word_NA2[..., axis], size - side_N[:, None] + 1) for axis, size in enumerate(self.image_size)
            )
            free_NA = torch.ones(len(id_N), attempts, dtype=torch.bool)
            if self.overlap == "none":
                for other in columns:
                    apart_NA = _apart(top_NA, side_N[:, None], other.top_ND[:, None], other.side_ND[:, None])
                    apart_NA |= _apart(left_NA, side_N[:, None], other.left_ND[:, None], other.side_ND[:, None])
                    free_NA &= apart_NA | (other.source_ND < 0)[:, None]
            first_N1 = free_NA.int().argmax(1, keepdim=True)
            shown_N = (place < count_N) & free_NA.any(1)
            columns.append(
                _Placed(
                    torch.where(shown_N, source_N, -1),
                    top_NA.gather(1, first_N1)[:, 0],
                    left_NA.gather(1, first_N1)[:, 0],
                    side_N,
                )
            )
        return _Placed(*(torch.stack(column_DN, 1) for column_DN in zip(*columns, strict=True)))


# -- how it is done ---------------------------------------------------------------------------------------------------


class _Placed(NamedTuple):
    """Digits on scenes: (N, D), or (N,) for one of them."""

    source_ND: Tensor  #: number of the digit in its split; -1 where none is shown
    top_ND: Tensor
    left_ND: Tensor
    side_ND: Tensor


def _sheet(split: Split, id_N: Tensor) -> tuple[Tensor, Tensor]:
    """From which digit (included) to which (not included) a scene takes its own."""
    if split == "test":
        return torch.zeros_like(id_N), torch.full_like(id_N, digits.TEST)
    sheet_N = id_N % SHEETS
    return sheet_N * digits.TRAIN // SHEETS, (sheet_N + 1) * digits.TRAIN // SHEETS


def _words(k: noise.Key, id_N: Tensor, n: int) -> Tensor:
    """int64 (N, n), evenly in [0, 2^32)."""
    return noise.bits(k, id_N, n).long() & 0xFFFFFFFF


def _below(word: Tensor, bound: Tensor | int) -> Tensor:
    """A word as a whole number in [0, bound)."""
    return word * bound >> 32


def _apart(start: Tensor, length: Tensor, other_start: Tensor, other_length: Tensor) -> Tensor:
    """Whether two stretches have no pixel in common."""
    return (start + length <= other_start) | (other_start + other_length <= start)


def _weights(start_N: Tensor, length_N: Tensor, size: int) -> Tensor:
    """int64 (N, size, 8): how much of each row of a digit is in each row of the canvas, in parts of 2 * length.

    Bilinear interpolation with half-pixel centres, edges repeated, nothing outside of the digit.
    """
    own_NO = torch.arange(size) - start_N[:, None]
    part_N1 = 2 * length_N[:, None]
    center_NO = (8 * (2 * own_NO + 1) - length_N[:, None]).clamp(min=0)  # in parts, from the middle of the first row
    center_NO = torch.minimum(center_NO, 7 * part_N1)
    distance_NOS = (center_NO[..., None] - torch.arange(8) * part_N1[..., None]).abs()
    inside_NO1 = ((own_NO >= 0) & (own_NO < length_N[:, None]))[..., None]
    return (part_N1[..., None] - distance_NOS).clamp(min=0) * inside_NO1
