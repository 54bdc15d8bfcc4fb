"""Deliveries per arm: a run with mean, standard deviation and interval over seeds, and a trained model.

The summaries have their own experiment, because MLflow would average them with the trials.  They are of the study's
metric, and read from ``report.json``; means of all other metrics are on the page of the trials, grouped by arm.

The models, enabled by ``models: arms`` in ``run.tracker``, are MLflow's logged models.  A model consists of the trial's
spec and its weights as safetensors, which suffice to predict and hold no code.  ``vitlab.load`` reads the folder that
MLflow returns.  MLflow's PyTorch flavour is not used: it stores either a pickle, which executes code when loaded, or a
traced program of one input shape.
"""

from __future__ import annotations

import math
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vitlab.planning.values import Plan
from vitlab.report import phrasing
from vitlab.report.phrasing import Row, Scale
from vitlab.report.sections.arms import format_verdict
from vitlab.spec import Analysis
from vitlab.store.folders import OPEN, TrialFolder
from vitlab.store.result import Ending
from vitlab.trackers import dashboard, files_within, records, service
from vitlab.trackers.replay import TrackedTrial
from vitlab.trackers.trials import FINISHED, SUPERSEDED

if TYPE_CHECKING:
    from mlflow import MlflowClient

COLUMNS = ("difference", "difference low", "difference high", "mean", "low", "high", "p adjusted")
"""Columns of the report's summary that the page's table has: what answers the question comes first."""
POINTS = (*COLUMNS, "sd", "n", "p", "planned", "diverged", "failed")
"""Columns of the report's summary that MLflow has as metrics."""

NOT_RUN, BASELINE = "no result yet", "baseline"
"""In the place of a verdict, of an arm of which no trial has ended, and of the one that others are compared with."""


class Summary(NamedTuple):
    """What the report says of an arm."""

    tags: Mapping[str, str]  #: with the verdict, which the table shows beside the name, and the run's description
    params: Mapping[str, str]
    points: Mapping[str, float]  #: in the report's units and digits; the page cuts numbers and does not round them


def summarize_arms(plan: Plan, rows: Sequence[Row], root: str) -> dict[str, Summary]:
    """Return the verdicts and the values over the seeds, by arm in the order of the design.

    Args:
        plan: the study.
        rows: arms of ``report.json``.
        root: identifies this output folder among those that deliver to the same server.
    """
    summaries = dict[str, Summary]()
    by_arm = {row["arm"]: row for row in rows}
    baselines = {row["baseline"] for row in rows}
    scale = Scale.of_plan(plan)
    of_arms, _ = phrasing.table_and_sentence_decimals(rows, scale)
    decimals = dict.fromkeys(COLUMNS[:6], of_arms) | {"sd": of_arms + 1}
    answers = phrasing.answer_per_arm(rows, plan.analysis, scale)
    compared = {answer.row["arm"]: answer.sentence for answer in answers if answer.row}
    for arm in (arm for arm in plan.arms if arm.name in by_arm):
        row = dict(by_arm[arm.name])
        row["p_adjusted"] = row["p_corrected"]
        role = BASELINE if arm.name in baselines else records.ABSENT
        verdict = format_verdict(row) or role if _ended_rows([row]) else NOT_RUN
        points: dict[str, float] = {}
        for name in POINTS:
            value = row[name.replace(" ", "_")]
            if value is not None and math.isfinite(float(value)):
                text = scale.end(value, decimals[name]) if name in decimals else f"{value:.4g}"
                points[name] = float(text.replace(phrasing.MINUS, "-"))
        sentence = compared.get(arm.name) or phrasing.describe_arm_result(row, plan.analysis, scale, of_arms)
        tags = {
            "arm": arm.name,
            "verdict": verdict,
            "metric": scale.title,
            dashboard.NOTE: dashboard.escape_markdown(sentence),
            "vitlab.kind": "arm",
            "vitlab.study": plan.study,
            "vitlab.root": root,
            **records.display_tags(plan.arms, arm.name),
        }
        summaries[arm.name] = Summary(tags, {"arm": arm.name, **records.flatten_spec(arm.values)}, points)
    return summaries


