"""Who is trained on, who is validated on: stratified, nested, and a pure function of a key.

Each class is put in an order drawn from the key and the identities of its images.  Validation is the
front of that order, a fraction is the front of another order of what remains.  So a larger share holds a smaller one,
and neither depends on how much is asked for elsewhere.

N images.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vitlab import noise
from vitlab.errors import DataError


def hold_out(y_N: Tensor, id_N: Tensor, share: float, k: noise.Key) -> tuple[Tensor, Tensor]:
    """Positions in ``id_N`` of the images to train on and of those held out, both ascending.

    Args:
        y_N: classes.
        id_N: identities of the images, which the draw is keyed by.
        share: in (0, 1).
        k: of the draw.

    Of each class of n images, ``share * n`` are held out, rounded to the nearest whole number, but at least one where
    it has two or more, and never all.

    Raises:
        DataError: if nothing could be held out.
    """
    held = torch.zeros(len(y_N), dtype=torch.bool)
    for position_M in _orders(y_N, id_N, k):
        count = min(max(_share(share, len(position_M)), 1), len(position_M) - 1)
        held[position_M[:count]] = True
    if not held.any():
        raise DataError(f"no class has two images, so none of the {len(y_N)} can be held out for validation")
    return (~held).nonzero()[:, 0], held.nonzero()[:, 0]


def hold_out_groups(group_N: Tensor, share: float, k: noise.Key) -> tuple[Tensor, Tensor]:
    """Positions in ``group_N`` of the images to train on and of those held out, both ascending, no group in both.

    Args:
        group_N: the group of each image.
        share: in (0, 1), of the groups; rounded to the nearest whole number of them, but at least one, and never all.
        k: of the draw, which is keyed by the groups.

    Raises:
        DataError: if there are fewer than two groups.
    """
    name_G, place_N = group_N.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    if len(name_G) < 2:
        raise DataError(f"all {len(group_N)} images are of one group, so none can be held out for validation")
    _, held_G = hold_out(torch.zeros_like(name_G), name_G, share, k)
    held_N = torch.isin(place_N, held_G)
    return (~held_N).nonzero()[:, 0], held_N.nonzero()[:, 0]


def fraction(y_N: Tensor, id_N: Tensor, share: float, k: noise.Key) -> Tensor:
    """Positions in ``id_N`` of a stratified share of it, ascending; a smaller share is a subset of a larger one.

    Args:
        y_N: classes.
        id_N: identities of the images, which the draw is keyed by.
        share: in (0, 1]; of each class of n images ``share * n`` are taken, rounded, at least one.
        k: of the draw.
    """
    if share == 1:
        return torch.arange(len(y_N))
    kept = torch.zeros(len(y_N), dtype=torch.bool)
    for position_M in _orders(y_N, id_N, k):
        kept[position_M[: max(_share(share, len(position_M)), 1)]] = True
    return kept.nonzero()[:, 0]


def at_most(y_N: Tensor, id_N: Tensor, count: int, k: noise.Key) -> Tensor:
    """Positions in ``id_N`` of ``count`` images of each class, or all where it has fewer, ascending.

    A smaller number of them is a subset of a larger one.  Under the key of :func:`fraction` they stand at the front of
    the same order.

    Args:
        y_N: classes.
        id_N: identities of the images, which the draw is keyed by.
        count: at least one.
        k: of the draw.
    """
    kept = torch.zeros(len(y_N), dtype=torch.bool)
    for position_M in _orders(y_N, id_N, k):
        kept[position_M[:count]] = True
    return kept.nonzero()[:, 0]


def _orders(y_N: Tensor, id_N: Tensor, k: noise.Key) -> Iterator[Tensor]:
    """For each class the positions of its images, in an order drawn from ``k`` and their identities."""
    word_N2 = noise.bits(k, id_N, 2).long() & 0x7FFFFFFF
    rank_N = torch.argsort((word_N2[:, 0] << 31) | word_N2[:, 1], stable=True)
    for label in sorted(set(y_N.tolist())):
        yield rank_N[y_N[rank_N] == label]


def _share(share: float, n: int) -> int:
    """``share * n`` to the nearest whole number, halves up."""
    return int(share * n + 0.5)
