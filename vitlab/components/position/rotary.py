"""Encodings that rotate queries and keys, so that their product depends on their relative position.

T tokens, N patches, H heads, K channels of a head, Q a quarter of K.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vitlab.components.position.contract import Position, Rotation, places, position
from vitlab.errors import GeometryError
from vitlab.geometry import Geometry


class _Rotary(Position):
    """Base of rotary encodings; rotation by row and by column needs groups of four channels."""

    needs_rotation: ClassVar[bool] = True

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        if reason := self.incompatibility(g, {}):
            raise GeometryError((("heads", "dim", "position"), reason))
        self.prefix = len(g.prefix)

    @classmethod
    def incompatibility(cls, g: Geometry, options: Mapping[str, Any]) -> str | None:
        if g.head_dim % 4:
            return (
                "a rotary position in two dimensions turns channels in fours, and head_dim "
                f"{g.head_dim} (dim {g.dim} / heads {g.heads}) is not a multiple of 4"
            )
        return None

    def pair(self, angle: Tensor) -> Rotation:
        """Return cosines and sines of all tokens for angles (..., N, K/2) of patches; prefix tokens have angle 0."""
        return F.pad(angle.cos(), (0, 0, self.prefix, 0), value=1.0), F.pad(angle.sin(), (0, 0, self.prefix, 0))


@position.register("rope2d")
class RoPE2D(_Rotary):
    """Axial rotary encoding: half of the channel pairs turn with the column, the other half with the row.

    Pair i of a half turns by theta^(-4i/K) per unit of its coordinate.  Prefix tokens are not turned.

    Reference: arXiv:2403.13298 (axial); arXiv:2104.09864; arXiv:2508.10104 (DINOv3, centred).

    Args:
        g: the sizes of the model.
        theta: the base of the frequencies.
        coordinates: ``patches`` counts rows and columns from 0.  ``centred`` runs from -1 to 1 over each side of
            the image, whatever the grid, at the centres of the patches, and turns by 2 pi per unit, as in DINOv3.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        g: Geometry,
        *,
        theta: Annotated[float, Field(gt=0)] = 100.0,
        coordinates: Literal["patches", "centred"] = "patches",
    ) -> None:
        super().__init__(g)
        row_N, column_N = (place.to(torch.float64) for place in places(g))
        if coordinates == "centred":
            row_N, column_N = (
                2 * math.pi * (2 * (place + 0.5) / side - 1)
                for place, side in zip((row_N, column_N), g.grid, strict=True)
            )
        frequency_Q = theta ** (-4 * torch.arange(g.head_dim // 4, dtype=torch.float64) / g.head_dim)
        cos, sin = self.pair(torch.cat([column_N[:, None] * frequency_Q, row_N[:, None] * frequency_Q], 1))
        self.register_buffer("cos", cos.to(torch.get_default_dtype()), persistent=False)
        self.register_buffer("sin", sin.to(torch.get_default_dtype()), persistent=False)

    def rotation(self, layer: int) -> Rotation:
        """Return the fixed cosines and sines."""
        return self.cos, self.sin


@position.register("rope2d_mixed")
class RoPE2DMixed(_Rotary):
    """Rotary encoding along learned directions: every pair of every head and block has its own.

    A pair turns by x * fx + y * fy.  At the start each head has two orthogonal directions, turned by a random angle,
    and frequencies theta^(-4i/K).

    Reference: arXiv:2403.13298 (mixed).

    Args:
        theta: base of the initial frequencies.
    """

    column: Tensor
    row: Tensor

    def __init__(self, g: Geometry, *, theta: Annotated[float, Field(gt=0)] = 10.0) -> None:
        super().__init__(g)
        frequency_Q = theta ** (-4 * torch.arange(g.head_dim // 4) / g.head_dim)
        turn_LH1 = 2 * math.pi * torch.rand(g.depth, g.heads, 1)
        direction_LH2 = torch.cat([turn_LH1, turn_LH1 + math.pi / 2], 2)
        fx = (direction_LH2.cos()[..., None] * frequency_Q).flatten(2)
        fy = (direction_LH2.sin()[..., None] * frequency_Q).flatten(2)
        self.freqs = nn.Parameter(torch.stack([fx, fy]).to(torch.get_default_dtype()))  # (2, depth, H, K/2)
        row_N, column_N = places(g)
        self.register_buffer("column", column_N.to(torch.get_default_dtype()), persistent=False)
        self.register_buffer("row", row_N.to(torch.get_default_dtype()), persistent=False)

    def no_weight_decay(self) -> frozenset[str]:
        """Return the name of the frequencies, which have no weight decay."""
        return frozenset({"freqs"})

    def rotation(self, layer: int) -> Rotation:
        """Return cosines and sines of the layer's learned frequencies."""
        # Angles grow with the grid and are wrapped by the cosine: 16 bits would not separate neighbours.
        freqs = self.freqs if self.freqs.dtype.itemsize >= 4 else self.freqs.float()
        fx_HK, fy_HK = freqs[0, layer - 1], freqs[1, layer - 1]
        return self.pair(self.column[:, None] * fx_HK[:, None] + self.row[:, None] * fy_HK[:, None])
