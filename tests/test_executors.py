"""Tests of executors: rights of a job, and leftovers of dead jobs and drivers."""

from __future__ import annotations

import fcntl
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from executor_runner import result
from job_helpers import HERE, LIGHT, PATIENCE_S, alive, ends, job, until, with_settings

from vitlab import registry
from vitlab.driver.scheduler import Schedule
from vitlab.driver.session import Session
from vitlab.errors import UserError
from vitlab.executors import Executor, base, machine, worker
from vitlab.executors.base import Job, JobEnd
from vitlab.executors.inline import Inline
from vitlab.executors.local import Local
from vitlab.planning.values import Planned
from vitlab.runner import fork_server
from vitlab.spec import Choice, RunSpec
from vitlab.store import locks
from vitlab.store.files import read_json
from vitlab.store.folders import Store, TrialFolder
from vitlab.store.locks import unique_process_name
from vitlab.store.result import Ending


@pytest.fixture
def local() -> Iterator[Callable[..., Local]]:
    executors: list[Local] = []

    def make(**run: Any) -> Local:
        executors.append(Local(RunSpec(**{"device": "cpu", "workers": 2, **run})))
        return executors[-1]

    yield make
    for executor in executors:
        executor.cancel(0.0)
        assert not executor._running


# -- endings of jobs --------------------------------------------------------------------------------------------------


def test_each_diverged_trial_of_a_job_has_its_reason(tmp_path: Path) -> None:
    jobs = [job(tmp_path, do) for do in ("finish", "diverge")]
    executor = Inline(RunSpec(device="cpu", workers=1))
    executor.submit(replace(jobs[0], trials=tuple(trial for each in jobs for trial in each.trials)))
    [end] = ends(executor, 1).values()
    assert base.read_trial_endings(end) == [
        (jobs[0].folder, "done", ""),
        (jobs[1].folder, "done", "loss is not finite at step 3"),
    ]


@pytest.mark.parametrize("kind", [Inline, Local])
def test_endings_reported_by_trial(kind: type[Executor], tmp_path: Path) -> None:
    executor = kind(RunSpec(device="cpu", workers=1))
    endings = {}
    for do in ("finish", "diverge", "raise", "leave"):
        executor.submit(job(tmp_path, do))
        endings |= ends(executor, 1)
    assert {do: ending.ending for do, ending in endings.items()} == {
        "finish": "done",
        "diverge": "done",
        "raise": "error",
        "leave": "error",
    }
    assert endings["diverge"].detail == "loss is not finite at step 3"
    assert endings["raise"].detail == "RuntimeError: no such layer"
    assert endings["leave"].detail == "SystemExit: guest code left"
    folder = TrialFolder(endings["raise"].job.folder)
    assert folder.failure().failure == "RuntimeError: no such layer"
    assert "in run_trial" in read_json(folder.path / "failure.json")["traceback"]
    assert executor.poll(0.0) == []


def test_dying_worker_leaves_others_running(local: Callable[..., Local], tmp_path: Path) -> None:
    executor = local(workers=4)
    for do in ("train", "exit", "crash", "kill"):
        executor.submit(job(tmp_path, do))
    endings = ends(executor, 3)
    assert {ending.ending for ending in endings.values()} == {"lost"}
    assert "exit code 9" in endings["exit"].detail
    assert "killed by signal 9" in endings["kill"].detail and "memory" in endings["kill"].detail
    assert "SIGSEGV" in endings["crash"].detail
    assert "Segmentation fault" in (endings["crash"].job.folder / "log.txt").read_text()
    assert not any(TrialFolder(ending.job.folder).is_locked() for ending in endings.values())
    until((job(tmp_path, "train").folder / "pid.json").exists)
    executor.cancel(PATIENCE_S)
    (survivor,) = executor.poll(0.0)
    assert (survivor.job.trials[0].trial.key, survivor.ending) == ("train", "stopped")
    assert (survivor.job.folder / "checkpoint").is_dir()


def test_dead_worker_with_living_child_is_lost(local: Callable[..., Local], tmp_path: Path) -> None:
    """The child holds the worker's end of the pipe, so that its closing is not noticed."""
    executor = local()
    executor.submit(job(tmp_path, "fork"))
    assert ends(executor, 1)["fork"].ending == "lost"


