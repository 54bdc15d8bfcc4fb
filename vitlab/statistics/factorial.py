"""Two-way interaction effects of a factorial design."""

from __future__ import annotations

from collections.abc import Mapping

from vitlab.statistics.replicates import Contrast, paired_t_test


def interaction(
    both: Mapping[int, float],
    first: Mapping[int, float],
    second: Mapping[int, float],
    neither: Mapping[int, float],
    *,
    alpha: float = 0.05,
) -> Contrast:
    """Return the interaction of two changes: ``both - first - second + neither``.

    Each argument maps a seed to a value; Student's t is taken over the seeds that all four share.  For two factors of
    two levels this is the interaction of a repeated-measures analysis of variance with the seed as the subject, and F
    is the square of t.
    """
    seeds = sorted(both.keys() & first.keys() & second.keys() & neither.keys())
    return paired_t_test(
        [both[seed] - first[seed] for seed in seeds], [second[seed] - neither[seed] for seed in seeds], alpha
    )
