"""A thousand short trials by eight workers, logged through one driver: what is stored, and what the driver's memory does.

    python tools/benchmarks/tracking.py                      into SQLite
    python tools/benchmarks/tracking.py --where postgresql   into PostgreSQL, through the server of docker/compose.yaml

Workers are processes that write journals and results by the store's own writers, without a training; the driver is the
tracker as a run has it.  ``--train`` trains in their place: trials of one step, together, by ``vitlab run``.
Afterwards every point of every journal is looked for by SQL.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from vitlab import lab
from vitlab.planning.values import Arm, Plan, Planned, Trial
from vitlab.registry import slot
from vitlab.spec import Analysis, RunSpec, TrialSpec
from vitlab.store.folders import Store
from vitlab.store.result import Circumstances, Measurement, Outcome, TrialResult
from vitlab.trackers.delivery import BackgroundDelivery
from vitlab.trackers.replay import TrialUpdate
from vitlab.trackers.trials import RunMark, TrialRuns

sys.path.append(str(Path(__file__).parents[1]))
from compose_runner import Services, rows

STUDY = "tracking"
SEEDS = 50  #: of every arm
UPDATE_S = 2.0  #: as of a run
Points = Counter[tuple[str, str, int, int, str]]  #: trial, metric, time, step, value

SQL = """
select t.value, m.key, m.timestamp, m.step, m.value, m.is_nan
from metrics m join runs r on r.run_uuid = m.run_uuid join tags t on t.run_uuid = r.run_uuid
where t.key = 'vitlab.trial' and r.lifecycle_stage = 'active'
"""
RUNS = """
select t.value, count(*), min(r.status), max(r.status) from runs r join tags t on t.run_uuid = r.run_uuid
where t.key = 'vitlab.trial' and r.lifecycle_stage = 'active' group by t.value
"""


def plan_of(trials: int) -> Plan:
    """Return a plan of this many trials, with the parameters of real ones."""
    spec = {
        "data": {"type": "digits", "size": 8, "validation": 0.1},
        "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2, "attention": {"type": "auto"}},
        "train": {"steps": 20, "batch_size": 16, "optimizer": {"type": "adamw", "lr": 1e-3, "weight_decay": 0.05}},
    }
    arms = [Arm(f"arm {number}", {"model.dim": 8 + number}) for number in range(math.ceil(trials / SEEDS))]
    planned = []
    for number in range(trials):
        arm, seed = arms[number // SEEDS], number % SEEDS
        own = {**spec, "model": {**spec["model"], "dim": 8 + number // SEEDS}}
        trial = Trial(
            TrialSpec.model_validate(own),
            {"init": seed},
            (),
            "digits:0",
            key=f"{number:064x}",
            code="c" * 64,
        )
        planned.append(Planned(arm.name, seed, trial))
    return Plan(STUDY, "Is nothing lost?", tuple(arms), tuple(planned), Analysis())


def work(root: Path, numbers: range, points: int, step_s: float) -> None:
    """Write trials one after another, each from its first event to its result, as a worker."""
    plan = plan_of(numbers.stop)
    for number in numbers:
        trial = plan.trials[number].trial
        folder, draws, began = Store(root).trial(trial.key, trial.code), random.Random(number), time.time()
        with folder.lease():
            folder.emit("start", attempt=1, host="here", numerics={})
            history = []
            for step in range(1, points + 1):
                metrics = {name: draws.random() for name in ("train/loss", "train/lr", "val/loss", "val/accuracy")}
                history.append(Measurement(step, step / 10, 16 * step, metrics))
                folder.emit("metrics", **vars(history[-1]))
                time.sleep(step_s)
            folder.emit("end", status="done")
            final = {"val/accuracy": draws.random(), "val/loss": math.nan, "test/accuracy": draws.random()}
            outcome = Outcome(final, tuple(history), "0" * 64, points, 16 * points)
            end = time.time()
            around = Circumstances(began, end - began, "here", 1, 100, 1000, 10**6, {}, {}, end)
            folder.write_result(TrialResult(trial.key, trial.code, "done", outcome, around))


def expected(store: Store, plan: Plan) -> Points:
    """Return the points of journals and results, read as JSON."""
    points: Points = Counter()
    for planned in plan.trials:
        trial = planned.trial
        path = store.trial(trial.key, trial.code).path
        for event in map(json.loads, (path / "events.jsonl").read_text().splitlines()):
            if event["kind"] == "metrics":
                values = {**event["metrics"], "progress/epoch": event["epoch"], "progress/images": event["images"]}
                points.update((trial.key, name, event["t"], event["step"], _formatted(v)) for name, v in values.items())
        result = json.loads((path / "result.json").read_text())
        around, outcome = result["circumstances"], result["outcome"]
        t = int(around["ended"] * 1000)
        finals = {f"final/{name}": value for name, value in outcome["metrics"].items()}
        finals |= {f"cost/{name}": around[name] for name in ("params", "macs", "wall_s", "memory_bytes")}
        finals["cost/images_per_s"] = outcome["images"] / around["wall_s"]
        points.update((trial.key, name, t, 0, _formatted(value)) for name, value in finals.items())
    return points


def stored(database: str | Path) -> Points:
    """Return the points in the database."""
    return Counter(
        (trial, name, t, step, _formatted(math.nan if is_nan else value))
        for trial, name, t, step, value, is_nan in rows(database, SQL)
    )


def _formatted(value: float) -> str:
    return repr(float(value) if math.isfinite(value) else math.nan)


def faults(store: Store, plan: Plan, database: str | Path) -> list[str]:
    """Return the points that the database has not exactly once."""
    reference, there = expected(store, plan), stored(database)
    problems = []
    missing, surplus = reference - there, there - reference
    twice = [point for point, count in there.items() if count > 1]
    for what, some in (("missing", missing), ("that nobody journalled", surplus), ("stored twice", twice)):
        if some:
            problems.append(f"{len(some)} points {what}, such as {next(iter(some))}")
    runs = rows(database, RUNS)
    if len(runs) != len(plan.trials) or {count for _, count, *_ in runs} != {1}:
        problems.append(f"{len(runs)} trials have runs, {max((count for _, count, *_ in runs), default=0)} at most")
    if {status for *_, low, high in runs for status in (low, high)} - {"FINISHED"}:
        problems.append("runs that are not finished")
    return problems


def resident_mb() -> float:
    """Return the memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextmanager
