"""Mixing: training on pairs of images, overlaid or cut together, and on the shares of their classes.

One draw a step, for the whole batch, from the stream ``mixup``: whether, how, and with what weight.  The i-th image of
a batch is paired with the i-th from its end, as in timm: the order of a batch is drawn anew in every epoch, so that is
as good as a draw.  The draw is made on the host, and nothing is read back from the device.

B batch, C channels, H and W pixels, K classes.
Reference: arXiv:1710.09412 (mixup), arXiv:1905.04899 (cutmix).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from scipy.special import betaincinv
from torch import Tensor

from vitlab import noise
from vitlab.data.prepare import Batch
from vitlab.spec.trial import Mix


class Box(NamedTuple):
    """A rectangle of pixels: rows ``top`` up to ``bottom``, columns ``left`` up to ``right``."""

    top: int
    bottom: int
    left: int
    right: int


class Mixed(NamedTuple):
    """How a batch is mixed."""

    kept: float  #: the weight of an image itself; 1 less that is its partner's
    box: Box | None  #: what of it is its partner's; None: the two are overlaid


class Mixing:
    """The mixing of one training, a pure function of the step."""

    def __init__(self, how: Mix, seed: int, classes: int) -> None:
        """
        Args:
            how: what is mixed, and how strongly.
            seed: of the stream ``mixup``.
            classes: number of classes.
        """
        self.how = how
        self.seed = seed
        self.classes = classes

    def __call__(self, batch: Batch, step: int) -> Batch:
        """The batch mixed, with the shares of the classes for its labels; they are shares where it is not mixed, too.

        Args:
            batch: normalised images, and the indices of their classes.
            step: of the optimizer, from 0.
        """
        height, width = batch.x_BCHW.shape[-2:]
        kept, box = self.draw(step, height, width)
        share_BK = F.one_hot(batch.y_B, self.classes).to(batch.x_BCHW.dtype)
        return batch._replace(x_BCHW=_joined(batch.x_BCHW, kept, box), y_B=_overlaid(share_BK, kept))

    def rows(self, rows: range, count: int) -> list[range]:
        """What mixing some images of a batch takes: these, and then their partners, which end up behind them.

        Args:
            rows: places in the batch.
            count: images of the batch.
        """
        partners = range(count - rows.stop, count - rows.start)
        return [rows] if partners == rows else [rows, partners]

    def draw(self, step: int, height: int, width: int) -> Mixed:
        """How the batch of a step is mixed, for images of this size."""
        how = self.how
        key = noise.key(self.seed, "mixup", step)
        mixes, switches, high, low, row, column = noise.uniform(key, torch.zeros(1), 6)[0].tolist()
        if mixes >= how.prob:
            return Mixed(1.0, None)
        cuts = not how.mixup or (how.cutmix > 0 and switches < how.switch)
        # A Beta variate is the inverse of its distribution function at a uniform one, here of 48 bits.
        a = how.cutmix if cuts else how.mixup
        kept = float(betaincinv(a, a, high + low * 2.0**-24))
        if not cuts:
            return Mixed(kept, None)
        box = rectangle(kept, int(row * height), int(column * width), height, width)
        covered = (box.bottom - box.top) * (box.right - box.left)
        return Mixed(1 - covered / (height * width), box)


def rectangle(kept: float, row: int, column: int, height: int, width: int) -> Box:
    """A rectangle of the shape of the image, about a pixel, cut off at the borders; uncut it leaves the share ``kept``.

    Since it may be cut off, and its sides are whole pixels, the weight that counts is that of the pixels it covers.
    """
    rows, columns = (int(size * math.sqrt(1 - kept)) for size in (height, width))
    return Box(
        max(0, row - rows // 2),
        min(height, row + (rows + 1) // 2),
        max(0, column - columns // 2),
        min(width, column + (columns + 1) // 2),
    )


# -- how it is done ---------------------------------------------------------------------------------------------------


def _joined(x_BCHW: Tensor, kept: float, box: Box | None) -> Tensor:
    if box is None:
        return _overlaid(x_BCHW, kept)
    inside = (..., slice(box.top, box.bottom), slice(box.left, box.right))
    joined_BCHW = x_BCHW.clone()
    joined_BCHW[inside] = x_BCHW[inside].flip(0)
    return joined_BCHW


def _overlaid(value: Tensor, kept: float) -> Tensor:
    return value if kept == 1 else value * kept + value.flip(0) * (1 - kept)
