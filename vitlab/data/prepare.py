"""Preparation of a data set: its properties as the model sees it, and the three splits.

Images are uint8 in memory, or read from storage (:mod:`vitlab.data.image_cache`) if memory is too small for them.

N images of a split, C channels, H rows, W columns.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from vitlab import noise, registry
from vitlab.data import image_cache, splits
from vitlab.data.batches import Batch as Batch
from vitlab.data.batches import Feed as Feed
from vitlab.data.batches import Normalize as Normalize
from vitlab.data.datasets import files
from vitlab.data.datasets.base import (
    SPLITS,
    DataOptions,
    Dataset,
    Normalization,
    constants_of,
)
from vitlab.data.datasets.pictures import Pictures
from vitlab.data.further import further_splits
from vitlab.data.model_info import model_info
from vitlab.data.pixels import histograms, mean_and_std, statistics
from vitlab.data.splits import FurtherSplit, apply_options, select_classes
from vitlab.data.splits import Prepared as Prepared
from vitlab.data.splits import Subset as Subset
from vitlab.errors import DataError
from vitlab.geometry import DataIdentity, DataInfo
from vitlab.identity import source
from vitlab.identity.code import closure, modules_of_class
from vitlab.identity.key import key_of
from vitlab.registry import BUILT_IN, ResolvedChoice, slot
from vitlab.spec import Choice
from vitlab.spec.trial import FURTHER_TESTS

NON_PIXEL_OPTIONS = (
    "normalize",
    "validation",
    "fraction",
    "per_class",
    "augment",
    "corrupted",
)  #: they change no pixel of images

DECODING_MODULES = frozenset({"vitlab.data.datasets.pictures", "vitlab.data.pixels", "vitlab.data.image_cache"})
"""Modules that decode image files for all data sets."""

MAX_CACHED = 2  #: decoded data sets to cache per process, for consecutive trials of a study on one worker


def data_info(choice: Choice | str | Mapping[str, Any]) -> DataInfo:
    """Return the properties of the data as the model sees it, without reading an image.

    Raises:
        OptionError: if the options are invalid.
        DataError: if the options do not fit this data set, or its files are not as expected.
    """
    data = _resolve(choice)
    with _reading(data):
        return model_info(data, _build(data).info())


def missing(choice: Choice | str | Mapping[str, Any]) -> str | None:
    """Return a sentence that says why the data cannot be read; None if no reason is known."""
    data = _resolve(choice)
    with _reading(data):
        return _build(data).missing()


def describe_storage(choice: Choice | str | Mapping[str, Any]) -> str | None:
    """Return a sentence that says where pictures are read from on this machine; None for data sets in memory.

    Raises:
        DataError: if the files are not as expected.
    """
    data = _resolve(choice)
    dataset = _build(data)
    with _reading(data):
        if type(dataset).pictures is Dataset.pictures or dataset.missing() is not None:
            return None
        pictures, info = _pictures(dataset), model_info(data, dataset.info())
    where, size_bytes = _place(pictures, info)
    if where == "memory":
        return None
    count, size = sum(map(len, pictures)), f"{size_bytes / 2**30:,.1f} GiB"
    if where == "disk":
        return f"The {count:,} pictures of {data.type} are cached decoded in {image_cache.folder()}: {size}."
    message = (
        f"The {count:,} pictures of {data.type} are decoded again for every batch: {size} decoded, "
        f"on a machine with {image_cache.memory() / 2**30:,.1f} GiB of memory."
    )
    if _crops_pictures(data):
        return message  # a cache on disk does not help: crops are taken from the files
    return f"{message} 'decoded: disk' keeps them in {image_cache.folder()}, which is many times as fast."


def examples(choice: Choice | str | Mapping[str, Any], seeds: Mapping[str, int]) -> int | None:
    """Return the number of training images if it is quick to read; None for absent data and for pictures in files.

    Raises:
        DataError: if the files are not as expected.
    """
    data = _resolve(choice)
    with _reading(data):
        dataset = _build(data)
        if type(dataset).pictures is not Dataset.pictures or dataset.missing() is not None:
            return None
        if getattr(dataset, "download", "never") != "never" and dataset.info().identity is None:
            return None
        return len(prepare(data, seeds).train)


def prepare(
    choice: Choice | str | Mapping[str, Any], seeds: Mapping[str, int], expected: str | None = None
) -> Prepared:
    """Read a data set, or take it from the cache, and split it.

    The test split is the official one.  Validation is the authors' own if they define one and the study gives no
    share, else it is held out of the training split by the stream ``split``.  The remaining images are reduced to the
    study's ``fraction`` and ``per_class`` by the stream ``subset``.

    Args:
        choice: the data set and its options.
        seeds: of the streams ``split`` and ``subset``.
        expected: text of the identity the trial was planned with; None if it was unknown.

    Raises:
        OptionError: if the options are invalid.
        DataError: if the data is not here or its files are not as expected.
    """
    data = _resolve(choice)
    raw = _raw(data)
    if expected is not None and str(raw.info.content) != expected:
        raise DataError(
            f"{data.type} is not the data this was planned with: planned {expected}, found {raw.info.content}; "
            "restore the data, or plan again on the machine that has it"
        )
    options = data.options
    reduction = options["fraction"], options["per_class"]
    by = (options["validation"], *reduction, seeds["split"], None if reduction == (1, None) else seeds["subset"])
    if raw.latest is None or raw.latest[0] != by:
        raw.latest = by, *_split(data, raw, seeds)
    _, train, val = raw.latest
    mean, std = _normalization(options["normalize"], raw)
    return Prepared(
        train=train,
        val=val,
        test=raw.test,
        info=raw.info,
        mean=mean,
        std=std,
        further=_further(data, raw),
    )


def _split(data: ResolvedChoice, raw: _Raw, seeds: Mapping[str, int]) -> tuple[Subset, Subset]:
    """Return the training and the validation images, see :func:`prepare`."""
    options = data.options
    share = options["validation"] or raw.validation
    official = raw.train
    authors_N = None if options["validation"] else raw.held_out_N
    stratum_N = official.y_N if official.y_N.ndim == 1 else torch.zeros_like(official.id_N)
    key = noise.key(seeds["split"], "split")
    if authors_N is not None:
        mask_N = torch.isin(official.id_N, authors_N)
        rest_N, val_N = (~mask_N).nonzero()[:, 0], mask_N.nonzero()[:, 0]
    elif raw.group_N is None:
        rest_N, val_N = splits.hold_out(stratum_N, official.id_N, share, key)
    else:
        rest_N, val_N = splits.hold_out_groups(raw.group_N, share, key)
    if not len(rest_N) or not len(val_N):
        raise DataError(
            f"the split of {data.type} leaves no images to train on, or none to validate on; set 'validation' to "
            "the share of training images to hold out, or select more 'classes'"
        )
    rest = official.select(rest_N)
    key = noise.key(seeds["subset"], "subset")
    subset_N = splits.fraction(stratum_N[rest_N], rest.id_N, options["fraction"], key)
    if options["per_class"] is not None:
        subset_N = subset_N[splits.at_most(rest.y_N[subset_N], rest.id_N[subset_N], options["per_class"], key)]
    return rest.select(subset_N), official.select(val_N)


@dataclass
class _Raw:
    """A data set as the model sees it, before the validation split."""

    train: Subset
    test: Subset
    group_N: torch.Tensor | None  #: of the training split, see :meth:`~vitlab.data.datasets.base.Dataset.groups`
    held_out_N: torch.Tensor | None  #: see :meth:`~vitlab.data.datasets.base.Dataset.held_out`
    info: DataInfo
    validation: float
    note_name: str  #: of the file of its cached statistics; empty if its images are in memory
    check: Callable[[], object]  #: see :func:`_check_unchanged`
    corrupted: splits.TensorCache = field(default_factory=splits.TensorCache)
    """Corrupted images of the test split, shared by the trials of this process."""
    latest: tuple[tuple[Any, ...], Subset, Subset] | None = None
    """The latest split, which consecutive trials of a study usually share: its options and seeds, its training and its
    validation images."""

    @cached_property
    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of the training images by channel; cached on disk unless they are in memory."""
        pixels = self.train.pixels_MCHW
        if isinstance(pixels, torch.Tensor):
            return statistics(pixels)
        note = image_cache.folder() / f"{self.note_name}.statistics.json"
        if (text := files.read_note(note)) is not None:
            mean, std = json.loads(text)
            return tuple(mean), tuple(std)
        count_CL = sum(histograms(x_BCHW) for x_BCHW in image_cache.iter_images(pixels, self.train.row_N))
        assert isinstance(count_CL, torch.Tensor)
        result = mean_and_std(count_CL)
        self.check()
        files.write_note(note, json.dumps(result))
        return result


