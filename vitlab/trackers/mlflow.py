"""MLflow tracker: a study is an experiment with one run per trial and one run for the study itself.

The driver delivers everything from the journals and can repeat a delivery: see :mod:`vitlab.trackers.trials`.  Runs are
not nested, because MLflow's comparison page is empty for children; they are grouped by the tag ``arm``.
"""

import getpass
import logging
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from vitlab.errors import UserError, format_count, public
from vitlab.planning.values import Plan
from vitlab.report.phrasing import Scale
from vitlab.spec import RunSpec
from vitlab.store.files import read_json, require_mapping
from vitlab.store.folders import Store
from vitlab.trackers import arms, dashboard, delivery, files_within, records, service, tracker
from vitlab.trackers.replay import TUNING, Cursor, Replay, TrackedTrial, TrialUpdate, Unreachable
from vitlab.trackers.service import parse_uri, reason_to_confirm
from vitlab.trackers.trials import FAILED, FINISHED, RUNNING, SCHEDULED, RunMark, TrialRuns, count_files, send_files

log = logging.getLogger(__name__)

NO_REPORT = "No report yet"
"""In the place of an answer."""


@tracker.register("mlflow")
class MlflowTracker(Replay):
    """MLflow experiment in a database under the output folder, or at ``uri``.

    Args:
        plan: the study.
        store: the store of its trials.
        run: the run settings.
        uri: a server or database; by default ``MLFLOW_TRACKING_URI``, or a database under the output
            folder.  A server must be named by ``--tracking-uri`` or ``MLFLOW_TRACKING_URI``.
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
        uri: str | None = None,
        models: Literal["none", "arms"] = "none",
        model_seed: Annotated[int, Field(ge=0)] | None = None,
    ) -> None:
        super().__init__(plan, store, run)
        self.address = parse_uri(uri, store.root)
        self._models: list[TrackedTrial] = []
        if models == "arms":
            if run.keep.which == "none":
                raise UserError(
                    "run.tracker.models: run.keep is none, and only kept models are stored. Write keep: last."
                )
            self._models = arms.one_trial_per_arm(self.trials, model_seed)
            if model_seed is not None and plan.trials and not self._models:
                allowed = ", ".join(map(str, sorted({planned.seed for planned in plan.trials})))
                raise UserError(f"run.tracker.model_seed: no trial has seed {model_seed}; allowed: {allowed}.")
        self._root = f"{socket.gethostname()}:{store.root}"
        self._runs: TrialRuns | None = None
        self._marks: dict[str, RunMark] = {}  #: by identity of the trial
        self._verifies = False  #: whether a delivery checks every run
        service.set_mlflow_settings()

    @classmethod
    def prepare(cls) -> None:
        """Start a process that imports MLflow and delivers beside the driver."""
        delivery.start_tracker_process()

    @classmethod
    def reason_to_confirm(cls, option: str, value: Any, root: Path) -> str:
        """Return why ``uri`` must be confirmed; empty if not, and for other options."""
        return reason_to_confirm(value, root) if option == "uri" and isinstance(value, str) else ""

    def close(self, report: Sequence[Path] = ()) -> str | None:
        """Deliver the rest with MLflow's settings in place, then restore them."""
        service.set_mlflow_settings()
        try:
            return super().close(report)
        finally:
            service.unset_mlflow_settings()

    def sync(self, report: Sequence[Path] = ()) -> str | None:
        """Compare every run with what was delivered, and deliver everything that is missing."""
        self._verifies = True
        return self.close(report)

    def place(self) -> str:
        """Return the unique name of the destination, by which deliveries are recorded."""
        return self.address.name

    def deliver(self, *, final: bool, report: Sequence[Path]) -> str | None:
        """Deliver what is new."""
        if not self.address.is_reachable():
            raise Unreachable(f"no answer from {public(self.address.uri)}")
        try:
            with service.mute_mlflow():
                runs_before = self._runs
                link = super().deliver(final=final, report=report)
                if not final and self._runs is not runs_before and self._opened_runs.studies:
                    self._opened_runs.ensure_study_run(RUNNING)
                self._save_views()
                self._describe_if_unreported()
            return link
        except Exception as error:
            self._runs = None
            self._raise_if_unreachable(error)
            raise

    def _raise_if_unreachable(self, error: Exception) -> None:
        """Raise `Unreachable` if the server does not answer, or refuses the user: no trial can be delivered then."""
        uri = public(self.address.uri)
        if "timed out" in str(error) or not self.address.is_reachable():  # MLflow waits minutes for each request
            raise Unreachable(f"{uri} no longer answers") from error
        if sentence := service.describe_refusal(error, self.plan.study):
            raise Unreachable(f"{uri} {sentence}") from error

    # -- trials -------------------------------------------------------------------------------------------------------

    def begin_delivery(self, marks: Mapping[str, Cursor]) -> None:
        """Open the experiment and match its runs with the trials, unless nothing else has delivered since."""
        database = self.address.database
        if marks and database is not None and not service.has_tables(database):
            self._runs = None
            if not service.why_not_mlflow_database(database):  # otherwise setting it aside logs a warning
                log.warning("%s was deleted or emptied; a new database is filled from the trials.", database)
        parsed = {identity: mark for identity, value in marks.items() if (mark := RunMark.parse(value)) is not None}
        if self._runs is not None and parsed == self._marks:
            return
        self._marks = parsed
        client, name = service.open_client(self.address), self.plan.study
        page = service.ensure_experiment(client, name, self.address, f"{name}/trials", {"vitlab.study": name})
        experiment, version = page.experiment_id, self.plan.version
        if page.tags.get("vitlab.version") != version:
            service.set_experiment_tag(client, page, dashboard.NOTE, NO_REPORT)
            summary = client.get_experiment_by_name(f"{name}/arms")
            if summary is not None and summary.lifecycle_stage == "active":  # with an earlier version's answer
                note = f"{NO_REPORT} \N{MIDDLE DOT} {_page_links(experiment)[0]}"
                service.set_experiment_tag(client, summary, dashboard.NOTE, note)
                arms.deliver_summaries(client, summary.experiment_id, self._root, self._metric_title, {})
            service.set_experiment_tag(client, page, "vitlab.version", version)
        source = {"mlflow.source.name": str(self.folder / "study.yaml"), "mlflow.source.type": "LOCAL"}
        with suppress(OSError, KeyError):  # a container may run under an id that has no name
            source["mlflow.user"] = getpass.getuser()
        runs = TrialRuns(client, experiment, self.plan, self._root, source, self.delivered)
        runs.reconcile_runs(service.iterate_runs(client, experiment), self.trials, parsed)
        if self._verifies:
            runs.verify_points_and_files(parsed)
        self._runs = runs

    def holds(self, mark: Cursor) -> bool:
        """Return True if the run of a trial has what was delivered."""
        parsed = RunMark.parse(mark)
        return parsed is not None and parsed.run in self._opened_runs.intact

    def write(self, news: TrialUpdate, mark: Cursor | None) -> Cursor:
        """Deliver the new events of a trial to its run."""
        try:
            now = self._opened_runs.write_trial(news, RunMark.parse(mark))
        except Exception as error:
            self._raise_if_unreachable(error)
            raise
        self._marks[news.item.identity] = now
        return asdict(now)

    def stored_points(self, mark: Cursor) -> Iterator[tuple[str, float, int]]:
        """Yield the points of a trial's run."""
        client, run = self._opened_runs.client, mark["run"]
        for name in client.get_run(run).data.metrics:
            for point in client.get_metric_history(run, name):
                yield name, point.value, point.step

    def write_study(self, report: Sequence[Path]) -> str:
        """Deliver the study's run, summaries, models and description."""
        runs = self._opened_runs
        if runs.created and self.address.artifacts is None:  # a response to a server's ``create_run`` may be lost
            runs.reconcile_runs(service.iterate_runs(runs.client, runs.experiment), self.trials, self._marks)
        client, experiment = runs.client, runs.experiment
        status, progress = self._status_and_progress()
        study_run = runs.ensure_study_run(status)
        run = study_run.info.run_id
        self._send_study_files(run, study_run.info.artifact_uri, report)
        links, dot = _page_links(experiment), " \N{MIDDLE DOT} "
        files = {path.name: path for path in report}
        stored = read_json(files["report.json"], require_mapping) if "report.json" in files else None
        content = stored or {"arms": (), "answers": ()}
        # The list of runs and that of experiments show the begin as it is written, so it has no link.
        answer = dashboard.escape_markdown(arms.format_answer_in_one_line(content) or NO_REPORT)
        curves = table = links[0]
        if summaries := arms.summarize_arms(self.plan, content["arms"], self._root):
            name, tags = f"{self.plan.study}/arms", {"vitlab.study": self.plan.study}
            page = service.ensure_experiment(client, name, self.address, name, tags)
            summary = page.experiment_id
            self.delivered["runs"] += arms.deliver_summaries(client, summary, self._root, self._metric_title, summaries)
            table = f"[table of arms with intervals]({dashboard.comparison_link(summary, dashboard.SUMMARY)})"
            picture, about = run if "arms.png" in files else "", table + dot + self._origin
            text = dashboard.describe_arms(answer + dot + curves, about, self._metric_title, picture)
            service.set_experiment_tag(client, page, dashboard.NOTE, text)
            links.append(table)
        links += [
            f"[{path.name}]({dashboard.file_link(experiment, run, f'report/{path.name}')})"
            for path in report
            if path.suffix in (".html", ".csv", ".tex")
        ]
        links += [f"[study file and plan]({dashboard.file_link(experiment, run, 'study.yaml')})", self._origin]
        description = "\n\n".join([answer, progress, dot.join(links)])
        client.set_tag(run, dashboard.NOTE, records.truncate(description))
        trained = [
            (item, self.trial_folder(item), mark.run)
            for item in self._models
            if (mark := self._run_mark(item)) is not None
        ]
        if trained:
            model_ids = arms.deliver_models(client, experiment, self._root, trained, self.plan.analysis)
            models = f"#/experiments/{experiment}/models"
            links += [
                f"[model of {dashboard.escape_markdown(arm)}]({models}/{model}{dashboard.TRAINING})"
                for arm, model in model_ids.items()
            ]
        if "report.md" in files:
            text = files["report.md"].read_text(encoding="utf-8")
            text = dashboard.describe_study(text, answer + dot + table, links, run)
            service.set_experiment_tag(client, client.get_experiment(experiment), dashboard.NOTE, text)
        return f"{self.address.links}/{dashboard.comparison_link(experiment, dashboard.ARMS)}"

    def start_command(self) -> str:
        """Return the command that opens the study in the output folder's database; empty for any other destination."""
        return self.store.command("ui", self.plan.study) if self.address.embedded else ""

    @property
    def _metric_title(self) -> str:
        """The study's metric with its unit."""
        return Scale.of_plan(self.plan).title

    @property
    def _origin(self) -> str:
        """What a description is about: of several folders and versions of a study, the last delivery is described."""
        return dashboard.escape_markdown(f"version {self.plan.version[:8]} in {self._root}")

    @property
    def _opened_runs(self) -> TrialRuns:
        """The open experiment."""
        assert self._runs is not None
        return self._runs

    def _run_mark(self, item: TrackedTrial) -> RunMark | None:
        """Return the mark of a trial whose run is in MLflow."""
        mark = self._marks.get(item.identity)
        return mark if mark is not None and mark.run in self._opened_runs.intact else None

    # -- study --------------------------------------------------------------------------------------------------------

    def _save_views(self) -> None:
        """Save views of all metrics and images delivered so far."""
        session = self._opened_runs
        images = dict[str, int]()
        for mark in self._marks.values():
            images |= {key: min(step, images.get(key, step)) for key, step in mark.images.items()}
        groups = [dashboard.group_label_padded_for_colour(arm.name, place) for place, arm in enumerate(self.plan.arms)]
        headline = self.plan.analysis.metric
        first = [f"final/{headline}", f"best/{headline}", headline, "train/loss"]
        charts = dashboard.sort_metrics_into_sections(session.metrics, headline, first)
        # The page colours the lines by the last axis.  Costs follow from the options that vary.
        outcomes = dict.fromkeys(["final/train/loss", f"final/test/{headline.partition('/')[2]}", *first[:2]])
        axes = self._varied_params(), [name for name in outcomes if name in session.metrics]
        # The page leaves out columns of metrics that no run has yet.
        columns = [*(f"metrics.`{name}`" for name in reversed(outcomes)), "tags.`arm`", "tags.`seed`"]
        trials = dashboard.View("Every trial", "trial", charts, columns, axes, images=images)
        views = {
            dashboard.ARMS: dashboard.View("Arms, as means over seeds", "trial", charts, columns, groups=groups),
            dashboard.TRIALS: trials,
            dashboard.RUNS: replace(trials, title="List of runs", kind="", columns=[dashboard.DESCRIPTION, *columns]),
        }
        self.delivered["views"] += dashboard.save_views(session.client, session.experiment, views)

    def _describe_if_unreported(self) -> None:
        """Describe a study without a report, with the number of its finished trials."""
        client, experiment = self._opened_runs.client, self._opened_runs.experiment
        page = client.get_experiment(experiment)
        if page.tags.get(dashboard.NOTE, "").startswith(NO_REPORT):
            question = dashboard.escape_markdown(self.plan.question or self.plan.study)
            links = " \N{MIDDLE DOT} ".join([*_page_links(experiment), self._origin])
            text = f"{NO_REPORT}, {self._status_and_progress()[1]}: {question}\n\n{links}"
            service.set_experiment_tag(client, page, dashboard.NOTE, text)

    def _varied_params(self) -> list[str]:
        """Return the parameters in which arms differ."""
        params = [item.params for item in self.trials if item.kind == "trial"]
        return [
            name
            for name in (params[0] if params else ())
            if name not in ("arm", "seed") and len({values[name] for values in params} - {records.ABSENT}) > 1
        ]

    def _send_study_files(self, run: str, address: str, report: Sequence[Path]) -> None:
        """Send the study file, the plan, and the report with its pictures."""
        client = self._opened_runs.client
        with tempfile.TemporaryDirectory() as temporary:
            place = Path(temporary)
            for file in files_within(self.store.root, [self.folder / "study.yaml", self.folder / "plan.json"]):
                text = public(file.read_text(encoding="utf-8"))  # an address may hold a password, which is masked
                (place / file.name).write_text(text, encoding="utf-8")
            dashboard.shrink_pictures([path for path in report if path.suffix == ".png"], place / dashboard.SMALL)
            for path in report:
                shutil.copy(path, place / "report")
            before = count_files(client, run, address)
            send_files(client, run, address, place)
            self.delivered["files"] += count_files(client, run, address) - before

    def _status_and_progress(self) -> tuple[str, str]:
        """Return MLflow's status of the study, and how many trials have finished, in words."""
        statuses = Counter(
            mark.status if mark is not None else ""
            for item in self.trials
            if item.kind != TUNING  # a tuning candidate may diverge
            for mark in [self._run_mark(item)]
        )
        # Not killed where trials are missing, as after --only: nothing is wrong.
        complete = FINISHED if statuses.keys() <= {FINISHED} else SCHEDULED
        status = next((status for status in (FAILED, RUNNING) if status in statuses), complete)
        return status, f"{statuses[FINISHED]} of {format_count(statuses.total(), 'trial')} finished"


def _page_links(experiment: str) -> list[str]:
    """Return Markdown links to the pages of a study's trials."""
    return [
        f"[curves of arms]({dashboard.comparison_link(experiment, dashboard.ARMS)})",
        f"[curves of every trial]({dashboard.comparison_link(experiment, dashboard.TRIALS)})",
        f"[list of runs]({dashboard.comparison_link(experiment, dashboard.RUNS)})",
    ]
