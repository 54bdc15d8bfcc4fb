"""Reading and writing of weight files in several containers.  Nothing in a file is ever executed."""

import argparse
import hashlib
import io
import json
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from vitlab.components.base import NewState, State
from vitlab.errors import WeightsError, first_sentence, list_some
from vitlab.identity.trial import DESCRIPTIONS, weight_files
from vitlab.store.files import sort_safetensors_header, write_bytes

Container = Literal["safetensors", "torch", "npz"]
Json = Mapping[str, Any]
"""The content of a JSON file."""

SUFFIXES: Mapping[str, Container] = {
    ".safetensors": "safetensors",
    ".pth": "torch",
    ".pt": "torch",
    ".bin": "torch",
    ".tar": "torch",  # checkpoint-3.pth.tar of the training script of timm
    ".npz": "npz",
}
"""Suffixes of weight files, and the container that each stands for."""

AVERAGES = ("model_ema", "state_dict_ema")
"""Keys of weights averaged during a training, which a file has beside the last ones."""

WRAPPERS = ("state_dict", "model", *AVERAGES)
"""Keys of weights in the files of training scripts, beside an optimizer's state; the first that exists is opened."""

PREFIX = 512  #: bytes in which the name of the first member of an archive ends

_DISTRIBUTED = "module."


@dataclass(frozen=True)
class WeightFile:
    """The contents of a weight file."""

    file: Path
    container: Container
    tensors: NewState
    wrappers: tuple[str, ...]  #: keys that wrap the tensors, outermost first
    other_keys: tuple[str, ...]  #: keys beside the tensors, which are not read
    header: Mapping[str, str]  #: of a safetensors file
    config: Json = field(default_factory=dict)  #: of the hub's ``config.json`` beside it
    preprocessor: Json = field(default_factory=dict)  #: of its ``preprocessor_config.json``