_cache: OrderedDict[str, _Raw] = OrderedDict()


@contextmanager
def _reading(resolved: ResolvedChoice) -> Iterator[None]:
    """Return a context manager that turns an OSError, such as a missing permission, into a DataError.

    Its message names the data set.
    """
    try:
        yield
    except OSError as error:
        where = "" if error.filename is None else f": {error.filename!s:.200}"
        raise DataError(f"{resolved.type} cannot be read: {error.strerror or error}{where}") from None


def _resolve(choice: Choice | str | Mapping[str, Any]) -> ResolvedChoice:
    return choice if isinstance(choice, ResolvedChoice) else slot("dataset").resolve(choice)


def _build(resolved: ResolvedChoice) -> Dataset:
    built: Dataset = slot("dataset").build(resolved)
    return built


def _further(resolved: ResolvedChoice, raw: _Raw) -> Mapping[str, FurtherSplit]:
    """Return the further splits on which a training is evaluated at its end, by name."""
    if not any(resolved.options.get(name) for name in FURTHER_TESTS):
        return {}
    with _reading(resolved):
        return further_splits(_build(resolved), resolved.options, raw.test, raw.info, raw.corrupted)


def _normalization(normalize: str | Normalization, raw: _Raw) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if normalize == "dataset":
        return raw.statistics
    mean, std = (tuple(values) * (raw.info.channels if len(values) == 1 else 1) for values in constants_of(normalize))
    return mean, std


