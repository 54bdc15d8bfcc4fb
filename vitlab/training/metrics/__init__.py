"""The slot ``metric``: the metrics of an evaluation, one number per split each.

contract.py       the contract
predictions.py    loss, accuracy, top_k, balanced_accuracy, per_class_accuracy, ece, brier, auroc;
                  map, micro_f1, macro_f1; pixel_accuracy, miou, miou_foreground
features.py       effective_rank, knn
test_sets.py      mce, shifted_accuracy, real_accuracy
reported.py       the metrics of a trial
"""

from vitlab.training.metrics.contract import TASKS, Metric, declaration_fault, mean, metric
from vitlab.training.metrics.predictions import calibration_error, confusion, mean_iou
from vitlab.training.metrics.reported import STANDARD, metrics_of, resolve_metrics
from vitlab.training.metrics.test_sets import metrics_of_options, metrics_of_test_set, values_of_test_sets

__all__ = [
    "STANDARD",
    "TASKS",
    "Metric",
    "calibration_error",
    "confusion",
    "declaration_fault",
    "mean",
    "mean_iou",
    "metric",
    "metrics_of",
    "metrics_of_options",
    "metrics_of_test_set",
    "resolve_metrics",
    "values_of_test_sets",
]
