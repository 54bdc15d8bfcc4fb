"""Benchmarks of a study's arms, each alone on this machine, and of the engines for each model shape.

Every measurement runs in its own process, with the study's threads and device and nothing beside it: the local executor
starts a worker, which imports this module and measures instead of training.  Arms are measured in turns, so that other
load on the machine affects all of them alike.  Measurements are independent of trials: the costs of arms are written to
``cost.parquet`` in the study's folder, and the results of engine benchmarks to its plan.json.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from vitlab.driver.session import Session
from vitlab.engines.base import Engine
from vitlab.errors import UserError
from vitlab.executors.local import Local
from vitlab.identity.trial import Trial
from vitlab.plan.engine_choice import MAX_TOGETHER
from vitlab.plan.values import EngineBenchmark, Plan, Planned
from vitlab.registry import slot
from vitlab.report.sections.cost import MeasuredCost, write_costs
from vitlab.runner.job import Job, JobTrial, Settings
from vitlab.runner.run import begin_trial
from vitlab.store.files import mapping, read_json, write_json
from vitlab.store.folders import Keep, TrialFolder
from vitlab.store.result import Ending
from vitlab.training.evaluation import forward_logits
from vitlab.training.loop import Training, peak_memory

ROUNDS = 5  #: processes per arm
PROBES = 3  #: maximum number of measured blocks per engine
PROBE_S = 3.0  #: time budget of an engine benchmark for all engines together; a started round is completed
LONG_S = 0.1
"""Step time above which only the loop is benchmarked: other engines save only kernel launches, some hundreds of them at
tens of microseconds, which is negligible beside such a step."""
BLOCK_S = 1.0  #: duration of one measurement
WARM_UP = 3  #: steps before a measurement
RESULTS = "results.json"
"""File in the folder of a benchmark's job, from the worker."""


def engines_of_batches() -> dict[str, type[Engine]]:
    """Return the engines to benchmark beside the loop, by name."""
    engines = slot("engine")
    classes = {name: engines.get(name) for name in engines.names()}
    return {name: cls for name, cls in classes.items() if cls.benchmarked and not cls.one_at_a_time}


def measure_arms(plan: Plan, session: Session) -> Path:
    """Measure every arm that has trials and write the results to the study's folder.

    Returns:
        The file, with the columns of :class:`~vitlab.report.sections.cost.MeasuredCost`.  An arm that cannot be
        measured has no row, and the reason is shown.
    """
    firsts = list({planned.arm: planned for planned in reversed(plan.trials)}.values())[::-1]
    results: dict[str, list[Mapping[str, Any]]] = {planned.arm: [] for planned in firsts}
    say = session.watch.say
    say(f"measuring the speed and memory of each arm, in {ROUNDS} rounds")
    with _bench(session) as ask:
        for turn in range(ROUNDS):
            begin = turn % max(1, len(firsts))
            for planned in firsts[begin:] + firsts[:begin]:
                if planned.arm not in results:
                    continue  # its failure has been reported
                try:
                    results[planned.arm].append(ask([planned.trial]))
                except UserError as error:
                    say(f"arm '{planned.arm}' cannot be benchmarked: {error}")
                    del results[planned.arm]
            say(f"measured: round {turn + 1} of {ROUNDS}")
    rows = [_row(planned, results[planned.arm]) for planned in firsts if planned.arm in results]
    return write_costs(rows, plan, session.store)


