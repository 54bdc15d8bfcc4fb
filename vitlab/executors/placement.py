"""Placement of trials on GPUs, as pure arithmetic without processes or devices.

A trial requests a share of a GPU, an amount of its memory, or both; or several whole GPUs.  The shares on a GPU never
sum to more than 1, nor the memory to more than it has.  A trial's actual memory use is known after its first step, so
a GPU accepts no other trial before that: two trials that do not fit together would otherwise both fail in their first
step.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class GpuRequest:
    """GPU request of a trial."""

    share: float = 1.0  #: from 0, exclusive, to 1
    memory: int = 0  #: bytes; 0 if unspecified
    count: int = 1  #: number of GPUs


@dataclass
class _Tenant:
    gpus: tuple[str, ...]
    request: GpuRequest
    started: bool = False


class Placement:
    """GPUs of a machine and the trials placed on them.

    Args:
        gpus: names of the GPUs.
        memory: bytes of each GPU; the memory of GPUs not named is unknown and not counted.
    """

    def __init__(self, gpus: Sequence[str], memory: Mapping[str, int] = {}) -> None:
        self.gpus = tuple(gpus)
        self.memory = dict(memory)
        self._tenants: dict[Hashable, _Tenant] = {}

    def place(self, name: Hashable, request: GpuRequest) -> str | None:
        """Assign a trial to the least used GPU that has room and awaits no trial's first step.

        Returns:
            The GPU, or as many as requested, separated by commas; None if there is no room yet.
        """
        assert name not in self._tenants
        available = [gpu for gpu in self.gpus if self._has_room(gpu, request) and not self._waits(gpu)]
        if len(available) < request.count:
            return None
        selected = sorted(available, key=lambda gpu: (self.used_share(gpu), self.gpus.index(gpu)))[: request.count]
        self._tenants[name] = _Tenant(tuple(selected), request)
        return ",".join(selected)

    def mark_started(self, name: Hashable) -> None:
        """Record that a trial has done its first step and holds all its memory."""
        if name in self._tenants:
            self._tenants[name].started = True

    def leave(self, name: Hashable) -> None:
        """Remove a trial from its GPU."""
        self._tenants.pop(name, None)

    def used_share(self, gpu: str) -> Fraction:
        """Return the sum of the shares on a GPU."""
        return sum((_exact(tenant.request.share) for tenant in self._on(gpu)), Fraction(0))

    def possible(self, request: GpuRequest) -> bool:
        """Return True if the GPUs, when empty, can hold such a trial."""
        fit = [gpu for gpu in self.gpus if request.memory <= self.memory.get(gpu, request.memory)]
        return len(fit) >= request.count

    def capacity(self, request: GpuRequest) -> int:
        """Return the number of equal trials that the GPUs hold together."""
        return sum(self._holds(gpu, request) for gpu in self.gpus) // request.count

    def _holds(self, gpu: str, request: GpuRequest) -> int:
        by_share = int(1 / _exact(request.share))
        if request.memory and gpu in self.memory:
            return min(by_share, self.memory[gpu] // request.memory)
        return by_share

    def _has_room(self, gpu: str, request: GpuRequest) -> bool:
        memory = request.memory + sum(tenant.request.memory for tenant in self._on(gpu))
        return self.used_share(gpu) + _exact(request.share) <= 1 and memory <= self.memory.get(gpu, memory)

    def _waits(self, gpu: str) -> bool:
        return any(not tenant.started for tenant in self._on(gpu))

    def _on(self, gpu: str) -> list[_Tenant]:
        return [tenant for tenant in self._tenants.values() if gpu in tenant.gpus]


def _exact(share: float) -> Fraction:
    """Convert a share to a nearby simple fraction, so that ten times 0.1 is 1."""
    return Fraction(share).limit_denominator(10_000)
