"""``voc_segmentation`` and ``pets``: photographs with masks, as published by their authors.

N images, H rows, W columns.
"""

import hashlib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from vitlab.data.datasets import files
from vitlab.data.datasets.base import SPLITS, Images, Size, Split, dataset
from vitlab.data.datasets.files import Published
from vitlab.data.datasets.pictures import Decoding, Fit, naming_picture, to_tensor
from vitlab.data.pixels import VOID
from vitlab.errors import DataError
from vitlab.geometry import DataInfo


class Item(NamedTuple):
    """A picture, its mask, and the labels of the mask's levels."""

    picture: Path
    mask: Path
    meaning: Mapping[int, int]  #: level of the mask to label


@dataclass(kw_only=True)
class MaskedPictures(Published):
    """Base of data sets of photographs with masks, listed in a text file per split.

    All are decoded into memory and resized to one size, so metrics are of pixels at that size, and of the centre of
    the pictures if ``fit`` is ``crop``; published metrics of whole pictures differ.  The identity is a digest over
    every listed picture and mask; there is none if the data is not here.

    Args:
        image_size: pixels of every picture and mask.
        fit: ``crop`` resizes to cover both sides and crops the centre, ``squash`` ignores proportions.
    """

    lists: ClassVar[Mapping[Split, str]]  #: the file that lists a split

    image_size: Size = (224, 224)
    fit: Fit = "crop"

    @abstractmethod
    def labels(self) -> tuple[str, ...]:
        """Return the names of the classes, the background first."""

    @abstractmethod
    def item_from_line(self, base: Path, line: str) -> Item | None:
        """Return the picture and mask that a line of a split's list names; None if the line is invalid."""

    def info(self) -> DataInfo:
        labels, paths, identity = self.labels(), self._find(), None
        if paths is not None:
            digest = hashlib.blake2b(digest_size=16)
            for split in SPLITS:
                for item in self._read_item_list(paths, split):
                    sums = " ".join(files.content_md5(path) for path in (item.picture, item.mask))
                    digest.update(f"{split}\0{item.picture.stem}\0{sorted(item.meaning.items())}\0{sums}\n".encode())
            identity = f"{self.name}:{digest.hexdigest()}"
        return DataInfo(
            image=self.image_size,
            channels=3,
            classes=len(labels),
            task="segmentation",
            identity=identity,
            labels=labels,
        )

    def read(self, split: Split) -> Images:
        items = self._read_item_list(self._find_or_fetch(), split)
        decoding = Decoding(size=self.image_size, fit=self.fit, orient="ignore")  # masks are as the pictures are stored
        files.require_memory(
            len(items) * 4 * self.image_size[0] * self.image_size[1], f"{self.name}: its {split} split"
        )
        x_NCHW = torch.empty((len(items), 3, *self.image_size), dtype=torch.uint8)
        y_NHW = torch.empty((len(items), *self.image_size), dtype=torch.uint8)
        for x_CHW, y_HW, item in zip(x_NCHW, y_NHW, items, strict=True):
            picture_CHW, level_HW = decode_with_mask(item.picture, item.mask, decoding)
            x_CHW.copy_(picture_CHW)
            y_HW.copy_(_map_labels(level_HW, item))
        return Images(x_NCHW, y_NHW)

    def _read_item_list(self, paths: Mapping[str, Path], split: Split) -> list[Item]:
        name = self.lists[split]
        file, items = paths[name], []
        base = file.parents[name.count("/")]
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            item = self.item_from_line(base, line)
            if item is None:
                raise DataError(f"{file}:{number} is damaged: {line[:80]!r}; download the data set again")
            for path in (item.picture, item.mask):
                if not path.is_file():
                    raise DataError(f"{file}:{number} lists {path}, which does not exist; download the data set again")
            items.append(item)
        return items


CLASSES = """
background aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike person pottedplant
sheep sofa train tvmonitor
"""


