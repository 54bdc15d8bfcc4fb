"""Checkpoints: everything a training needs to go on, in one file that is there whole or not at all.

The file is safetensors: tensors as they are, and everything else as JSON in its header, together with a digest over
all of it.  Nothing in it is ever executed.  A file that cannot be what was written is refused, and the training begins
anew: that costs time, and never a wrong number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from vitlab.errors import VitlabError
from vitlab.store.folders import write_bytes

FILE = "last.safetensors"
_JSON = "vitlab"
_DIGEST = "sha256"


class Damaged(VitlabError):
    """A checkpoint that is not what was written."""


def write(folder: Path, state: Mapping[str, Any]) -> None:
    """Replace the checkpoint in ``folder``.

    Args:
        folder: made where there is none.
        state: tensors on any device, numbers, strings and None, in lists, tuples and mappings, however nested.  Tuples
            come back as lists.

    Raises:
        VitlabError: if something else is in ``state``, naming it and its place.
    """
    tensors: dict[str, Tensor] = {}
    rest = json.dumps(_taken_apart(dict(state), "", tensors))
    metadata = {_JSON: rest, _DIGEST: _sealed(tensors, rest)}
    write_bytes(folder / FILE, packed(tensors, metadata))


def read(folder: Path) -> dict[str, Any] | None:
    """The checkpoint in ``folder``, tensors on the CPU; None where there is none.

    The caller holds the lease of the trial, so what a killed writer left half done can go.

    Raises:
        Damaged: if it is not what was written.
    """
    for left_over in folder.glob(f".{FILE}.*"):
        left_over.unlink(missing_ok=True)
    if not (folder / FILE).exists():
        return None
    try:
        with safetensors.safe_open(folder / FILE, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is not a mapping
        rest = metadata[_JSON]
        if metadata[_DIGEST] != _sealed(tensors, rest):
            raise Damaged(f"{folder / FILE} does not hold what was written")
        state: dict[str, Any] = _put_together(json.loads(rest), tensors)
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise Damaged(f"{folder / FILE} cannot be read: {error}") from error
    return state


def packed(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file.  Tensors are copied, because the format refuses those that share memory."""
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    data: bytes = safetensors.torch.save(copies, dict(metadata))
    return data


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in the order of the names."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        found.update(f"{name}\n{tensor.dtype}\n{tuple(tensor.shape)}\n".encode())
        found.update(tensor.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


# -- how it is done ---------------------------------------------------------------------------------------------------


def _sealed(tensors: Mapping[str, Tensor], rest: str) -> str:
    return hashlib.sha256(f"{digest(tensors)}\n{rest}".encode()).hexdigest()


def _taken_apart(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """``value`` as JSON; its tensors go to ``tensors`` under their place."""
    match value:
        case Tensor():
            if place in tensors:  # as by keys 1 and "1"
                raise VitlabError(f"a checkpoint cannot tell two tensors apart that both stand at {place}")
            tensors[place] = value
            return {"tensor": place}
        case Mapping():
            # Pairs, because the keys of JSON are strings and those of an optimizer's state are numbers.
            return {"pairs": [[key, _taken_apart(item, f"{place}/{key}", tensors)] for key, item in value.items()]}
        case list() | tuple():
            return [_taken_apart(item, f"{place}/{index}", tensors) for index, item in enumerate(value)]
        case None | bool() | int() | float() | str():
            return value
    raise VitlabError(
        f"a checkpoint holds tensors, numbers, text and collections of them; found {type(value).__name__} at {place}"
    )


def _put_together(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    match value:
        case {"tensor": place}:
            return tensors[place]
        case {"pairs": pairs}:
            return {key: _put_together(item, tensors) for key, item in pairs}
        case list():
            return [_put_together(item, tensors) for item in value]
    return value
