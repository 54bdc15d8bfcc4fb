"""Published data sets: the search, identity and download of their files, and base classes.

The identity of a published set is a digest over the names and MD5 checksums of its decompressed files.  If the files
are here, it is computed from them, so that gzipped and unpacked copies have the same identity and any changed byte
another.  If they are not, it is computed from the published checksums, so that planning without the data gives the
same trial keys.  Checksums are cached in the process by path, size and modification time.
"""

import functools
import gzip
import hashlib
import io
import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from filelock import FileLock

from vitlab.data.datasets.base import Dataset
from vitlab.data.torchvision_import import torchvision
from vitlab.errors import DataError, first_sentence
from vitlab.geometry import DataInfo, Pair
from vitlab.imports import file_stamp
from vitlab.registry import Unhashed
from vitlab.store.files import write_bytes

Download = Literal["never", "missing"]
"""``missing`` downloads files that are not here; ``never`` does not."""

MAX_UNUSED_S = 30 * 24 * 3600
"""Seconds after which copies of data sets that nobody has read are deleted."""

SETTLED_S = 10.0
"""Seconds after a write during which a second write may leave the same timestamp."""


def expand_home(path: str) -> Path:
    """Return a path whose ``~`` is the user's home; an unknown user's stays, which pathlib would raise for."""
    return Path(os.path.expanduser(path))


def expand_braces(pattern: str) -> list[str]:
    """Return the texts of a pattern such as ``{train,val}-{000..146}.tar``, as a shell expands it."""
    match = re.search(r"(.*?)\{([^{}]*)\}(.*)", pattern)
    if match is None:
        return [pattern]
    before, inside, after = match.groups()
    choices = inside.split(",")
    if span := re.fullmatch(r"(\d+)\.\.(\d+)", inside):
        numbers = range(int(span[1]), int(span[2]) + 1)
        if not numbers or numbers[100_000:]:
            raise DataError(f"image_table: {{{inside}}} is not a range of 1 to 100,000 rising numbers; correct 'root'")
        choices = [f"{number:0{len(span[1])}}" for number in numbers]
    return [text for choice in choices for text in expand_braces(before + choice + after)]


def folders_to_search(root: str | None) -> list[Path]:
    """Return the folders to search: the user's, or the default ones."""
    if root is not None:
        return [expand_home(root)]
    folder = os.environ.get("VITLAB_DATA")
    return [*([expand_home(folder)] if folder else []), Path("data"), cache_folder(), Path("/usr/share/datasets")]


def cache_folder() -> Path:
    """Return the folder of data sets in the user's cache."""
    return expand_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "vitlab" / "data"


def make_and_prune_folder(folder: Path) -> None:
    """Create a folder of the cache, and delete the files in it that nobody has read for :data:`MAX_UNUSED_S`."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        with suppress(OSError):  # another process deletes it, too, or reads it (on Windows), or another user owns it
            if time.time() - max(file.stat().st_atime, file.stat().st_mtime) > MAX_UNUSED_S:
                file.unlink()


def identity_of_files(name: str, checksums: Mapping[str, str]) -> str:
    """Return the identity of a data set: its name and a digest over its files' checksums."""
    text = "\n".join(f"{file} {checksums[file]}" for file in sorted(checksums))
    return f"{name}:{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def content_md5(path: Path) -> str:
    """Return the MD5 of the decompressed file, in hex, as published by the authors of these sets."""
    return _cached_md5(path.resolve(), file_stamp(path))


@functools.cache
def _cached_md5(path: Path, _version: object) -> str:
    """Return the MD5 of a version of a file."""
    with open_decompressed(path) as file:
        # Systems that forbid MD5 for security allow it for checksums, if told so.
        return hashlib.file_digest(file, functools.partial(hashlib.md5, usedforsecurity=False)).hexdigest()


def read_or_compute(file: Path, compute: Callable[[], str]) -> str:
    """Return the text of a file; without one, compute it, and write it for other processes if that is possible."""
    with suppress(OSError, UnicodeDecodeError):
        if text := file.read_text(encoding="utf-8"):
            return text
    text = compute()
    with suppress(OSError):
        write_bytes(file, text.encode(), fsync=False)
    return text


def compute_once_per_file_state(entries: Sequence[tuple[str, Path]], compute: Callable[[], str]) -> str:
    """Return a text that follows from the content of files; computed again once a size, inode or time differs.

    Args:
        entries: name and path of each file; the names are part of what is remembered.
        compute: returns the text.
    """
    start, digest, latest = time.time(), hashlib.blake2b(digest_size=16), 0.0
    for name, path in entries:
        stat = os.stat(path)
        latest = max(latest, stat.st_ctime)
        state = (stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)
        digest.update(f"{name}\0{state}\n".encode())
    # A file just written may be written again within the same tick of the clock, which nothing here would show.
    if latest >= start - SETTLED_S:  # measured from the start, as reading may take longer than that
        return compute()
    return read_or_compute(cache_folder() / "identities" / digest.hexdigest(), compute)


