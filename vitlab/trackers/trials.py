"""Trials as runs of an MLflow experiment: found or created, filled from the journal, ended by the result.

A run belongs to one arm, trial, code and training (identified by its begin).  After a trial is retrained, its old run
no longer belongs to the study and is marked as superseded.  So is the run of the study itself in another version.

A trial's pictures are MLflow images: by key and step, side by side for the runs of a page.  The step of a confusion
matrix is the last training step.  The step of an explanation is the number of its test image: the page's slider moves
from image to image.  MLflow's ``log_image`` gives each file a random name, so a second delivery would show a picture
twice.  Here the name is derived from key and step.
"""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vitlab.errors import UserError
from vitlab.planning.values import Plan
from vitlab.report.phrasing import Scale
from vitlab.spec.design import format_value
from vitlab.spec.tree import parse_as
from vitlab.store.files import read_stored, write_bytes
from vitlab.store.result import Ending
from vitlab.trackers import files_within, records
from vitlab.trackers.dashboard import NOTE, ORDER, escape_markdown
from vitlab.trackers.records import Point
from vitlab.trackers.replay import Cursor, TrackedTrial, TrialUpdate, trial_identity

if TYPE_CHECKING:
    import pandas as pd
    from mlflow import MlflowClient
    from mlflow.entities import Run
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

FINISHED, FAILED, KILLED, RUNNING, SCHEDULED = "FINISHED", "FAILED", "KILLED", "RUNNING", "SCHEDULED"
STATUS = {Ending.DONE: FINISHED, Ending.STOPPED: KILLED}  #: of a trial that has ended; any other has FAILED
SUPERSEDED, GREY = "superseded", "#c4c4c4"  #: kind of runs that left the study, and their colour
RUN_NAME, PREFIX = "mlflow.runName", "old: "  #: tag with a run's name; begin of those names, of which pages show little
FILED = 200
"""Trials of a study that have files in MLflow: the first seeds of its arms."""


@dataclass
class RunMark:
    """Mark of a trial, see :class:`~vitlab.trackers.replay.Replay`: its run, and what has been delivered of it."""

    run: str  #: MLflow's id
    status: str  #: last status sent to MLflow
    has_result: bool = False  #: the final values are delivered
    step: int = -1  #: last step delivered
    points: int = 0  #: number of delivered points of the study's metric
    artifacts: int = 0  #: number of delivered files
    images: dict[str, int] = field(default_factory=dict)  #: delivered image keys and the first step of each

    @classmethod
    def parse(cls, mark: Cursor) -> RunMark | None:
        """Parse a mark; None if an incompatible version has written it."""
        try:
            return parse_as(RunMark, mark)
        except ValueError:
            return None


