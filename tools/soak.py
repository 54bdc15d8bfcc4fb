"""A campaign of faults: studies whose processes are killed, stopped, starved and cut off.

    python tools/soak.py [--minutes 30] [--seed 0] [--scale 1] [--executors local,ray] [--out vitlab-runs/soak]

A study of small trainings on digits is run again and again, by the local executor and on a Ray cluster of a head and
two machines, all on this one, while faults are put in at random.  Every study must then be complete; each result equal,
bit for bit, to that of a study that nobody disturbed; every journal and MLflow must hold each measurement once; nothing
half written and no process may be left.  Prints a table of what was done and what was found; exit code 1 if anything
was.  ``--scale 0.1`` is a tenth of the faults.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from job_helpers import processes

from vitlab.planning.values import Plan
from vitlab.store import locks
from vitlab.store.files import read_json
from vitlab.store.folders import TrialFolder
from vitlab.store.locks import unique_process_name

QUOTAS = {
    "worker killed": 60,
    "driver killed": 10,
    "worker stopped": 10,
    "machine lost": 5,
    "server away": 5,
    "disk full": 5,
    "checkpoint damaged": 5,
}
"""How often each is done in a whole campaign."""

ON_RAY_ALONE = ("machine lost",)
TIMEOUT_S = 30.0  #: per trial, which takes about 5 s
AWAY_S = 8.0  #: how long the tracking server is away
NOWHERE = "http://127.0.0.1:9"  #: a port without listener
PATIENCE_S = 1800.0  #: per study; only a hanging one takes this long
MARK = "VITLAB_SOAK"  #: the variable that all processes of a study have

PLUGIN = """
import os, time
from vitlab.training.optim.schedules import Cosine, schedule


@schedule.register("slow")
class Slow(Cosine):
    '''A cosine that takes its time.'''

    def factor(self, step: int, steps: int) -> float:
        time.sleep(float(os.environ.get("VITLAB_SOAK_STEP_S", "0")))
        return super().factor(step, steps)
"""

STUDY: dict[str, Any] = {
    "base": {
        "data": {"type": "digits"},
        "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2, "position": "learned", "drop": 0.1},
        "train": {"steps": 200, "batch_size": 16, "evaluations": 20, "schedule": {"type": "slow", "warmup": 0.1}},
    },
    "design": {"one_at_a_time": {"model.position": ["none", "sincos2d"]}},
    "seeds": 3,
    "run": {
        "workers": 3,
        "device": "cpu",
        "keep": "none",
        "timeout": TIMEOUT_S,
        "retries": {"lost": 10_000, "timeout": 10_000, "error": 10_000},
    },
}

DRIVER = """
from vitlab.executors import base
base.FROZEN_S = 3.0
from vitlab.cli import main
main()
"""
"""The command ``vitlab``, which waits less long before it kills what does not listen."""


class Server:
    """MLflow's server, which can be started and stopped."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True)
        self.root = root
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._back = 0.0
        self._stack = ExitStack()
        self.start()

    def start(self) -> None:
        from vitlab.trackers.server import running_server

        self._process = self._stack.enter_context(running_server(self.root, port=self.port))
        self._back = 0.0

    def stop(self) -> bool:
        """Kill the server; return whether it was running."""
        if self._back:
            return False
        os.killpg(self._process.pid, signal.SIGKILL)
        self._stack.close()
        self._back = time.monotonic() + AWAY_S
        return True

    def tick(self, *, now: bool = False) -> None:
        if self._back and (now or time.monotonic() > self._back):
            self.start()

    def close(self) -> None:
        self._stack.close()


