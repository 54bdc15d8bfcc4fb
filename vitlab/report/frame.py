"""Results as pandas frames: one row per trial, one row per measurement, one row per arm.

Nothing is dropped: a trial that diverged, failed, runs or was never begun has its row, with a status that says so.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitlab import statistics
from vitlab.plan.design import text
from vitlab.plan.values import Plan, Planned
from vitlab.result import Result
from vitlab.spec import Analysis
from vitlab.store import Store, TrialFolder

if TYPE_CHECKING:
    import pandas as pd

BEFORE = ("study", "arm", "baseline", "seed", "trial", "code", "status", "failure")
AFTER = ("params", "macs", "steps", "images", "wall_s", "engine", "threads", "device", "origins")
GROUPS = ("val", "test", "train")
LEAST_PREREQUISITES = 3  #: distinct trials that must stand behind each arm where arms differ by them
STATUSES = ("done", "diverged", "failed", "running", "missing")


@dataclass(frozen=True)
class Found:
    """What the store knows of a planned trial."""

    planned: Planned
    folder: TrialFolder
    status: str  #: one of ``STATUSES``
    failure: str
    result: Result | None


def gather(plan: Plan, store: Store) -> list[Found]:
    """Every planned trial with what became of it, in the order of the plan."""
    return [_found(planned, store) for planned in plan.trials]


def prerequisites(plan: Plan, store: Store) -> list[Found]:
    """The trials that others start from and that stand in no arm, with what became of them."""
    named = [
        Planned(f"prerequisite {trial.key[:8]}", trial.seeds.get("init", 0), trial) for trial in plan.prerequisites
    ]
    return [_found(planned, store) for planned in named]


def judged(analysis: Analysis) -> str:
    """The column by which arms are judged: the metric, or its best over the training as ``METRIC@best``."""
    return analysis.metric if analysis.at == "last" else f"{analysis.metric}@best"


def results(plan: Plan, store: Store) -> pd.DataFrame:
    """One row per trial of the plan.

    Columns: ``study, arm, baseline, seed, trial, code, status, failure``, one per varied path, ``val/...``,
    ``test/...`` and ``train/...`` (final values), and ``params, macs, steps, images, wall_s, engine, threads, device,
    origins``.  ``status`` is done, diverged, failed, running or missing.  Where the analysis says ``at: best``, the
    best value of its metric stands in ``METRIC@best``.
    """
    return table(plan, gather(plan, store))


def table(plan: Plan, found: Sequence[Found]) -> pd.DataFrame:
    """:func:`results` of what :func:`gather` found."""
    import pandas as pd

    arms = {arm.name: arm for arm in plan.arms}
    rows = []
    for item in found:
        arm, trial = arms[item.planned.arm], item.planned.trial
        row: dict[str, Any] = {
            "study": plan.study,
            "arm": arm.name,
            "baseline": arm.baseline,
            "seed": item.planned.seed,
            "trial": trial.key,
            "code": trial.code,
            "status": item.status,
            "failure": item.failure,
            "origins": ", ".join(trial.origins),
            **{path: arm.values.get(path) for path in plan.paths},
        }
        if item.result is not None:
            row |= _of_result(item.result, plan.analysis)
        rows.append(row)
    metrics = sorted(
        {name for row in rows for name in row if is_metric(name)} | {judged(plan.analysis)},
        key=lambda name: (GROUPS.index(name.partition("/")[0]), name),
    )
    frame = pd.DataFrame(rows, columns=[*BEFORE, *plan.paths, *metrics, *AFTER])
    for path in plan.paths:
        frame[path] = _column(frame[path].tolist())
    texts = ("study", "arm", "baseline", "trial", "code", "status", "failure", "engine", "device", "origins")
    whole = ("params", "macs", "steps", "images", "threads")
    return frame.astype(
        {
            **dict.fromkeys(texts, "string"),
            **dict.fromkeys(whole, "Int64"),
            **dict.fromkeys([*metrics, "wall_s"], "float64"),
            "seed": "int64",
        }
    )


def is_metric(name: str) -> bool:
    """Whether a column holds a metric; an arm may vary ``train`` as a whole, which is none."""
    group, slash, _ = name.partition("/")
    return bool(slash) and group in GROUPS


def history(plan: Plan, store: Store) -> pd.DataFrame:
    """Every measurement: ``trial, arm, seed, step, epoch, metric, value, time``.

    ``time`` (UTC) is when the value was journalled, and missing where no journal is left.  Trials without a result
    have what their journal holds so far.
    """
    return curves(gather(plan, store))


def curves(found: Sequence[Found]) -> pd.DataFrame:
    """:func:`history` of what :func:`gather` found."""
    import pandas as pd

    columns = ("trial", "arm", "seed", "step", "epoch", "metric", "value", "time")
    rows: list[tuple[Any, ...]] = []
    for item in found:
        journal = [event for event in item.folder.events()[0] if event.kind == "metrics"]
        times: dict[int, int] = {}
        for event in journal:
            times.setdefault(event.body["step"], event.t)
        if item.result is not None:
            measured = [(moment.step, moment.epoch, moment.metrics) for moment in item.result.outcome.history]
        else:
            measured = [(event.body["step"], event.body["epoch"], event.body["metrics"]) for event in journal]
        rows += [
            (item.planned.trial.key, item.planned.arm, item.planned.seed, step, epoch, name, value, times.get(step))
            for step, epoch, metrics in measured
            for name, value in metrics.items()
            if not name.startswith("system/")
        ]
    frame = pd.DataFrame(rows, columns=list(columns)).astype(
        {
            **dict.fromkeys(("trial", "arm", "metric"), "string"),
            **dict.fromkeys(("seed", "step"), "int64"),
            **dict.fromkeys(("epoch", "value"), "float64"),
            "time": "Int64",
        }
    )
    frame["time"] = pd.to_datetime(frame["time"], unit="ms", utc=True).astype("datetime64[ms, UTC]")
    return frame


def usable(frame: pd.DataFrame, analysis: Analysis) -> dict[str, dict[int, float]]:
    """Arm to seed to judged value, of the trials that can be judged.

    Left out are trials that are not done, values that are not finite, and seeds whose trial is one and the same as
    that of an earlier seed (nothing the seed varies is used), because one training counted twice is no replicate.
    """
    values: dict[str, dict[int, float]] = {}
    column = judged(analysis)
    for arm, rows in frame.groupby("arm", sort=False):
        done = rows[rows["status"] == "done"].drop_duplicates("trial")
        pairs = zip(done["seed"].tolist(), done[column].tolist(), strict=True)
        values[str(arm)] = {int(seed): float(value) for seed, value in pairs if math.isfinite(value)}
    return values


def refusals(plan: Plan) -> dict[str, str]:
    """Arm to the reason why its comparison is not judged, where it is not.

    Arms that differ by the trial they start from (a teacher, a pre-trained body) are compared by samples of that
    trial: five students of one teacher are one sample of the teacher.
    """
    behind: dict[str, dict[str, set[str]]] = {}
    for planned in plan.trials:
        for role, needed in planned.trial.needs.items():
            behind.setdefault(planned.arm, {}).setdefault(role, set()).add(needed.partition("/")[0])
    found = {}
    for arm in plan.arms:
        first, second = behind.get(arm.name, {}), behind.get(arm.baseline or "", {})
        for role in sorted(first.keys() & second.keys()):
            fewest = min(len(first[role]), len(second[role]))
            if first[role] != second[role] and fewest < LEAST_PREREQUISITES:
                trained = "training" if fewest == 1 else "trainings"
                found[arm.name] = (
                    f"the arms differ by their {role}, of which {fewest} {trained} stand{'s' * (fewest == 1)} behind "
                    f"an arm: fewer than {LEAST_PREREQUISITES} are no sample"
                )
    return found


def summary(frame: pd.DataFrame, analysis: Analysis, refused: Mapping[str, str] = {}) -> pd.DataFrame:
    """One row per arm: what it reached, and how it differs from its baseline.

    Columns: ``arm, baseline``; ``planned`` trials and how many are ``done, diverged, failed, running, missing``;
    ``n`` (values judged), ``mean, sd, low, high`` (t-interval of level 1 - alpha); ``difference, difference_low,
    difference_high, test, pairs, correlation`` (see :func:`vitlab.statistics.compare`), ``p``, ``p_corrected`` over
    ``family`` comparisons (every arm that has a baseline, judged or not), ``sign_flip_p``; ``detectable`` with 80 %
    power at that correction; ``better`` with ``better_low, better_high``, the probability that the arm beats its
    baseline at the same seed; where the analysis has a margin, ``equal_low, equal_high`` (the interval of level
    1 - 2 alpha) and ``p_equal`` of the test that the difference lies within it; the mean of the test metric of the
    same name; ``params, macs, wall_s``.  Comparisons in ``refused`` (see :func:`refusals`) have their difference, no
    judgement, and the reason in ``refused``.
    """
    import pandas as pd

    values = usable(frame, analysis)
    grouped = {str(arm): rows for arm, rows in frame.groupby("arm", sort=False)}
    compared = {arm: str(rows["baseline"].iloc[0]) for arm, rows in grouped.items() if rows["baseline"].notna().all()}
    contrasts = {
        arm: statistics.compare(values[arm], values.get(baseline, {}), analysis.alpha)
        for arm, baseline in compared.items()
    }
    contrasts |= {
        arm: statistics.Contrast(contrasts[arm].difference, math.nan, math.nan, math.nan, "none", contrasts[arm].pairs)
        for arm in refused
        if arm in contrasts
    }
    corrected = dict(
        zip(contrasts, statistics.corrected([item.p for item in contrasts.values()], analysis.correction), strict=True)
    )
    level = analysis.alpha if analysis.correction == "none" else analysis.alpha / max(1, len(contrasts))
    test = f"test/{analysis.metric.partition('/')[2]}"
    rows_out = []
    for arm, rows in grouped.items():
        counts = {status: int((rows["status"] == status).sum()) for status in STATUSES}
        mean = statistics.mean_interval(list(values[arm].values()), analysis.alpha)
        row: dict[str, Any] = {"arm": arm, "baseline": compared.get(arm), "planned": len(rows), **counts}
        row |= {"n": mean.n, "mean": mean.mean, "sd": mean.sd, "low": mean.low, "high": mean.high}
        if arm in contrasts:
            row |= _of_contrast(contrasts[arm], level)
            if analysis.margin is not None:
                equal = statistics.equivalence(contrasts[arm], analysis.margin, analysis.alpha)
                row |= {"equal_low": equal.low, "equal_high": equal.high, "p_equal": equal.p}
            row |= {"p_corrected": corrected[arm], "family": len(contrasts), "refused": refused.get(arm)}
            if arm not in refused:
                row |= _beats(values[arm], values.get(compared[arm], {}), analysis)
        if test in rows:
            row[test] = rows.loc[rows["seed"].isin(list(values[arm])), test].mean()
        row |= {"params": rows["params"].max(), "macs": rows["macs"].max(), "wall_s": rows["wall_s"].sum()}
        rows_out.append(row)
    floats = "mean sd low high difference difference_low difference_high correlation p p_corrected sign_flip_p"
    floats += " detectable better better_low better_high equal_low equal_high p_equal"
    columns = [
        *("arm", "baseline", "planned", *STATUSES, "n", "mean", "sd", "low", "high"),
        *("difference", "difference_low", "difference_high", "test", "pairs", "correlation"),
        *("p", "p_corrected", "family", "sign_flip_p", "detectable", "better", "better_low", "better_high", "refused"),
        *("equal_low", "equal_high", "p_equal"),
        *([test] if test in frame else []),
        *("params", "macs", "wall_s"),
    ]
    return pd.DataFrame(rows_out, columns=columns).astype(
        {
            **dict.fromkeys(("arm", "baseline", "test", "refused"), "string"),
            **dict.fromkeys(("planned", *STATUSES, "n"), "int64"),
            **dict.fromkeys(("pairs", "family", "params", "macs"), "Int64"),
            **dict.fromkeys([*floats.split(), "wall_s", *([test] if test in frame else [])], "float64"),
        }
    )


def write_parquet(frame: pd.DataFrame, path: Path) -> None:
    """Write a frame whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    frame.to_parquet(temporary, index=False)
    os.replace(temporary, path)


