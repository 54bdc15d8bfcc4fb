"""Write docs/pages/statistics_appendix.md: how often verdicts and intervals are wrong, by simulation.

    python tools/benchmarks/appendix.py --studies 2000 --write      # all tables
    python tools/benchmarks/appendix.py --studies 500 --only looks  # prints one of them

Studies are judged by ``vitlab.comparison.arrays.judge_studies``, as the report judges them.  Sources of values are synthetic, or
draw from the final values of real trainings without replacement (``sources.py``).  The exit code is 1 if false alarms
exceed 5 % and three standard errors where their rate is claimed.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import calibration
import numpy as np
import pandas as pd
import splits
from numpy.typing import NDArray
from scipy.optimize import brentq
from sources import (
    METRICS,
    STABLE,
    SYNTHETIC,
    Source,
    centred,
    collapses,
    patterns,
    pool,
    real,
    resampled,
    two_valued,
)
from tables import ALPHA, markdown, percent, standard_error

import vitlab
from vitlab.comparison import Verdict
from vitlab.comparison.arrays import VERDICTS, Choices, Comparisons, Judgements, judge_studies
from vitlab.comparison.blocks import OverBlocks, judge_blocks
from vitlab.statistics import power, replicates

Floats = NDArray[np.float64]
PAGE = Path(__file__).parents[2] / "docs" / "pages" / "statistics_appendix.md"
TABLES = 20  #: studies of a row over blocks that are judged as tables, too
AT_ONCE = 4_000_000  #: studies times squared comparisons that are judged at once
SEEDS, COMPARISONS = (3, 4, 5, 8, 10), (1, 2, 3, 5, 6, 10, 20, 40)
CELLS = ((3, 1), (3, 3), (3, 5), (3, 10), (3, 20), (5, 5), (5, 10), (10, 5), (10, 10), (20, 20))
"""Seeds and comparisons."""
LOOKS_OF_PATTERNS = ((5, 10), (3, 5, 8, 12), tuple(range(3, 13)), tuple(range(3, 31, 3)))
COMPARISONS_WITH_LOOKS = (1, 2, 3, 5, 10, 20)
FRESH, WORST = 50, 10  #: new studies of the worst cells, in those of every cell, and the number of these cells
BLOCK = 2_000  #: studies that are drawn at once
TUNED_AGAIN = 5  #: new studies of tuned arms, in those of a row
LOOKS = (((5, 10), 1), ((5, 10), 10), (tuple(range(3, 13)), 1), (tuple(range(3, 13)), 5))
LOOKS += (((3, 5, 8, 12), 6), (tuple(range(3, 31, 3)), 10))
REAL = 0.0  #: in place of a spread of seeds: values of real trainings
"""Seeds at each look, and comparisons."""
TWO_NEAR, ONE_NEAR = (-10.0, -10.0, -1.5, 0.0), (-10.0, 0.0, -1.0, -10.0, -10.0, -10.0)
TUNED = ((TWO_NEAR, 2, (15,)), (ONE_NEAR, 1, (15,)), ((*TWO_NEAR, -10.0), 2, (5,)), ((-1.0, 0.0, -1.0), 2, (10,)))
TUNED += ((TWO_NEAR, 2, (5, 10, 15)), (ONE_NEAR, 1, (5, 15)), ((*TWO_NEAR, -10.0), 2, (3, 5, 8, 12)))
TUNED += (((-1.0, 0.0, -1.0), 2, tuple(range(3, 13))),)
"""Means of the rivals of every arm, seeds of the tuning, and seeds at each look."""
MARGIN_SD = 2.0  #: margin in standard deviations of a seed


@dataclass(frozen=True)
class Outcome:
    """What a study with looks ends with, by comparison."""

    verdict: NDArray[np.int_]  #: places in ``VERDICTS``
    seeds: NDArray[np.int_]
    difference: Floats
    low: Floats
    high: Floats

    @property
    def finds(self) -> NDArray[np.bool_]:
        """Whether each comparison is called better or worse."""
        return self.verdict >= VERDICTS.index(Verdict.BETTER)


def chunks(values: Floats) -> Iterator[slice]:
    """Yield parts of many studies that fit into memory."""
    size = max(1, AT_ONCE // values.shape[1] ** 2)
    for first in range(0, len(values), size):
        yield slice(first, first + size)


def judged(values: Floats, design: Comparisons, sizes: Sequence[int] = ()) -> Outcome:
    """Judge studies, with looks after ``sizes`` seeds until each comparison is decided."""
    parts = [_judge_looks(values[some], design, tuple(sizes) or values.shape[2:]) for some in chunks(values)]
    return Outcome(*(np.concatenate([getattr(part, name) for part in parts]) for name in Outcome.__annotations__))


def _judge_looks(
    values: Floats, design: Comparisons, sizes: tuple[int, ...], choices: Mapping[int, Choices] = {}
) -> Outcome:
    shape = len(values), len(design.arms)
    levels = power.sequential_levels(sizes, ALPHA, shape[1]) if len(sizes) > 1 else (ALPHA,)
    outcome = Outcome(np.zeros(shape, int), np.full(shape, sizes[-1]), *np.full((3, *shape), math.nan))
    waiting = np.ones(shape, bool)
    for size, level in zip(sizes, levels, strict=True):
        of_look: Judgements = judge_studies(
            values[:, :, :size],
            replace(design, share=level / design.alpha, tested=waiting, choices=choices.get(size, Choices())),
        )
        ends = waiting & ((of_look.verdict > 0) | (size == sizes[-1]))
        outcome.verdict[ends], outcome.seeds[ends] = of_look.verdict[ends], size
        for name in ("difference", "low", "high"):
            getattr(outcome, name)[ends] = getattr(of_look.contrasts, name)[ends]
        waiting &= ~ends
    return outcome


def design_of(source: Source, comparisons: int) -> Comparisons:
    """Return the design of studies of a source."""
    return replace(Comparisons.all_with_first(comparisons), quantum=source.quantum, sign=source.sign)


# -- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """Studies of a pattern in which nothing differs."""

    sizes: tuple[int, ...]  #: seeds at each look
    comparisons: int
    pattern: str

    def rate(self, studies: int, seed: Sequence[int]) -> float:
        """Return the share of so many studies in which something is found."""
        [source] = [source for source in patterns(self.comparisons) if source.name == self.pattern]
        design, found = Comparisons.all_with_first(self.comparisons), 0
        draws = np.random.default_rng([*seed, self.comparisons, *self.sizes, *self.pattern.encode()])
        for first in range(0, studies, BLOCK):
            shape = min(BLOCK, studies - first), self.comparisons + 1, self.sizes[-1]
            sizes = self.sizes if len(self.sizes) > 1 else ()
            found += int(judged(source.draw(draws, shape), design, sizes).finds.any(axis=1).sum())
        return found / studies

    @property
    def seeds(self) -> str:
        """Return the seeds in words."""
        return looks_in_words(self.sizes) if len(self.sizes) > 1 else str(self.sizes[0])


def looks_in_words(sizes: Sequence[int]) -> str:
    """Return the seeds at each look in words."""
    return f"{sizes[0]} to {sizes[-1]}, {len(sizes)} looks"


def of_patterns(studies: int, seed: int) -> tuple[str, bool]:
    """Return the largest rates of false alarms over patterns of spread, and the worst of them with fresh studies."""
    rates: dict[Cell, float] = {}
    tables = []
    for groups in (
        {str(n): [((n,), m) for m in COMPARISONS] for n in SEEDS},
        {looks_in_words(sizes): [(sizes, m) for m in COMPARISONS_WITH_LOOKS] for sizes in LOOKS_OF_PATTERNS},
    ):
        rows = []
        for name, cells in groups.items():
            row = [name]
            for sizes, m in cells:
                of_cell = {(cell := Cell(sizes, m, source.name)): cell.rate(studies, [seed]) for source in patterns(m)}
                worst = max(of_cell, key=of_cell.__getitem__)
                row.append(f"{percent(of_cell[worst])} ({worst.pattern})")
                rates |= of_cell
            rows.append(row)
            print(" | ".join(row), flush=True)
        tables.append(rows)
    again, fresh = FRESH * studies, []
    several = [cell for cell in rates if cell.comparisons > 1]  # a single one is Student's t, which is exact
    for cell in sorted(several, key=rates.__getitem__, reverse=True)[:WORST]:
        rate = cell.rate(again, [seed, 1])
        fresh.append(
            (rate, [cell.seeds, str(cell.comparisons), cell.pattern, percent(rates[cell]), f"{100 * rate:.2f}"])
        )
        print(" | ".join(fresh[-1][1]), flush=True)
    text = (
        f"The largest rate of studies in which something is found and nothing differs, in percent, over "
        f"{len(patterns(10))} patterns of spread, with the pattern ({studies:,} studies a pattern, standard error of 5 %: "
        f"{100 * standard_error(studies):.1f}). *1 at 4x* means that one arm has 4 times the "
        "standard deviation of the others. Rows are seeds, columns comparisons. The largest of many rates exceeds the true "
        f"one, so the worst {WORST} of {len(several):,} cells follow below with new studies; a single comparison is judged by "
        "Student's t, whose rate is 5 %.\n\n"
    )
    text += markdown(["seeds", *map(str, COMPARISONS)], tables[0])
    text += "\n\nThe same of studies that add seeds until each comparison is decided:\n\n"
    text += markdown(["seeds", *map(str, COMPARISONS_WITH_LOOKS)], tables[1])
    text += (
        f"\n\nThe worst {WORST} cells of several comparisons, with the rate above and that of {again:,} new studies (standard error of "
        f"5 %: {100 * standard_error(again):.2f}):\n\n"
    )
    text += markdown(["seeds", "comparisons", "pattern", "rate above", "new studies"], [row for _, row in fresh])
    return text, all(rate <= ALPHA + 3 * standard_error(again) for rate, _ in fresh)


def of_sources(studies: int, seed: int) -> tuple[str, bool]:
    """Return the rates of false alarms of every source, by kind of variance."""
    rows, valid = [], True
    for source in (*SYNTHETIC, *two_valued(), *real()):
        row = [source.name + ("" if source.claimed else " *")]
        for n, m in CELLS:
            draws = np.random.default_rng([seed, n, m, *source.name.encode()])
            values = source.draw(draws, (studies, m + 1, n))
            rates = [
                judged(values, replace(design_of(source, m), variance=kind)).finds.any(axis=1).mean()
                for kind in ("own", "shared")
            ]
            row.append(" / ".join(map(percent, rates)))
            valid &= not source.claimed or rates[1] <= ALPHA + 3 * standard_error(studies)
        rows.append(row)
        print(" | ".join(row), flush=True)
    text = (
        f"Studies in which something is found and nothing differs, in percent ({studies:,} studies a cell, standard error "
        f"of 5 %: {100 * standard_error(studies):.1f}). Columns are seeds x comparisons. Each cell has two rates: with "
        "`variance: own` and with `variance: shared`. From `learned` on, values are those of the [real "
        "trainings](#the-real-trainings). * No rate is claimed: no test by t holds alpha there.\n\n"
    )
    return text + markdown(["", *(f"{n} x {m}" for n, m in CELLS)], rows), valid


def of_looks(studies: int, seed: int) -> tuple[str, bool]:
    """Return false alarms, intervals and means of studies with looks."""
    rows, valid = [], True
    for sizes, m in LOOKS:
        for factor in (0.0, 1.0, 1.5):
            se, df = math.sqrt(2 / sizes[-1]), sizes[-1] - 1
            unit = brentq(lambda effect: power.t_test_power(effect, se, df, ALPHA / m) - 0.8, 0.0, 100.0)  # noqa: B023
            draws = np.random.default_rng([seed, 11, m, *sizes])
            values = draws.standard_normal((studies, m + 1, sizes[-1]))
            values[:, 1] += factor * unit
            outcome = judged(values, Comparisons.all_with_first(m), sizes)
            truth = np.zeros(m)
            truth[0] = factor * unit
            alarms = outcome.finds[:, int(factor > 0) :].any(axis=1).mean() if m > 1 or not factor else math.nan
            holds = ((outcome.low <= truth) & (truth <= outcome.high)).all(axis=1).mean()
            found = outcome.finds[:, 0].mean()
            excess = outcome.difference[:, 0].mean() / truth[0] - 1 if factor else math.nan
            row = [looks_in_words(sizes), str(m), f"{factor:g}", percent(alarms), percent(holds), percent(found)]
            row += [f"{outcome.seeds[:, 0].mean():.1f}", percent(excess)]
            rows.append(row)
            valid &= not alarms > ALPHA + 3 * standard_error(studies)
            print(" | ".join(row), flush=True)
    text = (
        f"Studies that add seeds until each comparison is decided (Gaussian, {studies:,} studies a row). One arm differs by "
        "the effect, in differences that a study with all seeds detects; *found* and *seeds* are of this arm. *Alarms* are "
        "studies in which another arm is found, *intervals* those in which all intervals hold, and *excess* is the mean "
        "difference at the end over the true one; all in percent.\n\n"
    )
    heads = ["looks", "comparisons", "effect", "alarms", "intervals", "found", "seeds", "excess"]
    return text + markdown(heads, rows), valid


def of_margins(studies: int, seed: int) -> tuple[str, bool]:
    """Return every verdict with a margin: four arms equal the baseline, one is better by just the margin."""
    rows, valid, m = [], True, 5
    for source in (*SYNTHETIC, *real()):
        for sizes in ((10,), tuple(range(3, 13))):
            draws = np.random.default_rng([seed, 17, len(sizes), *source.name.encode()])
            values = source.draw(draws, (studies, m + 1, sizes[-1]))
            sd = float(values.std(axis=2, ddof=1).mean())
            step = source.quantum or sd / 1000
            margin = step * round(MARGIN_SD * sd / step)
            values[:, 1] += source.sign * margin
            outcome = judged(values, replace(design_of(source, m), margin=margin), sizes)
            truth = np.array([source.sign * margin, *[0.0] * (m - 1)])
            shifted, equal = outcome.verdict[:, 0], outcome.verdict[:, 1:]
            wrong = ((equal >= 3).any(axis=1) | np.isin(shifted, (1, 2, 4))).mean()
            known = np.isfinite(outcome.low).all(axis=1)
            holds = (
                ((outcome.low <= truth) & (truth <= outcome.high)).all(axis=1)[known].mean()
                if known.any()
                else math.nan
            )
            shares = [wrong, holds, (equal == 2).mean(), (equal == 0).mean(), (shifted == 3).mean()]
            rows.append([source.name + ("" if source.claimed else " *"), str(len(sizes)), *map(percent, shares)])
            rows[-1].append(f"{outcome.seeds.mean():.1f}")
            valid &= not source.claimed or wrong <= ALPHA + 3 * standard_error(studies)
            print(" | ".join(rows[-1]), flush=True)
    text = (
        f"Every verdict, in percent ({studies:,} studies a row): five arms, with a margin of {MARGIN_SD:g} standard "
        "deviations of a seed. Four equal the baseline, and one is better by just the margin. A study makes a *wrong claim* "
        "if an equal arm is called better or worse, or the other one equivalent, the same or worse. Studies have ten seeds, "
        "or ten looks at 3 to 12.\n\n"
    )
    heads = ["", "looks", "wrong claims", "intervals hold", "equal: equivalent", "equal: cannot tell", "better: better"]
    return text + markdown([*heads, "seeds"], rows), valid


def of_detection(studies: int, seed: int) -> tuple[str, bool]:
    """Return the smallest difference of one arm that is found in 80 % of studies."""
    studies, rows = max(studies, 2000), []
    for n in (3, 5, 10):
        for m in (1, 2, 3, 5, 10, 20, 40):
            row = [str(n), str(m)]
            for baseline in (1.0, 2.0):
                draws = np.random.default_rng([seed, 7, n, m])
                values = draws.standard_normal((studies, m + 1, n))
                values[:, 0] *= baseline
                for kind in ("own", "shared"):
                    design = replace(Comparisons.all_with_first(m), variance=kind)
                    parts = [judge_studies(values[some], design).contrasts for some in chunks(values)]
                    bounds = np.concatenate(
                        [(part.high - part.low)[:, 0] / 2 - part.difference[:, 0] for part in parts]
                    )
                    row.append(f"{np.quantile(np.where(np.isnan(bounds), np.inf, bounds), 0.8):.1f}")
            rows.append(row)
            print(" | ".join(row), flush=True)
    text = (
        "The smallest difference of one arm that is found in 80 % of studies, in standard deviations of a seed (Gaussian, "
        f"seeds not correlated, {studies:,} studies a cell).\n\n"
    )
    heads = ["seeds", "comparisons", "own", "shared", "own, baseline 2x", "shared, baseline 2x"]
    return text + markdown(heads, rows), True


def of_tuning(studies: int, seed: int) -> tuple[str, bool]:
    """Return the rates of false alarms of arms that are tuned and respond alike."""
    rows, valid = [], True
    for response, tuning_seeds, sizes in TUNED:
        for m in (1, 5, 10):
            shares = tuned_rates(response, tuning_seeds, sizes, m, studies, [seed, 19])
            count = studies
            if shares[1] > ALPHA + standard_error(studies):
                count = TUNED_AGAIN * studies
                shares = tuned_rates(response, tuning_seeds, sizes, m, count, [seed, 20])
            listed = ", ".join(f"{mean:g}" for mean in response)
            seeds = looks_in_words(sizes) if len(sizes) > 1 else str(sizes[0])
            rows.append([listed, str(tuning_seeds), seeds, str(m), *map(percent, shares), f"{count:,}"])
            valid &= shares[1] <= ALPHA + 3 * standard_error(count)
            print(" | ".join(rows[-1]), flush=True)
    text = (
        "Studies in which something is found and nothing differs, in percent: every arm is tuned by itself, and its candidates "
        "(*rivals*) have the same true means in all arms, given in standard deviations of a seed. The rates are without and "
        f"with the choice of knobs in the variance (standard error of 5 %: {100 * standard_error(studies):.1f}; where more "
        f"than that above 5 % were found, of {TUNED_AGAIN} times as many new studies).\n\n"
    )
    return text + markdown(
        ["rivals", "tuning seeds", "seeds", "comparisons", "without", "with", "studies"], rows
    ), valid


def tuned_rates(
    response: Sequence[float], tuning_seeds: int, sizes: tuple[int, ...], m: int, studies: int, seed: Sequence[int]
) -> list[float]:
    """Return the rates of false alarms without and with the choice of knobs in the variance."""
    draws, found = np.random.default_rng([*seed, m, tuning_seeds, *sizes]), np.zeros(2)
    for first in range(0, studies, BLOCK):
        shape = min(BLOCK, studies - first), m + 1, sizes[-1]
        values, choices = tuned_studies(draws, response, tuning_seeds, shape, sizes)
        outcomes = [_judge_looks(values, Comparisons.all_with_first(m), sizes, some) for some in ({}, choices)]
        found += [outcome.finds.any(axis=1).sum() for outcome in outcomes]
    return (found / studies).tolist()


def tuned_studies(
    draws: np.random.Generator,
    response: Sequence[float],
    tuning_seeds: int,
    shape: tuple[int, int, int],
    sizes: Sequence[int],
) -> tuple[Floats, dict[int, Choices]]:
    """Return the values of tuned arms and, by number of seeds, what their choices add to the comparisons."""
    studies, arms, n = shape
    values = np.empty(shape)
    variance = {size: np.zeros((studies, arms - 1, 2)) for size in sizes}
    df = {size: np.ones((studies, arms - 1, 2)) for size in sizes}
    for study, arm in np.ndindex(studies, arms):
        scores = draws.normal(response, 1 / math.sqrt(tuning_seeds))
        chosen = int(scores.argmax())
        values[study, arm] = x = draws.normal(response[chosen], 1, n)
        places = slice(None) if arm == 0 else arm - 1
        for size in sizes:
            seen = x[:size]
            choice = replicates.retuning_variance(scores.tolist(), chosen, seen.mean(), seen.std(ddof=1), tuning_seeds)
            variance[size][study, places, int(arm > 0)], df[size][study, places, int(arm > 0)] = choice
    return values, {size: Choices(variance[size], df[size]) for size in sizes}


def of_blocks(studies: int, seed: int) -> tuple[str, bool]:
    """Return false alarms, intervals and predictions over blocks whose differences and spreads vary."""
    rows, valid = [], True
    for blocks, n, m in ((3, 3, 1), (3, 3, 4), (5, 3, 1), (5, 3, 4), (5, 8, 4), (10, 3, 4)):
        for between, apart in itertools.product((0.0, 0.5, 2.0), (1.0, 10.0, REAL)):
            if apart == REAL and blocks >= len(STABLE):
                continue  # every block, and the new one, is another setting
            draws = np.random.default_rng([seed, 23, blocks, n, m, int(10 * between), int(apart)])
            values, outcome, effects, noise = over_blocks(draws, (studies, m, blocks, n), between, apart)
            contrasts = outcome.contrasts
            alarms = (outcome.verdict >= VERDICTS.index(Verdict.BETTER)).any(axis=1).mean()
            holds = ((contrasts.low <= 0) & (contrasts.high >= 0)).all(axis=1)[np.isfinite(contrasts.low).all(axis=1)]
            new = effects[:, 0, blocks]
            measured = [(outcome.new_low[:, 0] <= one) & (one <= outcome.new_high[:, 0]) for one in (new + noise, new)]
            shares = [alarms, holds.mean(), *(one.mean() for one in measured)]
            spread = {1.0: "equal", REAL: "real"}.get(apart, f"1 to {apart:g}")
            rows.append([str(blocks), str(n), str(m), f"{between:g}", spread, *map(percent, shares)])
            valid &= alarms <= ALPHA + 3 * standard_error(studies)
            of_tables = [verdicts_of_table(one) for one in values[:TABLES]]
            valid &= of_tables == [[VERDICTS[place] for place in row] for row in outcome.verdict[:TABLES]]
            print(" | ".join(rows[-1]), flush=True)
    text = (
        f"Studies over blocks in which no arm differs on average, in percent ({studies:,} studies a row, standard error of "
        f"5 %: {100 * standard_error(studies):.1f}). *Between* is the standard deviation of the true "
        "differences between blocks, in standard deviations of a seed. Seeds are Gaussian, and scatter equally in all blocks or "
        "by 1 to 10 times as much (uniform on a logarithmic scale); or they are *real*: final validation accuracies of the "
        "[real trainings](#the-real-trainings), each block of another setting, baseline and arms being the same code. "
        "*Intervals* are studies in which all of them hold, *new block* those "
        "in which the measured difference in a new block lies in its prediction interval, and *its truth* those in which the "
        f"true one does. The first {TABLES} studies of every row are judged as tables by `vitlab.judge`, too, with equal "
        "verdicts.\n\n"
    )
    heads = ["blocks", "seeds", "arms", "between", "spread of seeds", "alarms", "intervals", "new block", "its truth"]
    return text + markdown(heads, rows), valid


def verdicts_of_table(values: Floats) -> list[str]:
    """Return the verdicts over blocks of `vitlab.judge` on a table of values (B, arms, seeds), the baseline's first."""
    index = pd.MultiIndex.from_product([range(size) for size in values.shape], names=["block", "arm", "seed"])
    table = pd.DataFrame({"score": values.ravel()}, index=index).reset_index()
    table["arm"] = "arm " + table["arm"].astype(str)
    judgement = vitlab.judge(
        table, metric="score", arm="arm", goal="max", block="block", baseline="arm 0", over_blocks="difference"
    )
    return [row.verdict for row in judgement.report.sections["blocks"]]


