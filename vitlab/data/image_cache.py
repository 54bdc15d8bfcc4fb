"""Images that do not lie in memory: decoded as batches ask for them, or read from a file of decoded ones.

Threads read the next batches while the current one is trained on (:class:`Prefetcher`).  Which images those are is
known, for a batch is a function of the step; so nothing of it changes what a batch holds, and at most :data:`AHEAD` of
them wait beside the one that is asked for.  Pillow and numpy let go of the interpreter while they decode, resize and
copy, so threads are enough.

M images of an official split, B of a batch, C channels, H rows, W columns.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitlab.data.augment.base import Boxes
from vitlab.data.datasets import files
from vitlab.data.datasets.pictures import Decoded, Interpolation, Pictures, check_memory
from vitlab.data.pixels import resized, with_channels
from vitlab.errors import DataError
from vitlab.geometry import Pair

AHEAD = 2
"""Batches that are read before they are asked for."""
CHUNK = 4
"""Images that a thread reads at a time."""
MEMORY = 1 / 4
"""Share of the machine's memory up to which a set is decoded into it: every worker has its own."""
FREE = 2
"""How many times its size must be free where a set is to be written."""

Place = Literal["memory", "disk", "never"]


class CropRequest(NamedTuple):
    """What is wanted of pictures, where it is not the image that :meth:`Pictures.image` makes of them."""

    boxes: Callable[[Tensor, Tensor, Tensor], Boxes]  #: of identities and of numbers of rows and columns, (B, 1)
    interpolation: Interpolation


class Request(NamedTuple):
    """The images of a batch, or some of them."""

    row_B: Tensor  #: int64, which images of the split
    id_B: Tensor  #: int64, what their draws are keyed by
    cut: CropRequest | None = None


class Stored(ABC):
    """The images of an official split, uint8, where they are read from."""

    shape: tuple[int, int, int, int]  #: M, C, H, W

    @abstractmethod
    def fill(self, out_BCHW: np.ndarray, request: Request) -> None:
        """Read images into ``out_BCHW``.  Called by several threads at a time.

        Raises:
            DataError: naming the picture that cannot be read.
        """

    def read(self, row_B: Tensor) -> Tensor:
        """uint8 (B, C, H, W): some images, in this thread."""
        out_BCHW = torch.empty((len(row_B), *self.shape[1:]), dtype=torch.uint8)
        self.fill(out_BCHW.numpy(), Request(row_B, row_B))
        return out_BCHW


class LazyDecode(Stored):
    """Decoded when they are asked for."""

    def __init__(self, pictures: Pictures, channels: int, size: Pair) -> None:
        """
        Args:
            pictures: of the split.
            channels: that the model sees.
            size: rows and columns that the model sees.
        """
        self.pictures = pictures
        self.shape = (len(pictures), channels, *size)

    def fill(self, out_BCHW: np.ndarray, request: Request) -> None:
        channels, size = self.shape[1], self.shape[2:]
        rows, corners = request.row_B.tolist(), []
        if request.cut is not None:
            sides_B2 = torch.tensor([self.pictures.sides(row) for row in rows])
            boxes = request.cut.boxes(request.id_B, sides_B2[:, :1], sides_B2[:, 1:])
            corners = torch.stack(boxes[:4], 1).tolist()
        for place, row in enumerate(rows):
            if request.cut is None:
                x_CHW = self.pictures.image(row)
            else:
                x_CHW = self.pictures.cut(row, corners[place], size, request.cut.interpolation)
            out_BCHW[place] = resized(with_channels(x_CHW[None], channels), size)[0].numpy()


class DecodedCache(Stored):
    """Decoded once, into memory or into a file."""

    def __init__(self, x_MCHW: np.ndarray, source: LazyDecode) -> None:
        """
        Args:
            x_MCHW: the images; perhaps a file that is mapped, whose pages all processes of the machine share.
            source: their pictures, for cuts of these.
        """
        self.x_MCHW = x_MCHW
        self.source = source
        self.shape = source.shape

    def fill(self, out_BCHW: np.ndarray, request: Request) -> None:
        if request.cut is not None:
            self.source.fill(out_BCHW, request)
            return
        for place, row in enumerate(request.row_B.tolist()):
            out_BCHW[place] = self.x_MCHW[row]


class Prefetcher:
    """Batches of a split, the next of them begun before they are asked for."""

    def __init__(self, stored: Stored, device: torch.device) -> None:
        """
        Args:
            stored: where from.
            device: where batches are wanted; for a GPU they are made in memory it can copy from by itself.
        """
        self.stored = stored
        self.device = device
        self._pool = _pool(max(1, torch.get_num_threads()))
        self._begun: dict[tuple[int, Hashable], _Begun] = {}

    def take(self, step: int, part: Hashable, request: Callable[[int], Request | None]) -> Tensor:
        """uint8 (B, C, H, W) on the device.

        Args:
            step: of the batch.
            part: which part of it, for whoever takes batches in parts.
            request: what the same part of the batch of a step holds; None after the last.
        """
        for at in range(step, step + 1 + AHEAD):
            if (at, part) not in self._begun and (wanted := request(at)) is not None:
                self._begun[at, part] = self._begin(wanted)
        for known in [known for known in self._begun if not step <= known[0] <= step + AHEAD]:
            self._begun.pop(known).cancel()
        x_BCHW = self._begun.pop((step, part)).result()
        return x_BCHW.to(self.device, non_blocking=True)

    def close(self) -> None:
        """Give up what is begun.  Threads end with the last who reads ahead in this process."""
        for begun in self._begun.values():
            begun.cancel()
        self._begun.clear()

    def __del__(self) -> None:
        self.close()

    def _begin(self, request: Request) -> _Begun:
        pinned = self.device.type == "cuda"
        out_BCHW = torch.empty((len(request.row_B), *self.stored.shape[1:]), dtype=torch.uint8, pin_memory=pinned)
        parts = []
        for begin in range(0, len(out_BCHW), CHUNK):
            chunk = slice(begin, begin + CHUNK)
            some = Request(request.row_B[chunk], request.id_B[chunk], request.cut)
            parts.append(self._pool.submit(self.stored.fill, out_BCHW[chunk].numpy(), some))
        return _Begun(out_BCHW, parts)


