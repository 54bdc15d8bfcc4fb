"""Draws of some images of a split: to hold out for validation or test, or to train on.

A draw is stratified, nested, and a pure function of a key.  The images of each class are ordered by a draw from the key
and their identities.  Validation is the front of that order, a fraction the front of another order of the remaining
images.  A larger share therefore contains a smaller one, and the two shares do not influence each other's order.

N images of a split, M of a class, G groups.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from vitlab import noise
from vitlab.errors import DataError


def hold_out_stratified(y_N: Tensor, id_N: Tensor, share: float, k: noise.Key) -> tuple[Tensor, Tensor]:
    """Return the positions in ``id_N`` of training and of validation images, both ascending.

    Of each class of n images, ``share * n`` are held out, rounded to the nearest whole number; at least one if the
    class has two or more, and never all.

    Raises:
        DataError: if no class has two images.
    """
    held_out_N = _mask_first_of_class(y_N, id_N, k, lambda n: min(_rounded_share(share, n), n - 1))
    if not held_out_N.any():
        raise DataError(
            f"no class has two images, so none of the {len(y_N)} can be held out for validation; add images"
        )
    return split_by_mask(held_out_N)


def split_by_mask(mask_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions where a mask is false, and where it is true, both ascending."""
    return (~mask_N).nonzero()[:, 0], mask_N.nonzero()[:, 0]


def hold_out_groups(group_N: Tensor, share: float, k: noise.Key) -> tuple[Tensor, Tensor]:
    """Return the positions in ``group_N`` of training and of validation images, both ascending, no group in both.

    The share is of the groups, rounded to the nearest whole number, at least one, and never all.

    Raises:
        DataError: if there are fewer than two groups.
    """
    name_G, index_N = group_N.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    if len(name_G) < 2:
        raise DataError("all images are of one group, so none can be held out for validation; add images")
    _, group_M = hold_out_stratified(torch.zeros_like(name_G), name_G, share, k)
    return split_by_mask(torch.isin(index_N, group_M))


def select_stratified_share(y_N: Tensor, id_N: Tensor, share: float, k: noise.Key) -> Tensor:
    """Return the positions in ``id_N`` of a stratified share, ascending; a smaller share is a subset of a larger one.

    Of each class of n images ``share * n`` are selected, rounded, at least one.
    """
    return _mask_first_of_class(y_N, id_N, k, lambda n: _rounded_share(share, n)).nonzero()[:, 0]


def limit_per_class(y_N: Tensor, id_N: Tensor, count: int, k: noise.Key) -> Tensor:
    """Return the positions in ``id_N`` of ``count`` images of each class, or of all if it has fewer, ascending.

    A smaller count selects a subset of a larger one.  With the key of :func:`select_stratified_share`, both select from
    the front of the same order.
    """
    return _mask_first_of_class(y_N, id_N, k, lambda n: count).nonzero()[:, 0]


def _mask_first_of_class(y_N: Tensor, id_N: Tensor, k: noise.Key, count: Callable[[int], int]) -> Tensor:
    """Return which images are among the first ``count(M)`` of their class, in an order drawn from ``k``, bool (N,)."""
    rank_N = noise.order(k, id_N)
    # Class by class, which takes no pass over all images for each of them.
    order_N = rank_N[y_N[rank_N].argsort(stable=True)]
    front_N = torch.zeros(len(y_N), dtype=torch.bool)
    for position_M in torch.split(order_N, torch.bincount(y_N).tolist()):
        front_N[position_M[: count(len(position_M))]] = True
    return front_N


def _rounded_share(share: float, n: int) -> int:
    """Return ``share * n`` rounded to the nearest whole number, halves up; at least one."""
    return max(int(share * n + 0.5), 1)
