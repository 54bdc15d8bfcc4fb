"""The optimizer lamb."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vitlab.data.torchvision_import import torchvision
from vitlab.training.optim.contract import Beta, Decay, Group, Optimizer, Rate, Small, eager, optimizer


@optimizer.register("lamb")
class Lamb(Optimizer):
    """Adam with steps relative to the norm of each tensor, for large batches.  Reference: arXiv:1904.00962.

    timm's, as in DeiT III (arXiv:2204.07118): with bias correction, and Adam's own steps for parameters without weight
    decay.  Gradients are clipped by ``train.clip_grad`` alone; the kernels that DeiT III used clip them to 1.

    Args:
        lr: Largest learning rate.
        betas: Decay rates of the averages of the gradient and its square.
        eps: Added to the denominator.
        weight_decay: Factor of the weight decay, which is part of the step.
    """

    library = "timm"

    def __init__(
        self,
        *,
        lr: Rate = 3e-3,
        betas: tuple[Beta, Beta] = (0.9, 0.999),
        eps: Small = 1e-6,
        weight_decay: Decay = 0.02,
    ) -> None:
        self.lr = lr
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay

    def build(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        """Build timm's LAMB."""
        torchvision()  # timm imports torchvision, whose import may need a workaround
        from timm.optim.lamb import Lamb as TimmLamb

        options = {"lr": self.lr, "betas": self.betas, "eps": self.eps}
        built: torch.optim.Optimizer = eager(TimmLamb)(groups, **options, max_grad_norm=None)
        return built
