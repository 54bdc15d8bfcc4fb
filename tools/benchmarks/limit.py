"""P13: operations per second of a training, relative to those of a large matrix product."""

from __future__ import annotations

import torch
from contenders import TINY, Shape, loop, together, training
from measuring import Contender, Row, in_turns, ratios, row

from vitlab.models.cost import count_macs
from vitlab.training.loop import Training

SEEDS = 16
SIZE = 2048
GATE_TINY, GATE_DEIT = 0.12, 0.55

DEIT_TI = Shape(channels=3, patch=16, dim=192, heads=3, depth=12, batch=8, image=224, images=256)


def measure() -> list[Row]:
    """At one thread.  A training step is counted as three times the multiply-adds of a forward pass."""
    tiny, deit = [training(TINY, seed) for seed in range(SEEDS)], training(DEIT_TI, bf16=True)
    speeds = in_turns(
        {
            "fp32": _product(torch.float32),
            "bf16": _product(torch.bfloat16),
            "tiny": _operations(together(tiny), tiny[0]),
            "DeiT-Ti": _operations(loop(deit), deit),
        }
    )
    what = f"of the rate of a product of {SIZE} by {SIZE}"
    return [
        row("P13", f"tiny, fp32, 16 seeds: share {what}", ratios(speeds, "tiny", "fp32"), "x", "CPU", GATE_TINY),
        row("P13", f"DeiT-Ti, bf16: share {what}", ratios(speeds, "DeiT-Ti", "bf16"), "x", "CPU", GATE_DEIT),
        row("P13", "the product in fp32", [rate / 1e9 for rate in speeds["fp32"]], "GFLOP/s", "CPU"),
        row("P13", "the product in bf16", [rate / 1e9 for rate in speeds["bf16"]], "GFLOP/s", "CPU"),
    ]


def _product(dtype: torch.dtype) -> Contender:
    left, right = (torch.rand(SIZE, SIZE).to(dtype) for _ in range(2))

    def step() -> float:
        torch.mm(left, right)
        return 2.0 * SIZE**3

    return step


def _operations(work: Contender, one: Training) -> Contender:
    """The same, in floating-point operations for images."""
    of_an_image = 3 * 2 * count_macs(one.model, one.feed.info)

    def step() -> float:
        return work() * of_an_image

    return step