class _Begun(NamedTuple):
    x_BCHW: Tensor
    parts: list[Future[None]]

    def result(self) -> Tensor:
        for part in self.parts:
            part.result()
        return self.x_BCHW

    def cancel(self) -> None:
        for part in self.parts:
            part.cancel()


_pools: weakref.WeakValueDictionary[int, ThreadPoolExecutor] = weakref.WeakValueDictionary()
_pools_lock = threading.Lock()


def _pool(threads: int) -> ThreadPoolExecutor:
    """The threads of this process that read; members of a cohort share them, and they leave when nobody has them."""
    with _pools_lock:
        pool = _pools.get(threads)
        if pool is None:
            pool = _pools[threads] = ThreadPoolExecutor(threads, thread_name_prefix="vitlab-pictures")
        return pool


def in_order(pixels: Stored, row_N: Tensor | None = None, size: int = 64) -> Iterator[Tensor]:
    """Some images, or all of them, in their order, so many at a time."""
    ahead = Prefetcher(pixels, torch.device("cpu"))
    all_N = torch.arange(pixels.shape[0]) if row_N is None else row_N
    parts = torch.split(all_N, size)

    def request(step: int) -> Request | None:
        return Request(parts[step], parts[step]) if step < len(parts) else None

    for step in range(len(parts)):
        yield ahead.take(step, None, request)


# -- where they are kept ----------------------------------------------------------------------------------------------


def place(decoded: Decoded, needed: int) -> Place:
    """Where decoded pictures are kept, by what the study says, or by this rule:

    In memory, where all of the set take up at most :data:`MEMORY` of the machine's, or of what its container is given;
    else never.  On disk only where the study says so, as nobody wants a hundred gigabytes written unasked.
    """
    if decoded != "auto":
        return decoded
    return "memory" if needed <= MEMORY * memory() else "never"


def memory(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that this machine has, or its container."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            return min(machine, int((root / name).read_text()))
        except (OSError, ValueError):
            continue
    return machine


def folder() -> Path:
    """Where decoded pictures are kept on disk: below the user's cache."""
    return files.cache() / "decoded"


def on_disk(source: LazyDecode, name: str, what: str, check: Callable[[], object]) -> DecodedCache:
    """The images in a file that is written once for all processes of the machine, and mapped by each.

    A file that is there and does not hold them, such as one that a crash of the machine has cut off, is written anew.

    Args:
        source: the pictures.
        name: of the file; it stands for what it holds.
        what: the data set, for sentences.
        check: raises where the pictures are not those that the name stands for; called when they have been read.

    Raises:
        DataError: if a picture cannot be read, or the disk does not hold them.
    """
    file = folder() / f"{name}.npy"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file.with_suffix(".lock"), "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            x_MCHW = _mapped(file, source.shape)
            if x_MCHW is None:
                _write(source, file, what, check)
                x_MCHW = _mapped(file, source.shape)
    except (OSError, ValueError) as error:
        raise DataError(f"{what} could not be kept decoded in {file}: {error}") from None
    if x_MCHW is None:
        raise DataError(f"{what} could not be kept decoded in {file}: it does not hold what was written to it")
    return DecodedCache(x_MCHW, source)


def in_memory(source: LazyDecode, what: str) -> DecodedCache:
    """The images in memory.

    Raises:
        DataError: if a picture cannot be read, or memory does not hold them.
    """
    check_memory(_size(source), what)
    x_MCHW, begin = np.empty(source.shape, np.uint8), 0
    for x_BCHW in in_order(source):
        x_MCHW[begin : begin + len(x_BCHW)] = x_BCHW.numpy()
        begin += len(x_BCHW)
    return DecodedCache(x_MCHW, source)


def _size(source: LazyDecode) -> int:
    return int(np.prod(source.shape, dtype=np.int64))


def _mapped(file: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    """The images in a file; None where it is not there, or is something else."""
    try:
        x_MCHW = np.load(file, mmap_mode="r", allow_pickle=False)
    except (FileNotFoundError, ValueError, EOFError):
        return None
    known = isinstance(x_MCHW, np.ndarray) and (x_MCHW.shape, x_MCHW.dtype) == (shape, np.uint8)
    return x_MCHW if known else None


def _write(source: LazyDecode, file: Path, what: str, check: Callable[[], object]) -> None:
    needed = _size(source)
    free = shutil.disk_usage(file.parent).free
    if FREE * needed > free:
        raise DataError(
            f"{what} needs {needed / 2**30:.1f} GiB decoded, and {file.parent} has {free / 2**30:.1f} GiB free, of "
            f"which {FREE} times as much is asked for; XDG_CACHE_HOME says where else, and 'decoded: never' needs none"
        )
    unfinished = file.with_suffix(".part")
    try:
        with open(unfinished, "wb") as out:
            head = {"descr": "|u1", "fortran_order": False, "shape": source.shape}
            np.lib.format.write_array_header_2_0(out, head)
            for x_BCHW in in_order(source):
                x_BCHW.numpy().tofile(out)
            out.flush()
            os.fsync(out.fileno())  # a name that outlives a crash of the machine must not stand for less
        check()
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)
