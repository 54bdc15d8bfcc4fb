"""Facts about a model that the shapes of its tensors do not show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from vitlab.errors import WeightsError
from vitlab.geometry import Pair
from vitlab.spec.choice import Frozen

Side = Annotated[int, Field(gt=0)]

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation of torchvision's and DeiT's normalisation."""
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
"""Mean and standard deviation of Google's checkpoints and of timm's Vision Transformers."""

MAX_NAMES = 5  #: in a sentence


class Encoding(Frozen):
    """A position encoding that no tensor shows, and the layout of the channels that it rotates."""

    type: Literal["none", "rope2d", "rope2d_mixed", "sincos2d"]
    options: Mapping[str, Any] = {}  #: of the position encoding
    axes: Literal["xy", "ij"] = "xy"  #: whether the first half of the channel pairs turns with the column or the row
    pairs: Literal["interleaved", "halves"] = "interleaved"  #: channels 2i and 2i + 1, or i and i + K/2


class ModelFacts(Frozen):
    """Facts about a model; None for those that are unknown."""

    heads: Side | None = None
    image: tuple[Side, Side] | None = None  #: pixels, height and width
    grid: tuple[Side, Side] | None = None  #: patches, rows and columns
    prefix_rows: Literal["own", "none"] | None = None  #: whether tokens before the patches have rows of positions
    pool: Literal["cls", "gap", "map", "max", "avgmax", "prr"] | None = None
    norm: Literal["layernorm", "rmsnorm"] | None = None
    eps: Annotated[float, Field(gt=0)] | None = None  #: of the norms
    gelu: Literal["none", "tanh"] | None = None  #: the approximation the MLPs compute
    blocks: Literal["pre_norm"] | None = None  #: norms before attention and MLP
    position: Encoding | None = None  #: beside learned rows
    pre_logits: Literal["tanh"] | None = None  #: activation of the hidden layer before the head
    mean: tuple[float, ...] | None = None  #: per channel, of pixels in [0, 1]
    std: tuple[float, ...] | None = None
    labels: tuple[str, ...] | None = None  #: names of the classes

    def or_else(self, other: ModelFacts) -> ModelFacts:
        """Return these facts, with those of ``other`` for the unknown ones."""
        values = {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}
        return other.model_copy(update=values)

    def merge(self, other: ModelFacts, place: str) -> ModelFacts:
        """Return the facts of a caller, with these for the ones it does not state.

        Args:
            other: the caller's facts.
            place: the source of these facts, for the error.

        Raises:
            WeightsError: if the two contradict each other.
        """
        for name in ("heads", "image", "grid"):
            own, theirs = getattr(self, name), getattr(other, name)
            if None not in (own, theirs) and own != theirs:
                raise WeightsError(
                    f"{place} says {name} {plain(own)}, and {plain(theirs)} was given; give {plain(own)}"
                )
        return other.or_else(self)


@dataclass
class AssumedFacts:
    """Known facts of a model, defaults for the others, and a sentence for each default that was used."""

    known: ModelFacts
    defaults: ModelFacts
    title: str
    assumed: list[str] = field(default_factory=list)

    def of(self, name: str, sentence: Callable[[Any], str]) -> Any:
        """Return the fact ``name``; a default is recorded as an assumption, in the words of ``sentence``."""
        value = getattr(self.known, name)
        if value is None:
            value = getattr(self.defaults, name)
            if value is not None:
                self.assumed.append(sentence(value))
        return value

    def normalisation(self, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and standard deviation per channel; defaults of RGB do not apply to other numbers of channels."""
        mean, std = self.known.mean, self.known.std
        if mean is not None and std is not None:
            if len(mean) == len(std) == channels:
                return mean, std
            if len(mean) == len(std) == 1:
                return mean * channels, std * channels
        mean, std = self.defaults.mean, self.defaults.std
        if self.known.mean is None and mean is not None and std is not None and len(mean) == len(std) == channels:
            whose = "DeiT" if mean == IMAGENET[0] and self.title not in ("DeiT", "torchvision") else self.title
            numbers = (" ".join(f"{value:g}" for value in values) for values in (mean, std))
            self.assumed.append(
                "pixels normalised by mean {} and std {}, as is the custom of {}".format(*numbers, whose)
            )
            return mean, std
        half = HALF[0][:1] * channels
        self.assumed.append(f"pixels of {channels} channels normalised by mean 0.5 and std 0.5")
        return half, half


ORIGINAL_VIT = ModelFacts(pool="cls", norm="layernorm", blocks="pre_norm", pre_logits="tanh")
"""What Google's code, torchvision and transformers share, unless a file states otherwise (arXiv:2010.11929)."""


def some(names: Iterable[str]) -> str:
    """Return the first of ``names``, and the number of the others."""
    listed = list(names)
    more = f" and {len(listed) - MAX_NAMES} more" if len(listed) > MAX_NAMES else ""
    return ", ".join(listed[:MAX_NAMES]) + more


def plain(value: Any) -> str:
    """Return a value as text; the sides of a pair are separated by ``x``."""
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def requested_grid(image: Pair | None, grid: Pair | None, step: Pair) -> Pair | None:
    """Return the grid of patches of an image size, or the grid that is given; None if neither is given.

    Args:
        image: pixels, height and width.
        grid: rows and columns of patches.
        step: pixels of a patch.

    Raises:
        WeightsError: if patches do not divide the image, or the two contradict each other.
    """
    if image is None:
        return grid
    if image[0] % step[0] or image[1] % step[1]:
        raise WeightsError(
            f"an image of {plain(image)} pixels is not a multiple of the patch size {plain(step)}; give a size that is"
        )
    requested = (image[0] // step[0], image[1] // step[1])
    if grid not in (None, requested):
        raise WeightsError(
            f"images of {plain(image)} have a grid of {plain(requested)}, not of {plain(grid)}; give one of the two"
        )
    return requested