def read_file(file: Path, digests: Mapping[str, str] | None = None) -> WeightFile:
    """Read a ``.safetensors``, a ``.pth``, ``.pt`` or ``.bin`` of torch, or an ``.npz``; on the CPU.

    The ``config.json`` beside a file is read only if the file has the hub's name, ``model.safetensors`` or
    ``pytorch_model.bin``.

    Args:
        file: of weights.
        digests: file name to SHA-256, or its beginning, of this file and of those that are read with it; the bytes
            that are compared are those that are loaded.  None: not compared.

    Raises:
        WeightsError: if it does not exist, is damaged, does not match its suffix, holds no tensors, or is not the file
            that ``digests`` describes.
    """
    if not file.is_file():
        raise WeightsError(f"{file} is a folder; name the file in it" if file.is_dir() else f"no such file: {file}")
    container = container_of(file)
    data, *beside = [_read_verified(each, digests) for each in weight_files(file)]
    assert data is not None
    actual = _container_of_bytes(data)
    if actual is not None and actual != container:
        suffix = next(suffix for suffix, kind in SUFFIXES.items() if kind == actual)
        raise WeightsError(f"{file} is {_ARTICLE[actual]}, but its suffix is {file.suffix}; rename it to {suffix}")
    reader = {"safetensors": _parse_safetensors, "torch": _parse_torch, "npz": _parse_npz}[container]
    try:
        content, header = reader(data)
    except Exception as error:  # a damaged or hostile file makes the readers raise anything
        raise WeightsError(f"{file} cannot be read as {_ARTICLE[container]}: {_explain_error(error)}") from None
    content, wrappers, other_keys = _unwrap(content)
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    other_keys += [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if not tensors:
        raise WeightsError(f"{file} holds no tensors; its keys: {list_some(other_keys) or 'none'}")
    if all(name.startswith(_DISTRIBUTED) for name in tensors):
        tensors = {name.removeprefix(_DISTRIBUTED): value for name, value in tensors.items()}
        wrappers.append(_DISTRIBUTED.removesuffix("."))
    config, preprocessor = (
        _parse_json_mapping(file.with_name(name), each)
        for name, each in zip(DESCRIPTIONS, beside or (None, None), strict=True)
    )
    return WeightFile(file, container, tensors, tuple(wrappers), tuple(other_keys), header, config, preprocessor)


def write_file(file: Path, tensors: State, header: Mapping[str, str]) -> None:
    """Write tensors atomically, in the container of the file's suffix.  Only safetensors have a header.

    Raises:
        WeightsError: for an unknown suffix, or a dtype that the container cannot hold.
    """
    container = container_of(file)
    own = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    if container == "safetensors":
        data = sort_safetensors_header(safetensors.torch.save(own, {"format": "pt", **header}))
    else:
        buffer = io.BytesIO()
        if container == "torch":
            torch.save(own, buffer)
        else:
            wide = {torch.bfloat16: torch.float32}  # numpy has no bfloat16
            arrays: dict[str, Any] = {name: value.to(wide.get(value.dtype)).numpy() for name, value in own.items()}
            np.savez(buffer, **arrays)
        data = buffer.getvalue()
    write_bytes(file, data)


def container_of(file: Path) -> Container:
    """Return the container that a file's suffix stands for."""
    if file.suffix not in SUFFIXES:
        raise WeightsError(f"{file} has no suffix of a weight file; allowed: {', '.join(SUFFIXES)}")
    return SUFFIXES[file.suffix]


_ARTICLE = {
    "safetensors": "a safetensors file",
    "torch": "a file of torch.save",
    "npz": "an .npz of numpy",
}


def _read_verified(file: Path, digests: Mapping[str, str] | None) -> bytes | None:
    """Return the bytes of a file, None if it does not exist; another file than ``digests`` describes is refused."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        data = None
    except OSError as error:
        raise WeightsError(f"{file} cannot be read: {error}") from None
    if digests is None:
        return data
    existing = "" if data is None else hashlib.sha256(data).hexdigest()
    expected = digests.get(file.name, "")
    if not existing.startswith(expected) or bool(existing) != bool(expected):
        actual = f"has the SHA-256 {existing[:16]}..." if existing else "does not exist"
        description = f"one with {expected[:16]}..." if expected else "no file of this name"
        raise WeightsError(
            f"{file} is not the expected file: it {actual}, expected is {description}; restore it, or plan again with "
            "'vitlab run'"
        )
    return data


def _container_of_bytes(data: bytes) -> Container | None:
    """Return the container by the first bytes of a file, or None if they do not decide."""
    if data[:2] == b"PK":  # both are zip archives, and the name of the first member follows
        return "npz" if b".npy" in data[:PREFIX] else "torch"
    if data[:1] == b"\x80" and data[1:2] in b"\x02\x03\x04\x05":
        return "torch"
    return "safetensors" if data[8:9] == b"{" else None


def _parse_safetensors(data: bytes) -> tuple[NewState, Mapping[str, str]]:
    tensors = safetensors.torch.load(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    # The order of names in safetensors changes from run to run, and messages name the first of them.
    return dict(sorted(tensors.items())), header.get("__metadata__") or {}


def _parse_torch(data: bytes) -> tuple[Mapping[Any, Any], Mapping[str, str]]:
    # Training scripts save their arguments beside the weights; loading a Namespace executes nothing.
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(content, Mapping):
        raise ValueError(f"it holds a {type(content).__name__}, not a mapping of names to tensors")
    return content, {}


def _parse_npz(data: bytes) -> tuple[dict[str, Any], Mapping[str, str]]:
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        return {name: _from_numpy(archive[name]) for name in archive.files}, {}


def _from_numpy(array: Any) -> Any:
    """Convert an array of numbers to a tensor, including flax's bfloat16, which numpy stores as raw bytes."""
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array) if array.dtype.kind in "fiub" else array


def _unwrap(content: Mapping[Any, Any]) -> tuple[Mapping[Any, Any], list[str], list[str]]:
    """Return the mapping inside wrappers such as ``state_dict``, the wrappers' keys, and the keys beside them."""
    wrappers: list[str] = []
    other_keys: list[str] = []
    while inner := next((name for name in WRAPPERS if isinstance(content.get(name), Mapping)), None):
        wrappers.append(inner)
        other_keys += [str(name) for name in content if name != inner]
        content = content[inner]
    return content, wrappers, other_keys


def _parse_json_mapping(file: Path, data: bytes | None) -> Json:
    try:
        content = {} if data is None else json.loads(data)
    except ValueError as error:
        raise WeightsError(f"{file} cannot be read: {error}") from None
    return content if isinstance(content, Mapping) else {}


def _explain_error(error: Exception) -> str:
    if isinstance(error, pickle.UnpicklingError):
        objects = re.search(r"GLOBAL ([\w.]+)", str(error))
        if objects:
            return f"it holds objects of {objects[1]}, and only tensors are read"
    return first_sentence(error)
