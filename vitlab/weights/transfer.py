"""Transfer of weights from another model, in place of initial values.

Weights are exchanged in canonical form, so the two models may implement attention differently.  Learned positions are
resampled if the grids differ.  If only one of the models has rows for the tokens before the patches, rows are added to
their tokens or start at zero, so that the sums are unchanged.  All other tensors have to fit, name by name: nothing is
left out silently.

D width, P tokens before the patches, N patches, L tables of positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from vitlab.components.position import Position, Resampling
from vitlab.components.position.additive import Learned
from vitlab.errors import WeightsError
from vitlab.geometry import Geometry
from vitlab.models.alike import differing_options, format_value, group_by_block, options_of
from vitlab.models.contract import Model
from vitlab.spec.trial import InitFrom
from vitlab.weights.known import some

TOKENS = {"class": "cls_token", "distillation": "dist_token", "register": "reg_token"}
POSITION = "position."
TABLE = POSITION + "pos_embed"


def start_from(model: Model, source: Model, how: InitFrom) -> list[str]:
    """Load the weights of ``source`` into ``model``, and freeze the parameters that ``how`` excludes from training.

    Returns:
        One sentence for each option in which the two compute differently although the weights fit.

    Raises:
        WeightsError: if a tensor other than a new head's has no counterpart of its shape.
    """
    _require_comparable(model, source, how)
    state: Mapping[str, Tensor] = source.state_dict()
    excluded = set() if how.head == "keep" else head_names(source)
    body = {name: value for name, value in state.items() if name not in excluded}
    own = model.state_dict()
    incoming = model.from_canonical(source.to_canonical(_fit(model, source, body, own, how)))
    required = set(own) - (set() if how.head == "keep" else head_names(model))
    faults = {
        "missing": sorted(required - set(incoming)),
        "unknown to this model": sorted(set(incoming) - set(own)),
        "of another shape": sorted(
            name for name in required & set(incoming) if incoming[name].shape != own[name].shape
        ),
    }
    sentences = [
        f"{some(names)} {'is' if len(names) == 1 else 'are'} {what}" for what, names in faults.items() if names
    ]
    if sentences:
        hint = "; with init_from.head: new the head is not taken over" if how.head == "keep" else ""
        raise WeightsError(f"these weights do not fit this model: {', '.join(sentences)}{hint}")
    model.load_state_dict({**own, **incoming})
    if how.freeze == "body":
        model.freeze(head_names(model))
    return _option_differences(model, source, how)


def head_names(model: Model) -> set[str]:
    """Return the names of the entries of a model's state in its last layer."""
    layers = {name: model.layer_of(name) for name in model.state_dict()}
    last = max(layers.values())
    return {name for name, layer in layers.items() if layer == last}


def _require_comparable(model: Model, source: Model, how: InitFrom) -> None:
    """Raise WeightsError for another number of heads, which no shape shows, or other tokens without conversion."""
    mine, theirs = (cast(Geometry | None, getattr(which, "geometry", None)) for which in (model, source))
    if mine is None or theirs is None:
        return
    if mine.heads != theirs.heads:
        raise WeightsError(f"these weights are those of {theirs.heads} heads, and this model has {mine.heads}")
    if mine.prefix != theirs.prefix and how.tokens == "same":
        differ = [name for token, name in TOKENS.items() if mine.prefix.count(token) != theirs.prefix.count(token)]
        raise WeightsError(
            f"the tokens before the patches are others in these weights ({', '.join(theirs.prefix) or 'none'}) than in "
            f"this model ({', '.join(mine.prefix) or 'none'}): with init_from.tokens: convert, {', '.join(differ)} "
            "would be left out, or new, as far as only one of the two has them"
        )