def benchmark_engines(shapes: Mapping[str, Sequence[Planned]], session: Session) -> dict[str, EngineBenchmark]:
    """Measure the fastest engine for each shape of trials.

    Only engines are compared, because nothing else paid off: see BENCHMARKS.md on parts of a batch, more trials
    together and more threads.

    Args:
        shapes: trials by :func:`vitlab.plan.engine_choice.shape`.
        session: the run; each result is shown in a sentence.
    """
    benchmarks = {}
    with _bench(session) as ask:
        for shape, trials in shapes.items():
            together = max(2, min(MAX_TOGETHER, len(trials)))
            try:
                outcome = ask([_with_seed(trials[0].trial, number) for number in range(together)])
            except UserError as error:
                raise UserError(f"arm '{trials[0].arm}' cannot be benchmarked: {error}") from None
            speeds = outcome["speeds"]
            benchmarks[shape] = EngineBenchmark(
                max(speeds, key=speeds.__getitem__), together, speeds, outcome["reasons"]
            )
            session.watch.say(
                f"{', '.join(dict.fromkeys(planned.arm for planned in trials))}: {benchmarks[shape].summary}"
            )
    return benchmarks


# -- the worker's side: see Executor.runner ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """Result that a worker returns."""

    status: Ending = Ending.DONE
    failure: str = ""


def execute(job: Job, stop: Callable[[], bool]) -> list[Done | None]:
    """Measure the cost of a job's trial, or the engines that may train its several trials; write the results.

    Returns:
        None for each trial if it was stopped.
    """
    measure = _cost if len(job.trials) == 1 else _engines
    write_json(job.folder / RESULTS, measure(job, stop))
    return [None if stop() else Done() for _ in job.trials]


def _cost(job: Job, stop: Callable[[], bool]) -> dict[str, Any]:
    """Measure images per second in training and inference, and the peak memory."""
    with begin_trial(job.trials[0].trial, TrialFolder(job.folder), job.settings) as training:
        device, spec = training.feed.device, training.spec
        train = _speed(training.train_step, device, stop) * training.batch_images
        batch = next(iter(training.feed.evaluation("val", spec.batch_size)))
        training.model.eval()
        with torch.no_grad():
            passes = _speed(lambda: forward_logits(training.model, batch.x_BCHW, spec.precision), device, stop)
        return {
            "train_images_per_s": train,
            "infer_images_per_s": passes * len(batch.id_B),
            "peak_bytes": peak_memory(device),
            "device": device.type,
            "processor": torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else torch.backends.cpu.get_cpu_capability(),
            "threads": job.settings.threads,
            "batch_size": spec.batch_size,
            "precision": spec.precision,
            "torch": torch.__version__,
        }


def _engines(job: Job, stop: Callable[[], bool]) -> dict[str, Any]:
    """Measure images per second of every engine, in turns, with reasons for engines not measured."""
    with ExitStack() as trainings:

        def begin(item: JobTrial, engine: str) -> Training:
            # A training holds the lock of its folder, so every engine has its own; prerequisites are two folders above.
            folder = TrialFolder(item.folder.with_name(f"{item.folder.name}-{engine}"))
            return trainings.enter_context(begin_trial(item.trial, folder, job.settings))

        alone = begin(job.trials[0], "loop")
        device = alone.feed.device
        alone.train_step()  # selects kernels and allocates memory
        step_s = min(1 / _speed(alone.train_step, device, stop, block_s=0.0, warm_up=0) for _ in range(2))
        steps, images, reasons = {"loop": alone.train_step}, {"loop": alone.batch_images}, {}
        for name, engine_type in engines_of_batches().items():
            try:
                if step_s > LONG_S:
                    raise ValueError(f"a step takes {step_s:.1f} s, so other engines could save no noticeable time")
                if reason := engine_type.incompatibility(alone):
                    raise ValueError(reason)
                engine = engine_type([begin(item, name) for item in job.trials])
                engine.train_step()
            except Exception as error:  # components that do not support an engine may raise anything
                reasons[name] = " ".join(str(error).split())[:200]
                continue
            steps[name], images[name] = engine.train_step, alone.batch_images * len(job.trials)
        speeds: dict[str, list[float]] = {name: [] for name in steps}
        began = time.perf_counter()
        for _ in range(PROBES):
            for name, step in steps.items():
                speed = _speed(step, device, stop, PROBE_S / PROBES / len(steps), warm_up=0)
                speeds[name].append(speed * images[name])
            if len(steps) == 1 or time.perf_counter() - began > PROBE_S:
                break
        return {"speeds": {name: statistics.median(speed) for name, speed in speeds.items()}, "reasons": reasons}


