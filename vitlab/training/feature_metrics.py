"""The metrics of the features of a split.  See :mod:`vitlab.training.metrics.features`."""

from __future__ import annotations

from collections.abc import Mapping

from vitlab.data.prepare import Feed
from vitlab.models.contract import Model
from vitlab.training.evaluation import Split
from vitlab.training.features import features_of
from vitlab.training.metrics.features import FeatureMetric, Features


def evaluate_features(
    model: Model, feed: Feed, split: Split, precision: str, metrics: Mapping[str, FeatureMetric]
) -> dict[str, float]:
    """Return the metrics of the features of a split; the model keeps its mode.

    Raises:
        WeightsError: If the model has no linear classifier.
    """
    images = Features(*features_of(model, feed, split, precision))
    train = None
    if any(one.needs_train for one in metrics.values()):
        train = Features(*features_of(model, feed, "train", precision))
    return {name: one.of_features(images, train if one.needs_train else None) for name, one in metrics.items()}
