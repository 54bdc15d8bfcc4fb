"""Images outside of memory: decoded batch by batch, or read from a file of decoded images.

Threads read the next batches during the training step (:class:`Prefetcher`).  A batch is a function of the step, so
prefetching does not change its content; at most :data:`PREFETCH_BATCHES` batches are buffered beside the current one.
Pillow and numpy release the GIL while they decode, resize and copy, so threads suffice.

M images of an official split, B of a batch, C channels, H rows, W columns.
"""

import math
import os
import shutil
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from vitlab.data.augment import Boxes
from vitlab.data.datasets import files
from vitlab.data.datasets.pictures import Decoded, EncodedPictures, Interpolation, Pictures
from vitlab.data.pixels import convert_channels, resize
from vitlab.errors import DataError
from vitlab.geometry import Pair

PREFETCH_BATCHES = 2
"""Number of batches to prefetch."""
CHUNK = 4
"""Images per task of a thread."""
CHECKED_TOGETHER = 64
"""Pictures per task of a thread that checks them."""
TIMED = 8
"""Pictures that are decoded to learn how long it takes."""
MAX_MEMORY_SHARE = 1 / 4
"""Largest share of the machine's memory for a decoded set."""
FREE_SPACE_FACTOR = 2
"""Required free disk space, as a multiple of the size of the set to be written."""

CPU = torch.device("cpu")

Place = Literal["memory", "disk", "never"]


class CropRequest(NamedTuple):
    """Crops to take of full-size pictures, in place of whole ones."""

    boxes: Callable[[Tensor, Tensor, Tensor], Boxes]  #: from identities, heights and widths, (B, 1) each
    interpolation: Interpolation


class ReadRequest(NamedTuple):
    """The images to read for a batch or part of one."""

    row_B: Tensor  #: int64, indices in the official split
    id_B: Tensor  #: int64, identities for keyed draws
    crop: CropRequest | None = None


class StoredImages:
    """The images of an official split, uint8: decoded from their pictures at every read, or once before.

    Args:
        pictures: of the split.
        channels: of the images.
        size: rows and columns of the images.
    """

    decoded: np.ndarray | None = None
    """The images, (M, C, H, W), if they were decoded before; a memory-mapped file shares its pages between all
    processes of the machine."""

    def __init__(self, pictures: Pictures, channels: int, size: Pair) -> None:
        self.pictures = pictures
        self.shape = (len(pictures), channels, *size)

    def fill(self, out_BCHW: np.ndarray, request: ReadRequest) -> None:
        """Read images into ``out_BCHW``; crops are always decoded from their files.  Thread-safe."""
        if self.decoded is not None and request.crop is None:
            out_BCHW[:] = self.decoded[request.row_B.numpy()]
            return
        channels, size = self.shape[1], self.shape[2:]
        for position, x_CHW in enumerate(self._decode_whole_or_cropped(request)):
            out_BCHW[position] = resize(convert_channels(x_CHW[None], channels), size)[0].numpy()

    def take(self, row_B: Tensor) -> Tensor:
        """Return some images, uint8 (B, C, H, W), on the CPU."""
        if self.decoded is not None:  # threads would take longer than copying does
            return torch.from_numpy(self.decoded[row_B.numpy()])
        return next(iter_images(self, row_B, max(1, len(row_B))))

    def _decode_whole_or_cropped(self, request: ReadRequest) -> Iterator[Tensor]:
        rows, pictures = request.row_B.tolist(), self.pictures
        if request.crop is None:
            yield from map(pictures.image, rows)
            return
        assert isinstance(pictures, EncodedPictures)  # see vitlab.data.prepare
        headers = [pictures.open_header(row) for row in rows]
        sides_B2 = torch.tensor([pictures.decoding.upright_sides(header) for header in headers])
        boxes = request.crop.boxes(request.id_B, sides_B2[:, :1], sides_B2[:, 1:])
        for row, header, box in zip(rows, headers, torch.stack(boxes[:4], 1).tolist(), strict=True):
            yield pictures.decode_crop(row, header, box, self.shape[2:], request.crop.interpolation)


class Prefetcher:
    """Reader of batches that also reads the following ones in the background.

    Args:
        images: to read from.
        device: of the batches; for a GPU, they are read into pinned memory.
    """

    def __init__(self, images: StoredImages, device: torch.device) -> None:
        self.images = images
        self.device = device
        self._thread_pool = _thread_pool(max(1, torch.get_num_threads()))
        self._pending: dict[tuple[int, Hashable], tuple[Tensor, list[Future[None]]]] = {}

    def take_batch(self, step: int, part: Hashable, request: Callable[[int], ReadRequest | None]) -> Tensor:
        """Return a batch, uint8 (B, C, H, W), on the device, and start to read the next ones.

        Args:
            step: of the batch.
            part: identifies a part of the batch, if batches are read in parts.
            request: returns the same part's request for any step; None after the last step.
        """
        # The requested batch is submitted first, so that threads do not read the next ones before it.
        for at in range(step, step + 1 + PREFETCH_BATCHES):
            if (at, part) not in self._pending and (next_request := request(at)) is not None:
                self._pending[at, part] = self._submit_batch_reads(next_request)
        for key in [key for key in self._pending if not step <= key[0] <= step + PREFETCH_BATCHES]:
            for read in self._pending.pop(key)[1]:
                read.cancel()
        x_BCHW, reads = self._pending.pop((step, part))
        for read in reads:
            read.result()
        return x_BCHW.to(self.device, non_blocking=True)

    def _submit_batch_reads(self, request: ReadRequest) -> tuple[Tensor, list[Future[None]]]:
        """Return a batch that threads are filling, and their work."""
        pinned = self.device.type == "cuda"  # only pinned memory is copied to a GPU without blocking
        out_BCHW = torch.empty((len(request.row_B), *self.images.shape[1:]), dtype=torch.uint8, pin_memory=pinned)
        chunks = zip(*(torch.split(each, CHUNK) for each in (out_BCHW, request.row_B, request.id_B)), strict=True)
        reads = [
            self._thread_pool.submit(self.images.fill, part_BCHW.numpy(), ReadRequest(row_B, id_B, request.crop))
            for part_BCHW, row_B, id_B in chunks
        ]
        return out_BCHW, reads