def _ended_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of arms of which a trial has ended."""
    return [row for row in rows if sum(row[status] for status in OPEN) != row["planned"]]


def format_answer_in_one_line(report: Mapping[str, Any]) -> str:
    """Return in a line what ``report.json`` says: the arms of each verdict, or sentences if there is none.

    Arms of which no trial has ended are counted, and have no verdict.
    """
    rows = report["arms"]
    ended = _ended_rows(rows)
    if not ended:
        return f"0 of {len(rows)} arms run so far; 0 of {sum(row['planned'] for row in rows)} trials finished"
    arms: dict[str, list[str]] = {}
    for row in ended:
        if verdict := format_verdict(row):
            arms.setdefault(verdict + " so far" * bool(row["awaited"]), []).append(row["arm"])
    order = sorted(arms, key=lambda verdict: verdict.startswith("cannot tell"))  # last, because the page cuts the line
    verdicts = " \N{MIDDLE DOT} ".join(f"{verdict}: {'; '.join(arms[verdict])}" for verdict in order)
    # The overview counts arms that have begun.
    overview = report.get("overview") if ended == phrasing.started_rows(rows) else ""
    answer = str(overview or verdicts or " ".join(report["answers"]))
    return answer if len(ended) == len(rows) else f"{len(ended)} of {len(rows)} arms run so far: {answer}"


def deliver_summaries(
    client: MlflowClient, experiment: str, root: str, headline: str, arms: Mapping[str, Summary]
) -> int:
    """Bring the experiment of summaries up to date, and return the number of runs written.

    An outdated run is replaced, because MLflow would keep old values beside new ones; it is deleted last, so that a
    server that fails meanwhile keeps it.

    Args:
        client: MLflow's client.
        experiment: id of the experiment.
        root: identifies this output folder among those that deliver to the same server.
        headline: the study's metric, with its unit.
        arms: see :func:`summarize_arms`.
    """
    from mlflow.entities import Metric, Param

    missing, outdated, others = dict(arms), list[str](), list[str]()
    for run in service.iterate_runs(client, experiment):
        tags, arm = run.data.tags, missing.get(run.info.run_name)
        is_equal = arm and arm.points == run.data.metrics and arm.tags.items() <= tags.items()
        if is_equal and run.info.status == FINISHED:
            del missing[run.info.run_name]
        elif tags.get("vitlab.root") == root:
            outdated.append(run.info.run_id)
        else:
            others = [dashboard.ROOT]  # by which the arms of another folder are told apart
    view = dashboard.View(
        f"Arms: {headline}",
        "arm",
        [dashboard.Section(headline, POINTS)],
        columns=["tags.`verdict`", *(f"metrics.`{name}`" for name in COLUMNS), *others],
    )
    dashboard.save_views(client, experiment, {dashboard.SUMMARY: view})
    for name, arm in reversed(list(missing.items())):  # the newest run is the first one of a page without a view
        run_id = client.create_run(experiment, tags=dict(arm.tags), run_name=name).info.run_id
        now = time.time_ns() // 10**6
        points = [Metric(name, value, now, 0) for name, value in arm.points.items()]
        client.log_batch(run_id, points, [Param(key, text) for key, text in arm.params.items()])
        client.set_terminated(run_id, FINISHED)
    for run_id in outdated:
        client.delete_run(run_id)
    return len(missing)


# -- models ------------------------------------------------------------------------------------------------------------

READY = "READY"
KIND, MODEL = "vitlab.kind", "model"
NAME = re.compile(r"[/:.%\"']")  #: characters that MLflow allows in no model name
README = """# {name}

