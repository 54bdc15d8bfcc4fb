"""Contract test of executors: small jobs that end, raise, are killed and are stopped.

See :func:`vitlab.testing.check_component` for the rules, and for what is not checked.
"""

import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from unittest import SkipTest

from vitlab.errors import UserError
from vitlab.executors import Executor, Job, JobEnd, JobTrial, Settings
from vitlab.executors import contract_jobs as jobs
from vitlab.executors.worker import read_log
from vitlab.identity.trial import Trial
from vitlab.registry import ResolvedChoice, slot
from vitlab.spec import RunSpec
from vitlab.store.folders import Keep, Store, TrialFolder
from vitlab.store.locks import is_alive, kill_process
from vitlab.store.result import Ending
from vitlab.testing.assertions import prefix_failures

START_S = 180.0  #: time limit for a worker to start: torch may come from a slow file system
END_S = 15.0  #: time limit for the report of a job that was killed or stopped
GRACE_S = 60.0  #: time that ``cancel`` gives to a worker for its checkpoint
TIMEOUT_S = 0.4  #: timeout of the measured ``poll``
LATE_S = 5.0  #: delay of a ``poll`` on a busy machine
STUDY = """
study: contract-test
base:
  data: {type: synthetic, image_size: 8, train_images: 32, test_images: 8, num_classes: 3}
  model: {type: vit, patch_size: 4, dim: 8, depth: 1, heads: 1}
  train: {steps: 4, batch_size: 4, evaluations: 1}
seeds: 4
"""


def check_executor(choice: ResolvedChoice) -> None:
    """Check that an executor runs, reports and stops jobs as :class:`vitlab.executors.Executor` requires."""
    with tempfile.TemporaryDirectory(prefix="vitlab-", ignore_cleanup_errors=True) as folder:
        trials = _make_trials(Path(folder))
        work = {
            name: Job(
                (JobTrial(name, Store(Path(folder)).folder(trial).path, trial),),
                Settings(device="cpu", keep=Keep(last=False)),
                runner=jobs.__name__,
            )
            for name, trial in zip(("train", "raise", "kill", "stop"), trials, strict=True)
        }
        driver = _Driver(choice)
        try:  # whatever fails, no worker may outlive the test
            if driver.executor.in_driver:
                _check_in_driver_executor(driver, work)
            else:
                _check_job_ends(driver, work, choice)
        finally:
            if not driver.executor.in_driver:
                _kill_workers(work.values())
            with suppress(Exception):
                driver.executor.cancel(0.0)


def _make_trials(folder: Path) -> tuple[Trial, ...]:
    from vitlab.lab import plan_study

    file = folder / "contract-test.yaml"
    file.write_text(STUDY, encoding="utf-8")
    _, plan = plan_study(file, out=folder)
    return tuple(planned.trial for planned in plan.trials)


def _naming_method(method: str) -> AbstractContextManager[None]:
    return prefix_failures(f"{method} raises an exception, which ends the run")


