"""From a data set's name to what a training is fed with: what the model will see, and the three splits.

Images are in memory, as uint8, or stored (:mod:`vitlab.data.image_cache`), where pictures are too many for it.

N images of a split, C channels, H rows, W columns.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from vitlab import noise, registry
from vitlab.data import image_cache, splits
from vitlab.data.augment.base import Augment
from vitlab.data.batches import Batch as Batch
from vitlab.data.batches import Feed as Feed
from vitlab.data.batches import Normalize as Normalize
from vitlab.data.datasets import files
from vitlab.data.datasets.base import SPLITS, Dataset, Images
from vitlab.data.datasets.pictures import Pictures
from vitlab.data.options import NORMALIZATIONS, DataOptions, Normalization
from vitlab.data.pixels import levels, moments, resized, resized_masks, statistics, with_channels
from vitlab.data.prepared import Prepared as Prepared
from vitlab.data.prepared import Subset as Subset
from vitlab.errors import DataError
from vitlab.geometry import DataInfo
from vitlab.plan import source
from vitlab.plan.key import closure, key_of, modules_of_class
from vitlab.registry import BUILT_IN, Resolved, slot
from vitlab.spec import Choice

BEYOND = ("normalize", "validation", "fraction", "per_class", "augment")
"""What every data set takes, and what decides no pixel of its images."""

DECODING = frozenset({"vitlab.data.datasets.pictures", "vitlab.data.pixels", "vitlab.data.image_cache"})
"""Modules that make images of files, whatever the data set."""

KEPT = 2
"""Data sets a process remembers, decoded: enough for the trials of a study that a worker runs one after another."""


def data_info(choice: Choice | str | Mapping[str, Any]) -> DataInfo:
    """What the model sees, without reading an image.

    Raises:
        OptionError: if the options do not fit.
        DataError: if they do not fit this data set, or what is here is not what it was said to be.
    """
    resolved = _resolved(choice)
    with _reading(resolved):
        return _seen(resolved, _build(resolved).info())


def missing(choice: Choice | str | Mapping[str, Any]) -> str | None:
    """Why the data could not be read now, in one sentence; None if nothing is known to stand in the way."""
    resolved = _resolved(choice)
    with _reading(resolved):
        return _build(resolved).missing()


def kept(choice: Choice | str | Mapping[str, Any]) -> str | None:
    """Where a large set of pictures is read from on this machine, in one sentence; None for sets kept in memory.

    Raises:
        DataError: if what is here is not what it was said to be.
    """
    resolved = _resolved(choice)
    dataset = _build(resolved)
    with _reading(resolved):
        if type(dataset).pictures is Dataset.pictures or dataset.missing() is not None:
            return None
        pictures, seen = [dataset.pictures(split) for split in SPLITS], _seen(resolved, dataset.info())
    found = [one for one in pictures if one is not None]
    where, needed = _place(resolved, found, seen)
    if where == "memory":
        return None
    count, size = sum(map(len, found)), f"{needed / 2**30:,.1f} GiB"
    if where == "disk":
        return f"The {count:,} pictures of {resolved.type} are kept decoded in {image_cache.folder()}: {size}."
    said = (
        f"The {count:,} pictures of {resolved.type} are decoded as batches ask for them, and not kept: {size} decoded, "
        f"on a machine with {image_cache.memory() / 2**30:,.1f} GiB of memory."
    )
    if _of_picture(resolved):
        return said  # kept decoded, they would still be cut out of their files
    return f"{said} 'decoded: disk' keeps them in {image_cache.folder()}, from where they are read many times as fast."


def examples(choice: Choice | str | Mapping[str, Any], seeds: Mapping[str, int]) -> int | None:
    """Return the number of training images where it is quickly read; None for absent data and pictures in files.

    Raises:
        DataError: if what is here is not what it was said to be.
    """
    resolved = _resolved(choice)
    with _reading(resolved):
        dataset = _build(resolved)
        if type(dataset).pictures is not Dataset.pictures or dataset.missing() is not None:
            return None
        if getattr(dataset, "download", "never") != "never" and dataset.info().identity is None:
            return None
        return len(prepare(resolved, seeds).train)


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


# -- how it is done ---------------------------------------------------------------------------------------------------


@dataclass
class _Raw:
    """A data set as the model sees it, before it is split."""

    train: Subset
    test: Subset
    group_N: torch.Tensor | None  #: of the training split, see :meth:`~vitlab.data.datasets.base.Dataset.groups`
    held_N: torch.Tensor | None  #: see :meth:`~vitlab.data.datasets.base.Dataset.held_out`
    info: DataInfo
    validation: float
    noted: str  #: name of a note of its statistics; empty where its images are in memory
    check: Callable[[], object]  #: see :func:`_check_unchanged`

    @cached_property
    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel of the training images; of stored ones remembered."""
        pixels = self.train.pixels_MCHW
        if isinstance(pixels, torch.Tensor):
            return statistics(pixels)
        note = image_cache.folder() / f"{self.noted}.statistics.json"
        if (known := files.noted(note)) is not None:
            mean, std = json.loads(known)
            return tuple(mean), tuple(std)
        count_CL = sum(levels(x_BCHW) for x_BCHW in image_cache.in_order(pixels, self.train.row_N))
        assert isinstance(count_CL, torch.Tensor)
        found = moments(count_CL)
        self.check()
        files.note(note, json.dumps(found))
        return found


