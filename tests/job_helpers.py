"""Helpers of tests of executors: jobs, their endings, and waiting for processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitlab.executors import Ended, Executor, Job
from vitlab.plan.values import Trial
from vitlab.spec import Choice, TrainSpec, TrialSpec
from vitlab.store.folders import Store

HERE = Path(__file__).parent
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
    return Job(f"{key}/s0", Store(root).trial(key, "c0de").path, trial, (), 1, "cpu", True, "none")


def ends(executor: Executor, count: int) -> dict[str, Ended]:
    """Return the next endings of jobs, by the keys of their trials."""
    endings: list[Ended] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(endings) < count:
        assert time.monotonic() < deadline, f"only {endings}"
        endings += executor.poll(0.5)
    assert len(endings) == count
    return {ending.job.trial.key: ending for ending in endings}


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
