"""Weights to start from: those of another model, instead of initial values.

They travel in canonical form, so the two models may implement attention differently; learned positions are resampled
where the grids differ.  All else has to fit, name by name: what is left out silently is what ablations get wrong.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from vitlab.components.position import Position, Resampling
from vitlab.errors import WeightsError
from vitlab.models.contract import Model
from vitlab.spec.trial import InitFrom

SHOWN = 5  #: names in a sentence


def start_from(model: Model, source: Model, how: InitFrom) -> None:
    """Give ``model``, which has its initial values, the weights of ``source``; freeze what is not to be trained.

    Raises:
        WeightsError: if a weight has no counterpart of its shape, heads apart that are to be new.
    """
    theirs = source.to_canonical(_on_the_grid_of(model, source, Resampling.named(how.resample)))
    if how.head == "new":
        state = source.state_dict()
        head = source.to_canonical({name: state[name] for name in head_names(source)})
        theirs = {name: value for name, value in theirs.items() if name not in head}
    given = model.from_canonical(theirs)
    own = model.state_dict()
    needed = set(own) - (head_names(model) if how.head == "new" else set())
    faults = {
        "missing": sorted(needed - set(given)),
        "unknown to this model": sorted(set(given) - set(own)),
        "of another shape": sorted(name for name in needed & set(given) if given[name].shape != own[name].shape),
    }
    sentences = [
        f"{_some(names)} {'is' if len(names) == 1 else 'are'} {what}" for what, names in faults.items() if names
    ]
    if sentences:
        hint = "; with init_from.head: new the head is not taken over" if how.head == "keep" else ""
        raise WeightsError(f"these weights do not fit this model: {', '.join(sentences)}{hint}")
    model.load_state_dict({**own, **given})
    if how.freeze == "body":
        trained = head_names(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)


def head_names(model: Model) -> set[str]:
    """The names in a model's state that stand in its last layer."""
    layers = {name: model.layer_of(name) for name in model.state_dict()}
    last = max(layers.values())
    return {name for name, layer in layers.items() if layer == last}


# -- how it is done ---------------------------------------------------------------------------------------------------


def _on_the_grid_of(model: Model, source: Model, how: Resampling) -> dict[str, Tensor]:
    """The state of ``source``, its positions resampled for the grid of ``model`` where both encode them alike."""
    state: dict[str, Tensor] = dict(source.state_dict())
    old, new = (getattr(which, "position", None) for which in (source, model))
    if isinstance(old, Position) and isinstance(new, type(old)):
        prefix = "position."
        own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        geometries = cast(Any, source).geometry, cast(Any, model).geometry
        state |= {prefix + name: value for name, value in old.resample(own, *geometries, how).items()}
    return state


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
