"""The slot ``dataset``, its contract, and the options that every data set accepts beside its own.

N images, C channels, H rows, W columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, get_args

import torch
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    WithJsonSchema,
    model_validator,
)
from torch import Tensor

from vitlab.errors import nearest
from vitlab.geometry import DataInfo, Pair
from vitlab.registry import Pick, Slot
from vitlab.spec import Choice
from vitlab.spec.choice import Fraction, Frozen, Portion

if TYPE_CHECKING:
    from vitlab.data.datasets.pictures import Pictures

NormalizationName = Literal["dataset", "half", "imagenet", "unit"]

NORMALIZATIONS = {
    "half": ((0.5,), (0.5,)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "unit": ((0.0,), (1.0,)),
}
"""Mean and standard deviation per channel, of pixels in [0, 1]; a single number applies to all channels."""


def _parse_size(value: Any) -> Any:
    """Return ``(height, width)`` of a size; one number means a square."""
    match value:
        case bool():
            pass
        case int() if value > 0:
            return (value, value)
        case [int() as height, int() as width] if height > 0 and width > 0:
            return (height, width)
    raise ValueError(f"a size is one number of pixels or [height, width], found {value!r}")


_SIDE = {"type": "integer", "exclusiveMinimum": 0}

Size = Annotated[
    Pair,
    BeforeValidator(_parse_size),
    WithJsonSchema({"anyOf": [_SIDE, {"type": "array", "items": _SIDE, "minItems": 2, "maxItems": 2}]}),
]
"""Pixels: one number for a square, or ``[height, width]``."""


class Normalization(Frozen):
    """Mean and standard deviation of each channel, of pixels in [0, 1]; a single number applies to all channels."""

    mean: Annotated[list[float], Field(min_length=1)]
    """One number for each channel, or one for all."""
    std: Annotated[list[PositiveFloat], Field(min_length=1)]
    """One number for each channel, or one for all."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Normalization:
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} numbers and std {len(self.std)}; one each for every channel")
        return self


def _parse_normalization(value: Any) -> Any:
    """Return a name or a Normalization; a pydantic union would report a typing error once for each branch."""
    names = ["dataset", *NORMALIZATIONS]
    if isinstance(value, str) and value in names:
        return value
    if isinstance(value, Mapping):
        lists = {key: [item] if isinstance(item, int | float) else item for key, item in value.items()}
        return Normalization.model_validate(lists)
    if isinstance(value, Normalization):
        return value
    guess = nearest(value, names) if isinstance(value, str) else ""
    raise ValueError(f"found {value!r}; allowed: {', '.join(names)}, or {{mean: [...], std: [...]}}.{guess}")


CorruptionName = Literal[
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
]

CORRUPTIONS: tuple[CorruptionName, ...] = get_args(CorruptionName)

COMPUTED_CORRUPTIONS = tuple(name for name in CORRUPTIONS if name != "frost")
"""Corruptions that vitlab computes; the published frost is a set of photographs."""

MIN_CORRUPTED_SIDE = 8
"""Fewest rows and columns of an image that can be corrupted."""


def require_distinct(value: Sequence[Any]) -> Sequence[Any]:
    """Return a list in which nothing is repeated."""
    if repeated := [item for item in value if value.count(item) > 1]:
        raise ValueError(f"{repeated[0]} is listed twice")
    return value