def parse_md5sums(text: str) -> dict[str, str]:
    """Return file name to MD5 from lines as the program ``md5sum`` writes them."""
    return {name: checksum for checksum, name in map(str.split, text.strip().splitlines())}


@contextmanager
def open_decompressed(path: Path) -> Iterator[io.BufferedIOBase]:
    """Open a file for reading, decompressing it if its name ends in .gz; a damaged one raises a DataError."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged: {error}; delete it and download it again") from None


def total_memory(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory of this machine, or of its container if that has less; no limit if it is unknown."""
    if not hasattr(os, "sysconf"):  # Windows
        return sys.maxsize
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            return min(machine, int((root / name).read_text()))
    return machine


def require_memory(required: int, what: str) -> None:
    """Raise a DataError if pictures, decoded, need more than 80 % of the memory of the machine."""
    available = total_memory()
    if required > 0.8 * available:
        raise DataError(
            f"{what} needs {required / 2**30:.1f} GiB decoded, and this machine has {available / 2**30:.1f} GiB of "
            "memory; set a smaller 'image_size'"
        )


@dataclass(kw_only=True)
class Published(Dataset):
    """Base of published data sets, whose files are found in a folder or fetched through torchvision.

    Args:
        root: folder that has the files, or has them in the folder that the published archive unpacks to.
            None: ``$VITLAB_DATA``, ``data``, the user's cache, ``/usr/share/datasets``.
        download: ``missing`` fetches files that are not found, through torchvision, which verifies checksums.
    """

    name: ClassVar[str]
    torchvision_name: ClassVar[str]
    torchvision_options: ClassVar[Mapping[str, str]] = {}
    layouts: ClassVar[tuple[str, ...]]  #: folders below the root that may hold the data
    required: ClassVar[Collection[str]]  #: names of the files, unpacked

    root: Annotated[str | None, Unhashed()] = None
    download: Annotated[Download, Unhashed()] = "never"

    def _find(self) -> dict[str, Path] | None:
        """Return the paths of the required files, gzipped or not, in the first folder that has all, if one has."""
        for folder in (base / layout for base in folders_to_search(self.root) for layout in (".", *self.layouts)):
            candidates = [(name, folder / f"{name}{suffix}") for suffix in (".gz", "") for name in self.required]
            paths = {name: path for name, path in candidates if path.is_file()}  # the unpacked file, if there are both
            if len(paths) == len(self.required):
                return paths
        return None

    def missing(self) -> str | None:
        if self.download == "missing" or self._find() is not None:
            return None
        return (
            f"{self.name} is not here: looked in {', '.join(map(str, folders_to_search(self.root)))} "
            f"(there directly, or in {', '.join(self.layouts)}) for {', '.join(self.required)}. Give the folder that "
            "has them as 'root', or allow fetching them with 'download: missing'."
        )

    def _find_or_fetch(self) -> dict[str, Path]:
        if (reason := self.missing()) is not None:
            raise DataError(reason)
        if (paths := self._find()) is not None:
            return paths
        configured = self.root or os.environ.get("VITLAB_DATA")
        folder = expand_home(configured) if configured else cache_folder()
        source = getattr(torchvision("torchvision.datasets"), self.torchvision_name)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / f".{self.name}.lock"):  # a second process finds what the first one downloaded
                source(str(folder), download=True, **self.torchvision_options)
            if (paths := self._find()) is None:
                raise RuntimeError(f"the download does not contain {', '.join(self.required)}")
        except (OSError, RuntimeError) as error:  # what torchvision raises for networks, disks and wrong checksums
            raise DataError(
                f"{self.name} could not be fetched to {folder}: {first_sentence(error)}; check the connection and the "
                "disk and run again, or put the files there yourself"
            ) from None
        return paths


class Checksummed(Published):
    """Base of published data sets of a few files with known checksums, and of 10,000 test images."""

    labels: ClassVar[tuple[str, ...]]
    required: ClassVar[Mapping[str, str]]  #: with the published MD5 of each

    def _info(self, image: Pair, channels: int) -> DataInfo:
        """Return the facts of the data set, with the checksums of its files, or the published ones."""
        paths = self._find()
        checksums = self.required if paths is None else {name: content_md5(path) for name, path in paths.items()}
        return DataInfo(
            image=image,
            channels=channels,
            classes=len(self.labels),
            identity=identity_of_files(self.name, checksums),
            labels=self.labels,
        )
