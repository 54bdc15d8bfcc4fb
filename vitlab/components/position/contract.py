"""The contract of position encodings: the five places where one can act, each with the identity as default."""

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
    """Tells tokens where they are.

    Layer 0 is the stem, before dropout; block i, counted from 0, is layer i + 1.  The model calls ``add`` at every
    layer (before the block), ``rotation`` and ``bias`` for every block, and ``mix`` after every block.
    """

    needs_bias: ClassVar[bool] = False  #: whether the attention must apply a bias on its logits
    needs_rotation: ClassVar[bool] = False  #: whether the attention must rotate queries and keys

    def add(self, x_BTD: Tensor, layer: int) -> Tensor:
        """Tokens with an encoding added: (B, T, D) to (B, T, D)."""
        return x_BTD

    def rotation(self, layer: int) -> Rotation | None:
        """What queries and keys are rotated by; rows of prefix tokens have cosine 1 and sine 0."""
        return None

    def bias(self, layer: int) -> Tensor | None:
        """(H, T, T): what is added to the logits of every head, for query (first T) and key."""
        return None

    def mix(self, x_BTD: Tensor, layer: int) -> Tensor:
        """Tokens after a block, mixed with their neighbours: (B, T, D) to (B, T, D)."""
        return x_BTD

    def resample(self, state: State, old: Geometry, new: Geometry, how: Resampling) -> dict[str, Tensor]:
        """Own state, learned on the grid of ``old``, for the grid of ``new``.

        Raises:
            WeightsError: if ``new`` has prefix tokens whose rows ``old`` lacks.
        """
        return dict(state)


position = Slot("position", Position)


def places(g: Geometry) -> tuple[Tensor, Tensor]:
    """Row and column of every patch, each int64 (N,)."""
    place_N = torch.arange(g.patches)
    return place_N // g.grid[1], place_N % g.grid[1]