def sampled(every: int, row: Callable[[int, float, float], None]) -> Iterator[None]:
    """Call ``row`` with the number of completely delivered trials, the memory and the seconds."""
    genuine, began, deliveries = TrialRuns.write, time.monotonic(), 0

    def write(self: TrialRuns, news: TrialUpdate, mark: RunMark | None) -> RunMark:
        nonlocal deliveries
        written = genuine(self, news, mark)
        if news.end is not None and news.end.result is not None:
            deliveries += 1
            if deliveries == 1 or deliveries % every == 0:
                row(deliveries, resident_mb(), time.monotonic() - began)
        return written

    TrialRuns.write = write  # type: ignore[method-assign]
    try:
        yield
    finally:
        TrialRuns.write = genuine  # type: ignore[method-assign]


def log_trials(out: Path, uri: str | None, trials: int, workers: int, points: int, step_s: float) -> tuple[Store, Plan]:
    """Let workers write while the driver delivers, then deliver the rest."""
    store, plan = Store(out), plan_of(trials)
    context = multiprocessing.get_context("spawn")
    shares = [range(first, trials, workers) for first in range(workers)]
    crew = [context.Process(target=work, args=(out, share, points, step_s)) for share in shares]
    tracker = BackgroundDelivery(slot("tracker").build({"type": "mlflow", "uri": uri}, plan, store, RunSpec()))
    for worker in crew:
        worker.start()
    longest = 0.0
    while any(worker.is_alive() for worker in crew):
        began = time.monotonic()
        tracker.update()
        longest = max(longest, time.monotonic() - began)
        time.sleep(UPDATE_S)
    assert not any(worker.exitcode for worker in crew)
    print(f"workers ended; the longest update took {longest * 1000:.0f} ms of the driver", flush=True)
    assert tracker.close([]) is not None
    return store, plan


def train(out: Path, uri: str | None, trials: int, workers: int) -> tuple[Store, Plan]:
    """Train real trials of one step, so that most of the time is delivery."""
    content = {
        "study": STUDY,
        "base": {
            "data": {"type": "digits"},
            "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2},
            "train": {"steps": 1, "batch_size": 16, "evaluations": 1},
        },
        "design": {"grid": {"train.optimizer.lr": [1e-3 * (1 + n) for n in range(math.ceil(trials / SEEDS))]}},
        "seeds": min(trials, SEEDS),
        "run": {
            "executor": "local",
            "workers": workers,
            "keep": "none",
            "engine": "vmap",
            "tracker": "mlflow",
        },
    }
    out.mkdir(parents=True)
    file = out / "study.yaml"
    file.write_text(yaml.safe_dump(content))
    answer = lab.run(file, out=out, changes={} if uri is None else {"run.tracker.uri": uri})
    assert answer.link is not None and answer.failed == 0
    return answer.store, answer.plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--where", choices=["sqlite", "postgresql"], default="sqlite")
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--points", type=int, default=10, help="evaluations of a trial")
    parser.add_argument("--step", type=float, default=0.02, help="seconds between two of them")
    parser.add_argument("--train", action="store_true", help="train trials of one step")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)

    def row(ended: int, mb: float, seconds: float) -> None:
        print(f"| {ended} | {seconds:.0f} | {mb:.0f} |", flush=True)

    def run(out: Path, uri: str | None) -> tuple[Store, Plan]:
        print("| trials delivered | s | driver, MB |\n| --: | --: | --: |", flush=True)
        with sampled(100, row):
            if options.train:
                return train(out, uri, options.trials, options.workers)
            return log_trials(out, uri, options.trials, options.workers, options.points, options.step)

    with tempfile.TemporaryDirectory(prefix="vitlab-tracking-") as place:
        folder, began = Path(place), time.monotonic()
        folder.chmod(0o755)  # PostgreSQL runs as another user
        if options.where == "sqlite":
            store, plan = run(folder / "out", None)
            problems, logs = faults(store, plan, folder / "out" / "mlflow.db"), list[Path]()
        else:
            services = Services(folder)
            with services.mlflow() as uri:
                store, plan = run(folder / "out", uri)
                problems, logs = (
                    faults(store, plan, services.database),
                    [folder / "mlflow.log", folder / "postgres.log"],
                )
        for log in logs:
            lines = [line for line in log.read_text(errors="replace").splitlines() if _is_trouble(line)]
            problems += [f"{log.name}: {len(lines)} lines such as {lines[0]}"] if lines else []
        count = sum(expected(store, plan).values())
        took = time.monotonic() - began
    print(f"{len(plan.trials)} trials, {count} points, {took:.0f} s: " + ("; ".join(problems) or "each stored once"))
    sys.exit(bool(problems))


def _is_trouble(line: str) -> bool:
    return any(sign in line for sign in ("locked", "deadlock", "PANIC", "Traceback", " 500 "))


if __name__ == "__main__":
    main()
