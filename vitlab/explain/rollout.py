"""Numbers of attention maps: rollout, and the mean attention distance of heads.

Rollout is the contribution of each patch to a token through all blocks (Abnar & Zuidema, arXiv:2005.00928).  With the
residual connection as half of each block, the map of block l becomes A'_l = rows of (A_l + I) scaled to sum to 1, and
the rollout is A'_L ... A'_2 A'_1.

The distance between two patches is that of their origins; each query patch averages it with its attention weights, and
the queries are averaged (arXiv:2010.11929, Figure 7 (right) and appendix D.7).

B images, L blocks, H heads, T tokens of which P stand before the patches, N patches.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import Tensor

from vitlab.geometry import Geometry

Fusion = Literal["mean", "max", "min"]


def rollout(maps_LBHTT: Sequence[Tensor], *, fusion: Fusion = "mean", discard: float = 0.0) -> Tensor:
    """Return the rollout over all blocks, float64 (B, T, T); every row sums to 1.

    Args:
        maps_LBHTT: one (B, H, T, T) per block, first block first.
        fusion: reduction over the heads of a block.
        discard: share of the smallest weights of each image's map that is set to 0, in [0, 1).  An empty row keeps its
            residual connection.
    """
    if not 0 <= discard < 1:
        raise ValueError(f"discard is a share in [0, 1); found {discard}")
    rolled_BTT: Tensor | None = None
    for maps_BHTT in maps_LBHTT:
        fused_BTT = _fuse(maps_BHTT.double(), fusion)
        if discard:
            fused_BTT = _drop_smallest(fused_BTT, discard)
        eye_TT = torch.eye(fused_BTT.shape[-1], dtype=fused_BTT.dtype, device=fused_BTT.device)
        step_BTT = fused_BTT + eye_TT
        step_BTT = step_BTT / step_BTT.sum(-1, keepdim=True)
        rolled_BTT = step_BTT if rolled_BTT is None else step_BTT @ rolled_BTT
    if rolled_BTT is None:
        raise ValueError("a rollout needs the map of at least one block")
    return rolled_BTT


def to_patches(rolled_BTT: Tensor, geometry: Geometry, reads: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return the contribution of each patch to the output: ``{token: (B, rows, columns)}``, without prefix columns.

    There is one map for each prefix token that the head reads; if there is none, ``mean`` over all patch rows.

    Args:
        rolled_BTT: a rollout, or the maps of one block.
        geometry: the model's sizes.
        reads: the ``reads`` of the model's head; by default the class and the distillation token, if they exist.
    """
    prefix = len(geometry.prefix)
    tokens = ("class", "distillation") if reads is None else reads
    rows = {name: index for index, name in enumerate(geometry.prefix) if name in tokens}
    rows_BN = {name: rolled_BTT[:, index, prefix:] for name, index in rows.items()}
    if not rows_BN:
        rows_BN = {"mean": rolled_BTT[:, prefix:, prefix:].mean(1)}
    return {name: map_BN.reshape(-1, *geometry.grid) for name, map_BN in rows_BN.items()}


def _fuse(maps_BHTT: Tensor, fusion: Fusion) -> Tensor:
    if fusion == "mean":
        return maps_BHTT.mean(1)
    return maps_BHTT.amax(1) if fusion == "max" else maps_BHTT.amin(1)


def _drop_smallest(fused_BTT: Tensor, share: float) -> Tensor:
    """Set the smallest weights of each image to 0; each image has its own threshold."""
    flat_BX = fused_BTT.flatten(1)
    count = int(flat_BX.shape[1] * share)
    if not count:
        return fused_BTT
    smallest_BK = flat_BX.topk(count, dim=1, largest=False).indices
    return flat_BX.scatter(1, smallest_BK, 0.0).view_as(fused_BTT)


def patch_distances(geometry: Geometry) -> Tensor:
    """Return the Euclidean distances between the origins of patches, in pixels of the image, float64 (N, N)."""
    rows, columns = geometry.grid
    step_y, step_x = geometry.image[0] / rows, geometry.image[1] / columns
    y_N = torch.arange(rows, dtype=torch.float64).repeat_interleave(columns) * step_y
    x_N = torch.arange(columns, dtype=torch.float64).repeat(rows) * step_x
    return torch.hypot(y_N[:, None] - y_N, x_N[:, None] - x_N)


def attention_distance(
    maps_BHTT: Tensor, geometry: Geometry, *, prefix_weight: Literal["dropped", "redistributed"] = "dropped"
) -> Tensor:
    """Return the mean attention distance of each head, in pixels, float64 (B, H).

    Args:
        maps_BHTT: attention weights of one block.
        geometry: the model's sizes.
        prefix_weight: treatment of attention to prefix tokens.  ``dropped``, as in the authors' code: it counts
            as no distance.  ``redistributed``: the weights of the patches are scaled to sum to 1.
    """
    prefix = len(geometry.prefix)
    weights_BHNN = maps_BHTT[:, :, prefix:, prefix:].double()
    if prefix_weight == "redistributed":
        weights_BHNN = weights_BHNN / weights_BHNN.sum(-1, keepdim=True).clamp_min(1e-12)
    distances_NN = patch_distances(geometry).to(weights_BHNN.device)
    return (weights_BHNN * distances_NN).sum(-1).mean(-1)
