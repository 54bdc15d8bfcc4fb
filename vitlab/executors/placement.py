"""Placement: which trial goes to which GPU.  Arithmetic alone, without a process or a device.

A trial asks for a share of a GPU, for some of its memory, or both; or for several GPUs, each whole.  The shares on a
GPU never sum to more than 1, nor the memory to more than it has.  What a trial really takes is known once it has done a
step, so a GPU that was given a trial takes no other before that one has begun in earnest: two that are too large for
one GPU then do not meet in their first step, where both would die.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Request:
    """What a trial asks of a GPU."""

    share: float = 1.0  #: from 0, exclusive, to 1
    memory: int = 0  #: bytes; 0 where nobody has said
    count: int = 1  #: of GPUs of which it asks that


@dataclass
class _Guest:
    gpus: tuple[str, ...]
    request: Request
    begun: bool = False


class Placement:
    """The GPUs of a machine and who is on them.

    Args:
        gpus: their names.
        memory: what each holds, in bytes; of those not named, nobody knows, and their memory is not counted.
    """

    def __init__(self, gpus: Sequence[str], memory: Mapping[str, int] = {}) -> None:
        self.gpus = tuple(gpus)
        self.memory = dict(memory)
        self._guests: dict[Hashable, _Guest] = {}

    def place(self, name: Hashable, request: Request) -> str | None:
        """Give a trial a GPU: of those that have room and wait for nobody's first step, the one least taken.

        Returns:
            the GPU, or as many as it asks for with commas between; None if there is no room yet.
        """
        assert name not in self._guests
        open_ones = [gpu for gpu in self.gpus if self._has_room(gpu, request) and not self._waits(gpu)]
        if len(open_ones) < request.count:
            return None
        chosen = sorted(open_ones, key=lambda gpu: (self.taken(gpu), self.gpus.index(gpu)))[: request.count]
        self._guests[name] = _Guest(tuple(chosen), request)
        return ",".join(chosen)

    def begun(self, name: Hashable) -> None:
        """The trial has done a step: what it takes, it has."""
        if name in self._guests:
            self._guests[name].begun = True

    def leave(self, name: Hashable) -> None:
        """The trial is gone."""
        self._guests.pop(name, None)

    def taken(self, gpu: str) -> Fraction:
        """The sum of the shares on a GPU."""
        return sum((_exact(guest.request.share) for guest in self._on(gpu)), Fraction(0))

    def possible(self, request: Request) -> bool:
        """Whether some GPU could ever take such a trial."""
        fit = [gpu for gpu in self.gpus if request.memory <= self.memory.get(gpu, request.memory)]
        return len(fit) >= request.count

    def capacity(self, request: Request) -> int:
        """How many trials of one kind the GPUs take together."""
        return sum(self._holds(gpu, request) for gpu in self.gpus) // request.count

    def _holds(self, gpu: str, request: Request) -> int:
        by_share = int(1 / _exact(request.share))
        if request.memory and gpu in self.memory:
            return min(by_share, self.memory[gpu] // request.memory)
        return by_share

    def _has_room(self, gpu: str, request: Request) -> bool:
        memory = request.memory + sum(guest.request.memory for guest in self._on(gpu))
        return self.taken(gpu) + _exact(request.share) <= 1 and memory <= self.memory.get(gpu, memory)

    def _waits(self, gpu: str) -> bool:
        return any(not guest.begun for guest in self._on(gpu))

    def _on(self, gpu: str) -> list[_Guest]:
        return [guest for guest in self._guests.values() if gpu in guest.gpus]


def _exact(share: float) -> Fraction:
    """A share as it was meant: ten times 0.1 is 1, and three times 0.3333 is no more than that."""
    return Fraction(share).limit_denominator(10_000)