def _raw(resolved: ResolvedChoice) -> _Raw:
    """Return the data set decoded, filtered, converted and resized; cached under its options, code and identity."""
    dataset = _build(resolved)
    shaping = ("classes", "channels", "size")
    plain = resolved.plain()
    own = {name: value for name, value in plain.items() if name not in DataOptions.model_fields}
    shape = {name: plain[name] for name in shaping}
    code = [_code(resolved), sorted(registry.plugin_files.modules())]
    key = json.dumps([str(resolved.origin), own, shape, _crops_pictures(resolved), code], sort_keys=True)
    info = dataset.info()
    key += f" {info.content}"
    if key in _cache:
        _cache.move_to_end(key)
        return _cache[key]
    # Reading a set without pictures may download it, and its identity is then known only afterwards.
    before = None if type(dataset).pictures is Dataset.pictures else info.content
    check = partial(_check_unchanged, dataset, resolved, before)
    train, test = _read_splits(dataset, resolved, model_info(resolved, info), check)
    for split, subset in zip(SPLITS, (train, test), strict=True):
        if not len(subset):
            raise DataError(f"{resolved.type} has no {split} images; add some, or select other 'classes'")
    info = model_info(resolved, info if isinstance(train.stored, image_cache.LazyDecode) else check())
    group_N = dataset.groups()
    group_N = None if group_N is None else group_N[train.id_N]
    note_name = "" if train.stored is None else _name(resolved, info, NON_PIXEL_OPTIONS)
    raw = _Raw(train, test, group_N, dataset.held_out(), info, dataset.validation, note_name, check)
    _cache[key] = raw
    while len(_cache) > MAX_CACHED:
        _cache.popitem(last=False)
    return raw