def test_stopped_worker_past_timeout_is_killed(
    local: Callable[..., Local], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "FROZEN_S", 0.3)
    monkeypatch.setattr(base, "START_S", 5.0)
    executor = local()
    work = replace(job(tmp_path, "freeze"), timeout_s=0.2)
    executor.submit(work)
    ending = ends(executor, 1)["freeze"]
    assert ending.ending == "timeout" and "stopped or stuck, was killed" in ending.detail
    assert not TrialFolder(work.folder).is_locked()


@pytest.mark.slow
def test_waiting_worker_does_not_time_out(
    local: Callable[..., Local], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "FROZEN_S", 0.2)
    executor = local()
    work = replace(job(tmp_path, "finish"), timeout_s=0.1)
    lock = hold(TrialFolder(work.folder))
    executor.submit(work)
    until((work.folder / "log.txt").exists)
    assert executor.poll(1.5) == []
    lock.close()
    assert ends(executor, 1)["finish"].ending == "done"


def test_unwritable_failure_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TrialFolder, "write_failure", full)
    executor = Inline(RunSpec())
    executor.submit(job(tmp_path, "raise"))
    assert ends(executor, 1)["raise"].detail == "RuntimeError: no such layer"


def test_lost_trial_can_be_resubmitted(local: Callable[..., Local], tmp_path: Path) -> None:
    executor = local()
    executor.submit(job(tmp_path, "kill", name="k"))
    assert ends(executor, 1)["k"].ending == "lost"
    executor.submit(job(tmp_path, "finish", name="k"))
    assert ends(executor, 1)["k"].ending == "done"


def test_trial_with_result_is_not_retrained(tmp_path: Path) -> None:
    executor = Inline(RunSpec())
    for do in ("finish", "raise"):
        executor.submit(job(tmp_path, do, name="k"))
        assert ends(executor, 1)["k"].ending == "done"


# -- placement --------------------------------------------------------------------------------------------------------


def test_workers_are_isolated(local: Callable[..., Local], tmp_path: Path) -> None:
    executor = local(workers=1)
    around = []
    for name in ("a", "b"):
        work = job(tmp_path, "finish", name=name)
        executor.submit(work)
        assert ends(executor, 1)[name].ending == "done"
        around.append(read_json(work.folder / "around.json"))
        log = (work.folder / "log.txt").read_text()
        assert "said by the trial\n" in log and "said by a child of it\n" in log
    pids = {where["pid"] for where in around}
    assert len(pids) == 2 and os.getpid() not in pids
    assert around[0]["cores"] == machine.usable_cores()  # one worker has the machine
    assert around[0]["environment"] == ["1", ""]
    assert around[0]["torch"]  # imported by the fork server
    ignored = int(around[0]["status"].split("SigIgn:")[1].split()[0], 16)
    assert ignored & 1 << (signal.SIGINT - 1)


@pytest.mark.skipif(len(machine.usable_cores()) < 2, reason="one core cannot be shared out")
def test_workers_respect_core_share(local: Callable[..., Local], tmp_path: Path) -> None:
    executor = local(workers=2)
    for name in ("a", "b"):
        executor.submit(job(tmp_path, "finish", name=name, **{"for": 0.5}))
    endings = ends(executor, 2)
    shares = [set(read_json(ending.job.folder / "around.json")["cores"]) for ending in endings.values()]
    assert not shares[0] & shares[1]
    assert shares[0] | shares[1] == set(machine.usable_cores())


def test_thread_count_reaches_worker(local: Callable[..., Local], tmp_path: Path) -> None:
    executor = local(workers=1, threads=3)
    work = with_settings(job(tmp_path, "finish"), threads=3)
    executor.submit(work)
    ends(executor, 1)
    around = read_json(work.folder / "around.json")
    assert (around["environment"][0], around["threads"]) == ("3", 3)


