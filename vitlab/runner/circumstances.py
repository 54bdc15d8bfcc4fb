"""The circumstances of a result: model cost, kernels, versions, and model FLOPs utilisation (MFU, arXiv:2204.02311).

MFU is relative to the measured rate of a large matrix product.  A training step counts as 3 times the
multiply-accumulates of a forward pass, 2 operations each, without augmentation and the optimizer.

The measured rate replaces the vendor's figure.  On a CPU it is measured in process time, so that other load does not
reduce it; on a GPU only wall-clock time is available.  The process time of several threads includes waiting of one for
another, so that their rate, and with it the MFU, is unknown.
"""

import math
import platform
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from vitlab._version import __version__
from vitlab.components.attention.softmax import Auto
from vitlab.errors import Refused
from vitlab.geometry import DataInfo
from vitlab.identity.trial import Trial
from vitlab.models.contract import Model
from vitlab.models.cost import count_macs, count_parameters
from vitlab.spec import Choice, TrialSpec
from vitlab.spec.tree import type_adapter
from vitlab.store.result import TrialResult
from vitlab.training.evaluation import NARROW

_sizes: dict[tuple[object, ...], tuple[int, int]] = {}  #: of the replicates of an arm, which one process may train


def model_params_and_macs(model: Model, trial: Trial, info: DataInfo) -> tuple[int, int]:
    """Return the parameters and multiply-accumulates of a trial's model.

    The multiply-accumulates are 0 if a third-party component cannot be counted, which must not prevent training.
    """
    key = trial.code, trial.origins, str(trial.spec.model), info
    if key not in _sizes:
        try:
            work = count_macs(model, info)
        except (NotImplementedError, RuntimeError) as error:
            print(f"the work of this model cannot be counted: {error}", file=sys.stderr)
            work = 0
        _sizes[key] = count_parameters(model), work
    return _sizes[key]


def hook_chosen_kernels(model: Model, is_joint: bool) -> set[str]:
    """Return a set that will hold the automatically chosen kernels after the first forward pass.

    The attentions are observed, since an objective may call parts of the model alone.

    Of trials trained jointly, one model computes for all, or none does in the engine ``batch_last``; there
    ``auto`` always chooses ``explicit``.
    """
    attentions = [module for module in model.modules() if isinstance(module, Auto)]
    kernels = {"explicit" for _ in attentions if is_joint}
    hooks: dict[nn.Module, RemovableHandle] = {}

    def record(attention: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():  # recorded by the first evaluation, which is not compiled
            return
        kernels.add(str(attention.kernel))
        hooks.pop(attention).remove()

    hooks.update((attention, attention.register_forward_hook(record)) for attention in attentions)
    return kernels


def describe_kernels(kernels: set[str], model: Choice) -> str:
    """Return the kernels that attention chose automatically, or else its type."""
    attention = model.options.get("attention")
    return "+".join(sorted(kernels)) or ("" if attention is None else Choice.parse(attention).type)


def fill_caches_before_fork() -> None:
    """Fill the caches of a process before it is forked.

    The first use of a type that is validated is slow, since its schema is built then.
    """
    versions()
    TrialSpec.model_rebuild()
    type_adapter(TrialResult)


@cache
def versions() -> Mapping[str, str]:
    """Return the versions of the packages that affect a trial's numbers and are not covered by its code digest."""
    installed = {"vitlab": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("numpy", "torchvision", "pillow"):
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def require_versions(required: Mapping[str, str]) -> None:
    """Raise Refused if a required version is not among the :func:`versions` of this process."""
    if required.items() - versions().items():
        raise Refused(
            f"versions: {dict(required)} required, {dict(versions())} here; install the former or require the latter"
        )


def cuda_settings() -> dict[str, object]:
    """Return the settings of this process by which CUDA chooses the kernels of products, convolutions and attention."""
    kernels = ("flash", "mem_efficient", "cudnn", "math")
    return {
        "matmul": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "fp32",
        "cudnn": "tf32" if torch.backends.cudnn.allow_tf32 else "fp32",
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "sdpa": "+".join(name for name in kernels if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()),
    }


MATRIX_SIZE = {"cpu": 384, "cuda": 4096, "mps": 4096}
"""Rows and columns of the matrices, by device type.  A thread of a CPU is hardly faster on larger ones."""
TIMED_PRODUCTS = 4
"""Number of timed products; the fastest counts."""


def flops_metrics(metrics: Mapping[str, float], macs: int, rate: float) -> dict[str, float]:
    """Return ``system/tflops`` (10^12 operations per second) and ``system/mfu`` (their share of the rate), if known.

    A trial of a batch counts its own operations over the time of the whole batch.

    Args:
        metrics: Metrics of an interval.
        macs: Multiply-accumulates of a forward pass of one image.
        rate: Operations per second of all devices in use, see :func:`measured_matrix_rate`; NaN if unknown.
    """
    if not macs or "system/images_per_s" not in metrics:
        return {}
    operations_per_s = 3 * 2 * macs * metrics["system/images_per_s"]
    return {
        "system/tflops": operations_per_s / 1e12,
        **({} if math.isnan(rate) else {"system/mfu": operations_per_s / rate}),
    }


@cache
def measured_matrix_rate(device: torch.device, precision: str, threads: int) -> float:
    """Return the measured rate of a large matrix product in operations per second.

    It is measured once per process.  The memory used is freed.  The rate is NaN if it cannot be measured, as with
    several threads of a CPU, which must not prevent training.
    """
    if device.type == "cpu" and threads > 1:
        print(f"system/mfu is not recorded: the peak speed of {threads} threads of a CPU is not known", file=sys.stderr)
        return math.nan
    try:
        rate = _measure_product_rate(device, precision)
    except RuntimeError as error:  # usually out of memory
        print(f"the peak speed of this machine cannot be measured: {error}", file=sys.stderr)
        rate = math.nan
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rate


def _measure_product_rate(device: torch.device, precision: str) -> float:
    size, dtype = MATRIX_SIZE[device.type], {**NARROW, "fp64": torch.float64}.get(precision, torch.float32)
    draws = torch.Generator(device).manual_seed(0)
    matrix = torch.rand(size, size, device=device, dtype=dtype, generator=draws)
    product = torch.empty_like(matrix)
    # Of one thread, see measured_matrix_rate; the clock of a process is coarse while a timer runs.
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    seconds = []
    for _ in range(TIMED_PRODUCTS):
        start = clock()
        torch.mm(matrix, matrix, out=product)
        float(product[0, 0])  # waits for a GPU
        seconds.append(clock() - start)
    return 2.0 * size**3 / min(seconds)
