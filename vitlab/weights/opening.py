"""Reading of weight files: canonical tensors, and the model they belong to.

Weights that torchvision publishes are opened by their names, after a download into torch's cache.  Published files
never change, and their addresses contain the beginning of their digests.  Every file is compared with it before it is
opened, even one from the cache.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlparse

import torch

from vitlab.data.torchvision_import import torchvision
from vitlab.errors import WeightsError, list_some, nearest
from vitlab.geometry import DataInfo
from vitlab.models.contract import Model, NewState, State
from vitlab.models.convnet import RegNetY16GF, ResNet8, ResNet18, ResNet50
from vitlab.models.trained import HEADER as TRIAL
from vitlab.models.trained import build_trained_model, naming_file_in_errors
from vitlab.models.vit import ViT
from vitlab.weights.architecture import IMAGENET, Architecture, Inference, ModelFacts, Values, choose_normalisation
from vitlab.weights.files import AVERAGES, WeightFile, read_file
from vitlab.weights.formats import (
    Format,
    GoogleFormat,
    TimmFormat,
    TorchvisionFormat,
    parse_table,
    rename_to_canonical,
)
from vitlab.weights.from_timm import from_timm, load_timm_model, names_timm_architecture
from vitlab.weights.hub import fetch, read_facts_of_configs, timm_weights_repository
from vitlab.weights.hugging_face import HuggingFaceFormat, detect_family
from vitlab.weights.transfer import (
    LAST_LAYERS,
    describe_mismatches,
    drop_head,
    find_mismatches,
    to_native_rotation,
)

HEADER = "vitlab.weights"
"""Key of the facts that tensors do not show, in the header of safetensors files that this package writes."""

FORMATS: Mapping[str, Format] = {
    form.name: form
    for form in (
        HuggingFaceFormat(),
        TorchvisionFormat(),
        GoogleFormat(),
        TimmFormat(),
    )
}
"""Format by name, in the order in which they are tried."""


@dataclass(frozen=True)
class Checkpoint:
    """A file of weights in canonical form, and all known facts about its model."""

    contents: WeightFile
    form: Format
    state: NewState
    facts: ModelFacts
    usual: ModelFacts = ModelFacts()  # noqa: RUF009  #: by the convention of the format
    unknown: tuple[str, ...] = ()  #: keys that the format does not have
    dropped: tuple[str, ...] = ()  #: keys that are not part of the model
    unread: tuple[str, ...] = ()  #: one sentence for each part of a config file that was not read
    whole: Architecture | None = None  #: the architecture of a trial's model, or of one that timm has built

    @property
    def wrapper_note(self) -> str:
        """A sentence on the keys that wrap the tensors; empty if there are none."""
        names = self.contents.wrappers
        note = f"the tensors are under the key {' and '.join(map(repr, names))}" if names else ""
        for name in set(AVERAGES).intersection(self.contents.other_keys):
            note += f"; the averaged weights under '{name}' were not read: save them as a file of their own to use them"
        return note

    def notes(self, model: Architecture, removed: tuple[str, ...]) -> tuple[str, ...]:
        """Return one sentence for each wrapper, assumption and omission."""
        left_out = (*self.dropped, *removed)
        omission = f"left out: {list_some(left_out)}" if left_out else ""
        notes = [self.wrapper_note, *self.unread, *(f"assumed: {sentence}" for sentence in model.assumed), omission]
        return tuple(filter(None, notes))

    def architecture(self, facts: ModelFacts) -> Architecture:
        """Return the architecture of these weights; a head that is not among them has one output."""
        merged, whole = self.facts.with_stated_facts(facts), self.whole
        if whole is None:
            return Inference(self.state, merged, self.usual, self.form.title, self.unknown).architecture()
        classes = len(self.state.get("head.weight", [0]))
        same = classes == whole.info.classes
        return whole if same else replace(whole, info=replace(whole.info, classes=classes, labels=()))


class OpenedModel(NamedTuple):
    """A model with its weights, in evaluation mode on the CPU, and its data."""

    model: Model
    info: DataInfo
    mean: Values  #: of pixels in [0, 1]
    std: Values
    notes: tuple[str, ...]  #: one sentence for each assumption, wrapper and omission


def open_checkpoint(file: Path, format_name: str | None) -> Checkpoint:
    """Read a file of weights in any of :data:`FORMATS`, or a trial's file, whose ``spec.json`` stands beside it.

    Raises:
        WeightsError: one sentence that names the file, and the first keys that are to blame.
    """
    contents = read_file(file)
    with naming_file_in_errors(file):
        return checkpoint_from_contents(contents, format_name)


def checkpoint_from_contents(contents: WeightFile, format_name: str | None = None) -> Checkpoint:
    """Return the checkpoint in the contents of a file; errors do not name the file."""
    if TRIAL in contents.header and format_name is None:
        model, whole = _build_trial_model(contents)
        if not isinstance(model, ViT):
            raise WeightsError(
                f"only a ViT can be converted to other formats; this is a {type(model).__name__}. Keep its own file."
            )
        return Checkpoint(contents, Format(), model.to_canonical(model.state_dict()), whole.facts(), whole=whole)
    if names_timm_architecture(contents.config) and format_name in (None, "timm"):
        return _checkpoint_from_timm(contents)
    fmt = _choose_format(contents, format_name)
    canonical = fmt.to_canonical(contents.tensors)
    config, unread = read_facts_of_configs(contents, canonical.state)
    fixed, usual = fmt.infer_facts_and_defaults(contents.tensors)
    try:
        facts = ModelFacts.model_validate_json(contents.header.get(HEADER, "{}"))
    except ValueError:
        raise WeightsError(f"its header is damaged under the key {HEADER}; convert the file again") from None
    facts = facts.with_defaults(config).with_defaults(fixed)
    if fmt.name == "timm" and contents.wrappers[:1] == ("model",):  # DeiT's own checkpoints
        usual = IMAGENET.with_defaults(usual)
    dropped, state = (*contents.other_keys, *canonical.dropped), canonical.state
    if facts.position is not None and facts.heads is not None:
        state = to_native_rotation(state, facts.position, facts.heads)
    return Checkpoint(contents, fmt, state, facts, usual, canonical.unknown, dropped, tuple(unread))


def _checkpoint_from_timm(contents: WeightFile) -> Checkpoint:
    """Return a checkpoint whose ``config.json`` names an architecture of timm."""
    module = load_timm_model(contents)
    options, state = from_timm(module)
    facts, unread = read_facts_of_configs(contents, state)
    channels, form = module.in_chans, FORMATS["timm"]
    mean, std, assumed = choose_normalisation(facts, form.convention, form.title, channels)
    classes = len(state["head.weight"]) if "head.weight" in state else 1
    labels = facts.labels if facts.labels and len(facts.labels) == classes else ()
    info = DataInfo(image=tuple(module.patch_embed.img_size), channels=channels, classes=classes, labels=labels)
    whole = Architecture(options, info, mean, std, assumed)
    return Checkpoint(
        contents, form, state, whole.facts(), dropped=contents.other_keys, unread=tuple(unread), whole=whole
    )


def _build_trial_model(contents: WeightFile) -> tuple[Model, Architecture]:
    """Return the model in a trial's file, in evaluation mode on the CPU, and its options and data."""
    with torch.random.fork_rng(devices=[]):
        model, choice, sees = build_trained_model(contents.file, contents.tensors, contents.header)
    options = {name: value for name, value in choice.plain().items() if name != "type"}
    return model, Architecture(options, sees.info, sees.mean, sees.std)