@cache
def _thread_pool(threads: int) -> ThreadPoolExecutor:
    """Return the thread pool of this process, shared by all trials."""
    return ThreadPoolExecutor(threads, thread_name_prefix="vitlab-pictures")


def iter_images(
    images: StoredImages, row_N: Tensor | None = None, batch_size: int = 64, device: torch.device = CPU
) -> Iterator[Tensor]:
    """Yield the images at ``row_N``, or all of them, in order, ``batch_size`` at a time, on a device."""
    prefetcher = Prefetcher(images, device)
    parts = torch.split(torch.arange(images.shape[0]) if row_N is None else row_N, batch_size)

    def request(step: int) -> ReadRequest | None:
        return ReadRequest(parts[step], parts[step]) if step < len(parts) else None

    for step in range(len(parts)):
        yield prefetcher.take_batch(step, None, request)


def find_undecodable(pictures: EncodedPictures) -> list[tuple[int, str]]:
    """Return the index of each picture that cannot be decoded, and the reason; all processors decode them."""
    with ThreadPool(os.cpu_count()) as pool:
        reasons = pool.map(pictures.find_fault, range(len(pictures)), CHECKED_TOGETHER)
    return [(index, reason) for index, reason in enumerate(reasons) if reason]


def measure_seconds_per_picture(pictures: Pictures) -> float:
    """Return how long one core decodes a picture: the mean of some of them."""
    sample, began = range(0, len(pictures), -(-len(pictures) // TIMED)), time.perf_counter()
    for index in sample:
        pictures.image(index)
    return (time.perf_counter() - began) / len(sample)


def choose_decoded_place(decoded: Decoded, required: int) -> Place:
    """Return the place for decoded pictures: the study's choice, or the default for ``auto``.

    The default is memory if the whole set takes up at most :data:`MAX_MEMORY_SHARE` of the machine's memory, or of its
    container's limit, else never.  Disk must be chosen explicitly, as sets may be hundreds of gigabytes large.
    """
    if decoded != "auto":
        return decoded
    return "memory" if required <= MAX_MEMORY_SHARE * files.total_memory() else "never"


def decoded_folder() -> Path:
    """Return the folder of decoded pictures, in the user's cache."""
    return files.cache_folder() / "decoded"


def open_disk_cache(images: StoredImages, name: str, description: str, check: Callable[[], object]) -> np.ndarray:
    """Return the images in a memory-mapped file that is written once for all processes of the machine.

    An invalid file, such as one truncated by a crash of the machine, is written again.

    Args:
        images: to decode.
        name: of the file; it identifies the content.
        description: the pictures, for error messages.
        check: called after reading; raises if the pictures are no longer those that the name identifies.

    Raises:
        DataError: if a picture cannot be read, or the file cannot be written.
    """
    file = decoded_folder() / f"{name}.npy"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_suffix(".lock")):  # the other workers wait, and then find the file
            x_MCHW = _open_map(file, images.shape)
            if x_MCHW is None:
                _write_images(images, file, check)
                x_MCHW = _open_map(file, images.shape)
        if x_MCHW is None:
            raise OSError("its content differs from what was written; check the disk")
    except (OSError, ValueError) as error:
        raise DataError(
            f"{description} could not be cached in {file}: {error}; set XDG_CACHE_HOME to another disk, "
            "or 'decoded: never'"
        ) from None
    return x_MCHW


def _open_map(file: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return the images in a file; None if the file is missing or has another format or shape."""
    try:
        # Copied where written to, as torch expects; nothing writes to it, so all processes share its pages.
        x_MCHW = np.load(file, mmap_mode="c", allow_pickle=False)
    except (FileNotFoundError, ValueError, EOFError):
        return None
    valid = isinstance(x_MCHW, np.ndarray) and (x_MCHW.shape, x_MCHW.dtype) == (shape, np.uint8)
    return x_MCHW if valid else None


def _write_images(images: StoredImages, file: Path, check: Callable[[], object]) -> None:
    files.make_and_prune_folder(file.parent)
    required, free = FREE_SPACE_FACTOR * math.prod(images.shape), shutil.disk_usage(file.parent).free
    if required > free:
        raise OSError(
            f"it requires {required / 2**30:.1f} GiB of free disk space, and there are {free / 2**30:.1f} GiB"
        )
    temporary = file.with_suffix(".part")
    try:
        with open(temporary, "wb") as out:
            head = {"descr": "|u1", "fortran_order": False, "shape": images.shape}
            np.lib.format.write_array_header_2_0(out, head)
            for x_BCHW in iter_images(images):
                x_BCHW.numpy().tofile(out)
            out.flush()
            os.fsync(out.fileno())  # after a crash of the machine, the final name must not point to a truncated file
        check()  # before the name, which promises this content
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
