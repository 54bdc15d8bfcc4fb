"""Trials as runs of an MLflow experiment: matched or created, filled from the journal, ended by the result.

A run belongs to one arm, trial, code and journal (identified by the time of its first event).  After a trial is
retrained, its old run no longer belongs to the study and is marked as superseded in ``vitlab.kind``.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from vitlab.plan.values import Plan
from vitlab.store.damage import read_stored
from vitlab.store.folders import Event, Store, TrialFolder
from vitlab.store.result import Ending, TrialResult
from vitlab.trackers import images, records, service
from vitlab.trackers.records import Point
from vitlab.trackers.replay import TUNING, Cursor, End, TrackedTrial, TrialUpdate, began_at, identity_of

log = logging.getLogger(__name__)

FINISHED, FAILED, KILLED, RUNNING = "FINISHED", "FAILED", "KILLED", "RUNNING"
SUPERSEDED = "superseded"
EFFECTIVE = "train.effective_batch_size"  #: parameter name: number of images per optimizer step
KINDS = ("trial", "prerequisite", TUNING, SUPERSEDED)


@dataclass
class RunMark:
    """Mark of a trial, see :class:`~vitlab.trackers.replay.Replay`: its run, and what has been delivered of it."""

    experiment: str
    run: str  #: MLflow's id
    status: str  #: last status sent to MLflow
    described: bool = False  #: parameters and data set are delivered
    ended: str = ""  #: ``done``, ``diverged`` or ``failed`` if the files of the ended trial are delivered
    step: int = -1  #: last step delivered
    points: int = 0  #: number of delivered points of the study's metric
    artifacts: int = 0  #: number of files in MLflow when those of the ended trial were delivered
    images: dict[str, int] = field(default_factory=dict)  #: delivered image keys and the first step of each

    @classmethod
    def of(cls, mark: Cursor) -> RunMark | None:
        """Parse a mark; None if an incompatible version has written it."""
        try:
            return _MARK().validate_python(mark)
        except ValueError:
            return None

    def to_json(self) -> dict[str, Any]:
        """Return the mark as JSON values."""
        return asdict(self)


_MARK = cache(lambda: TypeAdapter(RunMark))


@dataclass
class _Batch:
    """Points, tags and parameters of a run that are sent together."""

    points: list[Point] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)


class TrialRuns:
    """Runs of one study's trials.  Every method may raise MLflow's exceptions.

    Args:
        client: MLflow's client.
        experiment: id of the study's experiment.
        plan: the study.
        store: the store of its trials.
        root: identifies this output folder among those that deliver to the same server.
        source: tags of the delivering user and commit.
    """

    def __init__(
        self, client: Any, experiment: str, plan: Plan, store: Store, *, root: str, source: Mapping[str, str]
    ) -> None:
        self.client = client
        self.experiment = experiment
        self.plan = plan
        self.store = store
        self.root = root
        self.source = source
        self.metrics: set[str] = set()  #: names of all metrics in the runs
        self.created = False  #: True if a run was created since the last :meth:`settle`
        self.lost = False  #: True if the last :meth:`settle` found that MLflow lacks something that was delivered
        self._intact: set[str] = set()  #: runs that hold what was delivered
        self._matching: dict[str, Any] = {}  #: run of each trial, by identity
        self._earlier: dict[str, list[str]] = {}  #: runs of earlier trainings of trials that have not restarted
        self._rejected: set[tuple[str, str]] = set()  #: tags and parameters of runs that MLflow rejects
        self._colours = records.colours(plan)

    def settle(self, runs: Sequence[Any], trials: Sequence[TrackedTrial], marks: Mapping[str, RunMark]) -> None:
        """Match the experiment's runs with the trials.

        Of duplicate runs of one trial, left by a lost response to ``create_run``, all but one are deleted.  Runs of
        this output folder that belong to no trial are marked as superseded; those of a trial whose folder is gone, once
        the trial restarts.  A run that lacks delivered data, as on a server restored from a backup, is not intact.
        """
        self.created = self.lost = False
        self._intact, self._matching, self._earlier = set(), {}, {}
        by_identity: dict[str, list[Any]] = {}
        for run in runs:
            tags = run.data.tags
            if tags.get("vitlab.kind") in KINDS and "vitlab.trial" in tags:
                identity = identity_of(tags["vitlab.trial"], tags.get("vitlab.code", ""), tags.get("arm", ""))
                by_identity.setdefault(identity, []).append(run)
        current = set()
        for item in trials:
            mark, candidates = marks.get(item.identity), by_identity.get(item.identity, [])
            folder = self.folder(item)
            try:
                began = began_at(folder)
            except OSError:  # the trial's own delivery reports the error
                began = 0
            matching = [run for run in candidates if self._is_of(run, began, folder)]
            if not began:
                self._earlier[item.identity] = [
                    run.info.run_id
                    for run in candidates
                    if run not in matching and run.data.tags.get("vitlab.root") == self.root
                ]
                current |= set(self._earlier[item.identity])
            matching.sort(
                key=lambda run: (mark is None or run.info.run_id != mark.run, not run.data.tags.get("vitlab.began"))
            )
            for run in matching[1:]:
                if run.data.tags.get("vitlab.began", "") == matching[0].data.tags.get("vitlab.began", ""):
                    self.client.delete_run(run.info.run_id)
            if not matching:
                self.lost |= mark is not None and bool(began)
                continue
            run = self._matching[item.identity] = matching[0]
            current |= {run.info.run_id for run in matching}
            self.metrics |= set(run.data.metrics)
            if mark is not None and mark.run == run.info.run_id and not _lacks_data(run, mark):
                self._intact.add(mark.run)
            else:
                self.lost |= mark is not None
            tags = self._tags(item).items()  # the design may have changed since
            if changed := {name: value for name, value in tags if run.data.tags.get(name) != value}:
                self._log(item, run.info.run_id, changed)
        for duplicates in by_identity.values():
            for run in duplicates:
                tags = run.data.tags
                is_own = run.info.run_id not in current and tags.get("vitlab.root") == self.root
                if is_own and tags["vitlab.kind"] != SUPERSEDED:
                    self.client.set_tag(run.info.run_id, "vitlab.kind", SUPERSEDED)

    def verify(self, marks: Iterable[RunMark]) -> None:
        """Compare points and artifacts of every run with those delivered; a run that lacks some is not intact.

        Sends two or more requests per run; :meth:`settle` sends none.
        """
        name = records.key(self.plan.analysis.metric)
        runs = {run.info.run_id: run for run in self._matching.values()}
        for mark in marks:
            if mark.run in self._intact:
                points = {(point.timestamp, point.step) for point in self.client.get_metric_history(mark.run, name)}
                files = _count(self.client, runs[mark.run]) if mark.ended else 1
                if len(points) < mark.points or files < max(1, mark.artifacts):
                    self._intact.remove(mark.run)

    def is_intact(self, mark: RunMark) -> bool:
        """Return True if a trial's run holds what was delivered."""
        return mark.experiment == self.experiment and mark.run in self._intact

    def write(self, news: TrialUpdate, mark: RunMark | None) -> RunMark:
        """Update one run by the new events of its trial; without a mark, find or create the run and deliver all.

        Every request to a database takes about 10 ms, so points, tags and parameters are sent in one request, and
        files in another.
        """
        mark = RunMark(**asdict(mark)) if mark is not None else self._match(news) or self._create(news)
        batch = _Batch()
        if not mark.described:
            self._describe(news, mark, batch)
        self._add_events(news.events, mark, batch)
        if any(event.kind == "start" if mark.ended else event.kind != "end" for event in news.events):
            mark.ended = ""
            if news.end is None and mark.status != RUNNING:
                self.client.update_run(mark.run, status=RUNNING)
                mark.status = RUNNING
        if news.end is not None:
            self._add_end(news.end, mark, batch)
        # An ended trial's journal grows by explanations.
        has_files = bool(mark.ended and (news.end is not None or news.events))
        with tempfile.TemporaryDirectory() if has_files else nullcontext() as place:
            try:
                if place is not None:
                    self._write_files(news, mark, batch, Path(place))
            finally:  # files that cannot be written delay no points
                self._send(news.item, mark, batch)
                if news.end is not None:
                    self._write_end(news.end, news.folder, mark)
            if place is not None:
                self._send_files(news, mark, Path(place))
        self._intact.add(mark.run)
        return mark

    def supersede(self, run: str) -> None:
        """Mark a run of this output folder as superseded."""
        if self.client.get_run(run).data.tags.get("vitlab.root") == self.root:
            self.client.set_tag(run, "vitlab.kind", SUPERSEDED)

    def folder(self, item: TrackedTrial) -> TrialFolder:
        """Return the folder of a trial."""
        return self.store.trial(item.planned.trial.key, item.planned.trial.code)

    def _tags(self, item: TrackedTrial) -> dict[str, str]:
        """Return the tags that follow from the plan."""
        arm = item.planned.arm
        colour = {"mlflow.runColor": self._colours[arm]} if arm in self._colours else {}
        return records.tags(self.plan, item.planned, item.kind) | colour

    def _match(self, news: TrialUpdate) -> RunMark | None:
        """Return the mark of a run of this trial that was found in MLflow, before anything of it is delivered."""
        run = self._matching.get(news.item.identity)
        if run is None or not self._is_of(run, news.began, news.folder):
            return None
        return RunMark(self.experiment, run.info.run_id, run.info.status)

    def _create(self, news: TrialUpdate) -> RunMark:
        began, end = news.began, news.end
        tags = {**self._tags(news.item), **self.source, "vitlab.began": str(began or ""), "vitlab.root": self.root}
        result = end.result if end is not None else None
        started = began or (int(result.circumstances.started * 1000) if result is not None else None)
        run = self.client.create_run(self.experiment, start_time=started, tags=tags, run_name=news.item.name)
        self.created = True
        self._matching[news.item.identity] = run
        for earlier in self._earlier.pop(news.item.identity, []):
            self.supersede(earlier)
        return RunMark(self.experiment, run.info.run_id, RUNNING)

    def _is_of(self, run: Any, began: int, folder: TrialFolder) -> bool:
        """Return True if a run was filled from the journal that began at ``began``, or may be filled from it.

        A run without the tag of its journal, or whose journal was deleted, is matched by the output folder.
        """
        tag = run.data.tags.get("vitlab.began", "")
        if began and tag:
            return bool(tag == str(began))
        return run.data.tags.get("vitlab.root") == self.root and (not tag or folder.done())

    def _describe(self, news: TrialUpdate, mark: RunMark, batch: _Batch) -> None:
        """Add the parameters that MLflow lacks, since they are immutable there, and send the data set."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        run = self._matching.get(news.item.identity)
        if run is None or run.info.run_id != mark.run:
            run = self.client.get_run(mark.run)
        batch.params |= {name: value for name, value in news.item.params.items() if name not in run.data.params}
        trial = news.item.planned.trial
        if trial.data is not None and not (run.inputs and run.inputs.dataset_inputs):
            data = trial.spec.data
            dataset = Dataset(
                name=data.type,
                digest=records.digest(str(trial.data)),
                source_type="vitlab",
                source=json.dumps(data.plain(), default=str),
            )
            self.client.log_inputs(mark.run, [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])])
        if news.began and not run.data.tags.get("vitlab.began"):
            batch.tags["vitlab.began"] = str(news.began)
        mark.described = bool(news.began)

    def _add_events(self, events: Sequence[Event], mark: RunMark, batch: _Batch) -> None:
        points = [point for event in events if event.kind == "metrics" for point in records.points(event)]
        for event in events:
            if event.kind == "start":
                if "effective_batch_size" in event.body:
                    batch.params[EFFECTIVE] = str(event.body["effective_batch_size"])
                batch.tags |= {"vitlab.attempts": str(event.body.get("attempt", 1))}
                batch.tags |= {"vitlab.host": str(event.body.get("host", ""))}
        batch.points += points
        headline = records.key(self.plan.analysis.metric)
        mark.points += len({(point.t, point.step) for point in points if point.name == headline})
        mark.step = max([mark.step, *(point.step for point in points)])

    def _add_end(self, end: End, mark: RunMark, batch: _Batch) -> None:
        if end.result is not None:
            batch.points += records.final_points(end.result, self.plan.analysis)
            batch.tags |= records.result_tags(end.result)
        else:
            batch.tags["vitlab.status"] = end.how
        if end.reason:
            batch.tags["mlflow.note.content"] = end.reason
        mark.ended = end.how if end.how != Ending.STOPPED else ""

    def _write_end(self, end: End, folder: TrialFolder, mark: RunMark) -> None:
        failure = folder.last_failure()
        if end.result is None and end.how == Ending.FAILED and failure is not None:
            self.client.log_text(mark.run, f"{failure.failure}\n\n{failure.traceback}", "failure.txt")
        mark.status = {Ending.DONE: FINISHED, Ending.STOPPED: KILLED}.get(end.how, FAILED)
        self.client.set_terminated(mark.run, mark.status, end_time=end.t or None)

    def _send(self, item: TrackedTrial, mark: RunMark, batch: _Batch) -> None:
        """Send points, tags and parameters."""
        from mlflow.entities import Metric

        metrics = [Metric(point.name, point.value, point.t, point.step) for point in batch.points]
        self._log(item, mark.run, batch.tags, batch.params, metrics)
        self.metrics |= {point.name for point in batch.points}

    def _log(
        self,
        item: TrackedTrial,
        run: str,
        tags: Mapping[str, str],
        params: Mapping[str, str] = {},
        metrics: Sequence[Any] = (),
    ) -> None:
        """Send values to a run, with one warning on each tag and parameter that MLflow rejects."""
        for rejected, reason in service.log_values(self.client, run, tags, params, metrics).items():
            if (run, rejected) not in self._rejected:
                log.warning("%s: MLflow rejects %s and has the rest: %s", item.name, rejected, reason)
            self._rejected.add((run, rejected))

    def _write_files(self, news: TrialUpdate, mark: RunMark, batch: _Batch, place: Path) -> None:
        """Write the files of an ended trial into ``place``, but for its explanations."""
        folder, result = news.folder, news.folder.result()
        (place / "spec.json").write_text(json.dumps(news.item.planned.trial.to_json(), indent=2, default=str))
        if result is None:
            if (folder.path / "log.txt").exists():
                shutil.copyfile(folder.path / "log.txt", place / "log.txt")
            return
        (place / "history.csv").write_text(records.history_csv(result), encoding="utf-8")
        pictures = list(images.explanations(folder.path))
        tables = read_stored(folder.predictions, records.confusion)
        if tables is not None:
            shutil.copyfile(folder.predictions, place / folder.predictions.name)
        for split, table in (tables or {}).items():
            (place / "confusion").mkdir(exist_ok=True)
            (place / "confusion" / f"{split}.csv").write_text(table.to_csv(), encoding="utf-8")
            pictures.append(images.confusion(split, result.outcome.steps, table))
        if pictures:
            (place / images.FOLDER).mkdir()
            mark.images = images.write(pictures, _ended_at(result), place / images.FOLDER)
            batch.tags[images.TAG] = "True"

    def _send_files(self, news: TrialUpdate, mark: RunMark, place: Path) -> None:
        """Send the files in ``place`` and the explanations of a trial."""
        self.client.log_artifacts(mark.run, str(place))
        if (news.folder.path / "explain").is_dir():
            self.client.log_artifacts(mark.run, str(news.folder.path / "explain"), "explain")
        mark.artifacts = _count(self.client, self._matching[news.item.identity])
        service.clear_artifact_cache()


def _lacks_data(run: Any, mark: RunMark) -> bool:
    """Return True if a run, as returned by a search, lacks delivered data."""
    last = max((metric.step for metric in run.data.to_proto().metrics), default=-1)
    has_result = any(name.startswith("final/") for name in run.data.metrics)
    lacks_result = mark.ended in (Ending.DONE, Ending.DIVERGED) and not has_result
    return last < mark.step or lacks_result or run.info.status != mark.status


def _count(client: Any, run: Any) -> int:
    """Return the number of a run's artifacts; in a folder of this machine without MLflow, which takes 30 ms."""
    if os.path.isabs(run.info.artifact_uri):
        return sum(len(files) for _, _, files in os.walk(run.info.artifact_uri))
    return _count_below(client, run.info.run_id, None)


def _count_below(client: Any, run: str, folder: str | None) -> int:
    items = client.list_artifacts(run, folder)
    return sum(_count_below(client, run, item.path) if item.is_dir else 1 for item in items)


def _ended_at(result: TrialResult) -> int:
    """Return the end of a trial in milliseconds since 1970."""
    return int(result.circumstances.ended * 1000)
