"""Files of published data sets: where they may lie, what stands for their content, how they are fetched.

The identity of a named set is a digest over the names and MD5 checksums of its decoded files.  Where the files are
here it is computed from them, so a gzipped and an unpacked copy have one identity and a changed byte has another;
where they are not, it is computed from the published checksums, so a plan made on a machine without the data has the
keys of one made beside it.  Checksums are remembered per path, size and time of change for the life of the process.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal

from vitlab.errors import DataError

Download = Literal["never", "missing"]
"""Whether files that are not here may be fetched from where their authors publish them."""

_checksums: dict[tuple[str, int, int], str] = {}


def roots(root: str | None) -> list[Path]:
    """The folders to look in: the one the user names, or else the usual ones."""
    if root is not None:
        return [Path(os.path.expanduser(root))]
    named = os.environ.get("VITLAB_DATA")
    first = [Path(os.path.expanduser(named))] if named else []
    return [*first, Path("data"), cache(), Path("/usr/share/datasets")]


def cache() -> Path:
    """The user's cache of data sets."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(base)) / "vitlab" / "data"


def download_folder(root: str | None) -> Path:
    """Where downloads go: the folder the user names, ``$VITLAB_DATA``, or the user's cache."""
    named = root or os.environ.get("VITLAB_DATA")
    return Path(os.path.expanduser(named)) if named else cache()


def find(folders: Sequence[Path], names: Sequence[str]) -> dict[str, Path] | None:
    """The first folder that has every name, gzipped or not; None if no folder has."""
    for folder in folders:
        found = {}
        for name in names:
            for path in (folder / name, folder / f"{name}.gz"):
                if path.is_file():
                    found[name] = path
                    break
        if len(found) == len(names):
            return found
    return None


def not_here(name: str, root: str | None, layouts: Sequence[str], names: Sequence[str]) -> str:
    """The sentence for a set that was not found, and what to do about it."""
    looked = ", ".join(map(str, roots(root)))
    return (
        f"{name} is not here: looked in {looked} (there directly, or in {', '.join(layouts)}) for {', '.join(names)}. "
        "Give the folder that has them as 'root', or allow fetching them with 'download: missing'."
    )


def identity(name: str, checksums: Mapping[str, str]) -> str:
    """What stands for the content of a set: its name and a digest over its files."""
    text = "\n".join(f"{file} {checksums[file]}" for file in sorted(checksums))
    return f"{name}:{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def checksum(path: Path) -> str:
    """MD5 of the decoded file, in hex, as the authors of these sets publish it.

    Raises:
        DataError: if the file is gzipped and broken.
    """
    stat = path.stat()
    key = (str(path.resolve()), stat.st_size, stat.st_mtime_ns)
    if key not in _checksums:
        digest = hashlib.md5(usedforsecurity=False)
        with opened(path) as file:
            while chunk := read(file, 1 << 20, path):
                digest.update(chunk)
        _checksums[key] = digest.hexdigest()
    return _checksums[key]


def noted(file: Path) -> str | None:
    """What :func:`note` left there; None where nothing is."""
    try:
        return file.read_text(encoding="utf-8") or None
    except (OSError, UnicodeDecodeError):
        return None


def note(file: Path, text: str) -> None:
    """Remember a text for other processes; where that cannot be written, it is not remembered."""
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, file)


def opened(path: Path) -> BinaryIO:
    """The file, unpacked while it is read if its name ends in .gz."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")  # type: ignore[return-value]


def read(file: BinaryIO, size: int, path: Path) -> bytes:
    """Up to ``size`` bytes; a broken archive is a sentence that names it."""
    try:
        return file.read(size)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged: {error}") from None


def contents(path: Path, *, skip: int, at_most: int) -> bytes:
    """What follows the first ``skip`` bytes of the decoded file, up to ``at_most`` bytes.

    Memory is taken as there is something to fill it, so a header may claim what it likes.
    """
    parts = []
    with opened(path) as file:
        read(file, skip, path)
        while at_most and (part := read(file, min(at_most, 1 << 20), path)):
            parts.append(part)
            at_most -= len(part)
    return b"".join(parts)


def fetch(name: str, folder: Path, download: Callable[[Path], object]) -> None:
    """Run ``download(folder)``, one process at a time.

    Raises:
        DataError: if it fails.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f".{name}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            download(folder)
    except (OSError, RuntimeError) as error:  # what torchvision raises for networks, disks and wrong checksums
        raise DataError(f"{name} could not be fetched to {folder}: {error}") from None