def test_slots_fit_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: list(range(8)))
    monkeypatch.setattr(machine, "count_usable_cores", lambda: 6)
    monkeypatch.setattr(machine, "usable_gpus", lambda: ["GPU-a", "GPU-b"])
    assert Local(RunSpec(device="cpu")).slots == 6
    assert Local(RunSpec(device="cpu", threads=4)).slots == 1
    assert Local(RunSpec(device="cpu", threads=64)).slots == 1
    assert Local(RunSpec(device="auto")).slots == 2
    busy = Local(RunSpec(device="cuda", workers=3))
    assert busy.slots == 3
    assert busy._share == 0.5
    assert Local(RunSpec(device="cpu", workers=4))._shares == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert not any(Local(RunSpec(device="cpu", workers=4, threads=2))._shares)  # more threads than cores: no pinning
    monkeypatch.setattr(machine, "usable_gpus", list)
    with pytest.raises(UserError, match=r"run\.device is cuda, and this machine has no GPU"):
        Local(RunSpec(device="cuda"))


class FakeMultiprocessing:
    """Replacement of multiprocessing: workers start and end when the test says so."""

    def __init__(self) -> None:
        self.workers: dict[Path, FakeWorker] = {}

    def process(self, target: Any, args: Any, name: str) -> tuple[FakeWorker, Any]:
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            self.workers[args[0].folder] = FakeWorker(args[1]["CUDA_VISIBLE_DEVICES"], theirs)
        return self.workers[args[0].folder], ours


