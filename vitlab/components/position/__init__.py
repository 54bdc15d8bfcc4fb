"""Position encodings: the five hooks of their contract, and resampling of their values from one grid to another.

additive.py     none, learned, learned2d, sinusoidal, sincos2d, fourier, conditional
rotary.py       rope2d, rope2d_mixed
relative.py     relative_bias, alibi2d
combined.py     together, written as a list of the others

Libraries resample in ways that differ by up to the size of the values themselves, so every setting is explicit and has
a name.

R, C rows and columns of a grid, X values per place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.components.base import Options, Part, Rotation, State
from vitlab.errors import UserError, nearest
from vitlab.geometry import Geometry, Pair
from vitlab.registry import Slot


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
    corners = None if how.filter == "nearest" else how.align_corners
    antialias = how.antialias and how.filter != "nearest"
    y_1XRC = F.interpolate(x_1XRC, size=size, mode=how.filter, align_corners=corners, antialias=antialias)
    return y_1XRC[0].permute(1, 2, 0).to(values_RCX.dtype)


class Position(Part):
    """Base of position encodings: five hooks, each with the identity as default.

    Layer 0 is the stem, before dropout; block i, counted from 0, is layer i + 1.  The model calls ``add`` at every
    layer (before the block), ``rotation`` and ``bias`` for every block, and ``mix`` after every block.
    """

    needs_bias: ClassVar[bool] = False  #: whether the attention must apply a bias on its logits
    needs_rotation: ClassVar[bool] = False  #: whether the attention must rotate queries and keys

    def add(self, x_BTD: Tensor, layer: int) -> Tensor:
        """Add an encoding to tokens, (B, T, D) to (B, T, D)."""
        return x_BTD

    def rotation(self, layer: int) -> Rotation | None:
        """Return the rotation of queries and keys, in which class and distillation tokens stay as they are, or None."""
        return None

    def bias(self, layer: int) -> Tensor | None:
        """Return the bias on the logits of every head, (H, T, T), for query (first T) and key, or None."""
        return None

    def mix(self, x_BTD: Tensor, layer: int) -> Tensor:
        """Mix tokens after a block with their neighbours, (B, T, D) to (B, T, D)."""
        return x_BTD

    @classmethod
    def acts_in_blocks(cls, options: Options) -> bool:
        """Return whether the encoding acts at a later layer than the stem, where some patches may be missing."""
        return cls.needs_bias or cls.needs_rotation or cls.mix is not Position.mix

    def canonical_name(self, name: str) -> str:
        """Return the name in a canonical checkpoint of an entry of this module's state."""
        return name

    def resample(self, state: State, old: Geometry, new: Geometry, how: Resampling) -> dict[str, Tensor]:
        """Resample a state of this module from the grid of ``old`` to the grid of ``new``.

        Raises:
            WeightsError: if ``new`` has prefix tokens whose rows ``old`` lacks.
        """
        return dict(state)


position = Slot("position", Position)


def places(g: Geometry) -> tuple[Tensor, Tensor]:
    """Return the row and column of every patch, each int64 (N,)."""
    place_N = torch.arange(g.patches)
    return place_N // g.grid[1], place_N % g.grid[1]
