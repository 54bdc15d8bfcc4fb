"""Data-parallel training of one model by several processes, of one machine or of several.

Each process holds the whole model, draws and augments its own images of a step's batch, and computes their gradients.
Gradients are summed over all processes, so that every process takes the same optimizer step, bitwise.  Evaluations are
not divided: each process computes them completely, with equal results.  The processes of one machine find each other by
a file and communicate over the loopback interface; those of several machines use torchrun's environment variables
``MASTER_ADDR`` and ``MASTER_PORT``.  GPUs use NCCL, CPUs gloo.  Decisions of the hosts use gloo too, so that they do
not wait for a GPU.

Reference: arXiv:1706.02677 (large batches over several devices), arXiv:2006.15704 (PyTorch DDP).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitlab.errors import UserError
from vitlab.models.contract import digest

LOOPBACK = ("lo", "lo0")


class PeerDied(Exception):
    """Another process of the training has died."""


class RankMismatch(Exception):
    """The processes of a training differ in their weights or steps."""


class SingleProcess:
    """The only process of a training."""

    count = 1  #: number of processes
    rank = 0  #: of this process

    def rows(self, count: int) -> range:
        """Return the range of this process's images in a batch of ``count``."""
        return range(count * self.rank // self.count, count * (self.rank + 1) // self.count)

    def sum_gradients(self, parameters: Sequence[nn.Parameter], numbers: Tensor) -> None:
        """Sum the gradients of the parameters, and numbers of their dtype, over all processes, in place."""

    def any_rank(self, stop: Callable[[], bool]) -> Callable[[], bool]:
        """Return a function that returns True in all processes once ``stop`` does in one of them."""
        return stop

    def require_equal(self, model: nn.Module, step: int) -> None:
        """Wait for all processes, and check that they have the same step and weights.

        Raises:
            RankMismatch: If they differ.
        """


class ProcessGroup(SingleProcess):
    """One of several processes; see :func:`rendezvous`.

    Raises:
        PeerDied: In every method, if another process has died.
    """

    def __init__(self, rank: int, count: int) -> None:
        self.rank = rank
        self.count = count

    def sum_gradients(self, parameters: Sequence[nn.Parameter], numbers: Tensor) -> None:
        """Sum gradients and numbers over all ranks."""
        # A part of a model that no image of this process used has no gradient here, but may have one elsewhere.
        has = self._reduce(torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32), dist.ReduceOp.MAX)
        updated = [p for p, some in zip(parameters, has.tolist(), strict=True) if some]
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in updated]
        flat = self._reduce(torch.cat([*(g.reshape(-1) for g in gradients), numbers]), dist.ReduceOp.SUM)
        *sums, numbers_sum = torch.split(flat, [*(g.numel() for g in gradients), len(numbers)])
        for parameter, gradient, total in zip(updated, gradients, sums, strict=True):
            parameter.grad = gradient.copy_(total.view_as(gradient))
        numbers.copy_(numbers_sum)

    def any_rank(self, stop: Callable[[], bool]) -> Callable[[], bool]:
        """Return a function that is true on every rank if ``stop`` is true on one."""
        return lambda: bool(self._reduce(torch.tensor(int(stop()), dtype=torch.int32), dist.ReduceOp.MAX))

    def require_equal(self, model: nn.Module, step: int) -> None:
        """Raise if the weights or the step differ between ranks."""
        # 60 bits, which int64 holds with either sign.
        weights = int(digest(model.state_dict())[:15], 16)
        here = torch.tensor([step, -step, weights, -weights])
        # The maxima of numbers and of their negatives are everybody's own only where all are equal.
        if (self._reduce(here.clone(), dist.ReduceOp.MAX) != here).any():
            raise RankMismatch("the processes of this trial do not begin with the same weights at the same step")

    def _reduce(self, tensor: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        """Reduce a tensor over all processes, in place, by NCCL on GPUs and by gloo on CPUs."""
        try:
            dist.all_reduce(tensor, how)
        # It is a RuntimeError, too, and no sign that a process has died.
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise PeerDied(f"another process of this trial has died: {error}") from error
        return tensor


@contextmanager
def rendezvous(rank: int, count: int, place: Path, device: torch.device, nodes: int = 1) -> Iterator[ProcessGroup]:
    """Join the process group inside the block; on GPUs each process uses a GPU of its own.

    Args:
        rank: Rank of this process.
        count: Number of processes.
        place: A file that does not exist yet in an existing folder, the same for all processes of one machine.
        device: Type of device to compute on.
        nodes: Number of machines, each with an equal part of the processes.

    Raises:
        UserError: If there are fewer GPUs than processes.
        PeerDied: If another process has died.
    """
    for library in ("GLOO", "NCCL"):
        for _, interface in socket.if_nameindex():
            if interface in LOOPBACK and nodes == 1:
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)
    if device.type == "cuda":
        own = count // nodes
        if torch.cuda.device_count() < own:
            raise UserError(
                f"run.resources.gpu is {count} on {nodes} machines, and torch finds {torch.cuda.device_count()} GPUs "
                "here; set a smaller number"
            )
        torch.cuda.set_device(rank % own)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        # Without a store, torch reads torchrun's environment variables.
        store = dist.FileStore(str(place), count) if nodes == 1 else None  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=count)
    except RuntimeError as error:
        raise PeerDied(f"the processes of this trial could not connect to each other: {error}") from error
    yield ProcessGroup(rank, count)
    dist.destroy_process_group()
