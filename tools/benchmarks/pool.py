"""Training of the pool of real seeds for ``verdicts.py`` and ``calibration.py``: ``pool.yaml``, with and without bugs.

    python tools/benchmarks/pool.py --work FOLDER     # 20,416 trainings, 17 CPU-minutes

Every arm of the study is trained with many seeds by the sound code, and the arm ``gate`` with fewer by the code with
each bug of ``bugs.py``.  The engine is that of ``vitlab run``, with larger batches and no files of trials.  Each
batch appends its final values to a table in ``--work``, so that a later call continues there; the last one writes all
of them to ``pool.parquet``.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pandas as pd
import pytest
import torch
from bugs import BUGS

from vitlab import lab
from vitlab.data.prepare import Feed, prepare
from vitlab.engines.base import EngineFailed, train
from vitlab.identity.trial import Trial
from vitlab.registry import slot
from vitlab.training.loop import Training

HERE = Path(__file__).parent
STUDY, POOL = HERE / "pool.yaml", HERE / "pool.parquet"
COLUMNS = {"code": "category", "arm": "category", "seed": "int16"}
METRICS = {"val/accuracy": "float64", "test/accuracy": "float64", "val/loss": "float32"}
BUGGED = "gate"  #: the arm that is trained with bugs
SLOW = {
    "long": 800,
    "augmented": 1000,
    "gate": 208,
    "gate_no_position": 208,
}  #: arms that take longer, and the most seeds that they are trained with
TOGETHER = 100  #: trainings in a batch


def begin(trial: Trial, seed: int) -> Training:
    """Return the training of a trial, with another seed, before its first step."""
    seeds = {stream: 0 if stream == "split" else seed for stream in trial.seeds}
    data = slot("dataset").resolve_choice(trial.spec.data)
    prepared = prepare(data, seeds)
    network = slot("model").build(trial.spec.model, prepared.info)
    network.initialise(seeds["init"])
    feed = Feed(prepared, data.options["augment"], seeds)
    return Training(network, feed, trial.spec.train, seeds)


def final_values(trial: Trial, seeds: Sequence[int], bug: str = "", engine: str = "batch_last") -> list[list[float]]:
    """Return the last values of ``METRICS`` per seed, NaN for a training that diverged."""
    with pytest.MonkeyPatch.context() as patch:
        if bug:
            BUGS[bug](patch)
        try:
            results = train([begin(trial, seed) for seed in seeds], slot("engine").get(engine))
        except EngineFailed as failed:
            return final_values(trial, seeds, bug, failed.fallback)
    measured = [result.history[-1].metrics if result is not None and result.history else {} for result in results]
    return [[last.get(metric, math.nan) for metric in METRICS] for last in measured]


def done(table: Path) -> set[tuple[str, str, int]]:
    """Return code, arm and seed of the trainings of earlier calls."""
    with suppress(FileNotFoundError), open(table, encoding="utf-8") as file:
        return {(code, arm, int(seed)) for code, arm, seed, *_ in csv.reader(file)}
    return set()


def pack(table: Path) -> None:
    """Write the values of all trainings to Parquet."""
    frame = pd.read_csv(table, names=[*COLUMNS, *METRICS]).drop_duplicates([*COLUMNS])
    frame = frame.astype(COLUMNS | METRICS).sort_values([*COLUMNS], ignore_index=True)
    frame.to_parquet(POOL, compression="zstd", index=False)
    print(f"{POOL}: {len(frame):,} trainings, {POOL.stat().st_size / 1000:.0f} kB")


def main() -> int:
    """Train the requested seeds and write the pool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--bugged", type=int, default=50)
    parser.add_argument("--work", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    _, plan = lab.plan_study(STUDY, out=arguments.work)
    trials = {arm.name: plan.find(arm.name, 0).trial for arm in plan.arms}
    table = arguments.work / "pool.csv"
    existing = done(table)
    kinds = [(bug, BUGGED, arguments.bugged) for bug in BUGS] + [
        ("sound", arm, min(arguments.seeds, SLOW.get(arm, arguments.seeds))) for arm in trials
    ]
    tasks = [
        (first, code, arm, [seed for seed in seeds[first : first + TOGETHER] if (code, arm, seed) not in existing])
        for code, arm, seeds in ((code, arm, range(count)) for code, arm, count in kinds)
        for first in range(0, len(seeds), TOGETHER)
    ]
    tasks.sort(key=lambda task: task[0])  # so that arms advance together
    count, began = 0, time.process_time()
    for _, code, arm, seeds in tasks:
        if not seeds:
            continue
        rows = final_values(trials[arm], seeds, "" if code == "sound" else code)
        with open(table, "a", newline="", encoding="utf-8") as file:
            lines = ([code, arm, seed, *row] for seed, row in zip(seeds, rows, strict=True))
            csv.writer(file, lineterminator="\n").writerows(lines)
        count += len(seeds)
        spent = time.process_time() - began
        print(f"{code}, {arm}, to seed {seeds[-1]}: {spent:.0f} s, {spent / count:.3f} a training", flush=True)
    pack(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
