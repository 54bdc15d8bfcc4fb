"""Two-way effects: whether what one factor does depends on another."""

from __future__ import annotations

from collections.abc import Mapping

from vitlab.statistics.replicates import Contrast, paired


def interaction(
    both: Mapping[int, float],
    first: Mapping[int, float],
    second: Mapping[int, float],
    neither: Mapping[int, float],
    *,
    alpha: float = 0.05,
) -> Contrast:
    """What two changes do together beyond the sum of what each does alone: ``both - first - second + neither``.

    Each side maps a seed to a value; Student's t over the seeds that all four have.  For two factors of two levels
    this is the interaction of an analysis of variance with the seed as the repeated subject, F being the square of t.
    """
    seeds = sorted(both.keys() & first.keys() & second.keys() & neither.keys())
    return paired([both[seed] - first[seed] for seed in seeds], [second[seed] - neither[seed] for seed in seeds], alpha)