@dataclass
class TrialRuns:
    """Runs of one study's trials.  Every method may raise MLflow's exceptions."""

    client: MlflowClient
    experiment: str  #: id of the study's experiment
    plan: Plan
    root: str  #: identifies this output folder among those that deliver to the same server
    source: Mapping[str, str]  #: tags of the delivering user and commit
    delivered: Counter[str]  #: counts what is delivered
    metrics: set[str] = field(default_factory=set)  #: names of all metrics in the runs
    intact: set[str] = field(default_factory=set)  #: runs that hold what was delivered
    created: bool = False  #: True if a run was created since the last :meth:`reconcile_runs`
    studies: list[Run] = field(default_factory=list)  #: runs of the study itself, by version
    _filed: set[str] = field(default_factory=set)  #: identities of the trials that have files
    _runs: dict[str, list[Run]] = field(default_factory=dict)  #: runs of each trial, by identity
    _places: dict[str, str] = field(default_factory=dict)  #: addresses of the files of runs

    def reconcile_runs(self, runs: Iterable[Run], trials: Sequence[TrackedTrial], marks: Mapping[str, RunMark]) -> None:
        """Match the experiment's runs with the trials, and bring their tags and parameters up to date.

        Of several runs of one training, left by a lost response to ``create_run``, all but one are deleted.  Runs of
        this output folder that belong to no trial are marked as superseded, and those of other versions of the study.
        A run that lacks delivered data, as on a server restored from a backup, is not intact.
        """
        self.created = False
        self._filed = {item.identity for item in sorted(trials, key=lambda item: item.planned.seed)[:FILED]}
        self.intact.clear()
        self.studies.clear()
        items = {item.identity: item for item in trials}
        self._runs = {identity: [] for identity in items}
        for run in runs:
            tags, run_id = run.data.tags, run.info.run_id
            self._places[run_id] = run.info.artifact_uri
            if "vitlab.trial" not in tags:
                if tags.get("vitlab.version") != self.plan.version:
                    self._mark_as_superseded(run)
                elif tags.get("vitlab.root") == self.root:
                    self.studies.append(run)
                continue
            identity = trial_identity(tags["vitlab.trial"], tags.get("vitlab.code", ""), tags.get("vitlab.arm", ""))
            if identity not in items:
                self._mark_as_superseded(run)
                continue
            self.metrics.update(run.data.metrics)  # also of runs whose marks are lost, for the views
            mark, own = marks.get(identity), self._runs[identity]
            if mark is None or mark.run != run_id:
                own.append(_keep_tags_only(run))
                continue
            own.insert(0, _keep_tags_only(run))
            item = items[identity]
            content = _Content(tags=records.trial_tags(self.plan, item.planned, item.kind), params=dict(item.params))
            self._send_content(run_id, content.without_stored_tags_and_params(run))  # the plan may have changed since
            last = max((metric.step for metric in run.data.to_proto().metrics), default=-1)
            has_result = "vitlab.status" in tags and any(name.startswith("cost/") for name in run.data.metrics)
            if last >= mark.step and run.info.status == mark.status and has_result >= mark.has_result:
                self.intact.add(run_id)
        for own in self._runs.values():
            for index in reversed(range(len(own))):
                if _training_identity(own[index]) in map(_training_identity, own[:index]):
                    self.client.delete_run(own.pop(index).info.run_id)

    def verify_points_and_files(self, marks: Mapping[str, RunMark]) -> None:
        """Compare the study's metric and the number of files of every run with those delivered.

        A run that lacks some is not intact, nor a run without files whose trial has ended, and has files since an arm
        was removed.  Sends a request per run, and more for files; :meth:`reconcile_runs` sends none.
        """
        name = records.mlflow_name(self.plan.analysis.metric)
        for identity, mark in marks.items():
            if mark.run in self.intact:
                has_ended = mark.has_result or mark.status == FAILED
                lacks_all = has_ended and identity in self._filed and not mark.artifacts
                points = {(point.timestamp, point.step) for point in self.client.get_metric_history(mark.run, name)}
                files = count_files(self.client, mark.run, self._places[mark.run]) if mark.artifacts else 0
                if len(points) < mark.points or files < mark.artifacts or lacks_all:
                    self.intact.remove(mark.run)

    def ensure_study_run(self, status: str) -> Run:
        """Find or create the run of this version of the study, and bring it up to date."""
        tags = {"vitlab.kind": "study", "vitlab.study": self.plan.study, "vitlab.root": self.root}
        tags |= {"vitlab.version": self.plan.version, **records.display_tags((), ""), ORDER: "0"}
        for run in self.studies[1:]:  # left by a lost response
            self.client.delete_run(run.info.run_id)
        del self.studies[1:]
        if self.studies:
            [current] = self.studies
            lacking = _Content(tags=tags).without_stored_tags_and_params(current)
            self._send_content(current.info.run_id, lacking)
        else:
            name = f"study {self.plan.study}"
            current = self.client.create_run(self.experiment, tags={**tags, **self.source}, run_name=name)
            self.studies.append(current)
            self.delivered["runs"] += 1
        set_status = self.client.set_terminated if status in (FINISHED, FAILED) else self.client.update_run
        set_status(current.info.run_id, status)
        return current

    def write_trial(self, news: TrialUpdate, mark: RunMark | None) -> RunMark:
        """Update one run by the new events of its trial; without a mark, find or create the run and send what it lacks.

        A short trial needs three requests, for its run, values and status, and one for each of its files.
        """
        with tempfile.TemporaryDirectory() as place:
            content = self._collect_content(news, mark, Path(place))
            lacking = content
            if mark is None:
                training = (str(news.began), "") if news.began else ("", self.root)
                runs = [run for run in self._runs[news.item.identity] if _training_identity(run) == training]
                run = self.client.get_run(runs[0].info.run_id) if runs else None
                lacking = self._content_missing_in_run(run, content) if run is not None else replace(content, tags={})
                run = run or self._create_run(news, content.tags)
                mark = RunMark(run.info.run_id, run.info.status)
            now = replace(mark, images=mark.images | content.images, artifacts=max(mark.artifacts, content.files))
            self._send_content(now.run, lacking)
        headline = records.mlflow_name(self.plan.analysis.metric)
        now.points += sum(point.name == headline for point in content.points)
        now.step = max([now.step, *(point.step for point in content.points)])
        now.has_result |= any(point.name.startswith("cost/") for point in content.points)
        if news.end is not None:
            now.status = STATUS.get(news.end.how, FAILED)
            self.client.set_terminated(now.run, now.status, end_time=news.end.t or None)
        elif now.status != RUNNING and (not now.has_result or any(event.kind == "start" for event in news.events)):
            now.status = RUNNING
            self.client.update_run(now.run, status=RUNNING)
        self.intact.add(now.run)
        return now

    def _create_run(self, news: TrialUpdate, tags: Mapping[str, str]) -> Run:
        """Create the run of a training; runs of earlier trainings of the trial are superseded."""
        for earlier in self._runs[news.item.identity]:
            self._mark_as_superseded(earlier)
        run = self.client.create_run(
            self.experiment,
            start_time=news.began or None,
            tags={**tags, **self.source, "vitlab.began": str(news.began or ""), "vitlab.root": self.root},
            run_name=news.item.name,
        )
        self.created = True
        self.delivered["runs"] += 1
        self._places[run.info.run_id] = run.info.artifact_uri
        self._runs[news.item.identity].insert(0, run)
        return run

    def _collect_content(self, news: TrialUpdate, mark: RunMark | None, place: Path) -> _Content:
        """Return what an update adds to a run; files are written to ``place``."""
        end, result = news.end, news.end.result if news.end is not None else None
        content = _Content(place)
        if mark is None:
            content.tags = records.trial_tags(self.plan, news.item.planned, news.item.kind)
            content.params = dict(news.item.params)
        for event in news.events:
            if event.kind == "metrics":
                content.points += records.points(event)
            elif event.kind == "start":
                content.tags |= records.start_tags(event)
                if mark is None and "effective_batch_size" in event.body:  # parameters are immutable
                    content.params["train.effective_batch_size"] = str(event.body["effective_batch_size"])
        if end is not None or mark is None or not mark.has_result:
            content.tags[NOTE] = self._describe_trial(news)
        if result is not None:
            content.tags |= records.result_tags(result)
            if mark is None or not mark.has_result:  # else of a trial that was trained again, with equal values
                content.points += records.final_points(result, self.plan.analysis)
        elif end is not None:
            content.tags["vitlab.status"] = end.how
        has_ended = end.how != Ending.STOPPED if end is not None else mark is not None and mark.has_result
        if has_ended and news.item.identity in self._filed:
            # Also without a new end: a journal grows by explanations after the result.
            self._stage_files(news, content, place)
            content.files = sum(path.is_file() for path in place.rglob("*"))
        return content

    def _describe_trial(self, news: TrialUpdate) -> str:
        """Return how a trial ended, with the study's metric, and then its arm, its seed and what the arm varies."""
        planned, end, analysis = news.item.planned, news.end, self.plan.analysis
        ending = "in training"
        if end is not None:
            ending = {Ending.STOPPED: "stopped; the next vitlab run resumes it"}.get(end.how, end.how)
            if end.reason:
                ending += f": {end.reason}"
            elif (
                end.result is not None
                and (value := end.result.outcome.value(analysis.metric, analysis.at, analysis.goal)) is not None
            ):  # a pre-training has no accuracy
                scale = Scale.of_plan(self.plan)
                text = scale.number(value, scale.decimals_for_values([value], 1, 4))
                ending += f": {'best ' * (analysis.at == 'best')}{scale.metric} {text} {scale.unit}".rstrip()
        values = next((arm.values for arm in self.plan.arms if arm.name == planned.arm), {})
        options = "".join(f"; {path}: {format_value(value)}" for path, value in values.items())
        what = f"seed {planned.seed} of {'arm ' * bool(planned.arm)}{news.item.name.rpartition('/')[0]}{options}"
        return records.truncate(" \N{MIDDLE DOT} ".join(map(escape_markdown, [ending, what])))

    def _stage_files(self, news: TrialUpdate, content: _Content, place: Path) -> None:
        """Write the files of an ended trial, and its pictures as MLflow's images."""
        folder, result = news.folder, news.folder.result()
        explanations = sorted(folder.path.glob("explain/test-*/[!.]*"))
        sources = [folder.path / "log.txt"] if result is None else [folder.predictions, *explanations]
        files = files_within(folder.path.parents[2], sources)
        for file in files:
            write_bytes(place / file.relative_to(folder.path), file.read_bytes(), fsync=False)
        (place / "spec.json").write_text(json.dumps(news.item.planned.trial.to_json(), indent=2, default=str))
        if result is None:
            failure = folder.failure()
            if failure is not None:
                (place / "failure.txt").write_text(f"{failure.failure}\n\n{failure.traceback}", encoding="utf-8")
            return
        pictures = list(explanation_pictures(files))
        if folder.predictions in files:
            for split, table in (read_stored(folder.predictions, records.load_confusion_matrices) or {}).items():
                write_bytes(place / "confusion" / f"{split}.csv", table.to_csv().encode(), fsync=False)
                pictures.append(draw_confusion(news.item.name, split, result.outcome.steps, table))
        if pictures:
            content.images = write_image_files(pictures, int(result.circumstances.ended * 1000), place / IMAGES_FOLDER)
            content.tags[IMAGE_TAG] = "True"

    def _content_missing_in_run(self, run: Run, content: _Content) -> _Content:
        """Return what a run lacks of its training; at every step, a metric has one value."""
        histories = (self.client.get_metric_history(run.info.run_id, name) for name in run.data.metrics)
        stored = {(point.key, point.step) for history in histories for point in history}
        points = [point for point in content.points if (point.name, point.step) not in stored]
        files = count_files(self.client, run.info.run_id, run.info.artifact_uri) if content.files else 0
        return replace(content.without_stored_tags_and_params(run), points=points, stored_files=files)

    def _send_content(self, run: str, content: _Content) -> None:
        """Send values in one request, and files."""
        from mlflow.entities import Metric, Param, RunTag

        if content.points or content.tags or content.params:
            self.client.log_batch(
                run,
                [Metric(point.name, point.value, point.t, point.step) for point in content.points],
                [Param(name, value) for name, value in content.params.items()],
                [RunTag(name, value) for name, value in content.tags.items()],
            )
        if content.files:
            send_files(self.client, run, self._places[run], content.place)
        self.metrics |= {point.name for point in content.points}
        self.delivered.update(points=len(content.points), tags=len(content.tags), parameters=len(content.params))
        self.delivered["files"] += max(0, content.files - content.stored_files)

    def _mark_as_superseded(self, run: Run) -> None:
        """Mark a run of this output folder as superseded, also by its name and colour."""
        tags, run_id = run.data.tags, run.info.run_id
        if tags.get("vitlab.root") == self.root and tags.get("vitlab.kind") != SUPERSEDED:
            name = PREFIX + run.info.run_name
            tags = {"vitlab.kind": SUPERSEDED, RUN_NAME: name, records.COLOUR: GREY, ORDER: PREFIX}
            self._send_content(run_id, _Content(tags=tags))
            if run.info.status in (RUNNING, SCHEDULED):
                self.client.set_terminated(run_id, KILLED)


