"""Augmentations that move pixels: ``flip``, ``crop``.

B images of a batch, C channels, H rows, W columns.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from vitlab import noise
from vitlab.data.augment.base import Augment, augment


@augment.register("flip")
class Flip(Augment):
    """Mirror left and right."""

    def __init__(self, *, p: Annotated[float, Field(ge=0, le=1)] = 0.5) -> None:
        """
        Args:
            p: probability that an image is mirrored.
        """
        self.p = p

    def __call__(self, x_BCHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        mirrored_B = noise.uniform(key, id_B, 1)[:, 0] < self.p
        return torch.where(mirrored_B[:, None, None, None], x_BCHW.flip(-1), x_BCHW)


@augment.register("crop")
class Crop(Augment):
    """Pad on every side, then cut the original size out at a place drawn evenly (He et al., arXiv:1512.03385)."""

    def __init__(self, *, padding: Annotated[int, Field(ge=1)] = 4, mode: Literal["zero", "reflect"] = "zero") -> None:
        """
        Args:
            padding: pixels on every side.
            mode: ``zero`` pads with black, ``reflect`` mirrors at the border without repeating it.
        """
        self.padding = padding
        self.mode: Literal["zero", "reflect"] = mode

    def __call__(self, x_BCHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        height, width = x_BCHW.shape[-2:]
        places = 2 * self.padding + 1
        offset_B2 = noise.integers(key, id_B, 2, places)
        if self.mode == "zero":
            padded_BCHW = F.pad(x_BCHW, (self.padding,) * 4)
        else:
            row_H, column_W = (_reflected(n, self.padding, x_BCHW.device) for n in (height, width))
            padded_BCHW = x_BCHW[:, :, row_H][..., column_W]
        # All crops as one strided view, of which each image picks one: faster than any gather.
        view_BCYXHW = padded_BCHW.unfold(2, height, 1).unfold(3, width, 1)
        one_B = torch.arange(len(x_BCHW), device=x_BCHW.device)
        return view_BCYXHW[one_B, :, offset_B2[:, 0], offset_B2[:, 1]]


def _reflected(n: int, padding: int, device: torch.device) -> Tensor:
    """Indices of 0..n-1 with ``padding`` more on either side, mirrored at the borders."""
    period = max(2 * (n - 1), 1)
    index = torch.arange(-padding, n + padding, device=device).abs() % period
    return torch.minimum(index, period - index) if n > 1 else torch.zeros_like(index)