def over_blocks(
    draws: np.random.Generator, shape: tuple[int, int, int, int], between: float, apart: float
) -> tuple[Floats, OverBlocks, Floats, Floats]:
    """Return studies judged over blocks: the values (S, B, arms, seeds), the outcome, the true differences in the blocks
    and in a new one (S, C, B + 1), and the error with which the first of the latter is measured (S,).

    Args:
        draws: the random numbers.
        shape: studies, comparisons, blocks and seeds.
        between: standard deviation of the true differences between blocks.
        apart: largest standard deviation of the seeds of a block; the smallest is 1.  Or ``REAL``, for real trainings.
    """
    studies, m, blocks, n = shape
    effects = between * draws.standard_normal((studies, m, blocks + 1))
    if apart == REAL:
        settings = [centred(METRICS[0], [name])[0] for name in STABLE]
        drawn = np.stack([resampled(setting, draws, (studies, m + 1, n)) for setting in settings], axis=1)
        order = draws.permuted(np.tile(np.arange(len(STABLE)), (studies, 1)), axis=1)[:, : blocks + 1]
        drawn = drawn[np.arange(studies)[:, None], order] / np.mean([np.std(setting) for setting in settings])
        values, (baseline, arm) = drawn[:, :blocks], np.moveaxis(drawn[:, blocks, :2].mean(axis=-1), 1, 0)
        noise = arm - baseline
    else:
        values = draws.standard_normal((studies, blocks, m + 1, n)) * apart ** draws.random((studies, blocks, 1, 1))
        noise = draws.standard_normal(studies) * apart ** draws.random(studies) * math.sqrt(2 / n)
    values[:, :, 1:] += np.moveaxis(effects[:, :, :blocks], 1, 2)[..., None]
    single = replace(Comparisons.all_with_first(m), family=np.full(m, m * blocks))
    contrasts = judge_studies(values.reshape(-1, m + 1, n), single).contrasts
    difference, se = (
        np.moveaxis(one.reshape(studies, blocks, m), 1, 2) for one in (contrasts.difference, contrasts.se)
    )
    return values, judge_blocks(difference, se, Comparisons.all_with_first(m)), effects, noise


