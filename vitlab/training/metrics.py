"""Metrics of an evaluation, and what each image contributed to them.

B batch, N images of a split, K classes, P pixels of an image, M decisions: images, or the pixels of segmentation.
Classes stand on axis 1 of logits, (B, K) or (B, K, rows, columns).

``loss`` is the mean negative log-likelihood of the prediction, whatever loss was trained on, so that arms with
different losses can be compared.  ``ece`` is the expected calibration error over 15 bins of equal width.

Of segmentation, ``pixel_accuracy`` is the share of all pixels of the split that were predicted, ``miou`` the mean of
intersection over union of the classes, the background (class 0) among them, and ``miou_foreground`` without it.  The
last two come from one table of counts over the whole split, and count the classes that occur in it, as labels or as
predictions.  Where most of an image is background, the first says little: predicting nothing else reaches the
background's share.  Pixels without a label count nowhere.

Reference: arXiv:1706.04599 (calibration); Everingham et al., The Pascal Visual Object Classes Challenge: a
retrospective, 2015, section 2.5 (intersection over union).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.data.pixels import IGNORED
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
    """Loss and accuracy per pixel, and the mean over classes of intersection over union, with and without background.

    An image without any label has no loss and no accuracy of its own: its columns are not a number.
    """

    def __init__(self) -> None:
        super().__init__()
        self._confusion: list[Tensor] = []
        self._labelled: list[Tensor] = []

    def add(self, views: Mapping[str, Tensor], target: Tensor, id_B: Tensor) -> None:
        logits = views[""]
        classes, images = logits.shape[1], len(id_B)
        logits_MK, target_M = flat(logits, target)
        prediction_M = logits_MK.argmax(1)
        labelled_M = target_M != IGNORED
        count_B = labelled_M.view(images, -1).sum(1)
        nll_BP = F.cross_entropy(logits_MK, target_M, ignore_index=IGNORED, reduction="none").view(images, -1)
        right_BP = (prediction_M == target_M).view(images, -1)
        accuracy_B, loss_B = right_BP.double().sum(1) / count_B, nll_BP.double().sum(1) / count_B
        self._take(id=id_B, pixel_accuracy=accuracy_B, loss=loss_B)
        self._labelled.append(count_B)
        # Pixels without a label are counted in a place of their own, behind the table, which is then left off.
        pair_M = torch.where(labelled_M, target_M * classes + prediction_M, classes**2)
        self._confusion.append(torch.bincount(pair_M, minlength=classes**2 + 1)[:-1].view(classes, classes))

    def metrics(self) -> dict[str, float]:
        confusion_KK = self.confusion()
        count_N, loss_N = torch.cat(self._labelled).cpu(), self.columns()["loss"]
        return {
            "loss": float((loss_N * count_N)[count_N > 0].sum() / count_N.sum()),
            "pixel_accuracy": float(confusion_KK.diagonal().sum().double() / confusion_KK.sum()),
            "miou": mean_iou(confusion_KK),
            "miou_foreground": mean_iou(confusion_KK, background=0),
        }

    def confusion(self) -> Tensor:
        """(K, K): the pixels of each label (rows) and prediction (columns), over all that was taken."""
        return torch.stack(self._confusion).sum(0).cpu()


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


def mean_iou(confusion_KK: Tensor, background: int | None = None) -> float:
    """Mean intersection over union of the classes that occur, from counts of (label, prediction).

    Args:
        background: a class whose own intersection over union is left out of the mean; what was taken for it, or it
            for, still counts against the others.

    Returns:
        0 where no class is left: nothing of it was there, and nothing was found.
    """
    hit_K = confusion_KK.diagonal().double()
    union_K = confusion_KK.sum(0) + confusion_KK.sum(1) - confusion_KK.diagonal()
    counts_K = union_K > 0
    if background is not None:
        counts_K[background] = False
    return mean(hit_K[counts_K] / union_K[counts_K]) if counts_K.any() else 0.0