class Cluster:
    """A Ray cluster of a head, which runs nothing, and two machines, all on this one."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster as RayCluster

        self._temporary = tempfile.mkdtemp(prefix="vs", dir="/tmp")  # a socket's path may have 107 characters
        common = {"object_store_memory": 100 * 2**20, "include_dashboard": False}
        self._common = common
        head = {**common, "num_cpus": 0, "temp_dir": self._temporary}
        with mock.patch("ray._private.utils.write_ray_address"):  # otherwise 'auto' would find the whole machine
            self._cluster = RayCluster(initialize_head=True, head_node_args=head)
        self._machines = [self._cluster.add_node(num_cpus=2, **common) for _ in range(2)]
        self.environment = {"RAY_ADDRESS": self._cluster.address}

    def lose(self, dice: random.Random) -> None:
        """Kill a machine and start another."""
        machine = self._machines.pop(dice.randrange(len(self._machines)))
        self._cluster.remove_node(machine, allow_graceful=False)
        self._machines.append(self._cluster.add_node(num_cpus=2, **self._common))

    def close(self) -> list[str]:
        """Stop the cluster and return the remaining processes."""
        self._cluster.shutdown()
        leftovers = wait_for(lambda: not processes(self._temporary), 30.0)
        shutil.rmtree(self._temporary, ignore_errors=True)
        return [] if leftovers else [f"of Ray, processes are left: {processes(self._temporary)}"]


class Bout:
    """One study, its driver, and the faults injected into it."""

    def __init__(
        self,
        folder: Path,
        name: str,
        executors: Sequence[str],
        dice: random.Random,
        *,
        study: dict[str, Any],
        step_s: float = 0.015,
        environment: dict[str, str] = {},
        server: Server | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        """
        Args:
            folder: an empty one.
            name: of the study.
            executors: YAML of each; one of them runs the study until its driver is killed.
            dice: every choice.
            study: its file, but for its name.
            step_s: how long a step takes at least.
            environment: of the driver.
            server: MLflow; none: nobody is told.
            cluster: Ray.
        """
        folder.mkdir(parents=True)
        self.name, self.out, self.log = name, folder / "out", folder / "driver.log"
        self.file, self.plugin = (
            folder / "soak.yaml",
            folder.parent / "soak_slow.py",
        )  # one for all, because files clash
        self.file.write_text(yaml.safe_dump({"study": name, **study}))
        self.plugin.write_text(PLUGIN)
        self.mark = uuid.uuid4().hex
        uri = server.uri if server is not None else NOWHERE
        self.environment = {**os.environ, **environment, MARK: self.mark, "MLFLOW_TRACKING_URI": uri}
        self.environment |= {"VITLAB_SOAK_STEP_S": str(step_s), "OMP_NUM_THREADS": "1"}
        self.executors, self.dice, self.server, self.cluster = executors, dice, server, cluster
        self.done: Counter[str] = Counter()
        self.stopped: list[str] = []
        self.damaged = self.missed = 0
        self.starts = 0
        self.driver: subprocess.Popen[bytes]
        self.executor = ""

    # -- driver -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        executor = self.executor = self.dice.choice(self.executors)
        command = [sys.executable, "-c", DRIVER, "run", str(self.file), "--out", str(self.out)]
        command += ["--plugin", str(self.plugin), "--set", f"run.executor={executor}"]
        with open(self.log, "ab") as log:
            log.write(f"-- {executor}\n".encode())
            log.flush()
            self.driver = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment)
        self.starts += 1

    def running(self) -> list[tuple[TrialFolder, str]]:
        """Return the trials in training, with their processes."""
        folders = []
        for path in sorted(self.out.glob("trials/*/*")):
            folder = TrialFolder(path)
            starts = [event for event in folder.events()[0] if event.kind == "start"]
            if starts and not folder.done() and (name := unique_process_name(starts[-1].body["pid"])):
                pid = starts[-1].body["pid"]
                sign = Path(f"/proc/{pid}/cmdline").read_bytes() if locks.is_alive(name) else b""
                if (b"forkserver" in sign or b"ray::" in sign) and name not in self.stopped:
                    folders.append((folder, name))
        return folders

    # -- faults -------------------------------------------------------------------------------------------------------

    def put_in(self, fault: str) -> bool:
        """Inject the fault if it is possible now."""
        if fault == "driver killed":
            if not self.running():
                return False
            self.driver.kill()
            self.driver.wait()
            self.start()
        elif fault == "machine lost":
            assert self.cluster is not None
            if not self.running() or self.executor == "local":
                return False
            self.cluster.lose(self.dice)
        elif fault == "server away":
            assert self.server is not None
            if not self.running() or not self.server.stop():
                return False
        else:
            with suppress(OSError, ProcessLookupError):  # it may have ended by itself
                if not self._to_a_worker(fault):
                    return False
        self.done[fault] += 1
        return True

    def _to_a_worker(self, fault: str) -> bool:
        running = self.running()
        if fault in ("disk full", "checkpoint damaged"):
            running = [(folder, name) for folder, name in running if (folder.checkpoint / "last.safetensors").exists()]
        if not running:
            return False
        folder, name = self.dice.choice(running)
        pid = int(name.split("/")[1])
        if fault == "worker killed":
            return locks.kill_process(name)
        if fault == "worker stopped":
            os.kill(pid, signal.SIGSTOP)
            self.stopped.append(name)
            return True
        if fault == "disk full":
            limit = self.dice.choice([300, 4096, 16384])
            before = self.log.read_bytes().count(b"File too large")
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, limit))
            return wait_for(lambda: self.log.read_bytes().count(b"File too large") > before, 10.0)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.5)  # sent data still arrives
        file = folder.checkpoint / "last.safetensors"
        data = bytearray(file.read_bytes())
        place = self.dice.randrange(len(data))
        match self.dice.randrange(4):
            case 0:
                del data[place:]
            case 1:
                data[place] ^= 1 << self.dice.randrange(8)
            case 2:
                data = bytearray(b"\x80\x04\x95" + bytes(40))  # as a pickle begins
            case 3:
                data.clear()
        file.write_bytes(data)
        self.damaged += locks.kill_process(name)
        return True

    # -- to the end ---------------------------------------------------------------------------------------------------

    def play(self, faults: list[str], until: float, pause_s: tuple[float, float] = (0.5, 2.5)) -> list[str]:
        """Run the study and inject the listed faults one after another until it ends.

        Returns:
            what was found.
        """
        self.start()
        began = time.monotonic()
        due = began + self.dice.uniform(*pause_s)
        try:
            while (code := self.driver.poll()) is None:
                if time.monotonic() - began > PATIENCE_S:
                    return [f"it had not ended after {PATIENCE_S:g} s; see {self.log}"]
                if self.server is not None:
                    self.server.tick()
                if faults and time.monotonic() < until and time.monotonic() > due:
                    if self.put_in(faults[0]):
                        del faults[0]
                    elif faults[0] in ON_RAY_ALONE:
                        faults.append(faults.pop(0))  # at present another executor runs the study
                    due = time.monotonic() + self.dice.uniform(*pause_s)
                time.sleep(0.05)
        finally:
            self.driver.kill()
            self.driver.wait()
        if self.server is not None:
            self.server.tick(now=True)
            if b"not reached" in self.log.read_bytes():
                command = [sys.executable, "-m", "vitlab", "sync", str(self.out)]
                subprocess.run(command, env=self.environment, check=False, capture_output=True)
        return [f"the driver ended with {code}; see {self.log}"] if code else []

    def outcomes(self) -> dict[str, Any]:
        """Return the result of every trial by its key."""
        files = sorted(self.out.glob("trials/*/*/result.json"))
        return {file.parent.parent.name: read_json(file)["outcome"] for file in files}

    def faults_found(self, reference: dict[str, Any]) -> list[str]:
        """Return the problems of the ended study."""
        faults = []
        mine = self.outcomes()
        missing = reference.keys() - mine.keys()
        wrong = [key for key in reference.keys() & mine.keys() if reference[key] != mine[key]]
        faults += [f"no result: {key[:12]}" for key in sorted(missing)]
        faults += [f"another result than undisturbed: {key[:12]}" for key in sorted(wrong)]
        faults += [f"trial {key[:12]} is not of this study" for key in mine.keys() - reference.keys()]
        anew = 0
        for path in sorted(self.out.glob("trials/*/*")):
            folder = TrialFolder(path)
            leftovers = [str(item.relative_to(path)) for item in path.rglob("*") if item.name.startswith(".")]
            leftovers += [name for name in ("failure.json", "checkpoint") if (path / name).exists()]
            faults += [f"left in {path.parent.name[:12]}: {', '.join(leftovers)}"] if leftovers else []
            lines = (path / "events.jsonl").read_text().splitlines()
            events = [json.loads(line) for line in lines]
            steps = [event["step"] for event in events if event["kind"] == "metrics"]
            result = folder.result()
            history = [moment.step for moment in result.outcome.history] if result is not None else []
            if steps != history:
                faults.append(f"the journal of {path.parent.name[:12]} tells of the steps {steps}, not of {history}")
            anew += sum("started from the beginning" in event.get("note", "") for event in events)
        self.missed = max(0, self.damaged - anew)
        if self.missed:
            self.done["checkpoint damaged"] -= self.missed
        if self.missed and self.executors == ["local"]:  # the true file may be newer than the copy
            faults.append(f"{self.damaged} checkpoints were damaged, and {anew} attempts have seen one")
        if not wait_for(lambda: not processes(f"{MARK}={self.mark}", "environ"), 60.0):
            faults.append(f"processes are left: {processes(f'{MARK}={self.mark}', 'environ')}")
        faults += [f"{name} was stopped, and is there still" for name in self.stopped if locks.is_alive(name)]
        if self.server is not None:
            faults += self._in_mlflow()
        return faults

    def _in_mlflow(self) -> list[str]:
        """Return the points that MLflow lacks, has twice, or has wrong."""
        assert self.server is not None
        from mlflow import MlflowClient

        uri = f"sqlite:///{self.server.root / 'mlflow.db'}"
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        plan = Plan.from_json(read_json(self.out / "studies" / self.name / "plan.json"))
        experiment = client.get_experiment_by_name(self.name)
        if experiment is None:
            return ["MLflow does not know the study"]
        runs = client.search_runs([experiment.experiment_id], "tags.`vitlab.kind` = 'trial'", max_results=1000)
        by_trial = {(run.data.tags["arm"], run.data.tags["vitlab.trial"]): run for run in runs}
        faults = []
        if len(runs) != len(plan.trials) or len(by_trial) != len(runs):
            faults.append(f"MLflow holds {len(runs)} runs for {len(plan.trials)} trials")
        for planned in plan.trials:
            run = by_trial.get((planned.arm, planned.trial.key))
            name = f"{planned.arm} s{planned.seed}"
            if run is None:
                faults.append(f"MLflow has no run of {name}")
                continue
            if run.info.status != "FINISHED":
                faults.append(f"MLflow says that {name} is {run.info.status}")
            folder = TrialFolder(self.out / "trials" / planned.trial.key / planned.trial.code)
            expected: Counter[tuple[str, float, int, int]] = Counter()
            for event in folder.events()[0]:
                if event.kind == "metrics":
                    body = event.body
                    values = {**body["metrics"], "progress/epoch": body["epoch"], "progress/images": body["images"]}
                    expected.update((key, float(value), event.t, body["step"]) for key, value in values.items())
            points = itertools.chain.from_iterable(
                client.get_metric_history(run.info.run_id, metric) for metric in run.data.metrics
            )
            there = Counter((point.key, point.value, point.timestamp, point.step) for point in points)
            curves = Counter({point: count for point, count in there.items() if point[3] > 0})
            if curves != expected:
                lacking, surplus = expected - curves, curves - expected
                faults.append(f"MLflow lacks {lacking.total()} points of {name} and has {surplus.total()} too many")
            result = folder.result()
            finals = {} if result is None else {f"final/{key}": value for key, value in result.outcome.metrics.items()}
            final_points = {point[0]: point[1] for point in there if point[0].startswith("final/")}
            if final_points != finals or any(count > 1 for count in there.values()):
                faults.append(f"MLflow has other final values of {name} than its result")
        return faults


def wait_for(what: Callable[[], Any], seconds: float) -> bool:
    """Return whether the condition becomes true in time."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@contextmanager
