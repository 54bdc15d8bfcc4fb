"""Keys: hashes of values as canonical JSON, and the digests of checkpoint files.

The key of a trial is a 256-bit hash of what its resolved spec, seeds, origins of components and data differ in from the
defaults.  A default that changes is covered by the code digest (:mod:`vitlab.identity.code`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from vitlab.imports import Stamp, stamp_of
from vitlab.spec.tree import Tree

NAMES_ON_THE_HUB = ("model.safetensors", "pytorch_model.bin")
"""Names under which Hugging Face's hub stores weights; such a file is read together with :data:`DESCRIPTIONS`."""

DESCRIPTIONS = ("config.json", "preprocessor_config.json")


def key_of(identity: Tree) -> str:
    """Return the hash of the canonical JSON of ``identity``."""
    return hashlib.blake2b(canonical(identity).encode(), digest_size=32).hexdigest()


def canonical(value: Any) -> str:
    """Return the canonical JSON of a value: sorted keys, no white space."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


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
    return {each.name: _sha256(each.resolve(), stamp_of(each)) for each in existing}


def identity_of(digests: Mapping[str, str]) -> str | dict[str, str]:
    """Return a checkpoint's part of a trial's identity: its content, independent of its path.

    Args:
        digests: as returned by :func:`digests_of`, the weights first.
    """
    weights, *beside = digests.items()
    return {"weights": weights[1], **dict(beside)} if beside else weights[1]


@cache
def _sha256(file: Path, stamp: Stamp | None) -> str:
    """Return the SHA-256 of a file; the stamp is part of the key of the cache."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
