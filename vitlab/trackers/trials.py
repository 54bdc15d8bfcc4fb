"""Trials as runs of an MLflow experiment: found or created, filled from the journal, ended by the result.

A run belongs to one arm, one trial, one code, and one journal (told by the time of its first event): where a trial was
trained anew, its old run is no part of the study any more and says so in ``vitlab.kind``.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.plan.values import Plan
from vitlab.store.folders import Event, Store, TrialFolder, read_stored
from vitlab.store.result import Failure, Result
from vitlab.trackers import images, records, service
from vitlab.trackers.cursor import Delivered, Offsets
from vitlab.trackers.records import Point
from vitlab.trackers.tracked_trials import TUNING, Shown, began_at, identity_of, size_of

FINISHED, FAILED, KILLED, RUNNING = "FINISHED", "FAILED", "KILLED", "RUNNING"
RESULT = "result"
SUPERSEDED = "superseded"
EFFECTIVE = "train.effective_batch_size"  #: a parameter: images that a step learned from
KINDS = ("trial", "prerequisite", TUNING, SUPERSEDED)


class TrialRuns:
    """The runs of one study's trials.  Every method may raise whatever MLflow raises."""

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
        """
        Args:
            client: MLflow's client.
            offsets: what has been delivered.
            plan: the study.
            store: where its trials are.
            local: whether artifacts are files of this machine, so that delivering them is quick.
            root: tells this output folder from others that deliver to the same server.
            source: tags of whoever delivers.
        """
        self.client = client
        self.offsets = offsets
        self.plan = plan
        self.store = store
        self.local = local
        self.root = root
        self.source = source
        self.created = False  #: whether a run was, since they were last looked at
        self._runs: dict[str, Any] = {}  #: those that are not described yet
        self._earlier: dict[str, list[str]] = {}  #: runs of earlier trainings of trials that have not begun anew
        self._colours = records.colours(plan)

    def settle(self, found: Sequence[Any], trials: Sequence[Shown]) -> None:
        """Find out which of the experiment's runs belong to the trials.

        Of several runs of one trial, as a lost answer to ``create_run`` leaves them, all but one are deleted.  Runs
        that this output folder has delivered and that belong to no trial any more are set aside; those of a trial that
        is not there any more, once it begins anew.  A run that holds less than it was given, as on a server restored
        from a backup, is filled again.
        """
        self.created = False
        self._runs = {}
        self._earlier = {}
        by_identity: dict[str, list[Any]] = {}
        for run in found:
            tags = run.data.tags
            if tags.get("vitlab.kind") in KINDS and "vitlab.trial" in tags:
                identity = identity_of(tags["vitlab.trial"], tags.get("vitlab.code", ""), tags.get("arm", ""))
                by_identity.setdefault(identity, []).append(run)
        chosen = set()
        for item in trials:
            known = self.offsets.runs.get(item.identity)
            folder = self.folder(item)
            try:
                began = began_at(folder)
            except OSError:  # its own delivery says what is wrong with it
                began = 0
            same = [run for run in by_identity.get(item.identity, []) if self._is_of(run, began, folder)]
            if not began:
                self._earlier[item.identity] = [
                    run.info.run_id
                    for run in by_identity.get(item.identity, [])
                    if run not in same and run.data.tags.get("vitlab.root") == self.root
                ]
                chosen |= set(self._earlier[item.identity])
            same.sort(
                key=lambda run: (known is None or run.info.run_id != known.run, not run.data.tags.get("vitlab.began"))
            )
            for run in same[1:]:
                if run.data.tags.get("vitlab.began", "") == same[0].data.tags.get("vitlab.began", ""):
                    self.client.delete_run(run.info.run_id)
            if not same:
                self.offsets.runs.pop(item.identity, None)
                continue
            run = same[0]
            chosen |= {run.info.run_id for run in same}
            if known is None or known.run != run.info.run_id or _holds_less(run, known):
                known = self.offsets.runs[item.identity] = Delivered(run.info.run_id, status=run.info.status)
            known.began = int(run.data.tags.get("vitlab.began") or 0)
            if not known.described:
                self._runs[item.identity] = run
            for name, value in self._tags(item).items():  # the design may have changed since
                if run.data.tags.get(name) != value:
                    self.client.set_tag(run.info.run_id, name, value)
        for runs in by_identity.values():
            for run in runs:
                tags = run.data.tags
                if (
                    run.info.run_id not in chosen
                    and tags["vitlab.kind"] != SUPERSEDED
                    and tags.get("vitlab.root") == self.root
                ):
                    self.client.set_tag(run.info.run_id, "vitlab.kind", SUPERSEDED)

    def verify(self, trials: Sequence[Shown]) -> None:
        """Compare points and artifacts of every run with what it was given, and have what is missing delivered again.

        Takes two requests or more for each run, where :meth:`settle` has none.
        """
        name = records.key(self.plan.analysis.metric)
        for item in trials:
            known = self.offsets.runs.get(item.identity)
            if known is None:
                continue
            if known.offset:
                expected = {
                    (point.t, point.step)
                    for event in self._delivered(item, known)
                    for point in records.points(event)
                    if point.name == name
                }
                if not expected <= {(p.timestamp, p.step) for p in self.client.get_metric_history(known.run, name)}:
                    began = known.began
                    known = self.offsets.runs[item.identity] = Delivered(known.run, status=known.status, began=began)
            if known.files >= 0 and _count(self.client, known.run) < max(1, known.artifacts):
                known.files = -1
                known.ended = ""  # a failure's text is delivered with its end

    def _delivered(self, item: Shown, known: Delivered) -> list[Event]:
        """Return the measurements of the journal's part that was delivered."""
        events, offset = self.folder(item).events()
        if offset != known.offset:  # it has grown, or is another; what is new is delivered anyway
            return []
        return [event for event in events if event.kind == "metrics"]

    def deliver(self, item: Shown, *, final: bool) -> None:
        """Bring one run up to its trial.

        Args:
            item: the trial.
            final: nothing will be trained any more: a trial that nobody holds was stopped, and files, which may be
                large, have time to reach a server too.
        """
        folder = self.folder(item)
        known = self.offsets.runs.get(item.identity)
        size = size_of(folder)
        files_now = final or self.local
        ended = known is not None and known.ended == RESULT and known.offset == size
        if known is not None and ended and (known.files == known.offset or not files_now):
            return
        began = began_at(folder)
        if known is not None and began and known.began not in (0, began):  # it was trained anew since settle
            self._supersede(known.run)
            del self.offsets.runs[item.identity]
            known = None
        result = folder.result()
        failure = folder.last_failure() if result is None else None
        if known is None and not size and result is None and failure is None:
            return
        if known is None:
            known = self._create(item, folder, result)
        if not known.described:
            self._describe(item, known)
        began_anew = self._journal(folder, known)
        end = RESULT if result is not None else _failed(failure, known)
        if end and end != known.ended:
            if result is not None:
                self._end_with_result(known, result)
            elif failure is not None:
                self._end_with_failure(known, failure)
            known.files = -1
        elif not end and began_anew and known.status != RUNNING:
            self.client.update_run(known.run, status=RUNNING)
            known.status = RUNNING
        elif not end and final and known.status == RUNNING and not folder.held():
            self.client.set_tag(known.run, "vitlab.status", "stopped")
            self._terminate(known, KILLED, known.last_t or None)
        known.ended = end
        if end and files_now and known.files != known.offset:  # the journal of an ended trial grows by explanations
            self._files(item, folder, known, result)
            known.artifacts = _count(self.client, known.run)
            service.forget()
            known.files = known.offset

    # -- how it is done -----------------------------------------------------------------------------------------------

    def folder(self, item: Shown) -> TrialFolder:
        """Where a trial lives."""
        return self.store.trial(item.planned.trial.key, item.planned.trial.code)

    def _tags(self, item: Shown) -> dict[str, str]:
        """The tags that follow from the plan."""
        arm = item.planned.arm
        colour = {"mlflow.runColor": self._colours[arm]} if arm in self._colours else {}
        return records.tags(self.plan, item.planned, item.kind) | colour

    def _create(self, item: Shown, folder: TrialFolder, result: Result | None) -> Delivered:
        began = began_at(folder)
        tags = {**self._tags(item), **self.source, "vitlab.began": str(began or ""), "vitlab.root": self.root}
        started = began or (int(result.circumstances.started * 1000) if result is not None else None)
        run = self.client.create_run(self.offsets.experiment, start_time=started, tags=tags, run_name=item.name)
        self.created = True
        self._runs[item.identity] = run
        for earlier in self._earlier.pop(item.identity, []):
            self._supersede(earlier)
        known = self.offsets.runs[item.identity] = Delivered(run.info.run_id, began=began)
        return known

    def _supersede(self, run: str) -> None:
        """Take a run of this output folder out of the study."""
        if self.client.get_run(run).data.tags.get("vitlab.root") == self.root:
            self.client.set_tag(run, "vitlab.kind", SUPERSEDED)

    def _is_of(self, run: Any, began: int, folder: TrialFolder) -> bool:
        """Return whether a run was filled from the journal that began then, or may be filled from it.

        A run that does not say which journal it is of, and one of a result whose journal was deleted, can only be told
        by the output folder.
        """
        tag = run.data.tags.get("vitlab.began", "")
        if began and tag:
            return bool(tag == str(began))
        return run.data.tags.get("vitlab.root") == self.root and (not tag or folder.done())

    def _describe(self, item: Shown, known: Delivered) -> None:
        """Parameters and the data set.  Parameters cannot be changed in MLflow, so only what is missing is sent."""
        from mlflow.entities import Dataset, DatasetInput, InputTag, Param

        run = self._runs.get(item.identity) or self.client.get_run(known.run)
        missing = [Param(name, value) for name, value in item.params.items() if name not in run.data.params]
        if missing:
            self.client.log_batch(known.run, params=missing)
        trial = item.planned.trial
        if trial.data is not None and not (run.inputs and run.inputs.dataset_inputs):
            data = trial.spec["data"]
            dataset = Dataset(
                name=str(data["type"]),
                digest=records.digest(trial.data),
                source_type="vitlab",
                source=json.dumps(dict(data), default=str),
            )
            self.client.log_inputs(known.run, [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])])
        began = began_at(self.folder(item))
        if began and not run.data.tags.get("vitlab.began"):
            self.client.set_tag(known.run, "vitlab.began", str(began))
            known.began = began
        known.described = bool(began)
        if known.described:
            self._runs.pop(item.identity, None)

    def _journal(self, folder: TrialFolder, known: Delivered) -> bool:
        """Deliver the journal from where it was left.  Returns whether the trial went on after it had ended."""
        events, offset = folder.events(known.offset)
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
        self._log(known, points, tags, params)
        known.offset = offset
        known.step = max([known.step, *(point.step for point in points)])
        known.last_kind, known.last_t = events[-1].kind, events[-1].t
        return any(event.kind != "end" for event in events)

    def _log(
        self, known: Delivered, points: Sequence[Point], tags: Mapping[str, str], params: Mapping[str, str] = {}
    ) -> None:
        from mlflow.entities import Metric, Param, RunTag

        self.client.log_batch(
            known.run,
            metrics=[Metric(point.name, point.value, point.t, point.step) for point in points],
            tags=[RunTag(name, value) for name, value in tags.items()],
            params=[Param(name, value) for name, value in params.items()],
        )
        self.offsets.saw({point.name for point in points})

    def _end_with_result(self, known: Delivered, result: Result) -> None:
        self._log(known, records.final_points(result, self.plan.analysis), records.result_tags(result))
        if result.failure:
            self.client.set_tag(known.run, "mlflow.note.content", result.failure)
        self._terminate(known, FINISHED if result.status == "done" else FAILED, _ended_at(result))

    def _end_with_failure(self, known: Delivered, failure: Failure) -> None:
        self.client.set_tag(known.run, "vitlab.status", "failed")
        self.client.set_tag(known.run, "mlflow.note.content", failure.failure)
        self.client.log_text(known.run, f"{failure.failure}\n\n{failure.traceback}", "failure.txt")
        self._terminate(known, FAILED, int(failure.time * 1000))

    def _terminate(self, known: Delivered, status: str, end_ms: int | None) -> None:
        self.client.set_terminated(known.run, status, end_time=end_ms)
        known.status = status

    def _files(self, item: Shown, folder: TrialFolder, known: Delivered, result: Result | None) -> None:
        """What the trial has left behind."""
        run = known.run
        self.client.log_dict(run, item.planned.trial.to_json(), "spec.json")
        if result is None:
            if (folder.path / "log.txt").exists():
                self.client.log_artifact(run, str(folder.path / "log.txt"))
            return
        self.client.log_text(run, records.history_csv(result), "history.csv")
        pictures = list(images.explained(folder.path))
        tables = read_stored(folder.predictions, records.confusion)
        if tables is not None:
            self.client.log_artifact(run, str(folder.predictions))
            for split, table in tables.items():
                self.client.log_text(run, table.to_csv(), f"confusion/{split}.csv")
                pictures.append(images.confusion(split, result.outcome.steps, table))
        if pictures:
            with tempfile.TemporaryDirectory() as place:
                self.offsets.saw_images(images.write(pictures, _ended_at(result), Path(place)))
                self.client.log_artifacts(run, place, images.FOLDER)
            self.client.set_tag(run, images.TAG, "True")
        if (folder.path / "explain").is_dir():
            self.client.log_artifacts(run, str(folder.path / "explain"), "explain")


def _holds_less(run: Any, known: Delivered) -> bool:
    """Return whether a run, as a search finds it, lacks some of what was delivered."""
    last = max((metric.step for metric in run.data.to_proto().metrics), default=-1)
    unfinished = known.ended == RESULT and not any(name.startswith("final/") for name in run.data.metrics)
    return last < known.step or unfinished or run.info.status != known.status


def _count(client: Any, run: str, folder: str | None = None) -> int:
    """Return how many artifacts a run has."""
    found = client.list_artifacts(run, folder)
    return sum(_count(client, run, item.path) if item.is_dir else 1 for item in found)


def _ended_at(result: Result) -> int:
    """Milliseconds since 1970."""
    return int(result.circumstances.ended * 1000)


def _failed(failure: Failure | None, known: Delivered) -> str:
    """Names the failure that ended the trial; empty where it has begun again since."""
    if failure is None:
        return ""
    went_on = known.last_kind not in ("", "end") and known.last_t > failure.time * 1000
    return "" if went_on else f"failure {failure.time}"
