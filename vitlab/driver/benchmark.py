"""Benchmarks of a study's arms, each alone on this machine, and of the engines for each model shape.

Every measurement runs in its own process, with the study's threads and device and nothing beside it.  Arms are measured
in turns, so that other load on the machine affects all of them alike.  Measurements are independent of trials: the
costs of arms are written to ``cost.json`` in the study's folder, and the results of engine benchmarks to its
plan.json.
"""

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from vitlab.driver.session import Session, iterate_with_time_left
from vitlab.engines.base import Engine, train
from vitlab.errors import TrialFailed, UserError, one_line
from vitlab.identity.trial import Trial
from vitlab.planning.engine_choice import MAX_TOGETHER
from vitlab.planning.values import EngineBenchmark, Plan, Planned
from vitlab.registry import slot
from vitlab.registry.plugins import sentence_with_place
from vitlab.report.sections.cost import MeasuredCost, write_costs
from vitlab.runner import fork_server
from vitlab.runner.execution import begin_attempt
from vitlab.runner.job import Settings
from vitlab.spec import RunSpec
from vitlab.spec.tree import NewTree, Tree
from vitlab.spec.trial import LENGTHS
from vitlab.store.folders import LAST, Keep, Store, TrialFolder
from vitlab.training.evaluation import forward_logits
from vitlab.training.loop import Training
from vitlab.training.memory import peak_memory

ROUNDS = 5  #: processes per arm
PROBES = 3  #: maximum number of measured blocks per engine
PROBE_S = 3.0  #: time budget of an engine benchmark for all engines together; a started round is completed
LONG_S = 0.1
"""Step time above which only the loop is benchmarked: other engines save only kernel launches, some hundreds of them at
tens of microseconds, which is negligible beside such a step."""
BLOCK_S = 1.0  #: duration of one measurement
WARM_UP = 3  #: steps before a measurement


def engines_to_benchmark() -> dict[str, type[Engine]]:
    """Return the engines to benchmark beside the loop, by name."""
    engines = slot("engine")
    classes = {name: engines.get(name) for name in engines.names()}
    return {name: cls for name, cls in classes.items() if cls.benchmarked and not cls.one_at_a_time}


def measure_and_write_arm_costs(plan: Plan, session: Session) -> Path:
    """Measure every arm that has trials and write the results to the study's folder.

    Returns:
        The file, with the columns of :class:`~vitlab.report.sections.cost.MeasuredCost`.  An arm that cannot be
        measured has no row, and the reason is shown.
    """
    firsts = [*plan.first_trials.values()]
    results: dict[str, list[Tree]] = {planned.arm: [] for planned in firsts}
    settings = measurement_settings(session.run, session.plugin_files)
    for turn in iterate_with_time_left("measuring speed and memory: round", range(ROUNDS), session.watch):
        begin = turn % max(1, len(firsts))
        for planned in firsts[begin:] + firsts[:begin]:
            if planned.arm not in results:
                continue  # its failure has been reported
            try:
                results[planned.arm].append(_measure_in_own_process(measure_speed_and_memory, plan, planned, settings))
            except UserError as error:
                session.watch.say(f"arm '{planned.arm}' cannot be benchmarked: {error}")
                del results[planned.arm]
    rows = [_summarise_rounds(planned, results[planned.arm]) for planned in firsts if planned.arm in results]
    return write_costs(rows, plan, session.store)


def benchmark_engines(
    plan: Plan, shapes: Mapping[str, Sequence[Planned]], session: Session
) -> dict[str, EngineBenchmark]:
    """Measure the fastest engine for each shape of trials.

    Only engines are compared, because nothing else paid off: see BENCHMARKS.md on parts of a batch, more trials
    together and more threads.

    Args:
        plan: the plan with these trials.
        shapes: trials by :func:`vitlab.planning.engine_choice.speed_digest`.
        session: the run; each result is shown in a sentence.
    """
    benchmarks = {}
    for shape, trials in shapes.items():
        together = max(2, min(MAX_TOGETHER, len(trials)))
        try:
            measured = _measure_in_own_process(
                _measure_engines, plan, trials[0], measurement_settings(session.run, session.plugin_files), together
            )
        except UserError as error:
            raise UserError(f"arm '{trials[0].arm}' cannot be benchmarked: {error}") from None
        speeds = measured["speeds"]
        benchmarks[shape] = EngineBenchmark(max(speeds, key=speeds.__getitem__), together, speeds, measured["reasons"])
        session.watch.say(f"{', '.join(dict.fromkeys(planned.arm for planned in trials))}: {benchmarks[shape].summary}")
    return benchmarks


