"""Transfer of weights: into a model in place of its initial values, and to another grid, rotation order or head.

Weights are exchanged in canonical form, so the two models may implement attention differently.  Learned positions are
resampled if the grids differ.  If only one of the models has rows for the tokens before the patches, rows are added to
their tokens or start at zero, so that the sums are unchanged.  All other tensors have to fit, name by name: nothing is
left out silently.

D width, P tokens before the patches, N patches, L tables of positions, H heads, K channels of a head.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from vitlab.components.attention.softmax import SOFTMAX
from vitlab.components.position import PRESETS, Position, Together, encodings_by_prefix, encodings_of_choice
from vitlab.components.position.additive import Learned
from vitlab.errors import WeightsError, list_some
from vitlab.geometry import Geometry
from vitlab.models.contract import Model, NewState, State, names_in_last_layer
from vitlab.models.vit import TOKENS
from vitlab.registry import BUILT_IN, ResolvedChoice
from vitlab.spec.choice import component_label
from vitlab.spec.trial import InitFrom
from vitlab.weights.architecture import Encoding, format_sides

LAST_LAYERS = ("head.", "head_dist.")
HEAD = (*LAST_LAYERS, "pre_logits.")
_QKV = re.compile(r"blocks\.\d+\.attn\.qkv\.(weight|bias)")
_NORMED = re.compile(r"blocks\.\d+\.attn\.[qk]_norm\.(weight|bias)")


def load_and_freeze_weights(model: Model, source: Model, init_from: InitFrom) -> list[str]:
    """Load the weights of ``source`` into ``model``, and freeze parameters that ``init_from`` excludes from training.

    Returns:
        What was loaded and resampled, what is new, and each option in which the two compute differently although the
        weights fit.

    Raises:
        WeightsError: if a tensor other than a new head's has no counterpart of its shape.
    """
    _require_comparable(model, source, init_from)
    state, own, keeps = source.state_dict(), model.state_dict(), init_from.head == "keep"
    excluded, new_head = (set(), set()) if keeps else (names_in_last_layer(source), names_in_last_layer(model))
    body = {name: value for name, value in state.items() if name not in excluded}
    incoming = model.from_canonical(source.to_canonical(_adapt_state_to_geometry(model, source, body, own, init_from)))
    if faults := find_mismatches({name: value for name, value in own.items() if name not in new_head}, incoming):
        hint = "set init_from.head: new to leave out the stored head, or " if keeps else ""
        first = next(iter(faults.get("of another shape", [])), "")
        shapes = f" ({first}: {[*incoming[first].shape]}, and here {[*own[first].shape]})" if first else ""
        printed = f"write the model that 'vitlab weights inspect {init_from.checkpoint or 'FILE'}' prints"
        raise WeightsError(
            f"these weights do not fit this model: {describe_mismatches(faults)}{shapes}; {hint}"
            f"{'write the same model here and in init_from.trial' if init_from.trial else printed}"
        )
    model.load_state_dict({**own, **incoming})
    if (freeze := init_from.freeze) != "nothing":
        head = names_in_last_layer(model)
        trained = head if freeze == "body" else {name for name in own if model.layer_of(name) > freeze}
        if not head <= trained:
            raise WeightsError(f"init_from.freeze is {freeze}, and this model has fewer blocks; set fewer, or body")
        model.freeze_except(trained)
    # Of a file, the reader lists what it leaves out, by the names in the file.
    listed = {"new": sorted(own.keys() - incoming.keys()), "left out": sorted(excluded) if init_from.trial else []}
    loaded = [
        f"{len(incoming)} of {len(own)} tensors loaded"
        + "".join(f"; {kind}: {list_some(names)}" for kind, names in listed.items() if names)
    ]
    mine, theirs = model.geometry, source.geometry
    if mine and theirs and mine.grid != theirs.grid:
        change = f"from a grid of {format_sides(theirs.grid)} patches to {format_sides(mine.grid)}"
        loaded.append(f"positions resampled {change} (resample: {init_from.resample})")
    return loaded + [
        f"{option} is {here}, and in the model that the weights were trained in it is {there}"
        for option, here, there in find_option_differences(model, source, head=keeps)
    ]


def find_mismatches(own: State, other: State, unknown: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the names of tensors that ``other`` lacks, has too many, or has in another shape than ``own``, by kind.

    ``unknown`` are further names in the file of ``other``.
    """
    faults = {
        "missing": [name for name in own if name not in other],
        "unknown": [*unknown, *(name for name in other if name not in own)],
        "of another shape": [name for name in own if name in other and other[name].shape != own[name].shape],
    }
    return {kind: names for kind, names in faults.items() if names}


