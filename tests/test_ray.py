"""Tests of Ray: results equal those of other executors, on shared or copied files, also after faults."""

from __future__ import annotations

import fcntl
import gc
import math
import os
import shutil
import signal
import socket
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from job_helpers import HERE, PATIENCE_S, ends, job, processes, until, with_settings
from test_distributed import GUESTS, gone
from test_distributed import trial as by_several

from vitlab import lab, registry
from vitlab.driver.scheduler import Schedule
from vitlab.driver.session import Session, add_missing_prerequisites
from vitlab.errors import UserError, VitlabError
from vitlab.executors import Executor, Job, base
from vitlab.executors import ray as room
from vitlab.executors.base import read_trial_endings
from vitlab.executors.inline import Inline
from vitlab.executors.local import Local
from vitlab.executors.ray import Ray, _SubmittedJob
from vitlab.executors.task import FileSender, Finished, Started, apply_file_change, run_ray_task
from vitlab.identity.code import modules_of_spec, trial_code_digest
from vitlab.planning.values import Trial
from vitlab.registry import load_file
from vitlab.runner.job import JobTrial, Settings
from vitlab.spec import STREAMS, RunSpec, TrialSpec
from vitlab.spec.run import Resources
from vitlab.store.files import read_json
from vitlab.store.folders import Store, TrialFolder

