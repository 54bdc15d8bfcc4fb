"""Measurement: contenders in turns, in short blocks, and ratios within a round.

Somebody else's work on the machine slows every contender of a round alike, so a ratio within a round says more than two
times do.  Where contenders use one thread, their blocks are timed by the CPU time of this process, in which waiting for
a core does not count; elsewhere by the wall clock.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

ROUNDS = 7
BLOCK_S = 0.3

Contender = Callable[[], float]
"""Does some work and says how much."""
Speeds = dict[str, list[float]]
"""Work a second of every contender, one number a round."""


@dataclass(frozen=True)
class Row:
    """One line of the table: median over rounds and quartiles."""

    goal: str
    what: str
    median: float
    low: float
    high: float
    unit: str  #: x for ratios, where more is better; other units are costs
    clock: str  #: CPU or wall
    gate: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """True if the gate is met, None without a gate."""
        if self.gate is None:
            return None
        return self.median >= self.gate if self.unit == "x" else self.median <= self.gate


def row(
    goal: str, what: str, values: Iterable[float], unit: str, clock: str, gate: float | None = None, note: str = ""
) -> Row:
    """Return the row of some values, one per round."""
    samples = list(values)
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else 3 * samples
    return Row(goal, what, median, low, high, unit, clock, gate, note)


def user_environment() -> dict[str, str]:
    """Return the environment variables of a user's process, which keeps its bytecode."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def in_turns(
    contenders: Mapping[str, Contender],
    clock: Callable[[], float] = time.process_time,
    rounds: int = ROUNDS,
    block_s: float = BLOCK_S,
) -> Speeds:
    """Return the speeds of contenders after a warm-up call each; the first contender changes from round to round."""
    for work in contenders.values():
        work()
    names = list(contenders)
    speeds: Speeds = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            speeds[name].append(_speed(contenders[name], clock, block_s))
    return speeds


def _speed(work: Contender, clock: Callable[[], float], block_s: float) -> float:
    done, began = 0.0, clock()
    while True:
        done += work()
        passed = clock() - began
        if passed >= block_s:
            return done / passed


def ratios(speeds: Speeds, of: str, to: str) -> list[float]:
    """Return the ratio of two speeds in each round."""
    return [mine / theirs for mine, theirs in zip(speeds[of], speeds[to], strict=True)]


def fastest(speeds: Speeds, among: Iterable[str]) -> str:
    """Return the contender with the highest median speed."""
    return max(among, key=lambda name: statistics.median(speeds[name]))
