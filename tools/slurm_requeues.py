"""A detached study on a simulated Slurm: log-out, time limits of packs and driver reached twice, a controller restarts.

    python tools/slurm_requeues.py

The Slurm is that of ``tests/test_slurm.py``: shell scripts that run jobs on this machine.  Afterwards all results are
compared, to the bit, with those of a local run in a terminal, and of a local ``--detach``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import yaml
from ray_autoscaling import STUDY, drive, finished, outcomes, until

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from job_helpers import processes
from test_slurm import PROGRAMS, of_jobs, packs

SLURM = {"type": "slurm", "pack": 1, "jobs": 2, "minutes": 5}
DRIVER = "4711"  #: the simulated Slurm's first job


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="vls-", dir="/tmp") as place:
        folder = Path(place)
        study = folder / "scaled.yaml"
        study.write_text(yaml.safe_dump(STUDY))
        drive(study, folder / "local").wait()
        trials = finished(folder / "local")
        detach_and_log_out(study, folder / "detached", "local")
        until(lambda: done(folder / "detached", trials), "the end of a local study after the log-out")
        fake, out = folder / "slurm", folder / "out"
        log = out / "studies/scaled/driver.log"
        start_slurm(fake)
        try:
            detach_and_log_out(study, out, yaml.safe_dump(SLURM, default_flow_style=True, width=1000).strip())
            for times in (1, 2):
                until(lambda times=times: end_time(fake, out, times), "a trial in training")
                until(
                    lambda times=times: requeued(fake, lambda job: job != DRIVER) == times,
                    "a pack that requeues itself",
                )
                os.kill(processes(f"bash\0{fake}/script.{DRIVER}")[0], signal.SIGUSR1)
                until(lambda times=times: requeued(fake, lambda job: job == DRIVER) == times, "a driver that does so")
                print(
                    f"time limits of a pack and of the driver: {times}; trials that have ended: {finished(out)}",
                    flush=True,
                )
            (fake / "restarts").touch()
            until(lambda: "does not answer" in log.read_text(), "a driver that waits for the controller")
            (fake / "restarts").unlink()
            until(lambda: done(out, trials), "the end of the study")
        finally:
            print(f"-- what the drivers said\n{log.read_text()}--")
            left = of_jobs(fake)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        expected = outcomes(folder / "local")
        equal = [outcomes(each) == expected for each in (out, folder / "detached")]
        print(
            f"{len(packs(out))} packs; processes left: {len(left)}; equal to the bit: Slurm {equal[0]}, local {equal[1]}"
        )
        sys.exit(not all(equal) or bool(left))


def start_slurm(fake: Path) -> None:
    """Put the programs of a simulated Slurm before all others."""
    fake.mkdir()
    for name, text in PROGRAMS.items():
        (fake / name).write_text("#!/bin/bash\n" + text)
        (fake / name).chmod(0o755)
    os.environ |= {"FAKE": str(fake), "PATH": f"{fake}{os.pathsep}{os.environ['PATH']}"}


def detach_and_log_out(study: Path, out: Path, executor: str) -> None:
    """Detach a run in a terminal's session, and end the session as a log-out does."""
    words = [sys.executable, "-m", "vitlab", "run", str(study), "--out", str(out), "--detach"]
    words += ["--set", f"run.executor={executor}"]
    said = out.with_suffix(".said")
    with open(said, "wb") as output:
        shell = ["bash", "-c", '"$@"; sleep 600', "bash", *words]
        session = subprocess.Popen(shell, stdout=output, stderr=output, start_new_session=True)
        until(lambda: "\nstop " in said.read_text(), f"a detached run: {said.read_text()}")
        os.killpg(session.pid, signal.SIGHUP)
        session.wait()
    print(said.read_text(), flush=True)


def done(out: Path, trials: int) -> bool:
    """Return whether all trials have ended and the report is written."""
    return finished(out) == trials and (out / "studies/scaled/report/report.html").exists()


def end_time(fake: Path, out: Path, times: int) -> bool:
    """Signal the pack of a trial that trains for the ``times``-th time, as Slurm does; return False if there is none."""
    for journal in out.glob("trials/*/*/events.jsonl"):
        events = [json.loads(line) for line in journal.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        starts = [event for event in events if event["kind"] == "start"]
        if len(starts) == times and events[-1]["kind"] == "metrics" and not (journal.parent / "result.json").exists():
            jobs = {pid: job_id(pid) for pid in of_jobs(fake)}
            own = jobs.get(starts[-1]["pid"])
            for pid in (pid for pid, job in jobs.items() if own and job == own):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR2)
            return bool(own)
    return False


def job_id(pid: int) -> bytes:
    """Return the variable of a process that names its Slurm job; empty if the process has ended."""
    with suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return next(each for each in variables if each.startswith(b"SLURM_JOB_ID="))
    return b""


def requeued(fake: Path, which: Callable[[str], bool]) -> int:
    """Return how often jobs have been put back into the queue."""
    file = fake / "requeued"
    return sum(which(line.split()[-1]) for line in file.read_text().splitlines()) if file.exists() else 0


if __name__ == "__main__":
    main()
