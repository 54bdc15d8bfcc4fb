"""Batches for training and evaluation.

N images of a split, B images of a batch, C channels, H rows, W columns.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vitlab import noise
from vitlab.data.augment import Augment
from vitlab.data.augment.pixels import PICKING_DEVICES
from vitlab.data.image_cache import CropRequest, Prefetcher, ReadRequest, iter_images
from vitlab.data.pixels import IGNORED, VOID, per_channel
from vitlab.data.splits import Prepared, Subset
from vitlab.registry import slot
from vitlab.spec import ChoiceLike

Request = tuple[int, int, int, "tuple[range, ...] | None", int]
"""The arguments of :meth:`Feed.batch`."""


class Batch(NamedTuple):
    """Model inputs, labels and identities of some images."""

    x_BCHW: Tensor  #: float, normalised
    y_B: Tensor
    """int64; (B, H, W) for segmentation, with :data:`IGNORED` where a pixel has no label; float (B, K) for mixed
    images, and for images of several classes."""
    id_B: Tensor
    """int64, identities for keyed draws: the image's in the low 32 bits, the index of its repeat in the epoch above."""
    epoch: int  #: from 0; 0 for batches of an evaluation
    host_id_B: Tensor | None = None  #: ``id_B`` on the host, where draws launch no kernels; None if it is not known


def sample_ids(batch: Batch) -> Tensor:
    """Return the identities of a batch's images, on the host if they are known there."""
    return batch.id_B if batch.host_id_B is None else batch.host_id_B


class Selection(NamedTuple):
    """The images of a training batch, on the host."""

    epoch: int
    row_B: Tensor  #: in the images of the official split
    y_B: Tensor
    id_B: Tensor