def describe_mismatches(faults: Mapping[str, Sequence[str]]) -> str:
    """Return the names of :func:`find_mismatches` in a sentence."""
    parts = (f"{list_some(names)} {'is' if len(names) == 1 else 'are'} {kind}" for kind, names in faults.items())
    return ", ".join(parts)


def _require_comparable(model: Model, source: Model, how: InitFrom) -> None:
    """Raise WeightsError for other sizes, or other tokens without conversion."""
    mine, theirs = model.geometry, source.geometry
    if mine is None or theirs is None:
        return
    has, here = ({"dim": g.dim, "depth": g.depth, "heads": g.heads, "patch_size": [*g.patch]} for g in (theirs, mine))
    if differing := [name for name in has if has[name] != here[name]]:
        raise WeightsError(
            f"these weights have {', '.join(f'{name} {has[name]}' for name in differing)}, and this model has "
            f"{', '.join(f'{name} {here[name]}' for name in differing)}; set "
            f"{', '.join(f'model.{name}: {has[name]}' for name in differing)}"
        )
    if mine.prefix != theirs.prefix and how.tokens == "same":
        differ = [name for token, name in TOKENS.items() if mine.prefix.count(token) != theirs.prefix.count(token)]
        raise WeightsError(
            f"these weights have other tokens before the patches ({', '.join(theirs.prefix) or 'none'}) than this "
            f"model ({', '.join(mine.prefix) or 'none'}); set init_from.tokens: convert to leave out each of "
            f"{', '.join(differ)} that only the weights have, and to initialise each that only the model has"
        )


def find_option_differences(model: Model, source: Model, *, head: bool) -> list[tuple[str, str, str]]:
    """Return the options, such as a norm's epsilon, in which two models compute differently, and the value in each.

    Differences that names and shapes of tensors show are left out.
    """
    blocks: dict[tuple[str, str, str], dict[int, None]] = {}
    depth = 0
    for path, choice in model.component_choices.items():
        if path not in source.component_choices or (path == "head" and not head):
            continue
        mine, theirs = (
            {option: format_value(value) for option, value in iter_options(each)}
            for each in (choice, source.component_choices[path])
        )
        name, block = OPTIONS.get(path, path), -1  # a part outside of blocks
        if path.startswith("blocks."):
            _, number, *rest = path.split(".")
            block, name = int(number), rest[-1].rstrip("12") if rest else "block"
            name = "attention" if name == "attn" else name
            depth = max(depth, block + 1)
        differing = [
            option
            for option in sorted(mine.keys() | theirs.keys())
            if option.rpartition(".")[2] not in SHAPES and mine.get(option) != theirs.get(option)
        ]
        for option in differing:
            if any(option.startswith(f"{above}.") for above in differing):
                continue  # of components of different types
            if option.endswith(".prefix_rows"):
                continue  # the table of positions has a row more or less
            if path == "head" and option in (".approximate", ".pool_eps") and mine.get(".pool") != "map":
                continue  # of attention pooling
            values = mine.get(option, "none"), theirs.get(option, "none")
            blocks.setdefault((f"{name}{option}", *values), {})[block] = None
    (width, one), (other_width, other) = _base_width_and_parametrization(model), _base_width_and_parametrization(source)
    if one != other and width != other_width:  # the scale of attention depends on it
        blocks["parametrization", one, other] = {-1: None}
    rows = []
    for (option, one, other), which in blocks.items():
        listed = ", ".join(map(str, which))
        of = "" if [*which] in ([-1], [*range(depth)]) else f" of block{'s' if len(which) > 1 else ''} {listed}"
        rows.append((f"{option}{of}", one, other))
    return rows


