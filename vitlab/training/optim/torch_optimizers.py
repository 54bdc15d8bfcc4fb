"""Optimizers of torch: adamw, adam, sgd, adafactor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field

from vitlab.training.optim import (
    Beta,
    Decay,
    Group,
    Optimizer,
    Rate,
    Small,
    optimizer,
    subclass_without_compile_hooks,
    supports_fused,
)


@dataclass(kw_only=True)
class _Adam(Optimizer):
    """Base of Adam and AdamW.

    Args:
        lr: Largest learning rate.
        betas: Decay rates of the averages of the gradient and its square.
        eps: Added to the denominator.
        weight_decay: Factor of the weight decay.
    """

    lr: Rate = 1e-3
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Small = 1e-8
    torch_class: ClassVar[Any]

    def build(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        return subclass_without_compile_hooks(self.torch_class)(
            groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=supports_fused(groups)
        )


@optimizer.register("adamw")
@dataclass(kw_only=True)
class AdamW(_Adam):
    """Adam with decoupled weight decay, scaled by the learning rate.  Reference: arXiv:1711.05101."""

    weight_decay: Decay = 0.05
    torch_class = torch.optim.AdamW


@optimizer.register("adam")
@dataclass(kw_only=True)
class Adam(_Adam):
    """Adam; weight decay is added to the gradient.  Reference: arXiv:1412.6980."""

    weight_decay: Decay = 0.0
    torch_class = torch.optim.Adam


@optimizer.register("sgd")
@dataclass(kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum, as in fine-tuning of arXiv:2010.11929.

    Args:
        lr: Largest learning rate.
        momentum: Factor of the previous update.
        nesterov: Nesterov's momentum.
        weight_decay: Factor of the weight decay.
    """

    lr: Rate = 0.01
    momentum: Beta = 0.9
    nesterov: bool = False
    weight_decay: Decay = 0.0

    def build(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        nesterov = self.nesterov and self.momentum > 0  # equal without momentum, where torch refuses nesterov
        return subclass_without_compile_hooks(torch.optim.SGD)(
            groups, lr=self.lr, momentum=self.momentum, nesterov=nesterov, fused=supports_fused(groups)
        )


@optimizer.register("adafactor")
@dataclass(kw_only=True)
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

    lr: Rate = 0.01
    beta2_decay: Annotated[float, Field(lt=0)] = -0.8
    min_scale: Small = 1e-3
    clip: Small = 1.0
    weight_decay: Decay = 0.05

    def build(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        return subclass_without_compile_hooks(torch.optim.Adafactor)(
            groups, lr=self.lr, beta2_decay=self.beta2_decay, eps=(None, self.min_scale), d=self.clip
        )
