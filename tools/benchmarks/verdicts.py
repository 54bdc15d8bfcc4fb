"""How often verdicts are wrong, and what they find: real trainings and simulated studies of many kinds.

    python tools/benchmarks/verdicts.py --write       # the tables of docs/pages/statistics.md

Sources are synthetic, or draw from the final values of real trainings without replacement (``sources.py``).  Studies are
judged as the report does, with each kind of variance (``judging.py``).  The tables are

- ``pool``: the shapes of the real values;
- ``errors``: false alarms of studies in which no mean differs, with one look and with several; intervals that hold at
  once miss 0 in the same studies.  Also the difference that is found in 80 % of studies;
- ``claims``: every verdict of the report, with a margin, and the coverage of intervals (``claims.py``);
- ``looks``: the seeds that studies need until they are decided, and the intervals at their end.

The exit code is 1 if false alarms exceed 5 % and three standard errors, in a kind of studies for which error rates are
claimed."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import claims
import numpy as np
from judging import ALPHA, first_step
from numpy.typing import NDArray
from scipy import stats
from sources import METRICS, SYNTHETIC, Source, collapses, pool, real
from vitlab.statistics.stopping import stagewise_p

from vitlab import statistics
from vitlab.statistics.moderation import residual_variances

Floats = NDArray[np.float64]
CELLS = ((3, 1), (3, 3), (3, 5), (3, 10), (3, 20), (5, 5), (5, 10), (10, 5), (10, 10), (20, 20))
"""Seeds and comparisons."""
EVERY_SEED = tuple(range(3, 13))
LOOKS = (((5, 10), 1), ((5, 10), 10), ((3, 6, 9, 12), 1), ((3, 6, 9, 12), 5), (EVERY_SEED, 1), (EVERY_SEED, 5))
LOOKS += ((tuple(range(3, 31, 3)), 1), (tuple(range(3, 31, 3)), 10))
"""Seeds at each look, and comparisons."""
FUTILITY = 0.1  #: as in ``seeds: {until: decided}``
FEW = 1000  #: studies where the sign-flip test of many seeds takes long
DETECTED = 10_000  #: least number of studies from which the detectable difference is taken, a quantile
PAGE = Path(__file__).parents[2] / "docs" / "pages" / "statistics.md"
END = "<!-- end -->"


def limit(studies: int) -> float:
    """Return the largest share of false alarms that chance explains."""
    return ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / studies)


def false_alarms(studies: int, seed: int) -> tuple[list[list[str]], bool]:
    """Return the table of false alarms, and whether every rate that is claimed holds."""
    rows, valid = [], True
    for source in (*SYNTHETIC, *real()):
        row = [source.name]
        for n, m in CELLS:
            draws = np.random.default_rng([seed, n, m, *source.name.encode()])
            values = source.draw(draws, (studies, m + 1, n))
            judged = first_step(values, source.quantum, source.sign).values()
            rates = [float((np.abs(mean) > bound).any(axis=1).mean()) for mean, bound in judged]
            row.append(" / ".join(f"{100 * rate:.1f}" for rate in rates))
            valid &= source.is_valid(*rates, limit(studies))
        rows.append(row)
        print(" | ".join(row), flush=True)
    return rows, valid


def detectable(studies: int, seed: int) -> list[list[str]]:
    """Return the second table: the effect on one arm that is found in 80 % of studies."""
    rows = []
    for n, m in CELLS:
        draws = np.random.default_rng([seed, 7, n, m])
        values = draws.standard_normal((studies, m + 1, n))
        judged = first_step(values, 0.0)
        judged["known to be alike"] = (judged["own"][0], dunnett_bounds(values))
        sizes = [float(np.quantile(bound[:, 0] - mean[:, 0], 0.8)) for mean, bound in judged.values()]
        rows.append([str(n), str(m), *(f"{size:.2f}" for size in sizes)])
        rows[-1] += [f"{sizes[0] / size:.2f}" for size in sizes[1:]]
    return rows


def dunnett_bounds(values: Floats) -> Floats:
    """Return the bounds of Dunnett's test, for arms and a baseline that are known to have one variance."""
    m, n = values.shape[1] - 1, values.shape[2]
    se = np.sqrt(2 * residual_variances(values).mean(axis=1) / n)
    return np.asarray(se[:, None] * statistics.max_t_quantile(ALPHA, m * (n - 1), [math.sqrt(0.5)] * m))


def false_alarms_of_looks(studies: int, seed: int) -> tuple[list[list[str]], bool]:
    """Return the table of false alarms of several looks, and whether every rate that is claimed holds."""
    rows, valid = [], True
    for source in (*SYNTHETIC, *real()):
        row = [source.name]
        for sizes, m in LOOKS:
            count = FEW if source.collapses and sizes[-1] > 12 else studies
            rates = _rates_of_looks(source, sizes, m, count, seed)
            row.append(" / ".join(f"{100 * rate:.1f}" for rate in rates))
            valid &= source.is_valid(*rates, limit(count))
        rows.append(row)
        print(" | ".join(row), flush=True)
    return rows, valid