def _base_width_and_parametrization(model: Model) -> tuple[int | None, str]:
    """Return the width at which the model's attention has the usual scale, and the parametrization in words."""
    if getattr(model, "parametrization", "standard") == "mup":
        width = cast(int, cast(Any, model).base_width)
        return width, f"mup with base_width {width}"
    return None if model.geometry is None else model.geometry.dim, "standard"


def _adapt_state_to_geometry(model: Model, source: Model, state: State, own: State, init_from: InitFrom) -> NewState:
    """Convert a state of ``source`` to the grid and, if ``init_from`` asks for it, to the tokens of ``model``."""
    out = dict(state)
    theirs, mine = source.geometry, model.geometry
    if theirs is None or mine is None or theirs.dim != mine.dim:
        return out
    shared = mine.prefix
    if init_from.tokens == "convert":
        shared = tuple(t for t in TOKENS for _ in range(min(theirs.prefix.count(t), mine.prefix.count(t))))
        for token, name in TOKENS.items():
            # Tokens that the model does not have are dropped, and those that only it has keep their initial values.
            count = shared.count(token)
            shared_rows = [out.pop(name)[:, :count]] if name in out else []
            if name in own:
                out[name] = torch.cat([*shared_rows, own[name][:, count:]], 1)
    new_encodings = _position_encodings(model)
    for at, old in _position_encodings(source).items():
        to, new = next(((to, new) for to, new in new_encodings.items() if isinstance(new, type(old))), ("", None))
        if new is None:
            continue
        table = {name.removeprefix(at): value for name, value in out.items() if name.startswith(at)}
        resampled = old.resample(table, theirs, replace(mine, prefix=shared), PRESETS[init_from.resample])
        # Rows are converted if both are added at the same layers, and only at the stem if their prefix rows differ.
        if (
            isinstance(old, Learned)
            and isinstance(new, Learned)
            and old.layers == new.layers
            and (old.prefix_rows == new.prefix_rows or old.layers == {0})
        ):
            if old.prefix_rows == "own" and new.prefix_rows == "none":
                _fold_positions_into_prefix_tokens(out, table["pos_embed"], theirs.prefix)
            own_LTD = own[f"{to}pos_embed"]
            resampled["pos_embed"] = _table_with_adapted_prefix_rows(
                resampled["pos_embed"], own_LTD, old, new, shared, mine
            )
        out |= {at + name: value for name, value in resampled.items()}
    return out


def _position_encodings(model: Model) -> dict[str, Position]:
    """Return the position encodings of a model by the prefix of their names in its state."""
    position = getattr(model, "position", None)
    if not isinstance(position, Position):
        return {}
    return {f"position.{at}": encoding for at, encoding in encodings_by_prefix(position).items()}


def _fold_positions_into_prefix_tokens(out: NewState, table_LTD: Tensor, prefix: Sequence[str]) -> None:
    """Fold each prefix token's position row into the token itself."""
    for token, name in TOKENS.items():
        rows = [place for place, other in enumerate(prefix) if other == token]
        if name in out and rows:
            added = table_LTD[:, rows[: out[name].shape[1]]].to(out[name].dtype)
            out[name] = torch.cat([out[name][:, : added.shape[1]] + added, out[name][:, added.shape[1] :]], 1)


def _table_with_adapted_prefix_rows(
    fitted_LTD: Tensor, own_LTD: Tensor, old: Learned, new: Learned, shared: Sequence[str], mine: Geometry
) -> Tensor:
    """Return the model's table of positions.

    Rows of shared tokens are the source's, or zero; rows of other tokens are the initial ones.
    """
    grid_LND = fitted_LTD[:, -mine.patches :]
    if new.prefix_rows == "none":
        return grid_LND
    rows_LPD = own_LTD[:, : len(mine.prefix)].clone()
    at = [place for place, token in enumerate(mine.prefix) if mine.prefix[:place].count(token) < shared.count(token)]
    rows_LPD[:, at] = fitted_LTD[:, : len(shared)] if old.prefix_rows == "own" else 0.0
    return torch.cat([rows_LPD, grid_LND], 1)


