"""From a file to canonical weights, and to the model they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from vitlab.errors import OptionError, WeightsError, nearest
from vitlab.geometry import DataInfo
from vitlab.models.contract import Model
from vitlab.models.vit import ViT
from vitlab.weights.adapt import rotated_as_here, without_head
from vitlab.weights.architecture import Architecture, architecture
from vitlab.weights.config import images, stated
from vitlab.weights.convnets import is_convnet, normalization, open_convnet
from vitlab.weights.files import WeightFile, read_file
from vitlab.weights.formats import DeiT, HuggingFace, HuggingFaceMemory, Timm, Torchvision
from vitlab.weights.google import Google
from vitlab.weights.known import IMAGENET, ModelFacts, some
from vitlab.weights.names import Format
from vitlab.weights.trials import Native, Trained, of_a_trial, trained

FORMATS: Mapping[str, Format] = {
    form.name: form for form in (HuggingFaceMemory(), HuggingFace(), Torchvision(), Google(), Timm(), DeiT())
}
"""Format by name, in the order in which a file is held against them."""

HEADER = "vitlab.weights"
"""Where the header of a safetensors file that :mod:`vitlab.weights` wrote says what tensors do not show."""


@dataclass(frozen=True)
class Checkpoint:
    """A file of weights, read and understood: canonical tensors, and all that is known beside them."""

    contents: WeightFile
    form: Format
    state: dict[str, Tensor]
    unknown: tuple[str, ...]  #: keys that the format does not have
    dropped: tuple[str, ...]  #: keys that were left out, each for a reason
    known: ModelFacts
    usual: ModelFacts = ModelFacts()  # noqa: RUF009  #: what to assume where that is silent, by the custom of the format
    notes: tuple[str, ...] = ()  #: what beside the file was not read, in a sentence each
    trained: Trained | None = None  #: the model itself, where a trial of vitlab's has left the file

    @property
    def file(self) -> Path:
        return self.contents.file

    @property
    def opened(self) -> str:
        """A sentence on the wrappers that were opened; empty for none."""
        names = self.contents.opened
        return f"the tensors stand under {' and '.join(repr(name) for name in names)}" if names else ""

    def architecture(self, said: ModelFacts = ModelFacts(), classes: int | None = None) -> Architecture:  # noqa: B008
        """The model these weights belong to; ``said`` and ``classes`` as in :func:`open_model`.

        Raises:
            WeightsError: without the name of the file.
        """
        known = self.known.agreeing(said, "the file")
        if self.trained is not None:
            return self.trained.architecture()
        return architecture(self.state, known, classes, usual=self.usual, title=self.form.title, unknown=self.unknown)


class Opened(NamedTuple):
    """A model with its weights, in evaluation mode on the CPU, and what it sees."""

    model: Model
    info: DataInfo
    mean: tuple[float, ...]  #: per channel, of pixels in [0, 1]
    std: tuple[float, ...]
    notes: tuple[str, ...]  #: what was assumed, opened or left out, in a sentence each


def read(file: Path, form: str | None = None) -> Checkpoint:
    """Read a file of weights in any of :data:`FORMATS`, or that of a trial, whose ``spec.json`` stands beside it.

    Args:
        file: a ``.safetensors``, ``.pth``, ``.pt``, ``.bin`` or ``.npz``.
        form: the format; by default it is recognised.

    Raises:
        WeightsError: one sentence that names the file, and the first keys that are to blame.
    """
    return understood(read_file(file), form)


def understood(contents: WeightFile, form: str | None = None) -> Checkpoint:
    """Understand what stands in a file; as :func:`read`, for content that has been read."""
    file = contents.file
    try:
        if of_a_trial(contents) and form is None:
            mine = trained(contents)
            state = mine.model.to_canonical(mine.model.state_dict())
            return Checkpoint(contents, Native(), state, (), (), mine.known(), trained=mine)
        found = _format_of(contents, form)
        canonical = found.to_canonical(contents.tensors)
        beside = stated(contents.config, contents.preprocessor, canonical.state, str(file.with_name("config.json")))
        known = _of_header(contents.header).or_else(beside.known)
        usual = _of_wrapper(contents, found).or_else(found.shown(contents.tensors)).or_else(found.convention)
        if usual.pool == "cls" and "cls_token" not in canonical.state:
            usual = usual.model_copy(update={"pool": None})
        fixed = ModelFacts(**{name: getattr(usual, name) for name in found.fixed})
        known = known.or_else(fixed)
        state = canonical.state
        if known.position is not None and known.heads is not None:
            state = rotated_as_here(state, known.position, known.heads)
    except WeightsError as error:
        raise WeightsError(f"{file}: {error}") from None
    dropped = (*contents.left, *canonical.dropped)
    return Checkpoint(contents, found, state, canonical.unknown, dropped, known, usual, beside.notes)


def open_model(
    file: Path,
    *,
    form: str | None = None,
    said: ModelFacts = ModelFacts(),  # noqa: B008  # it is frozen
    head: Literal["keep", "new"] = "keep",
    pre_logits: Literal["keep", "drop"] = "keep",
    classes: int | None = None,
    digests: Mapping[str, str] | None = None,
) -> Opened:
    """The model that a file of weights belongs to, built from what its tensors show, with its weights.

    Args:
        file: in any of :data:`FORMATS`; or the weights of a trial, or of a convolutional network of torchvision's or
            DeiT's (:mod:`~vitlab.weights.convnets`), which are opened as they are.
        form: the format; by default it is recognised.
        said: what the caller knows and the file may not say, such as the number of heads.
        head: the head in the file, or a new one, of zeros.
        pre_logits: the hidden layer before the head; it can go only with the head that reads it.
        classes: outputs of a new head; by default as many as the old one had.
        digests: what the file is expected to be; see :func:`vitlab.weights.files.read_file`.

    Raises:
        WeightsError: one sentence that names the file, and the first keys that are missing, unknown or misshapen.
    """
    contents = read_file(file, digests)
    if form is None and head == "keep" and is_convnet(contents.tensors) and not of_a_trial(contents):
        return _convnet(contents, said)
    checkpoint = understood(contents, form)
    if checkpoint.trained is not None:
        mine = checkpoint.trained
        return Opened(mine.model, mine.info, mine.mean, mine.std, ())
    try:
        kept, gone = without_head(checkpoint.state, head, pre_logits)
        if head == "new" and classes is None:
            classes = checkpoint.state["head.weight"].shape[0] if "head.weight" in checkpoint.state else 1
        found = replace(checkpoint, state=kept).architecture(said, classes)
        model = build(found)
        own = model.to_canonical(model.state_dict())
        fresh = {name: torch.zeros_like(value) for name, value in own.items() if head == "new" and name in NEW}
        state = {**fresh, **kept}
        refuse_misfits(own, state, checkpoint.unknown)
        model.load_state_dict(model.from_canonical(state))
    except (WeightsError, OptionError) as error:
        raise WeightsError(f"{file}: {error}") from None
    dropped = (*checkpoint.dropped, *gone)
    notes = [checkpoint.opened, *checkpoint.notes, *(f"assumed: {sentence}" for sentence in found.assumed)]
    notes.append(f"left out: {some(dropped)}" if dropped else "")
    return Opened(model.eval(), found.info, found.mean, found.std, tuple(filter(None, notes)))


def _convnet(contents: WeightFile, said: ModelFacts) -> Opened:
    try:
        beside = images(contents.config, contents.preprocessor, str(contents.file.with_name("config.json")))
        known = beside.agreeing(said, "the file")
        model, info, sized = open_convnet(contents.tensors, known)
        mean, std, custom = normalization(known, info.channels)
    except (WeightsError, OptionError) as error:
        raise WeightsError(f"{contents.file}: {error}") from None
    return Opened(model, info, mean, std, tuple(f"assumed: {sentence}" for sentence in (*sized, *custom)))


def build(found: Architecture) -> ViT:
    """The model of an architecture, with values of no meaning; torch's generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        return ViT(found.info, **cast(Any, found.options))


