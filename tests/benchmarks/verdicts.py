"""How often verdicts are wrong, and what they find: simulated studies of many kinds, with each kind of variance.

    python tests/benchmarks/verdicts.py --write       # 10,000 studies a cell; the tables of docs/pages/statistics.md

Nothing differs in the mean of any arm of the studies of the first table, and a study is a false alarm if any arm is
called better or worse.  Simultaneous intervals miss 0 in the same studies, so their coverage is the rest.  The second
table has the difference that is found in 80 % of studies, in standard deviations of a seed.  The third has false alarms
of studies that are tested again while seeds are added, and the fourth the seeds that such studies need.  Standard
errors, critical values, families and levels are those of ``vitlab.statistics``, along all studies at once.

The exit code is 1 if false alarms with moderated variances, the default, exceed 5 % and three standard errors, in a kind
of studies for which error rates are claimed.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitlab import statistics
from vitlab.statistics.moderation import MAX_WILD, MIN_ARMS, MIN_SEEDS, MIN_SHARING, moderated_errors, wild_arms

Floats = NDArray[np.float64]
ALPHA = 0.05
CELLS = ((3, 1), (3, 3), (3, 5), (3, 10), (3, 20), (5, 5), (5, 10), (10, 5), (10, 10), (20, 20))
"""Seeds and comparisons."""
LOOKS = (((5, 10), 1), ((5, 10), 10), ((3, 6, 9, 12), 1), ((3, 6, 9, 12), 5), (tuple(range(3, 13)), 5))
LOOKS += ((tuple(range(3, 31, 3)), 1), (tuple(range(3, 31, 3)), 10))
"""Seeds at each look, and comparisons."""
FUTILITY = 0.1  #: as in ``seeds: {until: decided}``
PAGE = Path(__file__).parents[2] / "docs" / "pages" / "statistics.md"
UNCLAIMED = ("arms lognormal, baseline tight", "only arms collapse (10 %)")
"""Kinds of studies for which error rates are not claimed."""
STEPS = "steps of 1/360"  #: kinds whose metric has a step, 1 in their units
BEGIN, END = "<!-- tests/benchmarks/verdicts.py -->", "<!-- end -->"


def families(draws: np.random.Generator, shape: tuple[int, int, int]) -> Iterator[tuple[str, Callable[[], Floats]]]:
    """Yield kinds of studies: name, and a function that draws values."""
    arms = shape[1]

    def gaussian(spread: Floats | float = 1.0, rho: float = 0.0) -> Floats:
        noise = draws.standard_normal(shape)
        if rho:
            seeds = draws.standard_normal((shape[0], 1, shape[2]))
            noise = math.sqrt(1 - rho) * noise + math.sqrt(rho) * seeds
        return np.asarray(noise * np.reshape(np.broadcast_to(spread, arms), (arms, 1)))

    def spread(where: slice | int, size: float) -> Floats:
        values = np.ones(arms)
        values[where] = size
        return values

    def skewed() -> Floats:
        return np.asarray(math.sqrt(math.e) - np.exp(draws.standard_normal(shape)))

    def collapsing(share: float = 0.1, depth: float = 50.0) -> Floats:
        return np.where(draws.random(shape) < share, -depth, draws.standard_normal(shape)) + share * depth

    def only_arms(values: Floats) -> Floats:
        return np.concatenate([0.1 * draws.standard_normal((shape[0], 1, shape[2])), values[:, 1:]], axis=1)

    yield "Gaussian", gaussian
    yield "Gaussian, seeds correlated 0.5", lambda: gaussian(rho=0.5)
    yield "Gaussian, seeds correlated 0.9", lambda: gaussian(rho=0.9)
    yield "t with 3 df", lambda: draws.standard_t(3, shape)
    yield "lognormal, all arms alike", skewed
    yield "10 % collapse, all arms alike", collapsing
    yield "steps of 1/360, sd 7 steps", lambda: np.round(7 * gaussian() + 0.3)
    yield "steps of 1/360, sd 1 step", lambda: np.round(gaussian() + 0.3)
    yield "baseline spreads 2 x", lambda: gaussian(spread(0, 2))
    yield "baseline spreads 4 x", lambda: gaussian(spread(0, 4))
    yield "one arm spreads 2 x", lambda: gaussian(spread(1, 2))
    yield "one arm spreads 4 x", lambda: gaussian(spread(1, 4))
    yield "one arm spreads 10 x", lambda: gaussian(spread(1, 10))
    yield "one arm spreads 100 x", lambda: gaussian(spread(1, 100))
    yield "every other arm spreads 4 x", lambda: gaussian(spread(slice(1, None, 2), 4))
    yield "the same, seeds correlated 0.5", lambda: gaussian(spread(slice(1, None, 2), 4), 0.5)
    yield "every other arm spreads 10 x", lambda: gaussian(spread(slice(1, None, 2), 10))
    yield "spreads from 1 to 4", lambda: gaussian(np.geomspace(1, 4, arms))
    yield "arms lognormal, baseline tight", lambda: only_arms(skewed())
    yield "only arms collapse (10 %)", lambda: only_arms(collapsing())


@cache
def _bounds(m: int, level: float) -> tuple[Floats, Floats]:
    """Return 1 / df and the log of the critical value of the largest of ``m`` t statistics, to interpolate."""
    inverse = np.array([1e-3, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0])
    loadings = [math.sqrt(0.5)] * m
    return inverse, np.log([statistics.max_t_quantile(level, 1 / value, loadings) for value in inverse])


def judge(values: Floats, quantum: float = 0.0, alpha: float = ALPHA) -> dict[str, tuple[Floats, Floats]]:
    """Return the differences of every study and the bounds they have to exceed, for each kind of variance.

    Studies whose differences have no spread have an infinite bound: their sign-flip p is at least 0.25.
    """
    m, n = values.shape[1] - 1, values.shape[2]
    differences = values[:, 1:] - values[:, :1]
    mean, sd = differences.mean(axis=2), differences.std(axis=2, ddof=1)
    own_sd = np.maximum(sd, quantum / math.sqrt(6))
    own = statistics.t_quantile(1 - alpha / 2 / m, n - 1) * own_sd / math.sqrt(n)
    own = np.where(sd > 1e-9, own, np.inf)
    if m < MIN_ARMS or n < MIN_SEEDS:
        return {"own": (mean, own), "moderated": (mean, own)}
    bound = own.copy()
    shares = ~wild_arms(values[:, 1:])
    shares[(sd <= 1e-9).any(axis=1)] = False
    for arms in range(max(MIN_SHARING, m - max(1, int(MAX_WILD * m))), m + 1):
        studies = np.flatnonzero(shares.sum(axis=1) == arms)
        if len(studies):
            places = np.argsort(~shares[studies], axis=1, kind="stable")[:, :arms]
            with np.errstate(divide="ignore", invalid="ignore"):  # an arm without residuals
                se, df, _, _ = moderated_errors(values[studies[:, None], 1 + places], values[studies, 0])
            together = _bounds(m, alpha) if arms == m else _bounds(1, alpha / m)  # otherwise Holm's first step
            se = np.maximum(se, own_sd[studies[:, None], places] / math.sqrt(n))
            limits = se * np.exp(np.interp(1 / df, *together))[:, None]
            alone = own[studies[:, None], places]
            bound[studies[:, None], places] = np.where(np.isfinite(limits), limits, alone)
    return {"own": (mean, own), "moderated": (mean, bound)}


def false_alarms(studies: int, seed: int) -> tuple[list[list[str]], bool]:
    """Return the first table, and whether every rate that is claimed holds."""
    rows: dict[str, list[str]] = {}
    valid, bound = True, ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / studies)
    for n, m in CELLS:
        draws = np.random.default_rng([seed, n, m])
        for name, draw in families(draws, (studies, m + 1, n)):
            judged = judge(draw(), float(name.startswith(STEPS))).values()
            rates = [float((np.abs(mean) > limit).any(axis=1).mean()) for mean, limit in judged]
            rows.setdefault(name, [name]).append(" / ".join(f"{100 * rate:.1f}" for rate in rates))
            valid &= name in UNCLAIMED or rates[-1] <= bound
            print(f"{n} seeds, {m} comparisons, {name}: {rows[name][-1]}", flush=True)
    return [*rows.values()], valid


def detectable(studies: int, seed: int) -> list[list[str]]:
    """Return the second table: the effect on one arm that is found in 80 % of studies."""
    rows = []
    for n, m in CELLS:
        draws = np.random.default_rng([seed, 7, n, m])
        values = draws.standard_normal((studies, m + 1, n))
        sizes = [float(np.quantile(limit[:, 0] - mean[:, 0], 0.8)) for mean, limit in judge(values).values()]
        rows.append([str(n), str(m), *(f"{size:.2f}" for size in sizes), f"{sizes[0] / sizes[1]:.2f}"])
    return rows


def false_alarms_of_looks(studies: int, seed: int) -> tuple[list[list[str]], bool]:
    """Return the third table, and whether every rate that is claimed holds."""
    rows: dict[str, list[str]] = {}
    valid, bound = True, ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / studies)
    for sizes, m in LOOKS:
        levels = statistics.sequential_levels(sizes, ALPHA, m)
        draws = np.random.default_rng([seed, 11, m, *sizes])
        for name, draw in families(draws, (studies, m + 1, sizes[-1])):
            values, quantum = draw(), float(name.startswith(STEPS))
            found = {kind: np.zeros(studies, bool) for kind in ("own", "moderated")}
            for size, level in zip(sizes, levels, strict=True):
                for kind, (mean, limit) in judge(values[:, :, :size], quantum, level).items():
                    found[kind] |= (np.abs(mean) > limit).any(axis=1)
            rates = [float(some.mean()) for some in found.values()]
            rows.setdefault(name, [name]).append(" / ".join(f"{100 * rate:.1f}" for rate in rates))
            valid &= name in UNCLAIMED or rates[-1] <= bound
            print(f"looks at {sizes}, {m} comparisons, {name}: {rows[name][-1]}", flush=True)
    return [*rows.values()], valid


def seeds_of_looks(studies: int, seed: int) -> list[list[str]]:
    """Return the fourth table: what a study of one comparison finds, and with how many seeds."""
    rows = []
    for sizes in (sizes for sizes, m in LOOKS if m == 1):
        levels, most = statistics.sequential_levels(sizes, ALPHA), sizes[-1]
        unit = statistics.detectable_difference(1 / math.sqrt(most), most - 1)
        for factor in (0.0, 1.0, 1.5, 2.0):
            values = np.random.default_rng([seed, 13, *sizes]).standard_normal((studies, most)) + factor * unit
            used, found, covered = np.full(studies, most), np.zeros(studies, bool), np.zeros(studies, bool)
            running = np.ones(studies, bool)
            for size, level in zip(sizes, levels, strict=True):
                mean, se = values[:, :size].mean(1), values[:, :size].std(1, ddof=1) / math.sqrt(size)
                half = statistics.t_quantile(1 - level / 2, size - 1) * se
                ends = running & ((np.abs(mean) > half) | (size == most))
                if len(sizes) > 2 and size < most:  # escalate_to gives nothing up
                    given_up = [
                        statistics.predictive_power(one, error, size - 1, (size, most), levels[-1]) < FUTILITY
                        for one, error in zip(mean.tolist(), se.tolist(), strict=True)
                    ]
                    ends |= running & np.array(given_up)
                found |= ends & (np.abs(mean) > half)
                covered |= ends & (np.abs(mean - factor * unit) <= half)
                used[ends], running = size, running & ~ends
            share = f"{used.mean() / most:.2f}"
            if factor:
                fixed = next(
                    n for n in range(3, 1000) if statistics.power(factor * unit, n**-0.5, n - 1) >= found.mean()
                )
                share = f"{used.mean() / fixed:.2f}"
            shown = f"{sizes[0]} to {most} by {sizes[1] - sizes[0]}"
            rows.append([shown, f"{factor:g}", f"{100 * found.mean():.1f}", f"{used.mean():.1f}", share])
            rows[-1].append(f"{100 * covered.mean():.1f}")
            print(" | ".join(rows[-1]), flush=True)
    return rows


def table(heads: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] + ["--:"] * (len(heads) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="write the tables into docs/pages/statistics.md")
    arguments = parser.parse_args()
    rows, valid = false_alarms(arguments.studies, arguments.seed)
    error = 100 * math.sqrt(ALPHA * (1 - ALPHA) / arguments.studies)
    text = (
        f"Studies in which something is found and nothing differs, in percent: own / moderated, {arguments.studies:,} "
        f"studies a cell (standard error of 5 %: {error:.1f}); columns are seeds x comparisons.\n\n"
    )
    text += table(["", *(f"{n} x {m}" for n, m in CELLS)], rows)
    text += (
        "\n\nThe smallest difference that is found in 80 % of studies, in standard deviations of a seed (Gaussian, seeds "
        "not correlated):\n\n"
    )
    text += table(["seeds", "comparisons", "own", "moderated", "ratio"], detectable(arguments.studies, arguments.seed))
    more_rows, holds = false_alarms_of_looks(arguments.studies, arguments.seed)
    heads = [f"{sizes[0]} to {sizes[-1]} by {sizes[1] - sizes[0]}, x {m}" for sizes, m in LOOKS]
    text += "\n\nThe first table for studies that are tested again while seeds are added, at a level for each look:\n\n"
    text += table(["", *heads], more_rows)
    text += (
        "\n\nSeeds that such studies of one comparison need (Gaussian). The effect is in detectable differences of a "
        "study with all seeds at once; the share of seeds is that of a study with one look and the same power, or of "
        "all seeds where nothing differs.\n\n"
    )
    heads = ["looks", "effect", "found, %", "seeds", "share of seeds", "intervals that hold, %"]
    text += table(heads, seeds_of_looks(arguments.studies, arguments.seed))
    print(f"\n{text}")
    if arguments.write:
        page = PAGE.read_text(encoding="utf-8")
        before, _, rest = page.partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")
    return int(not (valid and holds))


if __name__ == "__main__":
    sys.exit(main())
