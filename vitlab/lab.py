"""The main entry point: plan a study, execute what is missing, track it and report it.

It reads from top to bottom; planning is in :mod:`vitlab.driver.planning`, the order of jobs in the scheduler.

Two things in ``plan.json`` outlive a run, because a later plan depends on them:

- **Decisions** are what results choose: the values of tuned options, the comparisons that get more seeds, and the
  fastest engine (``run.engine: measured``).  After each of them the study is planned again, with the trials that it
  asks for.
- The **registration** is the analysis of the first run, made before there were results: the metric, its direction and
  margin, and the comparisons that are corrected together.  The report calls exploratory what was decided later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread

from vitlab import interrupts, registry, report
from vitlab.driver.planning import (
    fetch_unidentified_data,
    plan_with_due_decisions,
    warm_up_tracker_and_executor,
)
from vitlab.driver.planning import plan_study as plan_study
from vitlab.driver.scheduler import train_missing
from vitlab.driver.session import (
    Session,
    Watch,
    endings_of_cached_trials,
    follow_until_sole_driver,
    is_selected,
    next_trials_to_train,
    require_matching_arm,
)
from vitlab.errors import Interrupted
from vitlab.planning.packaged import find_or_write_study_file
from vitlab.planning.study_folder import write_registered_plan, write_study_files
from vitlab.planning.values import Plan, Planned
from vitlab.registry.options import check_arguments
from vitlab.report.api import Answer as Answer
from vitlab.report.sections.explained import reasons_file
from vitlab.spec import Study
from vitlab.store.files import display_path
from vitlab.store.folders import OUT, Store, TrialFolder
from vitlab.trackers import DELIVERED

Render = Callable[[str], str | bytes]
"""Function that returns a report in a format."""


@check_arguments()
def run(
    file: str | Path | Mapping[str, object],
    *,
    out: str | Path = OUT,
    changes: Mapping[str, object] = {},
    plugins: Sequence[str | Path] = (),
    only: str = "*",
    retry_failed: bool = False,
    measure: bool = False,
    versions: Mapping[str, str] = {},
    watch: Watch | None = None,
    on_report: Callable[[Render], None] | None = None,
) -> Answer:
    """Train the missing trials of a study, track them and write the report.  Running it again trains nothing.

    While another process runs the study, this one follows its progress, and continues when that process has ended.

    Args:
        file: the study file, or the name of a study that comes with vitlab, such as ``quickstart``, or the content of a
            file as a mapping, which is written to the folder ``written`` of the output folder.
        out: the output folder, shared by studies; a trial trained by another study is not trained again.
        changes: dotted path to value, applied to the file before it is read, such as ``{"data.root": ...}``
            (a path that does not start with a key of the file is relative to ``base``).
        plugins: Python files that register components.
        only: arms to train, as a shell pattern; the report has every result of the study.
        retry_failed: retrain trials that failed under the same code.
        measure: benchmark every arm on this machine and report the costs; see :mod:`vitlab.driver.benchmark`.
        versions: required versions of libraries, such as ``{"torch": "2.13.0+cpu"}``, among those recorded in results:
            python, torch, torchvision, numpy and pillow.  Results with other versions are not used; trials of required
            versions are stored apart from those without.
        watch: progress display; by default an updating display in a notebook, a live table in a terminal, and plain
            lines on stderr elsewhere.  ``vitlab.driver.session.Watch()`` shows nothing.
        on_report: called once the study has ended, before the report's files are written and the rest is delivered to
            the tracker, with a function that returns the report in a format, such as ``terminal`` or ``json``.

    Raises:
        SpecError: if the file is wrong, with every mistake; nothing is written but the file of a mapping.
        UserError: if ``file`` is not a path, ``only`` matches no arm, or the executor or the tracker cannot work here;
            the same.
        Refused: if workers lack required versions, or code was edited while they trained.
        Interrupted: after Ctrl-C, once every running trial has written its checkpoint, or without what the tracker
            lacks if the report is written.
    """
    from vitlab.driver.progress import make_watch

    watch = watch or make_watch()
    store = Store(Path(out).resolve())
    file = find_or_write_study_file(file, out, watch.say)
    warm_up_tracker_and_executor(file, changes, store)
    make_current_plan = partial(plan_study, file, changes=changes, plugins=plugins, out=out, versions=versions)
    with watch.status("loading PyTorch, and planning"):
        study, plan = make_current_plan()
    require_matching_arm(plan, only)
    # The key of a trial needs the identity of its data, which is known once the data has been read.
    if fetch_unidentified_data(plan, store, file):
        study, plan = make_current_plan()
    with follow_until_sole_driver(plan, store, watch) as followed:
        if followed:  # the other driver may have tuned, or opened arms for more seeds
            study, plan = make_current_plan()
        endings = endings_of_cached_trials(plan, only, store)
        _, missing = next_trials_to_train(plan, only, endings)
        # Built to see that they can work here, which raises before anything is written.
        registry.slot("tracker").build(study.run.tracker, plan, store, study.run)
        if missing:
            registry.slot("executor").build(study.run.executor, study.run)
        # The plan returns with the analysis that the first run of the study has registered.
        plan = write_study_files(plan, store, file, changes, plugins, watch.say, trains=bool(missing))
        tracker = registry.slot("tracker").build(study.run.tracker, plan, store, study.run)
        session = Session(store, study.run, plugins, watch, tracker)
        current = _Run(plan, session, only, endings, make_current_plan)
        has_ended = False
        with current.raising_interrupted_with_counts():
            try:
                # Trials of tunings are a stage before the trials of arms; those of arms may be several, as seeds are
                # added.  Each stage depends on the endings of the one before, which are added here.
                for stage, missing in current.stages():
                    current.endings |= train_missing(stage, missing, current.session, retry_failed=retry_failed)
                _explain_models_and_measure_costs(current.plan, current.session, measure=measure)
                has_ended = True
            except (Interrupted, KeyboardInterrupt):
                if not interrupts.is_repeated():
                    delivers = " and delivering what is trained" if current.session.tracker.title else ""
                    watch.say(f"writing the report{delivers}; Ctrl-C again ends this at once.")
                raise
            finally:  # also after Ctrl-C: what has been trained is reported and delivered
                link = _report_and_deliver(current.plan, current.session, on_report if has_ended else None)
        return _make_answer(current, len(study.seeds.values), link)


@dataclass
class _Run:
    """A run of a study, whose plan changes with the decisions that results allow."""

    plan: Plan
    session: Session
    only: str  #: arms to train
    endings: dict[str, str]
    """How each training has ended, by its ``key/code``: ``cached``, or what :func:`train_missing` returns."""
    make_current_plan: Callable[[], tuple[Study, Plan]]

    def stages(self) -> Iterator[tuple[Plan, list[Planned]]]:
        """Yield each stage with its missing trials, the next one once these are trained, until none is missing."""
        is_first = True
        while True:
            self.decide_and_replan()
            stage, missing = next_trials_to_train(self.plan, self.only, self.endings)
            # The first stage runs even if nothing is missing: it shows the plan and names earlier failures.
            if not missing and not is_first:
                return
            if missing and is_first:  # while workers start and train
                Thread(target=report.import_libraries, daemon=True).start()
            yield stage, missing
            is_first = False

    def decide_and_replan(self) -> None:
        """Make the decisions that are due, and plan again with them, until none is."""
        store = self.session.store
        while True:
            self.endings |= endings_of_cached_trials(self.plan, self.only, store, self.endings)
            decided = plan_with_due_decisions(self.plan, self.session)
            if decided == self.plan:
                return
            # make_current_plan reads decisions from plan.json, so that they are the same after a restart.
            write_registered_plan(decided, store)
            study, plan = self.make_current_plan()
            self.plan = write_registered_plan(plan, store)
            tracker = registry.slot("tracker").build(study.run.tracker, self.plan, store, study.run)
            self.session = replace(self.session, tracker=tracker)

    @contextmanager
    def raising_interrupted_with_counts(self) -> Iterator[None]:
        """Raise Interrupted with the numbers of trials and the report's path after Ctrl-C, unless it says what is left.

        Only trials of the arms to train count.
        """
        try:
            yield
        except (Interrupted, KeyboardInterrupt) as error:
            if str(error) not in ("", "interrupted"):
                raise
            plan, store = self.plan, self.session.store
            folders = [store.folder(item.trial) for item in plan.trials if is_selected(item.arm, self.only)]
            # A worker that has written its checkpoint may not have ended yet.
            done, paused = (
                sum(map(TrialFolder.done, folders)),
                sum(each.checkpoint.exists() and not each.done() for each in folders),
            )
            file = store.study(plan.study) / "report" / "report.html"
            written = f"; the report is {display_path(file)}" if report.is_current(plan, store) else ""
            counts = f"{done} of {len(folders)} trials ended, {paused} with a checkpoint"
            raise Interrupted(f"interrupted; {counts}{written}; the same command goes on") from None


def _explain_models_and_measure_costs(plan: Plan, session: Session, *, measure: bool) -> None:
    """Explain the trained arms if ``run.explain`` says so, and measure their costs if that is asked for."""
    if session.run.explain:
        from vitlab.driver.explanations import write_arm_explanations

        write_arm_explanations(plan, session.store, session.run.explain, session.watch.say)
    else:
        reasons_file(plan, session.store).unlink(missing_ok=True)  # an earlier run may have been asked to explain
    if measure:
        from vitlab.driver.benchmark import measure_and_write_arm_costs

        measure_and_write_arm_costs(plan, session)


def _make_answer(run: _Run, seeds: int, link: str | None) -> Answer:
    """Return the answer of a run of arms with so many seeds each, and the study's address in the tracker."""
    counts, tracker = Counter(run.endings.values()), run.session.tracker
    reasons = {tuning.failure for tuning in run.plan.tuning if tuning.failure}
    untuned = seeds * sum(arm.skip in reasons for arm in run.plan.arms)
    return Answer(
        run.plan,
        run.session.store,
        counts["trained"],
        counts["cached"],
        counts["failed"] + untuned,
        tracker.title,
        link,
        tracker.start_command(),
    )


def _report_and_deliver(plan: Plan, session: Session, on_report: Callable[[Render], None] | None) -> str | None:
    """Bring the stored report up to date, and the tracker, and return the study's address there.

    Nothing is done, and None returned, after a second Ctrl-C.
    """
    if interrupts.is_repeated():
        return None
    folder, delivery = session.store.study(plan.study) / "report", session.delivery
    say, status = session.watch.say, session.watch.status
    if report.is_current(plan, session.store):
        if on_report is not None:
            on_report(partial(report.render, plan, session.store))
        link = delivery.recorded_link()
        return delivery.close(sorted(folder.iterdir()), say) if link is None else link
    (folder.parent / DELIVERED).unlink(missing_ok=True)  # also for trackers that this run does not deliver to
    delivery.update()  # while the report is written
    with status("comparing the arms"):
        new_report = report.collect_report(plan, session.store)
    try:
        if on_report is not None:
            on_report(new_report.render)
    finally:
        files: Sequence[Path] = ()
        try:
            with status("writing the report"):
                files = report.write(new_report, folder)
        finally:  # a report that cannot be written keeps no trial from the tracker
            link = None if interrupts.is_repeated() else delivery.close(files, say)
    return link
