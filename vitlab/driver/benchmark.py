"""Measuring: what the arms of a study cost on this machine, each alone, and which engine trains a shape fastest.

Every measurement is a process of its own, with the threads and the device of the study and nothing beside it: the
local executor starts it, and in the place of training, its worker imports this module and measures.  Arms are measured
in turns, so that what else the machine does falls on all of them alike.  Nothing of it is part of a trial, and no trial
changes by it: what an arm costs stands in ``cost.parquet`` of the study's folder, written whole, and what a probe found
in its plan.json.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, get_args

import torch

from vitlab.errors import UserError
from vitlab.executors import Job, Local
from vitlab.plan.cohorts import MOST
from vitlab.plan.trial import Trial
from vitlab.plan.values import EngineBenchmark, Plan, Planned
from vitlab.runner.run import begin_trial
from vitlab.runner.settings import Settings as Settings
from vitlab.spec import RunSpec
from vitlab.spec.run import Engine
from vitlab.store.folders import Store, TrialFolder, read_json, write_json
from vitlab.training.cohort import Cohort, Stacking, require_stackable, stacking_incompatibility
from vitlab.training.loop import Training, forward_logits, peak_memory

ROUNDS = 5  #: processes of each arm
PROBES = 3  #: blocks of each engine in a probe, at most
PROBE_S = 3.0  #: how long a probe measures, all engines together; a round that has begun is ended
LONG_S = 0.1
"""A step of a trial alone that takes longer is not tried as a cohort: what stacking saves is calling kernels, some
hundreds of them at some tens of microseconds, and beside such a step that is nothing."""
BLOCK_S = 1.0  #: how long is measured at a time
WARM_UP = 3  #: steps that do not count
STACKINGS: tuple[Stacking, ...] = tuple(engine for engine in get_args(Stacking) if engine in get_args(Engine))
"""The engines of cohorts."""
ASKED, FOUND = "asked.json", "measured.json"

Say = Callable[[str], None]


def measure_arms(plan: Plan, store: Store, run: RunSpec, plugins: Sequence[str | Path], say: Say) -> Path:
    """Measure every arm that has trials, and write what was found in the study's folder.

    Columns: ``arm, trial, code`` (whose it is: the first seed's), ``rounds``, ``train_images_per_s`` and
    ``infer_images_per_s`` (medians over the rounds, with ``_q1`` and ``_q3``; by the loop, in batches of the training,
    data included in training), ``peak_bytes`` (of the process, or of the allocator on CUDA; median), ``device,
    processor, threads, batch_size, precision, torch, load`` (of the machine, 1 minute, at the end) and ``measured``
    (UTC).

    Returns:
        the file.  An arm that cannot be measured has no row in it, and ``say`` is told why.
    """
    import pandas as pd

    from vitlab.report.costs import file_of
    from vitlab.report.frame import write_parquet

    firsts = list({planned.arm: planned for planned in reversed(plan.trials)}.values())[::-1]
    found: dict[str, list[Mapping[str, Any]]] = {planned.arm: [] for planned in firsts}
    with _bench(run, plugins) as ask:
        for turn in range(ROUNDS):
            begin = turn % max(1, len(firsts))
            for planned in firsts[begin:] + firsts[:begin]:
                if len(found[planned.arm]) < turn:
                    continue  # it has been said why
                outcome = ask(planned.trial, {"members": 1}, store)
                if isinstance(outcome, str):
                    say(f"{planned.arm} cannot be measured: {outcome}")
                else:
                    found[planned.arm].append(outcome)
            say(f"measured: round {turn + 1} of {ROUNDS}")
    rows = [_row(planned, found[planned.arm]) for planned in firsts if len(found[planned.arm]) == ROUNDS]
    file = file_of(plan, store)
    write_parquet(pd.DataFrame(rows), file)
    return file


def probe(
    shapes: Mapping[str, Sequence[Planned]], store: Store, run: RunSpec, plugins: Sequence[str | Path], say: Say
) -> dict[str, EngineBenchmark]:
    """Measure which engine trains trials fastest.

    Nothing else is probed, for nothing else was found to pay: see BENCHMARKS.md on parts of a batch, larger cohorts and
    more threads.

    Args:
        shapes: trials by :func:`vitlab.plan.cohorts.shape`.
        store: where the trials live.
        run: on what they run.
        plugins: files of components.
        say: is told what was found.
    """
    found = {}
    with _bench(run, plugins) as ask:
        for shape, trials in shapes.items():
            members = max(2, min(MOST, len(trials)))
            outcome = ask(trials[0].trial, {"members": members}, store)
            if isinstance(outcome, str):
                raise UserError(f"{trials[0].arm} cannot be measured: {outcome}")
            speeds = outcome["speeds"]
            found[shape] = EngineBenchmark(max(speeds, key=speeds.__getitem__), members, speeds, outcome["why_not"])
            say(f"{', '.join(dict.fromkeys(planned.arm for planned in trials))}: {found[shape].said}")
    return found


# -- the worker's side: see Executor.runner ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """What a worker hands back for a result."""

    status: str = "done"
    failure: str = ""


def run_trial(trial: Trial, folder: TrialFolder, settings: Settings, stop: Callable[[], bool]) -> Done | None:
    """Measure a trial as it is asked for in its folder, and write there what was found.

    Returns:
        None if it was stopped.
    """
    members = read_json(folder.path / ASKED)["members"]
    found = _cost(trial, folder, settings, stop) if members == 1 else _engines(trial, folder, settings, stop, members)
    write_json(folder.path / FOUND, found)
    return None if stop() else Done()


def _cost(trial: Trial, folder: TrialFolder, settings: Settings, stop: Callable[[], bool]) -> dict[str, Any]:
    """Images a second in training and in inference, and the most memory that was held."""
    with begin_trial(trial, folder, settings) as training:
        device = training.feed.device
        train = _speed(training.advance, device, stop) * training.batch_images
        batch = next(iter(training.feed.evaluation("val", training.spec.batch_size)))
        training.model.eval()
        with torch.no_grad():
            passes = _speed(lambda: forward_logits(training.model, batch.x_BCHW, training.spec.precision), device, stop)
        return {
            "train_images_per_s": train,
            "infer_images_per_s": passes * len(batch.id_B),
            "peak_bytes": peak_memory(device),
            **_circumstances(trial, settings, device),
        }


def _engines(
    trial: Trial, folder: TrialFolder, settings: Settings, stop: Callable[[], bool], members: int
) -> dict[str, Any]:
    """Images a second by the loop and of cohorts, in turns, and why an engine was not measured."""
    with ExitStack() as begun:
        places = (TrialFolder(folder.path / str(number)) for number in count())

        def begin(seed: int) -> Training:
            return begun.enter_context(begin_trial(_with_seed(trial, seed), next(places), settings))

        alone = begin(0)
        device = alone.feed.device
        alone.advance()  # which chooses kernels and takes memory
        step_s = min(1 / _speed(alone.advance, device, stop, block_s=0.0, warm_up=0) for _ in range(2))
        steps, images, incompatibility = {"loop": alone.advance}, {"loop": alone.batch_images}, {}
        for engine in STACKINGS:
            try:
                if step_s > LONG_S:
                    raise ValueError(f"a step takes {step_s:.1f} s, beside which calling kernels is nothing to save")
                require_stackable(alone.model)
                if engine == "stack" and (
                    reason := stacking_incompatibility(alone.model, alone.spec.precision, device)
                ):
                    raise ValueError(reason)
                cohort = Cohort([begin(1 + seed) for seed in range(members)], engine)
                cohort.advance()
            except Exception as error:  # whatever a part raises that was not made to be stacked
                incompatibility[engine] = " ".join(str(error).split())[:200]
                continue
            steps[engine], images[engine] = cohort.advance, alone.batch_images * members
        speeds: dict[str, list[float]] = {name: [] for name in steps}
        began = time.perf_counter()
        for _ in range(PROBES):
            for name, step in steps.items():
                found = _speed(step, device, stop, PROBE_S / PROBES / len(steps), warm_up=0)
                speeds[name].append(found * images[name])
            if len(steps) == 1 or time.perf_counter() - began > PROBE_S:
                break
        return {
            "speeds": {name: statistics.median(found) for name, found in speeds.items()},
            "why_not": incompatibility,
            **_circumstances(trial, settings, device),
        }


def _speed(
    step: Callable[[], object],
    device: torch.device,
    stop: Callable[[], bool],
    block_s: float | None = None,
    warm_up: int = WARM_UP,
) -> float:
    """Steps a second, by the clock on the wall, after some that do not count; of as many, and of one, at least."""
    length_s = BLOCK_S if block_s is None else block_s
    for _ in range(warm_up):
        step()
    _wait_for(device)
    began, done = time.perf_counter(), 0
    while done == 0 or (not stop() and (done < warm_up or time.perf_counter() - began < length_s)):
        step()
        done += 1
    _wait_for(device)
    return done / (time.perf_counter() - began)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _with_seed(trial: Trial, number: int) -> Trial:
    """The trial with seeds of its own, on the same split."""
    return replace(trial, seeds={name: seed + number * (name != "split") for name, seed in trial.seeds.items()})


def _circumstances(trial: Trial, settings: Settings, device: torch.device) -> dict[str, Any]:
    processor = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else torch.cuda.get_device_name(device)
    return {
        "device": device.type,
        "processor": processor,
        "threads": settings.threads,
        "batch_size": trial.spec["train"]["batch_size"],
        "precision": trial.spec["train"].get("precision", "fp32"),
        "torch": torch.__version__,
    }


# -- the driver's side ------------------------------------------------------------------------------------------------

Ask = Callable[[Trial, Mapping[str, Any], Store], Mapping[str, Any] | str]
"""Measures a trial in a process of its own; what was found, or in one sentence why nothing was."""


class _Measuring(Local):
    """One process at a time."""

    runner = "vitlab.driver.benchmark"


@contextmanager
def _bench(run: RunSpec, plugins: Sequence[str | Path]) -> Iterator[Ask]:
    """A place to measure in, gone afterwards."""
    executor = _Measuring(run.model_copy(update={"workers": 1}))
    with tempfile.TemporaryDirectory(prefix="vitlab-measure-") as scratch:
        trials, asked = Path(scratch) / "trials", iter(range(1 << 30))

        def ask(trial: Trial, what: Mapping[str, Any], store: Store) -> Mapping[str, Any] | str:
            for needed in trial.needs.values():  # it is looked for two folders above
                key, code = needed.split("/")
                (trials / key).mkdir(parents=True, exist_ok=True)
                if not (trials / needed).exists():
                    (trials / needed).symlink_to(store.trial(key, code).path, target_is_directory=True)
            folder = trials / "measured" / str(next(asked))
            write_json(folder / ASKED, dict(what))
            executor.submit(_job(trial, folder, run, plugins))
            while not (ended := executor.poll(timeout_s=1.0)):
                pass
            return read_json(folder / FOUND) if ended[0].how == "done" else ended[0].detail or ended[0].how

        try:
            yield ask
        finally:
            executor.cancel(grace_s=1.0)


def _job(trial: Trial, folder: Path, run: RunSpec, plugins: Sequence[str | Path]) -> Job:
    return Job(
        name=f"measuring {trial.key[:8]}",
        folder=folder,
        trial=trial,
        plugins=tuple(str(Path(plugin).resolve()) for plugin in plugins),
        threads=run.threads,
        device=run.device,
        deterministic=run.deterministic,
        keep="none",
    )


def _row(planned: Planned, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"arm": planned.arm, "trial": planned.trial.key, "code": planned.trial.code}
    row["rounds"] = len(found)
    for name in ("train_images_per_s", "infer_images_per_s"):
        q1, median, q3 = _quartiles([one[name] for one in found])
        row |= {name: median, f"{name}_q1": q1, f"{name}_q3": q3}
    row["peak_bytes"] = int(statistics.median(one["peak_bytes"] for one in found))
    rest = ("device", "processor", "threads", "batch_size", "precision", "torch")
    now = {"load": os.getloadavg()[0], "measured": datetime.now(UTC)}
    return row | {name: found[-1][name] for name in rest} | now


def _quartiles(values: Sequence[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else list(values) * 3
