"""Probes of parameters and tokens, without gradients.

B images, T tokens of which P stand before the patches, N patches, D width, C channels, K components.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitlab.geometry import Geometry


class Components(NamedTuple):
    """Principal components of patch filters."""

    filters_KCHW: Tensor  #: float64, orthonormal when flattened, strongest first
    share_K: Tensor  #: share of the variance each explains


def filter_components(weight_DCHW: Tensor, count: int = 28) -> Components:
    """Return the first principal components of the patch embedding's filters.

    Reference: arXiv:2010.11929, Figure 7 (left), which shows the first 28 of ViT-L/32.

    Args:
        weight_DCHW: the kernel of the patch embedding.
        count: number of components; at most the number of filters or pixels.
    """
    flat_DX = weight_DCHW.detach().double().flatten(1)
    centred_DX = flat_DX - flat_DX.mean(0)
    _, singular, basis = torch.linalg.svd(centred_DX, full_matrices=False)
    count = min(count, basis.shape[0])
    share = singular.square() / singular.square().sum().clamp_min(1e-300)
    return Components(basis[:count].unflatten(1, weight_DCHW.shape[1:]), share[:count])


def position_similarity(table_ND: Tensor, geometry: Geometry) -> Tensor:
    """Return the cosine similarity of each patch's position with all others, (rows, columns, rows, columns).

    Reference: arXiv:2010.11929, Figure 7 (centre).
    """
    unit_ND = torch.nn.functional.normalize(table_ND.detach().double(), dim=-1)
    return (unit_ND @ unit_ND.T).view(*geometry.grid, *geometry.grid)


def token_cosine(tokens_LBTD: Sequence[Tensor], geometry: Geometry) -> Tensor:
    """Return the cosine of the class and the distillation token at each depth, averaged over images, (L,).

    Reference: Touvron et al., arXiv:2012.12877, section 4: 0.06 at the input, 0.93 after the last block.

    Raises:
        ValueError: if the model lacks one of the tokens.
    """
    if not {"class", "distillation"} <= set(geometry.prefix):
        raise ValueError(
            "the model needs a class and a distillation token; the tokens before its patches are: "
            f"{', '.join(geometry.prefix) or 'none'}. Use a model with prefix: [class, distillation]."
        )
    first, second = geometry.prefix.index("class"), geometry.prefix.index("distillation")
    cosines = [
        torch.nn.functional.cosine_similarity(tokens_BTD[:, first].double(), tokens_BTD[:, second].double(), dim=-1)
        for tokens_BTD in tokens_LBTD
    ]
    return torch.stack([cosine_B.mean() for cosine_B in cosines])


class Norms(NamedTuple):
    """Norms of the patch tokens of one depth."""

    norms_BN: Tensor
    outliers: float  #: share of patch tokens beyond the threshold
    threshold: float
    ratio: float  #: largest norm over the median


def token_norms(tokens_BTD: Tensor, geometry: Geometry) -> Norms:
    """Return norms of patch tokens, and the share of outliers by the threshold median + 10 x MAD.

    Darcet et al. (arXiv:2309.16588) use a fixed norm that was chosen by eye for one model (150 for DINOv2-g).  Norms of
    other models differ, so the threshold here depends on the median and the median absolute deviation (MAD).  If more
    than half of the tokens are equal, such as those of a blank border without positions, it is the mean deviation.
    """
    norms_BN = tokens_BTD[:, len(geometry.prefix) :].double().norm(dim=-1)
    median = norms_BN.median()
    away_BN = (norms_BN - median).abs()
    spread = torch.where(away_BN.median() > 1e-6 * median, away_BN.median(), away_BN.mean())
    threshold = float(median + 10.0 * spread)
    outliers = float((norms_BN > threshold).double().mean())
    return Norms(norms_BN, outliers, threshold, float(norms_BN.max() / median))
