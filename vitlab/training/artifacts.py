"""What a training leaves behind in files: its weights, and what it predicted.

The weights are a safetensors file under the model's own names; its header says what the model sees and how pixels were
normalised, so that the file and the trial's spec are enough to predict, without the data.

B batch, N images of a split, C channels, H and W pixels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors
import torch
from torch import Tensor

from vitlab.data.pixels import resized, with_channels
from vitlab.data.prepare import Normalize
from vitlab.errors import WeightsError
from vitlab.geometry import DataInfo
from vitlab.store.folders import write_bytes
from vitlab.training.checkpoint import packed
from vitlab.training.metrics import Columns

if TYPE_CHECKING:
    from PIL.Image import Image

_HEADER = "vitlab"
_DIGEST = "sha256"  #: of the header; that of the tensors is in the result


@dataclass(frozen=True)
class InputSpec:
    """What a model sees: the images it was built for, and how pixels become its input."""

    info: DataInfo
    mean: tuple[float, ...]  #: per channel, of pixels in [0, 1]
    std: tuple[float, ...]


class Transform:
    """Images as a model takes them: its colours, its size, normalised as in its training."""

    def __init__(
        self, sight: InputSpec, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self.sight = sight
        self._normalize = Normalize(sight.mean, sight.std, device, dtype)
        self.device = torch.device(device)

    def __call__(self, images: Image | Tensor | Sequence[Image]) -> Tensor:
        """(B, C, H, W).

        Args:
            images: a picture, pictures, or a uint8 tensor, (C, H, W) or (B, C, H, W).

        Raises:
            TypeError: for a tensor of another dtype, which may have been normalised already.
        """
        if isinstance(images, Tensor):
            if images.dtype != torch.uint8:
                raise TypeError(f"a tensor of pixels is uint8, 0 to 255; found {images.dtype}")
            batch = [image_CHW[None].cpu() for image_CHW in (images if images.ndim == 4 else images[None])]
        else:
            pictures = images if isinstance(images, Sequence) else [images]
            batch = [_pixels(picture) for picture in pictures]
        info = self.sight.info
        x_BCHW = torch.cat([resized(with_channels(x_1CHW, info.channels), info.image) for x_1CHW in batch])
        return self._normalize(x_BCHW.to(self.device))

    def __repr__(self) -> str:
        height, width = self.sight.info.image
        size = f"channels={self.sight.info.channels}, image={height}x{width}"
        return f"Transform({size}, mean={self.sight.mean}, std={self.sight.std}, device={str(self.device)!r})"

    def seen(self, x_BCHW: Tensor) -> Tensor:
        """(B, C, H, W), float64 in [0, 1]: what a person would see of a batch that this transform has made."""
        mean_C11, std_C11 = (
            torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (self.sight.mean, self.sight.std)
        )
        return (x_BCHW.cpu().double() * std_C11 + mean_C11).clamp(0, 1)


def write_weights(file: Path, state: Mapping[str, Tensor], sight: InputSpec) -> None:
    """Write the weights of a model, and what it sees.  Not settled: the result of the trial is, after all else."""
    header = json.dumps({"info": asdict(sight.info), "mean": sight.mean, "std": sight.std})
    write_bytes(file, packed(state, {_HEADER: header, _DIGEST: _sha256(header)}), settled=False)


def read_weights(file: Path) -> tuple[dict[str, Tensor], InputSpec]:
    """What :func:`write_weights` wrote, on the CPU.

    Raises:
        WeightsError: if it is not there, or is something else.
    """
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            text = metadata[_HEADER]
            if metadata.get(_DIGEST, _sha256(text)) != _sha256(text):  # files of earlier versions have no digest
                raise ValueError("its header is not what was written")
            header = json.loads(text)
            state = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # it is not a mapping
        sight = InputSpec(_info(header["info"]), tuple(header["mean"]), tuple(header["std"]))
    except FileNotFoundError:
        raise WeightsError(f"there is no {file}: the trial has not ended, or kept no weights (run.keep)") from None
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise WeightsError(f"{file} is not a file of trained weights: {error}") from None
    return state, sight


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_predictions(file: Path, predictions: Mapping[str, Columns]) -> None:
    """Write a row per image and split, as Parquet: ``split``, ``id`` (the place in the official split), and what the
    evaluation found for it: ``label, prediction, probability, loss``, or per pixel of it ``pixel_accuracy, loss``.
    Not settled, as the weights.
    """
    import pyarrow as pa
    from pyarrow import parquet

    # From buffers: given arrays, pyarrow imports pandas to see what they are, which takes longer than many a training.
    def column(values_N: Tensor) -> pa.Array:
        found = (values_N.float() if values_N.is_floating_point() else values_N.long()).contiguous().numpy()
        return pa.Array.from_buffers(pa.from_numpy_dtype(found.dtype), len(found), [None, pa.py_buffer(found)])

    def repeated(text: str, count: int) -> pa.Array:
        ends = np.arange(count + 1, dtype=np.int32) * len(text.encode())
        return pa.StringArray.from_buffers(count, pa.py_buffer(ends), pa.py_buffer(text.encode() * count))

    tables = [
        pa.Table.from_arrays(
            [repeated(split, len(columns["id"])), *map(column, columns.values())], names=["split", *columns]
        )
        for split, columns in predictions.items()
    ]
    buffer = pa.BufferOutputStream()
    parquet.write_table(pa.concat_tables(tables), buffer)
    write_bytes(file, buffer.getvalue().to_pybytes(), settled=False)


# -- how it is done ---------------------------------------------------------------------------------------------------


def _pixels(picture: Image) -> Tensor:
    """(1, C, H, W), uint8: grey as one channel, anything else as three."""
    grey = picture.mode in ("1", "L")
    pixels = np.array(picture.convert("L" if grey else "RGB"))
    x_HWC = torch.from_numpy(pixels[..., None] if grey else pixels)
    return x_HWC.permute(2, 0, 1)[None].contiguous()


def _info(data: Mapping[str, Any]) -> DataInfo:
    height, width = data["image"]
    return DataInfo(**{**data, "image": (height, width), "labels": tuple(data["labels"])})
