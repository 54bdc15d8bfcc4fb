"""P8: crops and flips of images of CIFAR's shape, vitlab's batches against torchvision's images one by one."""

from __future__ import annotations

import pictures
import torch
from measuring import Contender, Row, in_turns, ratios, row
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitlab.data.prepare import Feed, prepare
from vitlab.data.torchvision_import import torchvision
from vitlab.registry import slot
from vitlab.spec import STREAMS

GATE = 10.0
IMAGES, BATCH = 12_800, 128
MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)


class Pictures(Dataset[tuple[Tensor, int]]):
    """Colour images in the form of torchvision's CIFAR10."""

    def __init__(self) -> None:
        transforms = torchvision("torchvision.transforms")
        draw = torch.Generator().manual_seed(0)
        self.x_NHWC = torch.randint(256, (IMAGES, 32, 32, 3), dtype=torch.uint8, generator=draw).numpy()
        self.transform = transforms.Compose(
            [
                transforms.RandomCrop(32, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        )

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        return self.transform(Image.fromarray(self.x_NHWC[index])), index % 10


def _theirs() -> Contender:
    loader = DataLoader(Pictures(), batch_size=BATCH, shuffle=True, drop_last=True)
    batches = iter(loader)

    def batch() -> float:
        nonlocal batches
        try:
            x_BCHW, _ = next(batches)
        except StopIteration:
            batches = iter(loader)
            x_BCHW, _ = next(batches)
        return len(x_BCHW)

    return batch


def _ours(*augment: dict[str, object] | str) -> Contender:
    seeds = dict.fromkeys(STREAMS, 0)
    choice = slot("dataset").resolve_choice(
        {
            "type": "synthetic",
            "image_size": 32,
            "num_channels": 3,
            "train_images": IMAGES,
            "normalize": {"mean": list(MEAN), "std": list(STD)},
            "augment": list(augment),
        }
    )
    feed = Feed(prepare(choice, seeds), choice.options["augment"], seeds)
    step = 0

    def batch() -> float:
        nonlocal step
        step += 1
        return len(feed.batch(step, BATCH).x_BCHW)

    return batch


def measure() -> list[Row]:
    speeds = in_turns(
        {
            "torchvision": _theirs(),
            "crop and flip": _ours({"type": "crop", "padding": 4}, "flip"),
            "nothing": _ours(),
        }
    )
    return [
        row(
            "P8",
            "crop and flip, normalised, to torchvision with PIL",
            ratios(speeds, "crop and flip", "torchvision"),
            "x",
            "CPU",
            GATE,
        ),
        row(
            "P8",
            "no augmentation, normalised, to torchvision with crop and flip",
            ratios(speeds, "nothing", "torchvision"),
            "x",
            "CPU",
        ),
        *pictures.measure(),
    ]
