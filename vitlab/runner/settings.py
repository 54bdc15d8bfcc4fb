"""How a trial is run: what is no part of what it is, and torch set accordingly."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from vitlab.errors import UserError


@dataclass(frozen=True)
class Settings:
    """How a trial is run; nothing here is part of what it is."""

    threads: int = 1
    device: str = "auto"  #: auto, cpu or cuda
    deterministic: bool = True
    keep: str = "last"  #: weights to keep: none or last
    plugins: tuple[str, ...] = ()  #: files of components to load first
    every_s: float = 60.0  #: longest time between two checkpoints
    processes: int = 1  #: that train the trial together, each with its share of every batch
    micro_batch_size: int | None = None  #: images of a batch that a process computes at a time; None: all
    engine: str = "vmap"  #: of a cohort: vmap or stack


def device_of(name: str) -> torch.device:
    """The device that ``auto``, ``cpu`` or ``cuda`` stands for here.

    Raises:
        UserError: if it is not here.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device is cuda, and torch finds no CUDA device here")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def dtype_of(train: Mapping[str, Any]) -> torch.dtype:
    """Of weights and images; bf16 is autocast over float32."""
    return torch.float64 if train.get("precision") == "fp64" else torch.float32


@contextmanager
def torch_set(settings: Settings, device: torch.device) -> Iterator[None]:
    """Torch as the trial wants it, and afterwards as it was: an inline trial is a guest in its process."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if settings.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS refuses to be deterministic
    if settings.deterministic:
        # Or MKL rounds a product by where its matrices lie in memory, and a member of a cohort by its place in it.  MKL
        # looks at its first product in a process, so every trial says it: a worker may train one alone, and then many.
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    try:
        torch.set_num_threads(settings.threads)
        torch.use_deterministic_algorithms(settings.deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it costs time
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
