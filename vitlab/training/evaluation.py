"""Evaluation: the logits of a model on a split, and the metrics that are accumulated from them batch by batch."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from vitlab.components.base import to_float32_or_wider
from vitlab.data.batches import Batch, Feed
from vitlab.models.contract import Model
from vitlab.training.distributed import ALONE, SingleProcess
from vitlab.training.metrics import Metric

EVALUATION_BATCH = 512
"""Images of an evaluation batch.  Constant, so that metrics do not depend on the batch size of training."""

EVALUATION_PIXELS = 1 << 19
"""Maximum pixels of an evaluation batch of segmentation, which has one logit per class and pixel."""

NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Precision to the dtype of its autocast."""

Split = str
"""``train``, ``val``, ``test`` or the name of a test set of a feed."""

Columns = dict[str, Tensor]
"""One value per image, by name."""


class EvaluationResult(NamedTuple):
    """The metrics of one split, and its values per image."""

    split: Split
    metrics: Mapping[str, float]
    columns: Columns  #: one value per image, by name


def evaluation_batches(feed: Feed, split: Split, peers: SingleProcess = ALONE) -> Iterator[Batch]:
    """Yield this process's batches of an evaluation, whose size does not depend on the batch size of training."""
    size = EVALUATION_BATCH
    if feed.info.task == "segmentation":
        size = max(1, min(size, EVALUATION_PIXELS // math.prod(feed.info.image)))
    return feed.evaluation(split, size, peers.batches)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return a context in which ``bf16`` and ``fp16`` are computed in 16 bits where torch's autocast does so."""
    return torch.autocast(device.type, NARROW.get(precision, torch.bfloat16), enabled=precision in NARROW)


def forward_logits(
    model: Model, x_BCHW: Tensor, precision: str, weights: Mapping[str, Any] | None = None
) -> dict[str, Tensor]:
    """Return the logits of a batch by head, in float32 or wider; ``bf16`` and ``fp16`` mean autocast.

    ``weights``, if given, replace the model's own parameters and buffers.
    """
    with autocast(x_BCHW.device, precision):
        output = model(x_BCHW) if weights is None else functional_call(model, dict(weights), (x_BCHW,))
        views = model.logits_by_head(output)
    return {name: to_float32_or_wider(logits) for name, logits in views.items()}


class MetricAccumulator:
    """Accumulates the metrics of an evaluation batch by batch; nothing is read back from the device before the end.

    Args:
        metrics: Metrics by name, ``loss`` first; see :func:`vitlab.training.metrics.build_metrics`.
    """

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = metrics
        self._rows: defaultdict[str, defaultdict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
        self._columns: defaultdict[str, list[Tensor]] = defaultdict(list)

    def add_batch(self, views: Mapping[str, Tensor], target: Tensor, id_B: Tensor) -> None:
        """Add a batch: the objective's views, such as logits by head, its targets and image identities."""
        self._columns["id"].append(id_B)
        if views[""].ndim == 2 and target.ndim == 1:
            probability_B, prediction_B = views[""].softmax(1).max(1)
            for name, column_B in (("label", target), ("prediction", prediction_B), ("probability", probability_B)):
                self._columns[name].append(column_B)
        for name, one in self._metrics.items():
            for view in views if one.every_view else ("",):
                self._rows[name][view].append(one.rows(views[view], target))

    def compute_result(self, split: Split, peers: SingleProcess = ALONE) -> EvaluationResult:
        """Return the evaluation of the split whose batches ``peers`` added: the loss alone if it is not finite."""
        values = {}
        columns = {name: torch.cat(parts).cpu() for name, parts in peers.all_gather_by_batch(self._columns).items()}
        for name, one in self._metrics.items():
            rows = {view: torch.cat(parts).cpu() for view, parts in peers.all_gather_by_batch(self._rows[name]).items()}
            for view, rows_N in rows.items():
                values[f"{name}_{view}" if view else name] = float(one.value(rows_N))
            values |= {f"{name}_{part}": value for part, value in one.parts(rows[""]).items()}
            column_N = one.column(rows[""])
            if column_N is not None:
                columns[name] = column_N
            # Further metrics of a diverged model say nothing, and some cannot be computed.
            if not math.isfinite(values.get("loss", 0.0)):
                break
        return EvaluationResult(split, values, columns)
