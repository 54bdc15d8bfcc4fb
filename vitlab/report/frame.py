"""Results as pandas frames: one row per trial, one row per measurement.

No trial is dropped: one that diverged, failed, is running or was never started has a row with that status.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitlab.planning.values import Plan, Planned, Trial
from vitlab.spec import Analysis
from vitlab.spec.design import format_value
from vitlab.store.files import read_stored
from vitlab.store.folders import STATUSES, Store, TrialFolder
from vitlab.store.result import Ending, TrialResult

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from numpy.typing import NDArray

GROUPS = ("val", "test", "train")  #: splits that metrics begin with


def parse_column_descriptions(table: str) -> dict[str, tuple[str, str]]:
    """Return name to type and meaning of the columns in a table of ``NAME | TYPE | MEANING``, one to a line."""
    rows = (line.split(" | ") for line in re.sub(r"\n +", " ", table.strip()).splitlines())
    return {name: (kind, meaning) for name, kind, meaning in rows}


# In a narrow terminal, pandas leaves out columns in the middle.
BEFORE = parse_column_descriptions(f"""
arm | string | the arm
seed | int64 | the replicate
status | string | {", ".join(STATUSES[:-1])} or {STATUSES[-1]}
study | string | the study
baseline | string | the arm it is compared with; missing where there is none
trial | string | the key of the trial; seeds with one key are one training
code | string | a digest of the code it runs
failure_kind | string | why there is no value: diverged (the loss was not finite), error (it raised), oom (memory ran
    out), timeout, preempted, lost (its worker was killed), refused (the code was not the plan's), prerequisite (a trial
    that it needs diverged or failed); missing where nothing went wrong
failure | string | the same in a sentence; empty where nothing went wrong
""")
"""First columns of :func:`results`, with their types and meanings."""
AFTER = parse_column_descriptions("""
origins | string | its components, each with the source and the version it came from
engine | string | how it was computed: the engine, or several joined by +
threads | Int64 | threads it was computed with
device | string | cpu or cuda
ended | datetime64[ms, UTC] | when it ended; missing where it has no result
params | Int64 | parameters of the model
macs | Int64 | multiply-accumulates of one image, forward
steps | Int64 | optimizer steps done
images | Int64 | training images seen
wall_s | float64 | seconds it took, all attempts together
""")
"""Columns of :func:`results` between the varied paths and the final values."""
HISTORY = parse_column_descriptions("""
arm | string | the arm
seed | int64 | the replicate
step | int64 | optimizer steps done
trial | string | the key of the trial
time | datetime64[ms, UTC] | when it was journalled; missing where no journal is left
epoch | float64 | passes over the training images
metric | string | its name
value | float64 | its value
""")
"""Columns of :func:`history`."""


@dataclass(frozen=True)
class StoredTrial:
    """A planned trial with its stored status and result."""

    planned: Planned
    folder: TrialFolder
    status: str  #: one of ``STATUSES``
    failure: str
    result: TrialResult | None
    kind: str | None = None  #: ``failure_kind`` of :func:`results`; None where nothing went wrong


def gather_trials(plan: Plan, store: Store, trials: Sequence[Planned] | None = None) -> list[StoredTrial]:
    """Return trials with their status and result, by default all of a plan's arms in its order."""
    specs = {trial.name: trial for trial in plan.trials_with_keys}
    return [_read_trial(planned, store, specs) for planned in (plan.trials if trials is None else trials)]


def metric_column(analysis: Analysis) -> str:
    """Return the column by which arms are judged: the metric, or its best over the training as ``METRIC@best``."""
    return analysis.metric if analysis.at == "last" else f"{analysis.metric}@best"


def results(plan: Plan, store: Store) -> pd.DataFrame:
    """Return one row per trial of the plan.

    Columns are ``BEFORE``; one per varied path, of whole numbers (int64), numbers (float64) or short text (string);
    ``AFTER``; and the final values ``train/...``, ``test/...`` and ``val/...`` (float64).  The last column is the
    metric of the analysis, even if no trial reports it.  With ``at: best``, that is ``METRIC@best``, the best value of
    each training.
    """
    return trials_to_frame(plan, gather_trials(plan, store))