class _Driver:
    """An executor, the jobs it has, and assertions on each of its calls."""

    def __init__(self, choice: ResolvedChoice) -> None:
        run = RunSpec(workers=2, device="cpu")
        try:
            self.executor: Executor = slot("executor").build(choice, run)
        except UserError as error:
            raise SkipTest(f"cannot be used here: {error}") from error
        self.running: dict[Path, Job] = {}
        with _naming_method("slots"):
            self.slots = self.executor.slots
        assert isinstance(self.slots, int) and 1 <= self.slots <= 2, (
            f"slots is {self.slots!r} for run.workers 2; it is at least 1 and at most run.workers"
        )

    def submit(self, job: Job) -> None:
        self.running[job.folder] = job
        with _naming_method("submit"):
            self.executor.submit(job)

    def poll(self, timeout_s: float) -> list[JobEnd]:
        """Return the ended jobs; each of them was running until now."""
        with _naming_method("poll"):
            ends = self.executor.poll(timeout_s)
        for end in ends:
            assert end.job.folder in self.running, (
                f"poll reports the end of job '{end.job.name}' twice, the second time as {end.ending!r}; "
                "every submitted job ends exactly once"
            )
            del self.running[end.job.folder]
            assert end.ending in tuple(Ending), f"a job ended as {end.ending!r}; it is one of {list(Ending)}"
            assert end.ending in (Ending.DONE, Ending.STOPPED) or end.detail.strip(), (
                f"job '{end.job.name}' ended as {end.ending} without a detail; give one sentence"
            )
        # A running trial holds the lock of its folder, however the executor started it.
        locked = sum(TrialFolder(job.folder).is_locked() for job in self.running.values())
        assert locked <= self.slots, f"{locked} jobs run at a time, and slots is {self.slots}"
        return ends

    def ends_until(self, condition: Callable[[], bool], patience_s: float) -> Iterator[JobEnd]:
        """Poll until a condition holds or the time is over, and yield the ends of jobs."""
        deadline = time.monotonic() + patience_s
        while not condition() and time.monotonic() < deadline:
            yield from self.poll(0.2)

    def expect_end(self, job: Job, ending: Ending, rule: str, patience_s: float = START_S) -> JobEnd:
        """Poll until a job ends, and check that it ends in this way; no other job may end meanwhile."""
        ends: list[JobEnd] = []
        for end in self.ends_until(lambda: bool(ends), patience_s):
            what = f"job '{end.job.name}' ended as {end.ending}" + (end.detail and f" ({end.detail})")
            assert end.job.folder == job.folder, f"{what}, although it was still running; only '{job.name}' had ended"
            assert end.ending == ending, f"{what}; {rule}{_last_log_line(job)}"
            ends.append(end)
        assert ends, f"poll reports no end of job '{job.name}' within {patience_s:g} s; {rule}{_last_log_line(job)}"
        return ends[0]

    def await_process_that_waits(self, job: Job) -> str:
        """Poll until a job waits to be stopped, as its log says, and return the name of its process."""
        for end in self.ends_until(lambda: jobs.WAITS in read_log(job.folder), START_S):
            raise AssertionError(
                f"job '{end.job.name}' ended as {end.ending} ({end.detail}), and it does not end by "
                f"itself; workers run the job that was submitted{_last_log_line(end.job)}"
            )
        assert jobs.WAITS in read_log(job.folder), (
            f"job '{job.name}' has not printed '{jobs.WAITS}' to log.txt in job.folder within {START_S:g} s; "
            "workers append their output there"
        )
        return _processes([job])[-1]


def _check_job_ends(driver: _Driver, work: Mapping[str, Job], choice: ResolvedChoice) -> None:
    killed, stopped = work["kill"], work["stop"]
    assert driver.poll(0.0) == [], "poll reports ends before a job was submitted"
    driver.submit(killed)
    if driver.slots > 1:
        driver.submit(stopped)
    victim = driver.await_process_that_waits(killed)
    _check_poll_timeout(driver)
    if victim.partition("/")[0] == socket.gethostname():
        kill_process(victim)
        driver.expect_end(killed, Ending.LOST, "a worker that died is lost, so that the trial is tried again", END_S)
    else:  # on another machine, where it cannot be killed from here
        _check_cancel(driver)
        driver = _Driver(choice)
    if stopped.folder not in driver.running:
        driver.submit(stopped)
    driver.await_process_that_waits(stopped)
    _check_cancel(driver)
    assert TrialFolder(stopped.folder).checkpoint.is_dir(), (
        "there is no checkpoint of a job that cancel stopped; request the stop, and wait up to grace_s"
    )
    driver = _Driver(choice)
    driver.submit(work["raise"])
    end = driver.expect_end(work["raise"], Ending.ERROR, "a job whose trial raises an exception ends as error")
    assert jobs.FAILURE in end.detail, (
        f"the detail of a job that ended as error is '{end.detail}'; return the detail of run_job"
    )
    _check_job_ends_done(driver, replace(stopped, trials=(JobTrial("train", stopped.folder, stopped.trials[0].trial),)))


