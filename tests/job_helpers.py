"""Helpers of tests of executors: jobs, their endings, and waiting for processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitlab.errors import TrialFailed
from vitlab.executors import Executor, Job, JobEnd, JobTrial, Settings
from vitlab.planning.values import Trial
from vitlab.runner.job import Deferral
from vitlab.spec import Choice, TrainSpec, TrialSpec
from vitlab.store.folders import Keep, Store, TrialFolder
from vitlab.store.locks import Busy
from vitlab.store.result import Ending, TrialResult

HERE = Path(__file__).parent
LIGHT = HERE / "light"  #: on the path of processes whose fork servers need no torch
PATIENCE_S = 240.0  #: for a loaded machine; only failures take this long


def job(root: Path, do: str, name: str = "", **spec: Any) -> Job:
    """Return a job for ``executor_runner``."""
    key = name or do
    trial = Trial(
        spec=TrialSpec(data=Choice(do, spec), model=Choice("vit"), train=TrainSpec(steps=1)),
        seeds={},
        origins=(),
        data=None,
        key=key,
        code="c0de",
    )
    return Job(
        (JobTrial(f"{key}/s0", Store(root).trial(key, "c0de").path, trial),),
        Settings(device="cpu", keep=Keep(last=False)),
        runner="executor_runner",
    )


def with_settings(job: Job, **changes: Any) -> Job:
    """Return the job with some of its settings changed."""
    return replace(job, settings=replace(job.settings, **changes))


def run_trial(
    trial: Trial, folder: TrialFolder, settings: Settings, stop: Callable[[], bool] = lambda: False
) -> TrialResult | None:
    """Run one trial by its engine; return its result, or None if it was stopped, and raise if it failed."""
    from vitlab.runner.execution import execute  # not above, since it imports torch

    [end] = execute(Job((JobTrial(trial.key, folder.path, trial),), settings), stop)
    if end.ending == Deferral.BUSY:
        raise Busy(end.detail)
    if end.ending not in (Ending.DONE, Ending.STOPPED):
        raise TrialFailed(f"{end.ending}: {end.detail}")
    result = folder.result()
    assert (result is None) == (end.ending == Ending.STOPPED)
    return result


def run_spec(
    folder: TrialFolder,
    key: str,
    spec: Mapping[str, Any],
    seeds: Mapping[str, int],
    settings: Settings,
    needs: Mapping[str, str] = {},
) -> TrialResult:
    """Run the trial of a spec by the loop, which must end well, and return its result."""
    from vitlab.data.prepare import data_info  # these import torch
    from vitlab.identity.code import modules_of_spec, trial_code_digest

    resolved = TrialSpec.model_validate(spec)
    code = trial_code_digest(modules_of_spec(resolved), needs)
    trial = Trial(resolved, seeds, (), data_info(resolved.data).content, needs, key=key, code=code)
    result = run_trial(trial, folder, settings)
    assert result is not None and result.status == "done"
    return result


def run_together(
    work: Sequence[tuple[Trial, TrialFolder]], settings: Settings, stop: Callable[[], bool] = lambda: False
) -> None:
    """Run trials together, by ``vmap`` unless the settings name an engine; raise if one was taken over."""
    from vitlab.runner.execution import execute

    engine = "vmap" if settings.engine == "loop" else settings.engine
    trials = tuple(JobTrial(trial.key, folder.path, trial) for trial, folder in work)
    for end in execute(Job(trials, replace(settings, engine=engine)), stop):
        if end.ending == Deferral.BUSY:
            raise Busy(end.detail)


def ends(executor: Executor, count: int) -> dict[str, JobEnd]:
    """Return the next endings of jobs, by the keys of their trials."""
    endings: list[JobEnd] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(endings) < count:
        assert time.monotonic() < deadline, f"only {endings}"
        endings += executor.poll(0.5)
    assert len(endings) == count
    return {ending.job.trials[0].trial.key: ending for ending in endings}


def until(what: Callable[[], Any]) -> Any:
    """Call the function until it returns something true, and return that."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := what()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def processes(sign: str, file: str = "cmdline") -> list[int]:
    """Return the processes whose command line or environment contains the text."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if sign.encode() in (folder / file).read_bytes() and alive(int(folder.name)):
                pids.append(int(folder.name))
        except OSError:
            continue
    return pids
