"""Replacement of ``vitlab.runner.execution`` in tests of executors: the spec says what a trial does."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from vitlab.errors import Refused
from vitlab.planning.values import Trial
from vitlab.runner import fork_server
from vitlab.runner.job import Deferral, Job, Settings, TrialEnd
from vitlab.store.files import write_json
from vitlab.store.folders import TrialFolder
from vitlab.store.locks import Busy
from vitlab.store.result import Circumstances, Ending, Outcome, TrialResult


def result(trial: Trial, status: str = "done", failure: str = "", wall_s: float = 0.0) -> TrialResult:
    return TrialResult(
        key=trial.key,
        code=trial.code,
        status=status,  # type: ignore[arg-type]
        outcome=Outcome({"val/accuracy": 1.0}, (), "", 1, 1),
        circumstances=Circumstances(time.time(), wall_s, "here", 1, 1, 1, 1, {}, {}),
        failure=failure,
    )


def execute(job: Job, stop: Callable[[], bool]) -> list[TrialEnd]:
    ends = []
    for item in job.trials:
        try:
            ends.append(end_of(run_trial(item.trial, TrialFolder(item.folder), job.settings, stop)))
        except Busy as error:
            ends.append(TrialEnd(Deferral.BUSY, str(error)))
    return ends


def end_of(result: TrialResult | None) -> TrialEnd:
    return TrialEnd(Ending.STOPPED) if result is None else TrialEnd(Ending.DONE, result.failure)


def run_trial(trial: Trial, folder: TrialFolder, run: Settings, stop: Callable[[], bool]) -> TrialResult | None:
    if trial.spec.data.type == "meet":
        own = [os.environ[name] for name in ("GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")]
        write_json(folder.path / f"node{own[0]}.json", own)
        while not all((folder.path / f"node{node}.json").exists() for node in (0, 1)):
            time.sleep(0.02)
    with folder.lease():
        match trial.spec.data.type:
            case "finish" if (stored := folder.result()) is not None:  # another process has trained it meanwhile
                return stored
            case "finish":
                print("said by the trial")
                os.system("echo said by a child of it")
                affinity = sorted(os.sched_getaffinity(0))
                threads = os.environ["OMP_NUM_THREADS"], os.environ.get("CUDA_VISIBLE_DEVICES")
                around = {"pid": os.getpid(), "cores": affinity, "environment": threads, "threads": run.threads}
                around["torch"] = "torch" in sys.modules
                around["status"] = Path("/proc/self/status").read_text()
                write_json(folder.path / "around.json", around)
                time.sleep(trial.spec.data.options.get("for", 0.0))
            case "diverge":
                folder.write_result(result(trial, "diverged", "loss is not finite at step 3"))
                return folder.result()
            case "refuse":
                raise Refused("the code here is not the code this trial was planned under")
            case "starve":
                raise MemoryError("the host has none left")
            case "step":
                for _ in range(trial.spec.data.options.get("steps", 2)):
                    if stop():
                        return None
                    time.sleep(trial.spec.data.options.get("for", 0.0))
            case "raise":
                raise RuntimeError("no such\nlayer")
            case "leave":
                sys.exit("guest code left")
            case "exit":
                os._exit(9)
            case "crash":
                ctypes.string_at(0)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "fork":
                if os.fork() == 0:  # it outlives its parent and inherits its open files
                    time.sleep(3)
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGKILL)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "train":
                write_json(folder.path / "pid.json", os.getpid())
                while not stop():
                    time.sleep(0.02)
                (folder.path / "checkpoint").mkdir(exist_ok=True)
                return None
            case "resume":
                write_json(folder.path / "pid.json", os.getpid())
                while not (folder.path / "checkpoint").exists():
                    if stop():
                        (folder.path / "checkpoint").mkdir()
                        return None
                    time.sleep(0.02)
            case "ignore":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                fork_server.ORPHAN_S = 0.5
                write_json(folder.path / "pid.json", os.getpid())
                while True:
                    time.sleep(60)
        folder.write_result(result(trial))
    return folder.result()
