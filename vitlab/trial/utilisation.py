"""How much of a machine a training uses: the operations it does a second, to those of a large product of matrices.

That is model FLOPs utilisation (MFU, arXiv:2204.02311) with a measured rate in the place of the maker's: of a training
step 3 times the multiply-accumulates of a forward pass are counted, 2 operations each, and neither augmentation nor the
optimizer.  The rate is measured once a user for each kind of processor, precision, number of threads and version of
torch, and remembered.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from vitlab.plan.memo import Memo

SIZE = {"cpu": 1024, "cuda": 8192}
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
        rate: operations a second of all devices that train, see :func:`matrix_rate`.
    """
    if not macs or "system/images_per_s" not in metrics:
        return {}
    done = 3 * 2 * macs * metrics["system/images_per_s"]
    return {"system/tflops": done / 1e12, "system/mfu": done / rate}


def matrix_rate(device: torch.device, processor: str, precision: str) -> float:
    """Operations a second of a product of two large matrices, in the precision of a training and on its threads."""
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    known = f"{processor}, {precision}, {threads} threads, torch {torch.__version__}"
    if known not in _rates:
        memo = Memo("matrix_rates", MOST)
        found = memo.entries.get(known)
        if isinstance(found, float) and found > 0:
            _rates[known] = found
        else:
            _rates[known] = memo.entries[known] = _measured(device, precision)
            memo.keep()
    return _rates[known]


def _measured(device: torch.device, precision: str) -> float:
    size, draws = SIZE[device.type], torch.Generator(device).manual_seed(0)
    dtype = {"bf16": torch.bfloat16, "fp64": torch.float64}.get(precision, torch.float32)
    left, right = (torch.randn(size, size, device=device, generator=draws).to(dtype) for _ in range(2))
    # Of a CPU its own time counts: waiting for a core that others use would be remembered as what it can do.
    clock, each = (time.process_time, torch.get_num_threads()) if device.type == "cpu" else (time.perf_counter, 1)
    took_s = []
    for _ in range(TIMES):
        began = clock()
        product = torch.mm(left, right)
        float(product[0, 0])  # waits for a GPU
        took_s.append((clock() - began) / each)
    return 2.0 * size**3 / min(took_s)
