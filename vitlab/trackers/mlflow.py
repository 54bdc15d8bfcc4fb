"""MLflow tracker: a study is an experiment with one run per trial and one run for the study itself.

The driver delivers everything from the journals and can repeat a delivery: see :mod:`vitlab.trackers.trials`.  Runs are
not nested, because MLflow's comparison page is empty for children; they are grouped by the tag ``arm``.
"""

from __future__ import annotations

import logging
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from vitlab.errors import UserError
from vitlab.plan.values import Plan
from vitlab.spec import RunSpec
from vitlab.store.folders import Store
from vitlab.trackers import arms, dashboard, description, records, service
from vitlab.trackers.address import comparison_link, locate, public
from vitlab.trackers.base import Tracker, tracker
from vitlab.trackers.cursor import Offsets
from vitlab.trackers.models import Models, select_trials
from vitlab.trackers.source import source_tags
from vitlab.trackers.tracked_trials import TUNING, tracked_trials
from vitlab.trackers.trials import FAILED, FINISHED, KILLED, RUNNING, TrialRuns

log = logging.getLogger(__name__)

ACCOUNT = "mlflow-offsets.json"  #: in the study's folder
PAUSES_S = (1.0, 2.0)  #: before retries of the final delivery to a reachable server


@tracker.register("mlflow")
class MlflowTracker(Tracker):
    """MLflow experiment in a database under the output folder, or at ``run.tracking_uri``.

    Args:
        plan: the study.
        store: the store of its trials.
        run: the run settings.
        models: ``arms`` to store one trained model per arm as an MLflow logged model as well.
        model_seed: seed of the stored models; by default each arm's first.

    Raises:
        UserError: if MLflow does not support the URI, or the models to store are not kept.
    """

    title = "MLflow"

    def __init__(
        self,
        plan: Plan,
        store: Store,
        run: RunSpec,
        *,
        models: Literal["none", "arms"] = "none",
        model_seed: Annotated[int, Field(ge=0)] | None = None,
    ) -> None:
        super().__init__(plan, store, run)
        self.address = locate(run.tracking_uri, store.root)
        self._trials = tracked_trials(plan)
        self._models = select_trials(self._trials, model_seed) if models == "arms" else []
        if models == "arms" and run.keep == "none":
            raise UserError("run.tracker stores models, and run.keep is none: models that are stored must be kept")
        seeds = {item.planned.seed for item in self._trials if item.kind == "trial"}
        if models == "arms" and model_seed is not None and seeds and model_seed not in seeds:
            allowed = ", ".join(map(str, sorted(seeds)))
            raise UserError(f"run.tracker.model_seed is {model_seed}, which no trial has; seeds: {allowed}")
        self._next = 0  #: index of the trial at which the next delivery begins
        self._root = f"{socket.gethostname()}:{store.root}"
        self._session: TrialRuns | None = None
        self._committed = b""  #: the offsets file as last written by this process
        self._viewed: Any = None  #: metrics and images in the saved views
        self._verifies = False  #: True if all runs are compared with the journals
        service.configure(self.address)

    def close(self, report: Sequence[Path] = ()) -> str | None:
        """Deliver the rest with MLflow's settings in place, then restore them."""
        service.configure(self.address)
        try:
            return super().close(report)
        finally:
            service.restore()

    def sync(self, report: Sequence[Path] = ()) -> str | None:
        """Deliver everything again and verify what the server has."""
        self._verifies = True
        return self.close(report)

    def deliver(self, *, final: bool, until: float, report: Sequence[Path]) -> str:
        """Deliver new values; on the last delivery try a server again after pauses."""
        database = self.address.database
        pauses = [0.0] if database is not None else list(PAUSES_S) if final else []
        while True:
            try:
                if not self.address.is_reachable():
                    raise ConnectionError(f"no answer from {self.address.public_uri}")
                with service.quiet():
                    experiment = self._deliver(final=final, until=until, report=report)
                return comparison_link(self.address.links, experiment, dashboard.ARMS)
            except Exception:
                self._session = None
                retry = self.address.is_reachable() if database is None else not service.intact(database)
                if not pauses or not retry:
                    raise
            time.sleep(pauses.pop(0))

    # -- trials -------------------------------------------------------------------------------------------------------

    def _deliver(self, *, final: bool, until: float, report: Sequence[Path]) -> str:
        database = self.address.database
        if self._committed and database is not None and not service.intact(database):
            self._session = None
            if not service.foreign(database):  # otherwise setting it aside logs a warning
                log.warning("%s was deleted or emptied; a new database is filled from the trials.", database)
        if self._session is None or self._account() != self._committed:  # or another process has delivered since
            self._session = self._open()
            if final and (self._verifies or self._session.lost):
                self._session.verify(self._trials)
        session = self._session
        first_error: Exception | None = None
        begin, count = self._next, len(self._trials)
        for place in range(begin, begin + count):  # continues after the last delivery, so that no trial waits forever
            if time.monotonic() > until:
                self._next = place % count
                break
            try:
                session.deliver(self._trials[place % count], final=final)
            except Exception as error:  # an error of one trial, such as an unreadable file, delays no other
                first_error = first_error or error
                if not self.address.is_reachable():
                    break
        session.offsets.commit()
        if first_error is not None and (not final or not self.address.is_reachable()):
            raise first_error
        if final and session.created and self.address.artifacts is None:
            session.settle(service.runs(session.client, session.offsets.experiment), self._trials)
        self._views(session)
        if final:
            self._deliver_study(session, report)
        session.offsets.commit()
        self._committed = self._account()
        if first_error is not None:
            self.warn(first_error)
        return session.offsets.experiment

    def _open(self) -> TrialRuns:
        """Open a session."""
        client = service.open_client(self.address)
        name = self.plan.study
        first = {description.NOTE: records.note(self.plan)}  # the description until there is a report
        tags = {"vitlab.study": name}
        experiment = service.experiment(client, name, self.address, f"{name}/trials", tags, first)
        offsets = self._offsets()
        if offsets.experiment != experiment:
            offsets = Offsets(offsets.file, offsets.address, experiment)
        source = source_tags(self.folder / "study.yaml", Path.cwd())
        session = TrialRuns(
            client,
            offsets,
            self.plan,
            self.store,
            local=self.address.artifacts is not None,
            root=self._root,
            source=source,
        )
        session.settle(service.runs(client, experiment), self._trials)
        self._viewed = None
        return session

    def _offsets(self) -> Offsets:
        return Offsets.read(self.folder / ACCOUNT, self.address.name)

    def _account(self) -> bytes:
        """Return the content of the offsets file; empty if it cannot be read."""
        with suppress(OSError):
            return (self.folder / ACCOUNT).read_bytes()
        return b""

    # -- study --------------------------------------------------------------------------------------------------------

    def _views(self, session: TrialRuns) -> None:
        """Save views of all metrics and images delivered so far."""
        metrics, images = session.offsets.metrics, session.offsets.images
        if (metrics, images) == self._viewed:
            return
        of_arms = list(dict.fromkeys(item.planned.arm for item in self._trials if item.kind == "trial"))
        headline = self.plan.analysis.metric
        charts = dashboard.sections(metrics, headline)
        finals = [name for _, names, _ in charts for name in names if name.startswith("final/")]
        columns = [*(f"metrics.`{name}`" for name in finals[:5]), "tags.`arm`", "tags.`seed`"]
        axes = dashboard.axes(self._varied(), metrics, headline)
        numbers = dashboard.axes(self._varied(numbers=True), metrics, headline)
        views = {
            dashboard.ARMS: (
                "Arms, as means over seeds",
                dashboard.comparison(charts, columns=columns, kind="trial", arms=of_arms, parallel=numbers),
            ),
            dashboard.TRIALS: (
                "Every trial",
                dashboard.comparison(charts, columns=columns, kind="trial", parallel=axes, images=images),
            ),
        }
        dashboard.save(session.client, session.offsets.experiment, views)
        self._viewed = (list(metrics), dict(images))

    def _varied(self, *, numbers: bool = False) -> list[str]:
        """Return the parameters that the design varies, in its order; with ``numbers``, only numeric ones.

        A component's option is included if arms with that component differ in it.
        """
        params = [item.params for item in self._trials if item.kind == "trial"]
        names: dict[str, None] = {}
        for path in map(records.key, self.plan.paths):
            for name in params[0] if params else ():
                if name != path and not name.startswith(f"{path}."):
                    continue
                values = {item_params[name] for item_params in params}
                differ = len(values if name == path else values - {records.ABSENT}) > 1
                if differ and not (numbers and not all(map(_is_number, values))):
                    names[name] = None
        return list(names)

    def _deliver_study(self, session: TrialRuns, report: Sequence[Path]) -> None:
        """Deliver the study's run, the experiment of summaries, the models, and the description that links to them."""
        client, experiment = session.client, session.offsets.experiment
        run = self._study_run(session, report)
        summary = arms.report_points(report, self.plan.analysis.metric)
        links = [
            description.link("arms", experiment, view=dashboard.ARMS),
            description.link("every trial", experiment, view=dashboard.TRIALS),
        ]
        if summary:
            others = arms.finals(self.plan, self.store, self._trials)
            summary_experiment = arms.deliver(
                client,
                self.address,
                self._root,
                self.plan,
                summary=summary,
                others=others,
                varied=self._varied(),
            )
            links.append(description.link("arms with their intervals", summary_experiment, view=dashboard.SUMMARY))
        links += [
            description.link(path.name, experiment, run, f"report/{path.name}")
            for path in report
            if path.suffix in (".html", ".csv", ".tex")
        ]
        links.append(description.link("study file and plan", experiment, run, "study.yaml"))
        for arm, model in self._stored_models(session).items():
            links.append(
                f"[model of {description.plain(arm)}](#/experiments/{experiment}/models/{model}{description.TRAINING})"
            )
        text = next((path.read_text(encoding="utf-8") for path in report if path.name == "report.md"), None)
        if text is not None:
            text = description.describe(text, links, self._linked(session), run)
            if client.get_experiment(experiment).tags.get(description.NOTE) != description.short(text, dashboard.LIMIT):
                description.set_note(client, experiment, text)

    def _linked(self, session: TrialRuns) -> list[tuple[str, list[str]]]:
        """Return the arms and links to their runs."""
        links: dict[str, list[str]] = {}
        for item in self._trials:
            state = session.offsets.runs.get(item.identity)
            if item.kind == "trial" and state is not None:
                text = f"s{item.planned.seed}"
                links.setdefault(item.planned.arm, []).append(
                    description.link(text, session.offsets.experiment, state.run)
                )
        return list(links.items())

    def _stored_models(self, session: TrialRuns) -> dict[str, str]:
        """Return the model id of each arm whose model is requested and trained."""
        candidates = [(item, session.offsets.runs.get(item.identity)) for item in self._models]
        selected = [(item, session.folder(item), state.run) for item, state in candidates if state is not None]
        if not selected:
            return {}
        models = Models(session.client, session.offsets.experiment, self._root)
        return models.deliver(selected, self.plan.analysis)

    def _study_run(self, session: TrialRuns, report: Sequence[Path]) -> str:
        """Create or update the run that holds the study file, the plan and the report, and return its id."""
        client, experiment = session.client, session.offsets.experiment
        studies = client.search_runs([experiment], filter_string="tags.`vitlab.kind` = 'study'")
        existing = [run for run in studies if run.data.tags.get("vitlab.root") == self._root]
        tags = {"vitlab.kind": "study", "vitlab.study": self.plan.study, "vitlab.root": self._root}
        tags |= {description.NOTE: records.note(self.plan)}
        if existing:
            run = str(existing[0].info.run_id)
            for name, value in tags.items():
                if existing[0].data.tags.get(name) != value:
                    client.set_tag(run, name, value)
            for surplus in existing[1:]:
                client.delete_run(surplus.info.run_id)
        else:
            run = str(
                client.create_run(
                    experiment, tags={**tags, **session.source}, run_name=f"study {self.plan.study}"
                ).info.run_id
            )
        for file in ("study.yaml", "plan.json"):
            if (self.folder / file).exists():  # their addresses may hold passwords, which are masked
                client.log_text(run, public((self.folder / file).read_text(encoding="utf-8")), file)
        for path in report:
            client.log_artifact(run, str(path), "report")
        with tempfile.TemporaryDirectory() as place:
            description.shrink([path for path in report if path.suffix == ".png"], Path(place))
            client.log_artifacts(run, place, description.SMALL)
        statuses = {
            state.status if state is not None else ""
            for item in self._trials
            if item.kind != TUNING  # a tuning candidate may diverge
            for state in [session.offsets.runs.get(item.identity)]
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
        return run


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
