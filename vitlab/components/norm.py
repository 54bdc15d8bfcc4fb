"""Normalisation of token vectors.

B batch, T tokens, D width.
"""

from abc import abstractmethod
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.components.base import Part, Positive
from vitlab.registry import Pick, Slot
from vitlab.spec import Choice


class Norm(Part):
    """Contract: ``Norm(dim, *, options)``; (..., D) to (..., D), each vector by itself."""

    @abstractmethod
    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the normalised tokens, BTD to BTD."""


norm = Slot("norm", Norm)  # type: ignore[type-abstract]  # a contract is not built

NormChoice = Annotated[Choice | str, Pick("norm")]
"""An option that is a norm."""


@norm.register("layernorm")
class LayerNorm(nn.LayerNorm, Norm):
    """Mean and variance over the width, then a scale and a shift.  Reference: arXiv:1607.06450.

    Args:
        eps: added to the variance.
        affine: learned after normalising: a scale and a shift, a scale alone, or none.
    """

    def __init__(
        self,
        dim: int,
        *,
        eps: Positive = 1e-6,
        affine: Literal["scale_and_shift", "scale", "none"] = "scale_and_shift",
    ) -> None:
        """``eps`` is 1e-6 as in the ViT paper's code; torch's own default is 1e-5, Hugging Face's 1e-12."""
        super().__init__(dim, eps, elementwise_affine=affine != "none", bias=affine == "scale_and_shift")


@norm.register("rmsnorm")
class RMSNorm(nn.RMSNorm, Norm):
    """Root mean square over the width, then a scale; no mean, no shift.  Reference: arXiv:1910.07467.

    Args:
        eps: added to the mean square.
        affine: learned after normalising: a scale, or none.
    """

    def __init__(self, dim: int, *, eps: Positive = 1e-6, affine: Literal["scale", "none"] = "scale") -> None:
        super().__init__(dim, eps, elementwise_affine=affine == "scale")

    def forward(self, x_BTD: Tensor) -> Tensor:
        # Under autocast the input may be bf16; torch's fused kernel requires one dtype.
        weight_D = None if self.weight is None else self.weight.to(x_BTD.dtype)
        return F.rms_norm(x_BTD, self.normalized_shape, weight_D, self.eps)


@norm.register("dyt")
class DynamicTanh(Norm):
    """The hyperbolic tangent of the scaled tokens, then a scale and a shift.  Reference: arXiv:2503.10622 (DyT).

    It normalises nothing: each value is treated by itself.

    Args:
        alpha: start of the learned number that all values are multiplied by before the tangent.
    """

    def __init__(self, dim: int, *, alpha: Positive = 0.5) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), alpha))
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return torch.tanh(self.alpha * x_BTD) * self.weight + self.bias


@norm.register("none")
class NoNorm(Norm):
    """The identity."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD
