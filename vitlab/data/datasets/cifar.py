"""``cifar10`` and ``cifar100``, read from the pickled batches that their authors publish.

N images, C channels, H rows, W columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from vitlab.data.datasets.base import Images, Split, dataset
from vitlab.data.datasets.published import Checksummed
from vitlab.data.datasets.unpickle import read_arrays
from vitlab.errors import DataError
from vitlab.geometry import DataInfo

NAMES_100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""


class Cifar(Checksummed):
    """Base of data sets of pickled 32x32 colour batches; see :mod:`vitlab.data.datasets.files` for the identity.

    Args:
        root: folder that has the batches, or has them in the folder the published archive unpacks to.
            None: ``$VITLAB_DATA``, ``data``, the user's cache, ``/usr/share/datasets``.
        download: ``missing`` fetches batches that are not found, through torchvision, which verifies checksums.
    """

    batches: ClassVar[Mapping[Split, tuple[str, ...]]]
    key: ClassVar[str]  #: of the labels in a batch

    def info(self) -> DataInfo:
        """Return the facts of the data set, with the checksums of its files."""
        return self._info((32, 32), channels=3)

    def read(self, split: Split) -> Images:
        """Read a split, and download the files first where that is allowed."""
        paths = self._find_or_fetch()
        parts = [self._batch(paths[name]) for name in self.batches[split]]
        x_NCHW, y_N = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return Images(torch.from_numpy(x_NCHW), torch.from_numpy(y_N))

    def _batch(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        batch = read_arrays(path)
        x_ND, y_N = batch.get("data"), batch.get(self.key)
        if not (isinstance(x_ND, np.ndarray) and x_ND.dtype == np.uint8 and x_ND.shape[1:] == (3 * 32 * 32,)):
            raise DataError(
                f"{path} is no batch of CIFAR: 'data' must be unsigned bytes of shape (N, 3072); download it again"
            )
        if not (isinstance(y_N, list) and len(y_N) == len(x_ND) and all(isinstance(label, int) for label in y_N)):
            raise DataError(
                f"{path} is no batch of CIFAR: '{self.key}' must be a list of {len(x_ND)} classes; download it again"
            )
        if y_N and not (min(y_N) >= 0 and max(y_N) < len(self.labels)):
            raise DataError(f"{path} has a label {max(y_N)}; {self.name} has {len(self.labels)} classes from 0")
        return x_ND.reshape(-1, 3, 32, 32), np.array(y_N, np.int64)


@dataset.register("cifar10")
class CIFAR10(Cifar):
    """60000 photographs of 10 kinds of things, 32x32 colour: 50000 to train on, 10000 to test on.

    Reference: Krizhevsky, Learning multiple layers of features from tiny images, 2009.
    """

    name = "cifar10"
    torchvision_name = "CIFAR10"
    layouts = ("cifar-10-batches-py",)
    batches: ClassVar = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}
    key = "labels"
    labels = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    published: ClassVar = {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    }


@dataset.register("cifar100")
class CIFAR100(Cifar):
    """60000 photographs of 100 kinds of things, 32x32 colour: 50000 to train on, 10000 to test on.

    Reference: Krizhevsky, Learning multiple layers of features from tiny images, 2009.
    """

    name = "cifar100"
    torchvision_name = "CIFAR100"
    layouts = ("cifar-100-python",)
    batches: ClassVar = {"train": ("train",), "test": ("test",)}
    key = "fine_labels"
    labels = tuple(NAMES_100.split())
    published: ClassVar = {
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    }
