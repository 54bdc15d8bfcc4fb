"""Optimizers of torch that treat every weight alike: adamw, adam, sgd."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vitlab.training.optim.contract import Beta, Decay, Group, Optimizer, Rate, Small, eager, fused, optimizer


@optimizer.register("adamw")
class AdamW(Optimizer):
    """Adam with decoupled weight decay, scaled by the learning rate.  Reference: arXiv:1711.05101.

    Args:
        lr: Largest learning rate.
        betas: Decay rates of the averages of the gradient and its square.
        eps: Added to the denominator.
        weight_decay: Factor of the weight decay.
    """

    def __init__(
        self,
        *,
        lr: Rate = 1e-3,
        betas: tuple[Beta, Beta] = (0.9, 0.999),
        eps: Small = 1e-8,
        weight_decay: Decay = 0.05,
    ) -> None:
        self.lr = lr
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay

    def build(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        """Build torch's AdamW."""
        return eager(torch.optim.AdamW)(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=fused(groups))


@optimizer.register("adam")
class Adam(Optimizer):
    """Adam; weight decay is added to the gradient.  Reference: arXiv:1412.6980.

    Args:
        lr: Largest learning rate.
        betas: Decay rates of the averages of the gradient and its square.
        eps: Added to the denominator.
        weight_decay: Factor of the weight decay.
    """

    def __init__(
        self,
        *,
        lr: Rate = 1e-3,
        betas: tuple[Beta, Beta] = (0.9, 0.999),
        eps: Small = 1e-8,
        weight_decay: Decay = 0.0,
    ) -> None:
        self.lr = lr
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay

    def build(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        """Build torch's Adam."""
        return eager(torch.optim.Adam)(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=fused(groups))


@optimizer.register("sgd")
class SGD(Optimizer):
    """Stochastic gradient descent with momentum, as in fine-tuning of arXiv:2010.11929.

    Args:
        lr: Largest learning rate.
        momentum: Factor of the previous update.
        nesterov: Nesterov's momentum.
        weight_decay: Factor of the weight decay.
    """

    def __init__(
        self,
        *,
        lr: Rate = 0.01,
        momentum: Beta = 0.9,
        nesterov: bool = False,
        weight_decay: Decay = 0.0,
    ) -> None:
        self.lr = lr
        self.momentum = momentum
        self.nesterov = nesterov and momentum > 0  # equal without momentum, where torch refuses nesterov
        self.weight_decay = weight_decay

    def build(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        """Build torch's SGD with momentum."""
        return eager(torch.optim.SGD)(
            groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov, fused=fused(groups)
        )
