"""A Ray cluster: found, or started here; what a trial takes of its machines, and how many trials they hold."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from vitlab.errors import UserError
from vitlab.executors.base import one_sentence
from vitlab.executors.machine import budget
from vitlab.spec import RunSpec

STORE_BYTES = 256 * 2**20  #: of the object store of a Ray that is started here; it spills to the disk


class Demand(NamedTuple):
    """What one trial takes of one machine, where all its processes are."""

    cpus: int
    gpus: float  #: a share of one, or whole ones


def demand(ray: Any, run: RunSpec) -> Demand:
    """What a trial of a study takes of this cluster.

    Raises:
        UserError: if no machine of it could ever give that.
    """
    machines = _machines(ray)
    cpus = [int(machine.get("CPU", 0)) for machine in machines]
    if not any(cpus):
        raise UserError("no machine of the Ray cluster offers a CPU; 'ray start' takes --num-cpus")
    gpus = [int(machine.get("GPU", 0)) for machine in machines] if run.device != "cpu" else [0]
    asked = run.resources.gpu or 1.0
    if asked > 1 and max(gpus) < asked:
        raise UserError(
            f"run.resources.gpu is {asked:g}, and the largest machine of the Ray cluster has {max(gpus)}; "
            "the processes of one trial are on one machine"
        )
    if run.device == "cuda" and not any(gpus):
        raise UserError("run.device is cuda, and no machine of the Ray cluster has a GPU")
    if any(gpus):
        cpus = [count for count, own in zip(cpus, gpus, strict=True) if own >= max(1.0, asked)]
    # As elsewhere, a trial may have more threads than there are cores.
    return Demand(min(run.resources.cores(run.threads), max(cpus)), asked if any(gpus) else 0.0)


def room(ray: Any, each: Demand) -> int:
    """How many trials the machines that are there now hold at a time."""
    return sum(_fit(machine, each) for machine in _machines(ray))


def daemon(ray: Any) -> tuple[str, int]:
    """Return the address and port of Ray's daemon on this machine."""
    here = ray.get_runtime_context().get_node_id()
    [node] = [node for node in ray.nodes() if node["NodeID"] == here]
    return node["NodeManagerAddress"], node["NodeManagerPort"]


def listens(address: str, port: int) -> bool:
    """Return whether a process of this machine listens on a port.

    Ray itself takes half a minute to find out that a daemon has died, and streams from its workers never end.
    """
    try:
        with socket.create_connection((address, port), timeout=5.0):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:  # too busy to answer
        return True


def _machines(ray: Any) -> list[Mapping[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _fit(machine: Mapping[str, float], each: Demand) -> int:
    fit = int(machine.get("CPU", 0)) // each.cpus
    if not each.gpus:
        return fit
    gpus = int(machine.get("GPU", 0))
    # Ray puts a share on one GPU, never on two halves.
    return min(fit, int(gpus // each.gpus) if each.gpus >= 1 else gpus * int(1 / each.gpus + 1e-9))


def connected(address: str) -> Any:
    """Ray, connected to the cluster at ``address``."""
    if address.startswith("ray://"):
        raise UserError(
            f"run.executor.address is {address}, and trials cannot stream through Ray's client; "
            "run vitlab on a machine of the cluster, with address: auto"
        )
    # Zero GPUs mean none, as vitlab asks for, and Ray neither warns of that nor reports that it is used.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise UserError(f"the executor ray needs Ray (pip install 'vitlab[ray]'): {error}") from None
    if ray.is_initialized():
        return ray
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        # Ray's sockets lie in it, and the path of a socket may have 107 characters; a TMPDIR may have more.
        temporary = tempfile.mkdtemp(prefix="vitlab-", dir="/tmp")
        atexit.register(_hang_up, temporary)
        options |= {
            "num_cpus": budget(),
            "include_dashboard": False,
            "object_store_memory": STORE_BYTES,
            "_temp_dir": temporary,
        }
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, **options)
    except Exception as error:  # of no type of its own where Ray does not come up in time
        if address == "local":
            raise UserError(f"Ray does not start on this machine: {one_sentence(error)}") from None
        at = "on this machine, and RAY_ADDRESS names none" if address == "auto" else f"at {address}"
        raise UserError(
            f"no Ray cluster answers {at}: start one with 'ray start --head', or set run.executor.address: local. "
            f"Ray says: {one_sentence(error)}"
        ) from None
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)  # Ray takes it; how a driver ends is for the driver to say
    return ray


def _hang_up(temporary: str) -> None:
    """Stop the Ray that was started here, and leave nothing of it."""
    import ray

    with suppress(Exception):  # the interpreter is at its end, and Ray may have ended before
        ray.shutdown()
    shutil.rmtree(temporary, ignore_errors=True)


def at(node: str) -> Any:
    """Where Ray is to put something: on this machine, or nowhere."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=False)
