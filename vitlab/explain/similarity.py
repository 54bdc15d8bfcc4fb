"""Linear CKA: how alike the features of two models are, whatever their basis and scale.

Two sets of features of the same images are alike if the same pairs of images are close in both.  The similarity is the
HSIC of the two matrices of inner products, divided by the root of the HSIC of each with itself.  HSIC is estimated
without bias from batches, over which it is summed.

Reference: arXiv:1905.00414 (CKA), arXiv:2010.15327, section 3 (batches), and Song et al., "Feature Selection via
Dependence Maximization", JMLR 2012 (the estimator).

N images of a batch, X features, R sets of features, B batches, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from vitlab.explain.capture import recorded_tokens
from vitlab.models.vit import ViT

MIN_BATCH = 4  #: images that the unbiased estimator needs


@torch.no_grad()
def grams_of_blocks(model: ViT, batches: Iterable[Tensor]) -> list[Tensor]:
    """Return the :func:`centred_gram` (B, N, N) of all tokens after each block; the model keeps its mode.

    Args:
        model: the model.
        batches: its inputs, each (N, C, H, W).
    """
    grams: list[list[Tensor]] = []
    training = model.training
    model.eval()
    try:
        for x_NCHW in batches:
            with recorded_tokens(model, lambda x_NTD: centred_gram(x_NTD.flatten(1))) as recorded:
                model(x_NCHW)
            grams.append(recorded[1:])
    finally:
        model.train(training)
    return [torch.stack(of_block) for of_block in zip(*grams, strict=True)]


def centred_gram(x_NX: Tensor) -> Tensor:
    """Return the inner products of images, centred without bias, float64 (N, N).

    The inner product of two such matrices is N (N - 3) times the unbiased estimate of HSIC.
    """
    x_NX = x_NX.double()
    count = len(x_NX)
    gram_NN = (x_NX @ x_NX.T).fill_diagonal_(0)
    sum_N = gram_NN.sum(0)
    offset_N = (sum_N - sum_N.sum() / (2 * (count - 1))) / (count - 2)
    return (gram_NN - offset_N[:, None] - offset_N).fill_diagonal_(0)


def linear_cka(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    """Return the CKA of every two sets of features, one of each, float64; not a number where features are constant.

    Args:
        first: centred inner products (B, N, N) of each set.
        second: those of the other sets, for the same batches.
    """
    first_RX, second_RX = (torch.stack([gram_BNN.flatten() for gram_BNN in grams]) for grams in (first, second))
    norms_RR = torch.outer(torch.linalg.vector_norm(first_RX, dim=1), torch.linalg.vector_norm(second_RX, dim=1))
    return first_RX @ second_RX.T / norms_RR
