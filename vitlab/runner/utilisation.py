"""How much of a machine a training uses: the operations it does a second, to those of a large product of matrices.

That is model FLOPs utilisation (MFU, arXiv:2204.02311) with a measured rate in the place of the maker's: of a training
step 3 times the multiply-accumulates of a forward pass are counted, 2 operations each, and neither augmentation nor the
optimizer.

The rate is remembered for a user, under all that it follows from.  Of a CPU it is measured once, in time of the process
itself on the threads that have a core each, so that others on the machine do not lessen it.  On a GPU only the clock on
the wall can be asked: there every process measures anew, and the highest rate that was ever seen is what counts.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache

import torch

from vitlab.store.memo import Memo

SIZE = {"cpu": 1024, "cuda": 4096}
"""Rows and columns of the matrices."""
TIMES = 4
"""Products, of which the fastest counts."""
MOST = 100  #: rates that are remembered, the latest

_rates: dict[str, float] = {}


def utilisation(metrics: Mapping[str, float], macs: int, rate: float) -> dict[str, float]:
    """``system/tflops``, 10^12 operations a second, and ``system/mfu``, their share of the rate.

    Nothing where they are not known.  A member of a cohort has its own work to show for the time of all of them.

    Args:
        metrics: of an interval.
        macs: multiply-accumulates of an image, forward.
        rate: operations a second of all devices that train, see :func:`matrix_rate`; NaN where it is not known.
    """
    if not macs or "system/images_per_s" not in metrics:
        return {}
    done = 3 * 2 * macs * metrics["system/images_per_s"]
    return {"system/tflops": done / 1e12, **({} if math.isnan(rate) else {"system/mfu": done / rate})}


def matrix_rate(device: torch.device, precision: str) -> float:
    """Operations a second of a product of two large matrices, in the precision of a training and on its threads.

    It takes memory, and leaves none taken.  NaN where it cannot be measured: that is no reason not to train.
    """
    known = _measured_on(device, precision)
    if known in _rates:
        return _rates[known]
    memo = Memo("matrix_rates", MOST)
    found = memo.entries.get(known)
    rate = found if isinstance(found, float) and 0 < found < math.inf else 0.0
    if not rate or device.type == "cuda":
        measured = _measured(device, precision)
        if measured > rate:  # which NaN is not
            rate = memo.entries[known] = measured
            memo.keep()
    if not rate:
        return math.nan
    _rates[known] = rate
    return rate


def _measured_on(device: torch.device, precision: str) -> str:
    """All that a rate follows from."""
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    else:
        bitwise = f", MKL_CBWR={os.environ['MKL_CBWR']}" if "MKL_CBWR" in os.environ else ""
        where = f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}, {_threads()} threads{bitwise}"
    return f"{where}, {precision}, torch {torch.__version__}"


@cache
def _processor() -> str:
    """The name of this CPU's model, where the system tells it."""
    with suppress(OSError), open("/proc/cpuinfo", errors="replace") as lines:
        for line in lines:
            field, _, value = line.partition(":")
            if field.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _threads() -> int:
    """Those that can compute at once: no more than there are cores for this process."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(torch.get_num_threads(), cores)


def _measured(device: torch.device, precision: str) -> float:
    try:
        rate = _fastest(device, precision)
    except RuntimeError as error:  # no memory, above all
        print(f"how fast this machine multiplies cannot be measured: {error}", file=sys.stderr)
        rate = math.nan
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rate


def _fastest(device: torch.device, precision: str) -> float:
    size, draws = SIZE[device.type], torch.Generator(device).manual_seed(0)
    dtype = {"bf16": torch.bfloat16, "fp64": torch.float64}.get(precision, torch.float32)
    left, right = (torch.randn(size, size, device=device, generator=draws).to(dtype) for _ in range(2))
    clock, each = (time.process_time, _threads()) if device.type == "cpu" else (time.perf_counter, 1)
    took_s = []
    for _ in range(TIMES):
        began = clock()
        product = torch.mm(left, right)
        float(product[0, 0])  # waits for a GPU
        took_s.append((clock() - began) / each)
    return 2.0 * size**3 / min(took_s)
