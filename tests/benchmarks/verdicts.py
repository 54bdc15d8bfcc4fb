"""How often verdicts are wrong, and what they find: simulated studies of many kinds, with each kind of variance.

    python tests/benchmarks/verdicts.py --write       # 10,000 studies a cell; the tables of docs/pages/statistics.md

Nothing differs in the mean of any arm of the studies of the first table, and a study is a false alarm if any arm is
called better or worse.  Simultaneous intervals miss 0 in the same studies, so their coverage is the rest.  The second
table has the difference that is found in 80 % of studies, in standard deviations of a seed, also if arms were known to
spread alike.  The third has false alarms of studies that are tested again while seeds are added, and the fourth the
seeds that such studies need, and how often the intervals hold that they report at their end.  Standard errors, critical
values, families and levels are those of ``vitlab.statistics``, along all studies at once.

The exit code is 1 if false alarms with moderated variances, the default, exceed 5 % and three standard errors, in a
kind of studies for which error rates are claimed."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from vitlab import statistics
from vitlab.statistics import moderation
from vitlab.statistics.stopping import stagewise_p

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
END = "<!-- end -->"


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


def judge(values: Floats, quantum: float = 0.0, alpha: float = ALPHA) -> dict[str, tuple[Floats, Floats]]:
    """Return the differences of every study and the bounds they have to exceed, for each kind of variance."""
    mean = (values[:, 1:] - values[:, :1]).mean(axis=2)
    own, moderated = statistics.detection_bounds(values, alpha, quantum / math.sqrt(6))
    return {"own": (mean, own), "moderated": (mean, moderated)}


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
        judged = judge(values)
        with mock.patch.object(moderation, "lower_prior_df", known_alike):
            judged["known to be alike"] = judge(values)["moderated"]
        sizes = [float(np.quantile(limit[:, 0] - mean[:, 0], 0.8)) for mean, limit in judged.values()]
        rows.append([str(n), str(m), *(f"{size:.2f}" for size in sizes)])
        rows[-1] += [f"{sizes[0] / size:.2f}" for size in sizes[1:]]
    return rows


def known_alike(variances: Floats, n: int) -> Floats:
    """Return infinite prior degrees of freedom, in place of what the spread of variances tells."""
    return np.full(variances.shape[:-1], math.inf)


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
    """Return the fourth table: what a study of one comparison finds, with how many seeds, and what its intervals do."""
    rows = []
    for sizes in (sizes for sizes, m in LOOKS if m == 1):
        levels, most = statistics.sequential_levels(sizes, ALPHA), sizes[-1]
        total = 2 * stagewise_p(
            sizes, levels, len(sizes) - 1, statistics.t_quantile(1 - levels[-1] / 2, most - 1), 0, most - 1
        )
        unit = statistics.detectable_difference(1 / math.sqrt(most), most - 1)
        for factor in (0.0, 0.5, 1.0, 1.5, 2.0):
            effect = factor * unit
            values = np.random.default_rng([seed, 13, *sizes]).standard_normal((studies, most)) + effect
            used, found, p = np.full(studies, most), np.zeros(studies, bool), np.full(studies, math.nan)
            running = np.ones(studies, bool)
            for look, (size, level) in enumerate(zip(sizes, levels, strict=True)):
                mean, se = values[:, :size].mean(1), values[:, :size].std(1, ddof=1) / math.sqrt(size)
                significant = np.abs(mean) > statistics.t_quantile(1 - level / 2, size - 1) * se
                ends = running & (significant | (size == most))
                if len(sizes) > 2 and size < most:  # escalate_to gives nothing up
                    for one in np.flatnonzero(running & ~ends):
                        chance = statistics.predictive_power(mean[one], se[one], size - 1, (size, most), levels[-1])
                        ends[one] = chance < FUTILITY
                found |= ends & significant
                for one in np.flatnonzero(ends):
                    t, shift = (mean[one] - effect) / se[one], effect / se[one]
                    p[one] = stagewise_p(sizes, levels, look, t, shift, size - 1)
                used[ends], running = size, running & ~ends
            covered, above = (p > total / 2) & (p < 1 - total / 2), p < 0.5
            share = f"{used.mean() / most:.2f}"
            if factor:
                fixed = next(n for n in range(3, 1000) if statistics.power(effect, n**-0.5, n - 1) >= found.mean())
                share = f"{used.mean() / fixed:.2f}"
            shown = f"{sizes[0]} to {most} by {sizes[1] - sizes[0]}"
            rows.append([shown, f"{factor:g}", f"{100 * found.mean():.1f}", f"{used.mean():.1f}", share])
            rows[-1] += [f"{100 * covered.mean():.1f}", f"{100 * above.mean():.1f}"]
            print(" | ".join(rows[-1]), flush=True)
    return rows


def errors_and_power(studies: int, seed: int) -> tuple[str, bool]:
    """Return the first three tables as text, and whether every rate that is claimed holds."""
    rows, valid = false_alarms(studies, seed)
    error = 100 * math.sqrt(ALPHA * (1 - ALPHA) / studies)
    text = (
        f"Studies in which something is found and nothing differs, in percent: own / moderated, {studies:,} "
        f"studies a cell (standard error of 5 %: {error:.1f}); columns are seeds x comparisons.\n\n"
    )
    text += table(["", *(f"{n} x {m}" for n, m in CELLS)], rows)
    text += (
        "\n\nThe smallest difference that is found in 80 % of studies, in standard deviations of a seed (Gaussian, seeds "
        "not correlated):\n\n"
    )
    heads = ["seeds", "comparisons", "own", "moderated", "known to be alike", "own / moderated", "own / known"]
    text += table(heads, detectable(studies, seed))
    more_rows, holds = false_alarms_of_looks(studies, seed)
    heads = [f"{sizes[0]} to {sizes[-1]} by {sizes[1] - sizes[0]}, x {m}" for sizes, m in LOOKS]
    text += "\n\nThe first table for studies that are tested again while seeds are added, at a level for each look:\n\n"
    return text + table(["", *heads], more_rows), valid and holds


def looks(studies: int, seed: int) -> tuple[str, bool]:
    """Return the fourth table as text."""
    text = (
        "Seeds that such studies of one comparison need, and the intervals and estimates that are reported at their end "
        f"(Gaussian, {studies:,} studies a row). The effect is in detectable differences of a study with all seeds at "
        "once; the share of seeds is that of a study with one look and the same power, or of all seeds where nothing "
        "differs.\n\n"
    )
    heads = [
        "looks",
        "effect",
        "found, %",
        "seeds",
        "share of seeds",
        "intervals that hold, %",
        "estimates too large, %",
    ]
    return text + table(heads, seeds_of_looks(studies, seed)), True


SECTIONS = {"errors": errors_and_power, "looks": looks}
"""Parts of the page, each between a comment with its name and the next comment."""


def write_section(name: str, text: str) -> None:
    """Write a part of the page, between the comment with this name and the next comment."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(begin := f"<!-- {name} -->")
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{begin}\n\n{text}\n\n{END}{after}", encoding="utf-8")


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
    parser.add_argument("--only", choices=SECTIONS, help="these tables alone")
    arguments = parser.parse_args()
    all_valid = True
    for name in [arguments.only] if arguments.only else SECTIONS:
        text, valid = SECTIONS[name](arguments.studies, arguments.seed)
        all_valid &= valid
        print(f"\n{text}")
        if arguments.write:
            write_section(f"tests/benchmarks/verdicts.py: {name}", text)
    return int(not all_valid)


if __name__ == "__main__":
    sys.exit(main())
