"""From a data set's name to batches: what the model will see, the three splits, and the feed of a training.

Everything is in memory, as uint8; a batch is an index, the study's augmentations and one multiply-add.

N images of a split, B images of a batch, C channels, H rows, W columns.
"""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vitlab import noise
from vitlab.data import splits
from vitlab.data.augment.base import Augment
from vitlab.data.datasets.base import Dataset, Images, Split
from vitlab.data.options import NORMALIZATIONS, DataOptions, Normalization
from vitlab.data.pixels import IGNORED, VOID, resized, resized_masks, statistics, with_channels
from vitlab.errors import DataError
from vitlab.geometry import DataInfo
from vitlab.slots import Resolved, slot
from vitlab.spec import Choice

SPLITS: tuple[Split, ...] = ("train", "test")

KEPT = 2
"""Data sets a process remembers, decoded: enough for the trials of a study that a worker runs one after another."""


def data_info(choice: Choice | str | Mapping[str, Any]) -> DataInfo:
    """What the model sees, without reading an image.

    Raises:
        OptionError: if the options do not fit.
        DataError: if they do not fit this data set, or what is here is not what it was said to be.
    """
    resolved = _resolved(choice)
    return _seen(resolved, _build(resolved).info())


def missing(choice: Choice | str | Mapping[str, Any]) -> str | None:
    """Why the data could not be read now, in one sentence; None if nothing is known to stand in the way."""
    return _build(_resolved(choice)).missing()


@dataclass(frozen=True)
class Subset:
    """Images of one split.  On the CPU the subsets of an official split share its pixels."""

    pixels_MCHW: Tensor  #: uint8, whatever else is among them
    row_N: Tensor  #: int64, which of them are meant
    y_N: Tensor  #: int64; uint8 (N, H, W) where labels are of pixels
    id_N: Tensor  #: int64, place in the official split: whom a keyed draw is for, whatever split or fraction it is in

    @classmethod
    def of(cls, x_NCHW: Tensor, y_N: Tensor, id_N: Tensor) -> Subset:
        """All of these images."""
        return cls(x_NCHW, torch.arange(len(y_N), device=x_NCHW.device), y_N, id_N)

    def __len__(self) -> int:
        return len(self.y_N)

    @property
    def x_NCHW(self) -> Tensor:
        """A copy of the images, uint8."""
        return self.pixels_MCHW[self.row_N]

    def at(self, position_B: Tensor | slice) -> Tensor:
        """uint8 (B, C, H, W): the images at some positions."""
        return self.pixels_MCHW[self.row_N[position_B]]

    def picked(self, position_N: Tensor) -> Subset:
        """The subset of the images at these positions."""
        return Subset(self.pixels_MCHW, self.row_N[position_N], self.y_N[position_N], self.id_N[position_N])

    def to(self, device: torch.device) -> Subset:
        """The same on a device, where it has no more pixels than it needs."""
        if self.pixels_MCHW.device == device:
            return self
        return Subset.of(self.x_NCHW.to(device), self.y_N.to(device), self.id_N.to(device))


@dataclass(frozen=True)
class Prepared:
    """A data set ready to train on."""

    train: Subset
    val: Subset
    test: Subset
    info: DataInfo  #: what the model sees; its identity is that of the files that were read
    mean: tuple[float, ...]  #: per channel, of pixels in [0, 1]
    std: tuple[float, ...]


