"""Speed on one GPU: ``make bench-gpu``, a quarter of an hour; the table is to be pasted into BENCHMARKS.md.

    python tools/benchmarks/gpu.py [--only singles,seeds] [--small]

Contenders run in turns (:mod:`measuring`), timed by the wall clock around blocks that end with a synchronisation.  MFU is
the share of the card's rate in a large bf16 product, measured in the same run, that the multiply-adds of forward and
backward passes need; timm's figure uses the operations of vitlab's model, whose shape is the same.  ``--small`` shrinks
everything, so that the program runs to its end on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import Queue
from threading import Barrier
from typing import Any

import torch
import yaml
from contenders import Shape, start_training, timm, training_spec
from measuring import Contender, in_turns, ratios
from torch.nn import functional as F

from vitlab.executors import Settings
from vitlab.models.cost import count_macs
from vitlab.registry import slot
from vitlab.runner.execution import torch_settings
from vitlab.spec import STREAMS, TrialSpec
from vitlab.training.artifacts import clean_up_and_read_checkpoint, make_checkpoint_writer
from vitlab.training.loop import Training

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDS, BLOCK_S = 3, 1.0

S16, B16 = (
    Shape(channels=3, patch=16, dim=dim, heads=dim // 64, depth=12, batch=256, image=224, images=1024)
    for dim in (384, 768)
)
CIFAR = Shape(channels=3, patch=4, dim=192, heads=3, depth=6, batch=128, image=32, images=4096)
SMALL = Shape(channels=3, patch=8, dim=16, heads=2, depth=2, batch=8, image=16, images=64)


@dataclass(frozen=True)
class Line:
    """A line of the table."""

    what: str
    images_per_s: float
    note: str = ""

    def __str__(self) -> str:
        """Return the line in Markdown."""
        return f"| {self.what} | {self.images_per_s:,.0f} | {self.note} |"


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def blocks(step: Callable[[], object], images: int, steps: int) -> Contender:
    """Return a contender of several steps, which returns when the device has computed them."""

    def work() -> float:
        for _ in range(steps):
            step()
        synchronize()
        return float(steps * images)

    return work


def medians(speeds: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the median speed of each contender."""
    return {name: sorted(values)[len(values) // 2] for name, values in speeds.items()}


def matrix_rate(dtype: torch.dtype, size: int) -> float:
    """Return the operations per second of a square matrix product of random numbers."""
    left, right = (torch.randn(size, size, device=DEVICE).to(dtype) for _ in range(2))
    speeds = in_turns(
        {"product": blocks(lambda: torch.mm(left, right), 1, 10)}, time.perf_counter, rounds=ROUNDS, block_s=0.2
    )
    return 2.0 * size**3 * max(speeds["product"])


def training(
    shape: Shape,
    precision: str,
    seed: int = 0,
    model: Mapping[str, Any] | None = None,
    augment: tuple[str, ...] = (),
    device: str = DEVICE,
) -> Training:
    """Return a training of a shape on a device."""
    spec = training_spec(shape)
    spec["train"]["precision"] = precision
    spec["model"] |= model or {}
    spec["data"]["augment"] = list(augment)
    seeds = {**dict.fromkeys(STREAMS, seed), "split": 0}
    return start_training(TrialSpec.model_validate(spec), seeds, device)


def timm_step(shape: Shape, *, compiled: bool) -> Callable[[], object]:
    """Return a training step of timm's ViT in bf16, with fused AdamW and images on the device."""
    network: Any = timm(shape).to(DEVICE).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.05, fused=True)
    if compiled:
        network = torch.compile(network)
    x_NCHW = torch.rand(shape.images, shape.channels, shape.image, shape.image, device=DEVICE)
    y_N = torch.randint(10, (shape.images,), device=DEVICE)

    def step() -> None:
        drawn_B = torch.randint(shape.images, (shape.batch,), device=DEVICE)
        with torch.autocast(DEVICE, torch.bfloat16):
            logits_BK = network(x_NCHW[drawn_B])
        optimizer.zero_grad()
        F.cross_entropy(logits_BK.float(), y_N[drawn_B]).backward()
        optimizer.step()

    return step


def start_and_measure_memory(start: Callable[[], Callable[[], object]]) -> tuple[Callable[[], object], float]:
    """Return a training step that was taken once, and the memory of starting and taking it in GiB; 0 on a CPU."""
    before = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step = start()
    step()
    synchronize()
    return step, (torch.cuda.max_memory_allocated() - before) / 2**30 if DEVICE == "cuda" else 0.0


def free_memory() -> None:
    """Free the memory of the last contenders."""
    gc.collect()
    torch.compiler.reset()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def singles(small: bool) -> Iterator[Line]:
    """Yield speed, MFU and memory of one training in bf16 beside timm."""
    rate = matrix_rate(torch.bfloat16, 256 if small else 8192)
    yield Line(f"product in bf16: {rate / 1e12:,.1f} TFLOP/s", 0.0)
    shapes = {"ViT-S/16": SMALL} if small else {"ViT-S/16": S16, "ViT-B/16": B16}
    for name, shape in shapes.items():
        engine: Any = slot("engine").get("compiled")
        one = training(shape, "bf16")
        operations = 3 * 2 * count_macs(one.model, one.feed.info)
        del one
        starts: dict[str, Callable[[], Callable[[], object]]] = {
            "vitlab, loop": lambda shape=shape: training(shape, "bf16").train_step,
            "timm": partial(timm_step, shape, compiled=False),
        }
        if not small:  # compiling takes a minute on a CPU
            starts["vitlab, compiled"] = lambda shape=shape, engine=engine: engine([training(shape, "bf16")]).train_step
            starts["timm, compiled"] = partial(timm_step, shape, compiled=True)
        started = {what: start_and_measure_memory(start) for what, start in starts.items()}
        contenders = {what: blocks(step, shape.batch, 2 if small else 5) for what, (step, _) in started.items()}
        speeds = in_turns(contenders, time.perf_counter, 1 if small else ROUNDS, 0.01 if small else BLOCK_S)
        for what, speed in medians(speeds).items():
            note = f"MFU {100 * speed * operations / rate:.0f} %, {started[what][1]:.1f} GiB"
            if what.startswith("vitlab"):
                peer = what.replace("vitlab, loop", "timm").replace("vitlab", "timm")
                factors = ratios(speeds, what, peer)
                note += f", {min(factors):.2f} to {max(factors):.2f} x {peer}"
            yield Line(f"{name}, bf16, batches of {shape.batch}: {what}", speed, note)
        del started, contenders
        free_memory()


VARIANTS: Mapping[str, tuple[Mapping[str, Any], tuple[str, ...]]] = {
    "": ({}, ()),
    ", drop path": ({"drop_path": 0.1}, ()),
    ", flip, crop and RandAugment": ({}, ("flip", "crop", "rand_augment")),
}
"""Options of the model and augmentations, by what the table says of them."""


ENGINES = ("vmap", "compiled_vmap")
"""Engines of several seeds; the second compiles, which takes a minute on a CPU."""


def seeds(small: bool) -> Iterator[Line]:
    """Yield the speed of 16 seeds of a small ViT: one after another, and together, as is and compiled."""
    shape, count = (SMALL, 2) if small else (CIFAR, 16)
    for variant, (model, augment) in VARIANTS.items():
        what = f"CIFAR's shape, width {shape.dim}, bf16{variant}"

        def start(seed: int = 0, model: Mapping[str, Any] = model, augment: tuple[str, ...] = augment) -> Training:
            return training(shape, "bf16", seed, model, augment)

        def together(engine: str, start: Callable[[int], Training] = start) -> Contender:
            cohort: Any = slot("engine").get(engine)([start(seed) for seed in range(count)])
            return blocks(cohort.train_step, shape.batch * count, 1 if small else 4)

        builders = {"one by loop": lambda start=start: blocks(start().train_step, shape.batch, 2 if small else 10)}
        builders |= {f"{count} by {engine}": partial(together, engine) for engine in ENGINES[: 1 if small else 2]}
        if not small and not variant:
            builders["one by compiled"] = lambda start=start: blocks(
                slot("engine").get("compiled")([start()]).train_step, shape.batch, 10
            )
        contenders: dict[str, Contender] = {}
        for name, build in builders.items():
            try:
                contenders[name] = build()
                contenders[name]()
            except torch.OutOfMemoryError:
                contenders.pop(name, None)
                yield Line(f"{what}: {name}: memory ran out", 0.0)
        speeds = in_turns(contenders, time.perf_counter, 1 if small else 3, 0.01 if small else BLOCK_S)
        for name, speed in medians(speeds).items():
            factors = ratios(speeds, name, "one by loop")
            yield Line(f"{what}: {name}", speed, f"{min(factors):.2f} to {max(factors):.2f} x")
        del contenders
        free_memory()


def train_beside_others(shape: Shape, seconds: float, start: Barrier, speeds: Queue[float]) -> None:
    """Train by ``loop`` for some seconds, once all processes have done a first step, and put the images per second."""
    step = training(shape, "bf16").train_step
    step()
    synchronize()
    start.wait()
    began, steps = time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        step()
        steps += 1
    synchronize()
    speeds.put(steps * shape.batch / (time.perf_counter() - began))


def processes(small: bool) -> Iterator[Line]:
    """Yield the speed of several processes that share the device, with one seed of a small ViT each."""
    context = multiprocessing.get_context("spawn")
    shape, count = (SMALL, 2) if small else (CIFAR, 16)
    start, speeds = context.Barrier(count, timeout=300), context.Queue()
    arguments = shape, 0.2 if small else 10.0, start, speeds
    workers = [context.Process(target=train_beside_others, args=arguments) for _ in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    what = f"CIFAR's shape, width {shape.dim}, bf16: {count} processes of one by loop"
    failed = sum(worker.exitcode != 0 for worker in workers)
    if failed:
        yield Line(f"{what}: {failed} failed", 0.0)
    else:
        yield Line(what, sum(speeds.get() for _ in workers))


def determinism(small: bool) -> Iterator[Line]:
    """Yield whether two trainings have equal weights after some steps, under the settings of a trial."""
    shape = SMALL if small else replace(CIFAR, images=1024)
    for precision in ("fp32", "bf16"):
        weights = []
        for _ in range(2):
            with torch_settings(Settings(device=DEVICE), torch.device(DEVICE), precision):
                one = training(shape, precision)
                for _ in range(5):
                    one.train_step()
                synchronize()
            weights.append([parameter.detach().clone() for parameter in one.parameters])
        equal = all(torch.equal(*pair) for pair in zip(*weights, strict=True))
        yield Line(f"5 steps twice, {precision}: {'equal to the bit' if equal else 'DIFFERENT'}", 0.0)


def resume(small: bool) -> Iterator[Line]:
    """Yield how a training that is resumed on another device differs from an uninterrupted one."""
    shape = SMALL if small else replace(CIFAR, images=1024)
    other = "cuda:1" if torch.cuda.device_count() > 1 else "cpu"
    with (
        tempfile.TemporaryDirectory() as folder,
        torch_settings(Settings(device=DEVICE), torch.device(DEVICE), "fp32"),
    ):
        whole, begun, resumed = (training(shape, "fp32", device=device) for device in (DEVICE, DEVICE, other))
        begun.write = lambda state: make_checkpoint_writer(Path(folder), state)()
        for one, steps in ((whole, 6), (begun, 3)):
            for _ in range(steps):
                one.train_step()
        begun.save_if_finite()
        state = clean_up_and_read_checkpoint(Path(folder))
        assert state is not None
        resumed.load(state)
        for _ in range(3):
            resumed.train_step()
        pairs = [
            [one.detach().cpu() for one in pair] for pair in zip(whole.parameters, resumed.parameters, strict=True)
        ]
    difference = max(float((one - another).abs().max()) for one, another in pairs)
    note = f"weights differ by at most {difference:.1e}" if difference else "equal to the bit"
    yield Line(f"6 steps, fp32, the last 3 resumed on {other}: {note}", 0.0)


def study(small: bool) -> Iterator[Line]:
    """Yield the time from command to report of 80 trainings.

    Cold; half of its arms warm, with the graphs of the first run, and compared with it; and these again, with the
    results stored.
    """
    others = ["none"] if small else ["none", "sincos2d", "rope2d"]
    base = training_spec(SMALL if small else CIFAR)
    base["train"] |= {"steps": 4 if small else 400, "precision": "fp32" if small else "bf16", "evaluations": 1}
    engine = {"executor": "inline"} if small else {"engine": "compiled_vmap", "workers": 4}
    content = {"study": "bench-gpu", "base": base, "seeds": 2 if small else 20, "run": {"tracker": "none", **engine}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for out, arms in (("first", others), ("second", others[:1])):
            text = yaml.safe_dump({**content, "design": {"one_at_a_time": {"model.position": arms}}}, sort_keys=False)
            (folder / f"{out}.yaml").write_text(text)
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "graphs")}
        for what, out in (("cold", "first"), ("warm", "second"), ("again", "second")):
            began = time.perf_counter()
            command = [sys.executable, "-P", "-m", "vitlab", "run", f"{out}.yaml", "--out", out]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            took = time.perf_counter() - began
            if done.returncode != 0:
                sys.exit(done.stdout[-2000:] + done.stderr[-4000:])
            trials = len(outcomes(folder / out))
            yield Line(f"study of {trials} trainings of {base['train']['steps']} steps, {what}: {took:.0f} s", 0.0)
        first, second = (outcomes(folder / out) for out in ("first", "second"))
        equal = sum(first.get(key) == outcome for key, outcome in second.items())
        yield Line(f"the study twice: {equal} of {len(second)} trainings equal to the bit", 0.0)


def outcomes(folder: Path) -> dict[str, object]:
    """Return the computed numbers of the trials of an output folder, with the digests of their weights, by key."""
    files = folder.glob("trials/*/*/result.json")
    return {file.parts[-3]: json.loads(file.read_text())["outcome"] for file in files}


PARTS: Mapping[str, Callable[[bool], Iterator[Line]]] = {
    "singles": singles,
    "seeds": seeds,
    "processes": processes,
    "determinism": determinism,
    "resume": resume,
    "study": study,
}


def main() -> None:
    """Measure, and print a line at a time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between them")
    parser.add_argument("--small", action="store_true", help="tiny models and one round")
    options = parser.parse_args()
    card = torch.cuda.get_device_name() if DEVICE == "cuda" else f"NO GPU ({platform.processor()})"
    print(f"{card}, torch {torch.__version__}, Python {platform.python_version()}\n")
    print("| what | images/s | |\n| --- | --: | --- |", flush=True)
    for part in options.only.split(","):
        for line in PARTS[part](options.small):
            print(line, flush=True)


if __name__ == "__main__":
    main()
