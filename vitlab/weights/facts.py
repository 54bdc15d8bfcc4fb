"""Facts about a model that the shapes of its tensors do not show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from vitlab.components.base import Gelu
from vitlab.errors import WeightsError
from vitlab.geometry import Pair
from vitlab.spec.choice import Frozen

Side = Annotated[int, Field(gt=0)]
Values = tuple[float, ...]
"""One value per channel."""

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation of torchvision's and DeiT's normalisation."""
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
"""Mean and standard deviation of OpenAI's CLIP."""
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
"""Mean and standard deviation of Google's checkpoints and of timm's Vision Transformers."""

MAX_NAMES = 5  #: in a sentence


EncodingType = Literal["none", "rope2d", "rope2d_mixed", "sincos2d"]


class Encoding(Frozen):
    """A position encoding that no tensor shows, and the layout of the channels that it rotates."""

    type: EncodingType = "none"
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
    gelu: Gelu | None = None  #: the approximation the MLPs compute
    position: Encoding | None = None  #: beside learned rows
    mean: Values | None = None  #: of pixels in [0, 1]
    std: Values | None = None
    labels: tuple[str, ...] | None = None  #: names of the classes

    def known(self) -> dict[str, Any]:
        """Return the facts that are known, by name."""
        return {name: value for name, value in self if value is not None}

    def or_else(self, other: ModelFacts) -> ModelFacts:
        """Return these facts, and the facts in ``other`` where they are unknown."""
        return other.model_copy(update=self.known())

    def merge(self, other: ModelFacts) -> ModelFacts:
        """Return the facts that a caller states, with these, of a file, for the ones that it does not state.

        Raises:
            WeightsError: if the two contradict each other.
        """
        for name in ("heads", "image", "grid"):
            own, theirs = getattr(self, name), getattr(other, name)
            if None not in (own, theirs) and own != theirs:
                raise WeightsError(
                    f"the file says {name} {plain(own)}, and {plain(theirs)} was given; give {plain(own)}"
                )
        return other.or_else(self)


def normalisation(
    known: ModelFacts, usual: ModelFacts, title: str, channels: int
) -> tuple[Values, Values, tuple[str, ...]]:
    """Return mean and standard deviation per channel, and a sentence if they are assumed.

    The usual values of RGB do not apply to other numbers of channels.
    """
    if known.mean is not None and known.std is not None:
        sizes = {len(known.mean), len(known.std)}
        if sizes == {channels}:
            return known.mean, known.std, ()
        if sizes == {1}:
            return known.mean * channels, known.std * channels, ()
    if known.mean is None and usual.mean is not None and usual.std is not None and len(usual.mean) == channels:
        whose = "DeiT" if usual.mean == IMAGENET[0] and title not in ("DeiT", "torchvision") else title
        mean, std = (" ".join(f"{value:g}" for value in values) for values in (usual.mean, usual.std))
        sentence = f"pixels normalised by mean {mean} and std {std}, as is the custom of {whose}"
        return usual.mean, usual.std, (sentence,)
    half = (0.5,) * channels
    return half, half, (f"pixels of {channels} channels normalised by mean 0.5 and std 0.5",)


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
