"""Metrics of an evaluation, and what each image contributed to them.

B batch, N images of a split, K classes, M decisions: images, or the pixels of segmentation.  Classes stand on axis 1 of
logits, (B, K) or (B, K, rows, columns).

``loss`` is the mean negative log-likelihood of the prediction, whatever loss was trained on, so that arms with
different losses can be compared.  ``ece`` is the expected calibration error over 15 bins of equal width.

Reference: arXiv:1706.04599 (calibration).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.training.losses import flat

BINS = 15
TOP = 5

Columns = dict[str, Tensor]
"""One value per image, by name."""


class Tally(ABC):
    """Takes an evaluation batch by batch; nothing is read back from the device before the end."""

    def __init__(self) -> None:
        self._columns: defaultdict[str, list[Tensor]] = defaultdict(list)

    @abstractmethod
    def add(self, views: Mapping[str, Tensor], target: Tensor, id_B: Tensor) -> None:
        """Take a batch: logits by view, ``""`` the prediction; the classes; the identities of the images."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """The metrics over all that was taken."""

    def columns(self) -> Columns:
        """What each image contributed, on the CPU."""
        return {name: torch.cat(parts).cpu() for name, parts in self._columns.items()}

    def _take(self, **columns: Tensor) -> None:
        for name, column_B in columns.items():
            self._columns[name].append(column_B)


class Classification(Tally):
    """Loss, accuracy, top-5 accuracy where there are more than five classes, calibration error, accuracy per view."""

    def __init__(self) -> None:
        super().__init__()
        self._right: defaultdict[str, list[Tensor]] = defaultdict(list)

    def add(self, views: Mapping[str, Tensor], target: Tensor, id_B: Tensor) -> None:
        logits_BK = views[""]
        probability_B, prediction_B = logits_BK.softmax(1).max(1)
        nll_B = F.cross_entropy(logits_BK, target, reduction="none")
        self._take(id=id_B, label=target, prediction=prediction_B, probability=probability_B, loss=nll_B)
        if logits_BK.shape[1] > TOP:
            top_BT = logits_BK.topk(TOP, 1).indices
            self._right["top5"].append((top_BT == target[:, None]).any(1))
        for view, view_BK in views.items():
            name = f"accuracy_{view}" if view else "accuracy"
            self._right[name].append(view_BK.argmax(1) == target)

    def metrics(self) -> dict[str, float]:
        columns = self.columns()
        right = {name: torch.cat(parts).cpu() for name, parts in self._right.items()}
        found = {"loss": mean(columns["loss"])}
        found |= {name: mean(right_N) for name, right_N in sorted(right.items())}
        found["ece"] = calibration_error(columns["probability"], right["accuracy"])
        return found


class Segmentation(Tally):
    """Loss and accuracy per pixel, and the mean over classes of intersection over union."""

    def __init__(self) -> None:
        super().__init__()
        self._confusion: list[Tensor] = []

    def add(self, views: Mapping[str, Tensor], target: Tensor, id_B: Tensor) -> None:
        logits = views[""]
        classes, images = logits.shape[1], len(id_B)
        logits_MK, target_M = flat(logits, target)
        prediction_M = logits_MK.argmax(1)
        nll_M = F.cross_entropy(logits_MK, target_M, reduction="none")
        right_M = (prediction_M == target_M).double()
        self._take(id=id_B, pixel_accuracy=right_M.view(images, -1).mean(1), loss=nll_M.view(images, -1).mean(1))
        pairs = torch.bincount(target_M * classes + prediction_M, minlength=classes**2)
        self._confusion.append(pairs.view(classes, classes))

    def metrics(self) -> dict[str, float]:
        columns = self.columns()
        confusion_KK = torch.stack(self._confusion).sum(0).cpu()
        return {
            "loss": mean(columns["loss"]),
            "pixel_accuracy": mean(columns["pixel_accuracy"]),
            "miou": mean_iou(confusion_KK),
        }


TALLIES: Mapping[str, type[Tally]] = {"classification": Classification, "segmentation": Segmentation}


def mean(values: Tensor) -> float:
    """The mean, summed in float64."""
    return float(values.double().mean())


def calibration_error(probability_N: Tensor, right_N: Tensor) -> float:
    """Mean distance of accuracy from confidence over bins of equal width, weighted by the images in each.

    Args:
        probability_N: of the predicted class.
        right_N: whether the prediction was right.
    """
    bin_N = (probability_N.double() * BINS).ceil().long().sub(1).clamp(0, BINS - 1)
    excess_N = right_N.double() - probability_N.double()
    gap_S = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bin_N, excess_N)
    return float(gap_S.abs().sum() / len(probability_N))


def mean_iou(confusion_KK: Tensor) -> float:
    """Mean intersection over union of the classes that occur, from counts of (label, prediction)."""
    hit_K = confusion_KK.diagonal().double()
    union_K = confusion_KK.sum(0) + confusion_KK.sum(1) - confusion_KK.diagonal()
    occurs_K = union_K > 0
    return mean(hit_K[occurs_K] / union_K[occurs_K])
