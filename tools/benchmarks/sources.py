"""Sources of values for simulated studies in which no mean differs: synthetic kinds, and the pool of real trainings.

A source draws values of so many studies, arms (the baseline first) and seeds.  Values of the pool are drawn without
replacement: the seeds of a pool are shuffled and cut into disjoint studies, as often as needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Shape = tuple[int, int, int]  #: studies, arms, seeds
POOL = Path(__file__).parent / "pool.parquet"
METRICS = ("val/accuracy", "test/accuracy", "val/loss")
TIGHT = 0.1  #: spread of the baseline of arms that are skewed or collapse alone
DEPTH, SHARE = 50.0, 0.1  #: how far below the others collapsed seeds lie, and how many there are


@dataclass(frozen=True)
class Source:
    """A kind of studies."""

    name: str
    draw: Callable[[np.random.Generator, Shape], Floats]
    quantum: float = 0.0  #: the step of the values
    sign: int = 1  #: -1 if smaller values are better
    claimed: bool = True  #: whether the page claims its error rates
    collapses: bool = False  #: whether the sign-flip test decides often


def _gaussian(draws: np.random.Generator, shape: Shape, spread: Floats | float = 1.0, rho: float = 0.0) -> Floats:
    noise = draws.standard_normal(shape)
    if rho:
        seeds = draws.standard_normal((shape[0], 1, shape[2]))
        noise = math.sqrt(1 - rho) * noise + math.sqrt(rho) * seeds
    return np.asarray(noise * np.reshape(np.broadcast_to(spread, shape[1]), (shape[1], 1)))


def _spread(arms: int, where: slice | int, size: float) -> Floats:
    values = np.ones(arms)
    values[where] = size
    return values


def _skewed(draws: np.random.Generator, shape: Shape) -> Floats:
    return np.asarray(math.sqrt(math.e) - np.exp(draws.standard_normal(shape)))


def _collapsing(draws: np.random.Generator, shape: Shape) -> Floats:
    return np.where(draws.random(shape) < SHARE, -DEPTH, draws.standard_normal(shape)) + SHARE * DEPTH


def _beside_tight(
    arms: Callable[[np.random.Generator, Shape], Floats], draws: np.random.Generator, shape: Shape
) -> Floats:
    baseline = TIGHT * draws.standard_normal((shape[0], 1, shape[2]))
    return np.concatenate([baseline, arms(draws, shape)[:, 1:]], axis=1)


SYNTHETIC = (
    Source("Gaussian", _gaussian),
    Source("Gaussian, seeds correlated 0.5", lambda draws, shape: _gaussian(draws, shape, rho=0.5)),
    Source("Gaussian, seeds correlated 0.9", lambda draws, shape: _gaussian(draws, shape, rho=0.9)),
    Source("t with 3 df", lambda draws, shape: draws.standard_t(3, shape)),
    Source("lognormal, all arms alike", _skewed),
    Source("10 % collapse, all arms alike", _collapsing, collapses=True),
    Source("steps of 1/360, sd 7 steps", lambda draws, shape: np.round(7 * _gaussian(draws, shape) + 0.3), 1.0),
    Source(
        "steps of 1/360, sd 1 step",
        lambda draws, shape: np.round(_gaussian(draws, shape) + 0.3),
        1.0,
    ),
    *(
        Source(
            f"{'baseline' if arm == 0 else 'one arm'} spreads {size} x",
            lambda draws, shape, arm=arm, size=size: _gaussian(draws, shape, _spread(shape[1], arm, size)),
        )
        for arm, size in ((0, 2), (0, 4), (1, 2), (1, 4), (1, 10), (1, 100))
    ),
    *(
        Source(
            name,
            lambda draws, shape, size=size, rho=rho: _gaussian(
                draws, shape, _spread(shape[1], slice(1, None, 2), size), rho
            ),
        )
        for name, size, rho in (
            ("every other arm spreads 4 x", 4, 0.0),
            ("the same, seeds correlated 0.5", 4, 0.5),
            ("every other arm spreads 10 x", 10, 0.0),
        )
    ),
    Source("spreads from 1 to 4", lambda draws, shape: _gaussian(draws, shape, np.geomspace(1, 4, shape[1]))),
    Source("arms lognormal, baseline tight", lambda draws, shape: _beside_tight(_skewed, draws, shape), claimed=False),
    Source(
        "only arms collapse (10 %)",
        lambda draws, shape: _beside_tight(_collapsing, draws, shape),
        claimed=False,
        collapses=True,
    ),
)


def patterns(comparisons: int) -> tuple[Source, ...]:
    """Return Gaussian and heavy-tailed studies of so many comparisons, in which arms or the baseline scatter more."""
    spreads = {"equal": np.ones(comparisons + 1)}
    for size in (0.3, 2, 4, 12):
        spreads[f"baseline {size:g}x"] = _spread(comparisons + 1, 0, size)
    counts = {1, *(max(1, round(comparisons / part)) for part in (10, 4, 3, 2))}
    for loud in sorted(counts - {comparisons} if comparisons > 1 else counts):
        for size in (2, 4, 10, 100):
            spreads[f"{loud} at {size}x"] = _spread(comparisons + 1, slice(1, 1 + loud), size)
        for size, baseline in ((10, 4), (4, 2)):
            spread = _spread(comparisons + 1, slice(1, 1 + loud), size)
            spread[0] = baseline
            spreads[f"{loud} at {size}x, baseline {baseline}x"] = spread
    if comparisons > 2:
        spreads["all but one at 4x"] = _spread(comparisons + 1, slice(1, comparisons), 4)
        spreads["graded to 10x"] = np.array([1.0, *np.geomspace(1, 10, comparisons)])
    gaussian = [
        Source(name, lambda draws, shape, spread=spread: _gaussian(draws, shape, spread))
        for name, spread in spreads.items()
    ]
    return (*gaussian, Source("t with 3 df", lambda draws, shape: draws.standard_t(3, shape)))


def two_valued() -> tuple[Source, ...]:
    """Return studies whose seeds lie at one of two levels: a transition that some have not made by the end."""

    def draw(draws: np.random.Generator, shape: Shape, share: float) -> Floats:
        return np.asarray((draws.random(shape) < share) - share + 0.07 * draws.standard_normal(shape))

    return tuple(
        Source(
            f"two levels, {100 * share:.0f} % low", lambda d, shape, share=share: draw(d, shape, share), claimed=False
        )
        for share in (0.3, 0.5)
    )


# -- the pool ---------------------------------------------------------------------------------------------------------


@cache
def pool(code: str = "sound") -> pd.DataFrame:
    """Return the values by seed, with columns for metric and arm; NaN where an arm has no such seed, or it diverged."""
    frame = pd.read_parquet(POOL)
    frame = frame[frame["code"] == code].astype({"arm": str})
    return frame.pivot(index="seed", columns="arm", values=list(METRICS))


def centred(metric: str, arms: Sequence[str]) -> tuple[list[Floats], float]:
    """Return the values of arms less their means, at seeds that all have, and the step of an arm alone."""
    names = list(dict.fromkeys(arms))
    frame = pool()[metric][names].dropna()
    steps = np.diff(np.unique(frame[names[0]]))
    step = 0.0 if metric == "val/loss" or len(names) > 1 else float(steps[steps > 1e-6].min())
    by_arm = {name: frame[name].to_numpy(dtype=float) - frame[name].mean() for name in names}
    return [by_arm[arm] for arm in arms], step  # centred arms have no common grid


def resampled(arms: Sequence[Floats], draws: np.random.Generator, shape: Shape) -> Floats:
    """Draw values at seeds without replacement; arms of a study take turns with those given.

    Different arms have the same seeds, as in a study; where an arm returns, it has others.
    """
    studies, count, seeds = shape
    used = [arms[place % len(arms)] for place in range(count)]
    turns = [sum(other is arm for other in used[:place]) for place, arm in enumerate(used)]
    size, rounds = min(map(len, used)), max(turns) + 1
    at_once = size // (rounds * seeds)
    drawn = np.empty(shape)
    for first in range(0, studies, at_once):
        some = min(at_once, studies - first)
        places = draws.permutation(size)[: some * rounds * seeds].reshape(some, rounds, seeds)
        for place, (arm, turn) in enumerate(zip(used, turns, strict=True)):
            drawn[first : first + some, place] = arm[places[:, turn]]
    return drawn


def _of_pool(name: str, metric: str, arms: Sequence[str], claimed: bool = True) -> Source:
    """Return a source of studies of these arms of the pool."""
    values, quantum = centred(metric, arms)
    sign = -1 if metric == "val/loss" else 1
    lost = any(bool(collapses(some, sign).any()) for some in values)
    return Source(name, lambda draws, shape: resampled(values, draws, shape), quantum, sign, claimed, collapses=lost)


def collapses(values: Floats, sign: int = 1) -> NDArray[np.bool_]:
    """Return which values of a large sample lie more than ten robust standard deviations on the worse side."""
    distance = sign * (values - np.median(values))
    return np.asarray(distance < -10 * 1.4826 * np.median(np.abs(distance)))


STABLE = ("learned", "no_position", "few_steps", "long", "few_images", "few_validation", "augmented", "sgd")
"""Arms of the pool that never collapse."""
RISKY = ("high_rate", "sgd_high_rate", "sgd_higher_rate")
"""Arms of the pool at the edge of stability, of which two collapse in some seeds."""


@cache
def real() -> tuple[Source, ...]:
    """Return the sources of the pool: every arm alone, and studies of different arms."""
    alike = [_of_pool(f"{arm}, all arms alike", "val/accuracy", [arm]) for arm in (*STABLE, *RISKY)]
    return (
        *alike,
        _of_pool("learned, loss", "val/loss", ["learned"]),
        _of_pool("sgd_high_rate, loss", "val/loss", ["sgd_high_rate"]),
        _of_pool("stable arms, mixed", "val/accuracy", STABLE),
        _of_pool("stable arms, mixed, test", "test/accuracy", STABLE),
        _of_pool("stable arms, mixed, loss", "val/loss", STABLE),
        _of_pool("all arms, mixed", "val/accuracy", (*STABLE, *RISKY), claimed=False),
        _of_pool("baseline long, arms sgd_high_rate", "val/accuracy", ("long", *["sgd_high_rate"] * 20), claimed=False),
        _of_pool(
            "baseline long, arms sgd_higher_rate", "val/accuracy", ("long", *["sgd_higher_rate"] * 20), claimed=False
        ),
    )
