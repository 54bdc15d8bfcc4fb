"""The circumstances of a result: model cost, kernels, versions, and model FLOPs utilisation (MFU, arXiv:2204.02311).

MFU is relative to the measured rate of a large matrix product.  A training step counts as 3 times the
multiply-accumulates of a forward pass, 2 operations each, without augmentation and the optimizer.

The measured rate replaces the vendor's figure and is cached per user, keyed by all its inputs.  On a CPU it is measured
once, in process time on as many threads as there are cores, so that other load does not reduce it.  On a GPU only
wall-clock time is available: every process measures again, and the highest rate ever measured counts.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from vitlab._version import __version__
from vitlab.components.attention import Auto
from vitlab.geometry import DataInfo
from vitlab.identity.key import key_of
from vitlab.identity.trial import Trial
from vitlab.models.contract import Model
from vitlab.models.cost import macs, parameters
from vitlab.spec import Choice, TrialSpec
from vitlab.store.files import Memo
from vitlab.store.result import TrialResult
from vitlab.training.evaluation import NARROW

MAX_SIZES = 1_000  #: model sizes kept in the cache file, the latest ones

_sizes: dict[str, Any] = {}  #: entries of the cache file, and those of this process


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
    size = _cached_size(key)
    if size is None:
        memo = _read_sizes()
        size = _cached_size(key)
        if size is None:
            size = _sizes[key] = parameters(model), _work(model, info)
            if size[1]:
                memo.entries[key] = size
                memo.keep()
    return size


def _cached_size(key: str) -> tuple[int, int] | None:
    match _sizes.get(key):
        case [int(params), int(work)]:
            return params, work
    return None


def _read_sizes() -> Memo:
    """Return the cache file of sizes after adding its entries to those of this process."""
    memo = Memo("sizes", MAX_SIZES)
    _sizes.update(memo.entries)
    return memo


def _work(model: Model, info: DataInfo) -> int:
    try:
        return macs(model, info)
    except (NotImplementedError, RuntimeError) as error:
        print(f"the work of this model cannot be counted: {error}", file=sys.stderr)
        return 0


def kernels_of_first_pass(model: Model, together: bool) -> set[str]:
    """Return a set that will hold the automatically chosen kernels after the first forward pass.

    The attentions are observed, since an objective may call parts of the model alone.

    Of trials trained ``together``, one model computes for all, or none does in the engine ``batch_last``; there
    ``auto`` always chooses ``explicit``.
    """
    attentions = [module for module in model.modules() if isinstance(module, Auto)]
    kernels = {"explicit" for _ in attentions if together}
    hooks: dict[nn.Module, RemovableHandle] = {}

    def record(attention: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():  # recorded by the first evaluation, which is not compiled
            return
        kernels.add(str(attention.kernel))
        hooks.pop(attention).remove()

    hooks.update((attention, attention.register_forward_hook(record)) for attention in attentions)
    return kernels


def attention_of(kernels: set[str], model: Choice) -> str:
    """Return the kernels that attention chose automatically, or else its type."""
    attention = model.options.get("attention")
    return "+".join(sorted(kernels)) or (attention["type"] if isinstance(attention, Mapping) else "")


def rehearse() -> None:
    """Fill the caches of a process before it is forked.

    The first use of a type that is validated is slow, since its schema is built then.
    """
    versions()
    TrialSpec.model_rebuild()
    with suppress(ValueError):
        TrialResult.from_json({})
    _read_sizes()
    _processor()


@cache
def versions() -> Mapping[str, str]:
    """Return the versions of the packages that affect a trial's numbers and are not covered by its code digest."""
    installed = {"vitlab": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("numpy", "torchvision", "pillow"):
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


MATRIX_SIZE = {"cpu": 1024, "cuda": 4096}
"""Rows and columns of the matrices, by device type."""
TIMED_PRODUCTS = 4
"""Number of timed products; the fastest counts."""
MAX_RATES = 100  #: rates kept in the cache file, the latest ones

_rates: dict[str, float] = {}


def utilisation(metrics: Mapping[str, float], macs: int, rate: float) -> dict[str, float]:
    """Return ``system/tflops`` (10^12 operations per second) and ``system/mfu`` (their share of the rate), if known.

    A trial of a batch counts its own operations over the time of the whole batch.

    Args:
        metrics: Metrics of an interval.
        macs: Multiply-accumulates of a forward pass of one image.
        rate: Operations per second of all devices in use, see :func:`matrix_rate`; NaN if unknown.
    """
    if not macs or "system/images_per_s" not in metrics:
        return {}
    operations_per_s = 3 * 2 * macs * metrics["system/images_per_s"]
    return {
        "system/tflops": operations_per_s / 1e12,
        **({} if math.isnan(rate) else {"system/mfu": operations_per_s / rate}),
    }


def matrix_rate(device: torch.device, precision: str) -> float:
    """Return the measured rate of a large matrix product in operations per second.

    It is cached by device, precision and number of threads.

    The memory used is freed.  The rate is NaN if it cannot be measured, which must not prevent training.
    """
    key = _rate_key(device, precision)
    if key in _rates:
        return _rates[key]
    memo = Memo("matrix_rates", MAX_RATES)
    stored = memo.entries.get(key)
    rate = stored if isinstance(stored, float) and 0 < stored < math.inf else 0.0
    if not rate or device.type == "cuda":
        new_rate = _measure(device, precision)
        if new_rate > rate:  # False for NaN
            rate = memo.entries[key] = new_rate
            memo.keep()
    if not rate:
        return math.nan
    _rates[key] = rate
    return rate


def _rate_key(device: torch.device, precision: str) -> str:
    """Return the cache key of a rate: all its inputs."""
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    else:
        bitwise = f", MKL_CBWR={os.environ['MKL_CBWR']}" if "MKL_CBWR" in os.environ else ""
        device_name = f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}, {_threads()} threads{bitwise}"
    return f"{device_name}, {precision}, torch {torch.__version__}"


@cache
def _processor() -> str:
    """Return the model name of this CPU, if the system provides it."""
    with suppress(OSError), open("/proc/cpuinfo", errors="replace") as lines:
        for line in lines:
            field, _, value = line.partition(":")
            if field.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _threads() -> int:
    """Return the number of threads that run in parallel: at most the cores of this process."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(torch.get_num_threads(), cores)


def _measure(device: torch.device, precision: str) -> float:
    try:
        rate = _time_products(device, precision)
    except RuntimeError as error:  # usually out of memory
        print(f"the peak speed of this machine cannot be measured: {error}", file=sys.stderr)
        rate = math.nan
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rate


def _time_products(device: torch.device, precision: str) -> float:
    size, draws = MATRIX_SIZE[device.type], torch.Generator(device).manual_seed(0)
    dtype = {**NARROW, "fp64": torch.float64}.get(precision, torch.float32)
    a, b = (torch.randn(size, size, device=device, generator=draws).to(dtype) for _ in range(2))
    clock, each = (time.process_time, _threads()) if device.type == "cpu" else (time.perf_counter, 1)
    seconds = []
    for _ in range(TIMED_PRODUCTS):
        start = clock()
        product = torch.mm(a, b)
        float(product[0, 0])  # waits for a GPU
        seconds.append((clock() - start) / each)
    return 2.0 * size**3 / min(seconds)
