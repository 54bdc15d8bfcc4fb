"""The content of a report.  Every format is a rendering of it.

It is stored as ``report.json``, from which the text formats are rendered without pandas.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitlab._version import __version__
from vitlab.errors import UserError, nearest
from vitlab.planning import study_folder
from vitlab.planning.values import Plan
from vitlab.report import phrasing
from vitlab.report.comparison import summary_rows, summary_rows_to_frame
from vitlab.report.drawing import Drawing, render_pdf, render_png
from vitlab.report.formats import FORMATS, Format, frame_to_csv, render_markdown
from vitlab.report.frame import StudyResults, frame_to_json_records, gather_trials
from vitlab.report.notes import notes as notes_of
from vitlab.report.phrasing import Answer, Row, Scale
from vitlab.report.provenance import Provenance, collect_provenance, describe_version
from vitlab.report.sections import Findings, Table, all_sections, section
from vitlab.report.sections.blocks import block_answers
from vitlab.report.sections.main_effects import factor_answers
from vitlab.spec import Analysis
from vitlab.store.files import read_json, write_bytes
from vitlab.store.folders import Store

if TYPE_CHECKING:
    import pandas as pd

STORED = "a stored report has no figures and no results; collect_report makes the report anew"
PACKAGES = ("report", "comparison", "statistics")  #: packages whose code makes a report


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
    made: Provenance | None = None  #: None for what belongs to no single study
    trials: Sequence[Row] = ()
    state: str = ""  #: see :func:`state_digest`
    findings: Findings | None = None  #: what it is made from; None for a report that was stored

    @classmethod
    def from_findings(cls, findings: Findings, notes: Sequence[str]) -> Report:
        """Return the report of some findings; the sections add their rows and notes."""
        plan, arms, parts = findings.plan, findings.arms, all_sections()
        # From a table of other programs, not every section can be made.
        possible = {name: part for name, part in parts.items() if part.of_table or findings.store is not None}
        rows = {name: list(part.rows(findings)) if name in possible else [] for name, part in parts.items() if part.row}
        # to_json writes the rows beside the fields of the report, so a section must not have the name of one.
        for name in sorted(rows.keys() & {"vitlab", *(field.name for field in fields(cls))}):
            raise UserError(f"section '{name}': every report stores its own {name} under this name; rename the section")
        more = [part.notes(rows.get(name, ()), findings) for name, part in possible.items()]
        # A control that is told apart is a false alarm, which a note says, and no finding.
        counted = [row for row in phrasing.started_rows(arms) if not plan.arm(row["arm"]).is_control]
        report = cls(
            plan.study,
            plan.question,
            plan.analysis,
            plan.units,
            phrasing.count_verdicts(counted, "In single blocks, of" if rows["blocks"] else "Of"),
            [],
            arms,
            rows,
            [*notes, *itertools.chain(*more)],
            findings=findings,
        )
        return replace(report, answers=[answer.sentence for answer in report.all_answers])

    @property
    def title(self) -> str:
        """The question, or without one the name of the study."""
        return self.question or self.study

    @property
    def all_answers(self) -> list[Answer]:
        """The answers with their verdicts: on the factors of a grid, then over blocks or of arms."""
        blocks = block_answers(self)
        answers = [*factor_answers(self), *blocks]
        if answers and (warning := phrasing.warn_of_poor_trainings(self.arms)):
            answers.insert(0, Answer(warning))
        if not blocks:
            answers += phrasing.answer_per_arm(self.arms, self.analysis, self.scale)
        return [*answers, *map(Answer, self.answers[len(answers) :])]  # what a comparison of commits has added

    @property
    def main_answers(self) -> list[str]:
        """The answers, with one sentence in place of several that cannot tell."""
        others, folded = phrasing.merge_unclear_answers(self)
        return [answer.sentence for answer in (*others, *folded)]

    @property
    def answers_and_warnings(self) -> list[str]:
        """The main answers, and the notes that warn."""
        return [*self.main_answers, *(note for note in self.notes if note.startswith("Warning: "))]

    @property
    def provenance_lines(self) -> list[tuple[str, str]]:
        """How the numbers were made, as pairs of heading and text."""
        return [] if self.made is None else self.made.lines()

    @property
    def scale(self) -> Scale:
        """The display scale of the metric by which arms are judged."""
        return Scale.of(self.analysis.metric, self.units)

    def table(self, name: str) -> Table | None:
        """Return the table of a section; None if it has none, or found nothing."""
        part, rows = all_sections()[name], self.sections.get(name, ())
        table = part.table(rows, self) if rows or not part.row else None
        warning = phrasing.warn_of_poor_trainings(self.arms)
        if table is None or not part.of_seeds or not warning:
            return table
        return replace(table, caption=f"{table.caption} {warning}", caveat=f"{table.caveat} {warning}".strip())

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        stored = [field.name for field in fields(self) if field.name not in ("sections", "findings")]
        values = {"vitlab": __version__, **{name: getattr(self, name) for name in stored}}
        values |= {"analysis": self.analysis.model_dump(mode="json"), "made": self.made and asdict(self.made)}
        return values | {name: [asdict(row) for row in rows] for name, rows in self.sections.items()}

    @classmethod
    def from_json(cls, doc: Any) -> Report:
        """Return the report of JSON values; other forms raise LookupError, TypeError, ValueError or AttributeError."""
        values = {field.name: doc[field.name] for field in fields(cls) if field.name in doc}
        values["analysis"] = Analysis.model_validate(doc["analysis"])
        values["sections"] = {
            name: [part.row(**row) for row in doc.get(name, ())] for name, part in all_sections().items() if part.row
        }
        values["made"] = doc["made"] and Provenance(**doc["made"])
        return cls(**values)

    @cached_property
    def figures(self) -> dict[str, Drawing]:
        """The figure of each section that has one."""
        assert self.findings is not None, STORED
        parts, rows = all_sections(), self.sections
        drawings = {
            name: part.figure(rows.get(name, ()), self.findings)
            for name, part in parts.items()
            if rows.get(name) or not part.row
        }
        return {name: drawing for name, drawing in drawings.items() if drawing is not None}

    @property
    def results_frame(self) -> pd.DataFrame:
        """The results, one row per trial; of what belongs to no single study, one row per arm."""
        if self.made is None:
            return summary_rows_to_frame(self.arms, self.analysis)
        assert self.findings is not None, STORED
        return self.findings.results.frame

    def render(self, format: str) -> str | bytes:
        """Return the report in one format, see :func:`render`."""
        return _find_format(format).render(self)


def render(plan: Plan, store: Store, format: str) -> str | bytes:
    """Return the report of a study in one of ``FORMATS``, the stored one if it is current; bytes for parquet."""
    stored = read_report_if_current(plan, store, format)
    return collect_report(plan, store).render(format) if stored is None else stored


def collect_report(plan: Plan, store: Store) -> Report:
    """Return the report of a study."""
    state = state_digest(plan, store)  # before results are read: a trial that ends in between makes the report outdated
    results = StudyResults.read(plan, store)
    findings = Findings(results, summary_rows(results), store)
    prerequisites = gather_trials(plan, store, plan.labelled_prerequisites)
    notes = [*describe_version(plan, store), *notes_of(results, prerequisites, findings.arms)]
    stored_trials = [*prerequisites, *gather_trials(plan, store, plan.rival_trials), *reversed(results.trials)]
    report = Report.from_findings(findings, notes)
    provenance = collect_provenance(plan, store, stored_trials)
    return replace(report, made=provenance, trials=frame_to_json_records(results.frame), state=state)


def read_report_if_current(plan: Plan, store: Store, format: str) -> str | bytes | None:
    """Return the report that :func:`write` stored, without pandas; None if it is missing or outdated."""
    folder, form = _report_folder(plan, store), _find_format(format)
    try:
        doc = read_json(folder / FORMATS["json"].file)
        if doc["state"] != state_digest(plan, store):
            return None
        if not form.of_results:  # report.md refers to pictures that lie beside that file only
            return form.render(Report.from_json(doc))
        data = (folder / form.file).read_bytes()
        return data if format == "parquet" else data.decode()
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # a damaged file is rendered anew
        return None


def is_current(plan: Plan, store: Store) -> bool:
    """Return True if the stored report is up to date in every format, without pandas."""
    folder = _report_folder(plan, store)
    present = all((folder / form.file).is_file() for form in FORMATS.values() if form.file)
    return present and read_report_if_current(plan, store, "json") is not None


def import_libraries() -> None:
    """Import what a report needs beyond this module, which takes seconds; for a thread of its own."""
    import pandas  # noqa: F401
    import scipy.special  # noqa: F401


def write(report: Report, folder: Path) -> list[Path]:
    """Write a report into ``folder``: documents, tables and pictures.  Returns the files written.

    They are the files of ``FORMATS``, ``summary.csv`` (one row per arm), ``history.parquet``, and the figures.
    """
    assert report.findings is not None
    drawings = report.figures
    files: dict[str, str | bytes] = {f"{name}.svg": drawing.svg for name, drawing in drawings.items()}
    for name, drawing in drawings.items():
        drawing.figure.set_layout_engine("none")  # it keeps the layout of the SVG, and takes half the time
        files |= {f"{name}.png": render_png(drawing.figure), f"{name}.pdf": render_pdf(drawing.figure)}
    files["summary.csv"] = frame_to_csv(summary_rows_to_frame(report.arms, report.analysis))
    files["history.parquet"] = report.findings.history.to_parquet(index=False)
    # report.json is the last, because its state marks the other files as current.
    files |= {form.file: form.render(report) for form in FORMATS.values() if form.file}
    captions = {name: drawing.caption for name, drawing in drawings.items()}
    files[FORMATS["md"].file] = render_markdown(report, captions)
    for name, data in files.items():
        write_bytes(folder / name, data if isinstance(data, bytes) else data.encode())
    return [folder / name for name in files]


def state_digest(plan: Plan, store: Store) -> str:
    """Return a digest of what a report is made of: equal states have equal reports.

    It covers the plan, its ended trials, what sections read besides, and the code that makes reports.
    """
    # Times of files, not their content: every command that shows a report computes this.
    endings = []
    for trial in plan.trials_with_keys:
        folder = store.folder(trial)
        files = [folder.path / name for name in ("result.json", "failure.json")]
        times = (path.stat().st_mtime_ns if path.exists() else 0 for path in files)
        endings.append([*times, folder.is_locked(), folder.checkpoint.exists()])
    inputs = [[name, str(section.find(name)[1]), part.inputs(plan, store)] for name, part in all_sections().items()]
    # A version is said to be the latest one, and when it was run.
    study = store.study(plan.study)
    latest, own = (study_folder.read_version(study, version) for version in ("", plan.version))
    earlier = sorted(file.parent.name for file in (study / study_folder.EARLIER).glob("*/plan.json"))
    runs = latest and latest.name, own and own.time, earlier
    content = [__version__, _report_code_digest(), plan.to_json(), endings, inputs, runs]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


@cache
def _report_code_digest() -> str:
    # Whole files, comments included, and without what they import: a report is made anew in seconds.
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    files = (file for package in PACKAGES for file in (root / package).rglob("*"))
    for file in sorted(file for file in files if file.suffix in (".py", ".j2")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _report_folder(plan: Plan, store: Store) -> Path:
    return study_folder.version_folder(store.study(plan.study), plan.version) / "report"


def _find_format(name: str) -> Format:
    if name not in FORMATS:
        raise UserError(f"no report format '{name}'.{nearest(name, FORMATS)} Formats: {', '.join(FORMATS)}.")
    return FORMATS[name]
