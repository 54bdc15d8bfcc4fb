"""Judgement of results from elsewhere: a table of arms, seeds and values becomes the report of a study."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from vitlab.errors import UserError, count, nearest
from vitlab.plan.metric_facts import MetricFacts
from vitlab.plan.values import Arm, Plan
from vitlab.report.between import Between
from vitlab.report.comparison import summary
from vitlab.report.external_table import MAX_LISTED, Table
from vitlab.report.notes import table_notes
from vitlab.spec import Analysis
from vitlab.spec.choice import Goal
from vitlab.store.result import Ending

if TYPE_CHECKING:
    import pandas as pd

LESS_IS_BETTER = ("loss", "err", "ece", "nll", "perplexity", "ppl", "mse", "mae", "rmse", "brier")
SHARES = ("acc", "top1", "top5", "top_1", "top_5", "f1", "auc", "iou", "precision", "recall", "dice", "err", "ece")
"""Parts of the names of metrics that are shares of one."""
SEED_COUNTS = ("n", "runs", "n_runs", "seeds", "n_seeds", "num_seeds", "trials", "n_trials")
OWN_COLUMNS = ("arm", "baseline", "seed", "trial", "status", "params", "macs", "images", "wall_s")
"""Columns of the frame that is compared, beside the metric."""
MAX_SEED = 2**53  #: seeds from here on are names, as a float does not hold each of them


def judge(
    table: Table,
    *,
    metric: str,
    arm: str | None = None,
    seed: str | None = None,
    baseline: str | None = None,
    baselines: str | None = None,
    goal: Goal | None = None,
    margin: float | None = None,
    alpha: float = 0.05,
    images: int | None = None,
) -> Between:
    """Compare the arms of a table with one of them, as the report of a study does.

    Args:
        table: the results, see :mod:`vitlab.report.external_table`.
        metric: the column of the metric; of a wide table, its name.
        arm: the column of the arms; without it the table is wide, with a column per arm and a row per seed.
        seed: the column of the seeds, which pair the arms; without it arms are compared without pairs, and the rows of
            a wide table are the seeds.
        baseline: the arm that the others are compared with; by default the one of this name, or else the first.
        baselines: the column of the arm that each is compared with, empty where that is none, in place of ``baseline``.
        goal: direction in which the metric is better; by default that of its name.
        margin: largest difference that counts as none, in units of the metric.
        alpha: family-wise error rate.
        images: number of images that the metric counts, from which its smallest step follows.

    Raises:
        UserError: if the table does not have one value per arm and seed.
    """
    import pandas as pd

    notes = list(table.notes)
    if arm is None:
        long, arm_names = _from_wide(table, seed), None
    else:
        long, arm_names = _from_long(table, arm, seed, metric, notes), arm
    arms = list(dict.fromkeys(long["arm"]))
    if baselines is not None:
        compared = _baselines(table, arm, baselines, baseline)
    else:
        if baseline is None:
            baseline = "baseline" if "baseline" in arms else arms[0]
            if len(arms) > 1 and baseline != "baseline":
                notes.append(f"Compared with '{baseline}', the first arm; --baseline names another.")
        compared = {one: baseline for one in arms if one != baseline}
    for name in dict.fromkeys(compared.values()):
        if name not in arms:
            place = f"column '{arm_names}'" if arm_names else "the header"
            raise UserError(
                f"{table.source}: no arm '{name}' in {place}.{nearest(name, arms)} Arms: {'; '.join(arms)}."
            )
    # The column keeps its name, as only that says which split it is of, unless the frame has a column of that name.
    name = f"metric/{metric}" if metric in OWN_COLUMNS else metric
    long["value"] = _as_shares(long["value"], metric, notes)
    long["status"] = [
        Ending.FAILED if failed else Ending.DONE if math.isfinite(value) else Ending.DIVERGED
        for failed, value in zip(long["failed"], long["value"], strict=True)
    ]
    finite = long["value"][long["value"].map(math.isfinite)]
    is_share = _is_share(metric) and bool(finite.between(0, 1).all())
    direction: Goal = goal or ("min" if any(part in metric.lower() for part in LESS_IS_BETTER) else "max")
    analysis = Analysis(metric=name, goal=direction, margin=margin, alpha=alpha)
    frame = pd.DataFrame(
        {
            "arm": long["arm"].astype("string"),
            "baseline": pd.Series([compared.get(one) for one in long["arm"]], dtype="string"),
            "seed": long["seed"].astype("int64"),
            "trial": [f"{row}" for row in range(len(long))],
            "status": long["status"],
            name: long["value"].astype("float64"),
            **{column: pd.Series([None] * len(long), dtype="Int64") for column in ("params", "macs", "images")},
            "wall_s": math.nan,
        }
    )
    frame.attrs["quantum"] = 1 / images if images else 0.0
    facts = MetricFacts(direction, "share" if is_share else "number", (0.0, 1.0 if is_share else None))
    plan = Plan(
        study=table.name,
        question=f"{table.name}: which arms differ from {' or '.join(dict.fromkeys(compared.values())) or baseline}?",
        arms=tuple(Arm(one, {}, compared.get(one)) for one in arms),
        trials=(),
        analysis=analysis,
        metrics={name.rpartition("/")[2]: facts},
    )
    rows = summary(frame, plan)
    notes += table_notes(plan, frame, rows)
    missing = [f"{row.arm}, seed {row.seed}" for row in long[~frame["status"].eq(Ending.DONE)].itertuples()]
    if missing:
        more = f" and {len(missing) - MAX_LISTED} more" if len(missing) > MAX_LISTED else ""
        notes.append(f"Warning: no value of {'; '.join(missing[:MAX_LISTED])}{more}. They count as broken seeds.")
    notes += _of_single_seeds(table.rows, arm, long, metric)
    notes.append("These comparisons were not registered before their results were known.")
    return Between(plan, rows, tuple(notes))


def _column(table: Table, name: str) -> pd.Series[Any]:
    if name not in table.rows:
        columns = [*map(str, table.rows)]
        raise UserError(f"{table.source}: no column '{name}'.{nearest(name, columns)} Columns: {', '.join(columns)}.")
    return table.rows[name]


def _baselines(table: Table, arm: str | None, column: str, baseline: str | None) -> dict[str, str]:
    """Return arm to the arm that it is compared with, from a column of a table with a row per training."""
    if arm is None or baseline is not None:
        other = "--baseline" if baseline is not None else "a column per arm"
        raise UserError(f"{table.source}: --baselines names a column, and cannot be combined with {other}; remove one")
    named = _column(table, column)
    compared: dict[str, str] = {}
    of_rows = table.rows[arm].astype(str)
    arms = {*of_rows}
    for name, rows in named.groupby(of_rows, sort=False):
        distinct = {*rows.astype(object).where(rows.notna(), "").astype(str)}
        if len(distinct) > 1:
            listed = ", ".join(f"'{value}'" for value in sorted(distinct))
            raise UserError(
                f"{table.source}: arm '{name}' has several values of '{column}': {listed}; an arm has one baseline"
            )
        [value] = distinct
        if value not in arms and value.removesuffix(".0") in arms:  # whole numbers beside empty cells
            value = value.removesuffix(".0")
        if value and value != name:
            compared[str(name)] = value
    if not compared:
        raise UserError(
            f"{table.source}: column '{column}' names no baseline; without --baselines, all arms have the same"
        )
    return compared


def _from_long(table: Table, arm: str, seed: str | None, metric: str, notes: list[str]) -> pd.DataFrame:
    """Return arm, seed, value and failure of every training of a table with a row per training."""
    import pandas as pd

    arms = _column(table, arm)
    if arms.isna().any():
        raise UserError(f"{table.source}: row {int(arms.isna().to_numpy().argmax()) + 1} has no '{arm}'")
    long = pd.DataFrame({"arm": arms.astype(str), "value": _numbers(table, metric)})
    long["failed"] = [place in table.failed for place in range(len(long))]
    if seed is None:
        notes.append(
            "Without --seed the arms are not paired: name the column of the seeds if they have some in common."
        )
        return long.assign(seed=range(len(long)))
    long["seed"] = _seed_numbers(table, seed)
    repeated = long[long.duplicated(["arm", "seed"], keep=False)]
    if len(repeated):
        same = repeated.groupby(["arm", "seed"])["value"].nunique(dropna=False).eq(1)
        if not same.all():
            one, at = (repeated["arm"].iloc[0], table.rows.loc[repeated.index[0], seed])
            rows = len(repeated[(repeated["arm"] == one) & (repeated["seed"] == repeated["seed"].iloc[0])])
            raise UserError(
                f"{table.source}: {count(rows, 'row')} of arm '{one}' with seed {at}, with different values; keep one "
                "row per training, such as the one of the last epoch, and one metric per column"
            )
        dropped = int(long.duplicated(["arm", "seed"]).sum())
        notes.append(f"Warning: {count(dropped, 'row')} repeat a training with the same value and count once.")
        long = long.drop_duplicates(["arm", "seed"])
    return long.reset_index(drop=True)


def _from_wide(table: Table, seed: str | None) -> pd.DataFrame:
    """Return what `_from_long` does, of a table with a column per arm; empty cells are left out."""
    import pandas as pd

    seeds = _seed_numbers(table, seed) if seed is not None else range(len(table.rows))
    arms = [str(name) for name in table.rows if name != seed]
    if not arms:
        raise UserError(f"{table.source}: no column of an arm beside '{seed}'")
    parts = [
        pd.DataFrame({"arm": name, "value": _numbers(table, name), "failed": False, "seed": seeds}) for name in arms
    ]
    long = pd.concat(parts, ignore_index=True)
    if long.duplicated(["arm", "seed"]).any():
        raise UserError(f"{table.source}: a seed stands in two rows of column '{seed}'")
    return long[table.rows[arms].notna().to_numpy().T.ravel()].reset_index(drop=True)


def _numbers(table: Table, name: str) -> pd.Series[Any]:
    """Return a column as numbers; ``93.1 %`` is 93.1."""
    import pandas as pd

    values, numbers = _column(table, name), []
    for row, value in enumerate(values, start=1):
        try:
            text = value.strip().removesuffix("%") if isinstance(value, str) else value
            numbers.append(math.nan if text is None or text == "" else float(text))
        except (TypeError, ValueError):
            hint = "With a column per arm, leave --arm out; with a row per training, name its column with --arm."
            raise UserError(
                f"{table.source}: '{value}' in row {row} of column '{name}' is not a number. {hint}"
            ) from None
    return pd.Series(numbers, index=values.index, dtype="float64")


def _seed_numbers(table: Table, name: str) -> list[int]:
    """Return a number per seed: whole numbers as they are, others in the order of their first appearance."""
    import pandas as pd

    values = _column(table, name)
    if values.isna().any():
        raise UserError(f"{table.source}: row {int(values.isna().to_numpy().argmax()) + 1} has no '{name}'")
    texts = values.astype(str)  # JSON may hold lists, which are neither numbers nor keys
    whole = pd.to_numeric(texts, errors="coerce")
    if (whole == whole.round()).all() and whole.abs().lt(MAX_SEED).all():
        return [int(value) for value in whole]
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    return [numbers[text] for text in texts]


def _is_share(metric: str) -> bool:
    return any(part in metric.lower() for part in SHARES)


def _as_shares(values: pd.Series[Any], metric: str, notes: list[str]) -> pd.Series[Any]:
    """Return shares of one where a share is given in percent."""
    finite = values[values.map(math.isfinite)]
    in_percent = _is_share(metric) and len(finite) and finite.between(0, 100).all() and finite.max() > 1.5
    if not in_percent:
        return values
    notes.append(f"'{metric}' is in percent: values reach {finite.max():g}.")
    return values / 100


def _of_single_seeds(rows: pd.DataFrame, arm: str | None, long: pd.DataFrame, metric: str) -> list[str]:
    """Return notes about arms with one value, and about values that are the best of several."""
    import pandas as pd

    counts = long.groupby("arm", sort=False)["value"].size()
    single = [str(name) for name in counts[counts == 1].index]
    lines = []
    if single:
        names = "; ".join(single[:MAX_LISTED]) + (
            f" and {len(single) - MAX_LISTED} more" if len(single) > MAX_LISTED else ""
        )
        lines.append(f"Warning: one value of {names}: no spread, no interval, no test. 3 seeds or more can be judged.")
        columns = [name for name in map(str, rows) if name.lower() in SEED_COUNTS and arm is not None]
        several = [name for name in columns if (pd.to_numeric(rows[name], errors="coerce") > 1).any()]
        if several:
            lines.append(
                f"Warning: column '{several[0]}' says that values stand for several trainings; their mean or best "
                "has no spread that can be judged; a table with a row per training has."
            )
    if re.search(r"best|max", metric.lower()):
        lines.append(
            f"Warning: '{metric}' seems to be the best of several values. The best is optimistic, the more so the more "
            "values there are, and arms with different numbers of them cannot be compared."
        )
    return lines
