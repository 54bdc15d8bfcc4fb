"""Files written by a training: predictions and checkpoints; and the input that a trained model takes.

A checkpoint is the complete state of a training in one atomically written file: safetensors, with everything but
tensors as JSON in its header, and a digest over all of it.  Nothing in it is executed.  A damaged file is refused and
the training starts again, so that damage costs time but never changes a result.

B batch, N images of a split, C channels, H and W pixels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from vitlab.data.batches import Normalize
from vitlab.data.pixels import convert_channels, per_channel, resize
from vitlab.errors import VitlabError
from vitlab.models.contract import weights_digest
from vitlab.models.trained import DIGEST, HEADER, InputSpec, hash_text, read_safetensors
from vitlab.store.files import Damaged, write_bytes
from vitlab.store.folders import CHECKPOINT
from vitlab.training.evaluation import Columns

if TYPE_CHECKING:
    from PIL.Image import Image


class Transform:
    """Conversion of images to a model's input: channels, size and normalisation."""

    def __init__(self, input_spec: InputSpec, dtype: torch.dtype = torch.float32) -> None:
        self.input_spec = input_spec
        self._normalize = Normalize(input_spec.mean, input_spec.std, dtype=dtype)

    def __repr__(self) -> str:
        return f"Transform({self.input_spec})"

    def __call__(self, images: Image | Tensor | Sequence[Image]) -> Tensor:
        """Return the input batch, (B, C, H, W).

        Args:
            images: One PIL image, a sequence of them, or a uint8 tensor of shape (C, H, W) or (B, C, H, W).

        Raises:
            TypeError: For a tensor of another dtype, which may be normalised already, and for anything else.
        """
        if isinstance(images, Tensor):
            if images.dtype != torch.uint8:
                raise TypeError(f"a tensor of pixels is uint8, 0 to 255; found {images.dtype}")
            batch = [image_CHW[None].cpu() for image_CHW in (images if images.ndim == 4 else images[None])]
        else:
            pictures = images if isinstance(images, Sequence) else [images]
            batch = [_picture_to_uint8_1CHW(picture) for picture in pictures]
        info = self.input_spec.info
        x_BCHW = torch.cat([resize(convert_channels(x_1CHW, info.channels), info.image) for x_1CHW in batch])
        return self._normalize(x_BCHW)

    def denormalize(self, x_BCHW: Tensor) -> Tensor:
        """Invert the normalisation: return the images of a batch, (B, C, H, W), float64 in [0, 1], for display."""
        spec = self.input_spec
        return (x_BCHW.cpu().double() * per_channel(spec.std) + per_channel(spec.mean)).clamp(0, 1)


def write_predictions(file: Path, predictions: Mapping[str, Columns], labels: Sequence[str]) -> None:
    """Write predictions as Parquet, one row per image and split, without fsync.

    Columns are ``split``, ``id`` (the index in the official split) and the values of the evaluation: ``label,
    prediction, probability, loss`` for classification, ``pixel_accuracy, loss`` for segmentation.  With the names of
    the classes, ``label_name`` and ``prediction_name`` follow.
    """
    import pyarrow as pa
    from pyarrow import parquet

    # From buffers, since pyarrow imports pandas to convert arrays and lists, which takes longer than a small training.
    def numbers(values_N: Tensor) -> pa.Array:
        array_N = (values_N.float() if values_N.is_floating_point() else values_N.long()).contiguous().numpy()
        return pa.Array.from_buffers(pa.from_numpy_dtype(array_N.dtype), len(array_N), [None, pa.py_buffer(array_N)])

    def strings(texts: Sequence[str]) -> pa.Array:
        encoded = [text.encode() for text in texts]
        ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
        return pa.StringArray.from_buffers(len(texts), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded)))

    tables = []
    for split, columns in predictions.items():
        table = {"split": strings([split] * len(columns["id"]))}
        table |= {name: numbers(values_N) for name, values_N in columns.items()}
        if labels and "label" in columns:
            for name in ("label", "prediction"):
                table[f"{name}_name"] = strings([labels[index] for index in columns[name].tolist()])
        tables.append(pa.table(table))
    buffer = pa.BufferOutputStream()
    parquet.write_table(pa.concat_tables(tables), buffer)
    write_bytes(file, buffer.getvalue(), fsync=False)