def open_model(
    file: Path,
    *,
    facts: ModelFacts = ModelFacts(),  # noqa: B008  # it is frozen
    head: Literal["keep", "new"] = "keep",
    digests: Mapping[str, str] | None = None,
) -> OpenedModel:
    """Build the model that a file of weights belongs to, and load them.

    Args:
        file: in any of :data:`FORMATS`; or the weights of a trial, or of a convolutional network of torchvision or
            DeiT (:func:`_open_convnet`), which are not converted.
        facts: facts that the file may not state, such as the number of heads.
        head: the head in the file, or a new one, of zeros.
        digests: what the file is expected to be; see :func:`vitlab.weights.files.read_file`.

    Raises:
        WeightsError: one sentence that names the file, and the first keys that are missing, unknown or misshapen.
    """
    contents = read_file(file, digests)
    with naming_file_in_errors(file):
        if TRIAL in contents.header:
            trial_model, trial = _build_trial_model(contents)
            return OpenedModel(trial_model, trial.info, trial.mean, trial.std, ())
        if head == "keep" and any(stem <= contents.tensors.keys() for stem in STEMS):
            return _open_convnet(contents.tensors, read_facts_of_configs(contents, {})[0].with_stated_facts(facts))
        checkpoint = checkpoint_from_contents(contents)
        state, removed = drop_head(checkpoint.state) if head == "new" else (checkpoint.state, ())
        if head == "keep" and "head.weight" not in state:
            raise WeightsError(
                "these weights have no head (head.weight); use weights with one, or start a training from them with "
                "init_from.head: new"
            )
        arch = replace(checkpoint, state=state).architecture(facts)
        model = build_from_canonical(arch, state, checkpoint.unknown)
    return OpenedModel(model.eval(), arch.info, arch.mean, arch.std, checkpoint.notes(arch, removed))


