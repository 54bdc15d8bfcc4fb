"""The MedMNIST family: eleven sets of small medical images, each published as one ``.npz`` file.

Two more sets of this form, ``textures`` and ``photographs``, are made by the program ``tiles.py``.

N images, C channels, H rows, W columns.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitlab.plugin import DataError, DataInfo, Dataset, Images, Split, Unhashed, files

SIDE = 28
PUBLISHED = "https://zenodo.org/records/6496656"


class Facts(NamedTuple):
    """Facts of a set."""

    md5: str  #: checksum of the published file of version 2, or of the made file; another file has another identity
    channels: int
    labels: tuple[str, ...]
    source: str = f"is published at {PUBLISHED}"


MADE = "is made by plugins/vitlab-medmnist/tiles.py"

ORGANS = (
    *("bladder", "femur, left", "femur, right", "heart", "kidney, left", "kidney, right"),
    *("liver", "lung, left", "lung, right", "pancreas", "spleen"),
)

SETS: Mapping[str, Facts] = {
    "pathmnist": Facts(
        "a8b06965200029087d5bd730944a56c1",
        3,
        (
            *("adipose", "background", "debris", "lymphocytes", "mucus", "smooth muscle", "normal colon mucosa"),
            *("cancer-associated stroma", "colorectal adenocarcinoma epithelium"),
        ),
    ),
    "dermamnist": Facts(
        "0744692d530f8e62ec473284d019b0c7",
        3,
        (
            *("actinic keratoses and intraepithelial carcinoma", "basal cell carcinoma"),
            *("benign keratosis-like lesions", "dermatofibroma", "melanoma", "melanocytic nevi", "vascular lesions"),
        ),
    ),
    "octmnist": Facts(
        "c68d92d5b585d8d81f7112f81e2d0842",
        1,
        ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
    ),
    "pneumoniamnist": Facts("28209eda62fecd6e6a2d98b1501bb15f", 1, ("normal", "pneumonia")),
    "retinamnist": Facts("bd4c0672f1bba3e3a89f0e4e876791e4", 3, tuple(f"grade {grade}" for grade in range(5))),
    "breastmnist": Facts("750601b1f35ba3300ea97c75c52ff8f6", 1, ("malignant", "normal or benign")),
    "bloodmnist": Facts(
        "7053d0359d879ad8a5505303e11de1dc",
        3,
        (
            *("basophil", "eosinophil", "erythroblast", "immature granulocyte"),
            *("lymphocyte", "monocyte", "neutrophil", "platelet"),
        ),
    ),
    "tissuemnist": Facts(
        "ebe78ee8b05294063de985d821c1c34b",
        1,
        (
            *("collecting duct, connecting tubule", "distal convoluted tubule", "glomerular endothelial cells"),
            *("interstitial endothelial cells", "leukocytes", "podocytes"),
            *("proximal tubule segments", "thick ascending limb"),
        ),
    ),
    "organamnist": Facts("866b832ed4eeba67bfb9edee1d5544e6", 1, ORGANS),
    "organcmnist": Facts("0afa5834fb105f7705a7d93372119a21", 1, ORGANS),
    "organsmnist": Facts("e5c39f1af030238290b9557d9503af9d", 1, ORGANS),
    "textures": Facts("bb8702485e1ed39fa071b1af8a96d2d3", 1, ("brick", "grass", "gravel"), MADE),
    "photographs": Facts(
        "b4beb9405c8e5d8c001804903ef44386", 3, ("astronaut", "chelsea", "coffee", "ihc", "motorcycle_left"), MADE
    ),
}
"""The sets whose images have one label each.  Published facts are those of ``info.py`` in ``medmnist`` 2.1; labels of
tiles are the pictures from which they are cut."""

Name = Literal[
    "pathmnist",
    "dermamnist",
    "octmnist",
    "pneumoniamnist",
    "retinamnist",
    "breastmnist",
    "bloodmnist",
    "tissuemnist",
    "organamnist",
    "organcmnist",
    "organsmnist",
    "textures",
    "photographs",
]


class MedMNIST(Dataset):
    """Small medical images of one of eleven kinds, or tiles of pictures, 28x28, with their training and test split.

    The training split has the authors' training images, then their validation images.  The latter are held out for
    validation, unless the study sets ``validation`` to a share, which is then drawn from both.

    Reference: Yang et al., MedMNIST v2, Scientific Data 2023, doi:10.1038/s41597-022-01721-8.

    Args:
        name: name of the set.
        root: folder with ``<name>.npz`` or with ``medmnist/<name>.npz``.  None: ``$VITLAB_DATA``, ``data``, the user's
            cache, ``/usr/share/datasets``.
    """

    def __init__(self, *, name: Name = "bloodmnist", root: Annotated[str | None, Unhashed()] = None) -> None:
        self.name = name
        self.root = root
        self.facts = SETS[name]

    def _find(self) -> Path | None:
        folders = [base / layout for base in files.folders_to_search(self.root) for layout in (".", "medmnist")]
        return next((path for folder in folders if (path := folder / f"{self.name}.npz").is_file()), None)

    def missing(self) -> str | None:
        """Return the sentence that says where the file belongs, or None if it is there."""
        if self._find() is not None:
            return None
        searched = ", ".join(map(str, files.folders_to_search(self.root)))
        return (
            f"{self.name} is not here: looked in {searched} (there directly, or in medmnist) for {self.name}.npz, "
            f"which {self.facts.source}; give the folder that has it as 'root'."
        )

    def info(self) -> DataInfo:
        """Return the facts of the data set, with the checksum of the local file if there is one."""
        path = self._find()
        checksum = self.facts.md5 if path is None else files.content_md5(path)
        return DataInfo(
            image=(SIDE, SIDE),
            channels=self.facts.channels,
            classes=len(self.facts.labels),
            identity=files.identity_of_files(self.name, {f"{self.name}.npz": checksum}),
            labels=self.facts.labels,
        )

    def read(self, split: Split) -> Images:
        """Read a split: the training and validation images together, or the test images."""
        parts = [self._images(part) for part in (("train", "val") if split == "train" else ("test",))]
        return Images(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def held_out(self) -> Tensor:
        """Return the rows of the authors' validation images, which follow their training images."""
        train, val = (len(self._array(f"{part}_labels")) for part in ("train", "val"))
        return torch.arange(train, train + val)

    def _images(self, part: str) -> Images:
        x_N, y_N1 = self._array(f"{part}_images"), self._array(f"{part}_labels")
        shape = (SIDE, SIDE) if self.facts.channels == 1 else (SIDE, SIDE, self.facts.channels)
        if x_N.dtype != np.uint8 or x_N.shape[1:] != shape:
            raise DataError(
                f"{part}_images in {self._find()} is {x_N.dtype} of shape {x_N.shape}; expected uint8 of (N, "
                f"{', '.join(map(str, shape))})"
            )
        if y_N1.dtype.kind not in "iu" or y_N1.shape != (len(x_N), 1):
            raise DataError(
                f"{part}_labels in {self._find()} is {y_N1.dtype} of shape {y_N1.shape}; expected whole numbers of "
                f"({len(x_N)}, 1), one label for each image"
            )
        if len(y_N1) and not 0 <= y_N1.min() <= y_N1.max() < len(self.facts.labels):
            raise DataError(
                f"{part}_labels in {self._find()} go from {y_N1.min()} to {y_N1.max()}; {self.name} has "
                f"{len(self.facts.labels)} classes from 0"
            )
        x_NHWC = x_N.reshape(*x_N.shape[:3], self.facts.channels)
        x_NCHW = torch.from_numpy(np.ascontiguousarray(x_NHWC.transpose(0, 3, 1, 2)))
        return Images(x_NCHW, torch.from_numpy(y_N1[:, 0].astype(np.int64)))

    def _array(self, key: str) -> np.ndarray:
        path = self._find()
        if path is None:
            raise DataError(str(self.missing()))
        try:
            with open(path, "rb") as file:  # np.load would leave it open if it is no archive
                arrays = np.load(file, allow_pickle=False)
                if not isinstance(arrays, np.lib.npyio.NpzFile) or key not in arrays:
                    raise DataError(f"{path} has no array '{key}'; is it the file that {self.facts.source}?")
                with arrays:
                    array: np.ndarray = arrays[key]
                    return array
        except (OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(f"{path} cannot be read: {error}") from None
