"""How often the gate is wrong: simulated studies in which nothing has changed, judged as real ones.

    python tools/benchmarks/calibration.py    # 2,000 studies a line, a few minutes on one core

A simulated study draws the values of its seeds from a Gaussian (standard deviation 1), or anew from those of real
trainings (``pool.parquet``, which ``pool.py`` has made): baseline and candidate without correlation, for that is what is
left of equal seeds once any rounding has changed.  It is judged by the code that judges real ones, margins included.
Printed are

- the share of studies in which nothing differs and something is found all the same, and of studies that pass whole;
- the share of cells that are found which have lost 1 or 2 standard deviations, beside the share by a simulation of its
  own, in terms of scipy alone;
- the same false alarms with a second stage;
- over repeats of the study of the pool itself, each with seeds of its own for baseline and candidate, all verdicts;
- the verdicts by the number of seeds and by what has changed, the table of docs/pages/statistics_appendix.md;
- false alarms where trainings collapse or are lost on both sides, a table of docs/pages/statistics_appendix.md;
- for each bug of ``bugs.py``, its effect over all its seeds and the verdicts on it.

The exit code is 1 if a share of false alarms is above 5 % and two standard errors, or a bug whose effect exceeds the
margin passes.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import numpy as np
from bugs import BUGS
from numpy.typing import NDArray
from scipy import stats
from sources import pool as pool_of
from tables import markdown

from vitlab.comparison.arrays import Comparisons
from vitlab.comparison.arrays import judge_studies as judge_contrasts
from vitlab.regression.baseline import Values
from vitlab.regression.decide import (
    VERDICTS,
    Cell,
    Cells,
    JudgedCells,
    Verdict,
    capped_pooled_sd,
    judge_arrays,
    worst_verdict,
)
from vitlab.regression.gate import train_and_judge
from vitlab.spec import Study

SEEDS, ARMS, ALPHA = (3, 5, 10), (1, 5, 20), 0.05
RATES = (0.0, 0.05, 0.1, 0.2)  #: shares of trainings that collapse or are lost
BUGGED, MARGINS = (5, 10, 20), (None, 0.03)  #: seeds, and margins, by which bugs are judged; None is the default
LOOKS = ((3, 6), (5, 10))  #: seeds of the first look, and of the second
METRIC = "val/accuracy"
STUDIED = ("gate", "gate_no_position")  #: arms of the pool that are judged as one study

Floats = NDArray[np.float64]
Source = Callable[[int, int], Floats]
"""Draws the values of so many arms at so many seeds."""


# -- what is judged ---------------------------------------------------------------------------------------------------


def gaussian(draws: np.random.Generator) -> Source:
    """Draw standard normal values."""
    return lambda arms, seeds: draws.normal(size=(arms, seeds))


def resampled(pool: Sequence[Floats], draws: np.random.Generator) -> Source:
    """Draw values of a pool with replacement; arms take turns with its arms."""
    return lambda arms, seeds: np.stack([draws.choice(pool[arm % len(pool)], seeds) for arm in range(arms)])


def read_pool() -> dict[str, dict[str, Floats]]:
    """Return the values of seeds in order, by code (``sound``, or a bug) and arm."""
    codes = ("sound", *BUGS)
    return {
        code: {str(arm): values.dropna().to_numpy() for arm, values in pool_of(code)[METRIC].items()} for code in codes
    }


# -- judging it -------------------------------------------------------------------------------------------------------


@cache
def study(seeds: int, second: int | None, margin: float | None) -> Study:
    """Return a study file with this number of seeds, and of a second stage; the margin is given as in the file."""
    base = {"data": "digits", "model": "vit", "train": {"steps": 1}}
    check: dict[str, object] = {"escalate_to": second}
    if margin is not None:
        check |= {"margin": {METRIC: margin}, "min_abs": {METRIC: margin / 2}}
    return Study.model_validate({"study": "s", "base": base, "seeds": seeds, "check": check})


def gate(
    old: Floats,
    new: Floats,
    seeds: int,
    quantum: float = 0.0,
    second: int | None = None,
    margin: float | None = None,
) -> tuple[list[Cell], Verdict]:
    """Return the cells and the verdict of a study, from the values of its arms at all seeds that it may need."""
    samples = {seeds: _values(new[:, :seeds], quantum), second: _values(new, quantum)}
    cells, counts, _ = train_and_judge(
        study(seeds, second, margin), _values(old, quantum), lambda more, _: samples[len(more or range(seeds))]
    )
    return cells, worst_verdict([*(cell.verdict for cell in cells), *(finding.verdict for finding in counts)])


def gates(values_SA2N: Floats, lost_SA2N: NDArray[np.bool_] | None = None) -> JudgedCells:
    """Judge many studies with the default margin: arms of a baseline and a candidate."""
    lost = np.zeros(values_SA2N.shape, bool) if lost_SA2N is None else lost_SA2N
    sd, arms = capped_pooled_sd(values_SA2N[:, :, 0], sign=1)[:, None], values_SA2N.shape[1]
    cells = Cells(2 * sd, sd, np.zeros(arms), np.arange(arms), np.ones(arms, bool))
    return judge_arrays(values_SA2N, lost, cells, ALPHA)


def verdicts_of(judged: JudgedCells) -> NDArray[np.int64]:
    """Return the verdict of each study, as its place in ``VERDICTS``."""
    return np.maximum(judged.verdict.max(axis=1), judged.count_verdict)


def _values(sources: Floats, quantum: float) -> Values:
    arms = {str(arm): dict(enumerate(row)) for arm, row in enumerate(sources.tolist())}
    data = dict.fromkeys(arms, "")
    return Values.model_construct(
        device="cpu", data=data, metrics={METRIC: arms}, quanta={METRIC: quantum}, diverged={}, behind={}
    )


def independent(count: int, seeds: int, arms: int, drop: float, draws: np.random.Generator) -> float:
    """Return the share of cells found that have lost ``drop``, by scipy alone."""
    old, new = draws.normal(size=(2, count, arms, seeds))
    new = new - drop
    sd = np.sqrt(old.var(axis=2, ddof=1).mean(axis=1))[:, None]
    p = stats.ttest_rel(new, old, axis=2, alternative="less").pvalue
    mean, se = (old - new).mean(axis=2), stats.sem(old - new, axis=2)
    passes = mean + stats.t.ppf(1 - ALPHA, seeds - 1) * se < 2 * sd
    return float(((p * arms < ALPHA) & (mean >= sd) & ~passes).mean())


def bound(count: int) -> float:
    """Return the largest share of false alarms that chance explains: alpha plus two standard errors."""
    return ALPHA + 2 * math.sqrt(ALPHA * (1 - ALPHA) / count)


# -- what is printed --------------------------------------------------------------------------------------------------


def table(title: str, heads: Sequence[str], rows: Iterator[Sequence[object]]) -> None:
    """Print a Markdown table row by row."""
    print(f"\n{title}\n\n| {' | '.join(heads)} |\n|{'--:|' * len(heads)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)


def alarms_of(verdicts: Sequence[str], worst: list[float]) -> str:
    """Return the share of false alarms and record in ``worst`` how far it exceeds the bound."""
    share = verdicts.count("regressed") / len(verdicts)
    worst.append(share - bound(len(verdicts)))
    return f"{share:.2%}"


def gate_rows(
    source: Source, quantum: float, count: int, worst: list[float], draws: np.random.Generator | None
) -> Iterator[Sequence[object]]:
    """Print the gate's results on unchanged studies, and with ``draws`` (Gaussian noise) on changed ones."""
    for seeds in SEEDS:
        for arms in ARMS:
            verdicts = [gate(source(arms, seeds), source(arms, seeds), seeds, quantum)[1] for _ in range(count)]
            row = [seeds, arms, alarms_of(verdicts, worst), f"{verdicts.count('pass') / count:.1%}"]
            for drop in (1.0, 2.0) if draws is not None else ():
                few = max(1, count // arms)
                cells = [
                    cell.verdict
                    for _ in range(few)
                    for cell in gate(source(arms, seeds), source(arms, seeds) - drop, seeds)[0]
                ]
                alone = independent(count, seeds, arms, drop, draws)
                row.append(f"{cells.count('regressed') / len(cells):.0%} ({alone:.0%})")
            yield row


CHANGES = {"unchanged": 0.0, "- 1 sd": 1.0, "- 2 sd": 2.0, "- 3 sd": 3.0, "40 % collapse": 0.0, "collapse, - 3 sd": 3.0}
"""What the candidate has lost, by the name of the column; in the last, one seed of the baseline has collapsed."""
COLLAPSE = 50.0  #: standard deviations that a collapsed seed lies below the others
SHALLOW = 15.0  #: the same of collapses that are hard to tell from drops


def gate_page(count: int, draws: np.random.Generator, worst: list[float]) -> str:
    """Return the table of the gate in docs/pages/statistics_appendix.md: verdicts by number of seeds and by change."""
    rows = []
    for seeds in (5, 8, 10, 20):
        for arms in (1, 5):
            row = [str(seeds), str(arms)]
            for name, drop in CHANGES.items():
                values = draws.normal(size=(count, arms, 2, seeds))
                values[:, 0, 1] -= drop
                if name.startswith("40"):
                    values[:, 0, 1, : round(0.4 * seeds)] -= COLLAPSE
                if name.startswith("collapse"):
                    values[:, 0, 0, -1] -= COLLAPSE
                judged = gates(values)
                verdicts = verdicts_of(judged) if drop == 0 else judged.verdict[:, 0]
                shares = [100 * np.mean(verdicts == VERDICTS.index(verdict)) for verdict in ("regressed", "pass")]
                row.append(" / ".join(f"{share:.1f}" for share in shares))
                if name == "unchanged":
                    worst.append(shares[0] / 100 - bound(count))
            rows.append(row)
            print(" | ".join(row), flush=True)
    text = (
        f"Verdicts of the gate with its default margin, in percent: regressed / pass ({count:,} simulated studies a "
        "cell; Gaussian seeds, none shared with the baseline). Of several arms, one has "
        "changed: the columns of changed means (in standard deviations of a seed) have its verdict, the others the study's. "
        "In the last column, one seed of the baseline has collapsed.\n\n"
    )
    return text + markdown(["seeds", "arms", *CHANGES], rows)


def collapse_page(count: int, draws: np.random.Generator, worst: list[float]) -> str:
    """Return a table of docs/pages/statistics_appendix.md: false alarms by the share of trainings that come to nothing."""
    rows = []
    for seeds in (3, 4, 5, 8, 10):
        for arms in ARMS:
            row = [str(seeds), str(arms)]
            for rate in RATES:
                shares = []
                for is_lost in (False, True) if rate else (False,):
                    values = draws.normal(size=(count, arms, 2, seeds))
                    bad = draws.random(values.shape) < rate
                    values = np.where(bad, math.nan if is_lost else values - COLLAPSE, values)
                    shares.append(
                        float(np.mean(verdicts_of(gates(values, bad & is_lost)) == VERDICTS.index("regressed")))
                    )
                worst.append(max(shares) - bound(count))
                row.append(" / ".join(f"{100 * share:.1f}" for share in shares))
            rows.append(row)
            print(" | ".join(row), flush=True)
    text = (
        "False alarms by the share of trainings that collapse on both sides, to "
        f"{COLLAPSE:g} standard deviations below the others, or (behind the slash) are lost without a value, in percent "
        f"({count:,} simulated checks a cell; Gaussian seeds, none shared with the baseline):\n\n"
    )
    heads = ["seeds", "arms", *(f"{rate:.0%} collapse / are lost" if rate else "none" for rate in RATES)]
    return text + markdown(heads, rows)


def look_rows(source: Source, quantum: float, count: int, worst: list[float]) -> Iterator[Sequence[object]]:
    """Print the gate's results on unchanged studies, where inconclusive cells get more seeds."""
    for first, second in LOOKS:
        for arms in ARMS:
            judged = [gate(source(arms, second), source(arms, second), first, quantum, second) for _ in range(count)]
            verdicts = [verdict for _, verdict in judged]
            again = np.mean([max(cell.n for cell in family) > first for family, _ in judged])
            passed = verdicts.count("pass") / count
            yield f"{first}, then {second}", arms, alarms_of(verdicts, worst), f"{passed:.1%}", f"{again:.0%}"


def repeat_rows(
    pool: Floats, quantum: float, count: int, worst: list[float], draws: np.random.Generator
) -> Iterator[Sequence[object]]:
    """Repeat the study of the pool; candidate and baseline have no seeds in common."""
    for seeds, second in ((3, None), (5, None), (10, None), *LOOKS):
        most = second or seeds
        verdicts = []
        for _ in range(count):
            sample = draws.permutation(pool.shape[1])[: 2 * most]
            verdicts.append(gate(pool[:, sample[:most]], pool[:, sample[most:]], seeds, quantum, second)[1])
        shares = [f"{verdicts.count(verdict) / count:.1%}" for verdict in ("pass", "inconclusive")]
        yield f"{seeds}, then {second}" if second else seeds, alarms_of(verdicts, worst), *shares


def bug_rows(
    pool: Mapping[str, Mapping[str, Floats]], quantum: float, count: int, worst: list[float], draws: np.random.Generator
) -> Iterator[Sequence[object]]:
    """Print each bug's effect over all its seeds and the verdicts of a few."""
    for bug in [code for code in pool if code != "sound"]:
        ((arm, values),) = pool[bug].items()
        sound = pool["sound"][arm][: len(values)]
        effect = judge_contrasts(np.array([[values, sound]]), Comparisons.all_with_first(1)).contrasts.single(0, 0)
        for margin, seeds in itertools.product(MARGINS, BUGGED):
            (cell,), _ = gate(sound[None, :seeds], values[None, :seeds], seeds, quantum, margin=margin)
            shares: Counter[str] = Counter()
            for _ in range(count):
                sample = draws.permutation(len(values))[:seeds]
                _, verdict = gate(sound[None, sample], values[None, sample], seeds, quantum, margin=margin)
                shares[verdict] += 1
            if cell.verdict == "pass" and effect.difference > cell.margin:
                worst.append(math.inf)
            drop = f"{100 * effect.difference:.1f} ({100 * effect.low:.1f} to {100 * effect.high:.1f})"
            often = [f"{shares[verdict] / count:.0%}" for verdict in ("pass", "inconclusive", "regressed")]
            yield bug, drop, f"{100 * cell.margin:.1f}", seeds, cell.verdict, *often


def looks_page(count: int, draws: np.random.Generator, worst: list[float]) -> str:
    """Return a table of the false alarms of two looks, by the share of trainings that collapse."""
    rows = []
    for first, second in LOOKS:
        for arms in ARMS:
            row = [f"{first}, then {second}", str(arms)]
            for rate in RATES:
                alarms = 0
                for _ in range(count):
                    values = draws.normal(size=(2, arms, second))
                    values -= COLLAPSE * (draws.random(values.shape) < rate)
                    alarms += gate(*values, first, second=second)[1] == "regressed"
                worst.append(alarms / count - bound(count))
                row.append(f"{100 * alarms / count:.1f}")
            rows.append(row)
            print(" | ".join(row), flush=True)
    text = (
        "False alarms of checks with `escalate_to`, which train more seeds of inconclusive arms, in percent, by the share "
        f"of trainings that collapse on both sides ({count:,} simulated checks a cell):\n\n"
    )
    return text + markdown(["seeds", "arms", *(f"{rate:.0%}" for rate in RATES)], rows)


def shallow_page(count: int, draws: np.random.Generator) -> str:
    """Return a table of the false alarms where collapses are hard to tell from drops."""
    rows = []
    for seeds in (3, 4, 5):
        row = [str(seeds)]
        for arms in (1, 5, 10, 20):
            values = draws.normal(size=(count, arms, 2, seeds))
            values -= SHALLOW * (draws.random(values.shape) < max(RATES))
            row.append(f"{100 * np.mean(verdicts_of(gates(values)) == VERDICTS.index('regressed')):.1f}")
        rows.append(row)
        print(" | ".join(row), flush=True)
    text = (
        f"False alarms where {max(RATES):.0%} of all trainings collapse, to only {SHALLOW:g} standard deviations below the "
        f"others, in percent ({count:,} simulated checks a cell); rows are seeds, columns arms:\n\n"
    )
    return text + markdown(["seeds", "1", "5", "10", "20"], rows)


def section(studies: int, seed: int) -> tuple[str, bool]:
    """Return the tables of the gate, and whether false alarms are as rare as claimed."""
    worst = list[float]()
    draws = np.random.default_rng([seed, 5])
    parts = [gate_page(studies, draws, worst), collapse_page(studies, draws, worst), looks_page(studies, draws, worst)]
    parts.append(shallow_page(2 * studies, draws))
    return "\n\n".join(parts), max(worst) <= 0


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", choices=("gaussian", "real", "page", "collapses"), help="these tables alone; they draw the same"
    )
    arguments = parser.parse_args()
    count, repeats, worst = arguments.studies, arguments.repeats, list[float]()
    print(f"{count} studies a line; false alarms may reach {bound(count):.2%}, over {repeats} {bound(repeats):.2%}")
    heads = ("seeds", "arms", "false alarms", "pass unchanged")
    looks = (*heads, "second stage")
    if arguments.only in (None, "page"):
        text = gate_page(count, np.random.default_rng([arguments.seed, 5]), worst)
        print(f"\n{text}")
    if arguments.only in (None, "collapses"):
        print(f"\n{collapse_page(count, np.random.default_rng([arguments.seed, 6]), worst)}")
    if arguments.only in (None, "gaussian"):
        draws = np.random.default_rng([arguments.seed, 0])
        noise = gaussian(draws)
        columns = ("found at 1 sd (scipy)", "found at 2 sd (scipy)")
        table("The gate, Gaussian", (*heads, *columns), gate_rows(noise, 0.0, count, worst, draws))
        table("The gate, Gaussian, two looks", looks, look_rows(noise, 0.0, count, worst))
    if arguments.only in (None, "real"):
        draws, pool = np.random.default_rng([arguments.seed, 1]), read_pool()
        sound = [pool["sound"][arm] for arm in STUDIED]
        quantum = float(np.diff(np.unique(np.concatenate(sound))).min())
        spread = [
            f"{arm} {100 * x.mean():.1f} % (sd {100 * x.std(ddof=1):.2f})"
            for arm, x in zip(STUDIED, sound, strict=True)
        ]
        print(f"\npool: {len(sound[0])} seeds of each arm, {METRIC}: {', '.join(spread)}")
        seeds = resampled(sound, draws)
        table("The gate, real seeds", heads, gate_rows(seeds, quantum, count, worst, None))
        table("The gate, real seeds, two looks", looks, look_rows(seeds, quantum, count, worst))
        shares = ("seeds", "regressed", "pass", "inconclusive")
        rows = repeat_rows(np.stack(sound), quantum, repeats, worst, draws)
        table("The study of the pool, repeated", shares, rows)
        often = ("bug", "drop, points", "margin", "seeds", "verdict", "pass", "inconclusive", "regressed")
        draws = np.random.default_rng([arguments.seed, 2])
        table("Bugs", often, bug_rows(pool, quantum, repeats, worst, draws))
    return int(max(worst) > 0)


if __name__ == "__main__":
    sys.exit(main())
