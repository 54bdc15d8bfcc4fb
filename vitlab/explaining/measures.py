"""Numbers of a model's attention, tokens and parameters, without gradients.

The rollout is the contribution of each patch to a token through all blocks (Abnar & Zuidema, arXiv:2005.00928).  With
the residual connection as half of each block, the map of block l becomes A'_l = rows of (A_l + I) scaled to sum to 1,
and the rollout is A'_L ... A'_2 A'_1.

The distance between two patches is the distance between their origins; each query patch averages it with its attention
weights, and the queries are averaged (arXiv:2010.11929, Figure 7 (right) and appendix D.7).

B images, L blocks, H heads, T tokens of which P stand before the patches, N patches, D width.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitlab.geometry import Geometry

# -- attention --------------------------------------------------------------------------------------------------------


def rollout(maps_LBHTT: Sequence[Tensor]) -> Tensor:
    """Return the rollout over all blocks, float64 (B, T, T), of the mean over heads; every row sums to 1."""
    eye_TT = torch.eye(maps_LBHTT[0].shape[-1], dtype=torch.float64, device=maps_LBHTT[0].device)
    rolled_BTT = eye_TT
    for maps_BHTT in maps_LBHTT:
        # In float64: a product of many maps loses digits, and rows are to sum to 1.
        step_BTT = maps_BHTT.double().mean(1) + eye_TT
        rolled_BTT = step_BTT / step_BTT.sum(-1, keepdim=True) @ rolled_BTT
    return rolled_BTT


def attention_to_patch_maps(rolled_BTT: Tensor, geometry: Geometry, reads: Collection[str] | None) -> dict[str, Tensor]:
    """Return the contribution of each patch to the output: ``{token: (B, rows, columns)}``, without prefix columns.

    There is one map for each prefix token that the head reads; if there is none, ``mean`` over all patch rows.

    Args:
        rolled_BTT: a rollout, or the maps of one block.
        geometry: the model's sizes.
        reads: the ``reads`` of the model's head; None: the class and the distillation token, if they exist.
    """
    prefix = len(geometry.prefix)
    tokens = ("class", "distillation") if reads is None else reads
    rows_BN = {name: rolled_BTT[:, row, prefix:] for row, name in enumerate(geometry.prefix) if name in tokens}
    if not rows_BN:
        rows_BN = {"mean": rolled_BTT[:, prefix:, prefix:].mean(1)}
    return {name: map_BN.reshape(-1, *geometry.grid) for name, map_BN in rows_BN.items()}


def patch_distances(geometry: Geometry) -> Tensor:
    """Return the Euclidean distances between the origins of patches, in pixels of the image, float64 (N, N)."""
    sides = zip(geometry.image, geometry.grid, strict=True)
    place_N2 = torch.cartesian_prod(*(torch.arange(n, dtype=torch.float64) * pixels / n for pixels, n in sides))
    return (place_N2[:, None] - place_N2).norm(dim=-1)


def attention_distance(maps_BHTT: Tensor, geometry: Geometry) -> Tensor:
    """Return the mean attention distance of each head, in pixels, float64 (B, H).

    As in the authors' code, attention to prefix tokens counts as no distance.
    """
    prefix = len(geometry.prefix)
    weights_BHNN = maps_BHTT[:, :, prefix:, prefix:].double()
    return (weights_BHNN * patch_distances(geometry).to(weights_BHNN.device)).sum(-1).mean(-1)


# -- parameters and tokens --------------------------------------------------------------------------------------------


def position_similarity(table_ND: Tensor, geometry: Geometry) -> Tensor:
    """Return the cosine similarity of each patch's position with all others, (rows, columns, rows, columns).

    Reference: arXiv:2010.11929, Figure 7 (centre).
    """
    unit_ND = torch.nn.functional.normalize(table_ND.detach().double(), dim=-1)
    return (unit_ND @ unit_ND.T).view(*geometry.grid, *geometry.grid)


class Norms(NamedTuple):
    """Norms of the patch tokens of one depth."""

    median: float
    ratio: float  #: largest norm over the median
    threshold: float
    outliers: float  #: share of patch tokens beyond the threshold


def token_norm_statistics(tokens_BTD: Tensor, geometry: Geometry) -> Norms:
    """Return norms of patch tokens, and the share of outliers by the threshold median + 10 x MAD.

    Darcet et al. (arXiv:2309.16588) use a fixed norm that was chosen by eye for one model (150 for DINOv2-g).  Norms of
    other models differ, so the threshold here depends on the median and the median absolute deviation (MAD).  If more
    than half of the tokens are equal, such as the tokens of a blank border without positions, it is the mean deviation.
    """
    norms_BN = tokens_BTD[:, len(geometry.prefix) :].double().norm(dim=-1)
    median = norms_BN.median()
    away_BN = (norms_BN - median).abs()
    spread = torch.where(away_BN.median() > 1e-6 * median, away_BN.median(), away_BN.mean())
    threshold = float(median + 10.0 * spread)
    outliers = float((norms_BN > threshold).double().mean())
    return Norms(float(median), float(norms_BN.max() / median), threshold, outliers)
