"""Contract tests of data sets and augmentations.

N images of a split, B of a batch, C channels, H rows, W columns.
"""

from collections.abc import Callable
from typing import Any
from unittest import SkipTest

import torch
from torch import Tensor

from vitlab import noise
from vitlab.data.augment import Augment
from vitlab.data.datasets import Dataset, Images
from vitlab.data.datasets.base import SPLITS
from vitlab.data.pixels import VOID
from vitlab.geometry import DataInfo
from vitlab.registry import ResolvedChoice, slot
from vitlab.registry.plugins import NO_CHANGE
from vitlab.testing.assertions import checked_reason, forbid_global_draws, prefix_failures

B, SIDE = 6, 16
MOST_SHARED = 0.01
"""Largest share of test images that may be training images, too: published sets have a few."""


def check_dataset(choice: ResolvedChoice) -> None:
    """Check that both splits are what ``info`` says, the same at every reading, and disjoint."""
    dataset: Dataset = slot("dataset").build(choice)
    if (reason := checked_reason(dataset.missing())) is not None:
        raise SkipTest(reason)
    with prefix_failures("info"):
        info = dataset.info()
    assert isinstance(info, DataInfo), f"info returns {info!r}; it is a DataInfo"
    assert info.identity, "info has no identity, and its files are here; give a digest of their content"
    train, test = (_read_split_sample(dataset, split) for split in SPLITS)
    for split, images in zip(SPLITS, (train, test), strict=True):
        with prefix_failures(f"split {split}"):
            _check_images(images, info)
        # Read by a new instance, as every worker does.
        again = _read_split_sample(slot("dataset").build(choice), split)
        assert torch.equal(images.x_NCHW, again.x_NCHW) and torch.equal(images.y_N, again.y_N), (
            f"split {split} differs at the second reading; draw from vitlab.plugin.noise, keyed by the split"
        )
    # By content: two splits of one archive may hold the same picture under two names.
    train_hashes = {hash(x_CHW.numpy().tobytes()) for x_CHW in train.x_NCHW}
    shared = sum(hash(x_CHW.numpy().tobytes()) in train_hashes for x_CHW in test.x_NCHW)
    assert shared <= MOST_SHARED * len(test.x_NCHW), (
        f"{shared} of {len(test.x_NCHW)} test images are training images, too; the splits must not share images"
    )
    pictures = dataset.pictures("train")
    _check_groups_and_held_out(dataset, len(train.x_NCHW) if pictures is None else len(pictures))


def check_augment(choice: ResolvedChoice) -> None:
    """Check that an image's change depends on the key and the image's identity alone, and keeps shape and dtype."""
    augment: Augment = slot("augment").build(choice)
    generator = torch.Generator().manual_seed(0)
    x_BCHW = torch.randint(0, 256, (B, 3, SIDE, SIDE), generator=generator, dtype=torch.uint8)
    id_B = torch.tensor([3, 1000, 7, 2**40, 0, 12])
    changed_BCHW = _change_and_check_keyed(augment, x_BCHW / 255 if augment.normalized else x_BCHW, id_B)
    assert changed_BCHW.float().isfinite().all(), "images have values that are not finite"
    y_BHW = torch.randint(0, 4, (B, SIDE, SIDE), generator=generator, dtype=torch.uint8)
    try:
        augment.masks(y_BHW, noise.key(0), id_B)
    except NotImplementedError:
        pass  # a study of segmentation refuses it
    else:
        with prefix_failures("masks"):
            masks_BHW = _change_and_check_keyed(augment.masks, y_BHW, id_B)
            foreign = sorted(set(masks_BHW.flatten().tolist()) - {0, 1, 2, 3, VOID})
            assert not foreign, f"there are labels {foreign}, which no mask had; move labels by nearest neighbour"
    if augment.of_picture:
        boxes = augment.boxes(noise.key(0), id_B, 20, 30)
        inside = (boxes.top_B >= 0) & (boxes.left_B >= 0) & (boxes.height_B > 0) & (boxes.width_B > 0)
        inside &= (boxes.top_B + boxes.height_B <= 20) & (boxes.left_B + boxes.width_B <= 30)
        assert inside.all(), "boxes leave the picture"
        alone = augment.boxes(noise.key(0), id_B[2:3], 20, 30)
        same = all(torch.equal(one, other[2:3]) for one, other in zip(alone, boxes, strict=True))
        assert same, "the box of a picture depends on the other pictures of its batch"


