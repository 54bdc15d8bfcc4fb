"""Values of the metric for each image of the split, from the stored predictions of trials."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitlab.plan.values import Plan
from vitlab.report.frame import StoredTrial
from vitlab.store.damage import read_stored
from vitlab.store.result import Ending

if TYPE_CHECKING:
    from numpy.typing import NDArray

ImageValues = Mapping[str, Mapping[int, "NDArray[np.float64]"]]
"""Arm to seed to one value per image; the images of all are the same, in the same order."""

MAX_VALUES = 5_000_000  #: of all trials together; above, reading them would delay the report
ROUNDING = 1e-6  #: relative; metrics are means in single precision


def image_values(plan: Plan, trials: Sequence[StoredTrial]) -> ImageValues:
    """Return the values whose mean over images is the metric; empty if it is no such mean or images differ.

    It is also empty for fewer than two images, and for more values than ``MAX_VALUES``.  Accuracy is 1 for an image
    that is classified correctly and 0 for another; other metrics have a column of their own in ``predictions.parquet``.
    """
    split, _, name = plan.analysis.metric.partition("/")
    if plan.analysis.at != "last" or not trials:
        return {}
    values: dict[str, dict[int, NDArray[np.float64]]] = {}
    images: NDArray[Any] | None = None
    total = 0
    for item in trials:
        if item.status != Ending.DONE or item.result is None:
            continue
        stored = _load(item, split, name)
        if stored is None:
            continue
        ids, per_image = stored
        value = item.result.outcome.metrics.get(plan.analysis.metric, math.nan)
        same = images is None or np.array_equal(images, ids)
        if not same or not math.isclose(per_image.mean(), value, rel_tol=ROUNDING, abs_tol=ROUNDING):
            return {}
        images, total = ids, total + len(ids)
        if total > MAX_VALUES or len(ids) < 2:
            return {}
        values.setdefault(item.planned.arm, {})[item.planned.seed] = per_image
    return values


def _load(item: StoredTrial, split: str, name: str) -> tuple[NDArray[Any], NDArray[np.float64]] | None:
    """Return the numbers of the images of a split and their values; None if they are not stored."""
    from pyarrow import parquet

    names = ["label", "prediction"] if name == "accuracy" else [name]

    def load(path: Any) -> Any:
        available = parquet.read_schema(path).names
        if not {"split", "id", *names} <= set(available):
            return None
        return parquet.read_table(path, columns=["id", *names], filters=[("split", "==", split)])

    table = read_stored(item.folder.predictions, load)
    if table is None or not table.num_rows:
        return None
    columns = {column: table.column(column).to_numpy() for column in ("id", *names)}
    per_image = columns["label"] == columns["prediction"] if name == "accuracy" else columns[name]
    return columns["id"], np.asarray(per_image, dtype=np.float64)
