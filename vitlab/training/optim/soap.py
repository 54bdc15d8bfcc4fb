"""The optimizer soap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field

from vitlab.training.optim.contract import Beta, Decay, Group, Optimizer, Rate, Small, eager, optimizer


@optimizer.register("soap")
class Soap(Optimizer):
    """Adam in the eigenbasis of Shampoo's preconditioner.  Reference: arXiv:2409.11321.

    In the first steps the preconditioner of a matrix is singular, and rounding chooses the basis of its null space.  So
    results of different engines, micro-batches, numbers of processes and processors differ by more than rounding, in
    double precision, too.

    pytorch-optimizer's, which equals the authors' code: every axis of a tensor has a basis, vectors have none, and the
    first step only initialises the bases.

    Args:
        lr: Largest learning rate.
        betas: Decay rates of the averages of the gradient and its square; the second is also that of the
            preconditioner.
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

    def __init__(
        self,
        *,
        lr: Rate = 3e-3,
        betas: tuple[Beta, Beta] = (0.95, 0.95),
        eps: Small = 1e-8,
        weight_decay: Decay = 0.05,
        every: Annotated[int, Field(ge=1)] = 10,
        max_dim: Annotated[int, Field(ge=1)] = 10_000,
    ) -> None:
        self.lr = lr
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.every = every
        self.max_dim = max_dim

    def build(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        """Build pytorch-optimizer's SOAP."""
        from pytorch_optimizer import SOAP

        built: torch.optim.Optimizer = eager(SOAP)(
            groups,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            precondition_frequency=self.every,
            max_precondition_dim=self.max_dim,
        )
        built.register_step_post_hook(_store_by_rows)
        return built


def _store_by_rows(built: torch.optim.Optimizer, *call: Any) -> None:
    """Store the bases row by row, as a checkpoint does, so that products with them round alike after a resume."""
    for state in built.state.values():
        state["Q"] = [basis.contiguous() if len(basis) else basis for basis in state["Q"]]