def build_from_canonical(
    arch: Architecture,
    state: State,
    unknown: tuple[str, ...],
    dtype: torch.dtype = torch.float32,
) -> ViT:
    """Return the model of an architecture with canonical weights; a head that is not among them has zeros."""
    model = arch.build().to(dtype)
    own = model.to_canonical(model.state_dict())
    complete = dict(state)
    if "head.weight" not in state:
        complete |= {name: torch.zeros_like(value) for name, value in own.items() if name.startswith(LAST_LAYERS)}
    require_same_tensors(own, complete, unknown)
    model.load_state_dict(model.from_canonical(complete))
    return model


def require_same_tensors(own: State, state: State, unknown: tuple[str, ...]) -> None:
    """Refuse a state that does not have the names and shapes of ``own``."""
    if faults := find_mismatches(own, state, unknown):
        raise WeightsError(
            f"these are not the weights of a supported Vision Transformer: {describe_mismatches(faults)}"
        )


def _choose_format(contents: WeightFile, name: str | None) -> Format:
    names, kind = contents.tensors.keys(), detect_family(contents.config, str(contents.file.with_name("config.json")))
    if kind and name in (None, "hf"):
        return HuggingFaceFormat(kind)
    recognised = next((form for form in FORMATS.values() if form.recognise(names)), None)
    if name is None:
        if recognised is None:
            raise WeightsError(
                f"unknown format; supported: {', '.join(FORMATS)}. Its first keys are {list_some(names)}."
            )
        return recognised
    form = FORMATS[name]
    if not form.recognise(names):
        other = f"; it looks like {recognised.name}" if recognised else ""
        raise WeightsError(f"the file is not in the format {name}{other}; its first keys are {list_some(names)}")
    return form


# -- convolutional networks of torchvision, and DeiT's teacher, timm's RegNet -----------------------------------------

RESNETS = (ResNet8, ResNet18, ResNet50)

SIZE = 224
"""Default image side, in pixels, of networks with the stem of ImageNet."""

STEMS = (
    {"conv1.weight", "layer1.0.conv1.weight"},
    {"stem.0.weight"},
    {"stem.conv.weight", "s1.b1.conv1.conv.weight"},
)
"""Names that only ResNets, torchvision's RegNets and timm's RegNets have."""

