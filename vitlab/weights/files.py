"""Files of weights: which tensors stand in one, whatever wrote it.  Nothing in a file is ever executed."""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from vitlab.errors import WeightsError
from vitlab.plan.checkpoints import DESCRIPTIONS, files_of
from vitlab.store.folders import write_bytes
from vitlab.weights.known import some

Container = Literal["safetensors", "torch", "npz"]

SUFFIXES: Mapping[str, Container] = {
    ".safetensors": "safetensors",
    ".pth": "torch",
    ".pt": "torch",
    ".bin": "torch",
    ".npz": "npz",
}
"""How a file of weights may be called, and what then has to be in it."""

WRAPPERS = ("state_dict", "model", "model_ema", "state_dict_ema")
"""Keys under which training scripts keep weights, beside an optimizer's state; the first that is there is opened."""

_DISTRIBUTED = "module."


@dataclass(frozen=True)
class WeightFile:
    """What stands in a file."""

    file: Path
    container: Container
    tensors: dict[str, Tensor]
    opened: tuple[str, ...] = ()  #: wrappers that were opened to get at the tensors
    left: tuple[str, ...] = ()  #: keys beside the tensors that were left alone
    header: Mapping[str, str] = field(default_factory=dict)  #: of a safetensors file
    config: Mapping[str, Any] = field(default_factory=dict)  #: of the hub's ``config.json`` beside it
    preprocessor: Mapping[str, Any] = field(default_factory=dict)  #: of its ``preprocessor_config.json``


def read_file(file: Path, digests: Mapping[str, str] | None = None) -> WeightFile:
    """Read a ``.safetensors``, a ``.pth``, ``.pt`` or ``.bin`` of torch, or an ``.npz``; on the CPU.

    The hub's ``config.json`` is read with a file that bears the hub's name, ``model.safetensors`` or
    ``pytorch_model.bin``, for only then does it belong to it.

    Args:
        file: of weights.
        digests: name to SHA-256, or how it begins, of this file and of those that are read with it; what is loaded are
            the very bytes that were compared.  None: not compared.

    Raises:
        WeightsError: if it is not there, is damaged, is not what it is called, holds no tensors, or is not the file
            that ``digests`` describes.
    """
    if not file.is_file():
        raise WeightsError(f"{file} is a folder; name the file in it" if file.is_dir() else f"no such file: {file}")
    container = container_of(file)
    data, *beside = [_content(each, digests) for each in files_of(file)]
    assert data is not None
    found = _container_by_content(data)
    if found is not None and found != container:
        raise WeightsError(f"{file} is called {file.suffix}, and what is in it is {_ARTICLE[found]}")
    read = {"safetensors": _safetensors, "torch": _torch, "npz": _npz}[container]
    try:
        content, header = read(data)
    except Exception as error:  # a damaged or hostile file makes the readers raise anything
        raise WeightsError(f"{file} is not {_ARTICLE[container]} that can be read: {_reason(error)}") from None
    content, opened, left = _unwrapped(content)
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    left += [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if not tensors:
        raise WeightsError(f"{file} holds no tensors; its keys: {some(left) or 'none'}")
    if all(name.startswith(_DISTRIBUTED) for name in tensors):
        tensors = {name.removeprefix(_DISTRIBUTED): value for name, value in tensors.items()}
        opened.append(_DISTRIBUTED.removesuffix("."))
    config, preprocessor = (
        _json(file.with_name(name), each) for name, each in zip(DESCRIPTIONS, beside or (None, None), strict=True)
    )
    return WeightFile(
        file,
        container,
        tensors,
        tuple(opened),
        tuple(left),
        header,
        config,
        preprocessor,
    )


def write_file(file: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str] = {}) -> None:
    """Write tensors as the name of the file says, whole or not at all.  Only safetensors have a header.

    Raises:
        WeightsError: for a name that says nothing, or a type of numbers the file cannot hold.
    """
    container = container_of(file)
    mine = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    if container == "safetensors":
        data = safetensors.torch.save(mine, {"format": "pt", **header})
    elif container == "torch":
        buffer = io.BytesIO()
        torch.save(mine, buffer)
        data = buffer.getvalue()
    else:
        narrow = [name for name, value in mine.items() if value.dtype == torch.bfloat16]
        if narrow:
            raise WeightsError(f"an .npz holds no bfloat16, and these are: {some(narrow)}")
        buffer = io.BytesIO()
        np.savez(buffer, **{name: value.numpy() for name, value in mine.items()})  # type: ignore[arg-type]
        data = buffer.getvalue()
    write_bytes(file, data)


