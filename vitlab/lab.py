"""The main entry point: plan a study, execute what is missing, track it and report it.

It reads from top to bottom; planning is in :mod:`vitlab.driver.planning`, the order of jobs in the scheduler.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from vitlab import registry, report
from vitlab.driver.planning import costs, prepare_run, read_data, with_decisions
from vitlab.driver.planning import plan_study as plan_study
from vitlab.driver.scheduler import sole_driver, train_missing
from vitlab.driver.session import Session, Watch
from vitlab.driver.stages import cached_trials, next_stage, require_arm
from vitlab.errors import UserError
from vitlab.plan.packaged import study_file
from vitlab.plan.plan_file import registered, write_plan
from vitlab.plan.values import Plan
from vitlab.plan.versions import begin_run, is_recorded
from vitlab.report.api import Answer as Answer
from vitlab.report.api import study_path
from vitlab.store.files import folder_name, mapping, read_json, write_bytes, write_json
from vitlab.store.folders import OUT, Store
from vitlab.trackers.delivery import deliver_rest, tracker_of

if TYPE_CHECKING:
    import pandas as pd

Render = Callable[[str], str | bytes]
"""Function that returns a report in a format."""

DELIVERED = "delivered.json"
"""File in a study's folder with the last complete delivery: the tracker's place, the state of the report, the link."""


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
        only: arms to train, as a shell pattern; the report still shows all.
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
        SpecError: if the file is wrong, with every mistake; nothing is written.
        UserError: if ``file`` is not a path, ``only`` matches no arm, or the executor or the tracker cannot work here;
            nothing is written.
        Interrupted: after Ctrl-C, once every running trial has written its checkpoint, or without what the tracker
            lacks if the report is written.
    """
    from vitlab.driver.progress import watch_on

    watch = watch or watch_on()
    file = _file_of(file, out, watch)
    store = Store(Path(out).resolve())
    prepare_run(file, changes, store)
    make = partial(plan_study, file, changes=changes, plugins=plugins, out=out, versions=versions)
    study, plan = make()
    require_arm(plan, only)
    # The key of a trial needs the identity of its data, which is known once the data has been read.
    if read_data(plan, store, file):
        study, plan = make()
    with sole_driver(plan, store, watch) as followed:
        if followed:  # the other driver may have tuned, or opened arms for more seeds
            study, plan = make()
        outcomes = cached_trials(plan, only, store)
        _, missing = next_stage(plan, only, outcomes)
        tracker_of(plan, store, study.run)  # raises before anything is written if its options cannot work
        if missing:
            registry.slot("executor").build(study.run.executor, study.run)  # the same
        store.clear(plan.study)
        # Where nothing has changed, the recorded time of the run stays, and the stored report with it.
        if missing or not is_recorded(plan, store, file, changes, plugins):
            plan = begin_run(plan, store, file, changes, plugins, watch.say)
        plan = registered(plan, store)
        session = Session(store, study.run, plugins, watch, tracker_of(plan, store, study.run))
        stages, unexplained, has_ended = 0, list[str](), False
        try:
            while True:
                outcomes |= cached_trials(plan, only, store, outcomes)
                decided = with_decisions(plan, session)
                if decided != plan:
                    # Planning reads decisions from plan.json, so that they are the same after a restart.
                    write_plan(decided, store)
                    study, plan = make()
                    plan = write_plan(plan, store)
                    session = replace(session, tracker=tracker_of(plan, store, study.run))
                    continue
                stage, missing = next_stage(plan, only, outcomes)
                # The first stage runs even if nothing is missing: it shows the plan and names earlier failures.
                if stages and not missing:
                    break
                if missing and not stages:  # while workers start and train
                    Thread(target=report.warm_up, name="imports of the report", daemon=True).start()
                stages += 1
                outcomes |= train_missing(stage, missing, session, retry_failed=retry_failed)
            if study.run.explain:
                from vitlab.driver.attention_pictures import draw_arms

                unexplained = list(draw_arms(plan, store, study.run.explain, watch.say))
                for sentence in unexplained:
                    watch.say(sentence)
            if measure:
                from vitlab.driver.benchmark import measure_arms

                measure_arms(plan, session)
            has_ended = True
        finally:  # also after Ctrl-C: what has been trained is reported and delivered
            link = _report_and_deliver(plan, session, on_report if has_ended else None)
        counts = Counter(outcomes.values())
        reasons = {tuning.failure for tuning in plan.tuning if tuning.failure}
        untuned = len(study.seeds.values) * sum(arm.skip in reasons for arm in plan.arms)
        return Answer(
            plan,
            store,
            counts["trained"],
            counts["cached"],
            counts["failed"] + untuned,
            session.tracker.title,
            link,
            elsewhere=counts["elsewhere"],
            start_command=session.tracker.start_command(),
            link_notes=tuple(session.tracker.notes()),
        )