class FakeWorker:
    exitcode = 0

    def __init__(self, gpu: str, pipe: Any) -> None:
        self.gpu = gpu
        self.sentinel, self._life = os.pipe()
        self.pipe = os.dup(pipe.fileno())
        self.begun = False

    def say(self, text: bytes) -> None:
        connection = multiprocessing.connection.Connection(os.dup(self.pipe))
        connection.send_bytes(text)
        connection.close()

    def end(self) -> None:
        self.say(b'["done", ""]')
        os.close(self.pipe)
        os.close(self._life)

    def join(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        os.close(self.sentinel)


def test_two_hundred_random_gpu_requests_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every worker gets one GPU, no GPU is over-committed, and a trial in its first step blocks the next."""
    gpus = ["GPU-a", "GPU-b", "5"]
    monkeypatch.setattr(machine, "usable_gpus", lambda: gpus)
    rng = random.Random(0)
    executor = Local(RunSpec(device="cuda", resources={"gpu": 0.25}))
    assert executor.slots == 12
    made = FakeMultiprocessing()
    monkeypatch.setattr(fork_server, "start_process", made.process)
    shares: dict[Path, float] = {}
    for number in range(200):
        work = replace(
            with_settings(job(tmp_path, "finish", name=f"t{number}"), device="cuda"),
            gpu=rng.choice([0.1, 0.25, 0.5, 1.0]),
        )
        shares[work.folder] = work.gpu or 0.0
        executor.submit(work)
    folders: set[Path] = set()
    finished = 0
    most: dict[str, float] = dict.fromkeys(gpus, 0.0)
    while finished < 200:
        for gpu in gpus:
            on = [folder for folder, worker in made.workers.items() if worker.gpu == gpu]
            total = sum(shares[folder] for folder in on)
            assert total <= 1.0 + 1e-9
            most[gpu] = max(most[gpu], total)
            assert sum(not made.workers[folder].begun for folder in on) <= 1
        assert all(worker.gpu in gpus for worker in made.workers.values())
        folders |= set(made.workers)
        folder = rng.choice(list(made.workers))
        worker = made.workers[folder]
        if not worker.begun and rng.random() < 0.9:
            worker.begun = True
            worker.say(b'"begun"')
        elif rng.random() < 0.4:
            made.workers.pop(folder).end()
        finished += len(executor.poll(0.0))
    assert len(folders) == 200 and all(total > 0.9 for total in most.values())


def test_worker_sees_only_its_gpu(local: Callable[..., Local], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "usable_gpus", lambda: ["GPU-a", "GPU-b"])
    executor = local(device="auto", workers=None, resources={"gpu": 0.5, "cpu": 1})
    for name in ("a", "b", "c"):
        executor.submit(with_settings(job(tmp_path, "finish", name=name, **{"for": 0.2}), device="auto"))
    executor.submit(job(tmp_path, "finish", name="on the cpu"))
    endings = ends(executor, 4)
    visible = {name: read_json(ending.job.folder / "around.json")["environment"][1] for name, ending in endings.items()}
    assert visible.pop("on the cpu") == ""
    assert sorted(visible.values())[0] == "GPU-a" and "GPU-b" in visible.values() and len(visible) == 3


def test_shares_of_gpus_and_cores_limit_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_gpus", lambda: ["GPU-a", "GPU-b"])
    assert Local(RunSpec(resources={"gpu": 0.25})).slots == 8
    monkeypatch.setattr(machine, "count_usable_cores", lambda: 6)
    assert Local(RunSpec(resources={"gpu": 0.1, "cpu": 2})).slots == 3


def test_only_a_share_of_a_gpu_grows_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    work = with_settings(job(tmp_path, "finish"), device="auto")
    for gpus, larger in (([], []), (["GPU-a"], [0.5, 1.0])):
        monkeypatch.setattr(machine, "usable_gpus", lambda gpus=gpus: gpus)
        executor, shares, each = Local(RunSpec(resources={"gpu": 0.25})), list[float | None](), work
        while (more := executor.with_more_memory(each)) is not None:
            shares.append(more.gpu)
            each = more
        assert shares == larger


def test_gpus_are_counted_without_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_is_cuda_build", lambda: True)
    for visible, gpus in (("", []), ("3, 1,-1,2", ["3", "1"]), ("GPU-8932f937-d72c", ["GPU-8932f937-d72c"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert machine.usable_gpus() == gpus
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\ncat <<END\n"
        "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d)\n"
        "  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4)\n"
        "  MIG 3g.20gb     Device  1: (UUID: MIG-cba663e8-9bed)\n"
        "GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-6b1d02a7-a5b9)\nEND\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert machine.usable_gpus() == ["MIG-c6d4f1ef-42e4", "MIG-cba663e8-9bed", "GPU-6b1d02a7-a5b9"]
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert machine.usable_gpus() == []
    monkeypatch.setattr(machine, "_is_cuda_build", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert machine.usable_gpus() == []


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("cpu.max", "150000 100000\n", 2),
        ("cpu.max", "50000 100000\n", 1),
        ("cpu.max", "max 100000\n", 64),
        ("cpu/cpu.cfs_quota_us", "300000\n", 3),
        ("cpu/cpu.cfs_quota_us", "-1\n", 64),
        ("nothing", "", 64),
    ],
)
def test_container_limits_are_respected(
    file: str, text: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: list(range(64)))
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / file).write_text(text)
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert machine.count_usable_cores() == expected


@pytest.mark.slow
def test_fork_server_has_one_thread_and_no_plugin_and_trial_imports_neither_compiler_nor_pandas(tmp_path: Path) -> None:
    """In one process, for the import of torch takes most of the time."""
    file = tmp_path / "steps.yaml"
    file.write_text(
        "study: steps\nseeds: 2\nbase:\n"
        "  data: {type: synthetic, image_size: 8, train_images: 64, test_images: 16, validation: 0.25}\n"
        "  model: {type: vit, patch_size: 4, dim: 8, depth: 1, heads: 2}\n"
        "  train: {steps: 1, batch_size: 16}\n"
    )
    script = """
        import signal, sys
        import vitlab.runner.preload
        status = open("/proc/self/status").read()
        print(status.split("Threads:")[1].split()[0], "torch" in sys.modules,
              signal.getsignal(signal.SIGINT) is signal.SIG_IGN, any(m in sys.modules for m in ("mlflow", "pandas")),
              sys.modules["torch"].cuda.is_initialized(),
              sys.modules["vitlab.runner.circumstances"].versions.cache_info().currsize)
        from pathlib import Path
        from vitlab.executors import Job, JobTrial, Settings
        from vitlab.lab import plan_study
        from vitlab.runner.execution import execute
        _, plan = plan_study(sys.argv[1])
        for engine in ("loop", "vmap"):
            folders = [Path(sys.argv[1]).parent / engine / item.trial.key / "code" for item in plan.trials]
            trials = [JobTrial("", folder, item.trial) for folder, item in zip(folders, plan.trials)]
            ends = execute(Job(tuple(trials), Settings(engine=engine)))
            slow = [name for name in ("torch._dynamo", "pandas") if name in sys.modules]
            print([end.ending.value for end in ends], slow)
    """
    line = [sys.executable, "-c", textwrap.dedent(script), str(file)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}  # without sizes of models
    out = subprocess.run(line, capture_output=True, text=True, check=True, env=environment)
    assert out.stdout.splitlines() == ["1 True True False False 1", *["['done', 'done'] []"] * 2]


# -- stopping ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_cancel_kills_unresponsive_worker(local: Callable[..., Local], tmp_path: Path) -> None:
    executor = local()
    work = [job(tmp_path, "train"), job(tmp_path, "ignore")]
    for item in work:
        executor.submit(item)
    pids = [until(lambda item=item: read_json(item.folder / "pid.json")) for item in work]
    executor.cancel(1.0)
    assert not any(map(alive, pids))
    endings = {ending.job.trials[0].trial.key: ending.ending for ending in executor.poll(0.0)}
    assert endings == {"train": "stopped", "ignore": "lost"}
    assert not any(TrialFolder(item.folder).is_locked() for item in work)


def test_ctrl_c_stops_inline_trial_gracefully(tmp_path: Path) -> None:
    executor = Inline(RunSpec())
    for name in ("a", "b"):
        executor.submit(job(tmp_path, "train", name=name))
    before = signal.getsignal(signal.SIGINT)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        executor.poll(0.0)
    assert signal.getsignal(signal.SIGINT) is before
    executor.cancel(1.0)
    assert {ending.job.trials[0].trial.key: ending.ending for ending in executor.poll(0.0)} == {
        "a": "stopped",
        "b": "stopped",
    }
    assert (job(tmp_path, "train", name="a").folder / "checkpoint").is_dir()
    assert not job(tmp_path, "train", name="b").folder.exists()


DRIVER = """
import sys, time
sys.path.insert(0, {here!r})
import test_executors as tests   # without the guard of __main__, as users write scripts
from pathlib import Path
print("script runs", flush=True)
executor = tests.Local(tests.RunSpec(device="cpu", workers=1))
executor.submit(tests.job(Path({root!r}), {do!r}))
print("submitted", flush=True)
{then}
"""


def start_driver(root: Path, do: str, then: str) -> tuple[subprocess.Popen[str], int]:
    script = root / "driver.py"
    script.write_text(DRIVER.format(here=str(HERE), root=str(root), do=do, then=then))
    path = os.pathsep.join([str(LIGHT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    pid = until(lambda: read_json(job(root, do).folder / "pid.json"))
    return process, pid


def test_workers_of_killed_driver_write_checkpoint_and_exit(local: Callable[..., Local], tmp_path: Path) -> None:
    driver, pid = start_driver(tmp_path, "train", "time.sleep(600)")
    work = job(tmp_path, "train")
    assert TrialFolder(work.folder).is_locked()
    driver.kill()
    out, _ = driver.communicate()
    assert out.count("script runs") == 1  # not again in the worker
    until(lambda: not alive(pid))
    assert not TrialFolder(work.folder).is_locked()
    assert (work.folder / "checkpoint").is_dir()
    assert "the driver has died; the trial is stopped" in (work.folder / "log.txt").read_text()


@pytest.mark.slow
def test_unresponsive_worker_soon_follows_killed_driver(tmp_path: Path) -> None:
    driver, pid = start_driver(tmp_path, "ignore", "time.sleep(600)")
    driver.kill()
    driver.communicate()
    until(lambda: not alive(pid))
    assert not TrialFolder(job(tmp_path, "ignore").folder).is_locked()


@pytest.mark.slow
def test_exiting_driver_leaves_no_worker(tmp_path: Path) -> None:
    driver, pid = start_driver(tmp_path, "train", f"tests.until((Path('{tmp_path}') / 'go').exists)")
    (tmp_path / "go").touch()
    _, err = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 0, err
    assert not alive(pid)
    assert (job(tmp_path, "train").folder / "checkpoint").is_dir()


def test_sigterm_preempts(local: Callable[..., Local], tmp_path: Path) -> None:
    executor = local()
    work = job(tmp_path, "train")
    executor.submit(work)
    pid = until(lambda: read_json(work.folder / "pid.json"))
    for number in (signal.SIGUSR2, signal.SIGTERM):  # as Slurm sends them to all processes of a job
        os.kill(pid, number)
    assert ends(executor, 1)["train"].ending == "preempted"
    assert (work.folder / "checkpoint").is_dir()


def test_ctrl_c_is_handled_by_driver_only(local: Callable[..., Local], tmp_path: Path) -> None:
    executor = local()
    work = job(tmp_path, "train")
    executor.submit(work)
    pid = until(lambda: read_json(work.folder / "pid.json"))
    os.kill(pid, signal.SIGINT)
    assert executor.poll(0.3) == [] and alive(pid)


def test_journal_of_earlier_attempt_survives_joining_a_batch(tmp_path: Path) -> None:
    first, second = job(tmp_path, "first"), job(tmp_path, "second")
    log = second.folder / "log.txt"
    log.parent.mkdir(parents=True)
    log.write_text("Segmentation fault\n")
    worker.refer_to_shared_log(replace(first, trials=first.trials + second.trials))
    assert log.read_text().splitlines() == [
        "Segmentation fault",
        f"trained along with first/s0, whose log is {first.folder / 'log.txt'}",
    ]


# -- takeover ---------------------------------------------------------------------------------------------------------


def hold(folder: TrialFolder) -> Any:
    folder.path.mkdir(parents=True)
    lock = open(folder.path / "lock", "a")  # noqa: SIM115
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def test_workers_wait_for_trials_of_orphans(local: Callable[..., Local], tmp_path: Path) -> None:
    executor = local()
    kept, left = (job(tmp_path, "finish", name=name) for name in ("kept", "left"))
    locks = [hold(TrialFolder(item.folder)) for item in (kept, left)]
    for item in (kept, left):
        executor.submit(item)
    assert executor.poll(0.3) == []
    TrialFolder(kept.folder).write_result(result(kept.trials[0].trial))
    before = TrialFolder(kept.folder).result()
    for lock in locks:
        lock.close()
    endings = ends(executor, 2)
    assert (endings["kept"].ending, endings["left"].ending) == ("done", "done")
    assert TrialFolder(kept.folder).result() == before and TrialFolder(left.folder).done()


STOPPED = """
import os, signal, sys
from pathlib import Path
from vitlab.store.folders import Store, TrialFolder
with TrialFolder(Path(sys.argv[1])).lease():
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.slow
def test_only_own_stopped_orphan_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "GONE_S", 0.2)
    monkeypatch.setattr(worker, "POLL_S", 0.05)
    stop, endings = threading.Event(), dict[str, str]()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    name = unique_process_name(gone.pid)
    gone.wait()
    assert name and not locks.is_alive(name)
    holders = {}
    for kind, driver in {"orphan": name, "worker": unique_process_name(os.getpid()), "victim": name}.items():
        command = [sys.executable, "-c", STOPPED, job(tmp_path, kind).folder]
        holders[kind] = subprocess.Popen(command, env={**os.environ, locks.DRIVER: driver})
    try:
        work = [job(tmp_path, kind) for kind in ("orphan", "worker", "forged")]
        for kind in holders:
            until(TrialFolder(job(tmp_path, kind).folder).is_locked)
        forged = hold(TrialFolder(work[2].folder))
        # Another user locks the folder and names a process that owns another trial's lock.
        (work[2].folder / "lock").write_text(f"{unique_process_name(holders['victim'].pid)} {name}\n")

        def wait_and_train(item: Job) -> None:
            endings[item.trials[0].trial.key] = worker.run_job(item, stop.is_set)[0]

        waiting = [threading.Thread(target=wait_and_train, args=(item,)) for item in work]
        for thread in waiting:
            thread.start()
        until(lambda: endings)
        assert endings == {"orphan": "done"} and holders["orphan"].wait() == -signal.SIGKILL
        time.sleep(0.6)  # three times GONE_S
        assert holders["worker"].poll() is None and holders["victim"].poll() is None
        assert not locks.kill_orphan(TrialFolder(work[2].folder).lock)
        stop.set()
        for thread in waiting:
            thread.join()
        assert endings == {"orphan": "done", "worker": "stopped", "forged": "stopped"}
        forged.close()
    finally:
        for holder in holders.values():
            holder.kill()
            holder.wait()
    assert not locks.kill_process(name), "another process that has its number is not it"