def _option_differences(model: Model, source: Model, how: InitFrom) -> list[str]:
    """Return a sentence for each option, such as a norm's epsilon, that differs from the source's."""
    rows = []
    depth = 0
    for path, choice in model.component_choices.items():
        if path not in source.component_choices or (path == "head" and how.head != "keep"):
            continue
        one, other = (dict(options_of(each.component_choices[path])) for each in (model, source))
        block, name = -1, path
        if path.startswith("blocks."):
            _, number, name = path.split(".")
            block = int(number)
            depth = max(depth, block + 1)
        rows += [
            (block, f"{name}{option}", format_value(one.get(option)), format_value(other.get(option)))
            for option in differing_options(one, other)
            if not (choice.slot == "position" and option == ".prefix_rows")  # these are converted
        ]
    return [
        f"{option} is {mine}, and in the model that the weights were trained in it is {theirs}"
        for option, mine, theirs in group_by_block(rows, depth)
    ]


def _fit(
    model: Model, source: Model, state: Mapping[str, Tensor], own: Mapping[str, Tensor], how: InitFrom
) -> dict[str, Tensor]:
    """Convert a state of ``source`` to the grid and, if ``how`` asks for it, to the tokens of ``model``."""
    out = dict(state)
    theirs, mine = (cast(Geometry | None, getattr(which, "geometry", None)) for which in (source, model))
    if theirs is None or mine is None or theirs.dim != mine.dim:
        return out
    shared = mine.prefix
    if how.tokens == "convert":
        shared = tuple(t for t in TOKENS for _ in range(min(theirs.prefix.count(t), mine.prefix.count(t))))
        _exchange_tokens(out, own, shared)
    old, new = (getattr(which, "position", None) for which in (source, model))
    if isinstance(old, Position) and isinstance(new, type(old)):
        names = [name for name in out if name.startswith(POSITION)]
        table = {name.removeprefix(POSITION): out[name] for name in names}
        resampled = old.resample(table, theirs, replace(mine, prefix=shared), Resampling.preset(how.resample))
        if isinstance(old, Learned) and isinstance(new, Learned) and _convertible(old, new):
            if old.prefix_rows == "own" and new.prefix_rows == "none":
                _add_rows_to_tokens(out, theirs)
            resampled["pos_embed"] = _convert_rows(resampled["pos_embed"], own[TABLE], old, new, shared, mine)
        out |= {POSITION + name: value for name, value in resampled.items()}
    return out


def _convertible(old: Learned, new: Learned) -> bool:
    """Return True if both add rows at the same layers, and only at the stem if their prefix rows differ."""
    return old.layers == new.layers and (old.prefix_rows == new.prefix_rows or old.layers == {0})


def _exchange_tokens(out: dict[str, Tensor], own: Mapping[str, Tensor], shared: Sequence[str]) -> None:
    """Drop the tokens that the model does not have, and insert initial values of those that only it has."""
    for token, name in TOKENS.items():
        count = shared.count(token)
        shared_rows = [out.pop(name)[:, :count]] if name in out else []
        if name in own:
            out[name] = torch.cat([*shared_rows, own[name][:, count:]], 1)


def _add_rows_to_tokens(out: dict[str, Tensor], theirs: Geometry) -> None:
    """Fold each prefix token's position row into the token itself."""
    for token, name in TOKENS.items():
        rows = [place for place, other in enumerate(theirs.prefix) if other == token]
        if name in out and rows:
            added = out[TABLE][:, rows[: out[name].shape[1]]]
            out[name] = torch.cat([out[name][:, : added.shape[1]] + added, out[name][:, added.shape[1] :]], 1)


def _convert_rows(
    fitted_LTD: Tensor, own_LTD: Tensor, old: Learned, new: Learned, shared: Sequence[str], mine: Geometry
) -> Tensor:
    """Return the model's table; rows of shared tokens are the source's, or zero, and others the initial ones."""
    grid_LND = fitted_LTD[:, -mine.patches :]
    if new.prefix_rows == "none":
        return grid_LND
    rows_LPD = own_LTD[:, : len(mine.prefix)].clone()
    at = [place for place, token in enumerate(mine.prefix) if mine.prefix[:place].count(token) < shared.count(token)]
    rows_LPD[:, at] = fitted_LTD[:, : len(shared)] if old.prefix_rows == "own" else 0.0
    return torch.cat([rows_LPD, grid_LND], 1)