def _rates_of_looks(source: Source, sizes: tuple[int, ...], m: int, studies: int, seed: int) -> list[float]:
    levels = statistics.sequential_levels(sizes, ALPHA, m)
    draws = np.random.default_rng([seed, 11, m, *sizes, *source.name.encode()])
    values = source.draw(draws, (studies, m + 1, sizes[-1]))
    found = {kind: np.zeros(studies, bool) for kind in claims.KINDS}
    for size, level in zip(sizes, levels, strict=True):
        rest = np.flatnonzero(~np.logical_and.reduce([*found.values()]))
        if not len(rest):
            break
        for kind, (mean, bound) in first_step(values[rest, :, :size], source.quantum, source.sign, level).items():
            found[kind][rest] |= (np.abs(mean) > bound).any(axis=1)
    return [float(some.mean()) for some in found.values()]


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
    """Return the tables of false alarms and of detectable differences, and whether every rate that is claimed holds."""
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
    text += table(heads, detectable(max(studies, DETECTED), seed))
    more_rows, holds = false_alarms_of_looks(studies, seed)
    heads = [f"{sizes[0]} to {sizes[-1]} by {sizes[1] - sizes[0]}, x {m}" for sizes, m in LOOKS]
    text += (
        "\n\nThe first table for studies that are tested again while seeds are added, at a level for each look (where "
        f"seeds collapse, {FEW:,} studies of 30 seeds, standard error {100 * math.sqrt(ALPHA * (1 - ALPHA) / FEW):.1f}):\n\n"
    )
    return text + table(["", *heads], more_rows), valid and holds


def every_verdict(studies: int, seed: int) -> tuple[str, bool]:
    """Return the tables of all verdicts, and whether wrong claims are as rare as claimed."""
    studies, valid, parts = max(1, studies // 5), True, []
    for name, sizes in claims.DESIGNS.items():
        rows = []
        for source in (*SYNTHETIC, *real()):
            numbers = claims.row(source, sizes, studies, seed)
            rows.append([source.name, *claims.cells(numbers)])
            valid &= source.is_valid(*(numbers[kind][0] / 100 for kind in claims.KINDS), limit(studies))
            print(" | ".join(rows[-1]), flush=True)
        keep = [at for at in range(len(claims.HEADS) + 1) if at <= len(claims.HEADS) - (len(sizes) == 1)]
        heads = ["", *claims.HEADS]
        parts.append(f"{name}:\n\n" + table([heads[at] for at in keep], [[row[at] for at in keep] for row in rows]))
    error = 100 * math.sqrt(ALPHA * (1 - ALPHA) / studies)
    text = (
        f"Every verdict, in percent: own / moderated, {studies:,} studies a row (standard error of 5 %: {error:.1f}). Five "
        "arms are compared with a baseline, with a margin of two standard deviations of a seed. Four are equal to it, and "
        "one is better by just the margin. A study makes a *wrong claim* if an equal arm is called better or worse, or the "
        "other one equivalent, the same or worse. *Intervals hold* if all five contain the true differences. Other "
        "columns are shares of comparisons.\n\n"
    )
    return text + "\n\n".join(parts), valid


def _short(number: float) -> str:
    """Return a number with two decimals, fewer if it is large."""
    return f"{number:,.{2 if abs(number) < 10 else 1 if abs(number) < 100 else 0}f}"


def shapes(studies: int, seed: int) -> tuple[str, bool]:
    """Return the table of the real values; it draws nothing."""
    rows = []
    frame = pool()
    for arm in pool()["val/accuracy"].columns:
        row = [str(arm), f"{frame[METRICS[0], arm].count():,}"]
        for metric in METRICS:
            values = frame[metric, arm].dropna().to_numpy(dtype=float)
            if not len(values):
                row.append("-")
                continue
            scale = 1 if metric == "val/loss" else 100
            lost = collapses(values, -1 if metric == "val/loss" else 1).mean()
            numbers = [scale * values.mean(), scale * values.std(ddof=1), stats.skew(values), stats.kurtosis(values)]
            row.append(", ".join(_short(number) for number in numbers) + f", {100 * lost:.1f} %")
        rows.append(row)
    text = (
        f"The pool: {sum(frame[METRICS[0]].count()):,} trainings. Mean, "
        "standard deviation, skewness, excess kurtosis, and the share of collapsed seeds (10 robust standard deviations "
        "beyond the median); accuracies in percent.\n\n"
    )
    return text + table(["setting", "seeds", *METRICS], rows), True


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


SECTIONS = {"pool": shapes, "errors": errors_and_power, "claims": every_verdict, "looks": looks}
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
            write_section(f"tools/benchmarks/verdicts.py: {name}", text)
    return int(not all_valid)


if __name__ == "__main__":
    sys.exit(main())
