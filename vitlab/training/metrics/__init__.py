"""The slot ``metric``: the metrics of an evaluation, one number per split each.

contract.py       the contract
predictions.py    loss, accuracy, top_k, balanced_accuracy, per_class_accuracy
calibration.py    ece, brier
segmentation.py   pixel_accuracy, miou, miou_foreground
features.py       effective_rank, knn
test_sets.py      mce, shifted_accuracy, real_accuracy
reported.py       the metrics of a trial
"""

from vitlab.training.metrics import features as features
from vitlab.training.metrics.calibration import calibration_error as calibration_error
from vitlab.training.metrics.contract import TASKS as TASKS
from vitlab.training.metrics.contract import Metric as Metric
from vitlab.training.metrics.contract import OfDecisions as OfDecisions
from vitlab.training.metrics.contract import declaration_fault as declaration_fault
from vitlab.training.metrics.contract import mean as mean
from vitlab.training.metrics.contract import metric as metric
from vitlab.training.metrics.predictions import Accuracy as Accuracy
from vitlab.training.metrics.reported import RESERVED as RESERVED
from vitlab.training.metrics.reported import STANDARD as STANDARD
from vitlab.training.metrics.reported import metrics_of as metrics_of
from vitlab.training.metrics.reported import resolve_metrics as resolve_metrics
from vitlab.training.metrics.segmentation import confusion as confusion
from vitlab.training.metrics.segmentation import mean_iou as mean_iou
from vitlab.training.metrics.test_sets import metrics_of_options as metrics_of_options
from vitlab.training.metrics.test_sets import metrics_of_test_set as metrics_of_test_set
from vitlab.training.metrics.test_sets import values_of_test_sets as values_of_test_sets
