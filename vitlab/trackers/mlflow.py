"""MLflow tracker: a study is an experiment with one run per trial and one run for the study itself.

The driver delivers everything from the journals and can repeat a delivery: see :mod:`vitlab.trackers.trials`.  Runs are
not nested, because MLflow's comparison page is empty for children; they are grouped by the tag ``arm``.
"""

from __future__ import annotations

import getpass
import logging
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from vitlab.errors import UserError
from vitlab.plan.values import Plan
from vitlab.plan.versions import commit_of, rev_parse
from vitlab.spec import RunSpec
from vitlab.spec.changes import public
from vitlab.store.folders import Store
from vitlab.trackers import arms, dashboard, description, process, records, service
from vitlab.trackers.address import comparison_link, locate, unconfirmed
from vitlab.trackers.base import tracker
from vitlab.trackers.models import Models, select_trials
from vitlab.trackers.replay import TUNING, Cursor, Replay, TrackedTrial, TrialUpdate, Unreachable
from vitlab.trackers.trials import FAILED, FINISHED, KILLED, RUNNING, RunMark, TrialRuns

log = logging.getLogger(__name__)

PAUSES_S = (1.0, 2.0)  #: before retries of the final delivery to a reachable server


@tracker.register("mlflow")
class MlflowTracker(Replay):
    """MLflow experiment in a database under the output folder, or at ``uri``.

    Args:
        plan: the study.
        store: the store of its trials.
        run: the run settings.
        uri: a server or database; by default that of ``MLFLOW_TRACKING_URI``, or a database under the output
            folder.  A server on another machine, or one to which MLflow would send credentials, must be named by
            ``--tracking-uri`` or ``MLFLOW_TRACKING_URI``.
        models: ``arms`` to store one trained model per arm as an MLflow logged model as well.
        model_seed: seed of the stored models; by default each arm's first.

    Raises:
        UserError: if MLflow does not support the URI, or the models to store are not kept.
    """

    title = "MLflow"
    in_files = False

    def __init__(
        self,
        plan: Plan,
        store: Store,
        run: RunSpec,
        *,
        uri: str | None = None,
        models: Literal["none", "arms"] = "none",
        model_seed: Annotated[int, Field(ge=0)] | None = None,
    ) -> None:
        super().__init__(plan, store, run)
        self.address = locate(uri, store.root)
        self._models = select_trials(self.trials, model_seed) if models == "arms" else []
        if models == "arms" and run.keep == "none":
            raise UserError("run.tracker.models: run.keep is none, and only kept models are stored. Write keep: last.")
        seeds = {item.planned.seed for item in self.trials if item.kind == "trial"}
        if models == "arms" and model_seed is not None and seeds and model_seed not in seeds:
            allowed = ", ".join(map(str, sorted(seeds)))
            raise UserError(f"run.tracker.model_seed: no trial has seed {model_seed}; allowed: {allowed}.")
        self._root = f"{socket.gethostname()}:{store.root}"
        self._runs: TrialRuns | None = None
        self._marks: dict[str, RunMark] = {}  #: by identity of the trial
        self._viewed: Any = None  #: metrics and images in the saved views
        self._final = self._verifies = False  #: whether this is the last delivery, and whether it checks every run
        service.configure(self.address)

    @classmethod
    def prepare(cls) -> None:
        """Start a process that imports MLflow and delivers beside the driver."""
        process.start()

    @classmethod
    def unconfirmed(cls, option: str, value: Any, root: Path) -> str:
        """Return why ``uri`` must be confirmed; empty if not, and for other options."""
        return unconfirmed(value, root) if option == "uri" and isinstance(value, str) else ""

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

    def start_command(self) -> str:
        """Return ``vitlab ui`` for the database in the output folder; empty for a server."""
        return "vitlab ui" if self.address.embedded else ""

    def place(self) -> str:
        """Return the unique name of the destination, by which deliveries are recorded."""
        return self.address.name

    def deliver(self, *, final: bool, until: float, report: Sequence[Path]) -> str | None:
        """Deliver what is new, with retries where the destination was lost meanwhile."""
        database, self._final = self.address.database, final
        pauses = [0.0] if database is not None else list(PAUSES_S) if final else []
        while True:
            try:
                if not self.address.is_reachable():
                    raise Unreachable(f"no answer from {self.address.public_uri}")
                with service.quiet():
                    link = super().deliver(final=final, until=until, report=report)
                    if self._runs is not None:
                        self._save_views(self._runs)
                return link
            except Exception:
                self._runs = None
                retry = self.address.is_reachable() if database is None else not service.intact(database)
                if not pauses or not retry:
                    raise
            time.sleep(pauses.pop(0))

    # -- trials -------------------------------------------------------------------------------------------------------

    def begin(self, marks: Mapping[str, Cursor]) -> None:
        """Open the experiment and match its runs with the trials, unless nothing else has delivered since."""
        database = self.address.database
        if self._marks and database is not None and not service.intact(database):
            self._runs = None
            if not service.foreign(database):  # otherwise setting it aside logs a warning
                log.warning("%s was deleted or emptied; a new database is filled from the trials.", database)
        parsed = {identity: mark for identity, value in marks.items() if (mark := RunMark.of(value)) is not None}
        if self._runs is not None and parsed == self._marks:
            return
        self._marks, self._viewed = parsed, None
        client, name = service.open_client(self.address), self.plan.study
        first = {description.NOTE: records.note(self.plan)}  # the description until there is a report
        tags = {"vitlab.study": name}
        experiment = service.experiment(client, name, self.address, f"{name}/trials", tags, first)
        source = _source_tags(self.folder / "study.yaml", Path.cwd())
        runs = TrialRuns(client, experiment, self.plan, self.store, root=self._root, source=source)
        runs.settle(service.runs(client, experiment), self.trials, parsed)
        if self._final and (self._verifies or runs.lost):
            runs.verify(parsed.values())
        self._runs = runs

    def holds(self, mark: Cursor) -> bool:
        """Return True if the run of a trial has what was delivered."""
        parsed = RunMark.of(mark)
        return parsed is not None and self._session.is_intact(parsed)

    def write(self, news: TrialUpdate, mark: Cursor | None) -> Cursor:
        """Deliver the new events of a trial to its run."""
        try:
            written = self._session.write(news, None if mark is None else RunMark.of(mark))
        except Exception as error:
            if not self.address.is_reachable():
                raise Unreachable(str(error)) from error
            raise
        self._marks[news.item.identity] = written
        return written.to_json()

    def drop(self, mark: Cursor) -> None:
        """Mark the run of a trial that was retrained as superseded; those of other trials are when runs are matched."""
        parsed = RunMark.of(mark)
        if parsed is not None:
            if self._session.is_intact(parsed):
                self._session.supersede(parsed.run)
            self._marks = {identity: other for identity, other in self._marks.items() if other.run != parsed.run}

    def finish(self, report: Sequence[Path]) -> str:
        """Deliver the study's run, summaries, models and description."""
        runs = self._session
        if runs.created and self.address.artifacts is None:  # a response to a server's ``create_run`` may be lost
            runs.settle(service.runs(runs.client, runs.experiment), self.trials, self._marks)
        self._save_views(runs)
        self._deliver_study(runs, report)
        return comparison_link(self.address.links, runs.experiment, dashboard.ARMS)

    @property
    def _session(self) -> TrialRuns:
        """The open experiment."""
        assert self._runs is not None
        return self._runs

    def _mark_of(self, item: TrackedTrial) -> RunMark | None:
        """Return the mark of a trial whose run is in MLflow."""
        mark = self._marks.get(item.identity)
        return mark if mark is not None and self._session.is_intact(mark) else None

    # -- study --------------------------------------------------------------------------------------------------------

    def _save_views(self, session: TrialRuns) -> None:
        """Save views of all metrics and images delivered so far."""
        metrics, images = sorted(session.metrics), dict[str, int]()
        for mark in self._marks.values():
            images |= {key: min(step, images.get(key, step)) for key, step in mark.images.items()}
        if (metrics, images) == self._viewed:
            return
        of_arms = list(dict.fromkeys(item.planned.arm for item in self.trials if item.kind == "trial"))
        headline = self.plan.analysis.metric
        charts = dashboard.sections(metrics, headline)
        finals = [name for _, names, _ in charts for name in names if name.startswith("final/")]
        columns = [*(f"metrics.`{name}`" for name in finals[:5]), "tags.`arm`", "tags.`seed`"]
        axes = dashboard.axes(self._design_params(), metrics, headline)
        numbers = dashboard.axes(self._design_params(numbers=True), metrics, headline)
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
        dashboard.save(session.client, session.experiment, views)
        self._viewed = (metrics, images)

    def _design_params(self, *, numbers: bool = False) -> list[str]:
        """Return the parameters that the design varies, in its order; with ``numbers``, only numeric ones.

        A component's option is included if arms with that component differ in it.
        """
        params = [item.params for item in self.trials if item.kind == "trial"]
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
        client, experiment = session.client, session.experiment
        run = self._study_run(session, report)
        summary = arms.report_points(report, self.plan.analysis.metric)
        links = [
            description.link("arms", experiment, view=dashboard.ARMS),
            description.link("every trial", experiment, view=dashboard.TRIALS),
        ]
        if summary:
            others = arms.finals(self.plan, self.store, self.trials)
            summary_experiment = arms.deliver(
                client,
                self.address,
                self._root,
                self.plan,
                summary=summary,
                others=others,
                varied=self._design_params(),
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
        for item in self.trials:
            state = self._mark_of(item)
            if item.kind == "trial" and state is not None:
                text = f"s{item.planned.seed}"
                links.setdefault(item.planned.arm, []).append(description.link(text, session.experiment, state.run))
        return list(links.items())

    def _stored_models(self, session: TrialRuns) -> dict[str, str]:
        """Return the model id of each arm whose model is requested and trained."""
        candidates = [(item, self._mark_of(item)) for item in self._models]
        selected = [(item, session.folder(item), state.run) for item, state in candidates if state is not None]
        if not selected:
            return {}
        models = Models(session.client, session.experiment, self._root)
        return models.deliver(selected, self.plan.analysis)

    def _study_run(self, session: TrialRuns, report: Sequence[Path]) -> str:
        """Create or update the run that holds the study file, the plan and the report, and return its id."""
        client, experiment = session.client, session.experiment
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
            for item in self.trials
            if item.kind != TUNING  # a tuning candidate may diverge
            for state in [self._mark_of(item)]
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


def _source_tags(study_file: Path, folder: Path) -> dict[str, str]:
    """Return MLflow's tags for the user, the study file and the git repository of ``folder``, if any."""
    tags = {"mlflow.source.name": str(study_file), "mlflow.source.type": "LOCAL"}
    with suppress(OSError, KeyError):  # a container may run under an id that has no name
        tags["mlflow.user"] = getpass.getuser()
    if commit := commit_of(folder):
        branch = rev_parse(folder, "--abbrev-ref", "HEAD")
        tags |= {"mlflow.source.git.commit": commit} | ({"mlflow.source.git.branch": branch} if branch else {})
    return tags
