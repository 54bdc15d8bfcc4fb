"""A position encoding in polar coordinates: distance from the centre of the image, and direction.

B images, T tokens, N patches, D width, Q = D / 4 frequencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from vitlab.plugin import Geometry, Position


class Polar(Position):
    """Sines and cosines of the distance from the centre and of the direction.  Reference: Schwartz 1977 (retinotopy).

    Half of the channels encode the distance, at frequencies spaced as in arXiv:1706.03762; the other half encode the
    direction, at whole multiples, so that the encoding is periodic.  Prefix tokens get zeros.

    Args:
        g: the sizes of the model.
        temperature: base of the frequencies of the distance.
    """

    def __init__(self, g: Geometry, *, temperature: Annotated[float, Field(gt=1)] = 100.0) -> None:
        super().__init__()
        rows, columns = (torch.linspace(-1, 1, n) if n > 1 else torch.zeros(1) for n in g.grid)
        y_N, x_N = (axis.flatten() for axis in torch.meshgrid(rows, columns, indexing="ij"))
        number_Q = torch.arange(g.dim // 4)
        distance_NQ = torch.hypot(y_N, x_N)[:, None] * torch.pi * temperature ** (number_Q / len(number_Q))
        direction_NQ = torch.atan2(y_N, x_N)[:, None] * (number_Q + 1)
        rows_ND = torch.cat([distance_NQ.sin(), distance_NQ.cos(), direction_NQ.sin(), direction_NQ.cos()], 1)
        rows_TD = torch.cat([torch.zeros(len(g.prefix), g.dim), rows_ND])
        self.register_buffer("rows_TD", rows_TD, persistent=False)

    @classmethod
    def incompatibility(cls, g: Geometry, options: Mapping[str, Any]) -> str | None:
        """Return why this geometry has no polar code, or None."""
        return None if g.dim % 4 == 0 else f"position 'polar' needs a dim that is a multiple of 4; found {g.dim}"

    def add(self, x_BTD: Tensor, layer: int) -> Tensor:
        """Add the rows before the first block."""
        return x_BTD + self.get_buffer("rows_TD").to(x_BTD.dtype) if layer == 0 else x_BTD
