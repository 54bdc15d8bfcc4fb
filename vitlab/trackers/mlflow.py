"""The MLflow tracker: a study is an experiment, its trials are runs side by side, and one run holds the study itself.

Everything is delivered by the driver, from the journals, and can be delivered again: see :mod:`vitlab.trackers.trials`.
Runs are not nested, because MLflow's comparison page is empty for children; they are grouped by the tag ``arm``.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.plan.values import Arm, Plan
from vitlab.spec import RunSpec
from vitlab.store import Store
from vitlab.trackers import dashboard, records, service
from vitlab.trackers.address import comparison_link, locate
from vitlab.trackers.base import Tracker, tracker
from vitlab.trackers.offsets import Offsets
from vitlab.trackers.shown import TUNING, shown
from vitlab.trackers.source import source_tags
from vitlab.trackers.trials import FAILED, FINISHED, KILLED, RUNNING, TrialRuns


@tracker.register("mlflow")
class MlflowTracker(Tracker):
    """An experiment of MLflow's: a database under the output folder, or ``run.tracking_uri``."""

    title = "MLflow"

    def __init__(self, plan: Plan, store: Store, run: RunSpec) -> None:
        """
        Raises:
            UserError: for a URI that MLflow cannot deliver to.
        """
        super().__init__(plan, store, run)
        self.address = locate(run.tracking_uri, store.root)
        self._trials = shown(plan)
        self._root = f"{socket.gethostname()}:{store.root}"
        self._session: TrialRuns | None = None
        self._seen = b""  #: the offsets as this process left them
        self._viewed: list[str] = []  #: metrics that the saved views show

    def deliver(self, *, final: bool, until: float, report: Sequence[Path]) -> str:
        try:
            if not self.address.awake():
                raise ConnectionError(f"no answer from {self.address.links}")
            with service.quiet(patient=final):
                experiment = self._deliver(final=final, until=until, report=report)
        except Exception:
            self._session = None
            raise
        return comparison_link(self.address.links, experiment, dashboard.ARMS)

    # -- one delivery -------------------------------------------------------------------------------------------------

    def _deliver(self, *, final: bool, until: float, report: Sequence[Path]) -> str:
        session = self._open()
        trouble: Exception | None = None
        for item in self._trials:
            if time.monotonic() > until:
                break
            try:
                session.deliver(item, final=final)
            except Exception as error:  # one trial's trouble, such as a file that cannot be read, keeps back no other
                trouble = trouble or error
                if not self.address.awake():
                    break
        session.offsets.commit()
        if trouble is not None and (not final or not self.address.awake()):
            raise trouble
        if final and session.created and self.address.artifacts is None:
            session.settle(service.runs(session.client, session.offsets.experiment), self._trials)
        self._views(session)
        if final:
            self._study_run(session, report)
            self._arms(session)
        session.offsets.commit()
        self._seen = session.offsets.file.read_bytes()
        if trouble is not None:
            self.warn(trouble)
        return session.offsets.experiment

    def _open(self) -> TrialRuns:
        """The session, opened anew where another process has delivered since."""
        file = self.folder / "mlflow-offsets.json"
        if self._session is not None and file.exists() and file.read_bytes() == self._seen:
            return self._session
        client = service.open_client(self.address)
        tags = {"mlflow.note.content": records.note(self.plan), "vitlab.study": self.plan.study}
        name = self.plan.study
        experiment = service.experiment(client, name, self.address, f"{name}/trials", tags)
        offsets = self._offsets()
        if offsets.experiment != experiment:
            offsets = Offsets(offsets.file, offsets.address, experiment)
        source = source_tags(self.folder / "study.yaml", Path.cwd())
        session = TrialRuns(
            client,
            offsets,
            self.plan,
            self.store,
            keep=self.run.keep,
            local=self.address.artifacts is not None,
            root=self._root,
            source=source,
        )
        session.settle(service.runs(client, experiment), self._trials)
        self._viewed = []
        self._session = session
        return session

    def _offsets(self) -> Offsets:
        return Offsets.read(self.folder / "mlflow-offsets.json", self.address.name)

    # -- what stands beside the trials --------------------------------------------------------------------------------

    def _views(self, session: TrialRuns) -> None:
        """Saved views that show every metric there is by now."""
        metrics = session.offsets.metrics
        if metrics == self._viewed:
            return
        arms = list(dict.fromkeys(item.planned.arm for item in self._trials if item.kind == "trial"))
        headline = self.plan.analysis.metric
        charts = dashboard.sections(metrics, headline)
        finals = [name for _, names, _ in charts for name in names if name.startswith("final/")]
        columns = [*(f"metrics.`{name}`" for name in finals[:5]), "tags.`arm`", "tags.`seed`"]
        views = {
            dashboard.ARMS: ("Arms, as means over seeds", arms),
            dashboard.TRIALS: ("Every trial", []),
        }
        states = {
            view: (name, dashboard.comparison(charts, columns=columns, kind="trial", arms=groups))
            for view, (name, groups) in views.items()
        }
        _save(session.client, session.offsets.experiment, states)
        self._viewed = list(metrics)

    def _study_run(self, session: TrialRuns, report: Sequence[Path]) -> None:
        """The run that holds the study file, the plan and the report."""
        client, experiment = session.client, session.offsets.experiment
        studies = client.search_runs([experiment], filter_string="tags.`vitlab.kind` = 'study'")
        found = [run for run in studies if run.data.tags.get("vitlab.root") == self._root]
        tags = {"vitlab.kind": "study", "vitlab.study": self.plan.study, "vitlab.root": self._root}
        tags |= {"mlflow.note.content": records.note(self.plan)}
        if found:
            run = found[0].info.run_id
            for surplus in found[1:]:
                client.delete_run(surplus.info.run_id)
        else:
            tags |= session.source
            run = client.create_run(experiment, tags=tags, run_name=f"study {self.plan.study}").info.run_id
        for file in ("study.yaml", "plan.json"):
            if (self.folder / file).exists():
                client.log_artifact(run, str(self.folder / file))
        for path in report:
            client.log_artifact(run, str(path), "report")
        statuses = {
            known.status if known is not None else ""
            for item in self._trials
            if item.kind != TUNING  # a rival may well diverge
            for known in [session.offsets.runs.get(item.identity)]
        }
        if FAILED in statuses:
            status = FAILED
        elif statuses <= {FINISHED}:
            status = FINISHED
        else:
            status = RUNNING if RUNNING in statuses else KILLED
        if status == RUNNING:
            client.update_run(run, status=RUNNING)
        else:
            client.set_terminated(run, status)

    def _arms(self, session: TrialRuns) -> None:
        """Mean, standard deviation and interval of every arm, in an experiment of their own.

        A run that holds other numbers than those of now is replaced: MLflow would keep the old ones beside the new.
        """
        values = self._values()
        if not values:
            return
        client, name = session.client, f"{self.plan.study}/arms"
        tags = {"vitlab.study": self.plan.study}
        tags["mlflow.note.content"] = (
            f"Arms of {self.plan.study} over their seeds: mean, standard deviation (sd), and the "
            f"{1 - self.plan.analysis.alpha:.0%} t-interval of the mean (low, high) over n seeds."
        )
        experiment = service.experiment(client, name, self.address, name, tags)
        mine = [run for run in service.runs(client, experiment) if run.data.tags.get("vitlab.root") == self._root]
        there: dict[str, Any] = {}
        for run in mine:
            arm = run.data.tags.get("arm", "")
            if arm in there or arm not in values:
                client.delete_run(run.info.run_id)
            else:
                there[arm] = run
        colours = records.colours(self.plan)
        names: set[str] = set()
        for arm in self.plan.arms:
            if arm.name not in values:
                continue
            points = records.arm_points(values[arm.name], self.plan.analysis.alpha)
            names |= set(points)
            tags = {"arm": arm.name, "vitlab.kind": "arm", "vitlab.study": self.plan.study, "vitlab.root": self._root}
            tags |= {"mlflow.runColor": colours[arm.name], dashboard.ORDER: records.order(self.plan, arm.name)}
            run = there.get(arm.name)
            if run is not None:
                same = run.data.metrics == points and tags.items() <= run.data.tags.items()
                if same and run.info.status == FINISHED:
                    continue
                client.delete_run(run.info.run_id)
            self._arm_run(client, experiment, arm, points, tags)
        headline = self.plan.analysis.metric
        charts = dashboard.summary_sections(names, headline)
        columns = [f"metrics.`{what}/{headline}`" for what in ("mean", "sd", "low", "high", "n")]
        state = dashboard.comparison(charts, columns=columns, kind="arm")
        _save(client, experiment, {dashboard.SUMMARY: ("Arms with their intervals", state)})

    def _arm_run(
        self, client: Any, experiment: str, arm: Arm, points: Mapping[str, float], tags: Mapping[str, str]
    ) -> None:
        from mlflow.entities import Metric, Param

        run = client.create_run(experiment, tags=dict(tags), run_name=arm.name).info.run_id
        now = int(time.time() * 1000)
        params = [Param("arm", arm.name), *(Param(key, text) for key, text in records.flat(arm.values).items())]
        client.log_batch(run, metrics=[Metric(name, value, now, 0) for name, value in points.items()], params=params)
        client.set_terminated(run, FINISHED)

    def _values(self) -> dict[str, dict[str, list[float]]]:
        """Arm to metric to the values of its seeds, of the trials that are done; each trial counts once."""
        values: dict[str, dict[str, list[float]]] = {}
        for item in self._trials:
            trial = item.planned.trial
            folder = self.store.trial(trial.key, trial.code)
            result = folder.result() if item.kind == "trial" and folder.done() else None
            if result is None or result.status != "done":
                continue
            finals = records.final_points(result, self.plan.analysis)
            for name, value, _, _ in finals:
                group, _, metric = name.partition("/")
                if group in ("final", "best"):
                    metric = metric if group == "final" else f"{metric} best"
                    values.setdefault(item.planned.arm, {}).setdefault(metric, []).append(value)
        return values


def _save(client: Any, experiment: str, states: Mapping[str, tuple[str, Mapping[str, Any]]]) -> None:
    """Write views that are not there yet, or are not the same."""
    there = client.get_experiment(experiment)
    for view, (name, state) in states.items():
        value = dashboard.envelope(name, state, there.creation_time or 0)
        tag = dashboard.tag(view)
        if there.tags.get(tag) != value and len(value) <= dashboard.LIMIT:
            client.set_experiment_tag(experiment, tag, value)
