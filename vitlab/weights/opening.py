"""Reading of weight files: canonical tensors, and the model they belong to.

Weights that torchvision publishes are opened by their names, after a download into torch's cache.  Published files
never change, and their addresses contain the beginning of their digests.  Every file is compared with it before it is
opened, even one from the cache.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast
from urllib.parse import urlparse

import torch
from torch import Tensor

from vitlab.data.torchvision_import import torchvision
from vitlab.errors import OptionError, WeightsError, nearest
from vitlab.geometry import DataInfo
from vitlab.models.contract import Model
from vitlab.models.vit import ViT
from vitlab.weights.architecture import NO_HEAD, Architecture, architecture
from vitlab.weights.config import read_config, read_image_config
from vitlab.weights.convnets import is_convnet, normalization, open_convnet
from vitlab.weights.files import WeightFile, read_file
from vitlab.weights.formats import DeiTFormat, HuggingFaceFormat, HuggingFaceMemoryFormat, TimmFormat, TorchvisionFormat
from vitlab.weights.from_timm import build_timm, from_timm, names_timm
from vitlab.weights.google import GoogleFormat
from vitlab.weights.known import IMAGENET, AssumedFacts, ModelFacts, some
from vitlab.weights.names import Format
from vitlab.weights.transfer import drop_head, to_native_rotation
from vitlab.weights.trials import Native, TrialModel, is_trial_file, load_trial

FORMATS: Mapping[str, Format] = {
    form.name: form
    for form in (
        HuggingFaceMemoryFormat(),
        HuggingFaceFormat(),
        TorchvisionFormat(),
        GoogleFormat(),
        TimmFormat(),
        DeiTFormat(),
    )
}
"""Format by name, in the order in which they are tried."""

HEADER = "vitlab.weights"
"""Key of the facts that tensors do not show, in the header of safetensors files that this package writes."""


@dataclass(frozen=True)
class Checkpoint:
    """A file of weights in canonical form, and all known facts about its model."""

    contents: WeightFile
    form: Format
    state: dict[str, Tensor]
    unknown: tuple[str, ...]  #: keys that the format does not have
    dropped: tuple[str, ...]  #: keys that are not part of the model
    known: ModelFacts
    defaults: ModelFacts = ModelFacts()  # noqa: RUF009  #: defaults by the convention of the format
    notes: tuple[str, ...] = ()  #: one sentence for each config file that was not read
    trial: TrialModel | None = None  #: the model, if the file is that of a trial of vitlab
    whole: Architecture | None = None  #: the architecture, if timm has built the model

    @property
    def file(self) -> Path:
        """Path of the weight file."""
        return self.contents.file

    @property
    def wrapper_note(self) -> str:
        """A sentence on the keys that wrap the tensors; empty if there are none."""
        names = self.contents.wrappers
        return f"the tensors are under the key {' and '.join(repr(name) for name in names)}" if names else ""

    def architecture(self, facts: ModelFacts = ModelFacts(), classes: int | None = None) -> Architecture:  # noqa: B008
        """Return the architecture of these weights; ``facts`` and ``classes`` as in :func:`open_model`.

        Raises:
            WeightsError: without the name of the file.
        """
        merged = self.known.merge(facts, "the file")
        if self.trial is not None:
            return self.trial.architecture()
        if self.whole is not None:
            if "head.weight" not in self.state and classes is None:
                raise WeightsError(NO_HEAD)
            outputs = self.whole.info.classes if classes is None else classes
            labels = self.whole.info.labels if outputs == self.whole.info.classes else ()
            return replace(self.whole, info=replace(self.whole.info, classes=outputs, labels=labels))
        return architecture(
            self.state, merged, classes, defaults=self.defaults, title=self.form.title, unknown=self.unknown
        )


class OpenedModel(NamedTuple):
    """A model with its weights, in evaluation mode on the CPU, and its data."""

    model: Model
    info: DataInfo
    mean: tuple[float, ...]  #: per channel, of pixels in [0, 1]
    std: tuple[float, ...]
    notes: tuple[str, ...]  #: one sentence for each assumption, wrapper and omission


def open_checkpoint(file: Path, form: str | None = None) -> Checkpoint:
    """Read a file of weights in any of :data:`FORMATS`, or that of a trial, whose ``spec.json`` stands beside it.

    Args:
        file: a ``.safetensors``, ``.pth``, ``.pt``, ``.bin`` or ``.npz``.
        form: the format; by default it is recognised.

    Raises:
        WeightsError: one sentence that names the file, and the first keys that are to blame.
    """
    return interpret(read_file(file), form)


def interpret(contents: WeightFile, form: str | None = None) -> Checkpoint:
    """Return the checkpoint in the contents of a file; see :func:`open_checkpoint`."""
    file = contents.file
    try:
        if is_trial_file(contents) and form is None:
            trial = load_trial(contents)
            state = trial.model.to_canonical(trial.model.state_dict())
            return Checkpoint(contents, Native(), state, (), (), trial.facts(), trial=trial)
        if names_timm(contents.config) and form in (None, "timm", "deit"):
            return _built_by_timm(contents)
        fmt = _format_of(contents, form)
        canonical = fmt.to_canonical(contents.tensors)
        config = read_config(
            contents.config, contents.preprocessor, canonical.state, str(file.with_name("config.json"))
        )
        facts = _header_facts(contents.header).or_else(config.facts)
        defaults = _wrapper_facts(contents, fmt).or_else(fmt.infer_facts(contents.tensors)).or_else(fmt.convention)
        if defaults.pool == "cls" and "cls_token" not in canonical.state:
            defaults = defaults.model_copy(update={"pool": None})
        fixed = ModelFacts(**{name: getattr(defaults, name) for name in fmt.fixed})
        facts = facts.or_else(fixed)
        state = canonical.state
        if facts.position is not None and facts.heads is not None:
            state = to_native_rotation(state, facts.position, facts.heads)
    except WeightsError as error:
        raise WeightsError(f"{file}: {error}") from None
    dropped = (*contents.other_keys, *canonical.dropped)
    return Checkpoint(contents, fmt, state, canonical.unknown, dropped, facts, defaults, config.notes)


def _built_by_timm(contents: WeightFile) -> Checkpoint:
    """Return a checkpoint whose ``config.json`` names an architecture of timm."""
    where = str(contents.file.with_name("config.json"))
    vit = from_timm(build_timm(contents.config, contents.tensors, where))
    config = read_config(contents.config, contents.preprocessor, vit.state, where)
    facts = AssumedFacts(config.facts, FORMATS["timm"].convention, "timm")
    mean, std = facts.normalisation(vit.channels)
    classes = vit.state["head.weight"].shape[0] if "head.weight" in vit.state else 1
    labels = config.facts.labels if config.facts.labels and len(config.facts.labels) == classes else ()
    geometry = ViT.anatomy(DataInfo(image=vit.image, channels=vit.channels, classes=classes), vit.options).geometry
    whole = Architecture(
        options=vit.options,
        info=DataInfo(image=vit.image, channels=vit.channels, classes=classes, labels=labels),
        heads=vit.options["heads"],
        grid=geometry.grid,
        prefix=geometry.prefix,
        prefix_rows=vit.prefix_rows,
        mean=mean,
        std=std,
        assumed=tuple(facts.assumed),
    )
    known = whole.facts()
    return Checkpoint(
        contents, FORMATS["timm"], vit.state, (), contents.other_keys, known, notes=config.notes, whole=whole
    )


def open_model(
    file: Path,
    *,
    form: str | None = None,
    facts: ModelFacts = ModelFacts(),  # noqa: B008  # it is frozen
    head: Literal["keep", "new"] = "keep",
    pre_logits: Literal["keep", "drop"] = "keep",
    classes: int | None = None,
    digests: Mapping[str, str] | None = None,
) -> OpenedModel:
    """Build the model that a file of weights belongs to, and load them.

    Args:
        file: in any of :data:`FORMATS`; or the weights of a trial, or of a convolutional network of torchvision or
            DeiT (:mod:`~vitlab.weights.convnets`), which are not converted.
        form: the format; by default it is recognised.
        facts: facts that the file may not state, such as the number of heads.
        head: the head in the file, or a new one, of zeros.
        pre_logits: the hidden layer before the head; it can be dropped only with the head that reads it.
        classes: outputs of a new head; by default those of the old one.
        digests: what the file is expected to be; see :func:`vitlab.weights.files.read_file`.

    Raises:
        WeightsError: one sentence that names the file, and the first keys that are missing, unknown or misshapen.
    """
    contents = read_file(file, digests)
    if form is None and head == "keep" and is_convnet(contents.tensors) and not is_trial_file(contents):
        return _convnet(contents, facts)
    checkpoint = interpret(contents, form)
    if checkpoint.trial is not None:
        trial = checkpoint.trial
        return OpenedModel(trial.model, trial.info, trial.mean, trial.std, ())
    try:
        remaining, removed = drop_head(checkpoint.state, head, pre_logits)
        if head == "new" and classes is None:
            classes = checkpoint.state["head.weight"].shape[0] if "head.weight" in checkpoint.state else 1
        arch = replace(checkpoint, state=remaining).architecture(facts, classes)
        model = build(arch)
        own = model.to_canonical(model.state_dict())
        fresh = {name: torch.zeros_like(value) for name, value in own.items() if head == "new" and name in NEW_HEAD}
        state = {**fresh, **remaining}
        require_match(own, state, checkpoint.unknown)
        model.load_state_dict(model.from_canonical(state))
    except (WeightsError, OptionError) as error:
        raise WeightsError(f"{file}: {error}") from None
    dropped = (*checkpoint.dropped, *removed)
    notes = [checkpoint.wrapper_note, *checkpoint.notes, *(f"assumed: {sentence}" for sentence in arch.assumed)]
    notes.append(f"left out: {some(dropped)}" if dropped else "")
    return OpenedModel(model.eval(), arch.info, arch.mean, arch.std, tuple(filter(None, notes)))


def _convnet(contents: WeightFile, stated: ModelFacts) -> OpenedModel:
    try:
        config = read_image_config(contents.config, contents.preprocessor, str(contents.file.with_name("config.json")))
        facts = config.merge(stated, "the file")
        model, info, sized = open_convnet(contents.tensors, facts)
        mean, std, custom = normalization(facts, info.channels)
    except (WeightsError, OptionError) as error:
        raise WeightsError(f"{contents.file}: {error}") from None
    return OpenedModel(model, info, mean, std, tuple(f"assumed: {sentence}" for sentence in (*sized, *custom)))


def build(arch: Architecture) -> ViT:
    """Build the model of an architecture, with arbitrary values; torch's generator is not advanced."""
    with torch.random.fork_rng(devices=[]):
        return ViT(arch.info, **cast(Any, arch.options))