def trials(
    file: str | Path | Mapping[str, object],
    *,
    out: str | Path = OUT,
    changes: Mapping[str, object] = {},
    plugins: Sequence[str | Path] = (),
) -> pd.DataFrame:
    """Return the trials of a study's plan, one row each, before anything is trained.

    Columns: ``arm``, ``seed``, ``trained`` (whether its result is stored), ``params``, and ``macs``, the
    multiply-accumulates of one image, forward.  The arguments are those of :func:`vitlab.run`.

    Raises:
        SpecError: if the file is wrong, with every mistake.
    """
    import pandas as pd

    _, plan = plan_study(_file_of(file, out, Watch()), changes=changes, plugins=plugins, out=out)
    store, by_arm = Store(Path(out).resolve()), costs(plan)
    return pd.DataFrame(
        {
            "arm": item.arm,
            "seed": item.seed,
            "trained": store.trial(item.trial.key, item.trial.code).done(),
            **by_arm[item.arm],
        }
        for item in (*plan.trials, *plan.pending)
    )


def _file_of(study: str | Path | Mapping[str, object], out: str | Path, watch: Watch) -> Path:
    """Return the file of a study, which is written if its content is given.

    Raises:
        UserError: if there is no such file, or the content has a value that a file cannot have.
    """
    if not isinstance(study, Mapping):
        return study_file(study_path(study), watch.say)
    try:
        text = json.dumps(study, indent=1, ensure_ascii=False)  # which is YAML, too
    except (TypeError, ValueError) as error:
        raise UserError(f"a study has texts, numbers, lists and mappings alone: {error}") from None
    file = Path(out) / "written" / f"{folder_name(str(study.get('study', 'study')))}.yaml"
    write_bytes(file, f"{text}\n".encode())
    return file


def _report_and_deliver(plan: Plan, session: Session, on_report: Callable[[Render], None] | None) -> str | None:
    """Bring the stored report up to date, and the tracker, and return the study's address there."""
    folder, tracker = session.store.study(plan.study) / "report", session.tracker
    if report.is_current(plan, session.store):
        if on_report is not None:
            on_report(lambda format: report.read_report(plan, session.store, format) or "")
        if (link := _delivered(plan, session)) is not None:
            return link or None
        return _deliver(plan, session, sorted(folder.iterdir()))
    tracker.update()  # while the report is written
    content = report.collect(plan, session.store)
    try:
        if on_report is not None:
            on_report(content.render)
    finally:
        session.watch.say("writing the report")
        files: Sequence[Path] = ()
        try:
            files = report.write(content, folder)
        finally:  # a report that cannot be written keeps no trial from the tracker
            link = _deliver(plan, session, files)
    return link


def _delivered(plan: Plan, session: Session) -> str | None:
    """Return the address in the tracker if it lacks nothing, by the records of deliveries; empty without a tracker."""
    tracker = session.tracker
    if not tracker.title:
        return ""
    record = read_json(session.store.study(plan.study) / DELIVERED, mapping) or {}
    same = (record.get("place"), record.get("state")) == (tracker.place(), report.state(plan, session.store))
    link = record.get("link")
    return link if same and isinstance(link, str) and tracker.undelivered() == 0 else None


def _deliver(plan: Plan, session: Session, files: Sequence[Path]) -> str | None:
    """Deliver what the tracker lacks, record that if it succeeds, and return the address."""
    tracker, state = session.tracker, report.state(plan, session.store)
    link = deliver_rest(tracker, files, session.watch.say)
    if link and files:
        record = {"place": tracker.place(), "state": state, "link": link}
        write_json(session.store.study(plan.study) / DELIVERED, record)
    return link
