"""Changes of canonical weights: another grid, other position rows, another rotation order, or no head.

D width, P tokens before the patches, N patches, H heads, K channels of a head.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from vitlab.components.position import Resampling
from vitlab.components.position.resampling import resample_grid
from vitlab.errors import WeightsError
from vitlab.geometry import Pair
from vitlab.weights.known import Encoding
from vitlab.weights.names import State

HEAD = ("head.", "head_dist.")
PRE_LOGITS = "pre_logits."
TOKENS = {"class": "cls_token", "distillation": "dist_token", "register": "reg_token"}


def resample_positions(state: State, old: Pair, new: Pair, how: Resampling) -> dict[str, Tensor]:
    """Resample learned positions from the grid ``old`` to ``new``; the rows of prefix tokens stay as they are."""
    out = dict(state)
    if "pos_embed" in state and old != new:
        rows_TD = state["pos_embed"][0]
        prefix = len(rows_TD) - old[0] * old[1]
        grid_ND = resample_grid(rows_TD[prefix:].reshape(*old, -1), new, how).flatten(0, 1)
        out["pos_embed"] = torch.cat([rows_TD[:prefix], grid_ND])[None]
    return out


def to_native_rotation(state: State, encoding: Encoding, heads: int) -> dict[str, Tensor]:
    """Reorder the channels of queries and keys to the order of vitlab's ``rope2d``.

    A product of queries and keys does not depend on the order of their channels, so the
    function stays the same: pair i becomes channels 2i and 2i + 1, and the pairs that turn with the column come first.

    Args:
        state: canonical tensors.
        encoding: the rotation, and the order in the file.
        heads: number of heads.
    """
    out = dict(state)
    if "rope.freqs" in out and encoding.type == "rope2d_mixed":
        freqs = out.pop("rope.freqs")
        out["position.freqs"] = freqs.flip(0) if encoding.axes == "ij" else freqs
        return out
    weight = state.get("blocks.0.attn.qkv.weight")
    if encoding.type != "rope2d" or weight is None or weight.shape[0] % (12 * heads):
        return out
    if encoding.axes == "xy" and encoding.pairs == "interleaved":
        return out
    pairs = weight.shape[0] // (6 * heads)
    order_Q = torch.arange(pairs) if encoding.axes == "xy" else torch.arange(pairs).roll(pairs // 2)
    channel = {"interleaved": (2 * order_Q, 2 * order_Q + 1), "halves": (order_Q, order_Q + pairs)}[encoding.pairs]
    order_K = torch.stack(channel, 1).flatten()
    for name, value in state.items():
        if _NORMED.fullmatch(name):
            out[name] = value[order_K]
        elif _QKV.fullmatch(name):
            parts_3HK = value.reshape(3, heads, 2 * pairs, *value.shape[1:])
            turned_2HK = parts_3HK[:2].index_select(2, order_K)
            out[name] = torch.cat([turned_2HK, parts_3HK[2:]]).flatten(0, 2)
    return out


def convert_prefix_rows(state: State, prefix: Sequence[str], old: str, new: str) -> dict[str, Tensor]:
    """Add or remove the position rows of the tokens before the patches, without changing the sums.

    A removed row is added to its token; an added row is zero.

    Args:
        state: canonical tensors.
        prefix: names of these tokens, in order.
        old: ``own`` or ``none``, in ``state``.
        new: ``own`` or ``none``, in the result.
    """
    out = dict(state)
    if "pos_embed" not in state or not prefix or old == new:
        return out
    table = state["pos_embed"]
    if new == "own":
        out["pos_embed"] = torch.cat([table.new_zeros(1, len(prefix), table.shape[2]), table], 1)
        return out
    for token, name in TOKENS.items():
        rows = [index for index, other in enumerate(prefix) if other == token]
        if rows:
            out[name] = state[name] + table[:, rows].to(state[name].dtype)
    out["pos_embed"] = table[:, len(prefix) :].contiguous()
    return out


def drop_head(
    state: State, head: Literal["keep", "new"], pre_logits: Literal["keep", "drop"]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the state without its head or pre-logits, and the names of the removed tensors.

    Raises:
        WeightsError: if the pre-logits are dropped and the head that reads them is not.
    """
    prefixes = HEAD if head == "new" else ()
    if pre_logits == "drop":
        reads = any(name.startswith(PRE_LOGITS) for name in state) and "head.weight" in state
        if reads and head == "keep":
            raise WeightsError("the head reads the pre-logits; drop both, or keep both")
        prefixes = (*prefixes, PRE_LOGITS)
    dropped = tuple(name for name in state if name.startswith(prefixes)) if prefixes else ()
    return {name: value for name, value in state.items() if name not in dropped}, dropped


_QKV = re.compile(r"blocks\.\d+\.attn\.qkv\.(weight|bias)")
_NORMED = re.compile(r"blocks\.\d+\.attn\.[qk]_norm\.(weight|bias)")
