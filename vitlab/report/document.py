"""The report as plain data: answers, rows, notes and provenance.  Every format is a rendering of it.

It is stored as ``report.json``, from which the terminal and LaTeX formats are rendered without pandas.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitlab._version import __version__
from vitlab.errors import count
from vitlab.plan import versions
from vitlab.plan.tune import edges, name_of
from vitlab.plan.values import Plan
from vitlab.report import attention_pictures, costs, phrasing
from vitlab.report.corruptions import corruptions
from vitlab.report.frame import StoredTrial, prerequisites, rivals
from vitlab.store.folders import Store
from vitlab.store.result import Ending

if TYPE_CHECKING:
    import pandas as pd

FORM = 14  #: version of this document; a stored one of another version is rendered anew
BUILT_IN = "vitlab"


def document(
    plan: Plan, store: Store, trials: Sequence[StoredTrial], frame: pd.DataFrame, rows: list[dict[str, Any]], at: str
) -> dict[str, Any]:
    """Return the content of a report as JSON values; ``at`` is the :func:`state` from before anything was read."""
    # Imported here, because a stored report is read without numpy.
    from vitlab.report import tradeoff
    from vitlab.report.notes import notes

    prerequisite_trials = prerequisites(plan, store)
    cost, outdated = costs.read_costs(plan, store)
    tradeoffs = tradeoff.document(plan, frame, costs.with_costs(rows, cost))
    return {
        "vitlab": __version__,
        "state": at,
        "study": plan.study,
        "question": plan.question,
        "analysis": plan.analysis.model_dump(mode="json"),
        "units": plan.units,
        "overview": phrasing.overview(rows),
        "answers": phrasing.answers(rows, plan.analysis, plan.units),
        "arms": rows,
        "skipped": [{"arm": arm.name, "because": arm.skip} for arm in plan.arms if arm.skip],
        "tuning": tuning(plan),
        "heads": heads(plan, frame),
        "corrupted": corruptions(plan, frame),
        **tradeoffs,
        "cost": cost,
        "explained": attention_pictures.rollouts(plan, store),
        "notes": [
            *of_version(plan, store),
            *notes(plan, [*prerequisite_trials, *trials], frame, rows),
            *tradeoff.notes(plan, frame, rows, tradeoffs),
            *costs.notes(outdated),
        ],
        "made": provenance(plan, store, [*prerequisite_trials, *rivals(plan, store), *trials]),
        "trials": plain(frame),
    }


def state(plan: Plan, store: Store) -> str:
    """Return a digest of the plan, its ended trials, pictures and costs: equal states have equal reports.

    It is taken before trials are read, so that a trial that ends in between makes the report outdated.
    """
    endings = []
    tuned = (planned.trial for tuning in plan.tuning for planned in tuning.trials)
    for trial in (*(planned.trial for planned in plan.trials), *plan.prerequisites, *tuned):
        folder = store.trial(trial.key, trial.code)
        files = [(folder.path / name) for name in ("result.json", "failure.json")]
        endings.append([path.stat().st_mtime_ns if path.exists() else 0 for path in files] + [folder.is_locked()])
    latest = versions.version(store.study(plan.study))
    extras = (
        attention_pictures.rollouts(plan, store),
        costs.modified_ns(plan, store),
        latest.name if latest is not None else "",
    )
    text = json.dumps(
        [__version__, FORM, plan.to_json(), endings, *extras],
        sort_keys=True,
        default=str,
    )
    return hashlib.sha256(text.encode()).hexdigest()


def plain(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a frame in JSON values: None for what is missing or not finite, ISO 8601 for times."""
    names = [str(name) for name in frame.columns]
    rows = zip(*(_plain_values(column) for _, column in frame.items()), strict=True)  # by column: pandas' rows are slow
    return [dict(zip(names, row, strict=True)) for row in rows]


def _plain_values(column: pd.Series[Any]) -> list[Any]:
    """Return the values of a column as JSON values, see :func:`plain`."""
    values = []
    for value, is_missing in zip(column.tolist(), column.isna().tolist(), strict=True):
        value = getattr(value, "item", lambda value=value: value)()
        is_infinite = isinstance(value, float) and not math.isfinite(value)
        values.append(
            None if is_missing or is_infinite else value.isoformat() if isinstance(value, datetime) else value
        )
    return values


def tuning(plan: Plan) -> list[dict[str, Any]]:
    """Return a row for every candidate of every tuning: its arm, score, cost and outcome."""
    rows = []
    for item in plan.tuning:
        for index, rival in enumerate(item.rivals):
            win = f"chosen, at the edge of {', '.join(edges(item))}" if edges(item) else "chosen"
            other = "" if item.open or rival.score is not None else "diverged"
            rows.append(
                {
                    "arm": item.arm or "all arms",
                    "rival": name_of(rival.values),
                    "metric": item.select,
                    "score": rival.score,
                    "trials": len(rival.trials),
                    "wall_s": rival.wall_s,
                    "outcome": win if index == item.winner else other,
                }
            )
    return rows


