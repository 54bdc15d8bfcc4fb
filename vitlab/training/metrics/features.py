"""Metrics of features: of the vectors that the classifier of a model reads, whether it is trained or not.

N images of a split, M training images, D width, K classes.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.components.base import Count, Positive
from vitlab.training.metrics.contract import GuessedByClass, Metric, metric

RANK_EPS = 1e-7
"""Added to every share of the singular values, as in RankMe."""

VOTERS = 128
"""Images whose similarities to all training images are in memory at a time."""


class Features(NamedTuple):
    """The features of images and their labels, on the CPU."""

    x_ND: Tensor  #: float64
    y_N: Tensor


class FeatureMetric(Metric):
    """Base of metrics of features; ``of_features`` gets the features of a whole split.

    Features are the input of the model's linear classifier, in evaluation mode and without augmentation.
    """

    reads = "features"

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        raise NotImplementedError("a metric of features has of_features in place of rows and value")

    @abstractmethod
    def of_features(self, images: Features, train: Callable[[], Features]) -> float:
        """Return the metric of a split; ``train`` computes the features of the training images."""


@metric.register("effective_rank")
class EffectiveRank(FeatureMetric):
    """The number of directions that features use: the exponential of the entropy of their singular values.

    From 1, for features along one line, to the smaller of their width and number.  Reference: arXiv:2210.02885
    (RankMe), equation 1.
    """

    bounds = (1.0, math.inf)

    def of_features(self, images: Features, train: Callable[[], Features]) -> float:
        """Return exp(-sum p log p) of the shares p of the singular values of the features, not centred."""
        sigma_D = torch.linalg.svdvals(images.x_ND)
        share_D = sigma_D / sigma_D.sum().clamp(min=torch.finfo(sigma_D.dtype).tiny) + RANK_EPS
        return max(1.0, float(torch.exp(-(share_D * share_D.log()).sum())))


@metric.register("knn")
@dataclass(kw_only=True)
class NearestNeighbours(GuessedByClass, FeatureMetric):
    """Accuracy of the vote of the k training images with the most similar features, by cosine similarity.

    Named ``knnK`` in results, such as ``knn20``, ``knn20_t0_05`` at a temperature of 0.05 instead of the default, and
    ``knn20_uniform`` without one.  It takes a pass over all training images at every evaluation
    (``train.evaluations``).  Reference: arXiv:1805.01978, arXiv:2104.14294 (DINO).

    Args:
        k: Number of neighbours; all training images if there are fewer.
        temperature: A neighbour's vote is exp(similarity / temperature); None for equal votes.
    """

    quantum = 1.0

    k: Count = 20
    temperature: Positive | None = 0.07

    def __post_init__(self) -> None:
        """Set the name in results, which has letters, digits and ``_`` alone."""
        self.name = f"knn{self.k}"
        if self.temperature is None:
            self.name += "_uniform"
        elif self.temperature != 0.07:
            self.name += f"_t{Decimal(str(self.temperature)):f}".replace(".", "_")

    def of_features(self, images: Features, train: Callable[[], Features]) -> float:
        """Return the share of images for whose class the votes are most; of equal classes, the first is predicted."""
        predicted = nearest_classes(images.x_ND, train(), self.k, self.temperature)
        return float((predicted == images.y_N).double().mean())


def nearest_classes(x_ND: Tensor, train: Features, k: int, temperature: float | None) -> Tensor:
    """Return the class that the ``k`` most similar training images vote for, (N,)."""
    # Products of unit vectors are cosines.
    z_MD, classes = F.normalize(train.x_ND, dim=1), int(train.y_N.max()) + 1
    predicted = []
    for part_BD in torch.split(F.normalize(x_ND, dim=1), VOTERS):
        similarity_Bk, index_Bk = (part_BD @ z_MD.T).topk(min(k, len(z_MD)), 1)
        # Relative to the largest, so that no vote overflows.
        vote_Bk = (
            torch.ones_like(similarity_Bk)
            if temperature is None
            else ((similarity_Bk - similarity_Bk[:, :1]) / temperature).exp()
        )
        votes_BK = vote_Bk.new_zeros(len(part_BD), classes).scatter_add_(1, train.y_N[index_Bk], vote_Bk)
        predicted.append(votes_BK.argmax(1))
    return torch.cat(predicted)
