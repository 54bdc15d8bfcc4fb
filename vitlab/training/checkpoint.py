"""Checkpoints: the complete state of a training in one atomically written file.

The file is safetensors, with everything but tensors as JSON in its header, and a digest over all of it.  Nothing in it
is executed.  A damaged file is refused and the training starts again, so that damage costs time but never changes a
result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from vitlab.errors import VitlabError
from vitlab.models.contract import digest
from vitlab.store.damage import Damaged
from vitlab.store.files import sort_metadata, write_bytes

State = Mapping[str, Any]
"""The content of a checkpoint."""

FILE = "last.safetensors"
_JSON = "vitlab"
_DIGEST = "sha256"


def write(folder: Path, state: State) -> None:
    """Replace the checkpoint in ``folder``.

    Args:
        folder: Created if it does not exist.
        state: Tensors on any device, numbers, strings and None, nested in lists, tuples and mappings.  Tuples are read
            back as lists.

    Raises:
        VitlabError: If ``state`` contains anything else, with its type and place.
    """
    tensors: dict[str, Tensor] = {}
    rest = json.dumps(_to_json(dict(state), "", tensors))
    metadata = {_JSON: rest, _DIGEST: _digest_of_file(tensors, rest)}
    write_bytes(folder / FILE, pack(tensors, metadata))


def load(folder: Path) -> State | None:
    """Return the checkpoint in ``folder`` with tensors on the CPU, or None if there is none.

    The caller must hold the trial's lock: temporary files of killed writers are deleted.

    Raises:
        Damaged: If the file is not what was written.
    """
    if not folder.is_dir():
        return None
    # Their writers are dead, since the caller holds the lock.
    for leftover in folder.glob(f".{FILE}.*"):
        leftover.unlink(missing_ok=True)
    if not (folder / FILE).exists():
        return None
    try:
        tensors, metadata = unpack(folder / FILE)
        rest = metadata[_JSON]
        if metadata[_DIGEST] != _digest_of_file(tensors, rest):
            raise Damaged(f"{folder / FILE} is damaged: its digest differs")
        state: State = _from_json(json.loads(rest), tensors)
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise Damaged(f"{folder / FILE} cannot be read: {error}") from error
    return state


def pack(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a safetensors file.  Tensors are copied, since the format rejects shared memory."""
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    return sort_metadata(safetensors.torch.save(copies, dict(metadata)))


def unpack(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a safetensors file, on the CPU, and its metadata."""
    with safetensors.safe_open(file, framework="pt") as reader:
        # It is not a mapping.
        return {name: reader.get_tensor(name) for name in reader.keys()}, reader.metadata() or {}  # noqa: SIM118


def _digest_of_file(tensors: Mapping[str, Tensor], rest: str) -> str:
    return hashlib.sha256(f"{digest(tensors)}\n{rest}".encode()).hexdigest()


def _to_json(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """Return ``value`` in JSON types, and add its tensors to ``tensors`` under their places."""
    match value:
        case Tensor():
            if place in tensors:  # as by keys 1 and "1"
                raise VitlabError(f"two tensors of the state have the path {place}; give them keys that differ as text")
            tensors[place] = value
            return {"tensor": place}
        case Mapping():
            # Pairs, because the keys of JSON are strings, and an optimizer's state has numbers as keys.
            return {"pairs": [[key, _to_json(item, f"{place}/{key}", tensors)] for key, item in value.items()]}
        case list() | tuple():
            return [_to_json(item, f"{place}/{index}", tensors) for index, item in enumerate(value)]
        case None | bool() | int() | float() | str():
            return value
    raise VitlabError(
        f"a checkpoint holds tensors, numbers, text and collections of them; found {type(value).__name__} at {place}"
    )


def _from_json(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    match value:
        case {"tensor": place}:
            return tensors[place]
        case {"pairs": pairs}:
            return {key: _from_json(item, tensors) for key, item in pairs}
        case list():
            return [_from_json(item, tensors) for item in value]
    return value
