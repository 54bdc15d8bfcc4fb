"""Connection to a Ray cluster, the resources of one trial, and the number of trials that fit."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from vitlab.errors import UserError, count
from vitlab.executors.base import one_sentence
from vitlab.spec import RunSpec

log = logging.getLogger(__name__)


class Demand(NamedTuple):
    """Resources of one trial on each of its machines."""

    cpus: int
    gpus: float  #: a share of one GPU, or a number of whole GPUs

    @property
    def words(self) -> str:
        """The resources in words."""
        return count(self.cpus, "CPU") + (f", {self.gpus:g} GPU" if self.gpus else "")


def demand(ray: Any, run: RunSpec) -> Demand:
    """Return the resources that a trial of a study requires on each of its machines.

    With ``device: auto`` it has a GPU if a machine of the cluster has some now.
    """
    resources, machines = run.resources.on_one_node, _machines(ray)
    has_gpus = any(machine.get("GPU", 0) for machine in machines)
    gpus = 0.0
    if run.device == "cuda" or (run.device == "auto" and (has_gpus or resources.gpu is not None)):
        gpus = resources.gpu or 1.0
    # As elsewhere, a trial may have more threads than there are cores.
    fitting = [int(machine.get("CPU", 0)) for machine in machines if machine.get("GPU", 0) >= math.ceil(gpus)]
    cores = resources.cores(run.threads)
    each = Demand(min(cores, max(fitting, default=0)) or cores, gpus)
    if not room(ray, each):
        _warn(f"no machine of the Ray cluster has {each.words} now; trials wait until one joins.")
        if run.device == "auto" and not gpus:
            _warn("run.device is auto, and the cluster has no GPU now; run.device: cuda makes trials ask for one.")
    return each


@cache
def _warn(sentence: str) -> None:
    """Log a warning once, although a run builds its executor several times."""
    log.warning(sentence)


def room(ray: Any, each: Demand) -> int:
    """Return the number of trials that fit on the current machines at a time."""
    return sum(_fit(machine, each) for machine in _machines(ray))


def daemon_address(ray: Any) -> tuple[str, int]:
    """Return the address and port of Ray's daemon on this machine."""
    here = ray.get_runtime_context().get_node_id()
    [node] = [node for node in ray.nodes() if node["NodeID"] == here]
    return node["NodeManagerAddress"], node["NodeManagerPort"]


def listens(address: str, port: int) -> bool:
    """Return True if a process of this machine listens on a port.

    Ray itself needs half a minute to detect that a daemon has died, and streams from its workers never end.
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
    # Ray places a share on one GPU and never splits it over two.
    return min(fit, int(gpus // each.gpus) if each.gpus >= 1 else gpus * int(1 / each.gpus + 1e-9))


def connect(address: str) -> Any:
    """Return the ``ray`` module, connected to the cluster at ``address``."""
    if address.startswith("ray://"):
        raise UserError(
            f"run.executor.address is {address}, and trials cannot stream through Ray's client; "
            "run vitlab on a machine of the cluster, with address: auto"
        )
    # num_gpus=0 hides all GPUs, without a warning; usage reports are disabled.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise UserError(f"the executor ray needs Ray (pip install 'vitlab[ray]'): {error}") from None
    if ray.is_initialized():
        return ray
    is_main = threading.current_thread() is threading.main_thread()
    old_handler = signal.getsignal(signal.SIGTERM)
    try:
        with contextlib.chdir("/"):  # Ray has workers import from the current folder first; see task.stream
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        # Of a machine that dies, Ray prints some 40 lines on stdout, which is for the answer; the trial's line says it.
        ray._private.worker.print_to_stdstream = lambda data, ignore_prefix: None
    except Exception as error:  # Ray raises no specific type if it does not answer in time
        at = "on this machine, and RAY_ADDRESS names none" if address == "auto" else f"at {address}"
        raise UserError(
            f"no Ray cluster answers {at}: start one with 'ray start --head'. Ray says: {one_sentence(error)}"
        ) from None
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, old_handler)  # Ray replaces the handler; the driver needs its own
    return ray


def at(node: str) -> Any:
    """Return the scheduling strategy that requires a given node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=False)


def bundle(group: Any, index: int) -> Any:
    """Return the scheduling strategy that requires a given bundle of a placement group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