def _check_poll_timeout(driver: _Driver) -> None:
    """Check that ``poll`` waits for its timeout and no longer; after :data:`LATE_S`, the jobs are killed."""
    timer = threading.Timer(TIMEOUT_S + LATE_S, _kill_workers, [list(driver.running.values())])
    timer.daemon = True
    timer.start()
    began = time.monotonic()
    with _naming_method("poll"):
        ends = driver.executor.poll(TIMEOUT_S)
    took = time.monotonic() - began
    timer.cancel()
    assert TIMEOUT_S / 2 <= took <= TIMEOUT_S + LATE_S, (
        f"poll({TIMEOUT_S:g}) took {took:.2g} s, and no job ended; it waits up to timeout_s for the "
        "first end, and no longer"
    )
    assert ends == [], f"poll reports {ends}, and no job has ended"


def _check_cancel(driver: _Driver) -> None:
    """Cancel an executor, and check that its jobs end as stopped and leave no process."""
    cancelled = list(driver.running.values())
    with _naming_method("cancel"):
        driver.executor.cancel(GRACE_S)
    deadline = time.monotonic() + END_S
    for end in driver.ends_until(lambda: not driver.running, END_S):
        assert end.ending == Ending.STOPPED, (
            f"job '{end.job.name}' ended as {end.ending} ({end.detail}) after cancel; a job that "
            f"writes a checkpoint within grace_s ends as stopped{_last_log_line(end.job)}"
        )
    names = ", ".join(job.name for job in driver.running.values())
    assert not names, (
        f"poll reports no end of job '{names}' within "
        f"{END_S:g} s of cancel; cancel stops every job, and poll then reports their endings"
    )
    # Processes are known by what they printed, as the executor could hide one that it has lost.
    for name in _processes(cancelled):
        while is_alive(name):
            assert time.monotonic() < deadline, (
                f"process {name.split('/')[1]} of a job still runs {END_S:g} s after cancel; cancel leaves no process"
            )
            time.sleep(0.02)
    driver.poll(0.2)  # no further end


def _check_job_ends_done(driver: _Driver, job: Job) -> None:
    """Check that a job ends once as done, with its result in the store."""
    driver.submit(job)
    driver.expect_end(job, Ending.DONE, "a job whose trial has a result ends as done")
    assert TrialFolder(job.folder).done(), (
        f"job '{job.name}' ended as done, and its trial has no result in the store; report what run_job returned"
    )
    driver.poll(0.2)  # no further end


def _check_in_driver_executor(driver: _Driver, work: Mapping[str, Job]) -> None:
    """Check an executor whose ``poll`` runs the jobs in this process."""
    driver.submit(work["stop"])
    with _naming_method("cancel"):
        driver.executor.cancel(GRACE_S)
    driver.expect_end(work["stop"], Ending.STOPPED, "cancel drops a job that has not begun, as stopped", END_S)
    driver.submit(work["raise"])
    driver.expect_end(work["raise"], Ending.ERROR, "a job whose trial raises an exception ends as error")
    _check_job_ends_done(driver, work["train"])


def _processes(work: Iterable[Job]) -> list[str]:
    """Return the processes that ran jobs, by their logs."""
    return re.findall(rf"^{re.escape(jobs.MARK)}(\S+)$", "\n".join(read_log(job.folder) for job in work), re.MULTILINE)


def _kill_workers(work: Iterable[Job]) -> None:
    for name in _processes(work):
        kill_process(name)


def _last_log_line(job: Job) -> str:
    lines = [
        line for line in read_log(job.folder).splitlines() if line.strip() and not line.startswith("contract test: ")
    ]
    return f". Its log.txt ends with: {lines[-1][:300]}" if lines else ""
