"""Folders of pictures by class: which files are pictures, and what is left out.

Hidden entries are left out, and those that systems and notebooks add (:data:`ADDED_BY_SYSTEMS`).  A link to a folder is
followed, and each folder is read once for a class.  Names of classes and the order of pictures follow Unicode's
composed form (NFC), which does not depend on the system that made the folders.
"""

from __future__ import annotations

import hashlib
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from vitlab.errors import DataError, count

ADDED_BY_SYSTEMS = frozenset({"__macosx", "@eadir", "thumbs.db", "desktop.ini", "$recycle.bin", "lost+found"})
"""Names, in lower case, of entries that systems add; they are left out, as names that begin with a full stop."""

UNDECODABLE = frozenset({"EPS", "MPEG"})
"""Formats whose files Pillow recognises, but decodes only with other programs."""


@cache
def picture_suffixes() -> frozenset[str]:
    """Return the endings of files that Pillow decodes, such as ``.jpg``, in lower case."""
    from PIL import Image, ImageFile

    Image.init()
    formats = {
        name
        for name, (factory, _) in Image.OPEN.items()
        if not (isinstance(factory, type) and issubclass(factory, ImageFile.StubImageFile))
    } - UNDECODABLE
    return frozenset(suffix for suffix, name in Image.registered_extensions().items() if name in formats)


Picture = tuple[str, str]
"""Class and path of a picture."""


@dataclass
class Found:
    """Pictures below class folders, and what was left out beside them."""

    labels: list[str] = field(default_factory=list)  #: classes, sorted; a class may have no pictures
    pictures: list[Picture] = field(default_factory=list)  #: sorted by class and path
    left_out: Counter[str] = field(default_factory=Counter)  #: reason to the number of files


def find(folder: Path) -> Found:
    """Return the pictures below the class folders of a folder, those in subfolders included.

    Raises:
        OSError: if a folder cannot be listed.
        DataError: if a name is not valid UTF-8, which identities and reports need.
    """
    found, labels = Found(), set()
    for entry in sorted(folder.iterdir()):
        if is_hidden(entry.name):
            found.left_out["hidden"] += _count_files(entry)
        elif entry.is_dir():
            labels.add(label := composed(entry.name))
            found.pictures += [(label, picture) for picture in pictures_below(entry, found.left_out)]
        else:
            found.left_out["outside of a class folder"] += 1
    found.labels = sorted(labels)
    # Two folders of one name, in two forms of Unicode, are one class.
    found.pictures.sort(key=lambda picture: picture[0])
    return found


def pictures_below(folder: Path, left_out: Counter[str]) -> list[str]:
    """Return the pictures in a folder and its subfolders, sorted by path components.

    Args:
        folder: the folder.
        left_out: reason to the number of files that are left out, to which those found here are added.
    """
    paths = []
    for current, names in _walk(folder, left_out):
        for name in names:
            path, suffix = os.path.join(current, name), os.path.splitext(name)[1].lower()
            if suffix not in picture_suffixes():
                left_out[suffix or "no suffix"] += 1
            elif not os.path.isfile(path):
                left_out["broken link or special file"] += 1
            else:
                paths.append(path)
    return sorted(paths, key=lambda path: composed(path).split(os.sep))


def _walk(folder: Path, left_out: Counter[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield a folder and each folder below, links to folders included, once, and the names of its files."""
    parent = folder.parent.resolve()
    seen = set(map(str, (parent, *parent.parents, *folder.resolve().parents)))  # a link to one of these would be a loop
    for current, folders, names in os.walk(folder, followlinks=True, onerror=_raise):
        if (real := os.path.realpath(current)) in seen:
            left_out[f"link to a folder that is read already: {current}"] += 1
            folders.clear()
            continue
        seen.add(real)
        left_out["hidden"] += sum(_count_files(Path(current, name)) for name in (*folders, *names) if is_hidden(name))
        # Links are followed last, so that a folder is read in its own place.
        folders[:] = [name for name in folders if not is_hidden(name)]
        folders.sort(key=lambda name: (os.path.islink(os.path.join(current, name)), composed(name)))
        yield current, [name for name in names if not is_hidden(name)]


def _raise(error: OSError) -> None:
    raise error  # os.walk would go on without the folder


def _count_files(entry: Path) -> int:
    """Return 1 for a file or a link, and the number of files below for a folder."""
    if entry.is_symlink() or not entry.is_dir():
        return 1
    return sum(len(names) for _, _, names in os.walk(entry))


def is_hidden(name: str) -> bool:
    """Return whether an entry is hidden, or added by a system."""
    return name.startswith(".") or name.lower() in ADDED_BY_SYSTEMS


def composed(name: str) -> str:
    """Return a name in Unicode's composed form; macOS stores decomposed ones.

    Raises:
        DataError: if it is not valid UTF-8.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(f"image_folder: {os.fsencode(name)!r} has a name that is not UTF-8; rename it") from None
    return unicodedata.normalize("NFC", name)


def describe(left_out: Iterable[Counter[str]]) -> str:
    """Return ``37 files left out (.txt 30, hidden 7)``; ``no files left out`` if there are none."""
    total = +sum(left_out, Counter[str]())
    if not total:
        return "no files left out"
    ordered = sorted(total.items(), key=lambda item: (-item[1], item[0]))
    parts = ", ".join(f"{reason} {number:,}" for reason, number in ordered)
    return f"{count(total.total(), 'file')} left out ({parts})"


def relative_name(path: str, root: Path) -> str:
    """Return the path of a picture below a folder, equal on every system."""
    prefix = len(str(root / "x")) - 1  # 0 for the root '.', which paths do not show
    return composed(path[prefix:]).replace(os.sep, "/")


_digests_of_names: dict[tuple[str, Path], tuple[Mapping[str, int], str]] = {}


def digest_of_names(name: str, folder: Path) -> str:
    """Return a digest over names and sizes of the pictures below a folder; cached until one of its folders changes."""
    if not folder.is_dir():
        raise DataError(f"image_folder: there is no folder {folder}; correct its path in the study")
    key = name, folder.absolute()
    # Listing 75 times as many pictures as the test split has may take a minute, and a plan asks for each arm.
    changed, digest = _digests_of_names.get(key, ({}, ""))
    if not changed or any(os.stat(path).st_mtime_ns != time_ns for path, time_ns in changed.items()):
        # Before the listing, so that a change during it is noticed the next time.
        changed = {path: os.stat(path).st_mtime_ns for path, _ in _walk(folder, Counter())}
        hashed = hashlib.blake2b(digest_size=16)
        for path in pictures_below(folder, Counter()):
            hashed.update(f"{name}\0{relative_name(path, folder)}\0{os.stat(path).st_size}\n".encode())
        digest = hashed.hexdigest()
        _digests_of_names[key] = changed, digest
    return digest
