"""Metrics of the probabilities of classes.  Reference: arXiv:1706.04599 (calibration)."""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from vitlab.training.metrics.contract import Metric, metric


@metric.register("ece")
class ExpectedCalibrationError(Metric):
    """Mean distance of accuracy from confidence, over bins of equal width.  Reference: arXiv:1706.04599.

    Args:
        bins: Number of bins.
    """

    goal = "min"

    def __init__(self, *, bins: Annotated[int, Field(ge=1)] = 15) -> None:
        self.bins = bins

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the confidence of each image and whether it is correct, B2."""
        probability_B, correct_B = logits.softmax(1).amax(1), logits.argmax(1) == target
        return torch.stack([probability_B.double(), correct_B.double()], 1)

    def value(self, rows_N: Tensor) -> float:
        """Return the weighted gap between confidence and accuracy over the bins."""
        probability_N, correct_N = rows_N.unbind(1)
        return calibration_error(probability_N, correct_N, self.bins)


@metric.register("brier")
class Brier(Metric):
    """Mean squared distance of the probabilities from the class, summed over classes; 0 to 2.

    Reference: G. W. Brier, Verification of forecasts expressed in terms of probability, 1950.
    """

    goal = "min"
    bounds = (0.0, 2.0)

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the squared distance between probabilities and target per image."""
        probability_BK = logits.double().softmax(1)
        return (probability_BK - F.one_hot(target, logits.shape[1])).square().sum(1)


def calibration_error(probability_N: Tensor, right_N: Tensor, bins: int = 15) -> float:
    """Return the mean distance of accuracy from confidence over equal-width bins, weighted by their image counts.

    Args:
        probability_N: Probability of the predicted class.
        right_N: True where the prediction is correct.
        bins: Number of bins.
    """
    bin_N = (probability_N.double() * bins).ceil().long().sub(1).clamp(0, bins - 1)
    excess_N = right_N.double() - probability_N.double()
    gap_S = torch.zeros(bins, dtype=torch.float64).index_add_(0, bin_N, excess_N)
    return float(gap_S.abs().sum() / len(probability_N))