def house(out: Path, executors: Sequence[str]) -> Iterator[tuple[Server, Cluster | None, list[str]]]:
    """Run a tracking server and, if needed, a cluster; yield them and the list of leftovers."""
    leftovers: list[str] = []
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.urandom(32).hex(), "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ.update({**token, "VITLAB_SOAK_STEP_S": "0.015", "MLFLOW_DISABLE_TELEMETRY": "true"})
    server = Server(out / "mlflow")
    cluster = Cluster() if "ray" in executors else None
    try:
        yield server, cluster, leftovers
    finally:
        server.close()
        if cluster is not None:
            leftovers += cluster.close()


def by_engine(engine: str) -> dict[str, Any]:
    """Return the study file for one engine."""
    return {**STUDY, "run": {**STUDY["run"], "engine": engine}}


def undisturbed(folder: Path, study: dict[str, Any]) -> dict[str, Any]:
    """Return the results of the study's trials without faults.

    In a process of their own, as this one may have multiplied matrices before anybody said how they are to be rounded.
    """
    bout = Bout(folder, "undisturbed", ["inline"], random.Random(0), study=study, step_s=0.0)
    bout.start()
    assert bout.driver.wait() == 0, bout.log.read_text()
    return bout.outcomes()


def campaign(out: Path, *, minutes: float, seed: int, scale: float, executors: Sequence[str]) -> int:
    """Run the campaign and return the number of problems."""
    dice = random.Random(seed)
    until = time.monotonic() + 60 * minutes
    quotas = {fault: max(1, round(count * scale)) for fault, count in QUOTAS.items()}
    queues: dict[str, list[str]] = {executor: [] for executor in executors}
    for fault, count in quotas.items():
        places = [executor for executor in executors if fault not in ON_RAY_ALONE or executor == "ray"]
        for number in range(count if places else 0):
            queues[places[number % len(places)]].append(fault)
    for queue in queues.values():
        dice.shuffle(queue)
    on_ray = ["{type: ray, files: shared}", "{type: ray, files: copy}"]
    ways = {"local": ["local"], "ray": [*on_ray, *on_ray, "local"]}
    references: dict[str, dict[str, Any]] = {}
    done: dict[str, Counter[str]] = {executor: Counter() for executor in executors}
    studies: Counter[str] = Counter()
    problems: list[str] = []
    with house(out, executors) as (server, cluster, leftovers):
        for number in itertools.count():
            open_ = [executor for executor in executors if queues[executor]]
            if not open_ or time.monotonic() > until:
                break
            executor = open_[number % len(open_)]
            engine = dice.choice(["auto", "loop"])
            if engine not in references:
                references[engine] = undisturbed(out / f"undisturbed-{engine}", by_engine(engine))
            name = f"soak-{executor}-{number:02}"
            bout = Bout(
                out / name,
                name,
                ways[executor],
                dice,
                study=by_engine(engine),
                environment=cluster.environment if cluster is not None else {},
                server=server,
                cluster=cluster,
            )
            began = time.monotonic()
            faults = bout.play(queues[executor], until) or bout.faults_found(references[engine])
            done[executor] += bout.done
            studies[executor] += 1
            queues[executor] += ["checkpoint damaged"] * bout.missed
            counts = ", ".join(f"{count} {fault}" for fault, count in sorted(bout.done.items())) or "nothing"
            verdict = "as undisturbed" if not faults else "FOUND: " + "; ".join(faults)
            print(
                f"{name}: {engine}, {bout.starts} drivers, {time.monotonic() - began:.0f} s; {counts}; {verdict}",
                flush=True,
            )
            problems += [f"{name}: {fault}" for fault in faults]
            if not faults:
                shutil.rmtree(out / name)
    problems += leftovers
    print(f"\n{'what was done':22}" + "".join(f"{executor:>10}" for executor in executors) + f"{'of':>10}")
    print(f"{'studies':22}" + "".join(f"{studies[executor]:>10}" for executor in executors))
    for fault, count in quotas.items():
        print(f"{fault:22}" + "".join(f"{done[executor][fault]:>10}" for executor in executors) + f"{count:>10}")
    print(f"\nfound: {len(problems)}")
    print("\n".join(problems))
    return len(problems)


def main() -> None:
    """Run the command line, see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="after that nothing more is done to studies")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the faults")
    parser.add_argument("--executors", default="local,ray")
    parser.add_argument("--out", type=Path, default=Path("vitlab-runs") / "soak")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.out, ignore_errors=True)
    out = arguments.out.resolve()
    executors = arguments.executors.split(",")
    sys.exit(
        bool(campaign(out, minutes=arguments.minutes, seed=arguments.seed, scale=arguments.scale, executors=executors))
    )


if __name__ == "__main__":
    main()
