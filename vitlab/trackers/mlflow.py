"""The MLflow tracker: a study is an experiment, its trials are runs side by side, and one run holds the study itself.

Everything is delivered by the driver, from the journals, and can be delivered again: see :mod:`vitlab.trackers.trials`.
Runs are not nested, because MLflow's comparison page is empty for children; they are grouped by the tag ``arm``.
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
from vitlab.trackers.models import Models, chosen
from vitlab.trackers.source import source_tags
from vitlab.trackers.tracked_trials import TUNING, shown
from vitlab.trackers.trials import FAILED, FINISHED, KILLED, RUNNING, TrialRuns

log = logging.getLogger(__name__)

ACCOUNT = "mlflow-offsets.json"  #: in the study's folder
PAUSES_S = (1.0, 2.0)  #: before the last delivery of all is tried again at a server that answers


@tracker.register("mlflow")
class MlflowTracker(Tracker):
    """An experiment of MLflow's: a database under the output folder, or ``run.tracking_uri``."""

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
        """
        Args:
            plan: the study.
            store: where its trials are.
            run: how they run.
            models: whether the trained model of every arm is stored as a model of MLflow's, too.
            model_seed: of this seed; by default each arm's first.

        Raises:
            UserError: for a URI that MLflow cannot deliver to, or models that nobody keeps.
        """
        super().__init__(plan, store, run)
        self.address = locate(run.tracking_uri, store.root)
        service.configure(self.address)
        self._trials = shown(plan)
        self._models = chosen(self._trials, model_seed) if models == "arms" else []
        if models == "arms" and run.keep == "none":
            raise UserError("run.tracker stores models, and run.keep is none: models that are stored must be kept")
        seeds = {item.planned.seed for item in self._trials if item.kind == "trial"}
        if models == "arms" and model_seed is not None and seeds and model_seed not in seeds:
            known = ", ".join(map(str, sorted(seeds)))
            raise UserError(f"run.tracker.model_seed is {model_seed}, which no trial has; seeds: {known}")
        self._next = 0  #: among the trials, where the next delivery begins
        self._root = f"{socket.gethostname()}:{store.root}"
        self._session: TrialRuns | None = None
        self._seen = b""  #: the offsets as this process left them
        self._viewed: Any = None  #: metrics and images that the saved views show

    def deliver(self, *, final: bool, until: float, report: Sequence[Path]) -> str:
        database = self.address.database
        pauses = [0.0] if database is not None else list(PAUSES_S) if final else []
        while True:
            try:
                if not self.address.awake():
                    raise ConnectionError(f"no answer from {self.address.said}")
                with service.quiet():
                    experiment = self._deliver(final=final, until=until, report=report)
                return comparison_link(self.address.links, experiment, dashboard.ARMS)
            except Exception:
                self._session = None
                again = self.address.awake() if database is None else not service.intact(database)
                if not pauses or not again:
                    raise
            time.sleep(pauses.pop(0))

    # -- one delivery -------------------------------------------------------------------------------------------------

    def _deliver(self, *, final: bool, until: float, report: Sequence[Path]) -> str:
        database = self.address.database
        if self._seen and database is not None and not service.intact(database):
            self._session = None
            if not service.foreign(database):  # else setting it aside says so
                log.warning("%s was deleted or emptied; a new database is filled from the trials.", database)
        if self._session is None or self._account() != self._seen:  # or another process has delivered since
            self._session = self._open()
            if final:  # nothing was delivered by this process: what others have is compared
                self._session.verify(self._trials)
        session = self._session
        trouble: Exception | None = None
        begin, count = self._next, len(self._trials)
        for place in range(begin, begin + count):  # from where the last one was left: no trial waits for ever
            if time.monotonic() > until:
                self._next = place % count
                break
            try:
                session.deliver(self._trials[place % count], final=final)
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
            self._beside(session, report)
        session.offsets.commit()
        self._seen = self._account()
        if trouble is not None:
            self.warn(trouble)
        return session.offsets.experiment

    def _open(self) -> TrialRuns:
        """Open a session."""
        client = service.open_client(self.address)
        name = self.plan.study
        first = {description.NOTE: records.note(self.plan)}  # until there is a report
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
        """Return the file of offsets as it is; empty where it cannot be read."""
        with suppress(OSError):
            return (self.folder / ACCOUNT).read_bytes()
        return b""

    # -- what stands beside the trials --------------------------------------------------------------------------------

    def _views(self, session: TrialRuns) -> None:
        """Saved views that show every metric and image there is by now."""
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
        """Parameters that the design varies, in its order; only those that are numbers, if asked.

        What belongs to a component is among them where arms of that component differ by it.
        """
        params = [item.params for item in self._trials if item.kind == "trial"]
        found: dict[str, None] = {}
        for path in map(records.key, self.plan.paths):
            for name in params[0] if params else ():
                if name != path and not name.startswith(f"{path}."):
                    continue
                values = {own[name] for own in params}
                differ = len(values if name == path else values - {records.ABSENT}) > 1
                if differ and not (numbers and not all(map(_is_number, values))):
                    found[name] = None
        return list(found)

    def _beside(self, session: TrialRuns, report: Sequence[Path]) -> None:
        """The run of the study, the experiment of summaries, the models, and the description that leads to them."""
        client, experiment = session.client, session.offsets.experiment
        run = self._study_run(session, report)
        summary = arms.judged(report, self.plan.analysis.metric)
        links = [
            description.link("arms", experiment, view=dashboard.ARMS),
            description.link("every trial", experiment, view=dashboard.TRIALS),
        ]
        if summary:
            others = arms.finals(self.plan, self.store, self._trials)
            there = arms.deliver(
                client,
                self.address,
                self._root,
                self.plan,
                summary=summary,
                others=others,
                varied=self._varied(),
            )
            links.append(description.link("arms with their intervals", there, view=dashboard.SUMMARY))
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
        """Arm and links to its runs."""
        found: dict[str, list[str]] = {}
        for item in self._trials:
            known = session.offsets.runs.get(item.identity)
            if item.kind == "trial" and known is not None:
                text = f"s{item.planned.seed}"
                found.setdefault(item.planned.arm, []).append(
                    description.link(text, session.offsets.experiment, known.run)
                )
        return list(found.items())

    def _stored_models(self, session: TrialRuns) -> dict[str, str]:
        """Arm to the id of its model, of those that are wanted and have been trained."""
        known = [(item, session.offsets.runs.get(item.identity)) for item in self._models]
        wanted = [(item, session.folder(item), there.run) for item, there in known if there is not None]
        if not wanted:
            return {}
        models = Models(session.client, session.offsets.experiment, self._root)
        return models.deliver(wanted, self.plan.analysis)

    def _study_run(self, session: TrialRuns, report: Sequence[Path]) -> str:
        """The run that holds the study file, the plan and the report."""
        client, experiment = session.client, session.offsets.experiment
        studies = client.search_runs([experiment], filter_string="tags.`vitlab.kind` = 'study'")
        found = [run for run in studies if run.data.tags.get("vitlab.root") == self._root]
        tags = {"vitlab.kind": "study", "vitlab.study": self.plan.study, "vitlab.root": self._root}
        tags |= {description.NOTE: records.note(self.plan)}
        if found:
            run = str(found[0].info.run_id)
            for name, value in tags.items():
                if found[0].data.tags.get(name) != value:
                    client.set_tag(run, name, value)
            for surplus in found[1:]:
                client.delete_run(surplus.info.run_id)
        else:
            run = str(
                client.create_run(
                    experiment, tags={**tags, **session.source}, run_name=f"study {self.plan.study}"
                ).info.run_id
            )
        for file in ("study.yaml", "plan.json"):
            if (self.folder / file).exists():  # its addresses may hold passwords, which are nobody's business here
                client.log_text(run, public((self.folder / file).read_text(encoding="utf-8")), file)
        for path in report:
            client.log_artifact(run, str(path), "report")
        with tempfile.TemporaryDirectory() as place:
            description.shrink([path for path in report if path.suffix == ".png"], Path(place))
            client.log_artifacts(run, place, description.SMALL)
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
        return run


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
