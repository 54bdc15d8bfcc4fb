"""Shifted patch tokenization (SPT) and locality self-attention (LSA).  Reference: arXiv:2112.13492.

B images, C channels, H and W pixels, N patches; T tokens, D width, H heads, K channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vitlab.plugin import Attention, Dropout, Geometry, PatchEmbedding, Rotation, rotate

Probability = Annotated[float, Field(ge=0, lt=1)]

MASKED = -1e4
"""Bias of a product that is left out: its weight is 0 in every precision, and that of a single token is 1."""


class Shifted(PatchEmbedding):
    """Patches of the image and of four copies of it, shifted by half a patch; normalised, then mapped.

    The copies are shifted along the diagonals and filled with zeros.  Reference: arXiv:2112.13492 (SPT).
    """

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        self.patch = g.patch
        numbers = 5 * g.channels * math.prod(g.patch)
        self.norm = nn.LayerNorm(numbers)
        self.proj = nn.Linear(numbers, g.dim)

    @classmethod
    def incompatibility(cls, g: Geometry, options: Mapping[str, Any]) -> str | None:
        """Return a sentence if half a patch is less than a pixel."""
        if min(g.patch) < 2:
            return f"patch 'shifted' shifts by half a patch, and patch_size is {min(g.patch)}; set it to 2 or more"
        return None

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the tokens of the patches, (B, N, D)."""
        down, right = (side // 2 for side in self.patch)
        # What one side is padded by is cut off at the other.
        copies = [F.pad(x_BCHW, (dx, -dx, dy, -dy)) for dy in (down, -down) for dx in (right, -right)]
        patches_BFN = F.unfold(torch.cat([x_BCHW, *copies], 1), self.patch, stride=self.patch)
        out_BND: Tensor = self.proj(self.norm(patches_BFN.mT))
        return out_BND


class Locality(Attention):
    """Softmax attention in which no token attends to itself, and each head learns the scale of its products.

    Reference: arXiv:2112.13492 (LSA).

    Args:
        g: sizes.
        qkv_bias: whether queries, keys and values have a bias.
        drop: dropout of attention weights.
        proj_drop: dropout after the last matrix.
    """

    def __init__(
        self, g: Geometry, *, qkv_bias: bool = True, drop: Probability = 0.0, proj_drop: Probability = 0.0
    ) -> None:
        super().__init__()
        self.shape = (3, g.heads, g.head_dim)
        self.qkv = nn.Linear(g.dim, 3 * g.dim, bias=qkv_bias)
        self.scale_H = nn.Parameter(torch.full((g.heads,), g.head_dim**-0.5))
        self.drop = Dropout(drop)
        self.proj = nn.Linear(g.dim, g.dim)
        self.proj_drop = Dropout(proj_drop)

    def forward(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        """Mix tokens, (B, T, D) to (B, T, D)."""
        weights_BHTT, v_BHTK = self._weights_and_values(x_BTD, rotation, bias_HTT)
        y_BTHK = (self.drop(weights_BHTT) @ v_BHTK).transpose(1, 2)
        out_BTD: Tensor = self.proj_drop(self.proj(y_BTHK.flatten(2)))
        return out_BTD

    def maps(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        """Return the weights, (B, H, T, T), with zeros on the diagonal."""
        return self._weights_and_values(x_BTD, rotation, bias_HTT)[0]

    def _weights_and_values(
        self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        q_BHTK, k_BHTK, v_BHTK = self.qkv(x_BTD).unflatten(-1, self.shape).permute(2, 0, 3, 1, 4).unbind(0)
        if rotation is not None:
            q_BHTK, k_BHTK = rotate(q_BHTK, rotation), rotate(k_BHTK, rotation)
        logits_BHTT = (q_BHTK * self.scale_H[:, None, None].to(q_BHTK.dtype)) @ k_BHTK.transpose(-2, -1)
        if bias_HTT is not None:
            logits_BHTT = logits_BHTT + bias_HTT.to(logits_BHTT.dtype)
        mask_TT = MASKED * torch.eye(x_BTD.shape[1], device=x_BTD.device, dtype=logits_BHTT.dtype)
        return (logits_BHTT + mask_TT).softmax(-1), v_BHTK

    def from_canonical(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state, with this module's own scales if it comes from another attention."""
        return {"scale_H": self.scale_H.detach(), **state}