# -- how it is done ---------------------------------------------------------------------------------------------------


def _found(planned: Planned, store: Store) -> Found:
    folder = store.trial(planned.trial.key, planned.trial.code)
    result = folder.result()
    if result is not None:
        return Found(planned, folder, result.status, result.failure, result)
    if folder.held():
        return Found(planned, folder, "running", "", None)
    failure = folder.failure()
    return Found(planned, folder, "missing" if failure is None else "failed", failure or "", None)


def _of_result(result: Result, analysis: Analysis) -> dict[str, Any]:
    numerics, circumstances, outcome = result.circumstances.numerics, result.circumstances, result.outcome
    row: dict[str, Any] = {
        **outcome.metrics,
        "params": circumstances.params,
        "macs": circumstances.macs,
        "steps": outcome.steps,
        "images": outcome.images,
        "wall_s": circumstances.wall_s,
        "engine": numerics.get("engine"),
        "threads": numerics.get("threads"),
        "device": numerics.get("device"),
    }
    if analysis.at == "best":
        seen = [moment.metrics.get(analysis.metric, math.nan) for moment in outcome.history]
        finite = [value for value in seen if math.isfinite(value)]
        best = max if analysis.goal == "max" else min
        row[judged(analysis)] = best(finite) if finite else math.nan
    return row