@dataclass
class _Content:
    """What an update adds to a run."""

    place: Path = Path()  #: folder of its files
    files: int = 0  #: their number
    points: list[Point] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    images: dict[str, int] = field(default_factory=dict)  #: image keys and the first step of each
    stored_files: int = 0  #: number of files that the run has already

    def without_stored_tags_and_params(self, run: Run) -> _Content:
        """Return the content without what a run has of it; one that was superseded has its name again."""
        tags = {name: value for name, value in self.tags.items() if run.data.tags.get(name) != value}
        if run.data.tags.get("vitlab.kind") == SUPERSEDED:
            tags[RUN_NAME] = run.info.run_name.removeprefix(PREFIX)
        params = {name: value for name, value in self.params.items() if name not in run.data.params}
        return replace(self, tags=tags, params=params)


def _keep_tags_only(run: Run) -> Run:
    """Return a run with its tags alone: metrics and parameters of ten thousand runs take half a gigabyte."""
    from mlflow.entities import Run, RunData, RunTag

    return Run(run.info, RunData(tags=[RunTag(name, value) for name, value in run.data.tags.items()]))


def _training_identity(run: Run) -> tuple[str, str]:
    """Return what distinguishes the trainings of a trial: when a training began, or else the output folder."""
    began, root = (run.data.tags.get(f"vitlab.{name}", "") for name in ("began", "root"))
    return began, "" if began else root