def _check_unchanged(dataset: Dataset, resolved: ResolvedChoice, identity: DataIdentity | None) -> DataInfo:
    """Return the current properties of the data as stored.

    Args:
        dataset: the data set that was read.
        resolved: its resolved choice.
        identity: of the data before it was read; None to accept any.

    Raises:
        DataError: if the identity has changed.
    """
    info = dataset.info()
    if identity not in (None, info.content):
        raise DataError(
            f"{resolved.type} was changed while it was read: {identity} before, {info.content} after; run again when "
            "no process writes to it"
        )
    return info


def _name(resolved: ResolvedChoice, info: DataInfo, exclude: Sequence[str]) -> str:
    """Return a digest of everything that determines a data set's images, including the decoding library's versions.

    Args:
        resolved: the data set's resolved choice.
        info: with the identity of the files.
        exclude: options that do not change the images.
    """
    import PIL
    from PIL import features

    hashed = {name: value for name, value in resolved.hashed().items() if name not in exclude}
    decoder = [PIL.__version__, features.version("jpg"), features.version("webp"), _code(resolved)]
    text = json.dumps([str(resolved.origin), hashed, info.identity, decoder], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _code(resolved: ResolvedChoice) -> str:
    """Return a digest of the code that decodes a data set's files, as loaded in this process.

    Of vitlab it covers the modules of the data set and :data:`DECODING_MODULES`, but not their imports, because
    decoding a large set again takes hours.
    """
    begin = modules_of_class(resolved.component) | DECODING_MODULES
    texts = closure(begin, source.loaded).items()
    return key_of({name: text for name, text in texts if name in begin or name.partition(".")[0] != BUILT_IN})[:32]


def _read_splits(
    dataset: Dataset, resolved: ResolvedChoice, info: DataInfo, check: Callable[[], object]
) -> list[Subset]:
    """Return both official splits, in memory or in storage."""
    pictures = _pictures(dataset)
    where = _place(pictures, info)[0] if pictures else "memory"
    if where == "memory" and not _crops_pictures(resolved):
        return [apply_options(dataset.read(split), resolved.options) for split in SPLITS]
    name, subsets = _name(resolved, info, (*NON_PIXEL_OPTIONS, "classes")), []
    for split, one in zip(SPLITS, pictures, strict=True):
        source = image_cache.LazyDecode(one, info.channels, info.image)
        pixels: image_cache.StoredImages = source
        if where == "disk":
            pixels = image_cache.on_disk(source, f"{name}.{split}", f"{resolved.type}: its {split} split", check)
        elif where == "memory":
            pixels = image_cache.in_memory(source, f"{resolved.type}: the pictures of its {split} split")
        id_N, y_N = select_classes(one.y_N, resolved.options["classes"])
        subsets.append(Subset(pixels, id_N, y_N, id_N))
    return subsets


def _pictures(dataset: Dataset) -> list[Pictures]:
    """Return the pictures of both official splits; an empty list for sets that are read at once."""
    return [pictures for split in SPLITS if (pictures := dataset.pictures(split)) is not None]


def _place(pictures: Sequence[Pictures], info: DataInfo) -> tuple[image_cache.Place, int]:
    """Return where decoded pictures are stored (memory, disk or nowhere), and their size in bytes."""
    size_bytes = sum(map(len, pictures)) * info.channels * info.image[0] * info.image[1]
    return image_cache.place(pictures[0].decoded, size_bytes), size_bytes


def _crops_pictures(resolved: ResolvedChoice) -> bool:
    """Return True if training images are crops of full-size pictures."""
    return any(slot("augment").build(choice).of_picture for choice in resolved.options["augment"])
