"""The coordinate check: how much the outputs of layers change in the first steps, at several widths of a model.

In the maximal update parametrization the change does not depend on the width; in the standard one it grows.

Reference: arXiv:2203.03466, appendix D.1.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from vitlab.components.attention import Attention
from vitlab.components.mlp import MLP
from vitlab.data.prepare import data_info
from vitlab.driver.planning import plan_study
from vitlab.errors import UserError, format_count
from vitlab.models.contract import Model, evaluation_mode
from vitlab.planning.resolve import Faults, Resolver
from vitlab.runner.models import make_training
from vitlab.spec import STREAMS, Study, TrialSpec

Parametrization = Literal["standard", "mup"]
IMAGES = 32  #: images whose outputs are compared


@dataclass(frozen=True)
class Coordinates:
    """Mean absolute changes of outputs, over images, channels and seeds, of one parametrization."""

    parametrization: Parametrization
    changes: Mapping[str, Mapping[int, float]]  #: layer, such as ``blocks.0.attn``, to width to change

    def ratio(self, layer: str) -> float:
        """Return the largest change of a layer over its smallest; infinite if one is 0 or not finite."""
        changes = self.changes[layer].values()
        return max(changes) / min(changes) if all(0 < change < math.inf for change in changes) else math.inf

    @property
    def worst(self) -> str:
        """The layer whose change depends most on the width."""
        return max(self.changes, key=self.ratio)

    def describe_width_dependence(self, factor: float) -> str:
        """Return in one sentence whether every layer stays within a factor."""
        ratio = self.ratio(self.worst)
        return (
            f"{self.parametrization}: {'within' if ratio <= factor else 'beyond'} the factor {factor:g}; {self.worst} "
            f"depends most on width, by {ratio:.3g}."
        )


def check_coordinates(
    file: str | Path,
    widths: Sequence[int],
    *,
    steps: int,
    seeds: int,
    changes: Mapping[str, object],
    plugins: Sequence[str | Path],
    out: str | Path,
    say: Callable[[str], None],
) -> list[Coordinates]:
    """Train a study's base for some steps at several widths, in both parametrizations, and return the changes.

    It is trained from initial values, at a constant rate, without a teacher.

    Args:
        file: the study file.
        widths: values of ``model.dim``.
        steps: optimizer steps.
        seeds: number of seeds.
        changes: see :func:`vitlab.run`.
        plugins: see :func:`vitlab.run`.
        out: see :func:`vitlab.run`.
        say: called with a sentence before the trainings of each parametrization.

    Raises:
        SpecError: if the file is wrong.
        UserError: if the base cannot have such a width or parametrization.
    """
    study, _ = plan_study(file, changes=changes, plugins=plugins, out=out)
    resolver = Resolver(data_info)

    trials = {
        kind: {width: _resolve_base_at_width(study, resolver, width, kind, steps) for width in widths}
        for kind in get_args(Parametrization)
    }

    results = []
    for kind, by_width in trials.items():
        say(f"{kind}: training {format_count(seeds, 'seed')} at each width")
        results.append(Coordinates(kind, measure_changes_by_width(by_width, seeds, steps)))
    return results


def measure_changes_by_width(specs: Mapping[int, TrialSpec], seeds: int, steps: int) -> dict[str, dict[int, float]]:
    """Return the mean absolute changes of every attention, MLP and of the logits by width, as means over seeds.

    Args:
        specs: what is trained, from initial values, by width.
        seeds: their number.
        steps: optimizer steps.
    """
    totals: dict[str, dict[int, float]] = {}
    for width, spec in specs.items():
        for seed in range(seeds):
            training = make_training(spec, {**dict.fromkeys(STREAMS, seed), "split": 0})
            x_BCHW = training.feed.batch(0, IMAGES).x_BCHW
            before = _layer_outputs(training.model, x_BCHW)
            for _ in range(steps):
                training.train_step()
            for layer, output in _layer_outputs(training.model, x_BCHW).items():
                by_width = totals.setdefault(layer, dict.fromkeys(specs, 0.0))
                by_width[width] += float((output - before[layer]).abs().mean()) / seeds
    return totals


@torch.no_grad()
def _layer_outputs(model: Model, x_BCHW: Tensor) -> dict[str, Tensor]:
    """Return the outputs of a model's attentions, MLPs and head for some images, in evaluation mode."""
    outputs: dict[str, Tensor] = {}
    with ExitStack() as hooks, evaluation_mode(model):
        for path, layer in model.named_modules():
            if isinstance(layer, Attention | MLP):
                hook = layer.register_forward_hook(lambda _, __, output, path=path: outputs.update({path: output}))
                hooks.enter_context(hook)
        views = model.logits_by_head(model(x_BCHW))
    return {**outputs, "logits": views[""]}


def _resolve_base_at_width(
    study: Study, resolver: Resolver, width: int, parametrization: Parametrization, steps: int
) -> TrialSpec:
    """Return the base of a study at a width.

    Raises:
        UserError: if it cannot have that width or parametrization.
    """
    tree = study.base.plain()
    if tree["model"]["type"].rpartition(":")[2] != "vit":
        raise UserError(f"base.model: '{tree['model']['type']}' has no model.parametrization; use a study of a vit")
    tree["model"] |= {"dim": width, "parametrization": parametrization}
    tree["train"] |= {"epochs": None, "images": None, "ema": None, "steps": steps, "schedule": "constant"}
    tree |= {"init_from": None, "distill": None}
    place = f"model.dim {width}, model.parametrization {parametrization}"
    try:
        trial = resolver.resolve_trial(tree)
    except Faults as faults:
        raise UserError(f"{place}: {faults}") from None
    if trial.incompatibility:
        raise UserError(f"{place}: {trial.incompatibility}")
    return trial.spec
