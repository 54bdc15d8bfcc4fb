"""Trials as runs of an MLflow experiment: matched or created, filled from the journal, ended by the result.

A run belongs to one arm, trial, code and journal (identified by the time of its first event).  After a trial is
retrained, its old run no longer belongs to the study and is marked as superseded in ``vitlab.kind``.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.plan.values import Plan
from vitlab.store.damage import read_stored
from vitlab.store.folders import Event, Store, TrialFolder
from vitlab.store.result import Ending, Failure, TrialResult
from vitlab.trackers import images, records, service
from vitlab.trackers.cursor import Offsets, RunState
from vitlab.trackers.records import Point
from vitlab.trackers.tracked_trials import TUNING, TrackedTrial, began_at, identity_of, size_of

FINISHED, FAILED, KILLED, RUNNING = "FINISHED", "FAILED", "KILLED", "RUNNING"
RESULT = "result"
SUPERSEDED = "superseded"
EFFECTIVE = "train.effective_batch_size"  #: parameter name: number of images per optimizer step
KINDS = ("trial", "prerequisite", TUNING, SUPERSEDED)


class TrialRuns:
    """Runs of one study's trials.  Every method may raise MLflow's exceptions.

    Args:
        client: MLflow's client.
        offsets: the delivery state of the study.
        plan: the study.
        store: the store of its trials.
        local: True if artifacts are files of this machine, so that delivering them is quick.
        root: identifies this output folder among those that deliver to the same server.
        source: tags of the delivering user and commit.
    """

    def __init__(
        self,
        client: Any,
        offsets: Offsets,
        plan: Plan,
        store: Store,
        *,
        local: bool,
        root: str,
        source: Mapping[str, str],
    ) -> None:
        self.client = client
        self.offsets = offsets
        self.plan = plan
        self.store = store
        self.local = local
        self.root = root
        self.source = source
        self.created = False  #: True if a run was created since the last :meth:`settle`
        self.lost = False  #: True if the last :meth:`settle` found that MLflow lacks something that was delivered
        self._runs: dict[str, Any] = {}  #: runs that are not described yet
        self._earlier: dict[str, list[str]] = {}  #: runs of earlier trainings of trials that have not restarted
        self._colours = records.colours(plan)

    def settle(self, runs: Sequence[Any], trials: Sequence[TrackedTrial]) -> None:
        """Match the experiment's runs with the trials.

        Of duplicate runs of one trial, left by a lost response to ``create_run``, all but one are deleted.  Runs of
        this output folder that belong to no trial are marked as superseded; those of a trial whose folder is gone, once
        the trial restarts.  A run that lacks delivered data, as on a server restored from a backup, is filled again.
        """
        self.created = self.lost = False
        self._runs = {}
        self._earlier = {}
        by_identity: dict[str, list[Any]] = {}
        for run in runs:
            tags = run.data.tags
            if tags.get("vitlab.kind") in KINDS and "vitlab.trial" in tags:
                identity = identity_of(tags["vitlab.trial"], tags.get("vitlab.code", ""), tags.get("arm", ""))
                by_identity.setdefault(identity, []).append(run)
        current = set()
        for item in trials:
            state = self.offsets.runs.get(item.identity)
            folder = self.folder(item)
            try:
                began = began_at(folder)
            except OSError:  # the trial's own delivery reports the error
                began = 0
            matching = [run for run in by_identity.get(item.identity, []) if self._is_of(run, began, folder)]
            if not began:
                self._earlier[item.identity] = [
                    run.info.run_id
                    for run in by_identity.get(item.identity, [])
                    if run not in matching and run.data.tags.get("vitlab.root") == self.root
                ]
                current |= set(self._earlier[item.identity])
            matching.sort(
                key=lambda run: (state is None or run.info.run_id != state.run, not run.data.tags.get("vitlab.began"))
            )
            for run in matching[1:]:
                if run.data.tags.get("vitlab.began", "") == matching[0].data.tags.get("vitlab.began", ""):
                    self.client.delete_run(run.info.run_id)
            if not matching:
                self.lost |= state is not None and bool(began)
                self.offsets.runs.pop(item.identity, None)
                continue
            run = matching[0]
            current |= {run.info.run_id for run in matching}
            if state is None or state.run != run.info.run_id or _lacks_data(run, state):
                self.lost |= state is not None
                state = self.offsets.runs[item.identity] = RunState(run.info.run_id, status=run.info.status)
            state.began = int(run.data.tags.get("vitlab.began") or 0)
            if not state.described:
                self._runs[item.identity] = run
            for name, value in self._tags(item).items():  # the design may have changed since
                if run.data.tags.get(name) != value:
                    self.client.set_tag(run.info.run_id, name, value)
        for duplicates in by_identity.values():
            for run in duplicates:
                tags = run.data.tags
                if (
                    run.info.run_id not in current
                    and tags["vitlab.kind"] != SUPERSEDED
                    and tags.get("vitlab.root") == self.root
                ):
                    self.client.set_tag(run.info.run_id, "vitlab.kind", SUPERSEDED)

    def verify(self, trials: Sequence[TrackedTrial]) -> None:
        """Compare points and artifacts of every run with those delivered, and mark what is missing for delivery.

        Sends two or more requests per run; :meth:`settle` sends none.
        """
        name = records.key(self.plan.analysis.metric)
        for item in trials:
            state = self.offsets.runs.get(item.identity)
            if state is None:
                continue
            if state.offset:
                expected = {
                    (point.t, point.step)
                    for event in self._delivered(item, state)
                    for point in records.points(event)
                    if point.name == name
                }
                if not expected <= {(p.timestamp, p.step) for p in self.client.get_metric_history(state.run, name)}:
                    began = state.began
                    state = self.offsets.runs[item.identity] = RunState(state.run, status=state.status, began=began)
            if state.files >= 0 and _count(self.client, state.run) < max(1, state.artifacts):
                state.files = -1
                state.ended = ""  # a failure's text is delivered with its ending

    def _delivered(self, item: TrackedTrial, state: RunState) -> list[Event]:
        """Return the measurements in the delivered part of the journal."""
        events, offset = self.folder(item).events()
        if offset != state.offset:  # the journal has grown or was replaced; new events are delivered anyway
            return []
        return [event for event in events if event.kind == "metrics"]

    def deliver(self, item: TrackedTrial, *, final: bool) -> None:
        """Update one run to match its trial.

        Args:
            item: the trial.
            final: True after the last training: an unlocked trial counts as stopped, and files, which may be large,
                are sent to servers too.
        """
        folder = self.folder(item)
        state = self.offsets.runs.get(item.identity)
        size = size_of(folder)
        files_now = final or self.local
        ended = state is not None and state.ended == RESULT and state.offset == size
        if state is not None and ended and (state.files == state.offset or not files_now):
            return
        began = began_at(folder)
        if state is not None and began and state.began not in (0, began):  # retrained since settle
            self._supersede(state.run)
            del self.offsets.runs[item.identity]
            state = None
        result = folder.result()
        failure = folder.last_failure() if result is None else None
        if state is None and not size and result is None and failure is None:
            return
        if state is None:
            state = self._create(item, folder, result)
        if not state.described:
            self._describe(item, state)
        began_anew = self._journal(folder, state)
        end = RESULT if result is not None else _failure_id(failure, state)
        if end and end != state.ended:
            if result is not None:
                self._end_with_result(state, result)
            elif failure is not None:
                self._end_with_failure(state, failure)
            state.files = -1
        elif not end and began_anew and state.status != RUNNING:
            self.client.update_run(state.run, status=RUNNING)
            state.status = RUNNING
        elif not end and final and state.status == RUNNING and not folder.is_locked():
            self.client.set_tag(state.run, "vitlab.status", Ending.STOPPED)
            self._terminate(state, KILLED, state.last_t or None)
        state.ended = end
        if end and files_now and state.files != state.offset:  # the journal of an ended trial grows by explanations
            self._files(item, folder, state, result)
            state.artifacts = _count(self.client, state.run)
            service.clear_artifact_cache()
            state.files = state.offset

    def folder(self, item: TrackedTrial) -> TrialFolder:
        """Return the folder of a trial."""
        return self.store.trial(item.planned.trial.key, item.planned.trial.code)

    def _tags(self, item: TrackedTrial) -> dict[str, str]:
        """Return the tags that follow from the plan."""
        arm = item.planned.arm
        colour = {"mlflow.runColor": self._colours[arm]} if arm in self._colours else {}
        return records.tags(self.plan, item.planned, item.kind) | colour

    def _create(self, item: TrackedTrial, folder: TrialFolder, result: TrialResult | None) -> RunState:
        began = began_at(folder)
        tags = {**self._tags(item), **self.source, "vitlab.began": str(began or ""), "vitlab.root": self.root}
        started = began or (int(result.circumstances.started * 1000) if result is not None else None)
        run = self.client.create_run(self.offsets.experiment, start_time=started, tags=tags, run_name=item.name)
        self.created = True
        self._runs[item.identity] = run
        for earlier in self._earlier.pop(item.identity, []):
            self._supersede(earlier)
        state = self.offsets.runs[item.identity] = RunState(run.info.run_id, began=began)
        return state

    def _supersede(self, run: str) -> None:
        """Mark a run of this output folder as superseded."""
        if self.client.get_run(run).data.tags.get("vitlab.root") == self.root:
            self.client.set_tag(run, "vitlab.kind", SUPERSEDED)

    def _is_of(self, run: Any, began: int, folder: TrialFolder) -> bool:
        """Return True if a run was filled from the journal that began at ``began``, or may be filled from it.

        A run without the tag of its journal, or whose journal was deleted, is matched by the output folder.
        """
        tag = run.data.tags.get("vitlab.began", "")
        if began and tag:
            return bool(tag == str(began))
        return run.data.tags.get("vitlab.root") == self.root and (not tag or folder.done())

    def _describe(self, item: TrackedTrial, state: RunState) -> None:
        """Send the parameters and data set.  MLflow's parameters are immutable, so only missing ones are sent."""
        from mlflow.entities import Dataset, DatasetInput, InputTag, Param

        run = self._runs.get(item.identity) or self.client.get_run(state.run)
        missing = [Param(name, value) for name, value in item.params.items() if name not in run.data.params]
        if missing:
            self.client.log_batch(state.run, params=missing)
        trial = item.planned.trial
        if trial.data is not None and not (run.inputs and run.inputs.dataset_inputs):
            data = trial.spec.data
            dataset = Dataset(
                name=data.type,
                digest=records.digest(trial.data),
                source_type="vitlab",
                source=json.dumps(data.plain(), default=str),
            )
            self.client.log_inputs(state.run, [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])])
        began = began_at(self.folder(item))
        if began and not run.data.tags.get("vitlab.began"):
            self.client.set_tag(state.run, "vitlab.began", str(began))
            state.began = began
        state.described = bool(began)
        if state.described:
            self._runs.pop(item.identity, None)

    def _journal(self, folder: TrialFolder, state: RunState) -> bool:
        """Deliver the new part of the journal and return True if it holds events other than an ending."""
        events, offset = folder.events(state.offset)
        if not events:
            return False
        points = [point for event in events if event.kind == "metrics" for point in records.points(event)]
        tags: dict[str, str] = {}
        params: dict[str, str] = {}
        for event in events:
            if event.kind == "start":
                if "effective_batch_size" in event.body:
                    params[EFFECTIVE] = str(event.body["effective_batch_size"])
                tags |= {"vitlab.attempts": str(event.body.get("attempt", 1))}
                tags |= {"vitlab.host": str(event.body.get("host", ""))}
        self._log(state, points, tags, params)
        state.offset = offset
        state.step = max([state.step, *(point.step for point in points)])
        state.last_kind, state.last_t = events[-1].kind, events[-1].t
        return any(event.kind != "end" for event in events)

    def _log(
        self, state: RunState, points: Sequence[Point], tags: Mapping[str, str], params: Mapping[str, str] = {}
    ) -> None:
        from mlflow.entities import Metric, Param, RunTag

        self.client.log_batch(
            state.run,
            metrics=[Metric(point.name, point.value, point.t, point.step) for point in points],
            tags=[RunTag(name, value) for name, value in tags.items()],
            params=[Param(name, value) for name, value in params.items()],
        )
        self.offsets.add_metrics({point.name for point in points})

    def _end_with_result(self, state: RunState, result: TrialResult) -> None:
        self._log(state, records.final_points(result, self.plan.analysis), records.result_tags(result))
        if result.failure:
            self.client.set_tag(state.run, "mlflow.note.content", result.failure)
        self._terminate(state, FINISHED if result.status == Ending.DONE else FAILED, _ended_at(result))

    def _end_with_failure(self, state: RunState, failure: Failure) -> None:
        self.client.set_tag(state.run, "vitlab.status", Ending.FAILED)
        self.client.set_tag(state.run, "mlflow.note.content", failure.failure)
        self.client.log_text(state.run, f"{failure.failure}\n\n{failure.traceback}", "failure.txt")
        self._terminate(state, FAILED, int(failure.time * 1000))

    def _terminate(self, state: RunState, status: str, end_ms: int | None) -> None:
        self.client.set_terminated(state.run, status, end_time=end_ms)
        state.status = status

    def _files(self, item: TrackedTrial, folder: TrialFolder, state: RunState, result: TrialResult | None) -> None:
        """Deliver the files of the trial."""
        run = state.run
        self.client.log_dict(run, item.planned.trial.to_json(), "spec.json")
        if result is None:
            if (folder.path / "log.txt").exists():
                self.client.log_artifact(run, str(folder.path / "log.txt"))
            return
        self.client.log_text(run, records.history_csv(result), "history.csv")
        pictures = list(images.explanations(folder.path))
        tables = read_stored(folder.predictions, records.confusion)
        if tables is not None:
            self.client.log_artifact(run, str(folder.predictions))
            for split, table in tables.items():
                self.client.log_text(run, table.to_csv(), f"confusion/{split}.csv")
                pictures.append(images.confusion(split, result.outcome.steps, table))
        if pictures:
            with tempfile.TemporaryDirectory() as place:
                self.offsets.add_images(images.write(pictures, _ended_at(result), Path(place)))
                self.client.log_artifacts(run, place, images.FOLDER)
            self.client.set_tag(run, images.TAG, "True")
        if (folder.path / "explain").is_dir():
            self.client.log_artifacts(run, str(folder.path / "explain"), "explain")


def _lacks_data(run: Any, state: RunState) -> bool:
    """Return True if a run, as returned by a search, lacks delivered data."""
    last = max((metric.step for metric in run.data.to_proto().metrics), default=-1)
    lacks_result = state.ended == RESULT and not any(name.startswith("final/") for name in run.data.metrics)
    return last < state.step or lacks_result or run.info.status != state.status


def _count(client: Any, run: str, folder: str | None = None) -> int:
    """Return the number of a run's artifacts."""
    items = client.list_artifacts(run, folder)
    return sum(_count(client, run, item.path) if item.is_dir else 1 for item in items)


def _ended_at(result: TrialResult) -> int:
    """Return the end of a trial in milliseconds since 1970."""
    return int(result.circumstances.ended * 1000)


def _failure_id(failure: Failure | None, state: RunState) -> str:
    """Return an identifier of the failure that ended the trial; empty if the trial was restarted since."""
    if failure is None:
        return ""
    restarted = state.last_kind not in ("", "end") and state.last_t > failure.time * 1000
    return "" if restarted else f"failure {failure.time}"
