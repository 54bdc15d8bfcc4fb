"""The feed of a training: its batches, and those of its evaluations.

N images of a split, B images of a batch, C channels, H rows, W columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vitlab import noise
from vitlab.data.augment.base import Augment
from vitlab.data.image_cache import CropRequest, Prefetcher, Request
from vitlab.data.pixels import IGNORED, VOID
from vitlab.data.prepared import Prepared
from vitlab.registry import slot
from vitlab.spec import Choice


class Batch(NamedTuple):
    """Images as the model takes them."""

    x_BCHW: Tensor  #: float, normalised
    y_B: Tensor
    """int64; where labels are of pixels (B, H, W), with :data:`IGNORED` where there is none; of mixed images, float
    (B, K)."""
    id_B: Tensor
    """int64, identities for keyed draws: the image's, and above its 32 bits which of its repeats in an epoch it is."""
    epoch: int  #: from 0; 0 for batches of an evaluation


class Feed:
    """The batches of one training, each a pure function of the step.

    The order of epoch e is a permutation drawn from the stream ``order``; the last, incomplete batch of an epoch is
    dropped.  Images lie on the device as uint8, or come there as such from where they are stored, and are augmented
    there; the i-th augmentation draws from the stream ``augment``, the epoch, i and the identity of the image, so
    neither the size of a batch nor its other images matter.  An image that stands in an epoch several times is another
    one to its augmentations each time.
    """

    def __init__(
        self,
        prepared: Prepared,
        augment: Sequence[Choice | str | Mapping[str, Any]],
        seeds: Mapping[str, int],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """
        Args:
            augment: choices of the slot ``augment``, in the order in which they act; ``options["augment"]`` of the
                resolved data.
            seeds: of the streams ``order`` and ``augment``.
        """
        self.device = torch.device(device)
        self.info = prepared.info
        self._subsets = {
            "train": prepared.train.to(self.device),
            "val": prepared.val.to(self.device),
            "test": prepared.test.to(self.device),
        }
        self._augments: list[Augment] = [slot("augment").build(choice) for choice in augment]
        self._seeds = seeds
        self._normalize = Normalize(prepared.mean, prepared.std, self.device, dtype)
        self._orders: dict[int, Tensor] = {}
        stored = prepared.train.stored
        self._ahead = None if stored is None else Prefetcher(stored, self.device)

    @property
    def stored(self) -> bool:
        """Whether images are read as batches ask for them, and not from memory."""
        return self._ahead is not None

    def count(self, split: Literal["train", "val", "test"] = "train") -> int:
        """Number of images of a split."""
        return len(self._subsets[split])

    @property
    def pixels(self) -> int:
        """Number of pixels of an image."""
        return math.prod(self._subsets["train"].pixels_MCHW.shape[2:])

    def steps_per_epoch(self, batch_size: int) -> int:
        """Steps in which an epoch passes: whole batches, but at least one, be it smaller than asked for."""
        return max(1, self.count() // batch_size)

    def batch_images(self, batch_size: int) -> int:
        """Images of a training batch: as many as asked for, or all there are."""
        return min(batch_size, self.count())

    def batch(self, step: int, batch_size: int, repeats: int = 1, rows: Sequence[range] | None = None) -> Batch:
        """A training batch, or some of it.

        Args:
            step: of the optimizer, from 0.
            batch_size: images in it, repeats included.
            repeats: how often an image stands in an epoch, one after another; with 3, a third of the images do.
            rows: which of its images, by their places in it, one range after another; all by default.
        """
        train = self._subsets["train"]
        epoch, picked_B, id_B = self._picked(step, batch_size, repeats, rows)
        x_BCHW, y_B = self._pixels(step, batch_size, repeats, rows, picked_B), self._here(train.y_N[picked_B])
        id_B = self._here(id_B)
        for normalized in (False, True):
            if normalized:
                x_BCHW = self._normalize(x_BCHW)
            for place, change in enumerate(self._augments):
                if change.normalized == normalized and not change.of_picture:
                    key = self._key(epoch, place)
                    x_BCHW = change(x_BCHW, key, id_B)
                    y_B = change.masks(y_B, key, id_B) if y_B.ndim > 1 else y_B
        return Batch(x_BCHW, _labels(y_B), id_B, epoch)

    def evaluation(self, split: Literal["train", "val", "test"], batch_size: int) -> Iterator[Batch]:
        """All images of a split in their order, not augmented; the last batch may be smaller."""
        subset = self._subsets[split]
        ahead = None if subset.stored is None else Prefetcher(subset.stored, self.device)

        def request(step: int) -> Request | None:
            part = slice(step * batch_size, (step + 1) * batch_size)
            return Request(subset.row_N[part], subset.id_N[part]) if part.start < len(subset) else None

        for step in range(-(-len(subset) // batch_size)):
            part = slice(step * batch_size, (step + 1) * batch_size)
            pixels_BCHW = subset.at(part) if ahead is None else ahead.take(step, None, request)
            y_B, id_B = self._here(subset.y_N[part]), self._here(subset.id_N[part])
            yield Batch(self._normalize(pixels_BCHW), _labels(y_B), id_B, 0)

    def _picked(
        self, step: int, batch_size: int, repeats: int, rows: Sequence[range] | None
    ) -> tuple[int, Tensor, Tensor]:
        """The epoch of a step, and which images its batch has: their positions, and what their draws are keyed by."""
        epoch, place = divmod(step, self.steps_per_epoch(batch_size))
        order_N, train = self._epoch_order(epoch), self._subsets["train"]
        begin = place * batch_size
        stop = begin + self.batch_images(batch_size)
        if repeats == 1:
            picked_B = order_N[begin:stop]
            id_B = train.id_N[picked_B]
        else:
            turn_B = torch.arange(begin, stop, device=order_N.device)
            picked_B = order_N[turn_B // repeats]
            id_B = train.id_N[picked_B] + (turn_B % repeats << 32)
        if rows is not None and list(rows) != [range(stop - begin)]:
            picked_B, id_B = (torch.cat([of_B[r.start : r.stop] for r in rows]) for of_B in (picked_B, id_B))
        return epoch, picked_B, id_B

    def _pixels(
        self, step: int, batch_size: int, repeats: int, rows: Sequence[range] | None, picked_B: Tensor
    ) -> Tensor:
        """uint8 (B, C, H, W), on the device."""
        train = self._subsets["train"]
        if self._ahead is None:
            return train.at(picked_B)

        def request(at: int) -> Request:
            epoch, picked_B, id_B = self._picked(at, batch_size, repeats, rows)
            return Request(train.row_N[picked_B], id_B, self._cut(epoch))

        part = (batch_size, repeats, None if rows is None else tuple(rows))
        return self._ahead.take(step, part, request)

    def _cut(self, epoch: int) -> CropRequest | None:
        """What the first augmentation cuts out of pictures, if it does."""
        first = self._augments[0] if self._augments else None
        if first is None or not first.of_picture:
            return None
        return CropRequest(partial(first.boxes, self._key(epoch, 0)), first.interpolation)

    def _key(self, epoch: int, place: int) -> noise.Key:
        return noise.key(self._seeds["augment"], "augment", epoch, place)

    def _here(self, tensor: Tensor) -> Tensor:
        """The same on the device; nobody waits for it."""
        if tensor.device.type == self.device.type:
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def _epoch_order(self, epoch: int) -> Tensor:
        if epoch not in self._orders:
            key = noise.key(self._seeds["order"], "order", epoch)
            order_N = noise.permutation(key, self.count()).to(self._subsets["train"].row_N.device)
            self._orders = {near: self._orders[near] for near in (epoch - 1, epoch + 1) if near in self._orders}
            self._orders[epoch] = order_N
        return self._orders[epoch]


class Normalize:
    """uint8 to float, less the mean, over the standard deviation, of pixels in [0, 1]."""

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """
        Args:
            mean: per channel.
            std: per channel.
            device: where the images lie.
            dtype: of the result; anything narrower than float32 is computed in float32 and rounded at the end.
        """
        self.dtype = dtype
        self._wide = torch.promote_types(dtype, torch.float32)
        std_C = torch.tensor(std, dtype=torch.float64)
        shift_C = -torch.tensor(mean, dtype=torch.float64) / std_C
        self._scale_C11 = (1 / (255 * std_C))[:, None, None].to(device, self._wide)
        self._shift_C11 = shift_C[:, None, None].to(device, self._wide)

    def __call__(self, x_BCHW: Tensor) -> Tensor:
        return torch.addcmul(self._shift_C11, x_BCHW.to(self._wide), self._scale_C11).to(self.dtype)


def _labels(y_B: Tensor) -> Tensor:
    """int64; where they are of pixels, none is :data:`IGNORED`."""
    return y_B if y_B.ndim == 1 else torch.where(y_B == VOID, IGNORED, y_B.long())
