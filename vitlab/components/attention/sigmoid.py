"""Attention with a sigmoid in the place of the softmax.

B images, T tokens, D width, H heads, K channels of a head.
"""

from __future__ import annotations

import math

from torch import Tensor

from vitlab.components.attention.contract import Attention, Rotation, attention
from vitlab.components.attention.softmax import Explicit


@attention.register("sigmoid")
class Sigmoid(Explicit):
    """Weights are the sigmoid of the scaled products less the logarithm of the number of tokens.

    Reference: arXiv:2409.04431.  The weights of a query do not sum to 1, so there are no attention maps to explain.
    """

    counts_keys = False  # the sigmoid of a sum with log(n) is not n times the sigmoid

    def _mix(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, bias_HTT: Tensor | None) -> Tensor:
        logits_BHTT = (q_BHTK * self.scale) @ k_BHTK.transpose(-2, -1) - math.log(k_BHTK.shape[2])
        if bias_HTT is not None:
            logits_BHTT = logits_BHTT + bias_HTT.to(logits_BHTT.dtype)
        weights_BHTT: Tensor = self.attn_drop(logits_BHTT.sigmoid())
        return weights_BHTT @ v_BHTK

    def maps(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        """Raise NotImplementedError: rows of the weights do not sum to 1."""
        return Attention.maps(self, x_BTD, rotation, bias_HTT)
