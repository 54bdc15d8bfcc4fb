"""The weights that trials of vitlab leave behind: the model's own names, with the trial's spec beside the file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from vitlab.components.attention import Attention
from vitlab.errors import UserError, WeightsError
from vitlab.geometry import DataInfo
from vitlab.models.anatomy import Anatomy
from vitlab.models.contract import Model
from vitlab.models.vit import ViT
from vitlab.registry import slot
from vitlab.store.folders import TrialFolder, mapping, read_json
from vitlab.weights.architecture import Architecture
from vitlab.weights.files import WeightFile
from vitlab.weights.known import ModelFacts
from vitlab.weights.names import Canonical, Format, State

HEADER = "vitlab"
"""Where a trial's file says what its model sees; written by :mod:`vitlab.training.artifacts`."""

DIGEST = "sha256"
"""Where it says the SHA-256 of that; files of earlier versions have none."""


class Native(Format):
    """A trial's own weights; recognised by their header, and never written."""

    name = "vitlab"
    title = "vitlab"
    convention = ModelFacts()

    def recognise(self, names: Collection[str]) -> bool:
        return False

    def to_canonical(self, state: State) -> Canonical:
        return Canonical(dict(state))

    def _written(self, state: State, heads: int) -> dict[str, Tensor]:
        raise WeightsError("the weights of a trial are written by its training alone")


@dataclass(frozen=True)
class Trained:
    """The model of a trial, and what it sees."""

    model: Model
    options: Mapping[str, Any]  #: of the model, each written out
    info: DataInfo
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def architecture(self) -> Architecture:
        """Said as that of a file of another format is.

        Raises:
            WeightsError: if it is no ViT.
        """
        if not isinstance(self.model, ViT):
            raise WeightsError(f"only a ViT has weights in other formats; this is a {type(self.model).__name__}")
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
        """Return the options of the model; where all blocks are alike, they are said once."""
        first, *others = self._anatomy().blocks
        if any(vars(block) != vars(first) for block in others):
            return self.options
        return {**self.options, **{name: part.plain() for name, part in vars(first).items()}, "blocks": {}}

    def _anatomy(self) -> Anatomy:
        return ViT.anatomy(self.info, {name: value for name, value in self.options.items() if name != "type"})

    def known(self) -> ModelFacts:
        """What of this cannot be read off the tensors."""
        if isinstance(self.model, ViT):
            return self.architecture().known()
        return ModelFacts(image=self.info.image, mean=self.mean, std=self.std, labels=self.info.labels or None)

    def export_incompatibility(self) -> str | None:
        """Why no other library has this model, in one sentence; None where names and shapes decide."""
        assert isinstance(self.model, ViT)
        position, patch = self.options["position"], self.options["patch"]["type"]
        if position["type"] not in ("learned", "none"):
            return f"position '{position['type']}' is in no other format"
        if position.get("where", "stem") != "stem":
            return f"positions added at {position['where']} are in no other format"
        if patch not in ("linear", "resnet"):
            return f"patch '{patch}' is in no other format"
        if self.options["head"]["type"] not in ("linear", "mlp", "distilled"):
            return f"head '{self.options['head']['type']}' is in no other format"
        norms = [block.norm.type for block in self._anatomy().blocks]
        if other := next((norm for norm in norms if norm not in ("layernorm", "rmsnorm")), None):
            return f"norm '{other}' of a block is in no other format"
        foreign = [type(part).__name__ for part in self.model.modules() if not type(part).__module__.startswith(_OURS)]
        if foreign:
            return f"{foreign[0]} is a part of somebody else's, and in no other format"
        if any(isinstance(part, Attention) and part.canonical is None for part in self.model.modules()):
            return "its attention is in no other format"
        return None


def of_a_trial(contents: WeightFile) -> bool:
    """Whether a trial has left this file."""
    return HEADER in contents.header


def trained(contents: WeightFile) -> Trained:
    """The model in a trial's file, in evaluation mode on the CPU.

    Raises:
        WeightsError: if the header is not what was written, or the trial's spec does not stand beside the file, or is
            not the spec of this file.
    """
    text = contents.header[HEADER]
    digest = hashlib.sha256(text.encode()).hexdigest()
    if contents.header.get(DIGEST, digest) != digest:
        raise WeightsError("it is damaged: its header is not what was written")
    folder = TrialFolder(contents.file.parent)
    spec = read_json(folder.spec, mapping)
    if spec is None:
        raise WeightsError(f"these are the weights of a trial, and its {folder.spec.name} is not beside them")
    try:
        said = json.loads(text)
        height, width = said["info"]["image"]
        info = DataInfo(**{**said["info"], "image": (height, width), "labels": tuple(said["info"]["labels"])})
        choice = slot("model").resolve(spec["spec"]["model"])
        with torch.random.fork_rng(devices=[]):
            model = cast(Model, slot("model").build(choice, info))
        wide = next((value.dtype for value in contents.tensors.values() if value.is_floating_point()), torch.float32)
        model.to(wide).load_state_dict(contents.tensors)
        return Trained(model.eval(), choice.plain(), info, tuple(said["mean"]), tuple(said["std"]))
    except (UserError, RuntimeError, ValueError, KeyError, TypeError) as error:
        line = " ".join(str(error).split())
        raise WeightsError(f"the {folder.spec.name} beside it is not that of these weights: {line}") from None


# -- how it is done ---------------------------------------------------------------------------------------------------


_OURS = ("vitlab.", "torch.")