def _of_contrast(contrast: statistics.Contrast, level: float) -> Mapping[str, Any]:
    return {
        "difference": contrast.difference,
        "difference_low": contrast.low,
        "difference_high": contrast.high,
        "test": contrast.test,
        "pairs": contrast.pairs,
        "correlation": contrast.correlation,
        "p": contrast.p,
        "sign_flip_p": contrast.sign_flip_p,
        "detectable": statistics.detectable(contrast.se, contrast.df, level),
    }


def _beats(first: Mapping[int, float], second: Mapping[int, float], analysis: Analysis) -> Mapping[str, float]:
    sign = 1 if analysis.goal == "max" else -1
    common = sorted(first.keys() & second.keys())
    if len(common) >= 2:
        x, y = ([sign * values[seed] for seed in common] for values in (first, second))
        found = statistics.superiority_of_pairs(x, y, analysis.alpha)
    else:
        x, y = ([sign * value for value in values.values()] for values in (first, second))
        found = statistics.superiority(x, y, analysis.alpha)
    return {"better": found.probability, "better_low": found.low, "better_high": found.high}


def _column(values: list[Any]) -> pd.Series[Any]:
    """A varied path's values: whole numbers, numbers, or short text."""
    import pandas as pd

    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return pd.Series(values, dtype="int64")
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return pd.Series(values, dtype="float64")
    return pd.Series([text(value) for value in values], dtype="string")