def trials_to_frame(plan: Plan, trials: Sequence[StoredTrial]) -> pd.DataFrame:
    """Return :func:`results` of trials from :func:`gather_trials`."""
    import pandas as pd

    arms = {arm.name: arm for arm in plan.arms}
    stored = [item.result for item in trials if item.result is not None]
    reported = {name for result in stored for name in result.outcome.metrics if is_metric(name)}
    analysis_column = metric_column(plan.analysis)
    metrics = sorted(reported - {analysis_column}, key=lambda name: (-GROUPS.index(name.partition("/")[0]), name))
    metrics.append(analysis_column)
    rows = []
    for item in trials:
        arm, trial = arms[item.planned.arm], item.planned.trial
        row: dict[str, object] = {
            "study": plan.study,
            "arm": arm.name,
            "baseline": arm.baseline,
            "seed": item.planned.seed,
            "trial": trial.key,
            "code": trial.code,
            "status": item.status,
            "failure_kind": item.kind,
            "failure": item.failure,
            "origins": ", ".join(trial.origins),
        }
        if item.result is not None:
            around, outcome = item.result.circumstances, item.result.outcome
            row |= {name: outcome.metrics.get(name) for name in metrics}
            if analysis_column != plan.analysis.metric:
                row[analysis_column] = outcome.value(plan.analysis.metric, "best", plan.analysis.goal)
            row |= {name: getattr(around, name) for name in ("params", "macs", "wall_s", "ended")}
            row |= {name: around.numerics.get(name) for name in ("engine", "threads", "device")}
            row |= {"steps": outcome.steps, "images": outcome.images}
        rows.append(row)
    frame = pd.DataFrame(rows, columns=[*BEFORE, *plan.paths, *AFTER, *metrics])
    for path in plan.paths:
        frame[path] = _number_or_text_column([arms[item.planned.arm].values.get(path) for item in trials])
    frame["ended"] = pd.to_datetime(frame["ended"].astype("float64"), unit="s", utc=True)
    fixed = {name: kind for name, (kind, _) in (BEFORE | AFTER).items()}
    return frame.astype(fixed | dict.fromkeys(metrics, "float64"))


def metric_quantum(plan: Plan, trials: Sequence[StoredTrial]) -> float:
    """Return the smallest change of the metric of the analysis; 0 if it has none, or arms differ in their images."""
    facts, split = plan.facts(), plan.analysis.metric.partition("/")[0]
    if facts is None:
        return 0.0
    images = _image_ids_by_data_and_seed(trials, split).values() if facts.quantum else ()
    sizes = {len(next(filter(None, by_seed.values()), ())) for by_seed in images} - {0}
    return facts.step or (facts.quantum / sizes.pop() if len(sizes) == 1 else 0.0)


def val_train_ratio_by_arm(plan: Plan, trials: Sequence[StoredTrial]) -> dict[str, float]:
    """Return validation images over training images by arm, if the metric is of validation images that seeds vary.

    Of random splits, two have n_val / (n_train + n_val) of their validation images in common.  That share is measured
    in the stored predictions, so that it is right for data of which a part is trained on, too.

    Returns:
        Empty if the seeds of no arm have different splits.  0 for an arm whose seeds have the same validation images,
        as data sets may define them; NaN if the images of fewer than two seeds are stored, or have none in common.
    """
    images = _image_ids_by_data_and_seed(trials, "val") if plan.analysis.metric.startswith("val/") else {}
    if all(len(by_seed) < 2 for by_seed in images.values()):
        return {}
    ratios = {
        data: _val_train_size_ratio(by_seed.values()) if len(by_seed) > 1 else 0.0 for data, by_seed in images.items()
    }
    return {item.planned.arm: ratios[repr(item.planned.trial.spec.data)] for item in trials}


def _image_ids_by_data_and_seed(trials: Sequence[StoredTrial], split: str) -> dict[str, dict[int, frozenset[int]]]:
    """Return the images of a split by data and seed of the split; empty where no trial has stored them."""
    images: dict[str, dict[int, frozenset[int]]] = {}
    for item in trials:
        by_seed = images.setdefault(repr(item.planned.trial.spec.data), {})
        seed = item.planned.trial.seeds.get("split", 0)
        if not by_seed.setdefault(seed, frozenset()) and item.status == Ending.DONE:
            table = read_predictions(item.folder, split, ["id"])
            by_seed[seed] = frozenset() if table is None else frozenset(table.column("id").to_pylist())
    return images


def _val_train_size_ratio(images: Iterable[frozenset[int]]) -> float:
    """Return validation images over training images, given the validation images of each split."""
    pairs = list(itertools.combinations(filter(None, images), 2))
    if not any(one & other for one, other in pairs):
        return math.nan
    share = sum(len(one & other) / min(len(one), len(other)) for one, other in pairs) / len(pairs)
    return share / (1 - share) if share < 1 else 0.0


