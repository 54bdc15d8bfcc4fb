"""P2 and P15: whole studies, from command to report, relative to their trials trained one by one without vitlab.

Both sides by the clock, with start-up, on all cores of this machine.  The studies are those of ``pipelines/``, shorter:
what costs once a study or once a trial weighs more here than in them.  The other side is one process that trains one
after another, at the thread count that is best for it; a few of its trainings are measured, and the rest take as long.

    python tools/benchmarks/studies.py tutorial|timm THREADS COUNT EPOCHS     the other side: seconds of each training

``run.py --only P2-full,P15-full`` runs the studies at full length instead, and compares them with the other side as its
authors run it, one after another with all cores, and at its best setting: one thread, a process per core side by side.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from measuring import Row, row, user_environment
from torch import Tensor, nn
from torch.nn import functional as F

from vitlab.store.folders import TrialFolder

PIPELINES = Path(__file__).parents[2] / "pipelines"
GATE_TUTORIAL, GATE_TIMM = 5.0, 1.3
GATE_FULL_TUTORIAL, GATE_FULL_TUTORIAL_BEST, GATE_FULL_TIMM_BEST = 12.0, 4.0, 1.5
MEASURED = 2  #: trainings of the other side, at each thread count

TUTORIAL = {
    "data.type": "synthetic",
    "data.image_size": 28,
    "data.train_images": 60_000,
    "data.test_images": 10_000,
    "seeds": 16,
    "train.epochs": 1,
    "train.evaluations": 2,
}
"""Of ``tutorial.yaml``: 2 arms x 16 seeds, of random images of Fashion-MNIST's number and size; an epoch instead of 5."""
TUTORIAL_TRIALS, TUTORIAL_EPOCHS, TUTORIAL_BATCH, TUTORIAL_TRAIN = 2 * 16, 1, 128, 421 * 128

POSITION = {"seeds": 8, "train.epochs": 2, "train.evaluations": 1}
"""Of ``position.yaml``: 11 arms x 8 seeds instead of 15, 2 epochs instead of 40."""
POSITION_TRIALS, POSITION_EPOCHS, POSITION_BATCH, POSITION_TRAIN = 11 * 8, 2, 64, 1_149

FULL_TUTORIAL = {name: value for name, value in TUTORIAL.items() if name.startswith("data.")} | {"seeds": 16}
FULL_TUTORIAL_EPOCHS, FULL_POSITION_TRIALS, FULL_POSITION_EPOCHS = 5, 11 * 15, 40


def tutorials() -> list[Row]:
    """P2."""
    what = f"tutorial.yaml, {TUTORIAL_TRIALS} trials of 421 steps, to the tutorial's code, one by one"
    return _compared("P2", what, "tutorial", TUTORIAL, TUTORIAL_TRIALS, TUTORIAL_EPOCHS, GATE_TUTORIAL)


def positions() -> list[Row]:
    """P15."""
    what = f"position.yaml, {POSITION_TRIALS} trials of {POSITION_EPOCHS} epochs, to as many in timm, one by one"
    return _compared("P15", what, "timm", POSITION, POSITION_TRIALS, POSITION_EPOCHS, GATE_TIMM, "position")


def full_tutorials() -> list[Row]:
    """P2 at full length."""
    gates = GATE_FULL_TUTORIAL, GATE_FULL_TUTORIAL_BEST
    return _in_full("P2", "tutorial", FULL_TUTORIAL, "tutorial", TUTORIAL_TRIALS, FULL_TUTORIAL_EPOCHS, *gates)


def full_positions() -> list[Row]:
    """P15 at full length."""
    trials, epochs = FULL_POSITION_TRIALS, FULL_POSITION_EPOCHS
    return _in_full("P15", "position", {}, "timm", trials, epochs, None, GATE_FULL_TIMM_BEST)


def _in_full(
    goal: str,
    study: str,
    changes: Mapping[str, object],
    peer: str,
    trials: int,
    epochs: int,
    gate: float | None,
    gate_best: float,
) -> list[Row]:
    ours, training = _study_s(study, changes)
    cores = len(os.sched_getaffinity(0))
    as_written = _one_by_one_s(peer, cores, trials, epochs)
    best = _side_by_side_s(peer, cores, trials, epochs)
    what = f"{study}.yaml in full, {trials} trials of {epochs} epochs, to the same one by one with {cores} threads"
    return [
        row(goal, what, [as_written / ours], "x", "wall", gate),
        row(goal, f"the same, to {cores} processes of one thread side by side", [best / ours], "x", "wall", gate_best),
        row(goal, "the study, from the command to the report", [ours], "s", "wall"),
        row(goal, "of these, from the first trial's beginning to the last one's end", [training], "s", "wall"),
        row(goal, "the others, one by one", [as_written], "s", "wall"),
        row(goal, "the others, side by side", [best], "s", "wall"),
    ]


def _compared(
    goal: str,
    what: str,
    peer: str,
    changes: Mapping[str, object],
    trials: int,
    epochs: int,
    gate: float,
    study: str = "tutorial",
) -> list[Row]:
    ours, training = _study_s(study, changes)
    theirs = {threads: _one_by_one_s(peer, threads, trials, epochs) for threads in _thread_counts()}
    return [
        row(goal, what, [min(theirs.values()) / ours], "x", "wall", gate),
        row(goal, "the study, from the command to the report", [ours], "s", "wall"),
        row(goal, "of these, from the first trial's beginning to the last one's end", [training], "s", "wall"),
        *(row(goal, f"the others, at threads: {threads}", [took], "s", "wall") for threads, took in theirs.items()),
    ]


