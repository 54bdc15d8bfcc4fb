"""Probability of superiority of one arm over another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vitlab.statistics.replicates import NAN, finite, root


@dataclass(frozen=True)
class Superiority:
    """The probability that a replicate of the first arm exceeds one of the second, ties counted half."""

    probability: float
    low: float
    high: float


def superiority_of_pairs(first: Sequence[float], second: Sequence[float], alpha: float = 0.05) -> Superiority:
    """Return the probability that the first exceeds the second at the same seed.

    The interval is the exact one of Clopper and Pearson.

    Reference: Bouthillier et al., arXiv:2103.03098.
    """
    x, y = finite(first), finite(second)
    if len(x) != len(y):
        raise ValueError(f"pairs need equal numbers of values; found {len(x)} and {len(y)}")
    if len(x) == 0:
        return Superiority(NAN, NAN, NAN)
    from scipy.special import betaincinv

    wins = float((x > y).sum() + 0.5 * (x == y).sum())
    losses = len(x) - wins
    low = float(betaincinv(wins, losses + 1, alpha / 2)) if wins else 0.0
    high = 1.0 - float(betaincinv(losses, wins + 1, alpha / 2)) if losses else 1.0
    return Superiority(wins / len(x), low, high)


def superiority(first: Sequence[float], second: Sequence[float], alpha: float = 0.05) -> Superiority:
    """Return the probability that a replicate of the first exceeds one of the second, for arms without pairs.

    The interval inverts Newcombe's score approximation, which does not collapse if one arm is entirely above the other.

    Reference: Newcombe (2006), Statistics in Medicine 25, 559-573, method 5.
    """
    x, y = finite(first), finite(second)
    m, n = len(x), len(y)
    if m == 0 or n == 0:
        return Superiority(NAN, NAN, NAN)
    from scipy.special import ndtri

    estimate = float((x[:, None] > y).mean() + 0.5 * (x[:, None] == y).mean())
    z2 = float(ndtri(1 - alpha / 2)) ** 2

    def excess(theta: float) -> float:
        spread = 1 + ((m + n) / 2 - 1) * ((1 - theta) / (2 - theta) + theta / (1 + theta))
        return (estimate - theta) ** 2 - z2 * theta * (1 - theta) * spread / (m * n)

    inside = min(max(estimate, 1e-9), 1 - 1e-9)  # an estimate of 0 or 1 is a root itself
    low = 0.0 if estimate == 0 else root(excess, 0.0, inside)
    high = 1.0 if estimate == 1 else root(excess, inside, 1.0)
    return Superiority(estimate, low, high)