def prepare(
    choice: Choice | str | Mapping[str, Any], seeds: Mapping[str, int], expected: str | None = None
) -> Prepared:
    """Read a data set, or remember it, and split it.

    The test split is the official one.  Validation is held out of the training split by the stream ``split``; where
    the authors say what to hold out, and the study names no share, it is that.  What remains is cut to the fraction
    asked for by the stream ``subset``.

    Args:
        choice: the data set and its options.
        seeds: of the streams ``split`` and ``subset``.
        expected: the identity the trial was planned with, where that was known.

    Raises:
        OptionError: if the options do not fit.
        DataError: if the data is not here or is not what it was said to be.
    """
    resolved = _resolved(choice)
    raw = _raw(resolved)
    if expected is not None and raw.info.identity != expected:
        raise DataError(
            f"{resolved.type} is not the data this was planned with: planned {expected}, found {raw.info.identity}; "
            "plan again where the data is"
        )
    options = resolved.options
    share = options["validation"] or raw.validation
    official = raw.train
    by_authors = None if options["validation"] else raw.held_N
    stratum_N = official.y_N if official.y_N.ndim == 1 else torch.zeros_like(official.id_N)
    key = noise.key(seeds["split"], "split")
    if by_authors is not None:
        held_N = torch.isin(official.id_N, by_authors)
        rest_N, val_N = (~held_N).nonzero()[:, 0], held_N.nonzero()[:, 0]
    elif raw.group_N is None:
        rest_N, val_N = splits.hold_out(stratum_N, official.id_N, share, key)
    else:
        rest_N, val_N = splits.hold_out_groups(raw.group_N, share, key)
    if not len(rest_N) or not len(val_N):
        raise DataError(f"of these classes {resolved.type} has none to validate on; 'validation' gives a share")
    rest = official.picked(rest_N)
    key = noise.key(seeds["subset"], "subset")
    kept_N = splits.fraction(stratum_N[rest_N], rest.id_N, options["fraction"], key)
    if options["per_class"] is not None:
        kept_N = kept_N[splits.at_most(rest.y_N[kept_N], rest.id_N[kept_N], options["per_class"], key)]
    mean, std = _normalization(options["normalize"], raw)
    return Prepared(
        train=rest.picked(kept_N),
        val=official.picked(val_N),
        test=raw.test,
        info=raw.info,
        mean=mean,
        std=std,
    )


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
    dropped.  Images lie on the device as uint8 and are augmented there; the i-th augmentation draws from the stream
    ``augment``, the epoch, i and the identity of the image, so neither the size of a batch nor its other images
    matter.  An image that stands in an epoch several times is another one to its augmentations each time.
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
        self._augments = [slot("augment").build(choice) for choice in augment]
        self._seeds = seeds
        self._normalize = Normalize(prepared.mean, prepared.std, self.device, dtype)
        self._order: tuple[int, Tensor] = (-1, torch.empty(0))

    def count(self, split: Literal["train", "val", "test"] = "train") -> int:
        """Number of images of a split."""
        return len(self._subsets[split])

    @property
    def pixels(self) -> int:
        """Number of pixels of an image."""
        return self._subsets["train"].pixels_MCHW[0, 0].numel()

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
        epoch, place = divmod(step, self.steps_per_epoch(batch_size))
        order_N, train = self._epoch_order(epoch), self._subsets["train"]
        begin = place * batch_size
        stop = begin + self.batch_images(batch_size)
        if repeats == 1:
            picked_B = order_N[begin:stop]
            id_B = train.id_N[picked_B]
        else:
            turn_B = torch.arange(begin, stop, device=self.device)
            picked_B = order_N[turn_B // repeats]
            id_B = train.id_N[picked_B] + (turn_B % repeats << 32)
        if rows is not None and list(rows) != [range(stop - begin)]:
            picked_B, id_B = (torch.cat([of_B[r.start : r.stop] for r in rows]) for of_B in (picked_B, id_B))
        x_BCHW, y_B = train.at(picked_B), train.y_N[picked_B]
        keys = [noise.key(self._seeds["augment"], "augment", epoch, i) for i in range(len(self._augments))]
        for normalized in (False, True):
            if normalized:
                x_BCHW = self._normalize(x_BCHW)
            for change, key in zip(self._augments, keys, strict=True):
                if change.normalized == normalized:
                    x_BCHW = change(x_BCHW, key, id_B)
                    y_B = change.masks(y_B, key, id_B) if y_B.ndim > 1 else y_B
        return Batch(x_BCHW, _labels(y_B), id_B, epoch)

    def evaluation(self, split: Literal["train", "val", "test"], batch_size: int) -> Iterator[Batch]:
        """All images of a split in their order, not augmented; the last batch may be smaller."""
        subset = self._subsets[split]
        for start in range(0, len(subset), batch_size):
            part = slice(start, start + batch_size)
            yield Batch(self._normalize(subset.at(part)), _labels(subset.y_N[part]), subset.id_N[part], 0)

    def _epoch_order(self, epoch: int) -> Tensor:
        if self._order[0] != epoch:
            key = noise.key(self._seeds["order"], "order", epoch)
            self._order = (epoch, noise.permutation(key, self.count()).to(self.device))
        return self._order[1]


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


# -- how it is done ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Raw:
    """A data set as the model sees it, before it is split."""

    train: Subset
    test: Subset
    group_N: Tensor | None  #: of the training split, see :meth:`~vitlab.data.datasets.base.Dataset.groups`
    held_N: Tensor | None  #: see :meth:`~vitlab.data.datasets.base.Dataset.held_out`
    info: DataInfo
    validation: float
    mean: tuple[float, ...]
    std: tuple[float, ...]


_remembered: OrderedDict[str, _Raw] = OrderedDict()


def _resolved(choice: Choice | str | Mapping[str, Any]) -> Resolved:
    return choice if isinstance(choice, Resolved) else slot("dataset").resolve(choice)


def _build(resolved: Resolved) -> Dataset:
    built: Dataset = slot("dataset").build(resolved)
    return built


def _seen(resolved: Resolved, stored: DataInfo) -> DataInfo:
    """What the model sees of what is stored."""
    options = resolved.options
    size, channels, classes = options["size"], options["channels"], options["classes"]
    if stored.task == "segmentation":
        _check_labels_of_pixels(resolved)
    outside = [label for label in classes or () if label >= stored.classes]
    if outside:
        raise DataError(f"{resolved.type} has classes 0 to {stored.classes - 1}; found {outside[0]} in 'classes'")
    seen = dataclasses.replace(
        stored,
        image=size or stored.image,
        channels=channels or stored.channels,
        classes=len(classes) if classes else stored.classes,
        labels=tuple(stored.labels[label] for label in classes) if classes and stored.labels else stored.labels,
    )
    normalize = options["normalize"]
    given = len(_given(normalize)[0]) if normalize != "dataset" else 1
    if given not in (1, seen.channels):
        raise DataError(
            f"normalize has {given} numbers for {seen.channels} channels; one for each, or one for all of them"
        )
    return seen


def _check_labels_of_pixels(resolved: Resolved) -> None:
    """Refuse what is made for labels of whole images."""
    for option in ("classes", "per_class"):
        if resolved.options[option]:
            raise DataError(f"'{option}' chooses images by their class, and {resolved.type} has a class at every pixel")
    for choice in resolved.options["augment"]:
        change = slot("augment").resolve(choice)
        if change.component.masks is Augment.masks:  # type: ignore[attr-defined]
            raise DataError(
                f"{resolved.type} has labels of pixels, and augmentation {change.type} does not say what becomes of "
                "them; it would have a method 'masks'"
            )


def _labels(y_B: Tensor) -> Tensor:
    """int64; where they are of pixels, none is :data:`IGNORED`."""
    return y_B if y_B.ndim == 1 else torch.where(y_B == VOID, IGNORED, y_B.long())


def _given(normalize: str | Normalization) -> tuple[Sequence[float], Sequence[float]]:
    if isinstance(normalize, Normalization):
        return normalize.mean, normalize.std
    return NORMALIZATIONS[normalize]


def _normalization(normalize: str | Normalization, raw: _Raw) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if normalize == "dataset":
        return raw.mean, raw.std
    mean, std = (tuple(values) * (raw.info.channels if len(values) == 1 else 1) for values in _given(normalize))
    return mean, std


def _raw(resolved: Resolved) -> _Raw:
    """The data set decoded, filtered, converted and resized; remembered as long as it is what it was."""
    dataset = _build(resolved)
    shaping = ("classes", "channels", "size")
    plain = resolved.plain()
    own = {name: value for name, value in plain.items() if name not in DataOptions.model_fields}
    known = json.dumps([str(resolved.origin), own, {name: plain[name] for name in shaping}], sort_keys=True)
    known += f" {dataset.info().identity}"
    if known in _remembered:
        _remembered.move_to_end(known)
        return _remembered[known]
    train, test = (_shaped(dataset.read(split), resolved) for split in SPLITS)
    for split, subset in zip(SPLITS, (train, test), strict=True):
        if not len(subset):
            raise DataError(f"{resolved.type} has no {split} images")
    info = _seen(resolved, dataset.info())  # once more: its identity now is that of what was read
    mean, std = statistics(train.x_NCHW)
    group_N = dataset.groups()
    group_N = None if group_N is None else group_N[train.id_N]
    raw = _Raw(train, test, group_N, dataset.held_out(), info, dataset.validation, mean, std)
    _remembered[known] = raw
    while len(_remembered) > KEPT:
        _remembered.popitem(last=False)
    return raw


def _shaped(images: Images, resolved: Resolved) -> Subset:
    """An official split with only the classes, in the colours and of the size asked for."""
    options = resolved.options
    x_NCHW, y_N = images
    id_N = torch.arange(len(y_N))
    if options["classes"]:
        place_K = {old: new for new, old in enumerate(options["classes"])}
        new_N = torch.tensor([place_K.get(label, -1) for label in y_N.tolist()], dtype=torch.int64)
        id_N = (new_N >= 0).nonzero()[:, 0]
        x_NCHW, y_N = x_NCHW[id_N], new_N[id_N]
    if options["channels"]:
        x_NCHW = with_channels(x_NCHW, options["channels"])
    if options["size"]:
        x_NCHW = resized(x_NCHW, options["size"])
        y_N = resized_masks(y_N, options["size"]) if y_N.ndim > 1 else y_N
    return Subset.of(x_NCHW, y_N, id_N)