def count_files(client: MlflowClient, run: str, artifact_uri: str) -> int:
    """Return the number of a run's artifacts; in a folder of this machine without MLflow, which takes 30 ms."""
    if os.path.isabs(artifact_uri):
        # A name with a dot is of a file that a killed process has not completed.
        return sum(not name.startswith(".") for _, _, files in os.walk(artifact_uri) for name in files)

    def count_below(folder: str | None) -> int:
        items = client.list_artifacts(run, folder)
        return sum(count_below(item.path) if item.is_dir else 1 for item in items)

    return count_below(None)


def send_files(client: MlflowClient, run: str, place: str, folder: Path) -> None:
    """Send the files in a folder as a run's artifacts.

    Into a folder of this machine they are written without MLflow, which cannot replace files of another user.

    Raises:
        UserError: if a link leads out of the folder of the artifacts.
    """
    if not os.path.isabs(place):
        client.log_artifacts(run, str(folder))
        return
    root = Path(place).parent.resolve() / Path(place).name
    for file in folder.rglob("*"):
        if file.is_file():
            target = place / file.relative_to(folder)
            if not target.parent.resolve().is_relative_to(root):
                raise UserError(
                    f"{target.parent} leads out of {root}, and vitlab writes behind no link; delete the link"
                )
            write_bytes(target, file.read_bytes(), fsync=False)


