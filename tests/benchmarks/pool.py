"""Training of the pool of real seeds for ``calibration.py``: ``pool.yaml``, without and with each bug.

    python tests/benchmarks/pool.py [--seeds 208] [--bugged 50] [--workers 2] [--out tests/benchmarks/pool.csv]

Every arm of the study is trained with all seeds by the sound code, and its baseline with the first seeds by the code
with each bug of ``bugs.py``.  16 together, as `vitlab run` does.  The CSV holds the final validation accuracy of each.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from bugs import BUGS

from vitlab import lab
from vitlab.plan.engine_choice import MAX_TOGETHER
from vitlab.runner.job import Job, JobTrial, Settings
from vitlab.runner.run import run
from vitlab.store.folders import Store

HERE = Path(__file__).parent
STUDY, POOL = HERE / "pool.yaml", HERE / "pool.csv"
METRIC = "val/accuracy"

Row = tuple[str, str, int, str]


def trained(bug: str, arms: Sequence[str], seeds: Sequence[int]) -> tuple[list[Row], float]:
    """Return the rows of one batch of trials of each arm, and the CPU seconds."""
    began, rows = time.process_time(), []
    with tempfile.TemporaryDirectory(prefix="vitlab-pool-") as folder, pytest.MonkeyPatch.context() as patch:
        if bug:
            BUGS[bug](patch)
        _, plan = lab.plan_study(STUDY, changes={"seeds": list(seeds)}, out=folder)
        store = Store(Path(folder))
        for arm in arms:
            planned = [item for item in plan.trials if item.arm == arm]
            folders = [store.trial(item.trial.key, item.trial.code) for item in planned]
            trials = [
                JobTrial(item.arm, folder.path, item.trial) for item, folder in zip(planned, folders, strict=True)
            ]
            run(Job(tuple(trials), Settings(device="cpu", keep="none", engine="vmap")))
            for item, place in zip(planned, folders, strict=True):
                result = place.result()
                if result is None or result.status != "done":
                    raise RuntimeError(f"{bug or 'sound'}, {arm}, seed {item.seed} has no result")
                rows.append((bug or "sound", arm, item.seed, f"{result.outcome.metrics[METRIC]:.6f}"))
    return rows, time.process_time() - began


def main() -> int:
    """Train the requested seeds and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=208)
    parser.add_argument("--bugged", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=POOL)
    arguments = parser.parse_args()
    arms = [arm.name for arm in lab.plan_study(STUDY)[1].arms]
    expected = [("", [arm], range(arguments.seeds)) for arm in arms]
    expected += [(bug, arms[:1], range(arguments.bugged)) for bug in BUGS]
    tasks = [
        (bug, some, seeds[first : first + MAX_TOGETHER])
        for bug, some, seeds in expected
        for first in range(0, len(seeds), MAX_TOGETHER)
    ]
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as workers:
        processes_rows = []
        for some in workers.map(trained, *zip(*tasks, strict=True)):
            processes_rows.append(some)
            print(
                f"{len(processes_rows)} of {len(tasks)} batches, {sum(spent for _, spent in processes_rows):.0f} CPU-seconds",
                flush=True,
            )
    rows = [row for some, _ in processes_rows for row in some]
    with open(arguments.out, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("code", "arm", "seed", METRIC))
        table.writerows(rows)
    spent = sum(seconds for _, seconds in processes_rows)
    print(f"{arguments.out}: {len(rows)} trials, {spent:.0f} CPU-seconds, {spent / len(rows):.2f} a trial")
    return 0


if __name__ == "__main__":
    sys.exit(main())