@dataset.register("voc_segmentation")
class VOCSegmentation(MaskedPictures):
    """Pascal VOC 2012: photographs with 20 kinds of things and background; 1464 to train on and 1449 to test on.

    The folder is as published: ``JPEGImages``, ``SegmentationClass``, ``ImageSets/Segmentation``.  The labels of the
    official test split are not published, so ``val.txt`` is the test split, as is usual; validation is split off
    ``train.txt``.  The outlines between things (level 255) have no label.

    Reference: Everingham et al., The Pascal Visual Object Classes Challenge: a retrospective, 2015.
    """

    name = "voc_segmentation"
    torchvision_name = "VOCSegmentation"
    torchvision_options: ClassVar = {"year": "2012", "image_set": "train"}
    layouts = ("VOCdevkit/VOC2012", "VOC2012")
    lists: ClassVar = {"train": "ImageSets/Segmentation/train.txt", "test": "ImageSets/Segmentation/val.txt"}
    required = lists.values()
    meaning: ClassVar = {**{label: label for label in range(21)}, VOID: VOID}

    def labels(self) -> tuple[str, ...]:
        return tuple(CLASSES.split())

    def item_from_line(self, base: Path, line: str) -> Item | None:
        name = line.strip()
        if len(name.split()) != 1:
            return None
        return Item(base / "JPEGImages" / f"{name}.jpg", base / "SegmentationClass" / f"{name}.png", self.meaning)


@dataset.register("pets")
@dataclass(kw_only=True)
class Pets(MaskedPictures):
    """Oxford-IIIT Pets: photographs of cats and dogs with trimaps; 3680 to train on and 3669 to test on.

    The folder is as published: ``images``, ``annotations/trimaps``, ``annotations/trainval.txt`` and ``test.txt``.
    A trimap marks the pet (1), the background (2), and an ambiguous border between them (3).

    Reference: Parkhi, Vedaldi, Zisserman and Jawahar, Cats and dogs, CVPR 2012.

    Args:
        root: folder that has ``images`` and ``annotations``, or has them in ``oxford-iiit-pet``.
        target: ``pet`` against background, or ``species``: cats and dogs are two classes.
        border: has no label (``ignored``), belongs to the ``pet``, or is a ``class`` of its own, the last.
    """

    name = "pets"
    torchvision_name = "OxfordIIITPet"
    torchvision_options: ClassVar = {"target_types": "segmentation"}
    layouts = ("oxford-iiit-pet",)
    lists: ClassVar = {"train": "annotations/trainval.txt", "test": "annotations/test.txt"}
    required = lists.values()

    target: Literal["pet", "species"] = "pet"
    border: Literal["ignored", "pet", "class"] = "ignored"

    def labels(self) -> tuple[str, ...]:
        pets = ("pet",) if self.target == "pet" else ("cat", "dog")
        return ("background", *pets, *(["border"] if self.border == "class" else []))

    def item_from_line(self, base: Path, line: str) -> Item | None:
        match line.split():
            case [name, _, "1" | "2" as species, *_]:
                pet = 1 if self.target == "pet" else int(species)
                border = {"ignored": VOID, "pet": pet, "class": len(self.labels()) - 1}[self.border]
                picture, mask = base / "images" / f"{name}.jpg", base / "annotations" / "trimaps" / f"{name}.png"
                return Item(picture, mask, {1: pet, 2: 0, 3: border})
        return None


def _map_labels(level_HW: Tensor, item: Item) -> Tensor:
    label_L = torch.full((256,), -1)
    for level, label in item.meaning.items():
        label_L[level] = label
    label_HW = label_L[level_HW.long()]
    if (unknown_M := level_HW[label_HW < 0]).numel():
        raise DataError(f"{item.mask} has a level {unknown_M[0]}; allowed: {', '.join(map(str, sorted(item.meaning)))}")
    return label_HW.to(torch.uint8)


def decode_with_mask(path: Path, mask: Path, decoding: Decoding) -> tuple[Tensor, Tensor]:
    """Return a picture as an image, uint8 (3, H, W), and the levels of its mask, resized by nearest neighbour.

    A mask has one level per pixel, uint8 (H, W); with a palette, as in Pascal VOC, the levels are palette indices.
    """
    import numpy as np
    from PIL import Image

    with naming_picture(mask), Image.open(mask) as levels:
        levels.load()
    if levels.mode not in ("P", "L"):
        raise DataError(f"{mask} is not a label mask: Pillow reads it as mode {levels.mode}; save it as mode P or L")
    with naming_picture(path), Image.open(path) as picture:
        rgb = decoding.to_upright_rgb(picture)
    if levels.size != rgb.size:
        sizes = " and ".join("{1} by {0}".format(*image.size) for image in (rgb, levels))
        raise DataError(f"{path} and its mask {mask} differ in size: {sizes} pixels; make them equal")
    small = decoding.resize_and_crop(levels, "nearest")
    return to_tensor(decoding.resize_and_crop(rgb, decoding.interpolation)), torch.from_numpy(np.array(small))
