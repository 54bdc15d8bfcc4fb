"""The main entry point: plan a study, execute what is missing, track it and report it.

Only this module sees the whole study; every other module receives the part it needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from vitlab import report
from vitlab.driver import stored_answer
from vitlab.driver.missing import cached_trials, next_stage, require_arm, train
from vitlab.driver.planning import plan_study as plan_study
from vitlab.driver.planning import read_data, with_decisions
from vitlab.driver.scheduler import Watch, prepare_run, sole_driver
from vitlab.plan.packaged import study_file
from vitlab.plan.plan_file import write_plan
from vitlab.plan.versions import begin_run
from vitlab.report.answer import Answer as Answer
from vitlab.report.api import study_path
from vitlab.store.folders import OUT, Store
from vitlab.trackers import deliver_rest, tracker_of


def run(
    file: str | Path,
    *,
    out: str | Path = OUT,
    changes: Mapping[str, Any] = {},
    plugins: Sequence[str | Path] = (),
    only: str = "*",
    retry_failed: bool = False,
    measure: bool = False,
    versions: Mapping[str, str] = {},
    watch: Watch | None = None,
    on_report: Callable[[report.Content], None] | None = None,
) -> Answer:
    """Train the missing trials of a study, track them and write the report.  Running it again trains nothing.

    While another process runs the study, this one follows its progress, and continues when that process has ended.

    Args:
        file: the study file, or the name of a study that comes with vitlab, such as ``quickstart``.
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
            lines on stderr elsewhere.  ``vitlab.driver.scheduler.Watch()`` shows nothing.
        on_report: called with the content of the report once the study has ended, before the report's files are written
            and the rest is delivered to the tracker.

    Raises:
        SpecError: if the file is wrong, with every mistake; nothing is written.
        UserError: if ``file`` is not a path or ``only`` matches no arm; nothing is written.
        Interrupted: after Ctrl-C, once every running trial has written its checkpoint, or without what the tracker
            lacks if the report is written.
    """
    from vitlab.driver.progress import watch_on

    watch = watch or watch_on()
    file = study_file(study_path(file), out, watch.say)
    request = stored_answer.Request.of(file, out, changes, plugins)
    store = Store(Path(out).resolve())
    prepare_run(file, changes, store)
    make = partial(plan_study, file, changes=changes, plugins=plugins, out=out, versions=versions)
    study, plan = make()
    require_arm(plan, only)
    if read_data(plan, store, file):
        study, plan = make()
    with sole_driver(plan, store, watch) as followed:
        if followed:
            study, plan = make()
        store.clear(plan.study)
        plan = begin_run(plan, store, file, changes, plugins, watch.say)
        tracker = tracker_of(plan, store, study.run)
        outcomes: dict[str, str] = {}
        stages, unexplained, has_ended = 0, list[str](), False
        try:
            while True:
                outcomes |= cached_trials(plan, only, store, outcomes)
                decided = with_decisions(plan, store, study.run, plugins, watch.say)
                if decided != plan:
                    write_plan(decided, store)
                    study, plan = make()
                    plan = write_plan(plan, store)
                    tracker = tracker_of(plan, store, study.run)
                    continue
                stage, missing = next_stage(plan, only, outcomes)
                if stages and not missing:
                    break
                if missing and not stages:  # while workers start and train
                    Thread(target=report.warm_up, name="imports of the report", daemon=True).start()
                stages += 1
                outcomes |= train(stage, missing, store, study.run, plugins, tracker, watch, retry_failed=retry_failed)
            if study.run.explain:
                from vitlab.driver.explanations import examine_arms

                unexplained = list(examine_arms(plan, store, study.run.explain, watch.say))
                for sentence in unexplained:
                    watch.say(sentence)
            if measure:
                from vitlab.driver.benchmark import measure_arms

                measure_arms(plan, store, study.run, plugins, watch.say)
            has_ended = True
        finally:
            tracker.update()  # while the report is written
            content = report.collect(plan, store)
            try:
                if has_ended and on_report is not None:
                    on_report(content)
            finally:
                watch.say("writing the report")
                files: Sequence[Path] = ()
                try:
                    files = report.write(content, store.study(plan.study) / "report")
                finally:  # a report that cannot be written keeps no trial from the tracker
                    link = deliver_rest(tracker, files, watch.say)
        counts = Counter(outcomes.values())
        reasons = {tuning.failure for tuning in plan.tuning if tuning.failure}
        untuned = len(study.seeds.values) * sum(arm.skip in reasons for arm in plan.arms)
        failed = counts["failed"] + untuned
        answer = Answer(plan, store, counts["trained"], counts["cached"], failed, tracker.title, link)
        if only == "*" and not (measure or versions or unexplained):
            stored_answer.keep(answer, request, tracker)
    return answer