# -- pictures ----------------------------------------------------------------------------------------------------------

IMAGES_FOLDER = "images"  #: artifact folder in which the page expects images
IMAGE_TAG = "mlflow.loggedImages"  #: tag of runs that have images
SMALL = 256  #: longer side of the page's thumbnails in pixels

FIELD, GAP, TITLE = 480, 6, 26  #: side of a confusion matrix, space beside its labels, and height of a line, in pixels
SHOWN = 0.8  #: part of the height of a square picture that the page shows; the rest is left white
NAMED, COUNTED = 40, 20  #: maximum number of classes whose names, and whose counts, are drawn
NAME, TITLED = 18, 50  #: letters of a class name, and of a trial's name, that are drawn


class Picture(NamedTuple):
    """One image of a run."""

    key: str
    step: int
    image: Image


def write_image_files(pictures: Iterable[Picture], ended_ms: int, folder: Path) -> dict[str, int]:
    """Write pictures, each in full size and as a thumbnail, under the file names that the page expects.

    Args:
        pictures: pictures of one run.
        ended_ms: end of the trial in milliseconds since 1970.
        folder: the destination folder, which is created.

    Returns:
        The first step of each key.
    """
    folder.mkdir()
    steps: dict[str, int] = {}
    for key, step, image in pictures:
        name = (
            f"{key.replace('/', '~')}+step+{step}+timestamp+{ended_ms}+"
            f"{uuid.uuid5(uuid.NAMESPACE_URL, f'{key} {step}')}"
        )
        image.save(folder / f"{name}.png", compress_level=1)
        image.thumbnail((SMALL, SMALL))
        image.save(folder / f"{name}+compressed.webp", method=0)
        steps[key] = min(step, steps.get(key, step))
    return steps