Where MLFLOW_TRACKING_URI names this server:

```python
import mlflow, vitlab

folder = mlflow.artifacts.download_artifacts("models:/{model}")
model, transform = vitlab.load(folder)
logits = model(transform(images)).logits
```
"""


def one_trial_per_arm(trials: Iterable[TrackedTrial], seed: int | None) -> list[TrackedTrial]:
    """Return each arm's trial with the given seed; by default its first trial."""
    selected: dict[str, TrackedTrial] = {}
    for item in trials:
        if item.kind == "trial" and seed in (None, item.planned.seed):
            selected.setdefault(item.planned.arm, item)
    return list(selected.values())


def deliver_models(
    client: MlflowClient,
    experiment: str,
    root: str,
    selected: Sequence[tuple[TrackedTrial, TrialFolder, str]],
    analysis: Analysis,
) -> dict[str, str]:
    """Store the trained models that MLflow does not have yet.  May raise MLflow's exceptions.

    Args:
        client: MLflow's client.
        experiment: id of the experiment.
        root: identifies this output folder among those that deliver to the same server.
        selected: trials, their folders and the ids of their runs.
        analysis: the analysis settings, which determine a trial's final values.

    Returns:
        The model id of each arm.
    """
    from mlflow.entities import Metric

    every = service.iterate_pages(lambda token: client.search_logged_models([experiment], page_token=token))
    by_id = {model.model_id: model for model in every}  # pages move while other clients write
    stored = [model for model in by_id.values() if model.tags.get("vitlab.root") == root]
    model_ids: dict[str, str] = {}
    for item, folder, run in selected:
        result = folder.result()
        files = files_within(folder.path.parents[2], [folder.spec, folder.weights_file])
        if result is None or result.status != Ending.DONE or not folder.has_weights() or len(files) < 2:
            continue
        arm, trial = item.planned.arm, item.planned.trial
        tags = {"arm": arm, "seed": str(item.planned.seed), "vitlab.root": root, "vitlab.trial": trial.key}
        tags |= {"vitlab.code": trial.code, "vitlab.weights": result.outcome.weights}
        model = None
        for old in (old for old in stored if old.tags.get("arm") == arm):
            equal = tags.items() <= old.tags.items()  # else of an earlier training of the trial, or of another seed
            kind = MODEL if equal else SUPERSEDED
            if equal and model is not None:  # left by a lost response
                client.delete_logged_model(old.model_id)
                continue
            model = old if equal else model
            if old.tags.get(KIND) != kind:
                client.set_logged_model_tags(old.model_id, {KIND: kind})
        if model is None:
            name = f"{NAME.sub('_', arm)[:200]} s{item.planned.seed}"
            model = client.create_logged_model(
                experiment, name, run, {**tags, KIND: MODEL}, dict(item.params), model_type="vitlab"
            )
        if str(model.status) != READY:
            _store_model(client, model.model_id, item, files, run, result.outcome.steps)
            points = records.final_points(result, analysis)
            values = [Metric(point.name, point.value, point.t, point.step, model_id=model.model_id) for point in points]
            client.log_batch(run, values)
            client.finalize_logged_model(model.model_id, READY)
        model_ids[arm] = model.model_id
    return model_ids


def _store_model(
    client: MlflowClient, model: str, item: TrackedTrial, files: Sequence[Path], run: str, steps: int
) -> None:
    """Store the files of a model, and link the run to it."""
    from mlflow.entities import LoggedModelOutput

    with tempfile.TemporaryDirectory() as place:
        for file in files:
            shutil.copy(file, place)
        (Path(place) / "README.md").write_text(README.format(name=item.name, model=model), encoding="utf-8")
        client.log_model_artifacts(model, place)
    outputs = client.get_run(run).outputs
    if model not in {output.model_id for output in (outputs.model_outputs if outputs else ())}:
        client.log_outputs(run, [LoggedModelOutput(model, steps)])
