"""Settings of a run that do not affect a trial's identity, and the torch settings that follow from them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from vitlab.errors import UserError


@dataclass(frozen=True)
class Settings:
    """Settings of a run, which are not part of a trial's identity."""

    threads: int = 1
    device: str = "auto"  #: auto, cpu or cuda
    deterministic: bool = True
    keep: str = "last"  #: weights to keep: none or last
    plugins: tuple[str, ...] = ()  #: files of components to load first
    every_s: float = 60.0  #: longest time between two checkpoints
    processes: int = 1  #: processes per trial, each with its share of every batch
    micro_batch_size: int | None = None  #: images that a process computes at a time; None for all
    engine: str = "vmap"  #: of a cohort: vmap or stack


def device_of(name: str) -> torch.device:
    """Return the device for ``auto``, ``cpu`` or ``cuda``.

    Raises:
        UserError: If it does not exist on this machine.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device is cuda, and torch finds no CUDA device here")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def dtype_of(precision: str) -> torch.dtype:
    """Return the dtype of weights and images; bf16 is autocast over float32."""
    return torch.float64 if precision == "fp64" else torch.float32


@contextmanager
def torch_settings(settings: Settings, device: torch.device) -> Iterator[None]:
    """Apply a trial's torch settings inside the block, and restore those of the process afterwards."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if settings.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS for deterministic results
    if settings.deterministic:
        # Otherwise the rounding of MKL depends on memory alignment, and so on a member's position in its cohort.  MKL
        # reads the variable at the first product of a process, so every trial sets it, in a cohort or not.
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    try:
        torch.set_num_threads(settings.threads)
        torch.use_deterministic_algorithms(settings.deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # slow
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
