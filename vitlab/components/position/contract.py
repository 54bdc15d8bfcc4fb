"""The contract of position encodings: five hooks, each with the identity as default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from vitlab.components.base import Part
from vitlab.components.position.resampling import Resampling
from vitlab.geometry import Geometry
from vitlab.registry import Slot

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, each (T, K/2), or (H, T, K/2) where heads differ; pairs are channels 2i and 2i + 1."""

State = Mapping[str, Tensor]


class Position(Part):
    """Base of position encodings.

    Layer 0 is the stem, before dropout; block i, counted from 0, is layer i + 1.  The model calls ``add`` at every
    layer (before the block), ``rotation`` and ``bias`` for every block, and ``mix`` after every block.
    """

    needs_bias: ClassVar[bool] = False  #: whether the attention must apply a bias on its logits
    needs_rotation: ClassVar[bool] = False  #: whether the attention must rotate queries and keys

    def add(self, x_BTD: Tensor, layer: int) -> Tensor:
        """Add an encoding to tokens, (B, T, D) to (B, T, D)."""
        return x_BTD

    def rotation(self, layer: int) -> Rotation | None:
        """Return the rotation of queries and keys; rows of prefix tokens have cosine 1 and sine 0."""
        return None

    def bias(self, layer: int) -> Tensor | None:
        """Return the bias on the logits of every head, (H, T, T), for query (first T) and key."""
        return None

    def mix(self, x_BTD: Tensor, layer: int) -> Tensor:
        """Mix tokens after a block with their neighbours, (B, T, D) to (B, T, D)."""
        return x_BTD

    def resample(self, state: State, old: Geometry, new: Geometry, how: Resampling) -> dict[str, Tensor]:
        """Resample a state of this module from the grid of ``old`` to that of ``new``.

        Raises:
            WeightsError: if ``new`` has prefix tokens whose rows ``old`` lacks.
        """
        return dict(state)


position = Slot("position", Position)


def places(g: Geometry) -> tuple[Tensor, Tensor]:
    """Return the row and column of every patch, each int64 (N,)."""
    place_N = torch.arange(g.patches)
    return place_N // g.grid[1], place_N % g.grid[1]
