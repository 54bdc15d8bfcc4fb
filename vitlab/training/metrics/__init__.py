"""The slot ``metric``: the metrics of an evaluation, one number per split each.

contract.py       the contract
predictions.py    loss, accuracy, top_k, balanced_accuracy, per_class_accuracy, ece, brier, auroc;
                  map, micro_f1, macro_f1; pixel_accuracy, miou, miou_foreground
features.py       effective_rank, knn
test_sets.py      mce, shifted_accuracy, real_accuracy
"""

import re
from collections.abc import Mapping, Sequence

from vitlab.geometry import DataInfo
from vitlab.registry import BUILT_IN, ResolvedChoice
from vitlab.spec import Choice

# The standard metrics are found by name; this import makes them part of the code of every trial.
from vitlab.training.metrics import predictions as predictions
from vitlab.training.metrics.contract import Metric as Metric
from vitlab.training.metrics.contract import metric as metric
from vitlab.training.metrics.test_sets import metrics_of_data_options as metrics_of_data_options

STANDARD = {
    "classification": ("loss", "accuracy", "top_k", "ece"),
    "segmentation": ("loss", "pixel_accuracy", "miou", "miou_foreground"),
    "multilabel": ("loss", "map", "micro_f1", "macro_f1"),
}
"""Metrics of every trial of a task, except those incompatible with its data, such as ``top5`` of five classes."""

RESERVED = ("split", "id", "label", "prediction", "probability", "label_name", "prediction_name")
"""Names of the other columns of ``predictions.parquet``."""


def build_metrics(
    data: DataInfo, chosen: Sequence[Choice] = (), standard: Mapping[str, Metric] | None = None
) -> dict[str, Metric]:
    """Return the metrics of a trial by name: the standard ones and the ``chosen`` ones.

    Args:
        data: What the model sees.
        chosen: The metrics that the trial names.
        standard: The metrics that every trial of its objective reports; by default the task's metrics.
    """
    choices = [*(_standard_choices(data) if standard is None else ()), *map(metric.resolve_choice, chosen)]
    metrics = {**(standard or {}), **{_metric_name(choice): metric.build(choice) for choice in choices}}
    for one in metrics.values():
        one.labels = data.labels
    return metrics


def indices_of_extra_metrics(
    data: DataInfo, chosen: Sequence[ResolvedChoice], unlabelled_objective: str
) -> tuple[list[int], list[tuple[int, str]]]:
    """Return the indices of the metrics a trial adds to the standard ones, and the errors by index.

    Standard metrics and duplicates are dropped, so that equal trials have equal keys.

    Args:
        data: What the model sees.
        chosen: The metrics that the trial names.
        unlabelled_objective: The trial's objective if it trains no predictions, else empty.
    """
    standard = [] if unlabelled_objective else _standard_choices(data)
    components = [(choice.component, choice.options) for choice in standard]
    # Every objective reports a loss.
    names = {"loss", *map(_metric_name, standard)}
    indices = []
    faults = []
    for index, choice in enumerate(chosen):
        if (choice.component, choice.options) in components:
            continue
        component, name, reason = choice.component, _metric_name(choice), ""
        if data.task not in component.tasks:
            reason = f" is for {' and '.join(component.tasks)}, not {data.task}"
        elif unlabelled_objective and component.reads == "logits":
            reason = f" reads predictions, and objective '{unlabelled_objective}' trains none; remove it"
        elif misfit := component.incompatibility(data, choice.options):
            reason = f": {misfit}"
        elif not re.fullmatch(r"\w+", name) or name in RESERVED:
            reason = f": its name in results, '{name}', is reserved or not of letters, digits and _; rename it"
        elif name in names:
            reason = f": another metric of the trial is called '{name}' in results; remove one of the two"
        if reason:
            faults.append((index, f"metric '{choice.type}'{reason}"))
        indices.append(index)
        components.append((component, choice.options))
        names.add(name)
    return indices, faults


def _standard_choices(data: DataInfo) -> list[ResolvedChoice]:
    # By full name, since a plugin may register the same short name.
    choices = [metric.resolve_choice(f"{BUILT_IN}:{name}") for name in STANDARD[data.task]]
    return [choice for choice in choices if choice.component.incompatibility(data, choice.options) is None]


def _metric_name(choice: ResolvedChoice) -> str:
    return metric.build(choice).name or choice.bare_name
