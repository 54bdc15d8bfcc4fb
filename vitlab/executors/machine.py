"""Cores and GPUs of this machine, counted without importing torch and without initialising CUDA.

A process that has initialised CUDA cannot fork workers that use it, so the driver never calls CUDA.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def cores() -> list[int]:
    """Return the cores that this process may run on, in order."""
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else list(range(os.cpu_count() or 1))


def budget(root: Path = CGROUP) -> int:
    """Return the number of cores that this process may use, within the limits of its affinity and container."""
    return max(1, math.ceil(min(len(cores()), _quota(root))))


def _quota(root: Path) -> float:
    """Return the number of cores that the control group allows; infinite if it sets no limit."""
    try:
        allowed, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return math.inf
    return math.inf if allowed == "max" else int(allowed) / int(period)


def gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the usable GPUs as values for ``CUDA_VISIBLE_DEVICES``; none with a CPU-only torch."""
    if not _torch_has_cuda():
        return []
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return _visible(visible)
    program = shutil.which("nvidia-smi")
    if program is None:  # as in containers with the devices but without the tools
        return [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    try:
        listing = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return _listed(listing)


def gpu_memory() -> dict[str, int]:
    """Return the bytes of each GPU by UUID and by index; empty without nvidia-smi, and without MIG slices."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    query = [program, "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        table = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    memory: dict[str, int] = {}
    for line in table.splitlines():
        match = re.fullmatch(r"\s*(\d+), *(GPU-[0-9A-Za-z-]+), *(\d+)\s*", line)
        if match is not None:
            memory[match[1]] = memory[match[2]] = int(match[3]) << 20  # nvidia-smi counts in MiB
    return memory


def _visible(value: str) -> list[str]:
    """Return the devices of a ``CUDA_VISIBLE_DEVICES``, which CUDA reads up to the first invalid one, such as -1."""
    devices: list[str] = []
    for item in (part.strip() for part in value.split(",")):
        if not re.fullmatch(r"\d+|(GPU|MIG)-[0-9A-Za-z/-]+", item):
            break
        devices.append(item)
    return devices


def _listed(listing: str) -> list[str]:
    """Return the UUIDs in the output of ``nvidia-smi -L``; for a sliced GPU (MIG), those of its slices."""
    devices: list[list[str]] = []
    for line in listing.splitlines():
        match = re.search(r"UUID: ((?:GPU|MIG)-[0-9A-Za-z/-]+)", line)
        if match is None:
            continue
        if match[1].startswith("GPU"):
            devices.append([match[1]])
        elif devices:
            devices[-1].append(match[1])
    return [uuid for gpu, *slices in devices for uuid in (slices or [gpu])]


def _torch_has_cuda() -> bool:
    try:
        return not version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False