def measurement_settings(run: RunSpec, plugins: Sequence[str]) -> Settings:
    """Return the settings of measurements, which keep nothing."""
    return Settings(
        threads=run.threads,
        device=run.device,
        deterministic=run.deterministic,
        keep=Keep(last=False),
        plugins=tuple(plugins),
    )


@contextmanager
def temporary_short_trial(
    plan: Plan, planned: Planned, steps: int, settings: Settings, precision: str | None = None
) -> Iterator[tuple[Trial, TrialFolder]]:
    """Yield a trial with its training limited to a number of steps, and a temporary folder for it.

    Stored results are neither read nor written: its prerequisites (a teacher, a pre-trained body) are trained as
    briefly.

    Args:
        plan: the plan with the trial and its prerequisites.
        planned: the trial.
        steps: their number; fewer if the trial itself is shorter.
        settings: how it runs.
        precision: replaces the trial's own.
    """
    trials = {trial.name: trial for trial in plan.trials_with_keys}

    def shorten(trial: Trial) -> Trial:
        train = trial.spec.train
        changes = {
            **dict.fromkeys(LENGTHS),
            "steps": steps if train.steps is None else min(steps, train.steps),
            "evaluations": 1,
            "precision": precision or train.precision,
        }
        spec = trial.spec.model_copy(update={"train": train.model_copy(update=changes)})
        return replace(trial, spec=spec, code="")  # any code may run it

    def prerequisites_first(trial: Trial) -> Iterator[Trial]:
        for name in trial.needs.values():
            yield from prerequisites_first(trials[name])
            yield trials[name]

    with tempfile.TemporaryDirectory(prefix="vitlab-brief-") as root:
        store = Store(Path(root))
        for trial in prerequisites_first(planned.trial):
            with begin_attempt(shorten(trial), store.folder(trial), replace(settings, keep=LAST)) as attempt:
                [outcome] = train([attempt.training])
                assert outcome is not None  # nothing stops it
                attempt.end_with_outcome(outcome, attempt.spent_s())
            if failure := attempt.training.failure:
                raise TrialFailed(f"arm '{planned.arm}' starts from a training that failed: {failure}")
        yield shorten(planned.trial), store.folder(planned.trial)


def measure_speed_and_memory(plan: Plan, planned: Planned, settings: Settings) -> NewTree:
    """Measure images per second of a trial in training and inference, and the peak memory, in this process."""
    with (
        temporary_short_trial(plan, planned, WARM_UP, settings) as (trial, folder),
        begin_attempt(trial, folder, settings) as attempt,
    ):
        training = attempt.training
        device, spec = training.feed.device, training.spec
        speed = measure_step_rate(training.train_step, device) * training.images_per_batch
        batch = next(iter(training.feed.evaluation("val", spec.batch_size)))
        training.model.eval()
        with torch.no_grad():
            passes = measure_step_rate(lambda: forward_logits(training.model, batch.x_BCHW, spec.precision), device)
        return {
            "train_images_per_s": speed,
            "infer_images_per_s": passes * len(batch.id_B),
            "peak_bytes": peak_memory(device),
            "device": device.type,
            "processor": torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else torch.backends.cpu.get_cpu_capability(),
            "threads": settings.threads,
            "batch_size": spec.batch_size,
            "precision": spec.precision,
            "torch": torch.__version__,
        }


