"""A study on an autoscaling Ray cluster that begins without any worker: a driver is killed, then a third of the nodes.

    python tools/ray_autoscaling.py

The cluster uses Ray's own provider for tests of its autoscaler, whose nodes are processes of this machine.  Afterwards
all results are compared, to the bit, with those of the local executor.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from job_helpers import processes

NODES = 3
STORE_BYTES = 100 * 2**20  #: of each node's object store
PATIENCE_S = 600.0
STUDY = {
    "study": "scaled",
    "base": {
        "data": {"type": "digits"},
        "model": {"type": "vit", "patch_size": 2, "dim": 16, "depth": 1, "heads": 2, "drop": 0.1},
        "train": {"epochs": 10, "batch_size": 16, "evaluations": 10},
    },
    "design": {"one_at_a_time": {"model.position": ["none"]}},
    "seeds": 3,
    "run": {"engine": "loop", "device": "cpu", "tracker": "none", "retries": {"lost": 5}},
}


def main() -> None:
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="vla-", dir="/tmp") as place:
        folder = Path(place)
        study = folder / "scaled.yaml"
        study.write_text(yaml.safe_dump(STUDY))
        drive(study, folder / "local").wait()
        try:
            os.environ["RAY_ADDRESS"] = start_cluster(folder)
            out = folder / "ray"
            first = drive(study, out, "ray")
            until(lambda: finished(out) >= 1, "a first trial of a cluster that began without workers")
            print(f"scaled from zero to {len(raylets(folder))} nodes", flush=True)
            first.kill()
            first.wait()
            print(f"killed the driver after {finished(out)} trials", flush=True)
            second = drive(study, out, "ray")
            until(lambda: finished(out) >= 3 and kill_a_node(folder), "trials of the next driver")
            print(f"killed one of {NODES} nodes, which ran a trial, after {finished(out)} trials", flush=True)
            code = second.wait()
            said = out.with_suffix(".log").read_text()
            print(f"-- what the drivers said\n{said}--")
        finally:
            for pid in processes(str(folder)):
                if pid != os.getpid():
                    os.kill(pid, signal.SIGKILL)
        ours, theirs = outcomes(out), outcomes(folder / "local")
        equal, again = ours == theirs, said.count("it is tried again")
        print(
            f"exit code {code}; trials tried again: {again}; {len(ours)} of {len(theirs)} results, equal to the bit: {equal}"
        )
        sys.exit(code or not equal or not again)


def start_cluster(folder: Path) -> str:
    """Start a head without CPUs whose autoscaler may start nodes of one CPU each, and return its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    resources = {"CPU": 1, "object_store_memory": STORE_BYTES}
    commands = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    config = {
        "cluster_name": "vitlab",
        "max_workers": NODES,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 5,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            **dict.fromkeys(("use_node_id_as_ip", "disable_node_updaters", "disable_launch_config_check"), True),
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "cpu": {"resources": resources, "node_config": {}, "min_workers": 0, "max_workers": NODES},
        },
        "head_node_type": "ray.head.default",
        **{name: {} for name in ("auth", "docker", "file_mounts", "head_node", "worker_nodes")},
        **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
        **{f"{name}_commands": [] for name in commands},
    }
    file = folder / "autoscaling.yaml"
    file.write_text(yaml.safe_dump(config))
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--num-cpus=0", "--include-dashboard=false"]
    ray += [f"--object-store-memory={STORE_BYTES}"]
    ray += [f"--port={address.partition(':')[2]}", "--node-ip-address=127.0.0.1", f"--temp-dir={folder / 'r'}"]
    environment = {**os.environ, "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
    subprocess.run([*ray, f"--autoscaling-config={file}"], env=environment, check=True, stdout=subprocess.DEVNULL)
    return address


def drive(study: Path, out: Path, executor: str = "local") -> subprocess.Popen[bytes]:
    """Start a driver, whose output is appended to a file beside the output folder."""
    words = [sys.executable, "-m", "vitlab", "run", str(study), "--out", str(out), "--executor", executor]
    with open(out.with_suffix(".log"), "ab") as log:
        return subprocess.Popen(words, stdout=log, stderr=log)


def raylets(folder: Path) -> list[int]:
    """Return the daemons of the nodes but the head's: their command lines name the cluster's folder."""
    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in processes(str(folder))}
    return [pid for pid, own in words.items() if own[0].endswith(b"/raylet") and b"--head" not in own]


def kill_a_node(folder: Path) -> bool:
    """Kill the daemon and the trial of a node that runs one; return False if none does."""
    nodes = raylets(folder)
    for pid in processes("ray::run_ray_task"):
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if parent in nodes:
            for each in (parent, pid):
                os.kill(each, signal.SIGKILL)
            return True
    return False


def finished(out: Path) -> int:
    """Return the number of results."""
    return len(list(out.glob("trials/*/*/result.json")))


def outcomes(out: Path) -> dict[str, Any]:
    """Return what the trials have computed."""
    files = out.glob("trials/*/*/result.json")
    return {file.parent.parent.name: json.loads(file.read_text())["outcome"] for file in files}


def until(reached: Callable[[], bool], what: str) -> None:
    """Wait, and give up after some minutes."""
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        if time.monotonic() > deadline:
            sys.exit(f"not seen: {what}")
        time.sleep(0.2)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
