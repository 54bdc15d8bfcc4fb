"""Assertions of the contract tests: sentences, another device, and gradients compared with finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitlab.errors import VitlabError


def expect(holds: bool, sentence: str) -> None:
    """Raise AssertionError with ``sentence`` unless ``holds``."""
    if not holds:
        raise AssertionError(sentence)


@contextmanager
def during(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Re-raise exceptions of the block as AssertionErrors that start with ``what`` was being done."""
    try:
        yield
    except AssertionError:
        raise
    except kinds as error:
        raise AssertionError(f"{what}: {error}" if isinstance(error, VitlabError) else f"{what}: {error!r}") from error


ONE_DEVICE = "create tensors on the device of the input, and register constant ones as buffers"


@contextmanager
def on_another_device(who: str) -> Iterator[None]:
    """Raise AssertionErrors where the block mixes tensors of the CPU with tensors of the meta device, like a GPU."""
    with during(f"{who}: moved to another device and run there; {ONE_DEVICE}", Exception), _OneDevice():  # type: ignore[no-untyped-call]
        yield


class _OneDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises where an operation has tensors of two devices; kernels of the meta device often do not."""

    MIXING = ("copy_", "index", "index_put", "_index_put_impl_")  #: operations that may have them, on a GPU, too

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim}
        name = func.overloadpacket.__name__
        if len(devices) > 1 and name not in self.MIXING:
            raise RuntimeError(f"{name} has tensors of two devices")
        return func(*args, **(kwargs or {}))


MAX_DIRECTIONS = 12
"""Maximum number of directions to difference along; more parameters than this are moved in groups."""


def check_gradient(
    who: str, part: Callable[[Tensor], Mapping[str, Tensor]], parameters: Mapping[str, Tensor], x: Tensor
) -> None:
    """Check gradients against central differences along a random direction of the input and of each parameter.

    Args:
        who: name of the component in failure messages.
        part: deterministic function from the input to named float64 tensors.
        parameters: parameters of the component, by name.
        x: input in float64.

    Raises:
        AssertionError: with the name of the tensor and the size of the error.
    """
    x = x.detach().requires_grad_()
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(value.shape, generator=generator).double() for name, value in part(x).items()}

    def total() -> Tensor:
        return torch.stack([(value * weights[name]).sum() for name, value in part(x).items()]).sum()

    torch.autograd.backward(total())
    items = list(parameters.items())
    size = -(-len(items) // MAX_DIRECTIONS) or 1
    for group in ([("the input", x)], *(items[at : at + size] for at in range(0, len(items), size))):
        leaves = [leaf for _, leaf in group]
        directions = [torch.randn(leaf.shape, generator=generator, dtype=torch.float64) for leaf in leaves]
        grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        slope = sum(float((grad * direction).sum()) for grad, direction in zip(grads, directions, strict=True))
        tolerance = 0.01 * math.sqrt(sum(float(grad.square().sum()) for grad in grads)) + 1e-6
        # A long step may cross a kink; a short one may drown in rounding, e.g. if a part computes in float32.
        gaps = [abs(_slope(total, leaves, directions, 1e-3) - slope)]
        gaps += [abs(_slope(total, leaves, directions, step) - slope) for step in (1e-5, 1e-7) if min(gaps) > tolerance]
        expect(
            min(gaps) <= tolerance,
            f"{who}: the gradient of {', '.join(name for name, _ in group)} differs from finite differences: along "
            f"a direction it gives {slope:.6g}, which is off by {min(gaps):.2g}; if that is intended, set "
            "exact_gradient = False",
        )


def _slope(total: Callable[[], Tensor], leaves: Sequence[Tensor], directions: Sequence[Tensor], step: float) -> float:
    """Return the central difference of ``total`` along a direction of ``leaves``, whose values are restored."""
    originals = [leaf.detach().clone() for leaf in leaves]
    values = []
    with torch.no_grad():
        for signed_step in (step, -step):
            for leaf, original, direction in zip(leaves, originals, directions, strict=True):
                leaf.copy_(original + signed_step * direction)
            values.append(float(total()))
        for leaf, original in zip(leaves, originals, strict=True):
            leaf.copy_(original)
    return (values[0] - values[1]) / (2 * step)
