"""Several processes that train one model, each with its share of every batch: what one of them sees of the others.

Each holds the whole model, draws and augments its own images of a step's batch, and computes their gradients; these are
added up over all, so that every process makes the same step of the optimizer, to the last bit.  Evaluations are not
shared out: each process makes them whole, and finds the same.  They meet by a file, and talk over the loopback
interface: NCCL between GPUs, gloo between CPUs, as well as for what only hosts have to agree about, so that no GPU is
waited for.

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
from vitlab.training import checkpoint

LOOPBACK = ("lo", "lo0")


class PeerDied(Exception):
    """Another process of the training has gone."""


class RankMismatch(Exception):
    """The processes of a training do not begin with the same weights."""


class SingleProcess:
    """One process trains a model by itself."""

    count = 1  #: processes
    rank = 0  #: which of them this is

    def rows(self, count: int) -> range:
        """Which images of a batch of ``count`` are this process's."""
        return range(count * self.rank // self.count, count * (self.rank + 1) // self.count)

    def add_up(self, parameters: Sequence[nn.Parameter], numbers: Tensor) -> None:
        """Add the gradients of the parameters, and some numbers of their dtype, over all processes, in place."""

    def agreed(self, stop: Callable[[], bool]) -> Callable[[], bool]:
        """The same question, to which all processes hear one answer: yes, where one of them would."""
        return stop

    def require_alike(self, model: nn.Module, step: int) -> None:
        """Wait for all processes.

        Raises:
            Unlike: if they do not stand at one step, with the same weights.
        """


class ProcessGroup(SingleProcess):
    """One of several; see :func:`rendezvous`.

    Raises:
        Gone: in every method, if another has gone.
    """

    def __init__(self, rank: int, count: int) -> None:
        self.rank = rank
        self.count = count

    def add_up(self, parameters: Sequence[nn.Parameter], numbers: Tensor) -> None:
        # A part of a model that no image of this process came by has no gradient here, and perhaps one elsewhere.
        has = self._over_all(torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32), "max")
        moved = [p for p, some in zip(parameters, has.tolist(), strict=True) if some]
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in moved]
        flat = self._over_all(torch.cat([*(g.reshape(-1) for g in gradients), numbers]), "sum")
        *sums, numbers_sum = torch.split(flat, [*(g.numel() for g in gradients), len(numbers)])
        for parameter, gradient, total in zip(moved, gradients, sums, strict=True):
            parameter.grad = gradient.copy_(total.view_as(gradient))
        numbers.copy_(numbers_sum)

    def agreed(self, stop: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: bool(self._over_all(torch.tensor(int(stop()), dtype=torch.int32), "max"))

    def require_alike(self, model: nn.Module, step: int) -> None:
        weights = int(checkpoint.digest(model.state_dict())[:15], 16)
        here = torch.tensor([step, -step, weights, -weights])
        if (self._over_all(here.clone(), "max") != here).any():
            raise RankMismatch("the processes of this trial do not begin with the same weights at the same step")

    def _over_all(self, tensor: Tensor, how: str) -> Tensor:
        """The tensor, in place, reduced over all processes: of the GPU by NCCL, of the CPU by gloo."""
        try:
            dist.all_reduce(tensor, dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise PeerDied(f"another process of this trial has gone: {error}") from error
        return tensor


@contextmanager
def rendezvous(rank: int, count: int, place: Path, device: torch.device) -> Iterator[ProcessGroup]:
    """Meet the other processes, each with a GPU of its own where they compute on GPUs.

    Args:
        rank: which of them this is.
        count: how many they are.
        place: a file that does not exist, in a folder that does; the same for all.
        device: on what kind of device they compute.

    Raises:
        UserError: if there are not as many GPUs.
        Gone: if another has gone.
    """
    for library in ("GLOO", "NCCL"):
        for _, interface in socket.if_nameindex():
            if interface in LOOPBACK:
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)
    if device.type == "cuda":
        if torch.cuda.device_count() < count:
            raise UserError(
                f"{count} processes are to train this trial, each on a GPU, and torch finds {torch.cuda.device_count()}"
            )
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        store = dist.FileStore(str(place), count)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=count)
    except RuntimeError as error:
        raise PeerDied(f"the processes of this trial did not find each other: {error}") from error
    yield ProcessGroup(rank, count)
    dist.destroy_process_group()
