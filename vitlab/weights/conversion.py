"""Inspection of weight files, and their conversion to other formats and resolutions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from vitlab.components.position import Resampling
from vitlab.errors import GeometryError, OptionError, WeightsError, nearest
from vitlab.geometry import Pair
from vitlab.identity.key import NAMES_ON_THE_HUB, files_of
from vitlab.models.vit import ViT
from vitlab.store.files import read_json, write_json
from vitlab.weights.architecture import Architecture
from vitlab.weights.files import WeightFile, container_of, write_file
from vitlab.weights.known import ModelFacts, requested_grid, some
from vitlab.weights.names import State
from vitlab.weights.opening import FORMATS, HEADER, Checkpoint, interpret, mismatches, open_checkpoint, require_match
from vitlab.weights.to_timm import timm_config, to_timm
from vitlab.weights.transfer import (
    convert_prefix_rows,
    differing_options,
    drop_head,
    format_value,
    group_by_block,
    options_of,
    resample_positions,
    select_classes,
)

MAX_DIFFERENCES = 3  #: in a sentence


@dataclass(frozen=True)
class Conversion:
    """The files that a conversion wrote, and notes on them."""

    files: tuple[Path, ...]
    notes: tuple[str, ...]


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
    try:
        headless = 1 if "head.weight" not in checkpoint.state else None
        architecture = checkpoint.architecture(facts, headless)
        own = dict(_skeleton(architecture).items())
    except (WeightsError, OptionError) as error:
        raise WeightsError(f"{file}: {error}") from None
    if headless:
        own = {name: value for name, value in own.items() if not name.startswith("head.")}
    faults = mismatches(own, checkpoint.state)
    faults["unknown"] = [*checkpoint.unknown, *faults["unknown"]]
    return Inspection(checkpoint, architecture, {what: names for what, names in faults.items() if names})


def convert(
    source: Path,
    target: Path,
    to: str,
    *,
    form: str | None = None,
    facts: ModelFacts = ModelFacts(),  # noqa: B008
    grid: Pair | None = None,
    image: Pair | None = None,
    resample: str = "timm",
    head: Literal["keep", "drop"] = "keep",
    pre_logits: Literal["keep", "drop"] = "keep",
    classes: Path | None = None,
) -> Conversion:
    """Write the weights of ``source`` in another format; tensors are only left out on request.

    A file in Hugging Face's format with the hub's name, ``model.safetensors``, gets the ``config.json`` and the
    ``preprocessor_config.json`` that ``from_pretrained`` reads, unless they exist.

    Args:
        source: in any of :data:`FORMATS`, or the weights of a trial.
        target: the file to write; its suffix decides the container.
        to: one of :data:`FORMATS`.
        form: the format of ``source``; by default it is recognised.
        facts: facts about ``source`` that the file may not state.
        grid: rows and columns of patches to resample positions for.
        image: the same in pixels.
        resample: the method, a name of :data:`vitlab.components.position.contract.PRESETS`.
        head: whether to keep the head.
        pre_logits: the hidden layer before the head; it can be dropped only with the head that reads it.
        classes: file of the outputs of the head to keep; see :func:`vitlab.weights.transfer.select_classes`.

    Raises:
        WeightsError: one sentence that names the file, and the first keys that are to blame.
    """
    how = Resampling.preset(resample)
    if to not in FORMATS:
        raise WeightsError(f"no format called '{to}'.{nearest(to, FORMATS)} Allowed: {', '.join(FORMATS)}")
    if (container_of(target) == "npz") != (to == "google"):
        suffix = ".npz" if to == "google" else "another suffix than .npz, such as .safetensors"
        raise WeightsError(f"{target}: a file in the format {to} needs {suffix}; rename the target")
    if target.exists() and source.exists() and target.samefile(source):
        raise WeightsError(f"{target} is the file to be converted; give the new one another name")
    checkpoint = open_checkpoint(source, form)
    try:
        state, removed = drop_head(checkpoint.state, "new" if head == "drop" else "keep", pre_logits)
        if classes is not None:
            if checkpoint.trial is not None:
                raise WeightsError("the classes of a trial are those of its data; select them with data.classes")
            state = select_classes(state, classes)
        headless = 1 if "head.weight" not in state else None
        architecture = replace(checkpoint, state=state).architecture(facts, headless)
        if to != "timm":
            _require_exportable(checkpoint, architecture, state, headless is not None, to)
        if (
            FORMATS[to].convention.pool == "cls"
            and "class" in architecture.prefix
            and architecture.facts().pool == "gap"
        ):
            raise WeightsError(
                f"the head reads the mean of the patches, and in the format {to} it reads the class token; use --to "
                "timm"
            )
        state, architecture = _move_norm_to_tokens(state, architecture)
        step = tuple(pixels // side for pixels, side in zip(architecture.info.image, architecture.grid, strict=True))
        new = requested_grid(image, grid, (step[0], step[1])) or architecture.grid
        state = resample_positions(state, architecture.grid, new, how)
        rows = _prefix_rows(state, architecture, to)
        state = convert_prefix_rows(state, architecture.prefix, architecture.prefix_rows, rows)
        pixels = (new[0] * step[0], new[1] * step[1])
        architecture = replace(architecture, info=replace(architecture.info, image=pixels), grid=new, prefix_rows=rows)
        written_facts = architecture.facts()
        described = target.name in NAMES_ON_THE_HUB and not target.with_name("config.json").exists()
        if to == "timm":
            model = to_timm(architecture, state, partial(_differing_options, head=headless is None, shapes=True))
            tensors, described = dict(model.tensors), described and not model.parts
            descriptions = {target.with_name("config.json"): timm_config(model, architecture)} if described else {}
            building = [] if described else [f"{model.call()} builds the model"]
        else:
            tensors, building = FORMATS[to].from_canonical(state, architecture.heads), []
            descriptions = _description(target, architecture, written_facts) if to.startswith("hf") else {}
        if (
            to != "timm"
            or descriptions
            or (target.with_name("config.json").exists() and target.name in NAMES_ON_THE_HUB)
        ):
            _verify_round_trip(target, to, tensors, descriptions, state, architecture)
    except (WeightsError, OptionError) as error:
        raise WeightsError(f"{source}: {error}") from None
    write_file(target, tensors, {HEADER: written_facts.model_dump_json(exclude_none=True)})
    for file, content in descriptions.items():
        write_json(file, content)
    notes = [checkpoint.wrapper_note, *checkpoint.notes, *(f"assumed: {sentence}" for sentence in architecture.assumed)]
    dropped = (*checkpoint.dropped, *removed)
    notes.append(f"left out: {some(dropped)}" if dropped else "")
    if not descriptions and to != "timm":
        notes += _notes_on_defaults(architecture, written_facts, to)
    return Conversion((target, *descriptions), tuple(filter(None, [*notes, *building])))


def _skeleton(architecture: Architecture) -> State:
    """Return the canonical state of an architecture on the meta device."""
    with torch.device("meta"):
        model = ViT(
            architecture.info,
            **{name: value for name, value in cast(Any, architecture.options).items() if name != "type"},
        )
    return model.to_canonical(model.state_dict())


def _require_exportable(
    checkpoint: Checkpoint, architecture: Architecture, state: State, headless: bool, to: str
) -> None:
    """Raise WeightsError if tensors do not fit, or if the format cannot hold the model."""
    if checkpoint.trial is not None:
        reason = checkpoint.trial.export_incompatibility()
        if reason:
            raise WeightsError(f"{to} cannot hold this model: {reason}. Try --to timm, or keep the trial's own file.")
        return
    position = architecture.facts().position
    if position is not None and position.type != "none":
        raise WeightsError(f"{to} cannot hold position '{position.type}', which is stored in no tensor")
    own = _skeleton(architecture)
    if headless:
        own = {name: value for name, value in own.items() if not name.startswith("head.")}
    require_match(own, state, checkpoint.unknown)


def _prefix_rows(state: State, architecture: Architecture, to: str) -> Literal["own", "none"]:
    """Return whether prefix tokens have rows of positions in the format; by default as in the source."""
    if FORMATS[to].needs_rows:
        return "own"
    inferred = FORMATS[to].infer_facts(FORMATS[to].from_canonical(state, architecture.heads)).prefix_rows
    return inferred or ("none" if architecture.prefix_rows == "none" else "own")


def _move_norm_to_tokens(
    state: dict[str, Tensor], architecture: Architecture
) -> tuple[dict[str, Tensor], Architecture]:
    """Rename ``fc_norm`` to ``norm`` for export, if the head reads the class or distillation token and no mean.

    A norm treats each token by itself, so the function stays the same.  Most libraries only have a norm on the tokens,
    and those with one after pooling expect it with a mean.
    """
    head = architecture.options["head"]
    single = head["type"] == "distilled" or head.get("pool", "cls") == "cls"
    if architecture.options["final_norm_at"] != "pooled" or not single or "head.weight" not in state:
        return state, architecture
    renamed = {
        f"norm.{name.removeprefix('fc_norm.')}" if name.startswith("fc_norm.") else name: value
        for name, value in state.items()
    }
    return renamed, replace(architecture, options={**architecture.options, "final_norm_at": "tokens"})


def _verify_round_trip(
    target: Path,
    to: str,
    tensors: Mapping[str, Tensor],
    descriptions: Mapping[Path, Mapping[str, Any]],
    state: State,
    architecture: Architecture,
) -> None:
    """Read the tensors to be written as their format, and compare the result with the model.

    Args:
        target: the file.
        to: its format.
        tensors: its tensors.
        descriptions: files that are written beside it, and their contents.
        state: the canonical tensors.
        architecture: the model.

    Raises:
        WeightsError: if the format cannot hold the model.
    """
    refusal = f"this model cannot be written in the format {to}"
    if FORMATS[to].square:
        sides = {"images": architecture.info.image, "patches": _sides(architecture.options["patch_size"])}
        for what, (height, width) in sides.items():
            if height != width:
                raise WeightsError(
                    f"{refusal}: its {what} are of {height}x{width} pixels, and the format supports square ones alone"
                )
    beside = {file.name: descriptions.get(file) or read_json(file) or {} for file in files_of(target)[1:]}
    contents = WeightFile(
        target,
        container_of(target),
        dict(tensors),
        config=beside.get("config.json", {}),
        preprocessor=beside.get("preprocessor_config.json", {}),
    )
    headless = 1 if "head.weight" not in state else None
    try:
        checkpoint = interpret(contents, to)
        reread = checkpoint.architecture(architecture.facts(), headless)
        unequal = _differing_options(architecture, reread, head=headless is None, shapes=False)
        own = {name: value for name, value in _skeleton(reread).items() if not (headless and name.startswith("head."))}
        faults = any(mismatches(own, checkpoint.state).values()) or checkpoint.unknown
        if faults and not unequal:
            unequal = _differing_options(architecture, reread, head=headless is None, shapes=True)
        if not unequal:
            require_match(own, checkpoint.state, checkpoint.unknown)
    except (WeightsError, OptionError, GeometryError) as error:
        raise WeightsError(
            f"{refusal}: read back, the file would not be the same model; choose another format. The reason is: {error}"
        ) from None
    if unequal:
        more = f", and {len(unequal) - MAX_DIFFERENCES} more" if len(unequal) > MAX_DIFFERENCES else ""
        raise WeightsError(f"{refusal}: {'; '.join(unequal[:MAX_DIFFERENCES])}{more}")


def _differing_options(mine: Architecture, theirs: Architecture, *, head: bool, shapes: bool) -> list[str]:
    """Return the options in which two models compute differently: ``OPTION is MINE, and the file holds THEIRS``.

    Options of all components are compared, except those that only affect training.

    Args:
        mine: the written model.
        theirs: the model that is read from the file.
        head: whether there is a head to compare.
        shapes: whether options that only decide shapes count.
    """
    tables = [_places(which, head) for which in (mine, theirs)]
    rows = [
        (block, f"{name}{option}", format_value(one.get(option)), format_value(other.get(option)))
        for block, name in tables[0]
        for one, other in [[table.get((block, name), {}) for table in tables]]
        for option in differing_options(one, other, shapes)
    ]
    depth = mine.options["depth"]
    return [f"{option} is {own}, and the file holds {other}" for option, own, other in group_by_block(rows, depth)]


def _places(model: Architecture, head: bool) -> dict[tuple[int, str], dict[str, Any]]:
    """Return the options of every component of a model, by block (-1 outside of blocks) and component name."""
    options = {name: value for name, value in model.options.items() if name != "type"}
    anatomy = ViT.anatomy(model.info, options)
    g, normed = anatomy.geometry, anatomy.final_norm.type != "none"
    table: dict[tuple[int, str], dict[str, Any]] = {
        (-1, ""): {
            "image": g.image,
            "patch_size": g.patch,
            "dim": g.dim,
            "depth": g.depth,
            "heads": g.heads,
            "prefix": g.prefix,
            "layer_scale": options.get("layer_scale") is not None,
            "final_norm_at": anatomy.final_norm_at if normed else "tokens",
        },
        (-1, "patch"): dict(options_of(anatomy.patch)),
        (-1, "position"): dict(options_of(anatomy.position)),
        (-1, "stem_norm"): dict(options_of(anatomy.stem_norm)),
        (-1, "final_norm"): dict(options_of(anatomy.final_norm)),
    }
    if ".prefix_rows" in table[-1, "position"]:
        rows = model.prefix_rows if g.prefix else None
        table[-1, "position"][".prefix_rows"] = rows
    if head:
        table[-1, "head"] = dict(options_of(anatomy.head))
        if table[-1, "head"].get(".pool") != "map":
            table[-1, "head"].pop(".approximate", None)
    for index, block in enumerate(anatomy.blocks):
        for name, choice in vars(block).items():
            table[index, name] = dict(options_of(choice))
    return table


def _sides(patch_size: Any) -> Pair:
    return (patch_size, patch_size) if isinstance(patch_size, int) else (patch_size[0], patch_size[1])


def _description(target: Path, architecture: Architecture, facts: ModelFacts) -> dict[Path, dict[str, Any]]:
    """Return path and content of the configs that ``from_pretrained`` needs beside ``target``, unless they exist."""
    if target.name not in NAMES_ON_THE_HUB or target.with_name("config.json").exists():
        return {}
    distilled = "distillation" in architecture.prefix
    kind = (
        (
            "DeiTForImageClassificationWithTeacher"
            if architecture.options["head"]["type"] == "distilled"
            else "DeiTForImageClassification"
        )
        if distilled
        else "ViTForImageClassification"
    )
    assert facts.image is not None
    patch = architecture.options["patch_size"]
    labels = architecture.info.labels or tuple(f"LABEL_{index}" for index in range(architecture.info.classes))
    config = {
        "architectures": [kind],
        "model_type": "deit" if distilled else "vit",
        "hidden_size": architecture.options["dim"],
        "num_hidden_layers": architecture.options["depth"],
        "num_attention_heads": architecture.heads,
        "intermediate_size": int(architecture.options["dim"] * architecture.options["mlp"]["ratio"]),
        "hidden_act": "gelu_pytorch_tanh" if facts.gelu == "tanh" else "gelu",
        "layer_norm_eps": facts.eps,
        "image_size": list(facts.image),
        "patch_size": list(patch) if not isinstance(patch, int) else patch,
        "num_channels": architecture.info.channels,
        "qkv_bias": architecture.options["attention"].get("qkv_bias", True),
        "id2label": dict(enumerate(labels)),
        "label2id": {label: index for index, label in enumerate(labels)},
    }
    descriptions: dict[Path, dict[str, Any]] = {target.with_name("config.json"): config}
    if not target.with_name("preprocessor_config.json").exists():
        descriptions[target.with_name("preprocessor_config.json")] = {
            "image_processor_type": "ViTImageProcessor",
            "size": {"height": facts.image[0], "width": facts.image[1]},
            "image_mean": facts.mean,
            "image_std": facts.std,
        }
    return descriptions


def _notes_on_defaults(architecture: Architecture, facts: ModelFacts, to: str) -> list[str]:
    """Return notes on options whose default in the format's library differs from this model."""
    usual = FORMATS[to].convention
    notes = []
    if facts.pool == "gap" and "class" in architecture.prefix:
        pooled = architecture.options["final_norm_at"] == "pooled"
        notes.append(f"the head reads the mean of the patches: global_pool='avg', fc_norm={pooled}")
    if facts.eps is not None and usual.eps != facts.eps:
        notes.append(
            f"the norms have eps {facts.eps:g}, and in {FORMATS[to].title} {usual.eps:g} by default; set it there"
        )
    if facts.gelu is not None and usual.gelu != facts.gelu:
        exact = {"none": "exact", "tanh": "approximated by tanh"}
        notes.append(
            f"its GELU is {exact[facts.gelu]}, and in {FORMATS[to].title} {exact[str(usual.gelu)]} by default; set it "
            "there"
        )
    return notes
