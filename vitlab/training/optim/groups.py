"""Parameter groups: weight decay, layer-wise learning rates, and the hidden matrices of a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import nn

from vitlab.models.contract import Model
from vitlab.training.optim.contract import Group


def decay_groups(model: nn.Module, weight_decay: float, declared: Collection[str] = ()) -> list[Group]:
    """Return the trainable parameters in at most two groups: those exempt from weight decay, then the others.

    Vectors, scalars, parameters named ``bias`` and the names in ``declared`` (the model's ``no_weight_decay``) are
    exempt.
    """
    exempt: list[tuple[str, nn.Parameter]] = []
    decaying: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_exempt = parameter.ndim <= 1 or name.endswith(".bias") or name in declared
            (exempt if is_exempt else decaying).append((name, parameter))
    # The order is part of every checkpoint: torch counts parameters through the groups.
    groups = [{"params": exempt, "weight_decay": 0.0}, {"params": decaying, "weight_decay": weight_decay}]
    return [group for group in groups if group["params"]]


def layer_groups(groups: Sequence[Group], layers: Mapping[str, int], factor: float) -> list[Group]:
    """Split groups by layer, with a learning rate ``factor`` times the rate of the next deeper layer.

    Args:
        groups: The groups of :func:`decay_groups`.
        layers: Depth of every parameter by name; the deepest layer has the optimizer's learning rate.
        factor: At most 1.

    Reference: arXiv:2106.08254 (BEiT), arXiv:2003.10555.
    """
    deepest = max(layers.values())

    def scale(name: str, group: Group) -> Mapping[str, object]:
        return {"lr_scale": group.get("lr_scale", 1.0) * factor ** (deepest - layers[name])}

    return split_groups(groups, scale)


def split_groups(groups: Sequence[Group], changes: Callable[[str, Group], Mapping[str, object]]) -> list[Group]:
    """Split groups so that the parameters of a group have equal further settings.

    Args:
        groups: Parameter groups.
        changes: Returns what differs for a parameter, such as ``lr_scale``, from its name and its group.
    """
    split: list[Group] = []
    for group in groups:
        parts: list[Group] = []
        for name, parameter in group["params"]:
            own = {**group, **changes(name, group), "params": []}
            # A handful of parts: a search is simpler than keys of settings that may be unhashable.
            part = next((part for part in parts if {**part, "params": []} == own), None)
            if part is None:
                part = own
                parts.append(part)
            part["params"].append((name, parameter))
        split += parts
    return split


def hidden_matrices(model: Model) -> dict[str, int]:
    """Return the names of the matrices between a model's stem and its head, each with its number of linear maps.

    These are the parameters with two axes in a layer that is neither the first nor the last
    (:meth:`~vitlab.models.contract.Model.layer_of`), without those that the model exempts from weight decay, such as
    tables of positions.  The number is 3 for the rows [q; k; v] of one matrix, see
    :meth:`~vitlab.models.contract.Model.stacked_maps`.
    """
    layers = {name: model.layer_of(name) for name, _ in model.named_parameters()}
    last = max(layers.values())
    exempt, maps = model.no_weight_decay(), model.stacked_maps()
    return {
        name: maps.get(name, 1)
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and 0 < layers[name] < last and name not in exempt
    }


def set_rate(target: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group of an optimizer, scaled by its ``lr_scale``."""
    for group in target.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
