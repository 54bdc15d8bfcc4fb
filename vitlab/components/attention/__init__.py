"""Attentions over tokens: their contract, and rotation of queries and keys.

Several implementations compute one function of the same weights.  Each has its own parameter names, and converts a
state to and from the canonical form, which is timm's: ``qkv.weight`` with rows [q; k; v] and heads in order
inside each, ``proj``, and ``q_norm``, ``k_norm`` where queries and keys are normalised.

B images, T tokens, D width, H heads, K channels of a head (D = H * K).
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vitlab.components.base import NewState, Part, Rotation, State
from vitlab.registry import Slot

MixValues = Callable[[Tensor, Tensor], Tensor]
"""From the keys and values (B, H, T, K) of an attention to the values that its weights are applied to."""


class Attention(Part):
    """Base of attentions.

    A subclass defines ``forward``, and ``maps`` if it has attention weights.
    """

    takes_bias: ClassVar[bool] = True  #: whether a bias on the logits is applied
    takes_rotation: ClassVar[bool] = True  #: whether queries and keys are rotated
    canonical: ClassVar[Literal["timm"] | None] = "timm"  #: the canonical form of its weights; None if it has none
    mixes_values: ClassVar[bool] = False  #: whether ``forward`` takes a fourth argument, :data:`MixValues` or None
    counts_keys: ClassVar[bool] = False
    """Whether the bias may be of images and keys, (B, 1, 1, T), where log(n) gives a key the weight of n equal ones."""

    block_index: int = 0  #: of the attention's block, from 0; set by the block

    @abstractmethod
    def forward(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        """Mix tokens, (B, T, D) to (B, T, D)."""

    def maps(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        """Return the weight of every key for every query, (B, H, T, T), before dropout; rows sum to 1.

        Raises:
            NotImplementedError: if the attention has no such weights.
        """
        raise NotImplementedError(f"{type(self).__name__} has no attention weights that sum to 1")

    def to_canonical(self, state: State) -> NewState:
        """Convert a state dict of this module to the canonical layout.  Depends only on ``state`` and the sizes."""
        return dict(state)

    def from_canonical(self, state: State) -> NewState:
        """Convert a canonical state dict to the layout of this module; the inverse of :meth:`to_canonical`."""
        return dict(state)


attention = Slot("attention", Attention)  # type: ignore[type-abstract]  # a contract is not built


def rotate(x_BHTK: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each pair of channels (2i, 2i + 1) by its angle, in the wider of the two dtypes."""
    cos, sin = rotation
    even, odd = x_BHTK[..., 0::2], x_BHTK[..., 1::2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
    return turned.flatten(-2).to(x_BHTK.dtype)
