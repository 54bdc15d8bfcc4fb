"""Mixup and CutMix: training on pairs of images and the shares of their classes.

Each step makes one draw for the whole batch from the stream ``mixup``: whether to mix, by which method, and with what
weight.  Image i is paired with image B - 1 - i, as in timm; batches are shuffled every epoch, so the pairs are random.
The draw is made on the host, and nothing is read back from the device.

B batch, C channels, H and W pixels, K classes.
Reference: arXiv:1710.09412 (mixup), arXiv:1905.04899 (cutmix).
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from scipy.special import betaincinv
from torch import Tensor

from vitlab import noise
from vitlab.data.batches import Batch
from vitlab.spec.trial import Mix

Box = tuple[slice, slice]
"""Rows and columns of a rectangle of pixels."""


class Mixed(NamedTuple):
    """The mixing of one batch."""

    weight: float  #: of the image itself; its partner has 1 - weight
    box: Box | None  #: pixels taken from the partner (CutMix); None for mixup


class Mixing:
    """The mixing of a training, a pure function of the step.

    Args:
        how: Methods and strengths.
        seed: Seed of the stream ``mixup``.
        classes: Number of classes.
    """

    def __init__(self, how: Mix, seed: int, classes: int) -> None:
        self.how = how
        self.seed = seed
        self.classes = classes

    def __call__(self, batch: Batch, step: int) -> Batch:
        """Return the mixed batch, with class shares as labels, also if the step does not mix.

        Args:
            batch: Normalised images and their class indices.
            step: Optimizer step, from 0.
        """
        weight, box = self.draw_mixing(step, *batch.x_BCHW.shape[-2:])
        share_BK = F.one_hot(batch.y_B, self.classes).to(batch.x_BCHW.dtype)
        if box is None:
            mixed_BCHW = _blend_with_partner(batch.x_BCHW, weight)
        else:  # image i and image B - 1 - i exchange their boxes
            inside = (..., *box)
            mixed_BCHW = batch.x_BCHW.clone()
            mixed_BCHW[inside] = batch.x_BCHW[inside].flip(0)
        return batch._replace(x_BCHW=mixed_BCHW, y_B=_blend_with_partner(share_BK, weight))

    def rows(self, rows: range, count: int) -> list[range]:
        """Return the ranges of images needed to mix ``rows`` of a batch: ``rows``, then their partners.

        Args:
            rows: Indices in the batch.
            count: Images of the batch.
        """
        partners = range(count - rows.stop, count - rows.start)
        return [rows] if partners == rows else [rows, partners]

    def draw_mixing(self, step: int, height: int, width: int) -> Mixed:
        """Draw the mixing of a step for images of this size."""
        how = self.how
        # One draw for the batch, on the host, since a box is a slice.
        key = noise.key(self.seed, "mixup", step)
        mix_draw, switch_draw, high, low, row, column = noise.uniform(key, torch.zeros(1), 6)[0].tolist()
        if mix_draw >= how.prob:
            return Mixed(1.0, None)
        cuts = not how.mixup or (how.cutmix > 0 and switch_draw < how.switch)
        # A Beta variate by inverse transform sampling, from a uniform variate of 48 bits.
        a = how.cutmix if cuts else how.mixup
        weight = float(betaincinv(a, a, high + low * 2.0**-24))
        if not cuts:
            return Mixed(weight, None)
        # A box of the image's aspect ratio around a pixel; its borders are the image's where it would leave it.
        rows, columns = (_box_span(centre, weight, side) for centre, side in ((row, height), (column, width)))
        covered = (rows.stop - rows.start) * (columns.stop - columns.start)
        return Mixed(1 - covered / (height * width), (rows, columns))


def _box_span(centre: float, weight: float, side: int) -> slice:
    """Return the rows, or columns, of a box around a share of a side, which has the share ``weight`` outside."""
    place, length = int(centre * side), int(side * math.sqrt(1 - weight))
    return slice(max(0, place - length // 2), min(side, place + (length + 1) // 2))


def _blend_with_partner(value: Tensor, weight: float) -> Tensor:
    return value if weight == 1 else value * weight + value.flip(0) * (1 - weight)