_remembered: OrderedDict[str, _Raw] = OrderedDict()


@contextmanager
def _reading(resolved: Resolved) -> Iterator[None]:
    """Turn what the system says of a file into a DataError: it is not allowed, or no file can have such a name."""
    try:
        yield
    except OSError as error:
        where = "" if error.filename is None else f": {error.filename!s:.200}"
        raise DataError(f"{resolved.type} cannot be read: {error.strerror or error}{where}") from None


def _resolved(choice: Choice | str | Mapping[str, Any]) -> Resolved:
    return choice if isinstance(choice, Resolved) else slot("dataset").resolve(choice)


def _build(resolved: Resolved) -> Dataset:
    built: Dataset = slot("dataset").build(resolved)
    return built


def _seen(resolved: Resolved, given: DataInfo) -> DataInfo:
    """What the model sees of what is given."""
    options = resolved.options
    size, channels, classes = options["size"], options["channels"], options["classes"]
    if given.task == "segmentation":
        _check_labels_of_pixels(resolved)
    _check_cuts(resolved)
    outside = [label for label in classes or () if label >= given.classes]
    if outside:
        raise DataError(f"{resolved.type} has classes 0 to {given.classes - 1}; found {outside[0]} in 'classes'")
    seen = dataclasses.replace(
        given,
        image=size or given.image,
        channels=channels or given.channels,
        classes=len(classes) if classes else given.classes,
        labels=tuple(given.labels[label] for label in classes) if classes and given.labels else given.labels,
    )
    normalize = options["normalize"]
    numbers = len(_given(normalize)[0]) if normalize != "dataset" else 1
    if numbers not in (1, seen.channels):
        raise DataError(
            f"normalize has {numbers} numbers for {seen.channels} channels; one for each, or one for all of them"
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


def _check_cuts(resolved: Resolved) -> None:
    """Refuse to cut out of pictures where there are none, or where an image has been made of them before."""
    for place, choice in enumerate(resolved.options["augment"]):
        change = slot("augment").build(choice)
        if not change.of_picture:
            continue
        if place:
            raise DataError(
                f"what is cut out of pictures is the first augmentation, and {choice.type} is number {place + 1}"
            )
        if resolved.component.pictures is Dataset.pictures:  # type: ignore[attr-defined]
            raise DataError(f"{choice.type} is to cut out of pictures in files, and {resolved.type} has none")


def _given(normalize: str | Normalization) -> tuple[Sequence[float], Sequence[float]]:
    if isinstance(normalize, Normalization):
        return normalize.mean, normalize.std
    return NORMALIZATIONS[normalize]


def _normalization(normalize: str | Normalization, raw: _Raw) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if normalize == "dataset":
        return raw.statistics
    mean, std = (tuple(values) * (raw.info.channels if len(values) == 1 else 1) for values in _given(normalize))
    return mean, std


def _raw(resolved: Resolved) -> _Raw:
    """The data set decoded, filtered, converted and resized; remembered as long as it is what it was."""
    dataset = _build(resolved)
    shaping = ("classes", "channels", "size")
    plain = resolved.plain()
    own = {name: value for name, value in plain.items() if name not in DataOptions.model_fields}
    shape = {name: plain[name] for name in shaping}
    code = [_code(resolved), sorted(registry.plugin_files.modules())]
    known = json.dumps([str(resolved.origin), own, shape, _of_picture(resolved), code], sort_keys=True)
    given = dataset.info()
    known += f" {given.identity}"
    if known in _remembered:
        _remembered.move_to_end(known)
        return _remembered[known]
    # What has no pictures may be fetched by reading it; its identity then is that of what was read.
    before = None if type(dataset).pictures is Dataset.pictures else given.identity
    check = partial(_check_unchanged, dataset, resolved, before)
    train, test = _read(dataset, resolved, _seen(resolved, given), check)
    for split, subset in zip(SPLITS, (train, test), strict=True):
        if not len(subset):
            raise DataError(f"{resolved.type} has no {split} images")
    info = _seen(resolved, given if isinstance(train.stored, image_cache.LazyDecode) else check())
    group_N = dataset.groups()
    group_N = None if group_N is None else group_N[train.id_N]
    noted = "" if train.stored is None else _name(resolved, info, BEYOND)
    raw = _Raw(train, test, group_N, dataset.held_out(), info, dataset.validation, noted, check)
    _remembered[known] = raw
    while len(_remembered) > KEPT:
        _remembered.popitem(last=False)
    return raw


def _check_unchanged(dataset: Dataset, resolved: Resolved, identity: str | None) -> DataInfo:
    """The data as stored, after some of it was read.

    Args:
        dataset: what was read.
        resolved: the same.
        identity: that it had before; None if any will do.

    Raises:
        DataError: if it is no longer what it was.
    """
    now = dataset.info()
    if identity not in (None, now.identity):
        raise DataError(
            f"{resolved.type} was changed while it was read: {identity} before, {now.identity} after; run again when "
            "nobody writes to it"
        )
    return now


def _name(resolved: Resolved, info: DataInfo, but: Sequence[str]) -> str:
    """A digest of all that decides the images of a data set, wherever it lies: also of the library that decodes.

    Args:
        but: options that do not.
    """
    import PIL
    from PIL import features

    hashed = {name: value for name, value in resolved.hashed().items() if name not in but}
    decoder = [PIL.__version__, features.version("jpg"), features.version("webp"), _code(resolved)]
    text = json.dumps([str(resolved.origin), hashed, info.identity, decoder], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _code(resolved: Resolved) -> str:
    """Return a digest of the code that makes images of a data set's files, as this process runs it.

    Of vitlab it covers the modules of the data set and those that decode, and not all that they import: large sets are
    decoded for hours.
    """
    begin = modules_of_class(resolved.component) | DECODING
    texts = closure(begin, source.loaded).items()
    return key_of({name: text for name, text in texts if name in begin or name.partition(".")[0] != BUILT_IN})[:32]


def _read(dataset: Dataset, resolved: Resolved, seen: DataInfo, check: Callable[[], object]) -> list[Subset]:
    """Both official splits, in memory or stored."""
    found = [dataset.pictures(split) for split in SPLITS]
    pictures = [one for one in found if one is not None]
    where = _place(resolved, pictures, seen)[0] if pictures else "memory"
    if where == "memory" and not _of_picture(resolved):
        return [_shaped(dataset.read(split), resolved) for split in SPLITS]
    name, subsets = _name(resolved, seen, (*BEYOND, "classes")), []
    for split, one in zip(SPLITS, pictures, strict=True):
        source = image_cache.LazyDecode(one, seen.channels, seen.image)
        pixels: image_cache.Stored = source
        if where == "disk":
            pixels = image_cache.on_disk(source, f"{name}.{split}", f"{resolved.type}: its {split} split", check)
        elif where == "memory":
            pixels = image_cache.in_memory(source, f"{resolved.type}: the pictures of its {split} split")
        id_N, y_N = _of_classes(one.y_N, resolved)
        subsets.append(Subset(pixels, id_N, y_N, id_N))
    return subsets


def _place(resolved: Resolved, pictures: Sequence[Pictures], seen: DataInfo) -> tuple[image_cache.Place, int]:
    """Where decoded pictures are kept, and how many bytes they are."""
    needed = sum(map(len, pictures)) * seen.channels * seen.image[0] * seen.image[1]
    return image_cache.place(pictures[0].decoded, needed), needed


def _of_picture(resolved: Resolved) -> bool:
    """Whether training images are cut out of pictures in their files."""
    return any(slot("augment").build(choice).of_picture for choice in resolved.options["augment"])


def _shaped(images: Images, resolved: Resolved) -> Subset:
    """An official split with only the classes, in the colours and of the size asked for."""
    options = resolved.options
    x_NCHW, y_N = images
    id_N, y_N = _of_classes(y_N, resolved)
    if options["classes"]:
        x_NCHW = x_NCHW[id_N]
    if options["channels"]:
        x_NCHW = with_channels(x_NCHW, options["channels"])
    if options["size"]:
        x_NCHW = resized(x_NCHW, options["size"])
        y_N = resized_masks(y_N, options["size"]) if y_N.ndim > 1 else y_N
    return Subset.of(x_NCHW, y_N, id_N)


def _of_classes(y_N: torch.Tensor, resolved: Resolved) -> tuple[torch.Tensor, torch.Tensor]:
    """Which images have one of the classes asked for, and their labels among these."""
    classes = resolved.options["classes"]
    if not classes:
        return torch.arange(len(y_N)), y_N
    place_K = {old: new for new, old in enumerate(classes)}
    new_N = torch.tensor([place_K.get(label, -1) for label in y_N.tolist()], dtype=torch.int64)
    id_N = (new_N >= 0).nonzero()[:, 0]
    return id_N, new_N[id_N]
