"""The optimizer muon: orthogonal steps of hidden matrices, and AdamW for all other parameters."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vitlab.models.contract import Model
from vitlab.training.optim import (
    Beta,
    Composite,
    Decay,
    Group,
    Optimizer,
    Rate,
    eager,
    fused,
    hidden_matrices,
    optimizer,
    split_groups,
)


class BatchedMuon(torch.optim.Muon):
    """torch's Muon with one Newton-Schulz iteration for all linear maps of one shape.

    A group has the settings of torch's Muon, and ``maps``, the number of linear maps that are stacked in each of its
    matrices, and ``ns_precision``.

    N linear maps of shape (M, K).
    """

    joint_safe = True

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            by_shape: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for params in by_shape.values():
                self._step(params, group)

    def _step(self, params: list[Tensor], group: Group) -> None:
        """Take a step of parameters of one shape."""
        rows, columns = params[0].shape
        stacked_NMK = torch.stack(self._momentum(params, group)).view(-1, rows // group["maps"], columns)
        if group["ns_precision"] == "bfloat16":
            stacked_NMK = stacked_NMK.bfloat16()
        # All maps of one shape in one iteration, also of several trainings.
        o_NMK = orthogonalise(stacked_NMK, group["ns_coefficients"], group["ns_steps"], group["eps"])
        o_NMK = o_NMK.to(params[0].dtype)
        steps = list((o_NMK * _scale(rows // group["maps"], columns, group)).view(-1, rows, columns).unbind())
        # Decoupled decay comes before the step, as in torch's Muon.
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, steps, alpha=-group["lr"])

    def _momentum(self, params: list[Tensor], group: Group) -> list[Tensor]:
        """Update the averages of the gradients, and return Nesterov's momentum, which is orthogonalised."""
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        gradients = [p.grad for p in params if p.grad is not None]
        averages = [self.state[p]["momentum_buffer"] for p in params]
        torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
        return list(torch._foreach_lerp(gradients, averages, group["momentum"]))


def _scale(rows: int, columns: int, group: Group) -> float:
    """Return the factor of an orthogonal matrix that makes it a step at a learning rate of 1."""
    if group["adjust_lr_fn"] == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


@optimizer.register("muon")
@dataclass(kw_only=True)
class Muon(Optimizer):
    """Orthogonalised momentum for hidden matrices, AdamW for the rest.  Reference: kellerjordan.github.io/posts/muon.

    Hidden matrices are the weights of the linear maps between stem and head; patch embedding, tokens, positions, head,
    norms, biases and convolutions have AdamW, as the author advises.  The rows of queries, keys and values of one
    matrix are orthogonalised apart, as if they were three matrices.

    The Newton-Schulz iteration of torch.optim.Muon is computed for all matrices of one shape at once, also for those
    of several trainings.

    Args:
        lr: Largest learning rate of the matrices.
        momentum: Decay rate of the average of the gradient.
        weight_decay: Factor of the weight decay, which is decoupled, of all parameters.
        adjust: Factor of the learning rate of an m x n matrix.  ``match_rms_adamw``: 0.2 sqrt(max(m, n)), after which
            rates of AdamW fit (arXiv:2502.16982).  ``original``: sqrt(max(1, m / n)), for rates such as 0.02.
        adamw_scale: Learning rate of AdamW, as a multiple of ``lr``.
        adamw_betas: Decay rates of the averages of the gradient and its square in AdamW.
        ns_precision: Precision of the iterations: the weights' own, or bfloat16 as in torch.optim.Muon, which is
            faster on GPUs and slower on most CPUs.
    """

    lr: Rate = 1e-3
    momentum: Beta = 0.95
    weight_decay: Decay = 0.05
    adjust: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    adamw_scale: Rate = 1.0
    adamw_betas: tuple[Beta, Beta] = (0.9, 0.95)
    ns_precision: Literal["full", "bfloat16"] = "full"

    def route(self, groups: Sequence[Group], model: Model) -> list[Group]:
        """Split groups into groups of hidden matrices, which have the setting ``maps``, and groups of AdamW."""
        matrices = hidden_matrices(model)

        def changes(name: str, group: Group) -> Mapping[str, object]:
            if name in matrices:
                return {"maps": matrices[name], "ns_precision": self.ns_precision}
            return {"lr_scale": self.adamw_scale}

        return split_groups(groups, changes)

    def build(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        """Build the optimizer of the matrices and torch's AdamW."""
        matrices = [group for group in groups if "maps" in group]
        rest = [group for group in groups if "maps" not in group]
        parts = []
        if matrices:
            built = eager(BatchedMuon)(matrices, lr=self.lr, momentum=self.momentum, adjust_lr_fn=self.adjust)
            parts.append(built)
        if rest:
            parts.append(eager(torch.optim.AdamW)(rest, lr=self.lr, betas=self.adamw_betas, fused=fused(rest)))
        return Composite(parts)


def orthogonalise(x_NMK: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return the approximate nearest orthogonal matrix of each matrix, by Newton-Schulz iterations.

    The result for a matrix does not depend on the others: their norms are computed one by one, and a single matrix is
    computed as one of two, because some kernels treat a batch of one differently.
    """
    if len(x_NMK) == 1:
        return orthogonalise(x_NMK.expand(2, -1, -1), coefficients, steps, eps)[:1]
    # The product of the shorter side is the smaller matrix.
    if x_NMK.shape[1] > x_NMK.shape[2]:
        return orthogonalise(x_NMK.mT, coefficients, steps, eps).mT
    a, b, c = coefficients
    x_NMK = (x_NMK / _norms(x_NMK).clamp(min=eps)).contiguous()
    for _ in range(steps):
        gram_NMM = x_NMK @ x_NMK.mT
        gram_NMM = torch.baddbmm(gram_NMM, gram_NMM, gram_NMM, beta=b, alpha=c)
        x_NMK = torch.baddbmm(x_NMK, gram_NMM, x_NMK, beta=a)
    return x_NMK


def _norms(x_NMK: Tensor) -> Tensor:
    """Return the Frobenius norm of each matrix, (N, 1, 1)."""
    return torch.stack(list(torch._foreach_norm(list(x_NMK.unbind())))).view(-1, 1, 1)
