"""P4: one trial, trained by the loop, relative to every library with one thread."""

from __future__ import annotations

import torch
from contenders import MICRO, PEERS, TINY, loop, peer, training
from measuring import Contender, Row, fastest, in_turns, ratios, row

GATE_BEST, GATE_DEFAULT_BF16 = 0.95, 2.0


def measure() -> list[Row]:
    return [*_micro(), *_tiny()]


def _micro() -> list[Row]:
    contenders = {f"{name}, fused": peer(name, MICRO, fused=True) for name in PEERS}
    contenders |= {f"{name}, fused, bf16": peer(name, MICRO, fused=True, bf16=True) for name in PEERS}
    contenders |= {
        "timm, default AdamW": peer("timm", MICRO, fused=False),
        "timm, default AdamW, bf16": peer("timm", MICRO, fused=False, bf16=True),
        "vitlab": loop(training(MICRO)),
        "vitlab, bf16": loop(training(MICRO, bf16=True)),
        "timm, fused, 2 threads": _threaded("timm"),
    }
    speeds = in_turns(contenders, rounds=5)
    rows = []
    for precision in ("", ", bf16"):
        mine = f"vitlab{precision}"
        peers = [f"{name}, fused{precision}" for name in PEERS]
        best = fastest(speeds, peers)
        rows.append(
            row(
                "P4",
                f"micro{precision or ', fp32'}: one trial to the fastest peer ({best})",
                ratios(speeds, mine, best),
                "x",
                "CPU",
                GATE_BEST,
            )
        )
        for other in (*(name for name in peers if name != best), f"timm, default AdamW{precision}"):
            gate = GATE_DEFAULT_BF16 if other == "timm, default AdamW, bf16" else None
            rows.append(row("P4", f"micro: {mine} to {other}", ratios(speeds, mine, other), "x", "CPU", gate))
    threads = ratios(speeds, "timm, fused", "timm, fused, 2 threads")
    rows.append(row("P4", "micro: work a core of timm at one thread to two threads", threads, "x", "CPU"))
    return rows


def _threaded(name: str) -> Contender:
    step = peer(name, MICRO, fused=True)

    def threaded() -> float:
        torch.set_num_threads(2)
        try:
            return step()
        finally:
            torch.set_num_threads(1)

    return threaded


def _tiny() -> list[Row]:
    contenders = {f"{name}, fused": peer(name, TINY, fused=True) for name in PEERS}
    contenders |= {"timm, default AdamW": peer("timm", TINY, fused=False), "vitlab": loop(training(TINY))}
    speeds = in_turns(contenders)
    best = fastest(speeds, [name for name in contenders if name != "vitlab"])
    return [
        row(
            "P4",
            f"tiny, fp32: one trial to the fastest peer ({best})",
            ratios(speeds, "vitlab", best),
            "x",
            "CPU",
            GATE_BEST,
        ),
        row(
            "P4",
            "tiny, fp32: one trial to timm, default AdamW",
            ratios(speeds, "vitlab", "timm, default AdamW"),
            "x",
            "CPU",
        ),
    ]
