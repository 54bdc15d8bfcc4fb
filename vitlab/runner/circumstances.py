"""What a result says beside its numbers: what the model costs, and on what it was trained."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

import torch

from vitlab._version import __version__
from vitlab.components.attention import Auto
from vitlab.geometry import DataInfo
from vitlab.models.contract import Model
from vitlab.models.cost import cost_of, macs, parameters
from vitlab.plan.key import key_of
from vitlab.plan.trial import Trial
from vitlab.store.memo import Memo

MOST = 1_000  #: models whose size is remembered, the latest

_sizes: dict[str, tuple[int, int]] = {}


def size_of(model: Model, trial: Trial, info: DataInfo) -> tuple[int, int]:
    """Parameters and multiply-accumulates of a trial's model.

    Counting takes longer than many a small model is trained: so equal models are counted once a process, and once a
    user under one code.  The work is 0 where a part of somebody else's cannot be counted, for it is no reason not to
    train.
    """
    if not trial.code:
        return parameters(model), _work(model, info)
    what = {"model": trial.spec["model"], "origins": trial.origins, "data": asdict(info), "code": trial.code}
    known = key_of({**what, "torch": torch.__version__})[:32]
    if known not in _sizes:
        memo = Memo("sizes", MOST)
        match memo.entries.get(known):
            case [int(params), int(work)]:
                _sizes[known] = params, work
            case _:
                _sizes[known] = parameters(model), _work(model, info)
                if _sizes[known][1]:
                    memo.entries[known] = _sizes[known]
                    memo.keep()
    return _sizes[known]


def _work(model: Model, info: DataInfo) -> int:
    try:
        return macs(model, info)
    except (NotImplementedError, RuntimeError) as error:
        print(f"the work of this model cannot be counted: {error}", file=sys.stderr)
        return 0


def kernels_of_first_pass(model: Model, together: bool) -> set[str]:
    """A set that will hold the kernels that parts chose by themselves in the first forward pass, a training step's.

    Of a cohort (``together``) the model of one member does the work of all, and of steps with the batch innermost none
    does; but what ``auto`` chooses is known: there, it is always explicit.
    """
    kernels = {"explicit" for module in model.modules() if together and isinstance(module, Auto)}

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
    """Return the versions of what decides a trial's numbers, beside the code that its digest covers."""
    found = {"vitlab": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("numpy", "torchvision", "pillow"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