def require_ascending(value: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return a range whose smaller number stands first."""
    if value[0] > value[1]:
        raise ValueError(f"write the smaller number first; found {list(value)}")
    return value


def _sort_by(allowed: Sequence[Any]) -> AfterValidator:
    """Return a validator that sorts a list in the order of ``allowed``, so that equal lists have equal keys."""
    return AfterValidator(lambda value: tuple(sorted(require_distinct(value), key=allowed.index)))


class Corrupted(Frozen):
    """Corrupted copies of the test split, on which a training is evaluated at its end."""

    corruptions: Annotated[tuple[CorruptionName, ...], Field(min_length=1), _sort_by(CORRUPTIONS)] | None = None
    """Kinds; each is reported as ``test/mce_NAME``, and the mean over them as ``test/mce``.  None: all fifteen of
    published pictures (``corrupted_root``), else the fourteen that are computed: ``frost`` is a set of photographs."""
    severities: Annotated[
        tuple[Annotated[int, Field(ge=1, le=5)], ...], Field(min_length=1), _sort_by((1, 2, 3, 4, 5))
    ] = (1, 2, 3, 4, 5)
    """Severities, from 1 to 5; a kind's error is the mean over them."""
    images: PositiveInt | None = None
    """Number of test images, drawn once and the same for all trials; None: all."""


def _parse_corrupted(value: Any) -> Any:
    """Return the corrupted sets of ``all``, of a list of names or of a mapping; None for none."""
    match value:
        case None | Corrupted():
            return value
        case "all":
            return Corrupted()
        case list() | tuple():
            return Corrupted.model_validate({"corruptions": value})
        case Mapping():
            return Corrupted.model_validate(value)
    raise ValueError(f"found {value!r}; allowed: all, a list of corruptions, or {{corruptions, severities, images}}")


def _reject_boolean(value: Any) -> Any:
    """Return a value that is no boolean, which pydantic would take for 1 or 0."""
    if isinstance(value, bool):
        raise ValueError("found a boolean; 1 or 3 is allowed. YAML reads yes, no, on and off as booleans")
    return value


class DataOptions(Frozen):
    """Options of every data set.

    Applied in this order: ``classes``, ``channels``, ``size``, then the validation split, then ``fraction``, then
    ``per_class``, then ``augment`` on every training batch, then ``normalize``.
    """

    size: Size | None = None
    """Resize once to this, antialiased bilinear; None: as stored."""
    channels: Annotated[Literal[1, 3] | None, BeforeValidator(_reject_boolean)] = None
    """1: ITU-R 601 luma; 3: repeat grey; None: as stored."""
    normalize: Annotated[NormalizationName | Normalization, BeforeValidator(_parse_normalization)] = "dataset"
    """``dataset``: mean and standard deviation of the official training split, after ``channels`` and ``size``."""
    validation: Fraction | None = None
    """Share of the training split held out for validation; None: the data set's default, 0.1 for most."""
    fraction: Portion = 1.0
    """Share of the other training images, nested, stratified."""
    per_class: PositiveInt | None = None
    """At most so many of these per class, nested; None: all."""
    classes: Annotated[list[NonNegativeInt], Field(min_length=2), AfterValidator(require_distinct)] | None = None
    """Only these classes, relabelled 0, 1, ... in the order given; None: all."""
    augment: list[Annotated[Choice | str, Pick("augment")]] = Field([])
    """Augmentations, in this order."""
    corrupted: Annotated[
        Literal["all"] | list[CorruptionName] | Corrupted | None, BeforeValidator(_parse_corrupted)
    ] = None
    """Corrupted test images: ``all`` published kinds, a list of them, or a mapping; None: none."""


def normalization_constants(normalize: str | Normalization) -> tuple[Sequence[float], Sequence[float]]:
    """Return the mean and standard deviation per channel of a normalisation other than ``dataset``."""
    if isinstance(normalize, Normalization):
        return normalize.mean, normalize.std
    return NORMALIZATIONS[normalize]


Split = Literal["train", "test"]
"""The official splits; validation is split off ``train``, see :meth:`Dataset.held_out`."""

SPLITS: tuple[Split, ...] = ("train", "test")


class Images(NamedTuple):
    """One official split, in its official order.

    For segmentation, labels are masks: 0 is the background, and :data:`~vitlab.data.pixels.VOID` marks pixels without
    a label.
    """

    x_NCHW: Tensor  #: uint8
    y_N: Tensor
    """int64, class indices; uint8 (N, H, W) for segmentation; uint8 (N, K) with 1 for each class if there are several
    labels an image."""


class Dataset(ABC):
    """A set of labelled images with an official training and an official test split.

    A subclass defines :meth:`info`, and :meth:`read` or :meth:`pictures`.

    Its keyword-only options come from YAML; vitlab handles the ones in :class:`DataOptions`.
    """

    validation: ClassVar[float] = 0.1  #: default share of the training split to hold out

    @abstractmethod
    def info(self) -> DataInfo:
        """Return the properties of the data as stored, without decoding any image.

        ``identity`` identifies the content: a published checksum or a digest of files; None if the data is not here.
        ``test_sets`` is a digest of what :meth:`corrupted`, :meth:`shifted_sets` and :meth:`reassessed` read, if any.
        """

    def read(self, split: Split) -> Images:
        """Return all images of an official split; by default those of :meth:`pictures`."""
        pictures = self.pictures(split)
        if pictures is None:
            raise NotImplementedError(f"{type(self).__name__} has neither 'read' nor 'pictures'; implement one of them")
        return Images(torch.stack([pictures.image(index) for index in range(len(pictures))]), pictures.y_N)

    def pictures(self, split: Split) -> Pictures | None:
        """Return the split as single pictures if the set may be larger than memory; None to read it at once."""
        return None

    def corrupted(self, kind: CorruptionName, severity: int) -> Pictures | None:
        """Return published pictures of a corruption of the test split; None to compute them."""
        return None

    def shifted_sets(self) -> Mapping[str, Pictures]:
        """Return further test pictures of some of the classes by name, such as drawings of them."""
        return {}

    def reassessed(self) -> Sequence[frozenset[int]] | None:
        """Return the set of right classes of each test image, as of ImageNet-ReaL; None if there are no such sets.

        Images with an empty set are left out of the metric ``real_accuracy``.
        """
        return None

    def groups(self) -> Tensor | None:
        """Return the group of each training image, int64 (N,); None if images are independent.

        Images of one group, such as one patient's, are never split between training and validation.
        """
        return None

    def held_out(self) -> Tensor | None:
        """Return the indices of the authors' validation images, int64 (M,); None if the authors define none.

        These are the validation split, for every seed, unless the study sets ``validation``.
        """
        return None

    def notes(self) -> Sequence[str]:
        """Return sentences about the data for the plan and the report, such as what was left out."""
        return ()

    def missing(self) -> str | None:
        """Return a sentence that says why :meth:`read` would fail; None if no reason is known without reading."""
        return None


dataset = Slot("dataset", Dataset, shared=DataOptions)  # type: ignore[type-abstract]
