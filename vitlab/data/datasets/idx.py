"""``mnist`` and ``fashion_mnist``, read from IDX files, gzipped or not.

N images, C channels, H rows, W columns.
"""

import math
import struct
from pathlib import Path

import numpy as np
import torch

from vitlab.data.datasets import files
from vitlab.data.datasets.base import Images, Split, dataset
from vitlab.data.datasets.files import Checksummed
from vitlab.errors import DataError
from vitlab.geometry import DataInfo

NAMES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}

UNSIGNED_BYTE = 0x08
"""Type code of the IDX format; these sets use no other."""


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Return the array of unsigned bytes in an IDX file."""
    shape = read_shape(path, dimensions)
    with files.open_decompressed(path) as file:
        data = file.read()[4 + 4 * dimensions :]
    if len(data) != math.prod(shape):
        declared = f"{' x '.join(map(str, shape))} = {math.prod(shape)}"
        raise DataError(f"{path} declares {declared} bytes and holds {len(data)}; delete it and download it again")
    return np.frombuffer(data, np.uint8).reshape(shape)


def read_shape(path: Path, dimensions: int) -> tuple[int, ...]:
    """Return the shape declared by an IDX file of unsigned bytes."""
    with files.open_decompressed(path) as file:
        head = file.read(4 + 4 * dimensions)
    if len(head) < 4 + 4 * dimensions or head[:4] != bytes((0, 0, UNSIGNED_BYTE, dimensions)):
        raise DataError(
            f"{path} is not an IDX file of unsigned bytes in {dimensions} dimensions: it begins with "
            f"{head.hex() or 'nothing'}; delete it and download it again"
        )
    shape = struct.unpack(f">{dimensions}I", head[4:])
    if 0 in shape[1:]:
        raise DataError(f"{path} declares images of {shape[1]} x {shape[2]} pixels; delete it and download it again")
    return shape


class Idx(Checksummed):
    """Base of data sets of four IDX files; see :mod:`vitlab.data.datasets.files` for the identity.

    Args:
        root: folder that has the four files, or has them in ``raw``, in torchvision's ``<Name>/raw`` or in
            ``<name>`` as Debian does.  None: ``$VITLAB_DATA``, ``data``, the user's cache, ``/usr/share/datasets``.
    """

    def info(self) -> DataInfo:
        paths = self._find()
        _, height, width = (0, 28, 28) if paths is None else read_shape(paths[NAMES["train"][0]], 3)
        return self._info((height, width), channels=1)

    def read(self, split: Split) -> Images:
        paths = self._find_or_fetch()
        images, labels = (paths[name] for name in NAMES[split])
        x_NHW, y_N = read_idx(images, 3), read_idx(labels, 1)
        if len(x_NHW) != len(y_N):
            raise DataError(f"{images} has {len(x_NHW)} images and {labels} has {len(y_N)} labels; download both again")
        if len(y_N) and y_N.max() >= len(self.labels):
            raise DataError(
                f"{labels} has a label {y_N.max()}; {self.name} has {len(self.labels)} classes from 0; download it "
                "again"
            )
        return Images(torch.from_numpy(x_NHW.copy())[:, None], torch.from_numpy(y_N.astype(np.int64)))


@dataset.register("mnist")
class MNIST(Idx):
    """70000 handwritten digits, 28x28 grey: 60000 to train on, 10000 to test on.

    Reference: LeCun, Bottou, Bengio and Haffner, Gradient-based learning applied to document recognition, 1998.
    """

    name = "mnist"
    torchvision_name = "MNIST"
    layouts = ("raw", "MNIST/raw", "mnist")
    labels = tuple(map(str, range(10)))
    required = files.parse_md5sums("""
6bbc9ace898e44ae57da46a324031adb train-images-idx3-ubyte
a25bea736e30d166cdddb491f175f624 train-labels-idx1-ubyte
2646ac647ad5339dbf082846283269ea t10k-images-idx3-ubyte
27ae3e4e09519cfbb04c329615203637 t10k-labels-idx1-ubyte
""")


@dataset.register("fashion_mnist")
class FashionMNIST(Idx):
    """70000 articles of clothing, 28x28 grey: 60000 to train on, 10000 to test on.

    Reference: arXiv:1708.07747.
    """

    name = "fashion_mnist"
    torchvision_name = "FashionMNIST"
    layouts = ("raw", "FashionMNIST/raw", "fashion-mnist")
    labels = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
    required = files.parse_md5sums("""
f4a8712d7a061bf5bd6d2ca38dc4d50a train-images-idx3-ubyte
9018921c3c673c538a1fc5bad174d6f9 train-labels-idx1-ubyte
8181f5470baa50b63fa0f6fddb340f0a t10k-images-idx3-ubyte
15d484375f8d13e6eb1aabb0c3f46965 t10k-labels-idx1-ubyte
""")
