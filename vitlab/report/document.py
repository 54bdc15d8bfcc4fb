"""The content of a report.  Every format is a rendering of it.

It is stored as ``report.json``, from which the text formats are rendered without pandas.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitlab._version import __version__
from vitlab.plan import versions
from vitlab.plan.values import Plan
from vitlab.report import phrasing
from vitlab.report.frame import prerequisites, rivals
from vitlab.report.phrasing import Row
from vitlab.report.provenance import Provenance, of_version, provenance
from vitlab.report.sections import Findings, section, sections
from vitlab.spec import Analysis
from vitlab.store.folders import Store

if TYPE_CHECKING:
    import pandas as pd

ROOMS = ("report", "comparison", "statistics")  #: packages whose code makes a report


@dataclass(frozen=True)
class Report:
    """The content of a report."""

    study: str
    question: str
    analysis: Analysis
    units: Mapping[str, str]
    overview: str
    answers: Sequence[str]
    arms: Sequence[Row]
    sections: Mapping[str, Sequence[Any]]  #: rows of each section that stores some, by its name
    notes: Sequence[str]
    skipped: Sequence[Mapping[str, str]] = ()
    made: Provenance | None = None  #: None for what belongs to no single study
    trials: Sequence[Row] = ()
    state: str = ""  #: see :func:`state`

    @classmethod
    def of(cls, findings: Findings, notes: Sequence[str], **others: Any) -> Report:
        """Return the report of some findings without sections, such as of two studies."""
        plan, rows = findings.plan, findings.arms
        return cls(
            plan.study,
            plan.question,
            plan.analysis,
            plan.units,
            phrasing.overview(rows),
            phrasing.answers(rows, plan.analysis, plan.units),
            rows,
            notes=notes,
            **{"sections": {name: [] for name, part in sections().items() if part.row}, **others},
        )

    @property
    def title(self) -> str:
        """The question, or without one the name of the study."""
        return self.question or self.study

    @property
    def provenance(self) -> list[tuple[str, str]]:
        """How the numbers were made, as pairs of heading and text."""
        return [] if self.made is None else self.made.lines()

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        names = ("state", "study", "question", "units", "overview", "answers", "arms", "skipped", "notes", "trials")
        parts = sections()
        return {
            "vitlab": __version__,
            **{name: getattr(self, name) for name in names},
            "analysis": self.analysis.model_dump(mode="json"),
            **{name: parts[name].to_json(rows) for name, rows in self.sections.items()},
            "made": None if self.made is None else asdict(self.made),
        }

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> Report:
        """Return the report of JSON values.

        Raises:
            LookupError, TypeError, ValueError, AttributeError: if it has another form.
        """
        names = ("study", "question", "units", "overview", "answers", "arms", "notes")
        return cls(
            **{name: doc[name] for name in names},
            analysis=Analysis.model_validate(doc["analysis"]),
            sections={name: part.from_json(doc[name]) for name, part in sections().items() if part.row},
            skipped=doc.get("skipped", ()),
            made=None if doc["made"] is None else Provenance(**doc["made"]),
            trials=doc.get("trials", ()),
            state=doc.get("state", ""),
        )


def document(findings: Findings, at: str) -> Report:
    """Return the report of a study; ``at`` is its :func:`state` from before anything was read."""
    # Imported here, because a stored report is read without pandas.
    from vitlab.report.notes import notes

    plan, store, results = findings.plan, findings.store, findings.results
    assert store is not None
    needed = prerequisites(plan, store)
    rows = {name: part.rows(findings) for name, part in sections().items() if part.row}
    lines = [*of_version(plan, store), *notes(results, needed, findings.arms)]
    for name, part in sections().items():
        lines += part.notes(rows.get(name, ()), findings)
    return Report.of(
        findings,
        lines,
        sections=rows,
        skipped=[{"arm": arm.name, "because": arm.skip} for arm in plan.arms if arm.skip],
        made=provenance(plan, store, [*needed, *rivals(plan, store), *results.trials]),
        trials=plain(results.frame),
        state=at,
    )


def state(plan: Plan, store: Store) -> str:
    """Return a digest of what a report is made of: equal states have equal reports.

    It covers the plan, its ended trials, what sections read besides, and the code that makes reports.  It is taken
    before trials are read: a trial that ends in between makes the report outdated.
    """
    endings = []
    tuned = (planned.trial for tuning in plan.tuning for planned in tuning.trials)
    for trial in (*(planned.trial for planned in plan.trials), *plan.prerequisites, *tuned):
        folder = store.trial(trial.key, trial.code)
        files = [(folder.path / name) for name in ("result.json", "failure.json")]
        endings.append([path.stat().st_mtime_ns if path.exists() else 0 for path in files] + [folder.is_locked()])
    study = store.study(plan.study)
    latest, own = versions.version(study), versions.version(study, plan.version)
    ran = own.time if own is not None else 0.0  # tells which trials the last run has trained
    inputs = [[name, str(section.find(name)[1]), part.inputs(plan, store)] for name, part in sections().items()]
    content = [__version__, _code(), plan.to_json(), endings, inputs, latest.name if latest is not None else "", ran]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


@cache
def _code() -> str:
    """Return a digest of the files whose code makes reports."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for file in sorted(file for room in ROOMS for file in (root / room).rglob("*") if file.suffix in (".py", ".j2")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


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
