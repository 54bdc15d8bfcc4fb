"""What a result says beside its numbers: what the model costs, and on what it was trained."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Any, cast

import vitlab
from vitlab.geometry import DataInfo
from vitlab.models.contract import Model
from vitlab.models.cost import cost_of, macs, parameters
from vitlab.plan.trial import Trial

_sizes: dict[tuple[Any, ...], tuple[int, int]] = {}


def size_of(model: Model, trial: Trial, info: DataInfo) -> tuple[int, int]:
    """Parameters and multiply-accumulates of a trial's model, counted once a process for trials of equal models.

    These are 0 where a part of somebody else's cannot be counted, for it is no reason not to train.
    """
    known = json.dumps(trial.spec["model"], sort_keys=True), trial.origins, info
    if known not in _sizes:
        work = 0
        try:
            work = macs(model, info)
        except (NotImplementedError, RuntimeError) as error:
            print(f"the work of this model cannot be counted: {error}", file=sys.stderr)
        _sizes[known] = parameters(model), work
    return _sizes[known]


def kernels_of_first_pass(model: Model) -> set[str]:
    """A set that will hold the kernels that parts chose by themselves in the first forward pass, a training step's."""
    kernels: set[str] = set()

    def look(*_: Any) -> None:
        found = (getattr(module, "kernel", None) for module in model.modules())
        kernels.update(kernel for kernel in found if isinstance(kernel, str))
        hook.remove()

    hook = model.register_forward_hook(look)
    return kernels


def attention_of(kernels: set[str], choice: Mapping[str, Any]) -> str:
    """Which kernel attention took where it chose by itself, and its name elsewhere."""
    named = choice.get("attention")
    return "+".join(sorted(kernels)) or (cast(str, named["type"]) if isinstance(named, Mapping) else "")


def rehearse() -> None:
    """Look up what a process looks up once, so that those forked from it need not; nothing is computed.

    Counting the work of a model, for one: torch's meta device is Python, and slow the first time.
    """
    cost_of(
        {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2},
        DataInfo(image=(8, 8), channels=1, classes=2),
    )
    versions()


@cache
def versions() -> Mapping[str, str]:
    """Of what decides its numbers."""
    return {
        "vitlab": vitlab.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "numpy")},
    }
