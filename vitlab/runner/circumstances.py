"""The circumstances of a result: model cost, kernels and versions."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from vitlab._version import __version__
from vitlab.components.attention import Auto
from vitlab.geometry import DataInfo
from vitlab.models.contract import Model
from vitlab.models.cost import cost_of, macs, parameters
from vitlab.plan.key import key_of
from vitlab.plan.trial import Trial
from vitlab.spec import Choice
from vitlab.store.files import Memo

MAX_SIZES = 1_000  #: model sizes kept in the cache file, the latest ones

_sizes: dict[str, tuple[int, int]] = {}


def size_of(model: Model, trial: Trial, info: DataInfo) -> tuple[int, int]:
    """Return the parameters and multiply-accumulates of a trial's model.

    Counting can take longer than training a small model, so the sizes of equal models under one code digest are cached
    per process and per user.  The multiply-accumulates are 0 if a third-party component cannot be counted, which must
    not prevent training.
    """
    if not trial.code:
        return parameters(model), _work(model, info)
    identity = {"model": trial.spec.model.plain(), "origins": trial.origins, "data": asdict(info), "code": trial.code}
    key = key_of({**identity, "torch": torch.__version__})[:32]
    if key not in _sizes:
        memo = Memo("sizes", MAX_SIZES)
        match memo.entries.get(key):
            case [int(params), int(work)]:
                _sizes[key] = params, work
            case _:
                _sizes[key] = parameters(model), _work(model, info)
                if _sizes[key][1]:
                    memo.entries[key] = _sizes[key]
                    memo.keep()
    return _sizes[key]


def _work(model: Model, info: DataInfo) -> int:
    try:
        return macs(model, info)
    except (NotImplementedError, RuntimeError) as error:
        print(f"the work of this model cannot be counted: {error}", file=sys.stderr)
        return 0


def kernels_of_first_pass(model: Model, together: bool) -> set[str]:
    """Return a set that will hold the automatically chosen kernels after the first forward pass.

    Of trials trained ``together``, one model computes for all, or none does in the engine ``stack``; there
    ``auto`` always chooses ``explicit``.
    """
    kernels = {"explicit" for module in model.modules() if together and isinstance(module, Auto)}

    def record(*_: Any) -> None:
        choices = (getattr(module, "kernel", None) for module in model.modules())
        kernels.update(kernel for kernel in choices if isinstance(kernel, str))
        hook.remove()

    hook = model.register_forward_hook(record)
    return kernels


def attention_of(kernels: set[str], model: Choice) -> str:
    """Return the kernels that attention chose automatically, or else its type."""
    attention = model.options.get("attention")
    return "+".join(sorted(kernels)) or (attention["type"] if isinstance(attention, Mapping) else "")


def rehearse() -> None:
    """Fill the caches of a process before it is forked.

    The first count of a model's work is slow, since torch's meta device is written in Python.
    """
    cost_of(
        {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2},
        DataInfo(image=(8, 8), channels=1, classes=2),
    )
    versions()


@cache
def versions() -> Mapping[str, str]:
    """Return the versions of the packages that affect a trial's numbers and are not covered by its code digest."""
    installed = {"vitlab": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("numpy", "torchvision", "pillow"):
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed
