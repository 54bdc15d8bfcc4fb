"""The report as plain data: answers, rows, notes and how it was made.  Every format is a rendering of it.

It is also ``report.json``, from which the terminal and LaTeX forms are said again without pandas.
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
from vitlab.plan import versions
from vitlab.plan.tune import edges, name_of
from vitlab.plan.values import Plan
from vitlab.report import attention_pictures, costs, phrasing, tradeoff
from vitlab.report.frame import Found, prerequisites, rivals
from vitlab.report.notes import notes
from vitlab.store.folders import Store

if TYPE_CHECKING:
    import pandas as pd

FORM = 9  #: counts changes of this document; a stored one of another form is made anew
BUILT_IN = "vitlab"


def document(
    plan: Plan, store: Store, found: Sequence[Found], frame: pd.DataFrame, summary: pd.DataFrame, at: str
) -> dict[str, Any]:
    """Everything a report says, as JSON values; ``at`` is the :func:`state` from before anything was read."""
    rows, needed = plain(summary), prerequisites(plan, store)
    cost, outdated = costs.measured(plan, store)
    return {
        "vitlab": __version__,
        "state": at,
        "study": plan.study,
        "question": plan.question,
        "analysis": plan.analysis.model_dump(mode="json"),
        "overview": phrasing.overview(rows),
        "answers": phrasing.answers(rows, plan.analysis),
        "arms": rows,
        "skipped": [{"arm": arm.name, "because": arm.skip} for arm in plan.arms if arm.skip],
        "tuning": tuning(plan),
        "heads": heads(plan, frame),
        **tradeoff.document(plan, frame, costs.beside(rows, cost)),
        "cost": cost,
        "explained": attention_pictures.explained(plan, store),
        "notes": [*of_version(plan, store), *notes(plan, [*needed, *found], frame, rows), *costs.notes(outdated)],
        "made": made(plan, store, [*needed, *rivals(plan, store), *found]),
        "trials": plain(frame),
    }


def state(plan: Plan, store: Store) -> str:
    """A digest of the plan, of which of its trials have ended, and of what is explained: equal states, equal reports.

    Taken before trials are read: what ends in between makes a report old, never one that is taken for new.
    """
    ends = []
    tuned = (planned.trial for tuning in plan.tuning for planned in tuning.trials)
    for trial in (*(planned.trial for planned in plan.trials), *plan.prerequisites, *tuned):
        folder = store.trial(trial.key, trial.code)
        ended = [(folder.path / name) for name in ("result.json", "failure.json")]
        ends.append([path.stat().st_mtime_ns if path.exists() else 0 for path in ended] + [folder.is_locked()])
    latest = versions.version(store.study(plan.study))
    beside = (
        attention_pictures.explained(plan, store),
        costs.changed(plan, store),
        latest.name if latest is not None else "",
    )
    said = json.dumps(
        [__version__, FORM, plan.to_json(), ends, *beside],
        sort_keys=True,
        default=str,
    )
    return hashlib.sha256(said.encode()).hexdigest()


def plain(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a frame in JSON values: None for what is missing or not finite, ISO 8601 for times."""
    rows = []
    for record in frame.astype(object).where(frame.notna(), None).to_dict(orient="records"):
        row = {str(name): getattr(value, "item", lambda value=value: value)() for name, value in record.items()}
        row = {name: value.isoformat() if isinstance(value, datetime) else value for name, value in row.items()}
        rows.append({n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in row.items()})
    return rows


def tuning(plan: Plan) -> list[dict[str, Any]]:
    """Every rival of every tuning: whose it was, what it reached by which metric, what it took, and who won."""
    rows = []
    for item in plan.tuning:
        for index, rival in enumerate(item.rivals):
            won = f"chosen, at the edge of {', '.join(edges(item))}" if edges(item) else "chosen"
            lost = "" if item.open or rival.score is not None else "diverged"
            rows.append(
                {
                    "arm": item.arm or "all arms",
                    "rival": name_of(rival.values),
                    "metric": item.select,
                    "score": rival.score,
                    "trials": len(rival.trials),
                    "wall_s": rival.wall_s,
                    "outcome": won if index == item.winner else lost,
                }
            )
    return rows


