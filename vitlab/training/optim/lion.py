"""The optimizer lion."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vitlab.data.torchvision_import import torchvision
from vitlab.training.optim.contract import Beta, Decay, Group, Optimizer, Rate, eager, optimizer


@optimizer.register("lion")
class Lion(Optimizer):
    """Steps of one size in the direction of the sign of the momentum.  Reference: arXiv:2302.06675.

    timm's.  The reference advises a learning rate 3 to 10 times smaller than AdamW's, and a weight decay larger by the
    same factor.

    Args:
        lr: Largest learning rate.
        betas: Decay rates of the average whose sign is taken, and of the momentum.
        weight_decay: Factor of the weight decay, which is decoupled.
    """

    library = "timm"

    def __init__(
        self,
        *,
        lr: Rate = 1e-4,
        betas: tuple[Beta, Beta] = (0.9, 0.99),
        weight_decay: Decay = 0.5,
    ) -> None:
        self.lr = lr
        self.betas = betas
        self.weight_decay = weight_decay

    def build(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        """Build timm's Lion."""
        torchvision()  # timm imports torchvision, whose import may need a workaround
        from timm.optim.lion import Lion as TimmLion

        built: torch.optim.Optimizer = eager(TimmLion)(groups, lr=self.lr, betas=self.betas)
        built.joint_safe = True  # type: ignore[attr-defined]  # elementwise, without a counter of steps
        return built