def _change_and_check_keyed(
    change: Callable[[Tensor, noise.Key, Tensor], Tensor], x_BCHW: Tensor, id_B: Tensor
) -> Tensor:
    """Check a change of images or masks, and return them changed."""
    key = noise.key(0, "contract")
    before = x_BCHW.clone()
    with forbid_global_draws():
        y_BCHW = change(x_BCHW, key, id_B)
        # Workers and micro-batches cut batches in other places.
        order_B = torch.arange(B - 1, -1, -1)
        reversed_BCHW = change(x_BCHW[order_B], key, id_B[order_B])
        alone_BCHW = change(x_BCHW[2:3], key, id_B[2:3])
    assert torch.equal(x_BCHW, before), f"changes its argument; {NO_CHANGE}"
    assert y_BCHW.shape == x_BCHW.shape and y_BCHW.dtype == x_BCHW.dtype, (
        f"returns {y_BCHW.dtype} {tuple(y_BCHW.shape)} for {x_BCHW.dtype} {tuple(x_BCHW.shape)}; keep both"
    )
    composed = torch.equal(reversed_BCHW[order_B], y_BCHW) and torch.equal(alone_BCHW, y_BCHW[2:3])
    assert composed, (
        "changes an image differently in another call, or beside other images; draw from vitlab.plugin.noise with the "
        "key and the identities"
    )
    return y_BCHW


def _read_split_sample(dataset: Dataset, split: Any) -> Images:
    with prefix_failures(f"read('{split}')"):
        pictures = dataset.pictures(split)
        if pictures is None:
            return dataset.read(split)
        sample = range(0, len(pictures), max(1, len(pictures) // 100))  # at most 100, evenly spaced
        return Images(torch.stack([pictures.image(index) for index in sample]), pictures.y_N[list(sample)])


def _check_images(images: Images, info: DataInfo) -> None:
    x_NCHW, y_N = images
    assert len(x_NCHW) > 0, "has no images"
    assert x_NCHW.dtype == torch.uint8, f"images are {x_NCHW.dtype}; they are torch.uint8, from 0 to 255"
    shape, expected = tuple(x_NCHW.shape[1:]), (info.channels, *info.image)
    assert shape == expected, f"images have shape {shape}, and info says {expected}"
    count = len(x_NCHW)
    dtype, axes = {
        "classification": (torch.int64, (count,)),
        "segmentation": (torch.uint8, (count, *info.image)),
        "multilabel": (torch.uint8, (count, info.classes)),
    }[info.task]
    assert y_N.dtype == dtype and tuple(y_N.shape) == axes, (
        f"labels are {y_N.dtype} {tuple(y_N.shape)}; they are {dtype} {axes}"
    )
    labels = set(y_N.flatten().tolist()) - ({VOID} if info.task == "segmentation" else set())
    outside = sorted(labels - set(range(2 if info.task == "multilabel" else info.classes)))
    assert labels and not outside, (
        f"there are labels {outside[:5]}, and info says {info.classes} classes; labels are 0 to {info.classes - 1}"
    )


def _check_groups_and_held_out(dataset: Dataset, count: int) -> None:
    """Check the groups and the authors' validation images among ``count`` training images."""
    with prefix_failures("groups and held_out"):
        groups, held_out = dataset.groups(), dataset.held_out()
    if groups is not None:
        assert groups.dtype == torch.int64 and tuple(groups.shape) == (count,), (
            f"groups is {groups.dtype} {tuple(groups.shape)}; it is torch.int64 {(count,)}"
        )
    if held_out is not None:
        rows = set(held_out.tolist())
        fits = len(rows) == len(held_out) < count and rows <= set(range(count))
        assert fits, f"held_out has {len(held_out)} indices; they are different ones of {count} training images"
