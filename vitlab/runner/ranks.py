"""Worker processes (ranks) of one trial on one machine, and their supervisor.

The calling process only supervises: it starts the ranks from a fork server with all imports done, forwards stop
requests and collects their results.  It therefore never blocks in a collective call that the death of a rank would
keep from returning.  If a rank fails or dies, the others are killed at once, and the root cause is reported rather
than the errors of ranks that lost their peer.  No process is orphaned: when the supervisor dies, the pipes of its
ranks close and they exit.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitlab.runner import fork_server
from vitlab.runner.fork_server import ServerDied
from vitlab.runner.job import Deferral, Stop, TrialEnd
from vitlab.store.result import Ending

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

POLL_S = 0.1  #: interval at which the supervisor polls ``stop``
CAUSE_S = 10.0  #: time to wait for the root cause after a rank reports a dead peer
LEAVE_S = 10.0  #: time the others have to exit after rank 0 has finished


RankFunction = Callable[..., TrialEnd]
"""Called in each process with its rank, the rendezvous file, a function that polls for stop, and the arguments."""


@dataclass
class _Process:
    number: int
    process: ForkServerProcess
    pipe: Connection
    result: TrialEnd | None = None


def launch_ranks(ranks: range, work: RankFunction, arguments: Sequence[Any], stop: Stop) -> TrialEnd:
    """Run a function in several processes, and return the result of the first or the failure of one.

    Args:
        ranks: Ranks of the processes of this machine.
        work: A module-level function that returns its own result.
        arguments: Its arguments, which are pickled.
        stop: Polled in this process; the ranks are asked to stop once it returns True.

    Returns:
        The result of the first rank if it finished, else of the first one to fail, or ``lost`` if one died.
    """
    with tempfile.TemporaryDirectory(prefix="vitlab-together-") as folder:
        processes: list[_Process] = []
        try:
            for number in ranks:
                own = number, work, (Path(folder) / "meeting", *arguments), dict(os.environ)
                processes.append(_Process(number, *fork_server.start_process(_run_rank_process, own, f"part {number}")))
            return _await_outcome(processes, stop)
        except ServerDied as error:
            return TrialEnd(Ending.LOST, str(error))
        finally:
            for one in processes:
                one.process.kill()
            for one in processes:
                one.process.join()
                one.pipe.close()


def _run_rank_process(
    number: int, work: RankFunction, arguments: Sequence[Any], environment: dict[str, str], supervisor: Connection
) -> None:
    """Run the work of one rank, send its result and exit."""
    for forwarded in (signal.SIGINT, signal.SIGTERM):  # the supervisor handles them and forwards the stop
        signal.signal(forwarded, signal.SIG_IGN)
    stop_requested = fork_server.set_environment_and_listen(environment, supervisor, orphan_s=0.0)
    rendezvous, *rest = arguments
    result = work(number, rendezvous, stop_requested.is_set, *rest)
    supervisor.send(result)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without waiting for threads that a library may have left behind


def _await_outcome(processes: Sequence[_Process], stop: Stop) -> TrialEnd:
    """Wait for rank 0 to finish, or for the cause of a failure."""
    stop_requested, deadline = False, float("inf")
    while True:
        running = [one for one in processes if one.result is None]
        wait([one.process.sentinel for one in running] + [one.pipe for one in running], POLL_S)
        for one in running:
            _receive_result(one)
        results = [one.result for one in processes if one.result is not None]
        if (first := processes[0].result) is not None and first.ending in (Ending.DONE, Ending.STOPPED):
            leave_by = time.monotonic() + LEAVE_S
            for one in processes:
                one.process.join(max(0.0, leave_by - time.monotonic()))
            return first
        causes = [
            result for result in results if result.ending not in (Ending.DONE, Ending.STOPPED, Deferral.PEER_DIED)
        ]
        if causes:
            return causes[0]
        # Ranks that have lost a peer; the peer itself may still report the cause.
        if without_peer := [result for result in results if result.ending == Deferral.PEER_DIED]:
            deadline = min(deadline, time.monotonic() + CAUSE_S)
        if time.monotonic() > deadline or len(results) == len(processes):
            return TrialEnd(Ending.LOST, without_peer[0].detail, without_peer[0].traceback)
        if not stop_requested and stop():
            stop_requested = True
            for one in processes:
                with suppress(OSError):  # it has just died, which _receive_result finds next
                    one.pipe.send_bytes(b"stop")


def _receive_result(one: _Process) -> None:
    """Receive the result of a rank, or record that it died without one."""
    dead = not one.process.is_alive()  # checked before the pipe, since a result is sent before the exit
    try:
        if one.pipe.poll():
            one.result = one.pipe.recv()
            return
    except (EOFError, OSError):
        pass
    if dead:
        how = fork_server.describe_exit(one.process.exitcode)
        one.result = TrialEnd(Ending.LOST, f"process {one.number} of this trial {how}")