_TIMM_REGNET = parse_table("""
stem.0.{p}                                                      stem.conv.{p}
stem.1.{p}                                                      stem.bn.{p}
stem.1.running_mean                                             stem.bn.running_mean
stem.1.running_var                                              stem.bn.running_var
stem.1.num_batches_tracked                                      stem.bn.num_batches_tracked
trunk_output.block{i1}.block{i1}-{u}.f.a.0.{p}                  s{i1}.b{u1}.conv1.conv.{p}
trunk_output.block{i1}.block{i1}-{u}.f.a.1.{p}                  s{i1}.b{u1}.conv1.bn.{p}
trunk_output.block{i1}.block{i1}-{u}.f.a.1.running_mean         s{i1}.b{u1}.conv1.bn.running_mean
trunk_output.block{i1}.block{i1}-{u}.f.a.1.running_var          s{i1}.b{u1}.conv1.bn.running_var
trunk_output.block{i1}.block{i1}-{u}.f.a.1.num_batches_tracked  s{i1}.b{u1}.conv1.bn.num_batches_tracked
trunk_output.block{i1}.block{i1}-{u}.f.b.0.{p}                  s{i1}.b{u1}.conv2.conv.{p}
trunk_output.block{i1}.block{i1}-{u}.f.b.1.{p}                  s{i1}.b{u1}.conv2.bn.{p}
trunk_output.block{i1}.block{i1}-{u}.f.b.1.running_mean         s{i1}.b{u1}.conv2.bn.running_mean
trunk_output.block{i1}.block{i1}-{u}.f.b.1.running_var          s{i1}.b{u1}.conv2.bn.running_var
trunk_output.block{i1}.block{i1}-{u}.f.b.1.num_batches_tracked  s{i1}.b{u1}.conv2.bn.num_batches_tracked
trunk_output.block{i1}.block{i1}-{u}.f.se.fc1.{p}               s{i1}.b{u1}.se.fc1.{p}
trunk_output.block{i1}.block{i1}-{u}.f.se.fc2.{p}               s{i1}.b{u1}.se.fc2.{p}
trunk_output.block{i1}.block{i1}-{u}.f.c.0.{p}                  s{i1}.b{u1}.conv3.conv.{p}
trunk_output.block{i1}.block{i1}-{u}.f.c.1.{p}                  s{i1}.b{u1}.conv3.bn.{p}
trunk_output.block{i1}.block{i1}-{u}.f.c.1.running_mean         s{i1}.b{u1}.conv3.bn.running_mean
trunk_output.block{i1}.block{i1}-{u}.f.c.1.running_var          s{i1}.b{u1}.conv3.bn.running_var
trunk_output.block{i1}.block{i1}-{u}.f.c.1.num_batches_tracked  s{i1}.b{u1}.conv3.bn.num_batches_tracked
trunk_output.block{i1}.block{i1}-{u}.proj.0.{p}                 s{i1}.b{u1}.downsample.conv.{p}
trunk_output.block{i1}.block{i1}-{u}.proj.1.{p}                 s{i1}.b{u1}.downsample.bn.{p}
trunk_output.block{i1}.block{i1}-{u}.proj.1.running_mean        s{i1}.b{u1}.downsample.bn.running_mean
trunk_output.block{i1}.block{i1}-{u}.proj.1.running_var         s{i1}.b{u1}.downsample.bn.running_var
trunk_output.block{i1}.block{i1}-{u}.proj.1.num_batches_tracked s{i1}.b{u1}.downsample.bn.num_batches_tracked
fc.{p}                                                          head.fc.{p}
""")
"""torchvision's names of a RegNet, and timm's."""


