"""Speed and memory of the implementations of attention, side by side.

    python tools/benchmarks/attention.py [--device cuda] [--rounds 7]

Every model has the same weights and sees the same images.  Times: all implementations in turns, each for a short block,
several rounds; a figure is the median over rounds of the ratio to ``explicit`` in the same round.  Memory: the peak of one
training step above what the process held before it, each implementation in a process of its own.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vitlab.geometry import DataInfo
from vitlab.models import Model, model

IMPLEMENTATIONS = ("explicit", "split", "per_head", "sdpa")
SHAPES: dict[str, tuple[int, DataInfo, dict[str, Any]]] = {
    "digits, 17 tokens, dim 32, batch 64": (
        64,
        DataInfo(image=(8, 8), channels=1, classes=10),
        {"patch_size": 2, "dim": 32, "depth": 3, "heads": 4},
    ),
    "CIFAR size, 65 tokens, dim 64, batch 64": (
        64,
        DataInfo(image=(32, 32), channels=3, classes=10),
        {"patch_size": 4, "dim": 64, "depth": 6, "heads": 4},
    ),
    "ViT-Ti/16 at 224, 197 tokens, batch 8": (
        8,
        DataInfo(image=(224, 224), channels=3, classes=1000),
        {"patch_size": 16, "dim": 192, "depth": 12, "heads": 3},
    ),
}


def built(attention: str, shape: str, device: torch.device) -> tuple[Model, torch.Tensor, torch.Tensor]:
    """Return a model in training mode, a batch of noise and its labels."""
    batch, info, options = SHAPES[shape]
    network = model.build({"type": "vit", **options, "attention": attention}, info)
    network.initialise(0)
    draw = torch.Generator().manual_seed(0)
    x_BCHW = torch.randn(batch, info.channels, *info.image, generator=draw)
    y_B = torch.randint(info.classes, (batch,), generator=draw)
    return network.to(device).train(), x_BCHW.to(device), y_B.to(device)


def training_step(network: Model, x_BCHW: torch.Tensor, y_B: torch.Tensor) -> None:
    network.zero_grad(set_to_none=True)
    torch.nn.functional.cross_entropy(network.logits_by_head(network(x_BCHW))[""], y_B).backward()


@torch.no_grad()
def inference(network: Model, x_BCHW: torch.Tensor, y_B: torch.Tensor) -> None:
    network(x_BCHW)


def seconds(work: Callable[[], None], device: torch.device, at_least_s: float = 0.3) -> float:
    """Return the seconds per call, from a block of calls of at least that length."""
    calls, began = 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < at_least_s:
        work()
        calls += 1
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return passed / calls


def speed(shape: str, device: torch.device, rounds: int) -> dict[str, dict[str, tuple[float, float]]]:
    """Return (seconds per call, median ratio of speeds to explicit) by work and implementation."""
    models = {name: built(name, shape, device) for name in IMPLEMENTATIONS}
    speeds = {}
    for label, work in (("training step", training_step), ("inference", inference)):
        for parts in models.values():
            work(*parts)
        times = [
            {name: seconds(functools.partial(work, *parts), device) for name, parts in models.items()}
            for _ in range(rounds)
        ]
        speeds[label] = {
            name: (
                statistics.median(one[name] for one in times),
                statistics.median(one["explicit"] / one[name] for one in times),
            )
            for name in IMPLEMENTATIONS
        }
    return speeds


def _step_memory(attention: str, shape: str, device: str, answer: Any) -> None:
    torch.set_num_threads(1)
    parts = built(attention, shape, torch.device(device))
    baseline = _forget_the_peak(device)
    training_step(*parts)
    answer.put(_peak(device) - baseline)


def _forget_the_peak(device: str) -> int:
    """Reset the peak of memory and return the bytes held now, on Linux by the kernel's own account."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")
    return _peak(device)


def _peak(device: str) -> int:
    if device != "cpu":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def memory(attention: str, shape: str, device: torch.device) -> int:
    """Return the bytes that the first training step needs at its peak, above the bytes held before."""
    context = multiprocessing.get_context("spawn")
    answer = context.SimpleQueue()
    process = context.Process(target=_step_memory, args=(attention, shape, str(device), answer))
    process.start()
    process.join()
    return int(answer.get())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {device}, 1 thread, {arguments.rounds} rounds")
    for shape in SHAPES:
        print(f"\n{shape}")
        print(f"  {'':10}{'training step':>26}{'inference':>26}{'step memory':>14}")
        times = speed(shape, device, arguments.rounds)
        for name in IMPLEMENTATIONS:
            cells = [f"{1e3 * s:9.2f} ms ({ratio:4.2f} x)" for s, ratio in (times[label][name] for label in times)]
            used = f"{memory(name, shape, device) / 2**20:.1f} MiB"
            print(f"  {name:10}{cells[0]:>26}{cells[1]:>26}{used:>14}")
    print("\n(n x): speed as a multiple of explicit")


if __name__ == "__main__":
    main()
