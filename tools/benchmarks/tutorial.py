"""The tutorial of ``pipelines/tutorial.yaml``, trained by vitlab and by plain PyTorch, seed by seed in turns.

    python tools/benchmarks/tutorial.py --root FOLDER [--seeds 16] [--arm softmax-inside]

FOLDER holds the four files of Fashion-MNIST.  Both sides train on the same images, held in memory, each from initial
values and in an order of its own; the plain side is the network of ``tests/plain_vit.py``, a ``DataLoader`` and a
loop, with nothing of vitlab in it.  Printed are the accuracies on the test split, the 90 % interval of the difference of
their means (Welch), which must lie within 3 points, and the seconds a training took, data included and decoding left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from scipy.stats import ttest_ind
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vitlab.data.prepare import Feed, prepare
from vitlab.engines.base import train
from vitlab.lab import plan_study
from vitlab.models import Model, model
from vitlab.planning.values import Trial
from vitlab.registry import slot
from vitlab.training.loop import Training

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from plain_vit import CORRECTED, PUBLISHED, STUDY, plain

MARGIN = 3.0
"""Points of accuracy."""


def vitlabs(trial: Trial) -> tuple[float, float]:
    """Return accuracy on test in percent, and seconds."""
    data = slot("dataset").resolve_choice(trial.spec.data)
    prepared = prepare(data, trial.seeds)
    began = time.perf_counter()
    feed = Feed(prepared, data.options["augment"], trial.seeds)
    network: Model = model.build(trial.spec.model, prepared.info)
    network.initialise(trial.seeds["init"])
    (trained,) = train([Training(network, feed, trial.spec.train, trial.seeds)])
    assert trained is not None
    return 100 * trained.metrics["test/accuracy"], time.perf_counter() - began


def plains(trial: Trial, arm: str, seed: int) -> tuple[float, float]:
    """As :func:`vitlabs`."""
    prepared = prepare(slot("dataset").resolve_choice(trial.spec.data), trial.seeds)
    pixels = {split: (part.x_NCHW, part.y_N) for split, part in (("train", prepared.train), ("test", prepared.test))}
    began = time.perf_counter()
    torch.manual_seed(seed)
    sets = {split: TensorDataset(x_NCHW.float() / 255, y_N) for split, (x_NCHW, y_N) in pixels.items()}
    network, criterion = plain(arm), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.005)
    for _ in range(int(trial.spec.train.epochs)):
        for x_BCHW, y_B in DataLoader(sets["train"], batch_size=128, shuffle=True):
            optimizer.zero_grad()
            criterion(network(x_BCHW), y_B).backward()
            optimizer.step()
    with torch.no_grad():
        hits = sum(int((network(x).argmax(1) == y).sum()) for x, y in DataLoader(sets["test"], batch_size=128))
    return 100 * hits / len(sets["test"]), time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--root", required=True)
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--arm", choices=(PUBLISHED, CORRECTED), default=PUBLISHED)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    changes = {
        "data.root": arguments.root,
        "seeds": arguments.seeds,
        "train.epochs": arguments.epochs,
        "train.evaluations": 1,
    }
    _, plan = plan_study(STUDY, changes=changes)
    print(f"torch {torch.__version__}, 1 thread, {arguments.arm}, {arguments.epochs} epochs; accuracy on test, seconds")
    mine, theirs = [], []
    for seed in range(arguments.seeds):
        trial = plan.find(arguments.arm, seed).trial
        mine.append(vitlabs(trial))
        theirs.append(plains(trial, arguments.arm, seed))
        print(
            f"  seed {seed:2}: vitlab {mine[-1][0]:5.2f} %, {mine[-1][1]:5.1f} s;"
            f" plain {theirs[-1][0]:5.2f} %, {theirs[-1][1]:5.1f} s",
            flush=True,
        )
    accuracies = [[accuracy for accuracy, _ in side] for side in (mine, theirs)]
    for name, side in zip(("vitlab", "plain"), accuracies, strict=True):
        print(f"{name}: mean {statistics.mean(side):.2f} %, standard deviation {statistics.stdev(side):.2f}")
    low, high = ttest_ind(*accuracies, equal_var=False).confidence_interval(0.90)
    verdict = "within" if low > -MARGIN and high < MARGIN else "NOT within"
    print(f"vitlab less plain: 90 % interval [{low:+.2f}, {high:+.2f}], {verdict} {MARGIN:g} points")
    speed = statistics.median(b / a for (_, a), (_, b) in zip(mine, theirs, strict=True))
    print(f"speed: vitlab {speed:.2f} x plain (median over pairs)")


if __name__ == "__main__":
    main()
