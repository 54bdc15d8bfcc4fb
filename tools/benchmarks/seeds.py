"""P1 and P3: sixteen seeds trained together, relative to the tutorial's code and to timm."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from contenders import TINY, loop, peer, planned, together, training
from measuring import Contender, Row, in_turns, ratios, row
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from vitlab.data.torchvision_import import torchvision
from vitlab.lab import plan_study

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from plain_vit import PUBLISHED, STUDY, plain

SEEDS = 16
GATE_TUTORIAL, GATE_TIMM = 5.0, 2.3
IMAGES = 12_800


class Pictures(Dataset[tuple[Tensor, int]]):
    """Grey 28x28 images in the form of torchvision's MNIST: one PIL image at a time, through the transform."""

    def __init__(self) -> None:
        transforms = torchvision("torchvision.transforms")
        draw = torch.Generator().manual_seed(0)
        self.x_NHW = torch.randint(256, (IMAGES, 28, 28), dtype=torch.uint8, generator=draw)
        self.y_N = torch.randint(10, (IMAGES,), generator=draw)
        self.transform = transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()])

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        return self.transform(Image.fromarray(self.x_NHW[index].numpy())), int(self.y_N[index])


def tutorial() -> Contender:
    """Return a step of the tutorial's training, in images: its network, torchvision's images, Adam."""
    torch.manual_seed(0)
    network, criterion = plain(PUBLISHED).train(), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.005)
    batches = _without_end(DataLoader(Pictures(), batch_size=128, shuffle=True, drop_last=True))

    def step() -> float:
        x_BCHW, y_B = next(batches)
        optimizer.zero_grad()
        criterion(network(x_BCHW), y_B).backward()
        optimizer.step()
        return len(y_B)

    return step


def _without_end(loader: DataLoader[tuple[Tensor, int]]) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from loader


def to_the_tutorial() -> list[Row]:
    """Measure P1: training with data, per core, without decoding, evaluations and start-up."""
    changes = {
        "data.type": "synthetic",
        "data.image_size": 28,
        "data.train_images": IMAGES,
        "seeds": SEEDS,
    }
    _, plan = plan_study(STUDY, changes=changes)
    trials = [plan.find(PUBLISHED, seed).trial for seed in range(SEEDS)]
    speeds = in_turns(
        {
            "tutorial": tutorial(),
            "one": loop(planned(trials[0])),
            "sixteen": together([planned(trial) for trial in trials]),
            "sixteen by vmap": together([planned(trial) for trial in trials], "vmap"),
        },
        block_s=0.4,
    )
    return [
        row(
            "P1",
            "16 seeds of pipelines/tutorial.yaml together to the tutorial's code",
            ratios(speeds, "sixteen", "tutorial"),
            "x",
            "CPU",
            GATE_TUTORIAL,
        ),
        row("P1", "the same by vmap", ratios(speeds, "sixteen by vmap", "tutorial"), "x", "CPU"),
        row("P1", "one seed of it by the loop to the tutorial's code", ratios(speeds, "one", "tutorial"), "x", "CPU"),
        row("P1", "16 seeds together to one by the loop", ratios(speeds, "sixteen", "one"), "x", "CPU"),
    ]


def to_timm() -> list[Row]:
    """Measure P3: both sides have data in memory."""
    contenders = {
        "timm, default AdamW": peer("timm", TINY, fused=False),
        "timm, fused AdamW": peer("timm", TINY, fused=True),
        "one": loop(training(TINY)),
        "sixteen": together([training(TINY, seed) for seed in range(SEEDS)]),
        "sixteen by vmap": together([training(TINY, seed) for seed in range(SEEDS)], "vmap"),
    }
    speeds = in_turns(contenders)
    rows = [
        row(
            "P3",
            f"tiny, 16 seeds together to {other}, data in memory",
            ratios(speeds, "sixteen", other),
            "x",
            "CPU",
            gate,
        )
        for other, gate in (("timm, default AdamW", GATE_TIMM), ("timm, fused AdamW", None))
    ]
    rows.append(
        row(
            "P3",
            "tiny, 16 seeds by vmap to timm, default AdamW",
            ratios(speeds, "sixteen by vmap", "timm, default AdamW"),
            "x",
            "CPU",
        )
    )
    return [*rows, row("P3", "tiny, 16 seeds to one by the loop", ratios(speeds, "sixteen", "one"), "x", "CPU")]
