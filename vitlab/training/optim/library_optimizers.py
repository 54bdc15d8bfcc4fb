"""Optimizers of other libraries, which are imported where they are built: lamb, lion, soap, schedule_free."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitlab.components.base import Count
from vitlab.data.torchvision_import import torchvision
from vitlab.spec.choice import component_label
from vitlab.training.optim import (
    Beta,
    Decay,
    Group,
    Optimizer,
    Rate,
    Small,
    WeightAverage,
    optimizer,
    subclass_without_compile_hooks,
)


@optimizer.register("lamb")
@dataclass(kw_only=True)
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

    lr: Rate = 3e-3
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Small = 1e-6
    weight_decay: Decay = 0.02

    def build(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        torchvision()  # timm imports torchvision, whose import may need a workaround
        from timm.optim.lamb import Lamb as TimmLamb

        return subclass_without_compile_hooks(TimmLamb)(
            groups, lr=self.lr, betas=self.betas, eps=self.eps, max_grad_norm=None
        )


@optimizer.register("lion")
@dataclass(kw_only=True)
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

    lr: Rate = 1e-4
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    weight_decay: Decay = 0.5

    def build(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        torchvision()  # timm imports torchvision, whose import may need a workaround
        from timm.optim.lion import Lion as TimmLion

        built = subclass_without_compile_hooks(TimmLion)(groups, lr=self.lr, betas=self.betas)
        built.joint_safe = True  # type: ignore[attr-defined]  # elementwise, without a counter of steps
        return built


@optimizer.register("soap")
@dataclass(kw_only=True)
class Soap(Optimizer):
    """Adam in the eigenbasis of Shampoo's preconditioner.  Reference: arXiv:2409.11321.

    In the first steps the preconditioner of a matrix is singular, and rounding chooses the basis of its null space.  So
    results of different engines, micro-batches, numbers of processes and processors differ by more than rounding, in
    double precision, too.

    pytorch-optimizer's, which equals the authors' code: every axis of a tensor has a basis, vectors have none, and the
    first step only initialises the bases.

    Args:
        lr: Largest learning rate.
        betas: Decay rates of the averages of the gradient and its square; the second is the
            preconditioner's, too.
        eps: Added to the denominator.
        weight_decay: Factor of the weight decay, which is decoupled.
        every: Steps between two updates of the bases.
        max_dim: Longest axis that has a basis.
    """

    library = "pytorch_optimizer"
    plan_note = (
        "optimizer 'soap': rounding chooses a part of its bases, so that trainings by different engines, "
        "micro_batch_size, processes or processors differ by more than rounding; keep these equal in a comparison."
    )

    lr: Rate = 3e-3
    betas: tuple[Beta, Beta] = (0.95, 0.95)
    eps: Small = 1e-8
    weight_decay: Decay = 0.05
    every: Count = 10
    max_dim: Count = 10_000

    def build(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        from pytorch_optimizer import SOAP

        built = subclass_without_compile_hooks(SOAP)(
            groups,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            precondition_frequency=self.every,
            max_precondition_dim=self.max_dim,
        )
        built.register_step_post_hook(_make_bases_contiguous)
        return built


def _make_bases_contiguous(built: torch.optim.Optimizer, *call: Any) -> None:
    """Store the bases row by row, as a checkpoint does, so that products with them round alike after a resume."""
    for state in built.state.values():
        state["Q"] = [basis.contiguous() if len(basis) else basis for basis in state["Q"]]


@optimizer.register("schedule_free")
@dataclass(kw_only=True)
class ScheduleFree(Optimizer):
    """AdamW with averaged weights in place of a falling learning rate.  Reference: arXiv:2405.15682.

    The authors' package schedulefree.  The averaged weights are evaluated, stored and passed on to other trials;
    ``train.ema`` is refused beside them.  It needs ``schedule: {type: constant, warmup: 0.05}``: a falling rate would
    be averaged as well.  Batch norm has the averages of the weights in training, not of the averaged weights.

    Args:
        lr: Largest learning rate; larger than AdamW's, by 1 to 10.
        betas: Share of the averaged weights in those at which the gradient is taken, and decay rate of the average of
            its square.
        eps: Added to the denominator.
        weight_decay: Factor of the weight decay, which is decoupled.
    """

    library = "schedulefree"

    lr: Rate = 2.5e-3
    betas: tuple[Rate, Beta] = (0.9, 0.999)
    eps: Small = 1e-8
    weight_decay: Decay = 0.05

    @classmethod
    def incompatibility(cls, train: Mapping[str, Any]) -> str | None:
        """Return a sentence for a training that averages its weights a second time, or lowers the learning rate."""
        if train.get("ema") is not None:
            return "schedule_free averages the weights itself; remove train.ema, or choose another optimizer"
        if str(component_label(train["schedule"])).rpartition(":")[2] != "constant":
            return "schedule_free would average a falling rate as well; write schedule: {type: constant, warmup: 0.05}"
        return super().incompatibility(train)

    def build(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        from schedulefree import AdamWScheduleFree

        built = subclass_without_compile_hooks(AdamWScheduleFree)(groups, lr=self.lr, betas=self.betas, eps=self.eps)
        built.train()  # type: ignore[attr-defined]
        return built

    def average(self, built: torch.optim.Optimizer) -> WeightAverage:
        return OptimizerAverage(built)


class OptimizerAverage(WeightAverage):
    """The averaged weights of an optimizer with the methods ``train`` and ``eval``, which updates them itself.

    Args:
        built: The optimizer, in its training mode.
    """

    def __init__(self, built: Any) -> None:
        self.built = built

    def replaced_tensors(self) -> list[Tensor]:
        return [p for group in self.built.param_groups for p in group["params"]]

    def replace(self) -> None:
        self.built.eval()

    def prepare_next_step(self) -> None:
        self.built.train()
