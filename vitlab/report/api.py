"""Public functions that read studies: results, comparisons, predictions and trained models, and the answer of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from vitlab.errors import UserError, nearest
from vitlab.planning.packaged import SUFFIXES, find_or_write_study_file, stored_study_name
from vitlab.planning.study_folder import (
    EARLIER,
    find_version,
    format_differences,
    read_plan,
    read_study_content,
    read_versions,
    version_folder,
    version_name,
)
from vitlab.planning.values import Plan
from vitlab.registry import list_entries
from vitlab.registry.options import check_arguments
from vitlab.report import frame
from vitlab.report.report import collect_report
from vitlab.spec import read_document
from vitlab.store.files import read_stored
from vitlab.store.folders import OUT, Store, TrialFolder
from vitlab.store.result import Ending

if TYPE_CHECKING:
    import pandas as pd

    from vitlab.models import Model
    from vitlab.report.notebook import Comparison
    from vitlab.training.artifacts import Transform

PREDICTIONS = frame.parse_column_descriptions("""
arm | string | the arm
seed | int64 | the replicate
split | string | val or test
id | int64 | index of the image in the official split
label | int64 | its class; not of dense labels
prediction | int64 | the most probable class; not of dense labels
probability | float32 | probability of that class; not of dense labels
pixel_accuracy | float32 | share of correct pixels; of dense labels only
loss | float32 | the loss of this image
label_name | string | name of its class, where the data has names
prediction_name | string | name of the most probable class, where the data has names
""")
"""Columns of :func:`predictions`, with their types and meanings."""


@dataclass(frozen=True, repr=False)
class Answer:
    """The result of :func:`vitlab.run`: counts of trainings, the answers, and the frames behind them.

    Each training counts once, including those that tune options.
    """

    plan: Plan
    store: Store
    trained: int  #: since this run began
    cached: int  #: trained by earlier runs
    failed: int  #: without a result after this run; a diverged one has a result
    tracker: str  #: display name of the tracker; empty if the study has none
    link: str | None  #: address of the study in the tracker, empty if it has none; None if it could not be reached
    start_command: str = ""  #: command that serves the address; empty if it is served already

    @property
    def folder(self) -> Path:
        """Return the folder of this version of the study, which contains its report; a newer run moves it."""
        return version_folder(self.store.study(self.plan.study), self.plan.version)

    @property
    def report(self) -> Path:
        """Return the path of the HTML report."""
        return self.folder / "report" / "report.html"

    @property
    def answers(self) -> list[str]:
        """Return one sentence per comparison, after those on the factors of a grid."""
        return self.compare().answers

    def results(self) -> pd.DataFrame:
        """Return one row per trial, see :func:`vitlab.results`."""
        return _results(self.plan, self.store)

    def compare(self) -> Comparison:
        """Return one row per arm, see :func:`vitlab.compare`."""
        from vitlab.report.notebook import Comparison

        return Comparison.of(collect_report(self.plan, self.store))

    def history(self) -> pd.DataFrame:
        """Return the curves, see :func:`vitlab.history`."""
        return _history(self.plan, self.store)

    def __repr__(self) -> str:
        return f"<Answer {self.plan.study}: {self.counts}; {self.report}>"

    def __str__(self) -> str:
        report = self.compare().report
        return "\n".join([report.title, *report.answers_and_warnings, f"{self.counts}. {self.report}"])

    def _repr_html_(self) -> str:
        """Return the question, the answers, warnings, the counts and a link to the report; every text is escaped."""
        report = self.compare().report
        answers = "".join(f"<li>{escape(line)}</li>" for line in report.answers_and_warnings)
        here = Path.cwd()
        # A notebook serves only the files below its folder.
        link = self.report.relative_to(here).as_posix() if self.report.is_relative_to(here) else self.report.as_uri()
        anchor = f'<a href="{escape(quote(link, safe="/:%"))}" target="_blank">{escape(self.report.name)}</a>'
        return (
            f"<div><b>{escape(report.title)}</b><ul>{answers}</ul><p>{escape(self.counts)}. Report: {anchor}</p></div>"
        )

    @property
    def counts(self) -> str:
        """Counts of trials: trained by this run, cached from earlier ones, diverged in the whole study, and failed."""
        states = [self.store.folder(item.trial).state() for item in self.plan.trials]
        lost = {"diverged": states.count(Ending.DIVERGED), "failed": self.failed}
        counts = "".join(f", {count} {name}" for name, count in lost.items() if count)
        return f"{self.trained} trained, {self.cached} cached from earlier runs{counts}"


def open_study(
    path: str | Path | Mapping[str, Any], *, out: str | Path = OUT, changes: Mapping[str, Any] = {}
) -> tuple[Plan, Store]:
    """Return the plan of a study that has been run, and the store of its trials.

    Args:
        path: a study file or a mapping, as for :func:`vitlab.run`, stands for the version of the study that it is; a
            name or a folder for the latest version, and ``NAME@VERSION`` for an earlier one.
        out: the output folder.
        changes: applied to a study file, as for :func:`vitlab.run`.

    Raises:
        UserError: if it has not been run in ``out``, or its plan cannot be read.
    """
    if isinstance(path, Mapping):
        with TemporaryDirectory() as temporary:  # reading a study writes nothing into its output folder
            study_file = find_or_write_study_file(path, temporary)
            return open_study(study_file, out=out, changes=changes)
    path = Path(path)
    if (path / "plan.json").is_file():  # another folder may have the name of a study
        folder = path.resolve()
        study = folder.parent.parent if folder.parent.name == EARLIER else folder
    else:
        file = path if path.is_file() or path.suffix in SUFFIXES else None
        name, _, version = (str(path), "", "") if file is not None else str(path).partition("@")
        path = stored_study_name(name)
        study = folder = Store(Path(out).resolve()).study(path)
        if file is not None:
            folder = _version_folder_of_file(file, changes, study)
        elif version:
            folder = find_version(study, version).folder
    plan = read_plan(folder / "plan.json")
    if plan is None:
        names = sorted(item.parent.name for item in Path(out).glob("studies/*/plan.json"))
        studies = f" Studies there: {', '.join(names)}.{nearest(study.name, names)}" if names else ""
        raise UserError(f"study '{path}' has not been run in {out}; 'vitlab run' runs it.{studies}")
    if folder != study:
        plan = replace(plan, version=folder.name)
    return plan, Store(study.parent.parent)


@check_arguments()
def results(path: str | Path | Mapping[str, Any], *, out: str | Path = OUT) -> pd.DataFrame:
    """Return the results of a study as a frame, one row per trial, whatever its status.

    Columns: ``arm, seed, status, study, baseline, trial, code, failure_kind, failure``, one per varied path, ``origins,
    engine, threads, device, ended, params, macs, steps, images, wall_s``, and ``train/...``, ``test/...`` and
    ``val/...``, the metric of the analysis last.  Printed or in a notebook, the frame and rows selected of it show a
    few of them and name all.  The page of the Python API has the type and meaning of each column of every frame.

    Raises:
        UserError: if the study has not been run in ``out``.
    """
    return _results(*open_study(path, out=out))


@check_arguments()
def compare(
    first: str | Path | Mapping[str, Any],
    second: str | Path | Mapping[str, Any] | None = None,
    *,
    out: str | Path = OUT,
) -> Comparison:
    """Return the comparison of a study's arms, or of two studies, as a frame with one row per arm.

    With two studies, every arm of ``second`` is compared with the arm of the same name in ``first``.  The last two
    columns are mean and standard deviation of the test metric of the same name.  Printed or in a notebook, the
    frame shows the answers first, and rows selected of it a few numbers; ``.answers`` holds the answers as text,
    ``.notes`` the caveats, ``.tables`` the numbers of other sections as frames, such as ``tables["main_effects"]``, and
    ``.figures`` the figures of the report, such as ``figures["arms"]``.  Copies and selections keep all of these.

    Raises:
        UserError: if a study has not been run in ``out``, or the two have no metric or no arm in common.
    """
    from vitlab.report.notebook import Comparison
    from vitlab.report.two_studies import compare_studies

    study = open_study(first, out=out)
    return Comparison.of(
        collect_report(*study) if second is None else compare_studies(study, open_study(second, out=out))
    )


@check_arguments()
def history(path: str | Path | Mapping[str, Any], *, out: str | Path = OUT) -> pd.DataFrame:
    """Return the curves of a study as a frame in long form: one row per trial, step and metric.

    Columns: ``arm, seed, step, trial, time, epoch, metric, value``.
    Trials that are still training have the measurements made so far.  The mean validation accuracy of every arm::

        curves = vitlab.history("ablation.yaml").query("metric == 'val/accuracy'")
        curves.groupby(["arm", "step"])["value"].mean().unstack("arm").plot()

    Raises:
        UserError: if the study has not been run in ``out``.
    """
    return _history(*open_study(path, out=out))


@check_arguments()
def predictions(path: str | Path | Mapping[str, Any], *, out: str | Path = OUT) -> pd.DataFrame:
    """Return the predictions of every finished trial of a study, one row per trial, split and image.

    Classes have their names beside their numbers, where the data has names.  Printed or in a notebook, the frame shows
    a few of its columns and names all.

    Raises:
        UserError: if the study has not been run in ``out``.
    """
    import pandas as pd

    from vitlab.report.notebook import NamedFrame

    plan, store = open_study(path, out=out)
    tables = [
        stored.assign(arm=planned.arm, seed=planned.seed)
        for planned in plan.trials
        if (stored := read_stored(store.folder(planned.trial).predictions, pd.read_parquet)) is not None
    ]
    if not tables:
        return pd.DataFrame(columns=[*PREDICTIONS])
    table = pd.concat(tables, ignore_index=True)
    kinds = {name: kind for name, (kind, _) in PREDICTIONS.items() if name in table}
    table = table[[*kinds, *table.columns.drop([*kinds])]]  # a value per image of a plugin's metric is last
    table = table.astype({name: kind for name, kind in kinds.items() if kind == "string"})
    shown = ["arm", "seed", "split", "id", "label", "prediction", "pixel_accuracy", "loss"]
    return NamedFrame.from_table(table, f"predictions of {plan.study}", shown)


@check_arguments()
def load(
    path: str | Path | Mapping[str, Any], *, arm: str | None = None, seed: int | None = None, out: str | Path = OUT
) -> tuple[Model, Transform]:
    """Return a trained model and the transform of its input images: ``model, transform = vitlab.load(...)``.

    Args:
        path: of a study, or a folder that MLflow gave back for a model stored there.
        arm: of the study, by default its baseline.
        seed: of the study, by default the first.
        out: the output folder, where ``path`` is a study's file.

    Raises:
        UserError: if there is no such trial, or it kept no weights.
    """
    from vitlab.runner.models import load_model

    if not isinstance(path, Mapping):
        folder = TrialFolder(Path(path))
        if folder.weights_file.is_file() and folder.spec.is_file():
            return load_model(folder)
    plan, store = open_study(path, out=out)
    return load_model(store.folder(plan.find(arm, seed).trial))


@check_arguments()
def list_components(slot: str | None = None) -> pd.DataFrame:
    """Return the components of a slot such as ``position``, or of all slots, as a frame with one row per component.

    Columns: ``slot``, ``name``, ``origin`` (source and version), ``target`` (``module:Class``) and ``summary``, the
    first line of the documentation, which installed plugins lack, because nothing is imported.  The frame also has what
    plugin files and notebooks have registered in this process.

    Raises:
        UserError: if no slot has that name; the message gives the nearest name and all slots.
    """
    import pandas as pd

    from vitlab.report.notebook import NamedFrame

    table = pd.DataFrame(map(vars, list_entries(slot))).astype("string")
    return NamedFrame.from_table(table, "components", ["slot", "name", "summary"])


def _results(plan: Plan, store: Store) -> pd.DataFrame:
    from vitlab.report.notebook import NamedFrame

    test = f"test/{plan.analysis.metric.partition('/')[2]}"
    shown = ["arm", "seed", "status", frame.metric_column(plan.analysis), test, "wall_s"]
    return NamedFrame.from_table(frame.results(plan, store), f"results of {plan.study}", shown)


def _history(plan: Plan, store: Store) -> pd.DataFrame:
    from vitlab.report.notebook import NamedFrame

    shown = ["arm", "seed", "step", "metric", "value"]
    return NamedFrame.from_table(frame.history(plan, store), f"curves of {plan.study}", shown)


def _version_folder_of_file(file: Path, changes: Mapping[str, Any], study: Path) -> Path:
    """Return the folder of the version that a file is, with changes applied; a version that was not run is an error."""
    stored = read_versions(study)
    if all(version.content is None for version in stored):  # the version of the results is not recorded
        return study
    requested = read_study_content(file, changes)
    for version in stored:
        if version.name == version_name(requested):
            return version.folder
    name, options = study.name, f" with {stored[0].set_options_text}" if stored[0].set_options_text else ""
    latest, is_mapping = stored[0].content, read_document(file).is_mapping
    place, run = ("", "vitlab.run runs it") if is_mapping else (f"{file}: ", f"'vitlab run {file}' runs the file")
    difference = "" if latest is None else f": {format_differences(latest, requested)}"
    raise UserError(
        f"{place}this version of study '{name}' has not been run. Changed since the latest run, {name}@"
        f"{stored[0].name[:8]} ({stored[0].when}{options}){difference}. {run}; the name '{name}' in place of it stands "
        "for the latest run, 'vitlab studies' lists all versions."
    )
