"""Tests of placement: shares of GPUs compared with plain sums."""

from __future__ import annotations

import random
from collections import defaultdict
from fractions import Fraction

from vitlab.executors.machine import Placement

GPUS = ("GPU-a", "GPU-b", "7")


def test_two_hundred_requests_never_exceed_a_gpu() -> None:
    for seed in range(10):
        rng = random.Random(seed)
        placement = Placement(GPUS)
        there: dict[str, dict[int, float]] = defaultdict(dict)
        new: dict[str, set[int]] = defaultdict(set)
        waiting = [(name, rng.choice([0.1, 0.2, 0.25, 1 / 3, 0.5, 0.75, 1.0])) for name in range(200)]
        count = 0
        while waiting or any(there.values()):
            if waiting and rng.random() < 0.6:
                name, share = waiting[0]
                gpu = placement.assign_gpus(name, share, 1)
                fits = [
                    candidate
                    for candidate in GPUS
                    if not new[candidate]
                    and sum(Fraction(other).limit_denominator(60) for other in there[candidate].values())
                    + Fraction(share).limit_denominator(60)
                    <= 1
                ]
                assert (gpu is None) == (not fits) and (gpu is None or gpu in fits)
                if gpu is not None:
                    waiting.pop(0)
                    count += 1
                    there[gpu][name] = share
                    new[gpu].add(name)
            busy = [(gpu, name) for gpu in GPUS for name in there[gpu]]
            if busy and rng.random() < 0.5:
                gpu, name = rng.choice(busy)
                placement.mark_started(name)
                new[gpu].discard(name)
            if busy and rng.random() < 0.3:
                gpu, name = rng.choice(busy)
                placement.remove(name)
                there[gpu].pop(name)
                new[gpu].discard(name)
            for gpu in GPUS:
                assert float(placement.used_share(gpu)) <= 1.0
                assert len(new[gpu]) <= 1
        assert count == 200


def test_ten_tenths_fit_and_eleven_do_not() -> None:
    placement = Placement(["0"])
    for name in range(10):
        assert placement.assign_gpus(name, 0.1, 1) == "0"
        placement.mark_started(name)
    assert placement.used_share("0") == 1
    assert placement.assign_gpus(10, 0.1, 1) is None
    assert Placement(["0", "1"]).capacity(0.4, 1) == 4  # two on each: no trial is spread over two GPUs
    assert Placement(["0"]).capacity(1 / 3, 1) == Placement(["0"]).capacity(0.33333334, 1) == 3
    assert Placement(["0"]).capacity(0.3, 1) == 3


def test_next_trial_waits_for_first_step_of_previous() -> None:
    placement = Placement(["0", "1"])
    assert [placement.assign_gpus(name, 0.25, 1) for name in "abc"] == ["0", "1", None]
    placement.mark_started("b")
    assert placement.assign_gpus("c", 0.25, 1) == "1"
    assert placement.assign_gpus("d", 0.25, 1) is None
    placement.remove("a")  # it died before its first step
    assert placement.assign_gpus("d", 0.25, 1) == "0"
