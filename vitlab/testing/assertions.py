"""What the contract tests share: places of failures, equal states, another device, gradients by finite differences.

A check is an ``assert`` whose message is a sentence; the blocks around it say what the sentence is about.
"""

import pickle
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import SkipTest

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError, gradcheck
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitlab.components.base import State
from vitlab.registry.plugins import sentence_with_place


class Failures(AssertionError):
    """Failed checks; ``args`` has a sentence for each."""

    def __str__(self) -> str:
        return "\n".join(self.args)


class FirstCallFailed(Failures):
    """The first call of a component raised an exception; its options may not fit the data that a check invents."""


@contextmanager
def prefix_failures(what: str, failure: type[AssertionError] = AssertionError) -> Iterator[None]:
    """Begin every failed assertion with what it is about; other exceptions become a ``failure``."""
    try:
        yield
    except (AssertionError, SkipTest) as error:
        # The same exception, whose traceback leads to the check.
        error.args = tuple(f"{what}: {each}" for each in error.args or ("",))
        raise
    except Exception as error:
        raise failure(f"{what}: {sentence_with_place(error)}") from error


def check_each(*checks: Callable[[], object]) -> None:
    """Make independent checks, and raise the failures of all together, a line each."""
    failures = []
    for check in checks:
        try:
            check()
        except AssertionError as error:
            failures.append(error)
            if isinstance(error, FirstCallFailed):
                break  # other checks fail by it, too
        except Exception:
            if not failures:  # otherwise it may follow from these
                raise
    if failures:
        kind = FirstCallFailed if isinstance(failures[0], FirstCallFailed) else Failures
        # One fault may fail several checks, which differ in what the sentence is about.
        sentences = [str(each) for error in failures for each in error.args]
        by_fault = {each.rpartition(": ")[2]: each for each in reversed(sentences)}
        raise kind(*reversed(by_fault.values())) from failures[0]


@contextmanager
def forbid_global_draws() -> Iterator[None]:
    """Check that the block draws from no generator that all code of a process shares."""

    def read() -> bytes:
        return pickle.dumps((np.random.get_state(), random.getstate(), torch.get_rng_state().tolist()))

    before = read()
    yield
    assert read() == before, (
        "draws from a generator of torch, numpy or Python: draw from vitlab.plugin.noise, or by vitlab.plugin.Dropout"
    )


def checked_reason(reason: str | None) -> str | None:
    """Return what ``incompatibility`` or ``missing`` returns: a sentence or None."""
    assert reason is None or reason.strip(), "incompatibility must return a sentence or None"
    return reason


def equal_states(one: State, other: State) -> bool:
    """Return whether two state dicts have equal names and values, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def check_type(value: object, allowed: type | tuple[type, ...], method: str, remedy: str) -> None:
    """Check the type of what a method returned; ``remedy`` says what to return instead."""
    assert isinstance(value, allowed), f"{method} returned a {type(value).__name__}; return {remedy}"


ONE_DEVICE = "create tensors on the device of the input, and register constant ones as buffers"


@contextmanager
def forbid_mixed_devices() -> Iterator[None]:
    """Raise AssertionErrors where the block mixes tensors of the CPU with tensors of the meta device, like a GPU."""
    with prefix_failures(f"moved to another device and run there; {ONE_DEVICE}"), _OneDevice():  # type: ignore[no-untyped-call]
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


def check_gradient(part: nn.Module, x: Tensor) -> None:
    """Check the gradients of the input and of each parameter against finite differences, in float64.

    The part is deterministic, and returns tensors by name.
    """
    names, values = zip(("the input", x), *part.named_parameters(), strict=True)
    leaves = [value.detach().clone().requires_grad_() for value in values]

    def outputs(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        out = functional_call(part, dict(zip(names[1:], parameters, strict=True)), (x,))
        return tuple(value for value in out.values() if value.requires_grad)

    with torch.random.fork_rng([]):
        torch.manual_seed(0)  # of the random directions
        try:
            # Steps of 1e-4 are large enough for parts that compute in float32 inside.
            gradcheck(outputs, leaves, eps=1e-4, atol=1e-3, rtol=1e-2, fast_mode=True, check_undefined_grad=False)
        except GradcheckError as error:
            match = re.search(r"with respect to input (\d+)", str(error))
            name = names[int(match[1])].removeprefix("part.") if match else "the input"
            raise AssertionError(
                f"the gradient of {name} differs from finite differences; if that is intended, set "
                "exact_gradient = False"
            ) from error