def test_checkpoint_of_orphan_is_resumed_without_retries(tmp_path: Path) -> None:
    """A worker whose driver was killed writes a checkpoint and exits; this does not count as an attempt."""
    work = job(tmp_path, "finish")
    lock = hold(TrialFolder(work.folder))
    threading.Timer(0.5, lock.close).start()
    run = RunSpec(device="cpu", workers=1, retries=0)
    executor = Local(run)
    planned_of = {work.folder: Planned("arm", 0, work.trials[0].trial)}
    schedule = Schedule(executor, planned_of, Session(Store(tmp_path), run), [work])
    schedule.run_jobs()
    assert schedule.failed == 0 and TrialFolder(work.folder).done() and TrialFolder(work.folder).failure() is None


def test_driver_looks_for_a_job_only_if_a_slot_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five times a second the driver waits for an end; what a waiting job depends on is checked when it could run."""

    class TenthPoll:
        slots = 1

        def __init__(self) -> None:
            self.polls, self.job = 0, jobs[0]

        def submit(self, job: Job) -> None:
            self.job = job

        def poll(self, timeout_s: float) -> list[JobEnd]:
            self.polls += 1
            return [] if self.polls % 10 else [JobEnd(self.job, Ending.DONE)]

    jobs = [job(tmp_path / f"{index}", "finish") for index in range(6)]
    checked: list[Path] = []
    monkeypatch.setattr("vitlab.driver.scheduler._is_ready", lambda job: not checked.append(job.folder))
    planned_of = {work.folder: Planned("arm", 0, work.trials[0].trial) for work in jobs}
    run = RunSpec(device="cpu", workers=1)
    executor: Any = TenthPoll()
    schedule = Schedule(executor, planned_of, Session(Store(tmp_path), run), jobs)
    schedule.run_jobs()
    assert schedule.failed == 0
    assert checked == [work.folder for work in jobs] and executor.polls == 60


@pytest.mark.parametrize("finishes", [True, False])
def test_trial_of_two_studies_is_trained_once(local: Callable[..., Local], tmp_path: Path, finishes: bool) -> None:
    executor = local()
    work = job(tmp_path, "finish")
    lock = hold(TrialFolder(work.folder))
    executor.submit(work)
    until((work.folder / "log.txt").exists)
    assert executor.poll(0.7) == []
    if finishes:
        TrialFolder(work.folder).write_result(result(work.trials[0].trial, wall_s=77.0))
    lock.close()
    assert ends(executor, 1)["finish"].ending == "done"
    outcome = TrialFolder(work.folder).result()
    assert outcome is not None and (outcome.circumstances.wall_s == 77.0) == finishes


# -- slot -------------------------------------------------------------------------------------------------------------


def test_slot() -> None:
    assert {entry.name for entry in registry.list_entries("executor")} >= {"inline", "local"}
    assert registry.slot("executor").resolve_choice("local").plain() == {"type": "local"}
    assert isinstance(registry.slot("executor").build(Choice("inline"), RunSpec()), Inline)


ENDLESS = "import time; time.sleep(20); print('the fork server went on without its driver', flush=True)"


def test_unused_fork_server_ends_with_its_driver(tmp_path: Path) -> None:
    """One that is still importing does not notice that its driver has ended, so that it is killed."""
    (tmp_path / "endless.py").write_text(ENDLESS)
    code = (
        "from vitlab.executors.local import Local; from vitlab.runner import fork_server; fork_server.PRELOAD = 'endless'; "
        "Local.prepare(); Local.prepare(); print(fork_server.server_pid())"
    )
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert int(done.stdout) > 0 and done.stderr == ""
    until(lambda: not alive(int(done.stdout)))


def test_importing_executors_imports_no_torch() -> None:
    script = "import sys, vitlab.executors; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "False\n"