def read_predictions(folder: TrialFolder, split: str, columns: Sequence[str]) -> pa.Table | None:
    """Return columns of the stored predictions of a split, one row per image; None if there are none."""
    from pyarrow import parquet

    def read(path: Path) -> pa.Table | None:
        if not {"split", *columns} <= set(parquet.read_schema(path).names):
            return None
        return parquet.read_table(path, columns=list(columns), filters=[("split", "==", split)])

    table = read_stored(folder.predictions, read)
    return table if table is not None and table.num_rows else None


def is_metric(name: str) -> bool:
    """Return whether a column holds a metric; a varied path ``train`` has no slash and does not."""
    return "/" in name and name.partition("/")[0] in GROUPS


def history(plan: Plan, store: Store) -> pd.DataFrame:
    """Return every measurement, in the columns of ``HISTORY``; of open trials, what their journals hold so far."""
    return measurements_frame(gather_trials(plan, store))


def measurements_frame(trials: Sequence[StoredTrial]) -> pd.DataFrame:
    """Return :func:`history` of trials from :func:`gather_trials`."""
    import pandas as pd

    rows: list[tuple[Any, ...]] = []
    for item in trials:
        journal = [event for event in item.folder.events()[0] if event.kind == "metrics"]
        times = {event.body["step"]: event.t for event in reversed(journal)}  # a resumed trial repeats steps
        if item.result is not None:
            measurements = [(moment.step, moment.epoch, moment.metrics) for moment in item.result.outcome.history]
        else:
            measurements = [(event.body["step"], event.body["epoch"], event.body["metrics"]) for event in journal]
        rows += [
            (item.planned.arm, item.planned.seed, step, item.planned.trial.key, times.get(step), epoch, name, value)
            for step, epoch, metrics in measurements
            for name, value in metrics.items()
            if not name.startswith("system/")
        ]
    types = {name: kind for name, (kind, _) in HISTORY.items()}
    frame = pd.DataFrame(rows, columns=list(types)).astype({**types, "time": "Int64"})
    frame["time"] = pd.to_datetime(frame["time"], unit="ms", utc=True).astype("datetime64[ms, UTC]")
    return frame


ValuesByArm = dict[str, dict[int, float]]
"""Arm to seed to value."""


def judged_values(frame: pd.DataFrame, analysis: Analysis, quantum: float) -> ValuesByArm:
    """Return the values by which arms are judged, by arm and seed, of trials that are done.

    Values that are not finite are left out too, and seeds that share the trial of an earlier seed (nothing that the
    seed varies is used), because one training counted twice is no replicate.  Where the step of the metric is known,
    values are rounded to it, so that single precision makes no differences of its own.
    """
    values: ValuesByArm = {str(arm): {} for arm in frame["arm"].unique()}
    done = frame[frame["status"] == Ending.DONE].drop_duplicates(["arm", "trial"])
    columns = (done[name].tolist() for name in ("arm", "seed", metric_column(analysis)))
    for arm, seed, value in zip(*columns, strict=True):
        if math.isfinite(value):
            values[str(arm)][int(seed)] = _remove_float32_rounding(value, quantum)
    return values


def _remove_float32_rounding(value: float, quantum: float) -> float:
    """Return a value without the rounding of single precision, if it is a multiple of the quantum but for that."""
    if not quantum:
        return float(value)
    steps = value / quantum
    # Single precision is off by less than a hundredth of a step up to 100,000 images; more is another value.
    if abs(steps - round(steps)) >= 1e-2:
        return float(value)
    images = round(1 / quantum)  # dividing by the number of images is exact, where multiplying by the step is not
    return round(steps) / images if math.isclose(images * quantum, 1.0) else round(steps) * quantum


def _read_trial(planned: Planned, store: Store, specs: Mapping[str, Trial]) -> StoredTrial:
    folder = store.folder(planned.trial)
    result, status = folder.result(), ""
    if result is None:
        status, result = folder.state(), folder.result()  # a result may come in between, and is never lost
    if result is not None:
        kind = {Ending.DONE: None, Ending.DIVERGED: Ending.DIVERGED}.get(result.status, Ending.ERROR)
        return StoredTrial(planned, folder, result.status, result.failure, result, kind)
    if status == Ending.FAILED and (failure := folder.failure()) is not None:
        return StoredTrial(planned, folder, status, failure.failure, None, failure.kind)
    for role, name in planned.trial.needs.items():
        if status != "running" and name in specs:
            needed = _read_trial(replace(planned, trial=specs[name]), store, specs)
            if needed.status in (Ending.DIVERGED, Ending.FAILED):
                reason = f"its {role} {needed.status}: {needed.failure}"
                return StoredTrial(planned, folder, Ending.FAILED, reason, None, "prerequisite")
    return StoredTrial(planned, folder, status, "", None)