def container_of(file: Path) -> Container:
    """What has to be in a file of this name.

    Raises:
        WeightsError: if the name says nothing.
    """
    if file.suffix not in SUFFIXES:
        raise WeightsError(f"{file} is not called as files of weights are: {', '.join(SUFFIXES)}")
    return SUFFIXES[file.suffix]


# -- how it is done ---------------------------------------------------------------------------------------------------

_ARTICLE = {
    "safetensors": "a safetensors file",
    "torch": "a file of torch.save",
    "npz": "an .npz of numpy",
}


def _content(file: Path, digests: Mapping[str, str] | None) -> bytes | None:
    """Return what stands in a file, None if it does not exist.

    Raises:
        WeightsError: if it is not the file that ``digests`` describes.
    """
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
        one, other = (value[:16] or "that of no file" for value in (existing, expected))
        raise WeightsError(
            f"{file} is not the expected file: its SHA-256 begins with {one}, expected is {other}; put the expected "
            "file there, or plan again with 'vitlab run'"
        )
    return data


def _container_by_content(data: bytes) -> Container | None:
    """What is in a file by its first bytes, or None where they do not say."""
    if data[:2] == b"PK":
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as opened:
                names = opened.namelist()
        except (zipfile.BadZipFile, OSError):
            return None
        return "npz" if names and all(name.endswith(".npy") for name in names) else "torch"
    if data[:1] == b"\x80" and data[1:2] in b"\x02\x03\x04\x05":
        return "torch"
    return "safetensors" if data[8:9] == b"{" else None


def _safetensors(data: bytes) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    tensors = safetensors.torch.load(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    # Safetensors gives names in an order that changes from run to run, and sentences name the first of them.
    return dict(sorted(tensors.items())), header.get("__metadata__") or {}


def _torch(data: bytes) -> tuple[Mapping[Any, Any], Mapping[str, str]]:
    # Training scripts keep their arguments beside the weights; a Namespace holds names and values, and runs nothing.
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(content, Mapping):
        raise ValueError(f"it holds a {type(content).__name__}, and not tensors by name")
    return content, {}


def _npz(data: bytes) -> tuple[dict[str, Any], Mapping[str, str]]:
    with np.load(io.BytesIO(data), allow_pickle=False) as opened:
        return {name: _from_numpy(opened[name]) for name in opened.files}, {}


def _from_numpy(array: Any) -> Any:
    """A tensor; what is no number stays as it is, and flax's bfloat16, which numpy does not know, is recognised."""
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array) if array.dtype.kind in "fiub" else array


def _unwrapped(content: Mapping[Any, Any]) -> tuple[Mapping[Any, Any], list[str], list[str]]:
    """What is inside of wrappers, the wrappers, and what stood beside it."""
    opened: list[str] = []
    left: list[str] = []
    while True:
        inner = next((name for name in WRAPPERS if isinstance(content.get(name), Mapping)), None)
        if inner is None:
            return content, opened, left
        opened.append(inner)
        left += [str(name) for name in content if name != inner]
        content = content[inner]


def _json(file: Path, data: bytes | None) -> Mapping[str, Any]:
    try:
        content = {} if data is None else json.loads(data)
    except ValueError as error:
        raise WeightsError(f"{file} cannot be read: {error}") from None
    return content if isinstance(content, Mapping) else {}


def _reason(error: Exception) -> str:
    """Why a reader gave up, in one line."""
    if isinstance(error, pickle.UnpicklingError):
        objects = re.search(r"GLOBAL ([\w.]+)", str(error))
        if objects:
            return f"it holds objects of {objects[1]}, and only tensors are read"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].split(". ")[0].rstrip(".") if lines else type(error).__name__