def heads(plan: Plan, frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return per arm with several heads the mean accuracy of each and of their combinations, and its token cosine."""
    group = plan.analysis.metric.partition("/")[0]
    names = [name for name in frame.columns if name.startswith(f"{group}/accuracy_")]
    extra = f"{group}/token_cosine"
    if not names:
        return []
    rows: list[dict[str, Any]] = []
    for arm, trials in frame[frame["status"] == Ending.DONE].groupby("arm", sort=False):
        means = trials.reindex(columns=[*names, extra]).mean()
        if means[names].notna().any():
            rows.append({"arm": str(arm), **{str(n): None if math.isnan(v) else float(v) for n, v in means.items()}})
    return rows


def provenance(plan: Plan, store: Store, trials: Sequence[StoredTrial]) -> dict[str, Any]:
    """Return the provenance: command, versions, data, time, and counts of distinct trainings."""
    trials = list({(item.planned.trial.key, item.planned.trial.code): item for item in trials}.values())
    results = [item.result for item in trials if item.result is not None]
    version = versions.version(store.study(plan.study), plan.version)
    fresh = sum(version is not None and result.circumstances.ended >= version.time for result in results)
    installed: dict[str, set[str]] = {}
    numerics: dict[str, set[str]] = {}
    for result in results:
        for name, value in result.circumstances.versions.items():
            installed.setdefault(name, set()).add(str(value))
        for name, value in result.circumstances.numerics.items():
            if str(value):  # a model without attention has no kernel
                numerics.setdefault(name, set()).add(str(value))
    data = {
        (trial.spec.data.type, None if trial.data is None else str(trial.data))
        for trial in (item.planned.trial for item in trials)
    }
    last = max((result.circumstances.ended for result in results), default=None)
    return {
        **_source(version, store),
        "versions": {name: ", ".join(sorted(values)) for name, values in sorted(installed.items())},
        "numerics": {name: ", ".join(sorted(values)) for name, values in sorted(numerics.items())},
        "components": sorted({origin for item in trials for origin in item.planned.trial.origins}),
        "data": [{"set": name, "identity": identity} for name, identity in sorted(data, key=str)],
        "wall_s": sum(result.circumstances.wall_s for result in results),
        "ended": None if last is None else datetime.fromtimestamp(last, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "trained": fresh,
        "cached": len(results) - fresh,
        "failed": sum(item.status == Ending.FAILED for item in trials),
    }


def provenance_lines(doc: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return :func:`provenance` as pairs of heading and text; empty for a comparison of two studies."""
    record = doc["made"]
    if record is None:
        return []
    total = record["trained"] + record["cached"] + record["failed"]
    counts = {"trained in the last run": "trained", "taken from earlier runs": "cached", "failed": "failed"}
    parts = [f"{record[name]} {text}" for text, name in counts.items() if record[name]]
    plugins = [origin for origin in record["components"] if origin.split(" ")[1:2] != [BUILT_IN]]
    data = [f"{item['set']} ({item['identity'] or 'not here yet'})" for item in record["data"]]
    lines = [
        ("To reproduce", _reproduction(record)),
        ("Data", "; ".join(data)),
        (
            "Training",
            f"{count(total, 'trial')}, whose training times add up to {phrasing.duration(record['wall_s'])}"
            + (f": {', '.join(parts)}" if len(parts) > 1 else "")
            + (f"; ended {record['ended']}" if record["ended"] else ""),
        ),
        ("Numerics", ", ".join(f"{name} {value}" for name, value in record["numerics"].items())),
        ("Versions", ", ".join(f"{name} {value}" for name, value in record["versions"].items())),
        ("Plugins", "; ".join(plugins)),
    ]
    return [(head, text) for head, text in lines if text]


def of_version(plan: Plan, store: Store) -> list[str]:
    """Return sentences that name the version of the study, if it has changes or is not the latest; else none."""
    study = store.study(plan.study)
    this, latest = versions.version(study, plan.version), versions.version(study)
    if this is None or latest is None:
        return []
    notes = [f"Version {this.name[:8]} of this study was run with {this.set_options}."] if this.set_options else []
    if this.name != latest.name:
        both_recorded = this.content is not None and latest.content is not None
        difference = f": {versions.differences(this.content or {}, latest.content or {})}" if both_recorded else ""
        notes.append(
            f"This is an earlier version of the study ({this.name[:8]}, run {this.when}); the latest is "
            f"{latest.name[:8]}, run {latest.when}{difference}."
        )
    return notes


def _reproduction(provenance: Mapping[str, Any]) -> str:
    """Return the sentence of the report on how to reproduce its numbers."""
    commit = f" The folder of the study was at git commit {provenance['commit']}." if provenance["commit"] else ""
    return (
        f"{provenance['place']}: {provenance['command']}.{commit} Results that are stored there are not "
        "trained again; equal bits need the data, numerics and versions named here"
    )


def _source(version: versions.Version | None, store: Store) -> dict[str, str]:
    """Return the folder, the command and the git commit to run the study again; :func:`_reproduction` formats them.

    Executor and tracker options are left out, because they do not affect the results.
    """
    run = {} if version is None else version.run
    place = Path(run.get("folder", ""))
    if not place.is_absolute() or not place.is_dir():
        place = store.root.parent

    def quoted(path: Path) -> str:
        return shlex.quote(str(path.relative_to(place)) if path.is_relative_to(place) else str(path))

    command = ["vitlab run"]
    if version is not None:
        command += [quoted(version.folder.resolve() / "study.yaml"), f"--out {quoted(store.root)}"]
        command += [f"--plugin {quoted(Path(plugin))}" for plugin in run.get("plugins", ())]
        command += [version.set_options] if version.set_options else []
    place_name = f"In the folder that holds {store.root.name}" if place == store.root.parent else f"In {place}"
    return {"command": " ".join(command), "place": place_name, "commit": str(run.get("commit", ""))}