def _speed(
    step: Callable[[], object],
    device: torch.device,
    stop: Callable[[], bool],
    block_s: float | None = None,
    warm_up: int = WARM_UP,
) -> float:
    """Return steps per second of wall time after the warm-up, over at least ``warm_up`` steps and at least one."""
    length_s = BLOCK_S if block_s is None else block_s
    for _ in range(warm_up):
        step()
    _wait_for(device)
    began, steps = time.perf_counter(), 0
    while steps == 0 or (not stop() and (steps < warm_up or time.perf_counter() - began < length_s)):
        step()
        steps += 1
    _wait_for(device)
    return steps / (time.perf_counter() - began)


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def _with_seed(trial: Trial, number: int) -> Trial:
    """Return the trial with other seeds on the same split."""
    return replace(trial, seeds={name: seed + number * (name != "split") for name, seed in trial.seeds.items()})


# -- the driver's side ------------------------------------------------------------------------------------------------

Ask = Callable[[Sequence[Trial]], Mapping[str, Any]]
"""Function that measures trials in a process of their own; it raises UserError if that fails."""


class _BenchmarkExecutor(Local):
    """Local executor of benchmarks, one process at a time."""

    runner = "vitlab.driver.benchmark"


@contextmanager
def _bench(session: Session) -> Iterator[Ask]:
    """Yield a function that measures trials in a temporary folder."""
    executor = _BenchmarkExecutor(session.run.model_copy(update={"workers": 1}))
    with tempfile.TemporaryDirectory(prefix="vitlab-measure-") as scratch:
        root, numbers = Path(scratch) / "trials", itertools.count()

        def ask(trials: Sequence[Trial]) -> Mapping[str, Any]:
            for name in trials[0].needs.values():  # the worker looks for it two folders above
                key, code = name.split("/")
                (root / key).mkdir(parents=True, exist_ok=True)
                if not (root / name).exists():
                    (root / name).symlink_to(session.store.trial(key, code).path, target_is_directory=True)
            job = _job(trials, [root / "measured" / str(next(numbers)) for _ in trials], session)
            executor.submit(job)
            while not (ends := executor.poll(timeout_s=1.0)):
                pass
            if ends[0].ending != Ending.DONE:
                raise UserError(ends[0].detail or ends[0].ending)
            return read_json(job.folder / RESULTS, mapping) or {}

        try:
            yield ask
        finally:
            executor.cancel(grace_s=1.0)


def _job(trials: Sequence[Trial], folders: Sequence[Path], session: Session) -> Job:
    run = session.run
    settings = Settings(
        threads=run.threads,
        device=run.device,
        deterministic=run.deterministic,
        keep=Keep(last=False),
        plugins=session.plugin_files,
    )
    items = zip(folders, trials, strict=True)
    return Job(tuple(JobTrial(f"measuring {trial.key[:8]}", folder, trial) for folder, trial in items), settings)


def _row(planned: Planned, rounds: Sequence[Mapping[str, Any]]) -> MeasuredCost:
    values: dict[str, Any] = {}
    for name in ("train_images_per_s", "infer_images_per_s"):
        q1, median, q3 = statistics.quantiles([each[name] for each in rounds], n=4, method="inclusive")
        values |= {name: median, f"{name}_q1": q1, f"{name}_q3": q3}
    return MeasuredCost(
        arm=planned.arm,
        trial=planned.trial.key,
        code=planned.trial.code,
        rounds=len(rounds),
        peak_bytes=int(statistics.median(measurement["peak_bytes"] for measurement in rounds)),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else math.nan,
        measured=str(datetime.now(UTC)),
        **values,
        **{name: rounds[-1][name] for name in ("device", "processor", "threads", "batch_size", "precision", "torch")},
    )
