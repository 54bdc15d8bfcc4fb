"""``cifar10`` and ``cifar100``, read from the pickled batches that their authors publish.

The batches are mappings of strings to lists and arrays of unsigned bytes.  Their reader imports nothing that a pickle
names: the few names in such a pickle resolve to inert stand-ins that only store their arguments, and every other name
is rejected.

N images, C channels, H rows, W columns.
"""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch

from vitlab.data.datasets import files
from vitlab.data.datasets.base import CorruptionName, Images, Split, dataset
from vitlab.data.datasets.files import Checksummed
from vitlab.data.datasets.pictures import Pictures
from vitlab.errors import DataError
from vitlab.geometry import DataInfo
from vitlab.registry import Unhashed

NAMES_100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""

NAMES_OF_NUMPY = (
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
)
"""Names that numpy's arrays have in a pickle."""


@dataclass(kw_only=True)
class Cifar(Checksummed):
    """Base of data sets of pickled 32x32 colour batches; see :mod:`vitlab.data.datasets.files` for the identity.

    Args:
        corrupted_root: folder with the arrays of CIFAR-10-C or CIFAR-100-C, such as ``fog.npy`` and ``labels.npy``,
            which ``corrupted`` reads instead of corrupting the test split.  The identity of the data covers them.
    """

    batches: ClassVar[Mapping[Split, tuple[str, ...]]]
    key: ClassVar[str]  #: of the labels in a batch

    corrupted_root: Annotated[str | None, Unhashed()] = None

    def info(self) -> DataInfo:
        info = self._info((32, 32), channels=3)
        if self.corrupted_root is None:
            return info
        folder = files.expand_home(self.corrupted_root)
        if not folder.is_dir():
            raise DataError(f"{self.name}: there is no folder {folder}; correct 'corrupted_root'")
        arrays = {path.name: path for path in sorted(folder.glob("*.npy"))}

        def digest() -> str:
            checksums = {name: files.content_md5(path) for name, path in arrays.items()}
            return files.identity_of_files(self.name, checksums).rpartition(":")[2]

        return replace(info, test_sets=files.compute_once_per_file_state(list(arrays.items()), digest))

    def corrupted(self, kind: CorruptionName, severity: int) -> Pictures | None:
        """Return the published images of a corruption, of which there are 10000 for each severity."""
        if self.corrupted_root is None:
            return None
        file = files.expand_home(self.corrupted_root) / f"{kind}.npy"
        try:
            # Only numpy's own format is read, mapped into memory, without pickled objects.
            x_NHWC, y_N = (np.lib.format.open_memmap(path, mode="r") for path in (file, file.with_name("labels.npy")))
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.name}: {kind} cannot be read: {error}; correct 'corrupted_root', or leave it out of 'corrupted'"
            ) from None
        is_bytes, count = x_NHWC.dtype == y_N.dtype == np.uint8, y_N.size // 5
        is_whole = is_bytes and count and y_N.size == 5 * count and x_NHWC.shape == (*y_N.shape, 32, 32, 3)
        if not (is_whole and y_N.max() < len(self.labels)):
            raise DataError(
                f"{file} and labels.npy beside it are not of {self.name}: {x_NHWC.dtype} of shape {x_NHWC.shape} and "
                f"{y_N.dtype} of shape {y_N.shape}; download them again"
            )
        part = slice(count * (severity - 1), count * severity)
        return ArrayPictures(x_NHWC[part], torch.from_numpy(y_N[part].astype(np.int64)))

    def read(self, split: Split) -> Images:
        paths = self._find_or_fetch()
        parts = [self._read_batch(paths[name]) for name in self.batches[split]]
        x_NCHW, y_N = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return Images(torch.from_numpy(x_NCHW), torch.from_numpy(y_N))

    def _read_batch(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        batch, classes, problem = read_pickled_arrays(path), range(len(self.labels)), ""
        x_ND: Any = batch.get("data")
        y_N: Any = batch.get(self.key)
        if not isinstance(x_ND, np.ndarray) or x_ND.shape[1:] != (3 * 32 * 32,):
            problem = "'data' must be unsigned bytes of shape (N, 3072)"
        elif not isinstance(y_N, list) or len(y_N) != len(x_ND) or any(label not in classes for label in y_N):
            problem = f"'{self.key}' must be a list of {len(x_ND)} classes from 0 to {classes[-1]}"
        if problem:
            raise DataError(f"{path} is not a batch of {self.name}: {problem}; delete it and download it again")
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
    required = files.parse_md5sums("""
c99cafc152244af753f735de768cd75f data_batch_1
d4bba439e000b95fd0a9bffe97cbabec data_batch_2
54ebc095f3ab1f0389bbae665268c751 data_batch_3
634d18415352ddfa80567beed471001a data_batch_4
482c414d41f54cd18b22e5b47cb7c3cb data_batch_5
40351d587109b95175f43aff81a1287e test_batch
""")


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
    required = files.parse_md5sums("""
16019d7e3df5f24257cddd939b257f8d train
f0ef6b0ae62326f3e7ffdfab6717acfc test
""")


@dataclass(eq=False)
class ArrayPictures(Pictures):
    """Images in an array.

    Args:
        x_NHWC: uint8.
        y_N: int64, class indices.
    """

    x_NHWC: np.ndarray
    y_N: torch.Tensor

    def image(self, index: int) -> torch.Tensor:
        return torch.from_numpy(np.array(self.x_NHWC[index])).permute(2, 0, 1)


def read_pickled_arrays(path: Path) -> dict[str, Any]:
    """Return the mapping in a Python 2 or 3 pickle of numbers, strings, lists and arrays of bytes alone."""
    try:
        with open(path, "rb") as file:
            content = _Unpickler(file, encoding="latin1").load()  # Python 2 stores the bytes of arrays in strings
        if not isinstance(content, dict):
            raise pickle.UnpicklingError(f"it holds a {type(content).__name__}, not a mapping")
        return {
            str(key): _stub_to_array(value) if isinstance(value, _PickleStub) else value
            for key, value in content.items()
        }
    except pickle.UnpicklingError as error:
        raise DataError(f"{path} could not be read: {error}") from None
    except (EOFError, ValueError, TypeError, LookupError, AttributeError, MemoryError, OverflowError) as error:
        # A damaged stream can raise any of these inside the unpickler.
        raise DataError(f"{path} is damaged: {error!r}; delete it and download it again") from None


class _PickleStub:
    """Stand-in for what numpy calls to restore an array or its type: it stores the arguments and the state."""

    state: Any = None

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        self.state = state


def _stub_to_array(value: _PickleStub) -> np.ndarray:
    """Return the array of unsigned bytes that a stand-in stores."""
    match value.state:
        case (_, shape, _PickleStub(arguments=("u1", *_)), False | 0, str() | bytes() as data):
            content = data.encode("latin1") if isinstance(data, str) else data
            return np.frombuffer(content, np.uint8).reshape(shape).copy()
    raise pickle.UnpicklingError("it holds an array that is not of unsigned bytes (u1), stored by rows")


class _Unpickler(pickle.Unpickler):
    """Unpickler that resolves numpy's names to stand-ins and rejects all others."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in NAMES_OF_NUMPY:
            return _PickleStub
        raise pickle.UnpicklingError(f"it names {module}.{name}, and only arrays of bytes are read; nothing was run")