def of_pool(studies: int, seed: int) -> tuple[str, bool]:
    """Return the table of the real values; it draws nothing."""
    from scipy import stats

    rows, frame = [], pool()
    for arm in frame["val/accuracy"].columns:
        row = [str(arm), f"{frame[METRICS[0], arm].count():,}"]
        for metric in METRICS:
            values = frame[metric, arm].dropna().to_numpy(dtype=float)
            scale = 1 if metric == "val/loss" else 100
            lost = collapses(values, -1 if metric == "val/loss" else 1).mean() if len(values) else math.nan
            numbers = (
                [scale * values.mean(), scale * values.std(ddof=1), stats.skew(values), stats.kurtosis(values)]
                if len(values)
                else []
            )
            row.append(", ".join(f"{number:.3g}" for number in numbers) + f", {100 * lost:.1f} %" if numbers else "-")
        rows.append(row)
    text = (
        f"The pool: {sum(frame[METRICS[0]].count()):,} trainings. Mean, standard deviation, skewness, excess kurtosis, and "
        "the share of collapsed seeds (10 robust standard deviations beyond the median); accuracies in percent. [Nothing "
        "changed](aa.md) describes the settings; `gate` has width 32, 300 steps, crops and a learning rate of 0.01.\n\n"
    )
    return text + markdown(["setting", "seeds", *METRICS], rows), True