def to_native_rotation(state: State, encoding: Encoding, heads: int, *, back: bool = False) -> NewState:
    """Reorder the channels of queries and keys from the file's order to the order of vitlab's ``rope2d``, or ``back``.

    A product of queries and keys does not depend on the order of their channels, so the function stays the same: pair i
    becomes channels 2i and 2i + 1, and the pairs that turn with the column come first.
    """
    out = dict(state)
    if encoding.type == "rope2d_mixed" and encoding.axes == "ij":
        out["position.freqs"] = state["position.freqs"].flip(0)
    if encoding.type != "rope2d" or (encoding.axes == "xy" and encoding.pairs == "interleaved"):
        return out
    pairs = len(state["blocks.0.attn.qkv.weight"]) // (6 * heads)
    order_Q = torch.arange(pairs).roll(0 if encoding.axes == "xy" else pairs // 2)
    channel = {"interleaved": (2 * order_Q, 2 * order_Q + 1), "halves": (order_Q, order_Q + pairs)}[encoding.pairs]
    order_K = torch.stack(channel, 1).flatten()
    if back:
        order_K = order_K.argsort()
    for name, value in state.items():
        if _NORMED.fullmatch(name):
            out[name] = value[order_K]
        elif _QKV.fullmatch(name):
            query_and_key, values = value.reshape(3, heads, 2 * pairs, *value.shape[1:]).tensor_split((2,))
            out[name] = torch.cat([query_and_key.index_select(2, order_K), values]).flatten(0, 2)
    return out


def drop_head(state: State) -> tuple[NewState, tuple[str, ...]]:
    """Return the state without its head and the hidden layer before it, and the names of the removed tensors."""
    dropped = tuple(name for name in state if name.startswith(HEAD))
    return {name: value for name, value in state.items() if name not in dropped}, dropped


def select_head_rows(state: State, file: Path) -> NewState:
    """Return the state with the rows of its heads that a file names, such as the rows of ImageNet-1k in a head of 21k.

    The file has one index a line, in the order of the new classes, as timm's ``imagenet_a_indices.txt``.
    """
    try:
        indices = [int(line) for line in file.read_text(encoding="utf-8").split()]
    except (OSError, ValueError) as error:
        raise WeightsError(f"{file} is no file of indices, one a line: {error}") from None
    heads = {name: value for name, value in state.items() if name.startswith(LAST_LAYERS)}
    outputs = min((len(value) for value in heads.values()), default=0)
    wrong = [index for index in indices if not 0 <= index < outputs]
    if wrong or not indices:
        raise WeightsError(
            f"{file} names {f'output {wrong[0]}' if wrong else 'no output'}, and the head has {outputs:,} outputs, "
            "counted from 0"
        )
    return {**state, **{name: value[indices] for name, value in heads.items()}}


OPTIONS = {"patch_embed": "patch", "norm_pre": "stem_norm", "norm": "final_norm", "fc_norm": "final_norm"}
"""Options of the model by the paths of the parts that they decide, where the names differ."""

TRAINED_BY = ("drop", "proj_drop", "weights")
"""Options of components that do not affect what a trained model computes."""

SHAPES = ("ratio", "representation_size", "width_factor")
"""Options of components that only decide shapes, so that they agree if all tensors fit."""


def iter_options(choice: ResolvedChoice, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of every option of a component, its type under the empty path.

    Options in :data:`TRAINED_BY` are left out; implementations of softmax attention have one type.
    """
    if issubclass(choice.component, Together):
        yield path, component_label(choice.plain())
        for part in encodings_of_choice(choice):
            yield from iter_options(part, f"{path}.{part.bare_name}")
        return
    yield path, "softmax" if choice.component in SOFTMAX else choice.type.removeprefix(f"{BUILT_IN}:")
    for name, value in choice.options.items():
        if isinstance(value, ResolvedChoice):
            yield from iter_options(value, f"{path}.{name}")
        elif name not in TRAINED_BY:
            yield f"{path}.{name}", value


def format_value(value: Any) -> str:
    """Return an option's value as text."""
    match value:
        case bool():
            return "yes" if value else "no"
        case list() | tuple():
            return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
