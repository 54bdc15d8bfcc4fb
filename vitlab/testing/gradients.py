"""Gradients, held to slopes that are measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from vitlab.testing.expect import expect

MOST_DIRECTIONS = 12
"""In which gradients are measured: parameters beyond so many are moved together."""


def check_gradient(
    who: str, part: Callable[[Tensor], Mapping[str, Tensor]], parameters: Mapping[str, Tensor], x: Tensor
) -> None:
    """Along a random direction of the input, and of each parameter, the gradient is the slope that is measured.

    Args:
        who: the component, as a failure names it.
        part: gives tensors by name; in float64, and the same each time.
        parameters: its own, by name.
        x: its input, in float64.

    Raises:
        AssertionError: naming what the gradient is of, and by how much it is off.
    """
    x = x.detach().requires_grad_()
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(value.shape, generator=generator).double() for name, value in part(x).items()}

    def total() -> Tensor:
        return torch.stack([(value * weights[name]).sum() for name, value in part(x).items()]).sum()

    torch.autograd.backward(total())
    named = list(parameters.items())
    size = -(-len(named) // MOST_DIRECTIONS) or 1
    for some in ([("the input", x)], *(named[at : at + size] for at in range(0, len(named), size))):
        leaves = [leaf for _, leaf in some]
        along = [torch.randn(leaf.shape, generator=generator, dtype=torch.float64) for leaf in leaves]
        grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        found = sum(float((grad * way).sum()) for grad, way in zip(grads, along, strict=True))
        most = 0.01 * math.sqrt(sum(float(grad.square().sum()) for grad in grads)) + 1e-6
        # A kink may lie in a long step, and rounding drown a short one, as where a part computes in float32.
        gaps = [abs(_slope(total, leaves, along, 1e-3) - found)]
        gaps += [abs(_slope(total, leaves, along, step) - found) for step in (1e-5, 1e-7) if min(gaps) > most]
        expect(
            min(gaps) <= most,
            f"{who}: the gradient of {', '.join(name for name, _ in some)} is not the slope of what is computed: along "
            f"a direction it is {found:.6g}, and off by {min(gaps):.2g}; where that is meant, exact_gradient = False "
            "says so",
        )


def _slope(total: Callable[[], Tensor], leaves: Sequence[Tensor], along: Sequence[Tensor], step: float) -> float:
    """The central difference of a function along a direction of what it depends on, which is left as it was."""
    kept = [leaf.detach().clone() for leaf in leaves]
    values = []
    with torch.no_grad():
        for way in (step, -step):
            for leaf, own, direction in zip(leaves, kept, along, strict=True):
                leaf.copy_(own + way * direction)
            values.append(float(total()))
        for leaf, own in zip(leaves, kept, strict=True):
            leaf.copy_(own)
    return (values[0] - values[1]) / (2 * step)