SECTIONS: dict[str, tuple[str, Callable[[int, int], tuple[str, bool]]]] = {
    "patterns": ("Arms that scatter differently", of_patterns),
    "sources": ("Values of many kinds", of_sources),
    "looks": ("Seeds that are added until a comparison is decided", of_looks),
    "margins": ("Equivalence", of_margins),
    "detection": ("What is detected", of_detection),
    "tuning": ("Tuned arms", of_tuning),
    "splits": ("Seeds that hold out other images", splits.section),
    "blocks": ("Several data sets", of_blocks),
    "gate": ("The regression gate", calibration.section),
    "pool": ("The real trainings", of_pool),
}
INTRODUCTION = (
    "# Simulations\n\nHow often the verdicts and the intervals of a report are wrong, and what they find. "
    "[How results are judged](statistics.md) explains the methods. This page is written by "
    "`python tools/benchmarks/appendix.py --studies {studies} --write`.\n"
)


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="write docs/pages/statistics_appendix.md")
    parser.add_argument("--only", choices=SECTIONS, help="this table alone")
    arguments = parser.parse_args()
    all_valid, parts = True, [INTRODUCTION.format(studies=arguments.studies)]
    for name in [arguments.only] if arguments.only else SECTIONS:
        title, section = SECTIONS[name]
        text, valid = section(arguments.studies, arguments.seed)
        all_valid &= valid
        parts.append(f"## {title}\n\n{text}\n")
        print(f"\n{parts[-1]}", flush=True)
    if arguments.write and not arguments.only:
        PAGE.write_text("\n".join(parts), encoding="utf-8")
    return int(not all_valid)


if __name__ == "__main__":
    sys.exit(main())
