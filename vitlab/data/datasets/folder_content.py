"""The content of a folder of pictures: its identity, and pictures that are equal byte for byte."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from vitlab.data.datasets import class_folders, files
from vitlab.errors import DataError, count


@dataclass(frozen=True)
class Content:
    """What follows from the bytes of all pictures."""

    identity: str
    copies: Mapping[str, int]  #: see :func:`count_copies`


def content_of(root: Path, splits: Mapping[str, Sequence[tuple[str, str]]]) -> Content:
    """Return what follows from the bytes of all pictures, cached by names, sizes, inodes and modification times.

    Args:
        root: the folder of the data set.
        splits: split to the class and path of each picture.
    """
    prefix = len(str(root / "x")) - 1  # 0 for the root '.', which paths do not show
    entries = [
        (f"{split}\0{label}\0{class_folders.composed(path[prefix:]).replace(os.sep, '/')}", Path(path))
        for split, pictures in sorted(splits.items(), reverse=True)
        for label, path in pictures
    ]

    def compute() -> str:
        digest, checksums = hashlib.blake2b(digest_size=16), []
        for entry, path in entries:
            split, label, _ = entry.split("\0")
            checksums.append((split, label, files.checksum(path)))
            digest.update(f"{entry}\0{path.stat().st_size}\0{checksums[-1][2]}\n".encode())
        return json.dumps(asdict(Content(f"image_folder:{digest.hexdigest()}", count_copies(checksums))))

    return Content(**json.loads(files.remember(entries, compute)))


def count_copies(pictures: Sequence[tuple[str, str, str]]) -> dict[str, int]:
    """Return how many pictures have the bytes of another one, by where that is; without zeros.

    Keys are ``test/train`` (test pictures that are also in train), ``val/train``, ``test/val``, ``train`` (training
    pictures beyond the first of equal ones), and ``classes`` (contents that stand in more than one class).

    Args:
        pictures: split, class and checksum of each picture.
    """
    of_split: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    classes: dict[str, set[str]] = {}
    for split, label, checksum in pictures:
        of_split[split].append(checksum)
        classes.setdefault(checksum, set()).add(label)
    distinct = {split: set(checksums) for split, checksums in of_split.items()}
    copies = {
        f"{one}/{other}": sum(checksum in distinct[other] for checksum in of_split[one])
        for one, other in (("test", "train"), ("val", "train"), ("test", "val"))
    }
    copies["train"] = len(of_split["train"]) - len(distinct["train"])
    copies["classes"] = sum(len(labels) > 1 for labels in classes.values())
    return {where: number for where, number in copies.items() if number}


def describe_copies(copies: Mapping[str, int], numbers: Mapping[str, int]) -> list[str]:
    """Return a sentence for each entry of :func:`count_copies`.

    Args:
        copies: as returned by it.
        numbers: split to the number of its pictures.
    """
    sentences = []
    for where, number in copies.items():
        one, _, other = where.partition("/")
        if other:
            of_all = f"{number:,} of {count(numbers[one], f'{one} picture')}"
            sentences.append(f"{of_all} {_are(number)} also in {other}, byte for byte.")
        elif where == "train":
            held_out = "" if "val" in numbers else ", some of which may be held out for validation"
            sentences.append(f"{count(number, 'train picture')} {_are(number)} identical to another{held_out}.")
        else:
            sentences.append(f"{count(number, 'picture')} {_are(number)} in more than one class, byte for byte.")
    return sentences


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


class _NamesDigest(NamedTuple):
    """The folders below a folder with their modification times, and the digest of the pictures in them."""

    folders: Sequence[tuple[str, int]]
    digest: str


_digests_of_names: dict[tuple[str, str], _NamesDigest] = {}


def digest_of_names(name: str, folder: Path) -> str:
    """Return a digest over names and sizes of the pictures below a folder; cached until one of its folders changes."""
    key = name, os.path.abspath(folder)
    if key in _digests_of_names:
        cached = _digests_of_names[key]
        if all(class_folders.modified(path) == time_ns for path, time_ns in cached.folders):
            return cached.digest
    if not folder.is_dir():
        raise DataError(f"image_folder: there is no folder {folder}; correct its path in the study")
    start, digest, found = time.time(), hashlib.blake2b(digest_size=16), class_folders.pictures_below(str(folder))
    for _, path in found.pictures:
        entry = class_folders.composed(os.path.relpath(path, folder)).replace(os.sep, "/")
        digest.update(f"{name}\0{entry}\0{os.stat(path).st_size}\n".encode())
    if all(time_ns < (start - files.SETTLED_S) * 1e9 for _, time_ns in found.folders):
        _digests_of_names[key] = _NamesDigest(found.folders, digest.hexdigest())
    return digest.hexdigest()
