"""Inspection of weight files, and their conversion to other formats and resolutions."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Literal

import torch

from vitlab.errors import GeometryError, OptionError, WeightsError, list_some
from vitlab.geometry import Pair
from vitlab.identity.trial import DESCRIPTIONS, NAMES_ON_THE_HUB, weight_files
from vitlab.models.contract import NewState, State
from vitlab.models.trained import naming_file_in_errors
from vitlab.models.vit import ViT
from vitlab.spec.trial import InitFrom
from vitlab.store.files import read_json, write_json
from vitlab.weights.architecture import GELUS, Architecture, ModelFacts
from vitlab.weights.files import Json, WeightFile, container_of, read_file, write_file
from vitlab.weights.formats import Format
from vitlab.weights.hugging_face import HuggingFaceFormat, make_transformers_configs
from vitlab.weights.opening import (
    FORMATS,
    HEADER,
    Checkpoint,
    build_from_canonical,
    checkpoint_from_contents,
    open_checkpoint,
    require_same_tensors,
)
from vitlab.weights.to_timm import find_timm_model, timm_config
from vitlab.weights.transfer import (
    LAST_LAYERS,
    drop_head,
    find_mismatches,
    find_option_differences,
    load_and_freeze_weights,
    select_head_rows,
)

MAX_DIFFERENCES = 3  #: in a sentence


@dataclass(frozen=True)
class Inspection:
    """A file of weights and the model it belongs to."""

    checkpoint: Checkpoint
    architecture: Architecture
    faults: Mapping[str, list[str]]  #: names that prevent loading, by kind of fault


def inspect(file: Path, form: str | None = None, facts: ModelFacts = ModelFacts()) -> Inspection:  # noqa: B008
    """Read a file and determine its model; tensors that do not fit are listed, not refused.

    Raises:
        WeightsError: if it cannot be read, or is not a Vision Transformer.
    """
    checkpoint = open_checkpoint(file, form)
    with naming_file_in_errors(file):
        architecture = checkpoint.architecture(facts)
        own = _canonical_state(architecture.build_without_values(), "head.weight" in checkpoint.state)
    return Inspection(checkpoint, architecture, find_mismatches(own, checkpoint.state, checkpoint.unknown))


def convert_weights_file(
    source: Path,
    target: Path,
    target_format: str,
    *,
    source_format: str | None = None,
    facts: ModelFacts = ModelFacts(),  # noqa: B008
    image: Pair | None = None,
    resample: str = "timm",
    head: Literal["keep", "drop"] = "keep",
    classes: Path | None = None,
) -> tuple[list[Path], list[str]]:
    """Write ``source`` in another format, and return the files and notes; tensors are only left out on request.

    A file in Hugging Face's format with the hub's name, ``model.safetensors``, gets the ``config.json`` and the
    ``preprocessor_config.json`` that ``from_pretrained`` reads, unless they exist.

    Args:
        source: in any of :data:`~vitlab.weights.opening.FORMATS`, or the weights of a trial.
        target: the file to write; its suffix decides the container.
        target_format: one of :data:`~vitlab.weights.opening.FORMATS`.
        source_format: the format of ``source``; by default it is recognised.
        facts: facts about ``source`` that the file may not state.
        image: pixels, height and width, to resample positions for.
        resample: the method, a name of :data:`vitlab.components.position.PRESETS`.
        head: whether to keep the head, and the hidden layer before it if there is one.
        classes: file of the outputs of the head to keep; see :func:`vitlab.weights.transfer.select_head_rows`.

    Raises:
        WeightsError: one sentence that names the file, and the first keys that are to blame.
    """
    library = FORMATS[target_format]
    if (container_of(target) == "npz") != (target_format == "google"):
        suffix = ".npz" if target_format == "google" else "another suffix than .npz, such as .safetensors"
        raise WeightsError(f"{target}: a file in the format {target_format} needs {suffix}; rename the target")
    if target.exists() and source.exists() and target.samefile(source):
        raise WeightsError(f"{target} is the file to be converted; give the new one another name")
    contents = read_file(source)
    with naming_file_in_errors(source):
        checkpoint = checkpoint_from_contents(contents, source_format)
        state, removed = drop_head(checkpoint.state) if head == "drop" else (checkpoint.state, ())
        if classes is not None:
            if checkpoint.form.name == "vitlab":
                raise WeightsError("the classes of a trial are those of its data; select them with data.classes")
            state = select_head_rows(state, classes)
        has_head = "head.weight" in state
        old, state = _fc_norm_to_norm(replace(checkpoint, state=state).architecture(facts), state)
        if target_format == "hf":
            library = HuggingFaceFormat(_transformers_model_type(old))
            if library.kind == "dinov3_vit" and target.name not in NAMES_ON_THE_HUB:
                raise WeightsError(
                    f"only a config.json shows rotary positions; write to {NAMES_ON_THE_HUB[0]}, not {target}"
                )
        resized = replace(old, info=replace(old.info, image=image or old.info.image))
        new = _with_library_prefix_rows(resized, state, library)
        # The two models differ in nothing but their positions.
        dtype = reduce(torch.promote_types, {value.dtype for value in state.values()})
        model = new.build().to(dtype)
        how = InitFrom.model_validate({"checkpoint": str(source), "head": "keep", "resample": resample})
        load_and_freeze_weights(model, build_from_canonical(old, state, checkpoint.unknown, dtype), how)
        state = _canonical_state(model, has_head)
        on_the_hub, has_config = target.name in NAMES_ON_THE_HUB, target.with_name("config.json").exists()
        beside: dict[Path, Json] = {}
        notes = [*checkpoint.notes(old, removed)]
        if target_format == "timm":
            timm_model = find_timm_model(new, state)
            tensors = timm_model.tensors
            if on_the_hub and not has_config:
                beside = {target.with_name("config.json"): timm_config(timm_model, new)}
            else:
                arguments = ", ".join(f"{name}={value!r}" for name, value in timm_model.arguments.items())
                notes.append(f"timm.create_model({timm_model.name!r}, {arguments}) builds the model")
        else:
            tensors = library.from_canonical(state, new.geometry.heads)
            if on_the_hub and not has_config and isinstance(library, HuggingFaceFormat):
                files = zip(
                    map(target.with_name, DESCRIPTIONS),
                    make_transformers_configs(new, _transformers_model_type(new)),
                    strict=True,
                )
                beside = {file: content for file, content in files if not file.exists()}
            else:
                notes += _notes_on_differing_defaults(new, library)
        if target_format != "timm" or (on_the_hub and has_config):
            _verify_round_trip(target, library, tensors, beside, new, has_head)
    write_file(target, tensors, {HEADER: new.facts().model_dump_json(exclude_none=True)})
    for file, content in beside.items():
        write_json(file, content)
    return [target, *beside], notes


def _transformers_model_type(model: Architecture) -> str:
    if "rope2d" in model.encoding_options:
        return "dinov3_vit"
    return "deit" if "distillation" in model.geometry.prefix else "vit"


def _canonical_state(model: ViT, has_head: bool) -> NewState:
    """Return the canonical state of a model, without its last layers if the weights have none."""
    state = model.to_canonical(model.state_dict())
    return {name: value for name, value in state.items() if has_head or not name.startswith(LAST_LAYERS)}


def _fc_norm_to_norm(old: Architecture, state: NewState) -> tuple[Architecture, NewState]:
    """Rename ``fc_norm`` to ``norm`` for export, if the head reads the class or distillation token and no mean.

    A norm treats each token by itself, so the function stays the same.  Most libraries only have a norm on the tokens,
    and those with one after pooling expect it with a mean.
    """
    anatomy = old.anatomy
    if anatomy.head.options.get("pool", "cls") != "cls" or anatomy.final_norm_at == "tokens":
        return old, state
    renamed = {name.replace("fc_norm.", "norm."): value for name, value in state.items()}
    return replace(old, options={**old.options, "final_norm_at": "tokens"}), renamed


def _with_library_prefix_rows(model: Architecture, state: State, library: Format) -> Architecture:
    """Return the architecture with rows of positions for prefix tokens if the library requires them, or without."""
    rows = library.infer_facts_and_defaults(library.from_canonical(state, model.geometry.heads))[0].prefix_rows
    if rows is None or "learned" not in model.encoding_options:
        return model
    position = [
        {**part, "prefix_rows": rows} if kind == "learned" else part for kind, part in model.encoding_options.items()
    ]
    return replace(model, options={**model.options, "position": position})


def _verify_round_trip(
    target: Path, library: Format, tensors: State, beside: Mapping[Path, Json], model: Architecture, has_head: bool
) -> None:
    """Read the tensors to be written as their format, and refuse a result that is not the model."""
    refusal = f"this model cannot be written in the format {library.name}"
    g = model.geometry
    for what, (height, width) in (("images", g.image), ("patches", g.patch)):
        if library.square and height != width:
            raise WeightsError(
                f"{refusal}: its {what} are of {height}x{width} pixels, and the format supports square ones alone"
            )
    read_beside = [beside.get(file) or read_json(file) or {} for file in weight_files(target)[1:]]
    contents = WeightFile(target, container_of(target), dict(tensors), (), (), {}, *read_beside)
    # The head's pooling, where the format fixes it, and positions that no tensor shows are read from the file itself.
    fixed, _ = library.infer_facts_and_defaults(tensors)
    stated = ModelFacts(pool=fixed.pool).with_defaults(model.facts()).model_copy(update={"position": None})
    try:
        checkpoint = checkpoint_from_contents(contents, library.name)
        again = checkpoint.architecture(stated).build_without_values()
        differences = [
            f"{option} is {own}, and the file holds {other}"
            for option, own, other in find_option_differences(model.build_without_values(), again, head=has_head)
            if own != "qv"  # the file holds a bias of keys, of zeros
        ]
        if not differences:
            require_same_tensors(_canonical_state(again, has_head), checkpoint.state, checkpoint.unknown)
    except (WeightsError, OptionError, GeometryError) as error:
        raise WeightsError(
            f"{refusal}: read back, the file would not be the same model; choose another format, or a folder without "
            f"another model's config.json. The reason is: {error}"
        ) from None
    if differences:
        raise WeightsError(f"{refusal}: {list_some(differences, MAX_DIFFERENCES, '; ')}")


def _notes_on_differing_defaults(model: Architecture, library: Format) -> list[str]:
    """Return notes on options whose default in the format's library differs from this model."""
    usual, facts = library.convention.with_defaults(library.fixed), model.facts()
    notes = []
    if facts.pool == "gap" and "class" in model.geometry.prefix:
        pooled = model.anatomy.final_norm_at == "pooled"
        notes.append(f"the head reads the mean of the patches: global_pool='avg', fc_norm={pooled}")
    for what, own, theirs in (("the eps of its norms", facts.eps, usual.eps), ("its GELU", facts.gelu, usual.gelu)):
        if None not in (own, theirs) and own != theirs:
            here, there = (GELUS.get(str(value), value) for value in (own, theirs))
            notes.append(f"{what} is {here}, and in {library.title} {there} by default; set it there")
    return notes