def _open_convnet(tensors: State, facts: ModelFacts) -> OpenedModel:
    """Return a network whose tensors have torchvision's names, or those of timm's RegNet, and its data."""
    state, unknown = dict(tensors), tuple[str, ...]()
    if STEMS[2] <= state.keys():
        state, unknown = rename_to_canonical(_TIMM_REGNET, state)
    regnet = "stem.0.weight" in state
    stem_weight = "stem.0.weight" if regnet else "conv1.weight"
    if "fc.weight" not in state:
        raise WeightsError("this network has no classifier (fc.weight); use weights that have one")
    for name, axes in ((stem_weight, 4), ("fc.weight", 2)):
        if state[name].ndim != axes:
            raise WeightsError(
                f"{name} has shape {tuple(state[name].shape)}; expected {axes} axes. Use weights of torchvision or "
                "timm."
            )
    width, channels, _, side = state[stem_weight].shape
    stem: Literal["small", "imagenet"] = "imagenet" if regnet or side == 7 else "small"
    assumed, image = [], facts.image
    if image is None:
        if stem == "small":
            raise WeightsError("the file does not state the size of its images; set 'size' of the teacher, in pixels")
        image = (SIZE, SIZE)
        assumed.append(f"images of {SIZE} pixels, as is the custom of ImageNet")
    if None in (facts.mean, facts.std) and channels != 3:
        raise WeightsError(
            f"the file does not state how its images of {channels} channels were normalised; use weights for RGB images"
        )
    usual = TorchvisionFormat()
    mean, std, of_pixels = choose_normalisation(facts, usual.convention, usual.title, channels)
    info = DataInfo(image=image, channels=channels, classes=len(state["fc.weight"]), labels=facts.labels or ())
    with torch.random.fork_rng(devices=[]):
        if regnet:
            model: Model = RegNetY16GF(info)
        else:
            kind = _choose_resnet(state)
            model = kind(info, stem=stem, width_factor=width / kind.channels)
    expected = model.state_dict()
    counters = {key: value for key, value in expected.items() if key.endswith("num_batches_tracked")}
    state = {**counters, **state}  # old files have no counters; nothing reads them
    if faults := find_mismatches(expected, state, unknown):
        raise WeightsError(
            f"these are not the weights of a {type(model).__name__}: "
            f"{describe_mismatches(faults)}; use weights of torchvision or timm"
        )
    model.load_state_dict(state)
    return OpenedModel(model.eval(), info, mean, std, tuple(f"assumed: {each}" for each in (*assumed, *of_pixels)))


def _choose_resnet(state: State) -> type[ResNet8 | ResNet18 | ResNet50]:
    """Return the class by the number of blocks of each stage, and by the last convolution of a block."""
    stages = (re.fullmatch(r"layer(\d)\.\d+\.conv1\.weight", name) for name in sorted(state))
    layers = tuple(Counter(match[1] for match in stages if match).values())
    block = "Bottleneck" if "layer1.0.conv3.weight" in state else "BasicBlock"
    for kind in RESNETS:
        if (kind.layers, kind.block) == (layers, block):
            return kind
    raise WeightsError(
        f"a ResNet with stages of {' + '.join(map(str, layers))} blocks is not supported; use one of "
        f"{', '.join(kind.__name__ for kind in RESNETS)}"
    )


# -- weights of a name -------------------------------------------------------------------------------------------------


def fetch_by_name(kind: Literal["timm", "hub"], name: str) -> Path:
    """Return the file of the weights that timm names, or of a repository on the hub; see :func:`.fetch`."""
    return fetch(timm_weights_repository(name) if kind == "timm" else name)


def open_torchvision_weights(name: str, planned: str | None) -> OpenedModel:
    """Open weights that torchvision publishes, after downloading them into torch's cache if they are not there.

    Args:
        name: as ``torchvision.models.get_weight`` takes it: ``RegNet_Y_16GF_Weights.IMAGENET1K_V2``.
        planned: the beginning of their SHA-256 in the plan, as :func:`digest_prefix_of_published` returned it there.

    Raises:
        WeightsError: if there are none of this name, they cannot be downloaded, differ from the published or
            planned ones, or belong to an unsupported network.
    """
    weights, published = _torchvision_weights(name), digest_prefix_of_published(name)
    if planned is not None and published != planned:
        raise WeightsError(
            f"{name}: the installed torchvision publishes other weights (SHA-256 {published}...) than the plan names "
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
    return open_model(file, facts=facts, digests=None if published is None else {file.name: published})


def digest_prefix_of_published(name: str) -> str | None:
    """Return the beginning of the SHA-256 of published weights from their address; None if it has none."""
    # torch.hub's convention for the names of files.
    match = re.search(r"-([0-9a-f]{8,64})\.", Path(urlparse(_torchvision_weights(name).url).path).name)
    return match[1] if match else None


@cache
def _torchvision_weights(name: str) -> Any:
    models: Any = torchvision("torchvision.models")
    try:
        return models.get_weight(name)
    except (ValueError, AttributeError, KeyError):
        names = [str(each) for model in models.list_models(module=models) for each in models.get_model_weights(model)]
        raise WeightsError(f"torchvision publishes no weights called '{name}'.{nearest(name, names)}") from None
