"""Write docs/pages/aa.md: how often identical code is called different, over real trainings.

    python tools/benchmarks/aa.py --studies 5000 --write

Every study draws the final values of all of its arms from those of one setting of ``pool.parquet``, without
replacement, so that baseline and arms are the same code with other seeds: whatever is found is a false alarm.  Studies
are judged by ``vitlab.comparison``, checks by ``vitlab.regression``, as the commands judge them.  The exit code is 1 if
a rate of settings that do not collapse exceeds what is promised by three standard errors.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from appendix import LOOKS, design_of, judged
from calibration import gates, verdicts_of
from numpy.typing import NDArray
from sources import RISKY, STABLE, pool, real
from tables import ALPHA, markdown, standard_error

from vitlab.regression.decide import VERDICTS

Floats = NDArray[np.float64]
PAGE = Path(__file__).parents[2] / "docs" / "pages" / "aa.md"
VERDICT, UNTIL, GATE = ((3, 1), (5, 1), (3, 5), (5, 5), (10, 10)), LOOKS[:4], ((3, 1), (5, 1), (5, 5), (10, 5))
"""Seeds (or looks at them) and compared arms."""
Draw = Callable[[tuple[int, int, int]], Floats]
"""Draws values of so many studies, arms and seeds."""


def rates(setting: str, studies: int, seed: int) -> list[float]:
    """Return the share of studies of a setting in which something is found, by column."""
    source = next(source for source in real() if source.name == f"{setting}, all arms alike")
    draws, shares = np.random.default_rng([seed, *setting.encode()]), []
    for sizes, m in [((n,), m) for n, m in VERDICT] + [*UNTIL]:
        values = source.draw(draws, (studies, m + 1, sizes[-1]))
        outcome = judged(values, design_of(source, m), sizes if len(sizes) > 1 else ())
        shares.append(outcome.finds.any(axis=1).mean())
    for n, m in GATE:
        values = source.draw(draws, (studies, 2 * m, n)).reshape(studies, m, 2, n)
        shares.append((verdicts_of(gates(values)) == VERDICTS.index("regressed")).mean())
    return [float(share) for share in shares]


def main() -> int:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="write docs/pages/aa.md")
    arguments = parser.parse_args()
    studies, rows, valid = arguments.studies, list[list[str]](), True
    found, counts = {}, pool()["val/accuracy"].count()
    for setting in (*STABLE, *RISKY):
        found[setting] = rates(setting, studies, arguments.seed)
        rows.append([setting, f"{counts[setting]:,}", *(f"{100 * share:.1f}" for share in found[setting])])
        valid &= setting in RISKY or max(found[setting]) <= ALPHA + 3 * standard_error(studies)
        print(" | ".join(rows[-1]), flush=True)
    stable = np.array([found[setting] for setting in STABLE])
    rows.append(["mean of the stable ones", "", *(f"{100 * share:.1f}" for share in stable.mean(axis=0))])
    names = {
        "The verdict": [f"{n} seeds, {m} arm{'s' * (m > 1)}" for n, m in VERDICT],
        "`until: decided`": [f"{s[0]} to {s[-1]} seeds, {len(s)} looks, {m} arm{'s' * (m > 1)}" for s, m in UNTIL],
        "The gate": [f"{n} seeds, {m} arm{'s' * (m > 1)}" for n, m in GATE],
    }
    tables, first = [], 2
    for title, heads in names.items():
        columns = [0, 1, *range(first, first + len(heads))]
        table = markdown(["setting", "trainings", *heads], [[row[place] for place in columns] for row in rows])
        tables.append(f"## {title}\n\n{table}\n")
        first += len(heads)
    trainings = int(counts[[*STABLE, *RISKY]].sum())
    text = TEXT.format(
        studies=studies,
        trainings=trainings,
        total=studies * stable.shape[1] * len(found),
        error=100 * standard_error(studies),
        largest=100 * stable.max(),
        command=f"python tools/benchmarks/aa.py --studies {studies} --write",
        tables="\n".join(tables),
    )
    print(text)
    if arguments.write:
        PAGE.write_text(text, encoding="utf-8")
    return int(not valid)


TEXT = """# Nothing changed: how often is it called a change?

A tool that compares trainings can be tested with equal code: train the same code twice, and count how often it finds
a difference. This page does so {total:,} times, with the final validation accuracies of {trainings:,} real trainings of
small ViTs on 8x8 digits. It is written by `{command}`.

Every study draws all of its arms from the trainings of one setting, without replacement: the baseline and the arms
differ only by their seeds. So every finding is a false alarm. vitlab promises that at most 5 % of studies find something,
for any number of arms and looks. Rates are in percent of {studies:,} studies a cell; the
standard error of a rate of 5 % is {error:.2f}. Studies of a setting draw from the same trainings, so the cells of a row
are not independent. The largest rate of the stable settings is {largest:.1f} %.

All settings are changes of `learned`: a ViT with patches of 4, one block and width 16, trained by AdamW for 30 steps of 32
images (`tools/benchmarks/pool.yaml`). `no_position` has no position encoding, `few_steps` has 10 steps, `long` 100,
`few_images` 3 training images of each class, `few_validation` 3 % of the training images for validation, `augmented`
crops, and `high_rate` a learning rate of 0.12 instead of 0.05. `sgd`, `sgd_high_rate` and `sgd_higher_rate` are trained
by SGD at 0.5, 1.0 and 1.2.

The last three settings train at the edge of stability: `high_rate` scatters widely, and some seeds of the other two end
far below the rest. To see the same for your own trainings, add a control to a study: [`controls: 1`](guides/blocks.md#a-control).

{tables}"""


if __name__ == "__main__":
    sys.exit(main())
