"""A trial and its key: one training as a value, and hashes of values as canonical JSON.

The key of a trial is a 256-bit hash of the options that differ from their defaults, of its seeds, its data, the origins
of components of plugins, and the keys of its prerequisites.  A default that changes is covered by the code digest
(:mod:`vitlab.identity.code`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from vitlab.imports import Stamp, file_stamp
from vitlab.spec.tree import NewTree, Tree
from vitlab.spec.trial import TrialSpec

FolderName = Annotated[str, Field(pattern=r"^[\w-]*$")]
"""A hash that is also the name of a folder; the pattern prevents a path from leaving the parent folder."""


@dataclass(frozen=True)
class Trial:
    """One training, fully specified: every option is written out, so that changed defaults leave it as it is.

    ``key`` is the hash that the head of this module describes, made by
    :meth:`vitlab.planning.resolve.ResolvedTrial.to_seeded_trial`; ``code`` is the digest of the code that it runs.  Two
    trials with equal key and code have equal outcomes on one kind of machine.
    """

    spec: TrialSpec  #: with every option resolved
    seeds: Mapping[str, int]  #: stream to seed
    origins: tuple[str, ...]  #: ``slot:name source version`` of every component, sorted
    data: str | None  #: identity of the data set; None if it is not downloaded yet, and the key is pending
    needs: Mapping[str, Annotated[str, Field(pattern=r"^[\w-]*/?[\w-]*$")]] = field(default_factory=dict)
    """Role to key and code of the trial whose weights this one starts from."""
    files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Role to file name to SHA-256, for the checkpoints of the plan; compared when the files are opened.

    Published weights stand under their name, with the beginning of their SHA-256.
    """
    key: FolderName = ""
    code: FolderName = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package to the version required for training; empty for the installed versions."""

    @property
    def name(self) -> str:
        """The name of the training, ``key/code``, which is also its folder among the trials."""
        return f"{self.key}/{self.code}"

    def to_json(self) -> NewTree:
        """Return the trial as plain data."""
        return {**vars(self), "spec": self.spec.plain()}


# -- keys -------------------------------------------------------------------------------------------------------------


def hash_of(identity: Tree) -> str:
    """Return the hash of the canonical JSON of ``identity``: sorted keys, no white space."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


# -- files of weights -------------------------------------------------------------------------------------------------

NAMES_ON_THE_HUB = ("model.safetensors", "pytorch_model.bin")
"""Names under which Hugging Face's hub stores weights; such a file is read together with :data:`DESCRIPTIONS`."""

DESCRIPTIONS = ("config.json", "preprocessor_config.json")


def weight_files(file: Path) -> tuple[Path, ...]:
    """Return a file of weights and the files beside it that are read with it, whether they exist or not."""
    beside = DESCRIPTIONS if file.name in NAMES_ON_THE_HUB else ()
    return (file, *map(file.with_name, beside))


def weight_file_digests(file: Path) -> dict[str, str]:
    """Return name to SHA-256 of every file that a checkpoint consists of.

    Raises:
        FileNotFoundError: if the weights themselves do not exist.
    """
    existing = [file, *(other for other in weight_files(file)[1:] if other.is_file())]
    return {each.name: _sha256(each.resolve(), file_stamp(each)) for each in existing}


def checkpoint_identity(digests: Mapping[str, str]) -> str | dict[str, str]:
    """Return a checkpoint's part of a trial's identity: its content, independent of its path.

    Args:
        digests: as returned by :func:`weight_file_digests`, the weights first.
    """
    weights, *beside = digests.items()
    return {"weights": weights[1], **dict(beside)} if beside else weights[1]


@cache
def _sha256(file: Path, stamp: Stamp | None) -> str:
    """Return the SHA-256 of a file; the stamp is part of the key of the cache."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