def _thread_counts() -> list[int]:
    return sorted({1, len(os.sched_getaffinity(0))})


def _study_s(study: str, changes: Mapping[str, object]) -> tuple[float, float]:
    """Return the elapsed seconds of ``vitlab run`` without earlier results, and those of its training.

    MLflow and the report are as they are by default.
    """
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "-m", "vitlab", "run", str(PIPELINES / f"{study}.yaml"), "--out", folder]
        line += [part for path, value in changes.items() for part in ("--set", f"{path}={value}")]
        began = time.perf_counter()
        ran = subprocess.run(line, env=user_environment(), capture_output=True, text=True)
        passed = time.perf_counter() - began
        if ran.returncode or not list(Path(folder).glob("studies/*/report/*.html")):
            raise RuntimeError(f"{' '.join(line)} has not answered:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
        journals = [TrialFolder(file.parent).events()[0] for file in Path(folder).glob("trials/*/*/events.jsonl")]
        told_ms = [event.t for events in journals for event in events]
    return passed, (max(told_ms) - min(told_ms)) / 1e3


def _one_by_one_s(peer: str, threads: int, trials: int, epochs: int) -> float:
    """Return the seconds of a process that trains this many, extrapolated from its start and a few trainings."""
    return _side_by_side_s(peer, 1, trials, epochs, threads)


def _side_by_side_s(peer: str, processes: int, trials: int, epochs: int, threads: int = 1) -> float:
    """Return the seconds of processes that share this many trainings, extrapolated from their start and a few each."""
    line = [sys.executable, __file__, peer, str(threads), str(MEASURED), str(epochs)]
    began = time.perf_counter()
    running = [
        subprocess.Popen(line, env=user_environment(), stdout=subprocess.PIPE, text=True) for _ in range(processes)
    ]
    each: list[float] = []
    for process in running:
        printed, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{' '.join(line)} has failed")
        each += json.loads(printed.splitlines()[-1])
    passed, mean = time.perf_counter() - began, sum(each) / len(each)
    return passed - MEASURED * mean + trials / processes * mean


# -- other side -------------------------------------------------------------------------------------------------------


def _tutorial(epochs: int) -> Callable[[], None]:
    """Train the tutorial's network once with torchvision's images, and evaluate it on test."""
    from seeds import Pictures
    from torch.utils.data import DataLoader, Subset

    sys.path.append(str(Path(__file__).parents[2] / "tests"))
    from plain_vit import PUBLISHED, plain

    pictures = Pictures()
    train = Subset(pictures, [index % len(pictures) for index in range(TUTORIAL_TRAIN)])
    test = Subset(pictures, range(10_000))

    def once() -> None:
        network, criterion = plain(PUBLISHED).train(), nn.CrossEntropyLoss()
        optimizer = torch.optim.Adam(network.parameters(), lr=0.005)
        for _ in range(epochs):
            for x_BCHW, y_B in DataLoader(train, batch_size=TUTORIAL_BATCH, shuffle=True):
                optimizer.zero_grad()
                criterion(network(x_BCHW), y_B).backward()
                optimizer.step()
        with torch.no_grad():
            for x_BCHW, _ in DataLoader(test, batch_size=TUTORIAL_BATCH):
                network(x_BCHW).argmax(1)

    return once


def _timm(epochs: int) -> Callable[[], None]:
    """Train timm's ViT of this size once, with learned positions, on digits in memory, and evaluate it."""
    from sklearn.datasets import load_digits

    from vitlab.data.torchvision_import import torchvision

    torchvision()  # timm imports torchvision, whose import may need a workaround
    from timm.models.vision_transformer import VisionTransformer

    pixels_NHW, y_N = (torch.from_numpy(array) for array in (load_digits().images, load_digits().target))
    x_NCHW = (pixels_NHW[:, None].float() / 16 - 0.3) / 0.4
    held_out = range(POSITION_TRAIN, len(x_NCHW), POSITION_BATCH)

    def once() -> None:
        network = VisionTransformer(
            img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=32, depth=3, num_heads=4
        ).train()
        optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, fused=True)
        steps = epochs * (POSITION_TRAIN // POSITION_BATCH)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, pct_start=0.1)
        for drawn_B in _batches(epochs):
            optimizer.zero_grad()
            F.cross_entropy(network(x_NCHW[drawn_B]), y_N[drawn_B]).backward()
            optimizer.step()
            schedule.step()
        network.eval()
        with torch.no_grad():
            for begin in held_out:
                network(x_NCHW[begin : begin + POSITION_BATCH]).argmax(1)

    return once


def _batches(epochs: int) -> Iterator[Tensor]:
    for _ in range(epochs):
        order_N = torch.randperm(POSITION_TRAIN)
        yield from order_N[: POSITION_TRAIN // POSITION_BATCH * POSITION_BATCH].view(-1, POSITION_BATCH)


def main() -> None:
    peer, threads, count, epochs = sys.argv[1:]
    torch.set_num_threads(int(threads))
    once = {"tutorial": _tutorial, "timm": _timm}[peer](int(epochs))
    seconds = []
    for _ in range(int(count)):
        began = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - began)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
