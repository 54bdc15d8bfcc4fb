"""Preparation of a data set: its properties as the model sees it, and the three splits.

Images are uint8 in memory, or read from storage (:mod:`vitlab.data.image_cache`) if memory is too small for them.

N images of a split, C channels, H rows, W columns.
"""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from vitlab import noise
from vitlab.data import draws, image_cache
from vitlab.data.augment import Augment
from vitlab.data.batches import Feed as Feed
from vitlab.data.datasets import files
from vitlab.data.datasets.base import MIN_CORRUPTED_SIDE, SPLITS, Dataset, Images, normalization_constants
from vitlab.data.datasets.pictures import EncodedPictures, Pictures
from vitlab.data.image_cache import StoredImages
from vitlab.data.pixels import channel_statistics
from vitlab.data.splits import (
    Prepared,
    Subset,
    TestSet,
    make_test_sets,
    select_and_resize,
    select_classes,
    select_images,
)
from vitlab.errors import DataError, format_count, list_some
from vitlab.geometry import DataInfo, Task
from vitlab.identity import source
from vitlab.identity.code import class_modules, transitive_digests
from vitlab.identity.trial import hash_of
from vitlab.registry import BUILT_IN, ResolvedChoice, slot
from vitlab.spec import ChoiceLike
from vitlab.spec.trial import TEST_SET_OPTIONS

NON_PIXEL_OPTIONS = ("normalize", "validation", "fraction", "per_class", "augment", *TEST_SET_OPTIONS)
"""They change no pixel of images."""

DECODING_MODULES = frozenset({"vitlab.data.datasets.pictures", "vitlab.data.pixels", "vitlab.data.image_cache"})
"""Modules that decode image files for all data sets."""

MAX_NAMED = 50  #: unreadable pictures that a message names

MAX_IMBALANCE = 3  #: pictures of the largest class over those of the smallest, above which a note names both

MAX_CACHED = 2  #: decoded data sets to cache per process, without corrupted images, for trials that one process trains


