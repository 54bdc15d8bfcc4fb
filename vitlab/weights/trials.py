"""Weight files of vitlab's trials: the model's own names, with the trial's spec beside the file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from vitlab.components.attention import SOFTMAX
from vitlab.components.block.residual import ParallelThings, PreNorm
from vitlab.components.mlp import GeluMLP, SwiGLU
from vitlab.components.norm import DynamicTanh, LayerNorm, NoNorm, RMSNorm
from vitlab.errors import UserError, WeightsError
from vitlab.geometry import DataInfo
from vitlab.models.anatomy import Anatomy, BlockChoices
from vitlab.models.contract import Model, digest
from vitlab.models.vit import ViT
from vitlab.registry import slot
from vitlab.spec import TrialSpec
from vitlab.store.files import mapping, read_json
from vitlab.store.folders import TrialFolder
from vitlab.weights.architecture import Architecture
from vitlab.weights.files import WeightFile
from vitlab.weights.known import ModelFacts
from vitlab.weights.names import Canonical, Format, State

HEADER = "vitlab"
"""Key of the data's description in a trial's file; written by :mod:`vitlab.training.artifacts`."""

DIGEST = "sha256"
"""Key of the SHA-256 of that description; files of earlier versions have none."""


class Native(Format):
    """The format of a trial's own weights, which are recognised by their header; it is never written."""

    name = "vitlab"
    title = "vitlab"
    convention = ModelFacts()

    def recognise(self, names: Collection[str]) -> bool:
        """Return False: this format is only read where a trial names it."""
        return False

    def to_canonical(self, state: State) -> Canonical:
        """Return the weights unchanged."""
        return Canonical(dict(state))

    def _from_canonical(self, state: State, heads: int) -> dict[str, Tensor]:
        raise WeightsError(
            "no model can be converted to vitlab's own format, which only training writes; choose another format"
        )


@dataclass(frozen=True)
class TrialModel:
    """The model of a trial, and its data."""

    model: Model
    options: Mapping[str, Any]  #: of the model, each written out
    info: DataInfo
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def architecture(self) -> Architecture:
        """Return the model's architecture.

        Raises:
            WeightsError: if the model is not a ViT.
        """
        if not isinstance(self.model, ViT):
            raise WeightsError(
                f"only a ViT can be converted to other formats; this is a {type(self.model).__name__}. Keep its own "
                "file."
            )
        g = self.model.geometry
        return Architecture(
            options=self._options(),
            info=self.info,
            heads=g.heads,
            grid=g.grid,
            prefix=g.prefix,
            prefix_rows=self.options["position"].get("prefix_rows", "own"),
            mean=self.mean,
            std=self.std,
            assumed=(),
        )

    def _options(self) -> Mapping[str, Any]:
        """Return the options of the model; parts that are equal in all blocks are listed once."""
        first, *others = self._anatomy().blocks
        if any(vars(block) != vars(first) for block in others):
            return self.options
        return {**self.options, **{name: part.plain() for name, part in vars(first).items()}, "blocks": {}}

    def _anatomy(self) -> Anatomy:
        return ViT.anatomy(self.info, {name: value for name, value in self.options.items() if name != "type"})

    def facts(self) -> ModelFacts:
        """Return the facts that no tensor shows, such as heads, image size and normalisation."""
        if isinstance(self.model, ViT):
            return self.architecture().facts()
        return ModelFacts(image=self.info.image, mean=self.mean, std=self.std, labels=self.info.labels or None)

    def export_incompatibility(self) -> str | None:
        """Return the reason why no format but timm's can hold this model; None if names and shapes decide."""
        assert isinstance(self.model, ViT)
        position, patch = self.options["position"], self.options["patch"]["type"]
        if position["type"] not in ("learned", "none"):
            return f"position '{position['type']}' is not in this format"
        if position.get("where", "stem") != "stem":
            return f"positions added at {position['where']} are not in this format"
        if patch not in ("linear", "resnet"):
            return f"patch '{patch}' is not in this format"
        if self.options["head"]["type"] not in ("linear", "mlp", "distilled"):
            return f"head '{self.options['head']['type']}' is not in this format"
        pool, over = (self.options["head"].get(name) for name in ("pool", "over"))
        if pool in ("max", "avgmax", "prr") or over == "all":
            return f"its pooling, {pool} over {over}, is not in this format"
        blocks = self._anatomy().blocks
        stored = (PreNorm, ParallelThings)
        if other := next((block.block.type for block in blocks if block.block.component not in stored), None):
            return f"block '{other}' is not in this format"
        if self.options.get("parametrization") == "mup" and self.model.base_width != self.model.geometry.dim:
            return "the scale of attention under parametrization 'mup' is not in this format"
        for norm in (block.norm for block in blocks):
            if norm.component not in (LayerNorm, RMSNorm):
                return f"norm '{norm.type}' of a block is not in this format"
        foreign = [type(part).__name__ for part in self.model.modules() if not type(part).__module__.startswith(_OURS)]
        if foreign:
            return f"{foreign[0]} is a part of a plugin, which is not in this format"
        return _norm_incompatibility(self.model) or _block_incompatibility(blocks)


