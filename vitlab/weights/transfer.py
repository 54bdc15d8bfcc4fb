"""Weights to start from: those of another model, instead of initial values.

They travel in canonical form, so the two models may implement attention differently.  Learned positions are resampled
where the grids differ, and where only one of the two has rows for the tokens before the patches, rows are added to
their tokens or begin at zero, so that the sums stay.  All else has to fit, name by name: what is left out silently is
what ablations get wrong.

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
from vitlab.models.alike import differing, grouped, options_of, shown
from vitlab.models.contract import Model
from vitlab.spec.trial import InitFrom

SHOWN = 5  #: names in a sentence
TOKENS = {"class": "cls_token", "distillation": "dist_token", "register": "reg_token"}
POSITION = "position."
TABLE = POSITION + "pos_embed"


def start_from(model: Model, source: Model, how: InitFrom) -> list[str]:
    """Give ``model``, which has its initial values, the weights of ``source``; freeze what is not to be trained.

    Returns:
        a sentence on every option in which the two compute differently although the weights fit.

    Raises:
        WeightsError: if a weight has no counterpart of its shape, heads apart that are to be new or fitted.
    """
    _comparable(model, source, how)
    state: Mapping[str, Tensor] = source.state_dict()
    left = set() if how.head == "keep" else head_names(source)
    body = {name: value for name, value in state.items() if name not in left}
    own = model.state_dict()
    given = model.from_canonical(source.to_canonical(_fitted(model, source, body, own, how)))
    needed = set(own) - (set() if how.head == "keep" else head_names(model))
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
        model.freeze(head_names(model))
    return _other_functions(model, source, how)


def head_names(model: Model) -> set[str]:
    """The names in a model's state that stand in its last layer."""
    layers = {name: model.layer_of(name) for name in model.state_dict()}
    last = max(layers.values())
    return {name for name, layer in layers.items() if layer == last}


# -- how it is done ---------------------------------------------------------------------------------------------------


def _comparable(model: Model, source: Model, how: InitFrom) -> None:
    """Refuse another number of heads, which no shape shows, and other tokens, unless these are to be converted."""
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


def _other_functions(model: Model, source: Model, how: InitFrom) -> list[str]:
    """Return the options of parts that take weights, such as a norm's epsilon, that are others in the source."""
    found = []
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
        found += [
            (block, f"{name}{option}", shown(one.get(option)), shown(other.get(option)))
            for option in differing(one, other)
            if not (choice.slot == "position" and option == ".prefix_rows")  # these are converted
        ]
    return [
        f"{option} is {mine}, and in the model that the weights were trained in it is {theirs}"
        for option, mine, theirs in grouped(found, depth)
    ]


def _fitted(
    model: Model, source: Model, state: Mapping[str, Tensor], own: Mapping[str, Tensor], how: InitFrom
) -> dict[str, Tensor]:
    """A state of ``source`` for the grid of ``model`` and, as far as ``how`` says so, for its tokens."""
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
        fitted = old.resample(table, theirs, replace(mine, prefix=shared), Resampling.named(how.resample))
        if isinstance(old, Learned) and isinstance(new, Learned) and _convertible(old, new):
            if old.prefix_rows == "own" and new.prefix_rows == "none":
                _add_rows_to_tokens(out, theirs)
            fitted["pos_embed"] = _with_rows(fitted["pos_embed"], own[TABLE], old, new, shared, mine)
        out |= {POSITION + name: value for name, value in fitted.items()}
    return out


def _convertible(old: Learned, new: Learned) -> bool:
    """Whether both add their rows at the same places, and once where only one has rows for all tokens."""
    return old.layers == new.layers and (old.prefix_rows == new.prefix_rows or old.layers == {0})


def _exchange_tokens(out: dict[str, Tensor], own: Mapping[str, Tensor], shared: Sequence[str]) -> None:
    """Leave out the tokens that the model does not have, and let those that are its alone begin as they are."""
    for token, name in TOKENS.items():
        count = shared.count(token)
        kept = [out.pop(name)[:, :count]] if name in out else []
        if name in own:
            out[name] = torch.cat([*kept, own[name][:, count:]], 1)


def _add_rows_to_tokens(out: dict[str, Tensor], theirs: Geometry) -> None:
    """What a token's row of positions would add to it, it has from the beginning."""
    for token, name in TOKENS.items():
        rows = [place for place, other in enumerate(theirs.prefix) if other == token]
        if name in out and rows:
            added = out[TABLE][:, rows[: out[name].shape[1]]]
            out[name] = torch.cat([out[name][:, : added.shape[1]] + added, out[name][:, added.shape[1] :]], 1)


def _with_rows(
    fitted_LTD: Tensor, own_LTD: Tensor, old: Learned, new: Learned, shared: Sequence[str], mine: Geometry
) -> Tensor:
    """The table as the model keeps it; its rows of shared tokens are theirs, or zero, and those of others its own."""
    grid_LND = fitted_LTD[:, -mine.patches :]
    if new.prefix_rows == "none":
        return grid_LND
    rows_LPD = own_LTD[:, : len(mine.prefix)].clone()
    at = [place for place, token in enumerate(mine.prefix) if mine.prefix[:place].count(token) < shared.count(token)]
    rows_LPD[:, at] = fitted_LTD[:, : len(shared)] if old.prefix_rows == "own" else 0.0
    return torch.cat([rows_LPD, grid_LND], 1)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