def _number_or_text_column(values: list[Any]) -> pd.Series[Any]:
    """Return the values of a varied path as integers, floats or short text."""
    import pandas as pd

    values = pd.Series(values).tolist()  # None beside numbers becomes NaN
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return pd.Series(values, dtype="float64" if any(isinstance(value, float) for value in values) else "int64")
    return pd.Series([format_value(value) for value in values], dtype="string")


def frame_to_json_records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a frame in JSON values: None for what is missing or not finite, ISO 8601 for times."""

    def plain_value(value: Any, is_missing: bool) -> Any:
        if is_missing or (isinstance(value, float) and math.isinf(value)):
            return None
        return value.isoformat() if isinstance(value, datetime) else value

    # By column, because pandas' rows are slow.
    columns = (map(plain_value, column.tolist(), column.isna().tolist()) for _, column in frame.items())
    return [dict(zip(map(str, frame), row, strict=True)) for row in zip(*columns, strict=True)]


ImageValues = Mapping[str, Mapping[int, "NDArray[np.float64]"]]
"""Arm to seed to one value per image; the images of all are the same, in the same order."""

MAX_VALUES = 5_000_000  #: of all trials together; above, reading them would delay the report
ROUNDING = 1e-6  #: relative; metrics are means in single precision


@dataclass(frozen=True)
class StudyResults:
    """The results of a study: its stored trials, their table, and what the comparison of its arms needs beside it."""

    plan: Plan
    frame: pd.DataFrame  #: one row per trial, see :func:`vitlab.report.frame.results`
    trials: tuple[StoredTrial, ...] = ()  #: empty for a table of other programs
    quantum: float = 0.0  #: smallest change of the metric; 0 if it has none or it is not known
    overlap: Mapping[str, float] = field(default_factory=dict)
    """Arm to validation images over training images, see :func:`vitlab.report.frame.val_train_ratio_by_arm`."""

    @classmethod
    def read(cls, plan: Plan, store: Store) -> StudyResults:
        """Read the results of a plan from its store."""
        trials = tuple(gather_trials(plan, store))
        frame, quantum = trials_to_frame(plan, trials), metric_quantum(plan, trials)
        return cls(plan, frame, trials, quantum, val_train_ratio_by_arm(plan, trials))

    @cached_property
    def values(self) -> ValuesByArm:
        """Return the values by which arms are judged, by arm and seed, see :func:`judged_values`."""
        return judged_values(self.frame, self.plan.analysis, self.quantum)

    @cached_property
    def images(self) -> ImageValues:
        """Return the values of the metric for each image, see :func:`image_values`."""
        return image_values(self.plan, self.trials)

    def largest_val_train_ratio(self, arms: Iterable[str]) -> float:
        """Return the largest overlap of some arms; NaN if one is not known."""
        return float(np.max([0.0, *(self.overlap.get(arm, 0.0) for arm in arms)]))


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
        stored = _read_image_values(item, split, name)
        if stored is None:
            continue
        ids, per_image = stored
        value = item.result.outcome.metrics.get(plan.analysis.metric, math.nan)
        # Predictions of another moment than the metric, or of other images, say nothing about it.
        same = images is None or np.array_equal(images, ids)
        if not same or not math.isclose(per_image.mean(), value, rel_tol=ROUNDING, abs_tol=ROUNDING):
            return {}
        images, total = ids, total + len(ids)
        if total > MAX_VALUES or len(ids) < 2:
            return {}
        values.setdefault(item.planned.arm, {})[item.planned.seed] = per_image
    return values


def _read_image_values(item: StoredTrial, split: str, name: str) -> tuple[NDArray[Any], NDArray[np.float64]] | None:
    """Return the numbers of the images of a split and their values; None if they are not stored."""
    names = ["label", "prediction"] if name == "accuracy" else [name]
    table = read_predictions(item.folder, split, ["id", *names])
    if table is None:
        return None
    ids, *columns = (table.column(column).to_numpy() for column in ("id", *names))
    per_image = columns[0] == columns[1] if name == "accuracy" else columns[0]
    return ids, np.asarray(per_image, dtype=np.float64)
