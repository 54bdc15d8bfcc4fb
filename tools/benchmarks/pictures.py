"""P8, pictures in files: images of 224 by 224 pixels decoded each time, read decoded from disk, and from memory."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
from measuring import Contender, Row, in_turns, ratios, row
from PIL import Image

from vitlab import noise
from vitlab.data.image_cache import CropRequest, ReadRequest
from vitlab.data.prepare import prepare
from vitlab.registry import slot
from vitlab.spec import STREAMS

IMAGES, BATCH = 256, 32
HEIGHT, WIDTH = 375, 500
"""Of a picture: the median of ImageNet's."""


def _write(root: Path) -> None:
    """Write JPEGs of about 95 KB with the grain of photographs."""
    draw = np.random.default_rng(0)
    for number in range(IMAGES):
        folder = root / ("test" if number < 8 else "train") / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(draw.integers(0, 256, (24, 32, 3), np.uint8))
        smooth = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.float32)
        grainy = smooth + draw.normal(0, 12, smooth.shape)
        Image.fromarray(grainy.clip(0, 255).astype(np.uint8)).save(folder / f"{number}.jpg", quality=92)


def _reading(root: Path, decoded: str, cut: bool = False) -> Contender:
    """Read images in a random order in this thread; prefetching would distort the next measurement."""
    settings = {"type": "image_folder", "root": str(root), "decoded": decoded, "normalize": "imagenet"}
    train = prepare(settings, dict.fromkeys(STREAMS, 0)).train
    draw = torch.Generator().manual_seed(0)
    key = noise.key(0, "augment", 0, 0)
    boxes = partial(slot("augment").build("random_resized_crop").boxes, key)

    def batch() -> float:
        picked_B = torch.randperm(len(train), generator=draw)[:BATCH]
        if cut:
            assert train.stored is not None
            out_BCHW = np.empty((BATCH, *train.stored.shape[1:]), np.uint8)
            request = ReadRequest(train.row_N[picked_B], train.id_N[picked_B], CropRequest(boxes, "bilinear"))
            train.stored.fill(out_BCHW, request)
        else:
            train.at(picked_B)
        return BATCH

    return batch


def measure() -> list[Row]:
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "pictures"
        _write(root)
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        try:
            speeds = in_turns(
                {
                    "decoded": _reading(root, "never"),
                    "cut": _reading(root, "never", cut=True),
                    "disk": _reading(root, "disk"),
                    "memory": _reading(root, "memory"),
                }
            )
        finally:
            os.environ.pop("XDG_CACHE_HOME")
            if before is not None:
                os.environ["XDG_CACHE_HOME"] = before
    return [
        row("P8", "224-pixel pictures decoded on disk, to decoding", ratios(speeds, "disk", "decoded"), "x", "CPU"),
        row("P8", "the same in memory, to decoding", ratios(speeds, "memory", "decoded"), "x", "CPU"),
        row("P8", "cut out of the picture each time, to decoding", ratios(speeds, "cut", "decoded"), "x", "CPU"),
        row("P8", "decoding a picture of 500 x 375", [1000 / speed for speed in speeds["decoded"]], "ms", "CPU"),
    ]


if __name__ == "__main__":
    for found in measure():
        print(found)
