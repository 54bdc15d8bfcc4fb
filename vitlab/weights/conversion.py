"""From one format to another, at the same resolution or another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from vitlab.components.position import Resampling
from vitlab.errors import GeometryError, OptionError, WeightsError, nearest
from vitlab.geometry import Pair
from vitlab.models.vit import ViT
from vitlab.plan.checkpoints import NAMES_ON_THE_HUB, files_of
from vitlab.store.folders import read_json, write_json
from vitlab.weights.adapt import regridded, with_rows, without_head
from vitlab.weights.architecture import Architecture
from vitlab.weights.files import WeightFile, container_of, write_file
from vitlab.weights.known import ModelFacts, some
from vitlab.weights.names import State
from vitlab.weights.opening import FORMATS, HEADER, Checkpoint, mismatches, read, refuse_misfits, understood
from vitlab.weights.rereading import SHOWN, differences


@dataclass(frozen=True)
class Converted:
    """What a conversion has written, and what a reader should know of it."""

    files: tuple[Path, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Inspected:
    """A file of weights and the model it belongs to."""

    checkpoint: Checkpoint
    architecture: Architecture
    faults: Mapping[str, list[str]]  #: names that keep it from being loaded, by what is wrong with them


def inspect(file: Path, form: str | None = None, said: ModelFacts = ModelFacts()) -> Inspected:  # noqa: B008
    """Read a file, and find what model it belongs to; what does not fit is listed rather than refused.

    Raises:
        WeightsError: if it cannot be read, or is no Vision Transformer at all.
    """
    checkpoint = read(file, form)
    try:
        headless = 1 if "head.weight" not in checkpoint.state else None
        found = checkpoint.architecture(said, headless)
        own = dict(_skeleton(found).items())
    except (WeightsError, OptionError) as error:
        raise WeightsError(f"{file}: {error}") from None
    if headless:
        own = {name: value for name, value in own.items() if not name.startswith("head.")}
    faults = mismatches(own, checkpoint.state)
    faults["unknown"] = [*checkpoint.unknown, *faults["unknown"]]
    return Inspected(checkpoint, found, {what: names for what, names in faults.items() if names})


def convert(
    source: Path,
    target: Path,
    to: str,
    *,
    form: str | None = None,
    said: ModelFacts = ModelFacts(),  # noqa: B008
    grid: Pair | None = None,
    image: Pair | None = None,
    resample: str = "timm",
    head: Literal["keep", "drop"] = "keep",
    pre_logits: Literal["keep", "drop"] = "keep",
) -> Converted:
    """Write the weights of ``source`` in another format, strictly: nothing is left out that was not named to be.

    Beside a file of Hugging Face's with the hub's name, ``model.safetensors``, stand the ``config.json`` and the
    ``preprocessor_config.json`` that ``from_pretrained`` wants, unless there are some already.

    Args:
        source: in any of :data:`FORMATS`, or the weights of a trial.
        target: the file to write; its name says how it is packed.
        to: one of :data:`FORMATS`.
        form: the format of ``source``; by default it is recognised.
        said: what the caller knows of ``source`` and the file may not say.
        grid: rows and columns of patches to resample positions for.
        image: the same, said in pixels.
        resample: how; a name of :data:`vitlab.components.position.resampling.PRESETS`.
        head: the head in the file, or none.
        pre_logits: the hidden layer before the head; it can go only with the head that reads it.

    Raises:
        WeightsError: one sentence that names the file, and the first keys that are to blame.
    """
    how = Resampling.named(resample)
    if to not in FORMATS:
        raise WeightsError(f"no format called '{to}'.{nearest(to, FORMATS)} Known: {', '.join(FORMATS)}")
    if (container_of(target) == "npz") != (to == "google"):
        raise WeightsError(f"{target}: the format google stands in an .npz, and no other does")
    if target.exists() and source.exists() and target.samefile(source):
        raise WeightsError(f"{target} is the file to be converted; give the new one another name")
    checkpoint = read(source, form)
    try:
        state, gone = without_head(checkpoint.state, "new" if head == "drop" else "keep", pre_logits)
        headless = 1 if "head.weight" not in state else None
        found = replace(checkpoint, state=state).architecture(said, headless)
        _check(checkpoint, found, state, headless is not None, to)
        if FORMATS[to].convention.pool == "cls" and "class" in found.prefix and found.known().pool == "gap":
            raise WeightsError(
                f"the head reads the mean of the patches, and in the format {to} it reads the class token"
            )
        state, found = _with_normed_tokens(state, found)
        new = _grid(found, grid, image)
        state = regridded(state, found.grid, new, how)
        rows = _rows(state, found, to)
        state = with_rows(state, found.prefix, found.prefix_rows, rows)
        written = FORMATS[to].from_canonical(state, found.heads)
        step = tuple(pixels // side for pixels, side in zip(found.info.image, found.grid, strict=True))
        pixels = (new[0] * step[0], new[1] * step[1])
        found = replace(found, info=replace(found.info, image=pixels), grid=new, prefix_rows=rows)
        known = found.known()
        described = _description(target, found, known) if to.startswith("hf") else {}
        _reread(target, to, written, described, state, found)
    except (WeightsError, OptionError) as error:
        raise WeightsError(f"{source}: {error}") from None
    write_file(target, written, {HEADER: known.model_dump_json(exclude_none=True)})
    for file, content in described.items():
        write_json(file, content)
    beside = list(described)
    notes = [checkpoint.opened, *checkpoint.notes, *(f"assumed: {sentence}" for sentence in found.assumed)]
    dropped = (*checkpoint.dropped, *gone)
    notes.append(f"left out: {some(dropped)}" if dropped else "")
    if not beside:
        notes += _differences(found, known, to)
    return Converted((target, *beside), tuple(filter(None, notes)))


# -- how it is done ---------------------------------------------------------------------------------------------------


def _skeleton(found: Architecture) -> State:
    """The canonical state of an architecture, without values."""
    with torch.device("meta"):
        model = ViT(found.info, **{name: value for name, value in cast(Any, found.options).items() if name != "type"})
    return model.to_canonical(model.state_dict())


def _check(checkpoint: Checkpoint, found: Architecture, state: State, headless: bool, to: str) -> None:
    """Refuse what does not fit, and a trial's model that other libraries do not have."""
    if checkpoint.trained is not None:
        reason = checkpoint.trained.export_incompatibility()
        if reason:
            raise WeightsError(f"these weights cannot be said in the format {to}: {reason}")
        return
    position = found.known().position
    if position is not None and position.type != "none":
        raise WeightsError(f"position '{position.type}' is in no tensor, so it cannot be said in the format {to}")
    own = _skeleton(found)
    if headless:
        own = {name: value for name, value in own.items() if not name.startswith("head.")}
    refuse_misfits(own, state, checkpoint.unknown)