def _norm_incompatibility(model: ViT) -> str | None:
    """Return what other formats do not have of the norms of a model, or None."""
    for part in model.modules():
        if (isinstance(part, LayerNorm) and part.bias is None) or (isinstance(part, RMSNorm) and part.weight is None):
            return "layer norms without a shift, and norms without a scale, are not in this format"
        if isinstance(part, DynamicTanh):
            return "norm 'dyt' is not in this format"
    return None


def _block_incompatibility(blocks: Iterable[BlockChoices]) -> str | None:
    """Return the first choice of a block that other formats do not have, or None."""
    for block in blocks:
        attention, mlp = block.attention, block.mlp
        if attention.component not in SOFTMAX:
            return f"attention '{attention.type}' is not in this format"
        if mlp.component not in (GeluMLP, SwiGLU):
            return f"mlp '{mlp.type}' is not in this format"
        for what, options in (("attention", attention.options), ("mlp", mlp.options)):
            if options["norm"].component is not NoNorm:
                return f"{what} with a norm before its last layer is not in this format"
        if not (attention.options["proj_bias"] and mlp.options["bias"]):
            return "linear layers without biases, other than qkv, are not in this format"
    return None


def is_trial_file(contents: WeightFile) -> bool:
    """Return True if this is a trial's file."""
    return HEADER in contents.header


def load_trial(contents: WeightFile) -> TrialModel:
    """Return the model in a trial's file, in evaluation mode on the CPU.

    Raises:
        WeightsError: if the header is damaged, or the trial's spec is not beside the file or is that of another model.
    """
    text = contents.header[HEADER]
    of_header = hashlib.sha256(text.encode()).hexdigest()
    if contents.header.get(DIGEST, of_header) != of_header:
        raise WeightsError("its header is damaged; copy the file again, or delete its folder and run the study again")
    folder = TrialFolder(contents.file.parent)
    trial = read_json(folder.spec, mapping)
    if trial is None:
        raise WeightsError(
            f"these are the weights of a trial, and its {folder.spec.name} is missing beside them; copy both"
        )
    result = folder.result()
    if result is not None and result.outcome.weights not in ("", digest(contents.tensors)):
        raise WeightsError(
            "its tensors are not the weights that the trial ended with; copy the file again, or delete its folder and "
            "run the study again"
        )
    try:
        header = json.loads(text)
        height, width = header["info"]["image"]
        info = DataInfo(**{**header["info"], "image": (height, width), "labels": tuple(header["info"]["labels"])})
        choice = slot("model").resolve(TrialSpec.model_validate(trial["spec"]).model)
        with torch.random.fork_rng(devices=[]):
            model = cast(Model, slot("model").build(choice, info))
        wide = next((value.dtype for value in contents.tensors.values() if value.is_floating_point()), torch.float32)
        model.to(wide).load_state_dict(contents.tensors)
        return TrialModel(model.eval(), choice.plain(), info, tuple(header["mean"]), tuple(header["std"]))
    except UserError as error:
        raise WeightsError(f"the model of {folder.spec} cannot be built: {error}") from None
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        line = " ".join(str(error).split())
        raise WeightsError(f"{folder.spec} is not the spec of these weights: {line}. Restore it.") from None


_OURS = ("vitlab.", "torch.")
