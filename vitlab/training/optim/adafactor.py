"""The optimizer adafactor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field

from vitlab.training.optim.contract import Decay, Group, Optimizer, Rate, Small, eager, optimizer


@optimizer.register("adafactor")
class Adafactor(Optimizer):
    """Adam whose second moments of a matrix are the product of a row and a column.  Reference: arXiv:1804.04235.

    torch's: a step is ``lr``, at most 1 / sqrt(t), times the root mean square of the weights of its tensor; there is
    no average of gradients.  It reads norms back from the device.

    Args:
        lr: Largest relative step.
        beta2_decay: Exponent of the step number t in 1 - t^beta2_decay, the decay rate of the second moments.
        min_scale: Smallest root mean square of the weights that a step is relative to.
        clip: Largest root mean square of an update before it is multiplied by the step.
        weight_decay: Factor of the weight decay, which is decoupled.
    """

    def __init__(
        self,
        *,
        lr: Rate = 0.01,
        beta2_decay: Annotated[float, Field(lt=0)] = -0.8,
        min_scale: Small = 1e-3,
        clip: Small = 1.0,
        weight_decay: Decay = 0.05,
    ) -> None:
        self.lr = lr
        self.beta2_decay = beta2_decay
        self.min_scale = min_scale
        self.clip = clip
        self.weight_decay = weight_decay

    def build(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        """Build torch's Adafactor."""
        eps = (None, self.min_scale)
        return eager(torch.optim.Adafactor)(groups, lr=self.lr, beta2_decay=self.beta2_decay, eps=eps, d=self.clip)