def _measure_engines(plan: Plan, planned: Planned, settings: Settings, together: int) -> NewTree:
    """Measure images per second of every engine, in turns, with reasons for engines not measured."""
    with ExitStack() as stack:
        trial, folder = stack.enter_context(temporary_short_trial(plan, planned, WARM_UP, settings))

        def make_training(number: int, engine: str) -> Training:
            # A training holds the lock of its folder, so every engine has its own.
            own = TrialFolder(folder.path.with_name(f"{number}-{engine}"))
            # Other seeds on the same split.
            seeds = {name: seed + number * (name != "split") for name, seed in trial.seeds.items()}
            return stack.enter_context(begin_attempt(replace(trial, seeds=seeds), own, settings)).training

        alone = make_training(0, "loop")
        device = alone.feed.device
        alone.train_step()  # selects kernels and allocates memory
        step_s = min(1 / measure_step_rate(alone.train_step, device, block_s=0.0, warm_up=0) for _ in range(2))
        steps, images, reasons = {"loop": alone.train_step}, {"loop": alone.images_per_batch}, {}
        for name, engine_type in engines_to_benchmark().items():
            try:
                if step_s > LONG_S:
                    raise ValueError(f"a step takes {step_s:.1f} s, so other engines could save no noticeable time")
                if reason := engine_type.incompatibility(alone):
                    raise ValueError(reason)
                engine = engine_type([make_training(number, name) for number in range(together)])
                engine.train_step()
            except Exception as error:  # components that do not support an engine may raise anything
                reasons[name] = one_line(error)[:200]
                continue
            steps[name], images[name] = engine.train_step, alone.images_per_batch * together
        speeds: dict[str, list[float]] = {name: [] for name in steps}
        began = time.perf_counter()
        for _ in range(PROBES):
            for name, step in steps.items():
                steps_per_s = measure_step_rate(step, device, PROBE_S / PROBES / len(steps), warm_up=0)
                speeds[name].append(steps_per_s * images[name])
            if len(steps) == 1 or time.perf_counter() - began > PROBE_S:
                break
        return {"speeds": {name: statistics.median(of) for name, of in speeds.items()}, "reasons": reasons}


def measure_step_rate(
    step: Callable[[], object], device: torch.device, block_s: float | None = None, warm_up: int = WARM_UP
) -> float:
    """Return steps per second of wall time after the warm-up, over at least ``warm_up`` steps and at least one."""
    length_s = BLOCK_S if block_s is None else block_s
    for _ in range(warm_up):
        step()
    _synchronise(device)
    began, steps = time.perf_counter(), 0
    while steps == 0 or steps < warm_up or time.perf_counter() - began < length_s:
        step()
        steps += 1
    _synchronise(device)
    return steps / (time.perf_counter() - began)


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def _measure_in_own_process(measure: Callable[..., Tree], *arguments: Any) -> Tree:
    """Return what a function measures in a process of its own.

    Raises:
        UserError: if it fails there.
    """
    process, pipe = fork_server.start_process(_measure_and_send, (measure, arguments), "measurement")
    try:
        measured: Tree | str = pipe.recv()
    except EOFError:
        process.join()
        measured = f"its process {fork_server.describe_exit(process.exitcode)}"
    finally:
        process.kill()
        process.join()
    if isinstance(measured, str):
        raise UserError(measured)
    return measured


def _measure_and_send(measure: Callable[..., Tree], arguments: Sequence[Any], pipe: Connection) -> None:
    try:
        pipe.send(measure(*arguments))
    except Exception as error:  # a component may raise anything
        pipe.send(sentence_with_place(error))


def _summarise_rounds(planned: Planned, rounds: Sequence[Tree]) -> MeasuredCost:
    values: NewTree = {**rounds[-1], "peak_bytes": int(statistics.median(each["peak_bytes"] for each in rounds))}
    for name in ("train_images_per_s", "infer_images_per_s"):
        q1, median, q3 = statistics.quantiles([each[name] for each in rounds], n=4, method="inclusive")
        values |= {name: median, f"{name}_q1": q1, f"{name}_q3": q3}
    return MeasuredCost(
        arm=planned.arm,
        trial=planned.trial.key,
        code=planned.trial.code,
        rounds=len(rounds),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else math.nan,
        measured=str(datetime.now(UTC)),
        **values,
    )