class Feed:
    """The batches of a training run, each a pure function of the step.

    The order of epoch e is a permutation drawn from the stream ``order``; the last, incomplete batch of an epoch is
    dropped.  Images are held on the device as uint8, or read from storage and copied there, and are augmented on the
    device.  The i-th augmentation draws from the stream ``augment``, the epoch, i and the identity of the image, so
    its result does not depend on the batch size or the batch's other images.  Each repeat of an image in an epoch is
    augmented differently.

    Args:
        augment: choices of the slot ``augment`` in order; ``options["augment"]`` of the resolved data.
        seeds: of the streams ``order`` and ``augment``.
    """

    def __init__(
        self,
        prepared: Prepared,
        augment: Sequence[ChoiceLike],
        seeds: Mapping[str, int],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.device = torch.device(device)
        self.info = prepared.info
        # On a GPU, all images are there as bytes: they are small, and copies per batch would wait.
        splits = {"train": prepared.train, "val": prepared.val, "test": prepared.test}
        self._subsets = {split: subset.to(self.device) for split, subset in splits.items()}
        self.test_sets = prepared.test_sets
        self._choices = list(augment)
        self._augments: list[Augment] = [slot("augment").build(choice) for choice in augment]
        # Empty if alone: a reference to itself would keep its images in memory until Python collects garbage.
        self._peers: Sequence[Feed] = ()
        self._ready: dict[Request, Batch] = {}
        self._seeds = seeds
        self._normalize = Normalize(prepared.mean, prepared.std, self.device, dtype)
        # Batches are requested for the next steps, too, which may be in the next epoch.
        seed, count = seeds["order"], self.count()  # the function has no reference to this feed
        self._epoch_order = lru_cache(2)(lambda epoch: noise.permutation(noise.key(seed, "order", epoch), count))
        stored = prepared.train.stored
        self._prefetcher = None if stored is None else Prefetcher(stored, self.device)

    @property
    def stored(self) -> bool:
        """True if images are read from storage batch by batch, not held in memory."""
        return self._prefetcher is not None

    def count(self, split: Literal["train", "val", "test"] = "train") -> int:
        """Return the number of images of a split."""
        return len(self._subsets[split])

    def class_counts(self) -> Tensor:
        """Return the number of training images of each class, int64 (K,); of data with one class an image."""
        return torch.bincount(self._subsets["train"].y_N, minlength=self.info.classes)

    def steps_per_epoch(self, batch_size: int) -> int:
        """Return the number of whole batches in an epoch, at least one even if it is smaller than ``batch_size``."""
        return max(1, self.count() // batch_size)

    def images_per_batch(self, batch_size: int) -> int:
        """Return the number of images in a training batch: ``batch_size``, or all images if there are fewer."""
        return min(batch_size, self.count())

    def batch(
        self, step: int, batch_size: int, repeats: int = 1, rows: Sequence[range] | None = None, views: int = 1
    ) -> Batch:
        """Return a training batch, or part of it.

        Args:
            step: of the optimizer, from 0.
            batch_size: images in the batch, repeats included.
            repeats: consecutive copies of each image in an epoch; with 3, an epoch shows a third of the images.
            rows: ranges of positions in the batch, concatenated; all by default.
            views: consecutive copies of each image of the batch, augmented differently, in addition to its size.
        """
        request = step, batch_size, repeats, None if rows is None else tuple(rows), views
        if request not in self._ready:
            feeds = self._peers or (self,)
            for feed, batch in zip(feeds, _make_joint_batches(feeds, request), strict=True):
                feed._ready = {request: batch}
        return self._ready.pop(request)

    def _read_prefetched_batch(self, request: Request) -> Tensor:
        """Return the images of a training batch from storage, uint8 (B, C, H, W)."""
        assert self._prefetcher is not None

        def read_request(at: int) -> ReadRequest:
            selection = self._select_batch_rows(at, *request[1:])
            return ReadRequest(selection.row_B, selection.id_B, self._crop_request(selection.epoch))

        return self._prefetcher.take_batch(request[0], request[1:], read_request)

    def evaluation(self, split: str, batch_size: int, batches: slice = slice(None)) -> Iterator[Batch]:
        """Yield the images of a split or a test set in order, not augmented; the last batch may be smaller.

        ``batches`` are those that are read, by default all.
        """
        images = self.test_sets.get(split) or self._subsets[split]
        parts = [slice(begin, begin + batch_size) for begin in range(0, len(images.y_N), batch_size)][batches]
        if not parts:
            return
        if isinstance(images, Subset) and images.stored is not None:
            row_N = torch.cat([images.row_N[part] for part in parts])
            pixels = iter_images(images.stored, row_N, batch_size, self.device)
        else:
            pixels = map(images.at, parts)
        for part, pixels_BCHW in zip(parts, pixels, strict=True):
            tensors = pixels_BCHW, images.y_N[part], images.id_N[part]
            x_BCHW, y_B, id_B = (noise.to_device(tensor, self.device) for tensor in tensors)
            yield Batch(self._normalize(x_BCHW), _labels_as_loss_targets(y_B), id_B, 0)

    def _select_batch_rows(
        self, step: int, batch_size: int, repeats: int, rows: Sequence[range] | None, views: int
    ) -> Selection:
        train = self._subsets["train"]
        epoch, place = divmod(step, self.steps_per_epoch(batch_size))
        order_N = self._epoch_order(epoch)
        begin = place * batch_size
        stop = begin + self.images_per_batch(batch_size)
        if repeats == 1:
            position_B = order_N[begin:stop]
            id_B = train.id_N[position_B]
        else:
            slot_B = torch.arange(begin, stop)
            position_B = order_N[slot_B // repeats]
            id_B = train.id_N[position_B] + (slot_B % repeats << 32)  # another identity, so another augmentation
        if rows is not None and list(rows) != [range(stop - begin)]:
            position_B, id_B = (torch.cat([all_B[r.start : r.stop] for r in rows]) for all_B in (position_B, id_B))
        if views > 1:
            view_B = torch.arange(views).repeat(len(id_B))
            position_B, id_B = position_B.repeat_interleave(views), id_B.repeat_interleave(views) + (view_B << 32)
        return Selection(epoch, train.row_N[position_B], train.y_N[position_B], id_B)

    def _crop_request(self, epoch: int) -> CropRequest | None:
        """Return the crop that the first augmentation takes of full-size pictures; None if it takes none."""
        first = self._augments[0] if self._augments else None
        if first is None or not first.of_picture:
            return None
        return CropRequest(partial(first.boxes, self._augment_key(epoch, 0)), first.interpolation)

    def _augment_key(self, epoch: int, index: int) -> noise.Key:
        return noise.key(self._seeds["augment"], "augment", epoch, index)


def enable_joint_batches(feeds: Sequence[Feed]) -> None:
    """Let feeds whose batches are asked for at the same steps make them by one call, if they are on a GPU.

    One call for all trials launches as many kernels as a call for one.  On a CPU, where an operation is computed for
    the images that it was drawn for, nothing changes.
    """
    first = feeds[0]
    joint = first.device.type not in PICKING_DEVICES and all(
        feed._choices == first._choices and feed._subsets["train"].pixels_MCHW is first._subsets["train"].pixels_MCHW
        for feed in feeds
    )
    for feed in feeds:
        feed._peers = feeds if joint else ()


def _make_joint_batches(feeds: Sequence[Feed], request: Request) -> Sequence[Batch]:
    """Return the batches of feeds of equal images, augmentations and normalisation."""
    first, several = feeds[0], len(feeds) > 1
    selections = [feed._select_batch_rows(*request) for feed in feeds]
    row_B, host_y_B, host_id_B = (
        torch.cat(each) for each in zip(*((one.row_B, one.y_B, one.id_B) for one in selections), strict=True)
    )
    if first.stored:
        parts = [feed._read_prefetched_batch(request) for feed in feeds]
        x_BCHW = torch.cat(parts) if several else parts[0]
    else:
        x_BCHW = first._subsets["train"].images_in_rows(row_B)
    y_B, id_B = noise.to_device(host_y_B, first.device), noise.to_device(host_id_B, first.device)
    # Augmentations of pixels come first in any case, since erasing covers with the mean of normalised images.
    for normalized in (False, True):
        if normalized:
            x_BCHW = first._normalize(x_BCHW)
        for index, augmentation in enumerate(first._augments):
            if augmentation.normalized == normalized and not augmentation.of_picture:
                keys = [feed._augment_key(one.epoch, index) for feed, one in zip(feeds, selections, strict=True)]
                key: noise.Key | Tensor = keys[0]
                if several:  # the key of each image, (B,), of equally many images for each key
                    key = noise.tensor_of(keys, id_B.device)[:, None].expand(-1, len(id_B) // len(keys)).flatten()
                x_BCHW = augmentation(x_BCHW, key, id_B)
                y_B = augmentation.masks(y_B, key, id_B) if y_B.ndim == 3 else y_B
    chunks = (tensor.chunk(len(feeds)) for tensor in (x_BCHW, _labels_as_loss_targets(y_B), id_B))
    return [Batch(x, y, ids, one.epoch, one.id_B) for x, y, ids, one in zip(*chunks, selections, strict=True)]


class Normalize:
    """Conversion of uint8 images to float, normalised by the mean and standard deviation of pixels in [0, 1].

    Args:
        mean: per channel.
        std: per channel.
        device: of the images.
        dtype: of the result; anything narrower than float32 is computed in float32 and rounded at the end.
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.dtype = dtype
        # One multiplication and addition per pixel: (x / 255 - mean) / std = x * scale + shift.
        self._wide = torch.promote_types(dtype, torch.float32)
        std_C11 = per_channel(std)
        self._scale_C11 = (1 / (255 * std_C11)).to(device, self._wide)
        self._shift_C11 = (-per_channel(mean) / std_C11).to(device, self._wide)

    def __call__(self, x_BCHW: Tensor) -> Tensor:
        """Return the images, standardised per channel, in the working dtype."""
        return torch.addcmul(self._shift_C11, x_BCHW.to(self._wide), self._scale_C11).to(self.dtype)


def _labels_as_loss_targets(y_B: Tensor) -> Tensor:
    """Return int64 labels, with :data:`VOID` replaced by :data:`IGNORED`; float if an image has several."""
    if y_B.ndim == 2:
        return y_B.float()
    return y_B if y_B.ndim == 1 else torch.where(y_B == VOID, IGNORED, y_B.long())
