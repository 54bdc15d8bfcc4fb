"""The optimizers muon and normuon: orthogonal steps of hidden matrices, and AdamW for all other parameters."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from vitlab.models.contract import Model
from vitlab.training.optim import (
    Beta,
    Composite,
    Decay,
    Group,
    Optimizer,
    Rate,
    Small,
    hidden_matrices,
    optimizer,
    split_by_settings,
    subclass_without_compile_hooks,
)
from vitlab.training.optim.torch_optimizers import AdamW


class BatchedMuon(torch.optim.Muon):
    """torch's Muon with one Newton-Schulz iteration for all linear maps of one shape.

    A group has the settings of torch's Muon, and ``maps``, the number of linear maps that are stacked in each of its
    matrices, and ``ns_precision``.

    N linear maps of shape (M, K).
    """

    joint_safe = True

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for params in by_shape.values():
                self._step_one_shape(params, group)

    def _step_one_shape(self, params: list[Tensor], group: Group) -> None:
        """Take a step of parameters of one shape."""
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        matrices = [p.grad for p in params if p.grad is not None]
        averages = [self.state[p]["momentum_buffer"] for p in params]
        torch._foreach_lerp_(averages, matrices, 1 - group["momentum"])
        matrices = list(torch._foreach_lerp(matrices, averages, group["momentum"])) if group["nesterov"] else averages
        rows, columns = params[0].shape
        stacked_NMK = torch.stack(matrices).view(-1, rows // group["maps"], columns)
        if group["ns_precision"] == "bfloat16":
            stacked_NMK = stacked_NMK.bfloat16()
        # All maps of one shape in one iteration, also of several trainings.
        o_NMK = orthogonalise(stacked_NMK, group["ns_coefficients"], group["ns_steps"], group["eps"])
        o_NMK = o_NMK.to(params[0].dtype)
        steps = list((o_NMK * self._step_factors(o_NMK, params, group)).view(-1, rows, columns).unbind())
        # Decoupled decay comes before the step, as in torch's Muon.
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, steps, alpha=-group["lr"])

    def _step_factors(self, o_NMK: Tensor, params: list[Tensor], group: Group) -> Tensor | float:
        """Return the factors of orthogonal matrices that make them steps at a learning rate of 1."""
        rows, columns = o_NMK.shape[1:]
        if group["adjust_lr_fn"] == "original":
            return math.sqrt(max(1, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


class BatchedNorMuon(BatchedMuon):
    """Muon with rows of equal size, on average over the steps.  A group has the setting ``beta2`` as well."""

    eps = 1e-10

    def _step_factors(self, o_NMK: Tensor, params: list[Tensor], group: Group) -> Tensor:
        rows, columns = o_NMK.shape[1:]
        for p in params:
            if "row_square" not in self.state[p]:
                self.state[p]["row_square"] = p.new_zeros(len(p), 1)
        averages = [self.state[p]["row_square"] for p in params]
        squares = list(o_NMK.square().mean(-1, keepdim=True).view(len(params), -1, 1).unbind())
        torch._foreach_lerp_(averages, squares, 1 - group["beta2"])
        size_NM1 = torch.stack(averages).view(-1, rows, 1).sqrt() + self.eps
        factor_N11 = 1 / (_frobenius_norms(o_NMK / size_NM1) + self.eps)
        if group["adjust_lr_fn"] == "original":
            factor_N11 = factor_N11 * _frobenius_norms(o_NMK) * math.sqrt(max(1, rows / columns))
        else:
            factor_N11 = factor_N11 * 0.2 * math.sqrt(rows * columns)
        return factor_N11 / size_NM1


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
        nesterov: Nesterov's momentum.
        weight_decay: Factor of the weight decay, which is decoupled, of all parameters.
        adjust: Factor of the learning rate of an m x n matrix.  ``match_rms_adamw``: 0.2 sqrt(max(m, n)), after which
            rates of AdamW fit (arXiv:2502.16982).  ``original``: sqrt(max(1, m / n)), for rates such as 0.02.
        adamw_scale: Learning rate of AdamW, as a multiple of ``lr``.
        adamw_betas: Decay rates of the averages of the gradient and its square in AdamW.
        adamw_eps: Added to the denominator in AdamW.
        ns_steps: Newton-Schulz iterations.
        ns_precision: Precision of the iterations: the weights' own, or bfloat16 as in torch.optim.Muon, which is
            faster on GPUs and slower on most CPUs.
    """

    lr: Rate = 1e-3
    momentum: Beta = 0.95
    nesterov: bool = True
    weight_decay: Decay = 0.05
    adjust: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    adamw_scale: Rate = 1.0
    adamw_betas: tuple[Beta, Beta] = (0.9, 0.95)
    adamw_eps: Small = 1e-8
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    ns_precision: Literal["full", "bfloat16"] = "full"

    matrix_optimizer: ClassVar[type[Any]] = BatchedMuon

    def matrix_settings(self) -> Mapping[str, object]:
        """Return the settings of the groups of matrices beside the settings of torch's Muon."""
        return {"ns_precision": self.ns_precision}

    def route(self, groups: Sequence[Group], model: Model) -> list[Group]:
        """Split groups into groups of hidden matrices, which have the setting ``maps``, and groups of AdamW."""
        matrices = hidden_matrices(model)

        def changes(name: str, group: Group) -> Mapping[str, object]:
            if name in matrices:
                return {"maps": matrices[name], **self.matrix_settings()}
            return {"lr_scale": self.adamw_scale}

        return split_by_settings(groups, changes)

    def build(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        matrices = [group for group in groups if "maps" in group]
        rest = [group for group in groups if "maps" not in group]
        parts = []
        if matrices:
            parts.append(
                subclass_without_compile_hooks(self.matrix_optimizer)(  # type: ignore[arg-type]  # mypy sees no hash of a class in a variable
                    matrices,
                    lr=self.lr,
                    momentum=self.momentum,
                    nesterov=self.nesterov,
                    ns_steps=self.ns_steps,
                    adjust_lr_fn=self.adjust,
                )
            )
        if rest:
            parts.append(AdamW(lr=self.lr, betas=self.adamw_betas, eps=self.adamw_eps).build(rest))
        return Composite(parts)


@optimizer.register("normuon")
@dataclass(kw_only=True)
class NorMuon(Muon):
    """Muon whose steps have rows of equal size.  Reference: arXiv:2510.05491.

    Args:
        lr: Largest learning rate of the matrices.
        momentum: Decay rate of the average of the gradient.
        beta2: Decay rate of the average of the squares of a row.
        nesterov: Nesterov's momentum.
        weight_decay: Factor of the weight decay, which is decoupled, of all parameters.
        adjust: Size of the step of an m x n matrix.  ``match_rms_adamw``: a root mean square of 0.2, as in Algorithm 1
            of the reference.  ``original``: as Muon's step, times sqrt(max(1, m / n)), as in the authors' code.
        adamw_scale: Learning rate of AdamW, as a multiple of ``lr``.
        adamw_betas: Decay rates of the averages of the gradient and its square in AdamW.
        adamw_eps: Added to the denominator in AdamW.
        ns_steps: Newton-Schulz iterations.
        ns_precision: Precision of the iterations: the weights' own, or bfloat16.
    """

    beta2: Beta = 0.95

    matrix_optimizer = BatchedNorMuon

    def matrix_settings(self) -> Mapping[str, object]:
        return {**super().matrix_settings(), "beta2": self.beta2}


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
    x_NMK = (x_NMK / _frobenius_norms(x_NMK).clamp(min=eps)).contiguous()
    for _ in range(steps):
        gram_NMM = x_NMK @ x_NMK.mT
        gram_NMM = torch.baddbmm(gram_NMM, gram_NMM, gram_NMM, beta=b, alpha=c)
        x_NMK = torch.baddbmm(x_NMK, gram_NMM, x_NMK, beta=a)
    return x_NMK


def _frobenius_norms(x_NMK: Tensor) -> Tensor:
    """Return the Frobenius norm of each matrix, (N, 1, 1)."""
    return torch.stack(list(torch._foreach_norm(list(x_NMK.unbind())))).view(-1, 1, 1)
