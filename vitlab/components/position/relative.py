"""Encodings that add a bias to the logits of attention, by the relative position of query and key.

T tokens, P prefix tokens, N patches, R and C rows and columns of the grid, H heads, L tables.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.components.base import NewState, State
from vitlab.components.position import Position, Resampling, patch_coordinates, position, resample_grid
from vitlab.errors import WeightsError
from vitlab.geometry import Geometry


@position.register("relative_bias")
class RelativeBias(Position):
    """A learned bias for every offset between two patches, per head.

    A table has (2R-1)(2C-1) rows for the offsets.  Where there are prefix tokens, three more follow: from the prefix
    to a patch, from a patch to the prefix, and within the prefix; several prefix tokens share them.

    Reference: arXiv:2103.14030 (Swin), arXiv:2106.08254 (BEiT: prefix, a table per block).

    Args:
        where: a table for each block, or one for all.
    """

    index: Tensor

    def __init__(self, g: Geometry, *, where: Literal["every_layer", "every_layer_shared"] = "every_layer") -> None:
        super().__init__()
        self.tables = g.depth if where == "every_layer" else 1
        rows, columns = g.grid
        offsets = (2 * rows - 1) * (2 * columns - 1)
        count = offsets + (3 if g.prefix else 0)
        self.relative_position_bias_table = nn.Parameter(torch.empty(self.tables, count, g.heads))
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)
        row_N, column_N = patch_coordinates(g)
        # Offsets are shifted to begin at 0.
        down = row_N[:, None] - row_N + rows - 1
        right = column_N[:, None] - column_N + columns - 1
        prefix = len(g.prefix)
        index = F.pad(down * (2 * columns - 1) + right, (prefix, 0, prefix, 0))
        index[:prefix, prefix:] = offsets
        index[prefix:, :prefix] = offsets + 1
        index[:prefix, :prefix] = offsets + 2
        self.register_buffer("index", index, persistent=False)

    def no_weight_decay(self) -> frozenset[str]:
        return frozenset({"relative_position_bias_table"})

    def bias(self, layer: int) -> Tensor:
        table = self.relative_position_bias_table[layer - 1 if self.tables > 1 else 0]
        return table[self.index].permute(2, 0, 1)

    def resample(self, state: State, old: Geometry, new: Geometry, how: Resampling) -> NewState:
        if new.prefix and not old.prefix:
            raise WeightsError(
                "these weights come from a model without prefix tokens, so their table of relative positions has "
                f"no rows for {', '.join(new.prefix)}; remove these from model.prefix, or use weights that have them"
            )
        source = (2 * old.grid[0] - 1, 2 * old.grid[1] - 1)
        target = (2 * new.grid[0] - 1, 2 * new.grid[1] - 1)
        count = source[0] * source[1]
        tables = []
        for table in state["relative_position_bias_table"]:
            grid = resample_grid(table[:count].unflatten(0, source), target, how).flatten(0, 1)
            tables.append(torch.cat([grid, table[count:]]) if new.prefix else grid)
        return {**state, "relative_position_bias_table": torch.stack(tables)}


@position.register("alibi2d")
class ALiBi2D(Position):
    """Attention falls off linearly with the Euclidean distance of two patches, with a fixed slope per head.

    Slopes are as in ALiBi.  To and from prefix tokens there is no bias.

    Reference: arXiv:2311.00566 (CROMA); arXiv:2108.12409 (ALiBi).
    """

    penalty: Tensor

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        row_N, column_N = (place_N.double() for place_N in patch_coordinates(g))
        distance_NN = torch.hypot(row_N[:, None] - row_N, column_N[:, None] - column_N)
        slope_H = torch.tensor(alibi_slopes(g.heads), dtype=torch.float64)
        prefix = len(g.prefix)
        # Padding with zeros: no bias to and from prefix tokens.
        self._register_constant("penalty", F.pad(-slope_H[:, None, None] * distance_NN, (prefix, 0, prefix, 0)))

    def bias(self, layer: int) -> Tensor:
        return self.penalty


def alibi_slopes(heads: int) -> list[float]:
    """Return 2^(-8/h), 2^(-16/h), ... for a power of two, else slopes of the powers below and above."""
    power = 2 ** int(math.log2(heads))
    below = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    above = [2 ** (-4 * (head + 1) / power) for head in range(2 * power)]
    return below + above[0::2][: heads - power]