def explanation_pictures(files: Iterable[Path]) -> Iterator[Picture]:
    """Yield the pictures among the files of explanations; the step of each is the number of its test image.

    Damaged ones are reported and left out.
    """
    from PIL import Image

    for file in files:
        key, number = f"explain/{file.stem}", file.parent.name.removeprefix("test-")
        if file.suffix == ".png" and number.isdecimal():
            image = read_stored(file, lambda path: Image.open(path).convert("RGB"))
            if image is not None:
                yield Picture(key, int(number), image)


def draw_confusion(trial: str, split: str, step: int, table: pd.DataFrame) -> Picture:
    """Draw a confusion matrix: counts of images as numbers, their shares of the label as colours.

    Pillow draws it in a tenth of the time that matplotlib needs, and a study has two for every trial.
    """
    import numpy as np
    from matplotlib import colormaps
    from PIL import Image, ImageDraw

    counts, classes = table.to_numpy(), [str(name)[:NAME] for name in table.index]
    shares = counts / counts.sum(1, keepdims=True).clip(1)
    cell = FIELD / len(classes)
    font, small = _load_font(14), _load_font(max(8, min(14, int(cell / 3))))
    names = classes if len(classes) <= NAMED else []
    left, top = 2 * GAP + int(max((small.getlength(name) for name in names), default=0)), 2 * TITLE
    side = int((top + FIELD) / SHOWN)
    image = Image.new("RGB", (side, side), "white")
    draw = ImageDraw.Draw(image)
    draw.text((GAP, TITLE / 2), f"{trial[:TITLED]}, {split}: labels by predictions", "black", font, "lm")
    colours = Image.fromarray((colormaps["Blues"](shares)[..., :3] * 255).round().astype(np.uint8))
    image.paste(colours.resize((FIELD, FIELD), Image.Resampling.NEAREST), (left, top))
    for index, name in enumerate(names):
        centre, fitting = (index + 0.5) * cell, int(cell / small.getlength("n"))
        draw.text((left - GAP, top + centre), name, "black", small, "rm")
        draw.text((left + centre, top - GAP), name[:fitting], "black", small, "ms")
    for (row, column), count in np.ndenumerate(counts):
        if count and len(classes) <= COUNTED:
            ink = "white" if shares[row, column] > 0.5 else "black"
            draw.text((left + (column + 0.5) * cell, top + (row + 0.5) * cell), str(count), ink, small, "mm")
    return Picture(f"confusion/{split}", step, image)


@cache
def _load_font(size: int) -> FreeTypeFont:
    import matplotlib
    from PIL import ImageFont

    return ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf", size)
