"""Mean attention distance of heads, in pixels.

Reference: Dosovitskiy et al., arXiv:2010.11929, Figure 7 (right) and appendix D.7.  The distance between two patches is
that of their origins; each query patch averages it with its attention weights, and the queries are averaged.

B images, H heads, T tokens of which P stand before the patches, N patches.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vitlab.geometry import Geometry


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
