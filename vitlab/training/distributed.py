"""Data-parallel training of one model by several processes, of one machine or of several.

Each process holds the whole model, draws and augments its own images of a step's batch, and computes their gradients.
Gradients are summed over all processes, so that every process takes the same optimizer step, bitwise.  The sums of the
last layers are computed during the backward pass of the others.

Torch's DistributedDataParallel does the same and is not used here: it wraps the forward pass, which objectives compute
in pieces; it changes its buckets after the first step, and with them the rounding of sums over three processes, so that
a resumed training would differ; and it does not tell a failure in the backward pass from the death of another process.

The batches of an evaluation are divided among the processes.  Each then gets the rows that metrics have computed of all
batches, in their order, and computes the values from them, which equal the values of one process, whatever the metric.

The processes of one machine find each other by a file and communicate over the loopback interface; those of several
machines use torchrun's environment variables ``MASTER_ADDR`` and ``MASTER_PORT``.  GPUs use NCCL, CPUs gloo.  Decisions
of the hosts use gloo too, so that they do not wait for a GPU.

Reference: arXiv:1706.02677 (large batches over several devices), arXiv:2006.15704 (PyTorch DDP).
"""

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitlab.errors import UserError
from vitlab.models.contract import weights_digest

LOOPBACK = ("lo", "lo0")

BUCKET_SIZE = 1 << 23
"""Gradients that are summed by one call, at least: 32 MB in fp32."""

ByBatch = Mapping[str, list[Tensor]]
"""Tensors of evaluation batches by name, one of each batch in order."""


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

    def sum_gradients_during_backward(self, parameters: Sequence[nn.Parameter], passes: int) -> None:
        """Sum the gradients of these parameters in the last of so many backward passes of each step from now on."""

    def finish_gradient_sums(self, numbers: Tensor) -> None:
        """Wait until all gradients of a step are summed, and sum numbers over all processes, in place."""

    @property
    def batches(self) -> slice:
        """The evaluation batches that this process computes."""
        return slice(self.rank, None, self.count)

    def all_gather_by_batch(self, own: ByBatch) -> ByBatch:
        """Return the tensors of all evaluation batches in order, from each process's own; on the CPU if several."""
        return own

    def share_stop(self, stop: Callable[[], bool]) -> Callable[[], bool]:
        """Return a function that returns True in all processes once ``stop`` does in one of them."""
        return stop

    def require_equal_weights(self, model: nn.Module, step: int) -> None:
        """Wait for all processes, and check that they have the same step and weights.

        Raises:
            RankMismatch: If they differ.
        """


ALONE = SingleProcess()


class ProcessGroup(SingleProcess):
    """One of several processes; see :func:`join_process_group`.

    Raises:
        PeerDied: In every method, if another process has died.
    """

    def __init__(self, rank: int, count: int) -> None:
        self.rank = rank
        self.count = count

    def sum_gradients_during_backward(self, parameters: Sequence[nn.Parameter], passes: int) -> None:
        """Divide the parameters into buckets, from the last one, whose gradients are computed first."""
        self._passes = passes
        self._buckets: list[list[nn.Parameter]] = []
        for parameter in reversed(parameters):
            if not self._buckets or sum(p.numel() for p in self._buckets[-1]) >= BUCKET_SIZE:
                self._buckets.append([])
            self._buckets[-1].append(parameter)
            hook = partial(self._on_gradient_ready, len(self._buckets) - 1)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._reset_sums()

    def _reset_sums(self) -> None:
        self._missing = [self._passes * len(bucket) for bucket in self._buckets]  # gradients to be computed
        self._sums: list[tuple[Tensor, dist.Work]] = []  # of the first buckets; they may be under way

    def _on_gradient_ready(self, index: int, _parameter: Tensor) -> None:
        """Start the sums of the buckets that are complete; in one order on all ranks, as collective calls need."""
        self._missing[index] -= 1
        while len(self._sums) < len(self._buckets) and not self._missing[len(self._sums)]:
            self._sum_next_bucket()

    def _sum_next_bucket(self) -> None:
        flat = torch.cat([_gradient_or_zeros(parameter).reshape(-1) for parameter in self._buckets[len(self._sums)]])
        with _raising_peer_died():
            self._sums.append((flat, dist.all_reduce(flat, async_op=True)))

    def finish_gradient_sums(self, numbers: Tensor) -> None:
        """Sum the other buckets and numbers, and store the summed gradients."""
        # A part of a model that no image of this process used has no gradient here, but may have one elsewhere.
        while len(self._sums) < len(self._buckets):
            self._sum_next_bucket()
        here = [parameter.grad is not None for bucket in self._buckets for parameter in bucket]
        has = iter(torch.stack(self._all_gather(torch.tensor(here, dtype=torch.int32))).any(0).tolist())
        with _raising_peer_died():
            dist.all_reduce(numbers)
            for _, work in self._sums:
                work.wait()
        for bucket, (flat, _) in zip(self._buckets, self._sums, strict=True):
            for parameter, total in zip(bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True):
                if next(has):
                    parameter.grad = _gradient_or_zeros(parameter).copy_(total.view_as(parameter))
        self._reset_sums()

    def all_gather_by_batch(self, own: ByBatch) -> ByBatch:
        """Return the tensors of all ranks; each holds all of them in memory, several times for a moment."""
        # Copies, since a view would be sent with all that it is a view of.
        copies = {name: [tensor.to("cpu", copy=True) for tensor in tensors] for name, tensors in own.items()}
        received: list[Any] = [None] * self.count
        with _raising_peer_died():
            dist.all_gather_object(received, copies)
        # The batches of an evaluation are dealt to the ranks in turns; a rank without one does not know the names.
        names = dict.fromkeys(name for each in received for name in each)
        rounds = {name: zip_longest(*(each.get(name, []) for each in received)) for name in names}
        return {name: [one for turn in turns for one in turn if one is not None] for name, turns in rounds.items()}

    def share_stop(self, stop: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: any(self._all_gather(torch.tensor(int(stop()))))

    def require_equal_weights(self, model: nn.Module, step: int) -> None:
        here = torch.tensor([step, int(weights_digest(model.state_dict())[:15], 16)])  # 60 bits, which int64 holds
        if not all(here.equal(there) for there in self._all_gather(here)):
            raise RankMismatch("the processes of this trial do not begin with the same weights at the same step")

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have one shape, by gloo."""
        received = [torch.empty_like(tensor) for _ in range(self.count)]
        with _raising_peer_died():
            dist.all_gather(received, tensor)
        return received


@contextmanager
def _raising_peer_died() -> Iterator[None]:
    """Raise PeerDied for an error of a collective call inside the block, by NCCL on GPUs and by gloo on CPUs."""
    try:
        yield
    # It is a RuntimeError, too, and no sign that a process has died.
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise PeerDied(f"another process of this trial has died: {error}") from error


def _gradient_or_zeros(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


@contextmanager
def join_process_group(rank: int, count: int, place: Path, device: torch.device, nodes: int) -> Iterator[ProcessGroup]:
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
