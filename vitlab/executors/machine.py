"""Cores and GPUs of this machine, counted without importing torch and without initialising CUDA, and who uses them.

A process that has initialised CUDA cannot fork workers that use it, so the driver never calls CUDA.

Trials are placed on GPUs by pure arithmetic.  A trial requests a share of a GPU, or several whole GPUs.  The shares on
a GPU never sum to more than 1.  A trial's memory use is known after its first step, so a GPU accepts no other trial
before that: two trials that do not fit together would otherwise both fail in their first step.
"""

import itertools
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from vitlab.spec import RunSpec

CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> list[int]:
    """Return the cores that this process may run on, in order."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def count_usable_cores() -> int:
    """Return the number of cores that this process may use, within the limits of its affinity and container."""
    return max(1, math.ceil(min(len(usable_cores()), _cgroup_quota())))


def _cgroup_quota() -> float:
    """Return the number of cores that the control group allows; infinite if it sets no limit."""
    try:
        allowed, period = (CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:  # version 1 of control groups
            allowed = (CGROUP / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (CGROUP / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return math.inf
    return math.inf if allowed in ("max", "-1") else int(allowed) / int(period)


def notes_on_unused_mps(device: str) -> list[str]:
    """Return a sentence where the device ``auto`` leaves the GPU of a Mac unused."""
    if device != "auto" or sys.platform != "darwin" or platform.machine() != "arm64":
        return []
    return ["run.device auto is the CPU on a Mac; mps is its GPU, whose results may differ by more than rounding"]


def usable_gpus() -> list[str]:
    """Return the usable GPUs as values for ``CUDA_VISIBLE_DEVICES``; none with a CPU-only torch."""
    if not _is_cuda_build():
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return _parse_visible_devices(visible)
    if shutil.which("nvidia-smi") is None:  # as in containers with the devices but without the tools
        return [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    return _list_nvidia_gpus()


def device_type(run: RunSpec) -> str:
    """Return the type of device that trials will have, such as ``cuda``; ``auto`` looks at this machine alone."""
    if run.device != "auto":
        return run.device
    return "cuda" if usable_gpus() else "cpu"


def _parse_visible_devices(value: str) -> list[str]:
    """Return the devices of a ``CUDA_VISIBLE_DEVICES``, which CUDA reads up to the first invalid one, such as -1."""
    is_valid = re.compile(r"\d+|(GPU|MIG)-[0-9A-Za-z/-]+").fullmatch
    return list(itertools.takewhile(is_valid, map(str.strip, value.split(","))))


def _list_nvidia_gpus() -> list[str]:
    """Return the UUIDs that ``nvidia-smi -L`` lists, of a sliced GPU (MIG) those of its slices; none if it fails."""
    try:
        run = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    devices: list[list[str]] = []
    for line in run.stdout.splitlines():
        match = re.search(r"UUID: ((?:GPU|MIG)-[0-9A-Za-z/-]+)", line)
        if match is None:
            continue
        if match[1].startswith("GPU"):
            devices.append([match[1]])
        elif devices:
            devices[-1].append(match[1])
    return [uuid for gpu, *slices in devices for uuid in (slices or [gpu])]


def _is_cuda_build() -> bool:
    return not version("torch").endswith("+cpu")


# -- trials on GPUs ----------------------------------------------------------------------------------------------------


@dataclass
class _Tenant:
    gpus: tuple[str, ...]
    share: float
    started: bool = False


class Placement:
    """GPUs of a machine and the trials placed on them.

    Args:
        gpus: names of the GPUs.
    """

    def __init__(self, gpus: Sequence[str]) -> None:
        self.gpus = tuple(gpus)
        self._tenants: dict[Hashable, _Tenant] = {}

    def assign_gpus(self, name: Hashable, share: float, count: int) -> str | None:
        """Assign a trial to the least used GPU that has room and awaits no trial's first step.

        Args:
            name: the trial.
            share: of each of its GPUs, from 0, exclusive, to 1.
            count: number of its GPUs.

        Returns:
            The GPU, or as many as requested, separated by commas; None if there is no room yet.
        """
        assert name not in self._tenants
        ready = (gpu for gpu in self.gpus if all(tenant.started for tenant in self._tenants_of(gpu)))
        available = [gpu for gpu in ready if round(self.used_share(gpu) + share, 6) <= 1]
        if len(available) < count:
            return None
        selected = sorted(available, key=self.used_share)[:count]
        self._tenants[name] = _Tenant(tuple(selected), share)
        return ",".join(selected)

    def mark_started(self, name: Hashable) -> None:
        """Record that a trial has done its first step and holds all its memory."""
        if name in self._tenants:
            self._tenants[name].started = True

    def remove(self, name: Hashable) -> None:
        """Remove a trial from its GPU."""
        self._tenants.pop(name, None)

    def used_share(self, gpu: str) -> float:
        """Return the sum of the shares on a GPU; ten times 0.1 is 1, and three times 0.33333334."""
        return round(math.fsum(tenant.share for tenant in self._tenants_of(gpu)), 6)

    def capacity(self, share: float, count: int) -> int:
        """Return the number of equal trials that the GPUs hold together."""
        return len(self.gpus) * int(round(1 / share, 6)) // count

    def _tenants_of(self, gpu: str) -> list[_Tenant]:
        return [tenant for tenant in self._tenants.values() if gpu in tenant.gpus]
