"""Listing of class folders: which files are pictures, and what is left out.

Hidden entries are left out, and those that systems and notebooks add (:data:`ADDED_BY_SYSTEMS`).  A link to a folder is
followed, and each folder is read once for a class.  Names of classes and the order of pictures are those of Unicode's
composed form (NFC), which does not depend on the system that made the folders.
"""

from __future__ import annotations

import os
import unicodedata
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from vitlab.errors import DataError

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


@dataclass
class Found:
    """Pictures below class folders, and what was left out beside them."""

    labels: list[str] = field(default_factory=list)  #: classes, sorted; a class may have no pictures
    pictures: list[tuple[str, str]] = field(default_factory=list)  #: class and path, sorted by class and path
    left_out: Counter[str] = field(default_factory=Counter)  #: reason to the number of files
    folders: list[tuple[str, int]] = field(default_factory=list)
    """Absolute path of each folder, and the time of its last change as of before it was listed, in nanoseconds."""
    faults: list[str] = field(default_factory=list)  #: sentences on names that cannot be told apart

    @property
    def empty(self) -> list[str]:
        """Classes without pictures."""
        return sorted(set(self.labels) - {label for label, _ in self.pictures})


def pictures_below(folder: str) -> Found:
    """Return the pictures in a folder and its subfolders, without classes; see :func:`find` for errors."""
    found = Found()
    found.pictures = [("", path) for path in _pictures_below(folder, frozenset(), found)]
    return found


def find(folder: str) -> Found:
    """Return the pictures below the class folders of a folder, those in subfolders included.

    Raises:
        OSError: if a folder cannot be listed.
        DataError: if a name is not valid UTF-8, which identities and reports need.
    """
    found = Found(folders=[(os.path.abspath(folder), modified(folder))])
    by_label: dict[str, str] = {}
    for entry in _entries(folder, found):
        if not _is_folder(entry):
            found.left_out["outside of a class folder"] += 1
        elif (label := composed(entry.name)) in by_label:
            found.faults.append(f"{folder} has two folders '{label}', in two forms of Unicode; merge them")
        else:
            by_label[label] = entry.path
    above = _folders_above(os.path.join(os.path.realpath(folder), "x"))
    for label, path in sorted(by_label.items()):
        found.labels.append(label)
        found.pictures += [(label, picture) for picture in _pictures_below(path, above, found)]
    return found


def _pictures_below(folder: str, above: frozenset[FolderId], found: Found) -> list[str]:
    """Return the pictures in a folder and its subfolders, sorted by path components."""
    paths, pending = [], deque([folder])
    seen = set(above | _folders_above(os.path.realpath(folder)))  # a link to one of these would be a loop
    while pending:
        current = pending.popleft()
        if (identity := _identity(current)) in seen:
            found.left_out[f"link to a folder that is read already: {current}"] += 1
            continue
        seen.add(identity)
        found.folders.append((os.path.abspath(current), modified(current)))
        for entry in _entries(current, found):
            suffix = os.path.splitext(entry.name)[1].lower()
            if _is_folder(entry):
                pending.append(entry.path)
            elif suffix not in picture_suffixes():
                found.left_out[suffix or "no suffix"] += 1
            elif not os.path.isfile(entry.path) if entry.is_symlink() else not entry.is_file():
                found.left_out["broken link" if entry.is_symlink() else "no regular file"] += 1
            else:
                paths.append(entry.path)
    return sorted(paths, key=lambda path: composed(path).split(os.sep))


def _entries(folder: str, found: Found) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a folder that are not hidden: no links first, each kind sorted by name."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: (entry.is_symlink(), composed(entry.name))):
            if is_hidden(entry.name):
                below = os.walk(entry.path) if entry.is_dir(follow_symlinks=False) else [("", [], [entry.name])]
                found.left_out["hidden"] += sum(len(names) for _, _, names in below)
            else:
                yield _checked(entry)


def _checked(entry: os.DirEntry[str]) -> os.DirEntry[str]:
    try:
        entry.name.encode()
    except UnicodeEncodeError:
        raise DataError(f"image_folder: {os.fsencode(entry.path)!r} has a name that is not UTF-8; rename it") from None
    return entry


def is_hidden(name: str) -> bool:
    """Return whether an entry is hidden, or added by a system."""
    return name.startswith(".") or name.lower() in ADDED_BY_SYSTEMS


def composed(name: str) -> str:
    """Return a name in Unicode's composed form; macOS stores decomposed ones."""
    return unicodedata.normalize("NFC", name)


def modified(folder: str) -> int:
    """Return the time of the last change of a folder's entries in nanoseconds; 0 if it does not exist."""
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


def describe(left_out: Iterable[Counter[str]]) -> str:
    """Return ``37 files left out (.txt 30, hidden 7)``; ``no files left out`` if there are none."""
    total = sum(left_out, Counter[str]())
    parts = ", ".join(f"{reason} {number:,}" for reason, number in total.most_common())
    files = sum(total.values())
    return f"{files:,} {'file' if files == 1 else 'files'} left out ({parts})" if parts else "no files left out"


FolderId = tuple[int, int]
"""Device and inode."""


def _identity(folder: str) -> FolderId:
    stat = os.stat(folder)
    return stat.st_dev, stat.st_ino


def _folders_above(path: str) -> frozenset[FolderId]:
    """Return the folders that contain a path."""
    return frozenset(_identity(str(folder)) for folder in Path(path).parents)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder or a link to one; a link to itself is none, which os.DirEntry raises for."""
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()