def _grid(found: Architecture, grid: Pair | None, image: Pair | None) -> Pair:
    """The grid that is asked for; that of the source where none is."""
    if image is None:
        return grid or found.grid
    step = tuple(pixels // side for pixels, side in zip(found.info.image, found.grid, strict=True))
    if image[0] % step[0] or image[1] % step[1]:
        raise WeightsError(f"images of {image[0]}x{image[1]} cannot be cut into patches of {step[0]}x{step[1]}")
    asked = (image[0] // step[0], image[1] // step[1])
    if grid is not None and grid != asked:
        raise WeightsError(
            f"images of {image[0]}x{image[1]} have a grid of {asked[0]}x{asked[1]}, and another was asked for"
        )
    return asked


def _rows(state: State, found: Architecture, to: str) -> Literal["own", "none"]:
    """Whether tokens before the patches have rows of positions in the format; where it leaves that open, as they do."""
    if FORMATS[to].needs_rows:
        return "own"
    shown = FORMATS[to].shown(FORMATS[to].from_canonical(state, found.heads)).prefix_rows
    return shown or ("none" if found.prefix_rows == "none" else "own")


def _with_normed_tokens(state: dict[str, Tensor], found: Architecture) -> tuple[dict[str, Tensor], Architecture]:
    """Return the model with its last norm on the tokens, where the head reads single tokens and so computes the same.

    A norm treats each token by itself.  Most libraries have it on the tokens alone, and those that have it after
    pooling expect it before a mean.
    """
    head = found.options["head"]
    single = head["type"] == "distilled" or head.get("pool", "cls") == "cls"
    if found.options["final_norm_at"] != "pooled" or not single or "head.weight" not in state:
        return state, found
    renamed = {
        f"norm.{name.removeprefix('fc_norm.')}" if name.startswith("fc_norm.") else name: value
        for name, value in state.items()
    }
    return renamed, replace(found, options={**found.options, "final_norm_at": "tokens"})


def _reread(
    target: Path,
    to: str,
    written: Mapping[str, Tensor],
    described: Mapping[Path, Mapping[str, Any]],
    state: State,
    found: Architecture,
) -> None:
    """Read what is to be written, and compare it with the model it is written from.

    Args:
        target: the file.
        to: its format.
        written: its tensors.
        described: what is written beside it.
        state: the canonical tensors.
        found: the model.

    Raises:
        WeightsError: if the format cannot hold the model.
    """
    refusal = f"this model cannot be written in the format {to}"
    if FORMATS[to].square:
        sides = {"images": found.info.image, "patches": _sides(found.options["patch_size"])}
        for what, (height, width) in sides.items():
            if height != width:
                raise WeightsError(f"{refusal}: its {what} are of {height}x{width} pixels, and there they are square")
    beside = {file.name: described.get(file) or read_json(file) or {} for file in files_of(target)[1:]}
    contents = WeightFile(
        target,
        container_of(target),
        dict(written),
        config=beside.get("config.json", {}),
        preprocessor=beside.get("preprocessor_config.json", {}),
    )
    headless = 1 if "head.weight" not in state else None
    try:
        checkpoint = understood(contents, to)
        again = checkpoint.architecture(found.known(), headless)
        unequal = differences(found, again, head=headless is None, shapes=False)
        own = {name: value for name, value in _skeleton(again).items() if not (headless and name.startswith("head."))}
        faults = any(mismatches(own, checkpoint.state).values()) or checkpoint.unknown
        if faults and not unequal:
            unequal = differences(found, again, head=headless is None, shapes=True)
        if not unequal:
            refuse_misfits(own, checkpoint.state, checkpoint.unknown)
    except (WeightsError, OptionError, GeometryError) as error:
        raise WeightsError(f"{refusal}, which reads it otherwise: {error}") from None
    if unequal:
        more = f", and {len(unequal) - SHOWN} more" if len(unequal) > SHOWN else ""
        raise WeightsError(f"{refusal}: {'; '.join(unequal[:SHOWN])}{more}")


def _sides(patch_size: Any) -> Pair:
    return (patch_size, patch_size) if isinstance(patch_size, int) else (patch_size[0], patch_size[1])


def _description(target: Path, found: Architecture, known: ModelFacts) -> dict[Path, dict[str, Any]]:
    """Return what ``from_pretrained`` needs beside a file of the hub's name; existing files are left alone."""
    if target.name not in NAMES_ON_THE_HUB or target.with_name("config.json").exists():
        return {}
    distilled = "distillation" in found.prefix
    kind = (
        (
            "DeiTForImageClassificationWithTeacher"
            if found.options["head"]["type"] == "distilled"
            else "DeiTForImageClassification"
        )
        if distilled
        else "ViTForImageClassification"
    )
    assert known.image is not None
    patch = found.options["patch_size"]
    labels = found.info.labels or tuple(f"LABEL_{index}" for index in range(found.info.classes))
    config = {
        "architectures": [kind],
        "model_type": "deit" if distilled else "vit",
        "hidden_size": found.options["dim"],
        "num_hidden_layers": found.options["depth"],
        "num_attention_heads": found.heads,
        "intermediate_size": int(found.options["dim"] * found.options["mlp"]["ratio"]),
        "hidden_act": "gelu_pytorch_tanh" if known.gelu == "tanh" else "gelu",
        "layer_norm_eps": known.eps,
        "image_size": list(known.image),
        "patch_size": list(patch) if not isinstance(patch, int) else patch,
        "num_channels": found.info.channels,
        "qkv_bias": found.options["attention"].get("qkv_bias", True),
        "id2label": dict(enumerate(labels)),
        "label2id": {label: index for index, label in enumerate(labels)},
    }
    described: dict[Path, dict[str, Any]] = {target.with_name("config.json"): config}
    if not target.with_name("preprocessor_config.json").exists():
        described[target.with_name("preprocessor_config.json")] = {
            "image_processor_type": "ViTImageProcessor",
            "size": {"height": known.image[0], "width": known.image[1]},
            "image_mean": known.mean,
            "image_std": known.std,
        }
    return described


def _differences(found: Architecture, known: ModelFacts, to: str) -> list[str]:
    """Where the library that will read the file computes otherwise, unless it is told."""
    usual = FORMATS[to].convention
    notes = []
    if known.pool == "gap" and "class" in found.prefix:
        pooled = found.options["final_norm_at"] == "pooled"
        notes.append(f"the head reads the mean of the patches: global_pool='avg', fc_norm={pooled}")
    if known.eps is not None and usual.eps != known.eps:
        notes.append(
            f"the norms have eps {known.eps:g}, and in {FORMATS[to].title} {usual.eps:g} unless told otherwise"
        )
    if known.gelu is not None and usual.gelu != known.gelu:
        exact = {"none": "exact", "tanh": "approximated by tanh"}
        notes.append(f"its GELU is {exact[known.gelu]}, and in {FORMATS[to].title} {exact[str(usual.gelu)]} by default")
    return notes