def heads(plan: Plan, frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The mean accuracy of every head, and of every fusion, of the arms that have more than one; cosine of tokens."""
    group = plan.analysis.metric.partition("/")[0]
    names = [name for name in frame.columns if name.startswith(f"{group}/accuracy_")]
    extra = f"{group}/token_cosine"
    if not names:
        return []
    rows: list[dict[str, Any]] = []
    for arm, trials in frame[frame["status"] == "done"].groupby("arm", sort=False):
        means = trials.reindex(columns=[*names, extra]).mean()
        if means[names].notna().any():
            rows.append({"arm": str(arm), **{str(n): None if math.isnan(v) else float(v) for n, v in means.items()}})
    return rows


def made(plan: Plan, store: Store, found: Sequence[Found]) -> dict[str, Any]:
    """Return how it was made: command, versions, data, time, and what became of each distinct training."""
    found = list({(item.planned.trial.key, item.planned.trial.code): item for item in found}.values())
    ended = [item.result for item in found if item.result is not None]
    version = versions.version(store.study(plan.study), plan.version)
    fresh = sum(version is not None and result.circumstances.ended >= version.time for result in ended)
    installed: dict[str, set[str]] = {}
    numerics: dict[str, set[str]] = {}
    for result in ended:
        for name, value in result.circumstances.versions.items():
            installed.setdefault(name, set()).add(str(value))
        for name, value in result.circumstances.numerics.items():
            if str(value):  # what has no attention names no kernel of it
                numerics.setdefault(name, set()).add(str(value))
    data = {(str(item.planned.trial.spec["data"]["type"]), item.planned.trial.data) for item in found}
    last = max((result.circumstances.ended for result in ended), default=None)
    return {
        **_source(version, store),
        "versions": {name: ", ".join(sorted(known)) for name, known in sorted(installed.items())},
        "numerics": {name: ", ".join(sorted(known)) for name, known in sorted(numerics.items())},
        "components": sorted({origin for item in found for origin in item.planned.trial.origins}),
        "data": [{"set": name, "identity": identity} for name, identity in sorted(data, key=str)],
        "wall_s": sum(result.circumstances.wall_s for result in ended),
        "ended": None if last is None else datetime.fromtimestamp(last, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "trained": fresh,
        "cached": len(ended) - fresh,
        "failed": sum(item.status == "failed" for item in found),
    }


def made_lines(doc: Mapping[str, Any]) -> list[tuple[str, str]]:
    """:func:`made` as pairs of a heading and a text; nothing for what was made of two studies."""
    made = doc["made"]
    if made is None:
        return []
    total = made["trained"] + made["cached"] + made["failed"]
    failed = f", {made['failed']} failed" if made["failed"] else ""
    guests = [origin for origin in made["components"] if origin.split(" ")[1:2] != [BUILT_IN]]
    data = [f"{item['set']} ({item['identity'] or 'not here yet'})" for item in made["data"]]
    lines = [
        ("To reproduce", _again(made)),
        ("Data", "; ".join(data)),
        (
            "Training",
            f"{phrasing.duration(made['wall_s'])} in all, {phrasing.count(total, 'trial')}: "
            f"{made['trained']} trained in the last run, {made['cached']} taken from earlier runs{failed}"
            + (f"; ended {made['ended']}" if made["ended"] else ""),
        ),
        ("Numerics", ", ".join(f"{name} {value}" for name, value in made["numerics"].items())),
        ("Versions", ", ".join(f"{name} {value}" for name, value in made["versions"].items())),
        ("Plugins", "; ".join(guests)),
    ]
    return [(head, text) for head, text in lines if text]


def of_version(plan: Plan, store: Store) -> list[str]:
    """Return which version of the study this is, where it has changes or is not the latest; as sentences."""
    study = store.study(plan.study)
    this, latest = versions.version(study, plan.version), versions.version(study)
    if this is None or latest is None:
        return []
    notes = [f"Version {this.name[:8]} of this study was run with {this.set_options}."] if this.set_options else []
    if this.name != latest.name:
        known = this.content is not None and latest.content is not None
        differ = f": {versions.differences(this.content or {}, latest.content or {})}" if known else ""
        notes.append(
            f"This is an earlier version of the study ({this.name[:8]}, run {this.when}); the latest is "
            f"{latest.name[:8]}, run {latest.when}{differ}."
        )
    return notes


def _again(made: Mapping[str, Any]) -> str:
    """Return what to do to have the same numbers again."""
    commit = f" The folder of the study was at git commit {made['commit']}." if made["commit"] else ""
    return (
        f"{made['place']}: {made['command']}.{commit} Equal bits need the data, numerics and versions named here; what "
        "is there is not trained again"
    )


def _source(version: versions.Version | None, store: Store) -> dict[str, str]:
    """Return where and by which command the study is run again, and the git commit; :func:`_again` says them.

    Where it was to run, and whom it was told, are no part of what was found.
    """
    run = {} if version is None else version.run
    place = Path(run.get("folder", ""))
    if not place.is_absolute() or not place.is_dir():
        place = store.root.parent

    def shown(path: Path) -> str:
        return shlex.quote(str(path.relative_to(place)) if path.is_relative_to(place) else str(path))

    words = ["vitlab run"]
    if version is not None:
        words += [shown(version.folder.resolve() / "study.yaml"), f"--out {shown(store.root)}"]
        words += [f"--plugin {shown(Path(plugin))}" for plugin in run.get("plugins", ())]
        words += [version.set_options] if version.set_options else []
    holds = f"In the folder that holds {store.root.name}" if place == store.root.parent else f"In {place}"
    return {"command": " ".join(words), "place": holds, "commit": str(run.get("commit", ""))}
