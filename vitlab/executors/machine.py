"""What this machine holds: cores and GPUs, counted without importing torch and without touching CUDA.

A process that has initialised CUDA cannot fork workers that use it, so the driver never asks CUDA.
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
    """The cores this process may run on, in order."""
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else list(range(os.cpu_count() or 1))


def budget(root: Path = CGROUP) -> int:
    """How many cores' worth of time this process may use: its cores, or less where a container is given less."""
    return max(1, math.ceil(min(len(cores()), _quota(root))))


def _quota(root: Path) -> float:
    """Cores' worth of time that the control group allows; infinite where it sets no limit."""
    try:
        allowed, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            allowed = (root / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return math.inf
    return math.inf if allowed in ("max", "-1") else int(allowed) / int(period)


def gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs a worker may be given, each as a value for ``CUDA_VISIBLE_DEVICES``; none under a CPU-only torch."""
    if not _torch_has_cuda():
        return []
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return _visible(visible)
    program = shutil.which("nvidia-smi")
    if program is None:  # as in containers given the devices and not the tools
        return [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    try:
        listing = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return _listed(listing)


def gpu_memory() -> dict[str, int]:
    """Bytes that each GPU holds, by its UUID and by its number; of slices, and without nvidia-smi, nothing is known."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    query = [program, "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        table = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    found: dict[str, int] = {}
    for line in table.splitlines():
        match = re.fullmatch(r"\s*(\d+), *(GPU-[0-9A-Za-z-]+), *(\d+)\s*", line)
        if match is not None:
            found[match[1]] = found[match[2]] = int(match[3]) << 20  # nvidia-smi counts in MiB
    return found


def _visible(value: str) -> list[str]:
    """The devices of a ``CUDA_VISIBLE_DEVICES``; CUDA reads it up to the first that does not exist, such as -1."""
    found: list[str] = []
    for item in (part.strip() for part in value.split(",")):
        if not re.fullmatch(r"\d+|(GPU|MIG)-[0-9A-Za-z/-]+", item):
            break
        found.append(item)
    return found


def _listed(listing: str) -> list[str]:
    """The devices in the output of ``nvidia-smi -L``: UUIDs, of the slices where a GPU is sliced (MIG)."""
    found: list[list[str]] = []
    for line in listing.splitlines():
        match = re.search(r"UUID: ((?:GPU|MIG)-[0-9A-Za-z/-]+)", line)
        if match is None:
            continue
        if match[1].startswith("GPU"):
            found.append([match[1]])
        elif found:
            found[-1].append(match[1])
    return [uuid for gpu, *slices in found for uuid in (slices or [gpu])]


def _torch_has_cuda() -> bool:
    try:
        return not version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False
