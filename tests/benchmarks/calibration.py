"""How often the gate is wrong: simulated studies in which nothing has changed, or every arm has, judged as real ones.

    python tests/benchmarks/calibration.py            # 2,000 studies a line, a minute on one core

Each study draws a baseline and a candidate from one Gaussian (standard deviation 1, no correlation between the two:
what is left of equal seeds once any rounding has changed), takes margin and least drop from the pooled spread of the
baseline as the gate does, and judges the family.  Printed are the shares of studies with a false alarm in any cell,
and of those that pass; then, of studies in which every arm has lost 1 or 2 standard deviations, the share of cells that
are found.  The exit code is 1 if a share of false alarms is above 5 % and two standard errors.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator

import numpy as np

from vitlab.regression.judge import Cell, Pair, judge, overall, pooled_sd

SEEDS, ARMS, ALPHA = (3, 5, 10), (1, 5, 20), 0.05


def studies(count: int, seeds: int, arms: int, drop: float, draws: np.random.Generator) -> Iterator[list[Cell]]:
    """Judged studies whose candidate has lost ``drop`` standard deviations."""
    for _ in range(count):
        old, new = draws.normal(size=(2, arms, seeds))
        sd = pooled_sd(old.tolist())
        yield judge(
            [
                Pair(str(arm), "val/accuracy", "max", dict(enumerate(a)), dict(enumerate(b - drop)), 2 * sd, sd)
                for arm, (a, b) in enumerate(zip(old.tolist(), new, strict=True))
            ],
            ALPHA,
        )


def false_alarms(count: int, seeds: int, arms: int, draws: np.random.Generator) -> tuple[float, float]:
    """Shares of unchanged studies with a false alarm in any cell, and of those that pass whole."""
    verdicts = [overall(cell.verdict for cell in cells) for cells in studies(count, seeds, arms, 0.0, draws)]
    return verdicts.count("regressed") / count, verdicts.count("pass") / count


def found(count: int, seeds: int, arms: int, drop: float, draws: np.random.Generator) -> float:
    """Share of cells that are found where every arm has lost ``drop`` standard deviations."""
    cells = [cell.verdict for cells in studies(count, seeds, arms, drop, draws) for cell in cells]
    return cells.count("regressed") / len(cells)


def bound(count: int) -> float:
    """The largest share of false alarms that chance explains: alpha and two standard errors."""
    return ALPHA + 2 * math.sqrt(ALPHA * (1 - ALPHA) / count)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    count, draws, worst = arguments.studies, np.random.default_rng(arguments.seed), 0.0
    print(f"{count} studies a line; false alarms may reach {bound(count):.2%}\n")
    print("| seeds | arms | false alarms | pass unchanged | found at 1 sd | found at 2 sd |")
    print("|--:|--:|--:|--:|--:|--:|")
    for seeds in SEEDS:
        for arms in ARMS:
            alarms, passed = false_alarms(count, seeds, arms, draws)
            powers = [found(max(1, count // 10), seeds, arms, drop, draws) for drop in (1.0, 2.0)]
            worst = max(worst, alarms)
            columns = (f"{alarms:.2%}", f"{passed:.1%}", *(f"{power:.0%}" for power in powers))
            print(f"| {seeds} | {arms} | {' | '.join(columns)} |", flush=True)
    return int(worst > bound(count))


if __name__ == "__main__":
    sys.exit(main())
