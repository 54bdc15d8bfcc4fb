"""Properties of a data set as the model sees it, and the options that do not fit the data."""

from __future__ import annotations

from dataclasses import replace

from vitlab.data.augment.base import Augment
from vitlab.data.datasets.base import MIN_CORRUPTED_SIDE, Dataset, constants_of
from vitlab.errors import DataError
from vitlab.geometry import DataInfo, Task
from vitlab.registry import ResolvedChoice, slot


def model_info(resolved: ResolvedChoice, info: DataInfo) -> DataInfo:
    """Return the properties of the data as the model sees it, after the options are applied.

    Raises:
        DataError: if an option does not fit the data.
    """
    options = resolved.options
    size, channels, classes = options["size"], options["channels"], options["classes"]
    if info.task != "classification":
        _check_labels(resolved, info.task)
    _check_cuts(resolved)
    outside = [label for label in classes or () if label >= info.classes]
    if outside:
        raise DataError(f"{resolved.type} has classes 0 to {info.classes - 1}; found {outside[0]} in 'classes'")
    result = replace(
        info,
        image=size or info.image,
        channels=channels or info.channels,
        classes=len(classes) if classes else info.classes,
        labels=tuple(info.labels[label] for label in classes) if classes and info.labels else info.labels,
        test_images=None if classes else info.test_images,  # how many of the classes there are is known after reading
    )
    if options["corrupted"] is not None:
        _check_corrupted(resolved, result)
    normalize = options["normalize"]
    numbers = len(constants_of(normalize)[0]) if normalize != "dataset" else 1
    if numbers not in (1, result.channels):
        raise DataError(
            f"normalize has {numbers} numbers for {result.channels} channels; one for each, or one for all of them"
        )
    return result


def _check_corrupted(resolved: ResolvedChoice, info: DataInfo) -> None:
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


def _check_labels(resolved: ResolvedChoice, task: Task) -> None:
    """Reject options that need one class an image, and augmentations of pixels that leave masks as they are."""
    has = "a class at every pixel" if task == "segmentation" else "any number of classes an image"
    for option in ("classes", "per_class", "corrupted"):
        if resolved.options[option]:
            does = "measures the error of" if option == "corrupted" else "selects"
            raise DataError(f"'{option}' {does} images by class, and {resolved.type} has {has}; remove it")
    for choice in resolved.options["augment"] if task == "segmentation" else ():
        change = slot("augment").resolve(choice)
        if change.component.masks is Augment.masks:
            raise DataError(
                f"augment: {change.type} has no method 'masks' to transform the label masks of {resolved.type}; remove "
                "it, or add the method"
            )


def _check_cuts(resolved: ResolvedChoice) -> None:
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