def mismatches(own: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return the names of tensors that ``other`` lacks, has too many, or has in another shape than ``own``, by kind."""
    return {
        "missing": [name for name in own if name not in other],
        "unknown": [name for name in other if name not in own],
        "of another shape": [name for name in own if name in other and other[name].shape != own[name].shape],
    }


def require_match(own: Mapping[str, Tensor], other: Mapping[str, Tensor], unknown: tuple[str, ...] = ()) -> None:
    """Check that the state ``other`` has the names and shapes of ``own``.

    Raises:
        WeightsError: if it cannot.
    """
    faults = mismatches(own, other)
    faults["unknown"] = [*unknown, *faults["unknown"]]
    message = [f"{some(names)} {'is' if len(names) == 1 else 'are'} {what}" for what, names in faults.items() if names]
    if message:
        raise WeightsError(f"these are not the weights of a supported Vision Transformer: {', '.join(message)}")


NEW_HEAD = ("head.weight", "head.bias")  #: canonical names of a new head's tensors


def _format_of(contents: WeightFile, name: str | None) -> Format:
    names = contents.tensors.keys()
    recognised = next((form for form in FORMATS.values() if form.recognise(names)), None)
    if name is None:
        if recognised is None:
            raise WeightsError(f"unknown format; supported: {', '.join(FORMATS)}. Its first keys are {some(names)}.")
        return recognised
    if name not in FORMATS:
        raise WeightsError(f"no format called '{name}'.{nearest(name, FORMATS)} Allowed: {', '.join(FORMATS)}")
    if not FORMATS[name].recognise(names):
        other = f"; it looks like {recognised.name}" if recognised else ""
        raise WeightsError(f"the file is not in the format {name}{other}; its first keys are {some(names)}")
    return FORMATS[name]


def _header_facts(header: Mapping[str, str]) -> ModelFacts:
    if HEADER not in header:
        return ModelFacts()
    try:
        return ModelFacts.model_validate_json(header[HEADER])
    except ValueError:
        raise WeightsError(f"its header is damaged under the key {HEADER}; convert the file again") from None


def _wrapper_facts(contents: WeightFile, form: Format) -> ModelFacts:
    """Return DeiT's normalisation for its own checkpoints: timm's names, wrapped in 'model'."""
    if form.name == "timm" and contents.wrappers[:1] == ("model",):
        return ModelFacts(mean=IMAGENET[0], std=IMAGENET[1])
    return ModelFacts()


def open_pretrained(name: str, planned: str | None = None) -> OpenedModel:
    """Open weights that torchvision publishes, after downloading them into torch's cache if they are not there.

    Args:
        name: as ``torchvision.models.get_weight`` takes it: ``RegNet_Y_16GF_Weights.IMAGENET1K_V2``.
        planned: the beginning of their SHA-256 in the plan, as :func:`digest_of` returned it there.

    Raises:
        WeightsError: if there are none of this name, they cannot be downloaded, differ from the published or
            planned ones, or are those of an unsupported network.
    """
    weights = _published_weights(name)
    digest = digest_of(name)
    if planned is not None and digest != planned:
        raise WeightsError(
            f"{name}: the installed torchvision publishes other weights (SHA-256 {digest}...) than the plan names "
            f"({planned}...). Install the version of torchvision that the study was planned with, or plan it again."
        )
    file = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlparse(weights.url).path).name
    if not file.is_file():
        try:
            weights.get_state_dict(progress=False, check_hash=True, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError) as error:
            raise WeightsError(f"{name} could not be fetched; put {weights.url} at {file} by hand: {error}") from None
    sees = weights.transforms()
    side = sees.crop_size[0]
    facts = ModelFacts(
        image=(side, side), mean=tuple(sees.mean), std=tuple(sees.std), labels=tuple(weights.meta["categories"])
    )
    return open_model(file, facts=facts, digests=None if digest is None else {file.name: digest})


def digest_of(name: str) -> str | None:
    """Return the beginning of the SHA-256 of published weights from their address; None if it has none.

    Raises:
        WeightsError: if there are none of this name.
    """
    match = _DIGEST.search(Path(urlparse(_published_weights(name).url).path).name)
    return match[1] if match else None


_DIGEST = re.compile(r"-([0-9a-f]{8,64})\.")
"""The beginning of a digest in a file name, in torch.hub's convention."""


@cache
def _published_weights(name: str) -> Any:
    models: Any = torchvision("torchvision.models")
    try:
        return models.get_weight(name)
    except (ValueError, AttributeError, KeyError):
        names = [str(each) for model in models.list_models(module=models) for each in models.get_model_weights(model)]
        raise WeightsError(f"torchvision publishes no weights called '{name}'.{nearest(name, names)}") from None