def _picture_to_uint8_1CHW(picture: Image) -> Tensor:
    """Return a picture as a uint8 tensor, (1, C, H, W), of one channel for grey and three otherwise."""
    if not hasattr(picture, "convert"):
        raise TypeError(f"an image is one of PIL, or a tensor of uint8; found {type(picture).__name__}")
    pixels_HWC = np.atleast_3d(np.array(picture.convert("L" if picture.mode in ("1", "L") else "RGB")))
    return torch.from_numpy(pixels_HWC).permute(2, 0, 1)[None].contiguous()


# -- checkpoints -------------------------------------------------------------------------------------------------------

State = Mapping[str, Any]
"""The content of a checkpoint."""


def make_checkpoint_writer(
    folder: Path, state: State, before_replace: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """Copy a state, and return a function that replaces the checkpoint in ``folder`` by it, in any thread.

    Args:
        folder: Created if it does not exist.
        state: Tensors on any device, numbers, strings and None, nested in lists, tuples and mappings.  Tuples are read
            back as lists.
        before_replace: Called before the file is replaced; raises if the caller may no longer do so.

    Raises:
        VitlabError: If ``state`` contains anything else, with its type and place.
    """
    tensors: dict[str, Tensor] = {}
    rest = json.dumps(_extract_tensors(dict(state), "", tensors))

    def write() -> None:
        # To memory, because safetensors' own writer leaves its temporary files after a kill, and ignores the umask.
        data = safetensors.torch.save(tensors, {HEADER: rest, DIGEST: _checkpoint_digest(tensors, rest)})
        write_bytes(folder / CHECKPOINT, data, before_rename=before_replace)

    return write


def clean_up_and_read_checkpoint(folder: Path) -> State | None:
    """Return the checkpoint in ``folder`` with tensors on the CPU, or None if there is none.

    The caller must hold the trial's lock: temporary files of killed writers are deleted.

    Raises:
        Damaged: If the file is not what was written.
    """
    # Their writers are dead, since the caller holds the lock.
    for leftover in folder.glob(f".{CHECKPOINT}.*"):
        leftover.unlink(missing_ok=True)
    if not (folder / CHECKPOINT).exists():
        return None
    try:
        tensors, metadata = read_safetensors(folder / CHECKPOINT)
        rest = metadata[HEADER]
        if metadata[DIGEST] != _checkpoint_digest(tensors, rest):
            raise Damaged(f"{folder / CHECKPOINT} is damaged: its digest differs")
        return _insert_tensors(json.loads(rest), tensors)
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise Damaged(f"{folder / CHECKPOINT} cannot be read: {error}") from error


def _checkpoint_digest(tensors: Mapping[str, Tensor], rest: str) -> str:
    return hash_text(f"{weights_digest(tensors)}\n{rest}")


def _extract_tensors(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """Return ``value`` in JSON types, and add copies of its tensors to ``tensors`` under their places."""
    match value:
        case Tensor():
            if place in tensors:  # as by keys 1 and "1"
                raise VitlabError(f"two tensors of the state have the path {place}; give them keys that differ as text")
            # A copy, since the format rejects shared memory.
            tensors[place] = value.detach().to("cpu", copy=True).contiguous()
            return {"tensor": place}
        case Mapping():
            # Pairs, because the keys of JSON are strings, and an optimizer's state has numbers as keys.
            return {"pairs": [[key, _extract_tensors(item, f"{place}/{key}", tensors)] for key, item in value.items()]}
        case list() | tuple():
            return [_extract_tensors(item, f"{place}/{index}", tensors) for index, item in enumerate(value)]
        case None | bool() | int() | float() | str():
            return value
    raise VitlabError(
        f"a checkpoint holds tensors, numbers, text and collections of them; found {type(value).__name__} at {place}"
    )


def _insert_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    match value:
        case {"tensor": place}:
            return tensors[place]
        case {"pairs": pairs}:
            return {key: _insert_tensors(item, tensors) for key, item in pairs}
        case list():
            return [_insert_tensors(item, tensors) for item in value]
    return value
