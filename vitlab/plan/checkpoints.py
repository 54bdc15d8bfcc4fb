"""Checkpoint files: the files that one consists of, and their digests.

Imports no torch, because planning reads no weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

NAMES_ON_THE_HUB = ("model.safetensors", "pytorch_model.bin")
"""Names under which Hugging Face's hub stores weights; such a file is read together with :data:`DESCRIPTIONS`."""

DESCRIPTIONS = ("config.json", "preprocessor_config.json")


def files_of(file: Path) -> tuple[Path, ...]:
    """Return a file of weights and the files beside it that are read with it, whether they exist or not."""
    beside = DESCRIPTIONS if file.name in NAMES_ON_THE_HUB else ()
    return (file, *map(file.with_name, beside))


def digests_of(file: Path) -> dict[str, str]:
    """Return name to SHA-256 of every file that a checkpoint consists of.

    Raises:
        FileNotFoundError: if the weights themselves do not exist.
    """
    existing = [file, *(other for other in files_of(file)[1:] if other.is_file())]
    return {each.name: _sha256(each.resolve(), *_stamp(each)) for each in existing}


def identity_of(digests: Mapping[str, str]) -> str | dict[str, str]:
    """Return a checkpoint's part of a trial's identity: its content, independent of its path.

    Args:
        digests: as returned by :func:`digests_of`, the weights first.
    """
    weights, *beside = digests.items()
    return {"weights": weights[1], **dict(beside)} if beside else weights[1]


def _stamp(file: Path) -> tuple[int, int, int]:
    state = file.stat()
    return state.st_ino, state.st_size, state.st_mtime_ns


@cache
def _sha256(file: Path, inode: int, size: int, changed_ns: int) -> str:
    """Return the SHA-256 of a file; the inode, size and time of change are the key of the cache."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