def mismatches(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """The names that keep ``given`` from being loaded where ``own`` is, by what is wrong with them."""
    return {
        "missing": [name for name in own if name not in given],
        "unknown": [name for name in given if name not in own],
        "of another shape": [name for name in own if name in given and given[name].shape != own[name].shape],
    }


def refuse_misfits(own: Mapping[str, Tensor], given: Mapping[str, Tensor], unknown: tuple[str, ...] = ()) -> None:
    """
    Raises:
        WeightsError: if ``given`` cannot be loaded where ``own`` is, to the last name.
    """
    faults = mismatches(own, given)
    faults["unknown"] = [*unknown, *faults["unknown"]]
    said = [f"{some(names)} {'is' if len(names) == 1 else 'are'} {what}" for what, names in faults.items() if names]
    if said:
        raise WeightsError(f"these are not the weights of a Vision Transformer that vitlab has: {', '.join(said)}")


# -- how it is done ---------------------------------------------------------------------------------------------------

NEW = ("head.weight", "head.bias")  #: canonical names of a head that is new


def _format_of(contents: WeightFile, name: str | None) -> Format:
    names = contents.tensors.keys()
    found = next((form for form in FORMATS.values() if form.recognise(names)), None)
    if name is None:
        if found is None:
            raise WeightsError(f"no format known here ({', '.join(FORMATS)}); its first keys are {some(names)}")
        return found
    if name not in FORMATS:
        raise WeightsError(f"no format called '{name}'.{nearest(name, FORMATS)} Known: {', '.join(FORMATS)}")
    if not FORMATS[name].recognise(names):
        other = f"; it looks like {found.name}" if found else ""
        raise WeightsError(f"this is not of the format {name}{other}; its first keys are {some(names)}")
    return FORMATS[name]


def _of_header(header: Mapping[str, str]) -> ModelFacts:
    if HEADER not in header:
        return ModelFacts()
    try:
        return ModelFacts.model_validate_json(header[HEADER])
    except ValueError:
        raise WeightsError(f"its header says nonsense under {HEADER}") from None


def _of_wrapper(contents: WeightFile, form: Format) -> ModelFacts:
    """DeiT's own checkpoints have timm's names, and stand under 'model'."""
    if form.name == "timm" and contents.opened[:1] == ("model",):
        return ModelFacts(mean=IMAGENET[0], std=IMAGENET[1])
    return ModelFacts()
