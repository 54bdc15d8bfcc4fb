"""Resampling of values from one grid of patches to another.

Libraries differ by up to the size of the values themselves, so every setting is explicit and has a name.

R, C rows and columns of a grid, X values per place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from vitlab.errors import UserError, nearest
from vitlab.geometry import Pair


@dataclass(frozen=True)
class Resampling:
    """The settings of a resampling."""

    filter: Literal["nearest", "bilinear", "bicubic"] = "bicubic"
    align_corners: bool = False  #: whether the corner places, rather than the corners of the cells, coincide
    antialias: bool = True  #: whether the filter widens if the grid shrinks (and is another one if it grows)

    @classmethod
    def preset(cls, name: str) -> Resampling:
        """Return the settings of a library, one of :data:`PRESETS`.

        Raises:
            UserError: for an unknown name.
        """
        if name not in PRESETS:
            raise UserError(f"no resampling called '{name}'.{nearest(name, PRESETS)} Known: {', '.join(PRESETS)}.")
        return PRESETS[name]


PRESETS: Mapping[str, Resampling] = {
    "timm": Resampling("bicubic", align_corners=False, antialias=True),
    "google": Resampling("bilinear", align_corners=True, antialias=False),  # scipy.ndimage.zoom of order 1
    "deit": Resampling("bicubic", align_corners=False, antialias=False),
    "torchvision": Resampling("bicubic", align_corners=True, antialias=False),
    "hf": Resampling("bicubic", align_corners=False, antialias=False),
}
"""Settings of each library when it loads a checkpoint at another resolution."""


def resample_grid(values_RCX: Tensor, size: Pair, how: Resampling) -> Tensor:
    """Resample (R, C, X) to (*size, X), in at least float32; values of the same size are unchanged."""
    if tuple(values_RCX.shape[:2]) == tuple(size):
        return values_RCX
    wide = values_RCX if values_RCX.dtype.itemsize >= 4 else values_RCX.float()
    x_1XRC = wide.permute(2, 0, 1)[None]
    if how.filter == "nearest":
        y_1XRC = F.interpolate(x_1XRC, size=size, mode="nearest")
    else:
        y_1XRC = F.interpolate(
            x_1XRC, size=size, mode=how.filter, align_corners=how.align_corners, antialias=how.antialias
        )
    return y_1XRC[0].permute(1, 2, 0).to(values_RCX.dtype)
