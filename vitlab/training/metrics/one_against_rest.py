"""Metrics of each class against all others, averaged over classes: f1, auroc.

B images of a batch, N images of a split, K classes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vitlab.training.metrics.contract import Metric, mean, metric


@metric.register("f1")
class MacroF1(Metric):
    """Mean over classes of the harmonic mean of precision and recall: 2 hits / (labels + predictions).

    Over the classes that occur in the split as labels or predictions, as scikit-learn's ``f1_score`` with
    ``average="macro"``.
    """

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the class and the prediction of each image, B2."""
        return torch.stack([target, logits.argmax(1)], 1)

    def value(self, rows_N: Tensor) -> float:
        """Return the mean over classes."""
        target_N, prediction_N = rows_N.unbind(1)
        classes = int(rows_N.max()) + 1
        hits_K = torch.bincount(target_N[target_N == prediction_N], minlength=classes)
        both_K = torch.bincount(rows_N.flatten(), minlength=classes)
        return mean((2 * hits_K / both_K.double())[both_K > 0])


@metric.register("auroc")
class AUROC(Metric):
    """Mean over classes of the area under the ROC curve: the chance that an image of the class has the larger logit.

    More exactly the larger probability of the class, compared with an image of another class; ties count half.  Over
    the classes of the split; 1/2 if it has one class alone.  It keeps a number per image and class until the end of an
    evaluation.  Reference: Fawcett, An introduction to ROC analysis, Pattern Recognition Letters 27, 2006.
    """

    def rows(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the probabilities of each image, and its class as the last column, (B, K + 1)."""
        return torch.cat([logits.softmax(1), target[:, None].to(logits.dtype)], 1)

    def value(self, rows_N: Tensor) -> float:
        """Return the mean over classes."""
        from scipy.stats import rankdata  # takes half a second to import

        probability_NK, target_N = rows_N[:, :-1].numpy(), rows_N[:, -1].long().numpy()
        areas = []
        for label in np.unique(target_N):
            ranks_M = rankdata(probability_NK[:, label])[target_N == label]
            positive, negative = len(ranks_M), len(target_N) - len(ranks_M)
            if negative:
                areas.append((ranks_M.sum() - positive * (positive + 1) / 2) / (positive * negative))
        return float(np.mean(areas)) if areas else 0.5