LATE = "timed out during startup"  #: what Ray says that has not started within 30 s
TOO_BUSY = "Ray gives itself 30 s to start, and this machine is too busy for that"
STEPS = 24
PYTHONPATH = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))  #: what workers do can be found
SPEC = {
    "data": {"type": "synthetic", "image_size": 8, "train_images": 90, "test_images": 30, "num_classes": 6},
    "model": {"type": "vit", "patch_size": 4, "dim": 12, "depth": 1, "heads": 2, "drop": 0.1},
    "train": {"steps": STEPS, "batch_size": 16, "evaluations": 6, "optimizer": {"type": "adamw", "lr": 0.01}},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Start Ray on this machine with two CPUs and two fake GPUs."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="vr", dir="/tmp") as temporary:
        for name, value in {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": os.urandom(32).hex(),  # otherwise Ray would leave one in the home folder
        }.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("PYTHONPATH", PYTHONPATH)
        ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'vitlab[ray]'")
        before = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(
                address="local",
                num_cpus=2,
                num_gpus=2,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="error",
                object_store_memory=100 * 2**20,
                _temp_dir=temporary,
            )
        except Exception as error:
            if LATE not in str(error):
                raise
            shut_down(ray, temporary)
            pytest.skip(TOO_BUSY)
        yield ray
        signal.signal(signal.SIGTERM, before)
        shut_down(ray, temporary)


def shut_down(ray: Any, temporary: str) -> None:
    """Stop Ray and all its processes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # Ray does not wait for processes that it ends
        ray.shutdown()
        until(lambda: not processes(temporary))
        gc.collect()


def run(**arguments: Any) -> RunSpec:
    return RunSpec(**{"device": "cpu", "workers": 2, **arguments})


def real(root: Path, seed: int = 0, *, seeds: int = 1, name: str = "k") -> Job:
    """Return a job with one training or several."""
    members = []
    for each in range(seed, seed + seeds):
        spec = TrialSpec.model_validate(SPEC)
        one = Trial(
            spec,
            dict.fromkeys(STREAMS, each),
            (),
            None,
            key=f"{name}{each}",
            code=trial_code_digest(modules_of_spec(spec)),
        )
        members.append(JobTrial(f"a/s{each}", Store(root).trial(one.key, one.code).path, one))
    return Job(tuple(members), Settings(device="cpu", engine="vmap" if seeds > 1 else "loop"), runner="ray_runner")


def straight(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the same job in this process, uninterrupted."""
    monkeypatch.setenv("VITLAB_TEST_STEP_S", "0")
    executor = Inline(run())
    executor.submit(job)
    assert ends(executor, 1)[job.trials[0].trial.key].ending == "done"


def wait_for_step(executor: Executor, folder: TrialFolder, step: int) -> None:
    """Poll until the journal in the true folder has reached the step."""

    def step_logged() -> bool:
        endings = executor.poll(0.05)
        assert not endings, endings
        return any(logged >= step for logged in steps_told(folder))

    until(step_logged)


def steps_told(folder: TrialFolder) -> list[int]:
    return [event.body["step"] for event in folder.events()[0] if event.kind == "metrics"]


# -- equal results ----------------------------------------------------------------------------------------------------


def study(folder: Path, executor: Any) -> Path:
    vit = {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2, "position": "sinusoidal"}
    train = {"steps": 6, "batch_size": 16, "evaluations": 2}
    teacher = {"data": {"type": "digits"}, "model": {"type": "resnet8", "width_factor": 0.25}, "train": train}
    content = {
        "study": "taught",
        "base": {
            "data": {"type": "digits"},
            "model": vit,
            "train": train,
            "distill": {"teacher": {"trial": teacher}, "kind": "hard"},
        },
        "seeds": 1,
        "run": {
            "executor": executor,
            "workers": 1,
            "device": "cpu",
            "tracker": "none",
        },
    }
    file = folder / "taught.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def test_study_has_same_results_on_ray(cluster: Any, tmp_path: Path) -> None:
    """Student and teacher by every executor; with copied files, the teacher's weights are sent to the student."""
    results = {}
    for name, executor in {"inline": "inline", "local": "local", "ray": {"type": "ray", "files": "copy"}}.items():
        store = Store(tmp_path / name)
        spec, plan = lab.plan_study(study(tmp_path, executor))
        todo = add_missing_prerequisites(plan, plan.trials, store)
        schedule = Schedule.for_trials(todo, Session(store, spec.run), plan)
        schedule.run_jobs()
        assert schedule.failed == 0
        folders = [file.parent for file in store.root.glob("trials/*/*/result.json")]
        assert len(folders) == len(todo) == 2 and not any((folder / "checkpoint").exists() for folder in folders)
        assert all((folder / "weights.safetensors").stat().st_size for folder in folders)
        results[name] = {folder.parent.name: read_json(folder / "result.json")["outcome"] for folder in folders}
    assert results["ray"] == results["inline"] == results["local"]


def test_stopped_or_killed_training_resumes_elsewhere(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed on Ray, stopped on Ray with shared files, finished inline: equal to one uninterrupted training."""
    job = real(tmp_path / "moved")
    folder = TrialFolder(job.folder)
    copying = Ray(run(), files="copy")
    copying.submit(job)
    wait_for_step(copying, folder, 4)
    bells = processes("ray::StopSignal")  # the stop signal of every worker
    for bell in bells:
        os.kill(bell, signal.SIGKILL)
    assert bells
    wait_for_step(copying, folder, 8)
    (start,) = [event.body for event in folder.events()[0] if event.kind == "start"]
    assert folder.is_locked() and (folder.checkpoint / "last.safetensors").exists()
    os.kill(start["pid"], signal.SIGKILL)
    ending = ends(copying, 1)["k0"]
    assert ending.ending == "lost" and "killed or crashed" in ending.detail
    assert not folder.is_locked() and not folder.done()

    sharing = Ray(run())  # the cluster is this machine
    sharing.submit(job)
    wait_for_step(sharing, folder, 16)
    sharing.cancel(PATIENCE_S)
    assert [ending.ending for ending in sharing.poll(0.0)] == ["stopped"]
    assert (folder.checkpoint / "last.safetensors").exists() and not folder.is_locked()

    straight(job, monkeypatch)
    alone = real(tmp_path / "alone")
    straight(alone, monkeypatch)
    (interrupted, once) = (TrialFolder(each.folder).result() for each in (job, alone))
    assert interrupted is not None and once is not None
    assert interrupted.outcome == once.outcome and interrupted.circumstances.attempts == 3
    assert folder.weights_file.read_bytes() == TrialFolder(alone.folder).weights_file.read_bytes()
    starts = [event.body["step"] for event in folder.events()[0] if event.kind == "start"]
    assert 0 == starts[0] < starts[1] < starts[2] < STEPS
    assert steps_told(folder) == steps_told(TrialFolder(alone.folder))


def test_batch_on_copied_files_equals_batch(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trial and its folder equal those of inline training."""
    monkeypatch.setenv("VITLAB_TEST_STEP_S", "0")
    ours, theirs = real(tmp_path / "ray", seeds=2), real(tmp_path / "inline", seeds=2)
    executor = Ray(run(), files="copy")
    executor.submit(ours)
    assert [how for _, how, _ in read_trial_endings(ends(executor, 1)["k0"])] == ["done", "done"]
    straight(theirs, monkeypatch)
    for one, other in zip(map(TrialFolder, ours.folders), map(TrialFolder, theirs.folders), strict=True):
        mine, its = one.result(), other.result()
        assert mine is not None and its is not None and mine.outcome == its.outcome
        assert one.weights_file.read_bytes() == other.weights_file.read_bytes() and steps_told(one) == steps_told(other)
    assert "trained along with a/s0" in (ours.folders[1] / "log.txt").read_text()


def test_several_processes_train_a_trial_as_elsewhere(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them is killed, and the trial resumes from its checkpoint, on copied files."""
    monkeypatch.setenv("VITLAB_TEST_STEP_S", "0")
    plugin = tmp_path / "troubled.py"
    plugin.write_text(GUESTS)
    (tmp_path / "trouble").touch()
    load_file(plugin)
    what = by_several({"loss": {"type": "troubled", "trouble": "killed", "rank": 1}})
    what = replace(what, code=trial_code_digest(modules_of_spec(what.spec)))
    settings = Settings(device="cpu", plugins=(str(plugin),), processes=2)
    work = Job((JobTrial("a/s0", Store(tmp_path).trial("key", what.code).path, what),), settings, runner="ray_runner")
    folder, spec = TrialFolder(work.folder), run(workers=None, resources=Resources(processes=2))
    shared, copying, local = Ray(spec), Ray(spec, files="copy"), Local(spec)
    assert shared.slots == 1, "each has a CPU, and there are two"
    shared.submit(work)
    ending = ends(shared, 1)["key"]
    assert ending.ending == "lost" and "process 1 of this trial was killed by signal 9" in ending.detail
    assert gone(plugin) and not folder.is_locked() and not folder.done()
    copying.submit(work)
    assert ends(copying, 1)["key"].ending == "done"
    theirs = replace(work, trials=(JobTrial("a/s0", Store(tmp_path / "local").trial("key", what.code).path, what),))
    local.submit(theirs)
    assert ends(local, 1)["key"].ending == "done"
    mine, its = folder.result(), TrialFolder(theirs.folder).result()
    assert mine is not None and its is not None and mine.outcome == its.outcome
    assert mine.circumstances.numerics["processes"] == 2 and mine.circumstances.attempts == 2
    assert folder.weights_file.read_bytes() == TrialFolder(theirs.folder).weights_file.read_bytes()
    starts = [event.body["step"] for event in folder.events()[0] if event.kind == "start"]
    assert starts[0] == 0 < starts[1]


# -- endings of jobs --------------------------------------------------------------------------------------------------


def test_endings(cluster: Any, tmp_path: Path) -> None:
    for files in ("shared", "copy"):
        executor = Ray(run(), files=files)  # type: ignore[arg-type]
        for do in ("finish", "raise", "exit") if files == "shared" else ("finish", "raise"):
            executor.submit(job(tmp_path / files, do))
        endings = ends(executor, 3 if files == "shared" else 2)
        assert (endings["finish"].ending, endings["raise"].ending) == ("done", "error")
        assert endings["raise"].detail == "RuntimeError: no such layer"
        folder = TrialFolder(endings["raise"].job.folder)
        assert folder.failure().failure == "RuntimeError: no such layer"
        assert "in run_trial" in read_json(folder.path / "failure.json")["traceback"]
        around = read_json(endings["finish"].job.folder / "around.json")
        assert around["environment"] == ["1", ""] and around["pid"] != os.getpid()
        blocked = int(around["status"].split("SigBlk:")[1].split()[0], 16)
        assert blocked & 1 << (signal.SIGINT - 1), "Ctrl-C is for the driver"
        log = (endings["finish"].job.folder / "log.txt").read_text()
        assert "said by the trial\n" in log and "said by a child of it\n" in log
        if files == "shared":
            assert endings["exit"].ending == "lost"


def test_unresponsive_jobs_are_killed_and_waiting_ones_not_started(cluster: Any, tmp_path: Path) -> None:
    executor = Ray(run(threads=2))  # one trial has the machine
    # Ray runs jobs in a thread, where the other runner cannot ignore signals.
    deaf, queued = (replace(job(tmp_path, "ignore", name=name), runner="ray_runner") for name in ("deaf", "queued"))
    executor.submit(deaf)
    assert executor.poll(0.0) == []
    pid = until(lambda: read_json(deaf.folder / "pid.json"))
    executor.submit(queued)
    executor.cancel(0.5)
    endings = ends(executor, 2)
    assert (endings["deaf"].ending, endings["queued"].ending) == ("lost", "stopped")
    assert endings["deaf"].detail == "it did not stop in time and was killed"
    until(lambda: not Path(f"/proc/{pid}").exists())
    assert not (queued.folder / "pid.json").exists()


def test_stopped_worker_past_timeout_is_killed(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "FROZEN_S", 0.3)
    monkeypatch.setattr(base, "START_S", 5.0)
    executor = Ray(run())
    work = replace(job(tmp_path, "freeze"), timeout_s=0.2)
    executor.submit(work)
    ending = ends(executor, 1)["freeze"]
    assert ending.ending == "timeout" and "stopped or stuck, was killed" in ending.detail
    until(lambda: not TrialFolder(work.folder).is_locked())


def test_trial_written_by_another_driver_is_awaited(cluster: Any, tmp_path: Path) -> None:
    """With copied files the driver owns the lock, so the driver waits."""
    executor = Ray(run(), files="copy")
    work = job(tmp_path, "finish")
    work.folder.mkdir(parents=True)
    with open(work.folder / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        executor.submit(work)
        assert executor.poll(0.5) == [] and not executor._running
    assert ends(executor, 1)["finish"].ending == "done"


def test_node_without_shared_folder_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'vitlab[ray]'")
    monkeypatch.setattr(ray, "get_runtime_context", _Bell)
    monkeypatch.chdir(tmp_path)
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(variable, "1")
    work = job(tmp_path, "finish")
    work.folder.mkdir(parents=True)
    (work.folder / "log.txt").write_text("handed to Ray as something else\n")
    starts, end = run_ray_task(work, "token", None, False, _Bell(), str(tmp_path))
    assert isinstance(starts, Started) and isinstance(end, Finished)
    assert end.ending == "refused" and "set run.executor.files: copy" in end.detail


class _Bell:
    """Stop signal that is never set."""

    def __getattr__(self, name: str) -> Any:
        return _Bell()

    def __call__(self, *_: Any) -> Any:
        return _Bell()


# -- cluster ----------------------------------------------------------------------------------------------------------


def test_resource_shares_of_cluster(cluster: Any, tmp_path: Path, caplog: Any) -> None:
    assert Ray(RunSpec(device="cpu")).slots == 2
    assert Ray(RunSpec(device="cpu", threads=2)).slots == 1
    assert Ray(RunSpec(device="cpu", threads=64)).slots == 1
    assert Ray(RunSpec(device="cpu", workers=7)).slots == 7
    assert Ray(RunSpec(device="cpu", resources=Resources(cpu=2))).slots == 1
    assert Ray(RunSpec(device="cuda", resources=Resources(gpu=0.1))).slots == 2  # as many as there are CPUs
    executor = Ray(RunSpec(resources=Resources(gpu=0.6)))
    work = [with_settings(job(tmp_path, "finish", name=name), device=name) for name in ("auto", "cuda", "cpu")]
    for item in work:
        executor.submit(item)
    ends(executor, 3)
    visible = [read_json(item.folder / "around.json")["environment"][1] for item in work]
    assert set(visible[:2]) <= {"0", "1"} and visible[2] == ""
    assert Ray(RunSpec(resources=Resources(gpu=2))).slots == 1
    assert Ray(RunSpec(device="cpu", resources=Resources(processes=2, cpu=1))).slots == 2
    assert Ray(RunSpec(resources=Resources(gpu=3))).slots == 1
    assert "no machine of the Ray cluster has 3 CPUs, 3 GPU now; trials wait until one joins" in caplog.text


def test_joining_and_leaving_nodes_are_counted(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "COUNT_S", -1.0)
    executor, (one,) = Ray(RunSpec(device="cpu")), cluster.nodes()
    two, gone = {**one, "Resources": {"CPU": 3.0}}, {**one, "Alive": False}
    for nodes, fit in (([one], 2), ([one, two], 5), ([gone, two], 3), ([gone], 1)):
        with monkeypatch.context() as here:
            here.setattr(cluster, "nodes", lambda nodes=nodes: nodes)
            assert executor.slots == fit


def test_trials_are_queued_for_an_autoscaler(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Without a machine, and with more trials than fit, Ray has tasks that wait, which an autoscaler counts."""
    monkeypatch.setattr(room, "COUNT_S", -1.0)
    with monkeypatch.context() as nowhere:
        nowhere.setattr(cluster, "nodes", list)
        nowhere.setattr(room, "daemon_address", lambda ray: ("127.0.0.1", 0))
        executor = Ray(RunSpec(device="auto"))
        assert executor.slots == 1 and "run.device: cuda makes trials ask for one" in caplog.text
        executor.waiting = 3
        assert executor.slots == 3
    executor = Ray(RunSpec(device="cpu"))
    for waiting, slots in ((0, 2), (1, 3), (100, 2 + room.AHEAD)):
        executor.waiting = waiting
        assert executor.slots == slots


def test_of_a_growing_file_the_new_end_is_sent(tmp_path: Path) -> None:
    theirs, ours = TrialFolder(tmp_path / "worker"), TrialFolder(tmp_path / "driver")
    for folder in (theirs, ours):
        folder.path.mkdir()
        folder.emit("start", attempt=1)
    shutil.copy(theirs.path / "events.jsonl", ours.path)
    sender, sizes = FileSender([theirs.path]), []
    for step in range(3):
        theirs.emit("metrics", step=step, epoch=0.0, images=0, metrics={})
        changes = list(sender.read_changes())
        sizes += [len(change.data or b"") for change in changes]
        for change in changes:
            apply_file_change(change, [ours.path])
        assert (ours.path / "events.jsonl").read_bytes() == (theirs.path / "events.jsonl").read_bytes()
    assert len(sizes) == 3 and max(sizes) < 120
    (theirs.path / "events.jsonl").write_bytes(b"")  # a file that shrinks is sent whole
    for change in sender.read_changes():
        apply_file_change(change, [ours.path])
    assert (ours.path / "events.jsonl").read_bytes() == b""


def test_unreachable_cluster_gives_one_sentence() -> None:
    with pytest.raises(UserError, match="cannot stream through Ray's client"):
        Ray(RunSpec(), address="ray://head:10001")
    plain = registry.slot("executor").resolve_choice("ray").plain()
    assert {name: value for name, value in plain.items() if value} == {
        "type": "ray",
        "address": "auto",
        "files": "auto",
    }
    assert Ray.cli_only_option({"runtime_env": {"pip": ["acme"]}}) == "runtime_env"


def test_dead_daemon_ends_run_without_failing_trials(tmp_path: Path) -> None:
    """Its workers are cut off and their streams never end; no attempt is lost, and cancelling does not query Ray."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        executor: Any = object.__new__(Ray)
        executor._daemon, executor._stopping, executor._looked = address, False, -math.inf
        executor._waiting, executor._ends, executor._bell = [], [], None
        trial = job(tmp_path, "train")
        executor._running = {"stream": _SubmittedJob(trial, "stream", ExitStack(), (), base.Watchdog(None))}
        executor._require_daemon()
    with pytest.raises(VitlabError, match="daemon on this machine"):
        executor.poll(0.0)
    with pytest.raises(VitlabError, match="the same command"):
        executor._record_end(executor._running["stream"], "lost", "its worker was cut off")
    executor.cancel(0.0)
    assert [(ending.ending, ending.job) for ending in executor._ends] == [("stopped", trial)] and not executor._running