class DataSource:
    """A data set and its options, resolved and built.

    Args:
        choice: the data set and its options.

    Raises:
        OptionError: if the options are invalid.
    """

    def __init__(self, choice: ChoiceLike) -> None:
        self.choice: ResolvedChoice = slot("dataset").resolve_choice(choice)
        self.dataset: Dataset = slot("dataset").build(self.choice)
        self.options = self.choice.options

    def info(self) -> DataInfo:
        """Return the properties of the data as the model sees it, without reading an image.

        Raises:
            DataError: if the options do not fit this data set, or its files are not as expected.
        """
        with self.raising_data_errors():
            return apply_options_to_info(self.choice, self.dataset.info())

    def missing(self) -> str | None:
        """Return a sentence that says why the data cannot be read; None if no reason is known."""
        with self.raising_data_errors():
            return self.dataset.missing()

    def check_pictures_and_note(self) -> list[str]:
        """Return sentences about the data for the plan, after every picture has been checked.

        Raises:
            DataError: if pictures cannot be decoded, with all their names.
        """
        with self.raising_data_errors():
            if self.dataset.missing() is not None:
                return []
            pictures, notes = self.pictures(), list(self.dataset.notes())
            share, held_out_M = self.options["validation"], self.dataset.held_out()
            if pictures and share is not None and held_out_M is not None:
                notes.append(
                    f"'validation: {share:g}' is set, so the {len(held_out_M):,} validation pictures of the data set "
                    "join the training pictures, of all of which that share is held out."
                )
            corrupted = self.options["corrupted"]
            if corrupted is not None and corrupted.corruptions is None and not self.options.get("corrupted_root"):
                notes.append("test/mce leaves frost out: it is a set of photographs, which 'corrupted_root' can name.")
            if pictures:
                _, y_N = select_classes(pictures[0].y_N, self.options["classes"])
                info = self.info()
                count_K = torch.bincount(y_N, minlength=info.classes) if y_N.ndim == 1 else y_N.sum(0)
                most, least = count_K.argmax(), count_K.argmin()
                names = info.labels or range(info.classes)
                if count_K[most] > MAX_IMBALANCE * count_K[least]:
                    notes.append(
                        f"Classes are imbalanced: {count_K[most]:,} of the pictures to train and validate on are of "
                        f"'{names[most]}', and {count_K[least]:,} of '{names[least]}'. Judge by a metric that counts "
                        "all classes alike, such as macro_f1 or, with one class a picture, balanced_accuracy "
                        "(train.metrics)."
                    )
                notes += self._notes_on_storage(pictures, self._check_and_time_pictures(pictures))
            return notes

    def count_training_images(self, seeds: Mapping[str, int]) -> int | None:
        """Return the number of training images without decoding pictures; None if the data is absent."""
        with self.raising_data_errors():
            if self.dataset.missing() is not None or self.dataset.info().identity is None:
                return None
            pictures = self.dataset.pictures("train")
            if pictures is None:
                return len(prepare(self.choice, seeds).train)
            images = select_images(StoredImages(pictures, 3, (1, 1)), self.options["classes"])
            return len(split_training_images(self, images, seeds)[0])

    def pictures(self) -> list[Pictures]:
        """Return the pictures of both official splits; an empty list for sets that are read at once."""
        return [pictures for split in SPLITS if (pictures := self.dataset.pictures(split)) is not None]

    @property
    def crops_full_size_pictures(self) -> bool:
        """Whether training images are crops of full-size pictures."""
        return any(slot("augment").build(choice).of_picture for choice in self.options["augment"])

    @contextmanager
    def raising_data_errors(self) -> Iterator[None]:
        """Return a context that turns an OSError, such as a missing permission, into a DataError with the data set."""
        try:
            yield
        except OSError as error:
            where = "" if error.filename is None else f": {error.filename!s:.200}"
            raise DataError(f"{self.choice.type} cannot be read: {error.strerror or error}{where}") from None

    def read_official_splits(self, info: DataInfo, check: Callable[[], object]) -> list[Subset]:
        """Return both official splits, in memory or in storage; ``check`` is :func:`image_cache.open_disk_cache`'s."""
        pictures, subsets = self.pictures(), []
        if not pictures:
            return [select_and_resize(self.dataset.read(split), self.options) for split in SPLITS]
        where, name = _choose_storage(pictures, info)[0], self.digest(info, (*NON_PIXEL_OPTIONS, "classes"))
        for split, one in zip(SPLITS, pictures, strict=True):
            images, what = StoredImages(one, info.channels, info.image), f"{self.choice.type}: its {split} split"
            if where == "memory":
                files.require_memory(math.prod(images.shape), what)
            if where != "never":
                images.decoded = image_cache.open_disk_cache(images, f"{name}.{split}", what, check)
            if where == "memory" and not self.crops_full_size_pictures:
                subsets.append(select_and_resize(Images(torch.from_numpy(images.decoded), one.y_N), self.options))
            else:
                subsets.append(select_images(images, self.options["classes"]))
        return subsets

    def digest(self, info: DataInfo, exclude: Collection[str]) -> str:
        """Return a digest of all that determines the images, with the versions of the decoding library."""
        import PIL
        from PIL import features

        hashed = {name: value for name, value in self.choice.hashed().items() if name not in exclude}
        decoder = [PIL.__version__, features.version("jpg"), features.version("webp"), self.decoding_code_digest()]
        text = json.dumps([str(self.choice.origin), hashed, info.identity, decoder], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def decoding_code_digest(self) -> str:
        """Return a digest of the code that decodes the files, as loaded in this process.

        Of vitlab it covers the modules of the data set and :data:`DECODING_MODULES`, but not their imports, because
        decoding a large set again takes hours.
        """
        # Imports of the data set outside of vitlab count, since they decode what vitlab cannot.
        begin = class_modules(self.choice.component) | DECODING_MODULES
        texts = transitive_digests(begin, source.read_source_as_imported).items()
        return hash_of({name: text for name, text in texts if name in begin or name.partition(".")[0] != BUILT_IN})[:32]

    def _check_and_time_pictures(self, pictures: Sequence[Pictures]) -> float:
        """Decode every picture once, remember the result for this content, and return how long one takes to decode."""
        encoded = [one for one in pictures if isinstance(one, EncodedPictures)]

        def check() -> str:
            faults = [image_cache.find_undecodable(one) for one in encoded]
            return json.dumps([faults, 0.0 if any(faults) else image_cache.measure_seconds_per_picture(pictures[0])])

        note = files.cache_folder() / "checked" / self.digest(self.info(), self.options)
        found, seconds = json.loads(files.read_or_compute(note, check))
        by_split = zip(encoded, found, strict=True)
        if faults := [f"{one.names[index]} ({fault})" for one, found in by_split for index, fault in found]:
            raise DataError(
                f"{self.choice.type}: {len(faults):,} of {format_count(sum(map(len, encoded)), 'picture')} cannot be "
                f"read; replace or delete {'it' if len(faults) == 1 else 'them'}: {list_some(faults, MAX_NAMED, '; ')}"
            )
        return float(seconds)

    def _notes_on_storage(self, pictures: Sequence[Pictures], seconds_each: float) -> list[str]:
        """Return a sentence on where decoded pictures are kept here, their size, and how long decoding takes.

        There is none on a small set in memory.
        """
        where, size_bytes = _choose_storage(pictures, self.info())
        number, folder = sum(map(len, pictures)), image_cache.decoded_folder()
        seconds = number * seconds_each
        if where == "memory" and seconds < 1:
            return []
        how = "decoded again for every batch" if where == "never" else f"cached decoded in {folder} for all workers"
        lasts = f"{seconds:,.0f} s" if seconds < 100 else f"{seconds / 60:,.0f} minutes"
        note = (
            f"The {number:,} pictures of {self.choice.type} are {how}: {size_bytes / 2**30:,.1f} GiB, about {lasts} of "
            f"one core, on a machine with {files.total_memory() / 2**30:,.1f} GiB of memory."
        )
        if where != "never" or self.crops_full_size_pictures:
            return [note]  # a cache on disk does not help crops, which are taken from the files
        return [f"{note} 'decoded: disk' keeps them in {folder}, which is many times as fast."]


def data_info(choice: ChoiceLike) -> DataInfo:
    """Return the properties of the data as the model sees it; see :meth:`DataSource.info` for errors."""
    return DataSource(choice).info()


def prepare(choice: ChoiceLike, seeds: Mapping[str, int], expected: str | None = None) -> Prepared:
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
    data = DataSource(choice)
    raw = _cached_official_splits(data)
    if expected is not None and str(raw.info.content) != expected:
        raise DataError(
            f"{data.choice.type} is not the data this was planned with: planned {expected}, found {raw.info.content}; "
            "restore the data, or plan again on the machine that has it"
        )
    train, val = split_training_images(data, raw.train, seeds)
    if data.options["normalize"] == "dataset":
        mean, std = raw.statistics
    else:
        constants = (tuple(numbers) for numbers in normalization_constants(data.options["normalize"]))
        mean, std = (numbers * (raw.info.channels if len(numbers) == 1 else 1) for numbers in constants)
    beside: Mapping[str, TestSet] = {}
    if any(data.options.get(name) for name in TEST_SET_OPTIONS):
        with data.raising_data_errors():
            beside = make_test_sets(data.dataset, data.options, raw.test, raw.info)
    return Prepared(train=train, val=val, test=raw.test, info=raw.info, mean=mean, std=std, test_sets=beside)


def split_training_images(data: DataSource, images: Subset, seeds: Mapping[str, int]) -> tuple[Subset, Subset]:
    """Return the training and the validation images of an official training split, see :func:`prepare`."""
    options, y_N, id_N = data.options, images.y_N, images.id_N
    group_N, held_out_M = data.dataset.groups(), data.dataset.held_out()
    share = options["validation"] or data.dataset.validation
    stratum_N = y_N if y_N.ndim == 1 else torch.zeros_like(id_N)
    key = noise.key(seeds["split"], "split")
    if held_out_M is not None and not options["validation"]:
        rest_N, val_N = draws.split_by_mask(torch.isin(id_N, held_out_M))
    elif group_N is None:
        rest_N, val_N = draws.hold_out_stratified(stratum_N, id_N, share, key)
    else:
        rest_N, val_N = draws.hold_out_groups(group_N[id_N], share, key)
    if not len(rest_N) or not len(val_N):
        raise DataError(
            f"the split of {data.choice.type} leaves no images to train on, or none to validate on; set "
            "'validation' to the share of training images to hold out, or select more 'classes'"
        )
    key = noise.key(seeds["subset"], "subset")
    if options["fraction"] < 1:
        rest_N = rest_N[draws.select_stratified_share(stratum_N[rest_N], id_N[rest_N], options["fraction"], key)]
    if options["per_class"] is not None:
        rest_N = rest_N[draws.limit_per_class(y_N[rest_N], id_N[rest_N], options["per_class"], key)]
    return images.select(rest_N), images.select(val_N)


@dataclass
class _Raw:
    """A data set as the model sees it, before the validation split."""

    train: Subset  #: the official training split
    test: Subset
    info: DataInfo
    name: str  #: of the file of its cached statistics
    check: Callable[[], object]  #: see :func:`_reread_unchanged_info`

    @cached_property
    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of the training images by channel; cached on disk unless they are in memory."""
        images = self.train.pixels_MCHW
        if isinstance(images, torch.Tensor):
            return channel_statistics([images])

        def compute() -> str:
            result = channel_statistics(image_cache.iter_images(images, self.train.row_N))
            self.check()
            return json.dumps(result)

        mean, std = json.loads(
            files.read_or_compute(image_cache.decoded_folder() / f"{self.name}.statistics.json", compute)
        )
        return tuple(mean), tuple(std)


_cache: dict[str, _Raw] = {}  #: the last one used at the end


def _cached_official_splits(data: DataSource) -> _Raw:
    """Return the data set decoded, filtered, converted and resized; cached under its options, code and identity."""
    info = data.dataset.info()
    name = data.digest(info, NON_PIXEL_OPTIONS)
    options = {name: value for name, value in data.choice.plain().items() if name not in NON_PIXEL_OPTIONS}
    key = json.dumps([name, str(info.content), options, data.crops_full_size_pictures], sort_keys=True)
    if key in _cache:
        _cache[key] = _cache.pop(key)
        return _cache[key]
    # Reading a set without pictures may download it, and its identity is then known only afterwards.
    check = partial(_reread_unchanged_info, data, info.content if data.pictures() else None)
    train, test = data.read_official_splits(apply_options_to_info(data.choice, info), check)
    for which, subset in zip(SPLITS, (train, test), strict=True):
        if not len(subset):
            raise DataError(f"{data.choice.type} has no {which} images; add some, or select other 'classes'")
    # Pictures that are decoded for every batch have not been read yet; what changes later is noticed by nobody.
    is_read = train.stored is None or train.stored.decoded is not None
    _cache[key] = raw = _Raw(train, test, apply_options_to_info(data.choice, check() if is_read else info), name, check)
    if len(_cache) > MAX_CACHED:
        del _cache[next(iter(_cache))]
    return raw


def _reread_unchanged_info(data: DataSource, identity: str | None) -> DataInfo:
    """Return the current properties of the data as stored, whose identity must be ``identity``; None accepts any."""
    info = data.dataset.info()
    if identity not in (None, info.content):
        raise DataError(
            f"{data.choice.type} was changed while it was read: {identity} before, {info.content} after; run again "
            "when no process writes to it"
        )
    return info


def _choose_storage(pictures: Sequence[Pictures], info: DataInfo) -> tuple[image_cache.Place, int]:
    """Return where decoded pictures are stored (memory, disk or nowhere), and their size in bytes."""
    size_bytes = sum(map(len, pictures)) * info.channels * info.image[0] * info.image[1]
    return image_cache.choose_decoded_place(pictures[0].decoded, size_bytes), size_bytes


# -- options that do not fit the data ---------------------------------------------------------------------------------


def apply_options_to_info(resolved: ResolvedChoice, info: DataInfo) -> DataInfo:
    """Return the properties of the data as the model sees it, after the options are applied.

    Raises:
        DataError: if an option does not fit the data.
    """
    options = resolved.options
    size, channels, classes = options["size"], options["channels"], options["classes"]
    if info.task != "classification":
        _check_options_for_task(resolved, info.task)
    _check_full_size_crops(resolved)
    outside = [label for label in classes or () if label >= info.classes]
    if outside:
        raise DataError(f"{resolved.type} has classes 0 to {info.classes - 1}; found {outside[0]} in 'classes'")
    result = replace(
        info,
        image=size or info.image,
        channels=channels or info.channels,
        classes=len(classes) if classes else info.classes,
        labels=tuple(info.labels[label] for label in classes) if classes and info.labels else info.labels,
    )
    if options["corrupted"] is not None:
        _check_corruptions_are_defined(resolved, result)
    normalize = options["normalize"]
    numbers = len(normalization_constants(normalize)[0]) if normalize != "dataset" else 1
    if numbers not in (1, result.channels):
        raise DataError(
            f"normalize has {numbers} numbers for {result.channels} channels; one for each, or one for all of them"
        )
    return result


def _check_corruptions_are_defined(resolved: ResolvedChoice, info: DataInfo) -> None:
    """Reject corrupted test images of data for which they are not defined."""
    if "frost" in (resolved.options["corrupted"].corruptions or ()) and not resolved.options.get("corrupted_root"):
        raise DataError(
            "corrupted: frost is a set of photographs, which vitlab does not have; set 'corrupted_root' to published "
            "pictures, or remove it"
        )
    channels, (height, width) = info.channels, info.image
    if channels not in (1, 3) or min(height, width) < MIN_CORRUPTED_SIDE:
        raise DataError(
            f"'corrupted' needs images of 1 or 3 channels and at least {MIN_CORRUPTED_SIDE} by {MIN_CORRUPTED_SIDE} "
            f"pixels; images of {resolved.type} have {channels} channels and {height} by {width} pixels; set 'size' or "
            "'channels', or remove 'corrupted'"
        )


def _check_options_for_task(resolved: ResolvedChoice, task: Task) -> None:
    """Reject options that need one class an image, and augmentations of pixels that leave masks as they are."""
    has = "a class at every pixel" if task == "segmentation" else "any number of classes an image"
    for option in ("classes", "per_class", "corrupted"):
        if resolved.options[option]:
            does = "measures the error of" if option == "corrupted" else "selects"
            raise DataError(f"'{option}' {does} images by class, and {resolved.type} has {has}; remove it")
    for choice in resolved.options["augment"] if task == "segmentation" else ():
        change = slot("augment").resolve_choice(choice)
        if change.component.masks is Augment.masks:
            raise DataError(
                f"augment: {change.type} has no method 'masks' to transform the label masks of {resolved.type}; remove "
                "it, or add the method"
            )


def _check_full_size_crops(resolved: ResolvedChoice) -> None:
    """Reject crops of full-size pictures if there are none, or if the crop is not the first augmentation."""
    for place, choice in enumerate(resolved.options["augment"]):
        change = slot("augment").build(choice)
        if not change.of_picture:
            continue
        if place:
            raise DataError(
                f"augment: {choice.type} crops full-size picture files and must be the first augmentation; "
                f"it is number {place + 1}"
            )
        if resolved.component.pictures is Dataset.pictures:
            raise DataError(
                f"augment: {choice.type} crops full-size picture files, and {resolved.type} has none; "
                "remove 'of: picture'"
            )
