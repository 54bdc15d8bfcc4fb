"""The main entry points: read, plan, execute, track and report a study.

Only this module sees the whole study; every other module receives the part it needs.
"""

from __future__ import annotations

import fnmatch
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from vitlab import registry
from vitlab.driver import trust
from vitlab.driver.scheduler import Watch, distinct, execute, sole_driver, with_prerequisites
from vitlab.errors import DataError, Problem, SpecError, TrialFailed, UserError, VitlabError, nearest
from vitlab.plan.cohorts import without_benchmark
from vitlab.plan.registration import with_registration
from vitlab.plan.values import Plan, Planned, Trial, Tuning, probes_of
from vitlab.plan.versions import content, content_of, differences, full_path, keep, name_of, record_run
from vitlab.plan.written import plan_data, read_plan
from vitlab.report.api import OUT, study_path
from vitlab.spec import Choice, RunSpec, Study, read_document, read_study
from vitlab.spec.changes import attribute_to_changes, is_known, unknown
from vitlab.spec.trial import SOURCES
from vitlab.store.files import mapping, read_json, write_bytes, write_json
from vitlab.store.folders import Store, TrialFolder
from vitlab.store.result import TrialResult

if TYPE_CHECKING:
    import pandas as pd

    from vitlab.geometry import DataInfo
    from vitlab.models.cost import Cost
    from vitlab.report.notebook import Comparison, Results
    from vitlab.trackers import Tracker


log = logging.getLogger(__name__)


@dataclass(frozen=True, repr=False)
class Answer:
    """The result of :func:`run`: counts of trainings, the answers, and the frames behind them.

    Each training counts once, including those that tune options.
    """

    plan: Plan
    store: Store
    trained: int  #: by this run
    cached: int  #: taken from earlier runs
    failed: int  #: without a result after this run
    tracker: str  #: display name of the tracker; empty if the study has none
    link: str | None  #: address of the study in the tracker; None if it could not be reached

    @property
    def folder(self) -> Path:
        """Return the study's folder, which contains its report."""
        return self.store.study(self.plan.study)

    @property
    def report(self) -> Path:
        """Return the path of the HTML report."""
        return self.folder / "report" / "report.html"

    @property
    def answers(self) -> list[str]:
        """Return one sentence per comparison."""
        return self.compare().answers

    def results(self) -> Results:
        """Return one row per trial, see :func:`vitlab.results`."""
        from vitlab.report.notebook import Results

        return Results.of_study(self.plan, self.store)

    def compare(self) -> Comparison:
        """Return one row per arm, see :func:`vitlab.compare`."""
        from vitlab.report.notebook import Comparison

        return Comparison.of_study(self.plan, self.store)

    def history(self) -> pd.DataFrame:
        """Return the curves, see :func:`vitlab.history`."""
        from vitlab.report import frame

        return frame.history(self.plan, self.store)

    def __repr__(self) -> str:
        return f"<Answer {self.plan.study}: {self._counts}; {self.report}>"

    def _repr_html_(self) -> str:
        """Return the question, the answers, the counts and a link to the report; every text is escaped."""
        answers = "".join(f"<li>{escape(answer)}</li>" for answer in self.answers)
        here = Path.cwd()
        # A notebook serves only the files below its folder.
        link = self.report.relative_to(here).as_posix() if self.report.is_relative_to(here) else self.report.as_uri()
        anchor = f'<a href="{escape(quote(link, safe="/:%"))}" target="_blank">{escape(self.report.name)}</a>'
        question = escape(self.plan.question or self.plan.study)
        return f"<div><b>{question}</b><ul>{answers}</ul><p>{escape(self._counts)}. Report: {anchor}</p></div>"

    @property
    def _counts(self) -> str:
        return f"{self.trained} trained, {self.cached} cached, {self.failed} failed"


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
) -> Answer:
    """Train the missing trials of a study, track them and write the report.  Running it again trains nothing.

    While another process runs the study, this one follows its progress, and continues when that process has ended.

    Args:
        file: the study file.
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

    Raises:
        SpecError: if the file is wrong, with every mistake; nothing is written.
        UserError: if ``file`` is not a path or ``only`` matches no arm; nothing is written.
        Interrupted: after Ctrl-C, once every running trial has written its checkpoint.
    """
    from vitlab.driver.progress import watch_on

    file, watch = study_path(file), watch or watch_on()
    store = Store(Path(out).resolve())

    def planned() -> tuple[Study, Plan]:
        return plan_study(file, changes=changes, plugins=plugins, out=out, versions=versions)

    study, plan = planned()
    arms = [arm.name for arm in plan.arms]
    if not any(_is_selected(arm, only) for arm in arms):
        raise UserError(f"no arm is called '{only}'.{nearest(only, arms)} Arms: {'; '.join(arms)}.")
    plan = _with_data(plan, store, file, lambda: planned()[1])
    with sole_driver(plan, store, watch) as followed:
        if followed:
            study, plan = planned()
        store.clear(plan.study)

        def ready(plan: Plan) -> tuple[Plan, Tracker]:
            """Return the plan after any engine benchmarks, and its tracker."""
            plan = _with_benchmarks(study, plan, store, planned, plugins, watch)
            return plan, _tracker(plan, store, study.run)

        plan, tracker = ready(_write_study(store, plan, file, changes, plugins, watch))
        stages: list[Mapping[str, str]] = []
        try:
            if plan.pending:
                rivals = [item for tuning in plan.tuning if tuning.open for item in _rivals_to_train(tuning, only)]
                stages.append(_train(plan, rivals, "*", store, study.run, plugins, retry_failed, tracker, watch))
                _write_plan(store, _with_tuning_decided(plan, store))
                plan, tracker = ready(_write_plan(store, planned()[1]))
            stages.append(_train(plan, plan.trials, only, store, study.run, plugins, retry_failed, tracker, watch))
            again = planned()[1] if plan.looks is not None else plan
            if again.looks != plan.looks:
                existing = {(item.arm, item.seed) for item in plan.trials}
                plan, tracker = ready(_write_plan(store, again))
                further = [item for item in plan.trials if (item.arm, item.seed) not in existing]
                stages.append(_train(plan, further, only, store, study.run, plugins, retry_failed, tracker, watch))
            if study.run.explain:
                from vitlab.driver.explanations import examine_arms

                for sentence in examine_arms(plan, store, study.run.explain):
                    watch.say(sentence)
            if measure:
                from vitlab.driver.benchmark import measure_arms

                measure_arms(plan, store, study.run, plugins, watch.say)
        finally:
            from vitlab import report

            files = report.write(plan, store, store.study(plan.study) / "report")
            link = tracker.close(files)
    reasons = {tuning.failure for tuning in plan.tuning if tuning.failure}
    untuned = len(study.seeds.values) * sum(arm.skip in reasons for arm in plan.arms)
    # Trials trained in one stage are cached in the next one; count them as trained.
    counts = Counter({name: how for stage in reversed(stages) for name, how in stage.items()}.values())
    trained, cached, failed = counts["trained"], counts["cached"], counts["failed"] + untuned
    return Answer(plan, store, trained, cached, failed, tracker.title, link)


def plan_study(
    file: str | Path,
    *,
    changes: Mapping[str, Any] = {},
    plugins: Sequence[str | Path] = (),
    out: str | Path = OUT,
    versions: Mapping[str, str] = {},
) -> tuple[Study, Plan]:
    """Read and plan a study without reading images or writing files.

    Models are built on the meta device, and only to match arms.

    Args:
        file: the study file.
        changes: see :func:`run`.
        plugins: see :func:`run`.
        out: the output folder, which has the choices of earlier tunings and the interim analysis of the first seeds.
        versions: see :func:`run`.

    Raises:
        SpecError: if the file or a change is wrong, with every mistake; mistakes made by a change are attributed to it.
    """
    try:
        return _study_and_plan(file, changes, plugins, out, versions)
    except SpecError as error:
        if not changes:
            raise
        problems = error.problems

    def mistakes(some: Mapping[str, Any]) -> Sequence[Problem]:
        try:
            _study_and_plan(file, some, plugins, out, versions)
        except SpecError as error:
            return error.problems
        return ()

    raise SpecError(attribute_to_changes(problems, changes, mistakes))


def _study_and_plan(
    file: str | Path,
    changes: Mapping[str, Any],
    plugins: Sequence[str | Path],
    out: str | Path,
    versions: Mapping[str, str],
) -> tuple[Study, Plan]:
    """Read and plan a study, see :func:`plan_study`."""
    loaded = [registry.load_file(plugin) for plugin in plugins]
    valid = {path: value for path, value in changes.items() if is_known(path)}
    study, document, problems = read_study(file, {full_path(path): value for path, value in valid.items()})
    problems += [unknown(path, changes[path], document) for path in changes if path not in valid]
    if study is not None:
        study = study.model_copy(update={"run": _with_builtins(study.run)})
        problems += trust.find_problems(study, document, loaded, file, out, changes)
    from vitlab.data.prepare import data_info
    from vitlab.plan import make_plan
    from vitlab.plan.key import Surroundings

    store = Store(Path(out).resolve())
    sound = study is not None and not problems
    tunings = _decided_tunings(store, study) if study is not None and sound and study.tune is not None else {}
    benchmarked = study is not None and sound and study.run.engine == "measured"
    probes = probes_of(_stored_plan(store, study)) if study is not None and benchmarked else {}
    surroundings = Surroundings(_file_modules(study, loaded), versions)
    plan = make_plan(study, document, problems, data_info, _count, tunings, probes, surroundings=surroundings)
    assert study is not None
    if plan.looks is not None:
        from vitlab.report.escalation import inconclusive_arms

        stored = _stored_plan(store, study).get("looks") or {}
        before = stored["open"] if tuple(stored.get("first", ())) == plan.looks.first else ()
        if inconclusive := inconclusive_arms(_with_registration(plan, store), store, before):
            plan = make_plan(study, document, problems, data_info, _count, tunings, probes, inconclusive, surroundings)
    notes = (*plan.notes, *_streamed(plan), *_absent(plan, store))
    plan = replace(plan, notes=notes, version=name_of(content(document.data)))
    return study.model_copy(update={"analysis": plan.analysis}), plan


def smoke(
    file: str | Path,
    *,
    out: str | Path = OUT,
    changes: Mapping[str, Any] = {},
    plugins: Sequence[str | Path] = (),
    watch: Watch | None = None,
) -> int:
    """Train two steps of every distinct set of components of a study and return the number of sets.

    Raises:
        TrialFailed: if any set failed.
    """
    from vitlab.plan.key import modules_beside
    from vitlab.trackers import Untracked

    watch = watch or Watch()
    # Matching and tuning do not affect whether components run.
    base = read_study(file, {full_path(path): value for path, value in changes.items()})[1].data.get("base")
    short = {**changes, **_two_steps(base), "seeds": 1, "match": None, "tune": None}
    study, plan = plan_study(file, changes=short, plugins=plugins)
    store = Store(Path(out).resolve())
    plan = _with_data(plan, store, file, lambda: plan_study(file, changes=short, plugins=plugins)[1])
    distinct = {
        (planned.trial.origins, modules_beside(planned.trial.spec), *planned.trial.needs): planned
        for planned in reversed(plan.trials)
    }.values()
    todo = with_prerequisites(plan, [planned for planned in distinct if not _folder(store, planned).done()], store)
    watch.planned(plan, todo, store)
    try:
        failed = execute(todo, store, study.run, plugins, Untracked(), watch)
    finally:
        watch.close()
    if failed:
        raise TrialFailed(f"{failed} of {len(distinct)} distinct sets of components failed")
    return len(distinct)


def costs(plan: Plan) -> dict[str, dict[str, int]]:
    """Return parameters and multiply-accumulates (one image, forward) of each arm's model, built on the meta device."""
    from vitlab.data.prepare import data_info
    from vitlab.models.cost import macs, parameters

    by_arm: dict[str, dict[str, int]] = {}
    by_choice: dict[tuple[str, DataInfo], dict[str, int]] = {}
    for planned in (*plan.trials, *plan.pending):
        if planned.arm in by_arm:
            continue
        info = data_info(registry.slot("dataset").resolve(planned.trial.spec.data))
        choice = str(planned.trial.spec.model), info
        if choice not in by_choice:
            try:
                with _without_memory():
                    model = registry.slot("model").build(planned.trial.spec.model, info)
                by_choice[choice] = {"params": parameters(model), "macs": macs(model, info)}
            except Exception as error:
                error.add_note(f"in the model of arm '{planned.arm}'")
                raise
        by_arm[planned.arm] = by_choice[choice]
    return by_arm


def sync(
    folder: str | Path, *, tracker: str | None = None, tracking_uri: str | None = None
) -> list[tuple[str, str | None]]:
    """Deliver the journals of every study in an output folder.

    Args:
        folder: the output folder.
        tracker: the tracker to deliver to; by default the one in each study's file, if any.
        tracking_uri: an MLflow server or database instead of the one in the study's file.  A server on another machine
            must be confirmed, here or in MLFLOW_TRACKING_URI.

    Returns:
        Pairs of study and link; the link is None if the tracker could not be reached.

    Raises:
        UserError: if the tracker is not installed or MLflow cannot deliver to the URI; also if files of a study are
            damaged, after all other studies have been delivered.
    """
    from vitlab.trackers.address import MASK, unconfirmed

    store = Store(Path(folder).resolve())
    if tracking_uri is not None and tracker not in (None, "mlflow"):
        raise UserError(f"a tracking URI is where MLflow is, and the tracker is {tracker}")
    elsewhere = tracker is not None or tracking_uri is not None
    changes = {"tracker": Choice(tracker or "mlflow"), "tracking_uri": tracking_uri} if elsewhere else {}
    links: list[tuple[str, str | None]] = []
    unreadable: list[str] = []
    for file in sorted(store.root.glob("studies/*/plan.json")):
        try:
            plan, run_spec = read_plan(file), _run_spec(file.parent)
        except UserError as error:
            unreadable.append(str(error))
            continue
        if plan is None:
            continue  # deleted meanwhile
        run_spec = run_spec.model_copy(update=changes)
        uri = run_spec.tracking_uri
        if uri is not None and not elsewhere:
            if sentence := unconfirmed(uri, store.root):
                log.warning("%s is not delivered to %s: %s.", plan.study, uri, sentence)
                links.append((plan.study, None))
                continue
            if MASK in uri:  # the environment has the URI with its password
                run_spec = run_spec.model_copy(update={"tracking_uri": None})
        delivery = _tracker(plan, store, run_spec)
        if delivery.title:
            links.append((plan.study, delivery.sync(sorted((file.parent / "report").glob("*")))))
    if unreadable:
        raise UserError("\n".join(unreadable))
    return links


def _train(
    plan: Plan,
    trials: Sequence[Planned],
    only: str,
    store: Store,
    run_spec: RunSpec,
    plugins: Sequence[str | Path],
    retry_failed: bool,
    tracker: Tracker,
    watch: Watch,
) -> dict[str, str]:
    """Train the missing ones of ``trials`` and their prerequisites.

    Returns:
        ``trained``, ``cached`` or ``failed`` for every training, prerequisites included, by its ``key/code``.
    """
    starters = [*(planned.trial for planned in trials), *plan.prerequisites]
    prerequisites = {name for trial in starters for name in trial.needs.values()}
    missing: list[Planned] = []
    sources = {f"{trial.key}/{trial.code}": store.trial(trial.key, trial.code) for trial in plan.prerequisites}
    outcomes = {name: "cached" for name, folder in sources.items() if folder.has_weights()}
    for planned in trials:
        if _is_trained(store, planned, prerequisites):
            _folder(store, planned).remove_checkpoint(planned.trial.to_json())
            outcomes[_name(planned)] = "cached"
        else:
            missing.append(planned)
    failed_before: list[Planned] = []

    def without_failed(some: Sequence[Planned]) -> list[Planned]:
        remaining: list[Planned] = []
        for planned in some:
            failed = not retry_failed and _folder(store, planned).has_failed_for_good()
            (failed_before if failed else remaining).append(planned)
        return remaining

    to_train = without_failed(distinct([planned for planned in missing if _is_selected(planned.arm, only)]))
    to_train = without_failed(with_prerequisites(plan, to_train, store))
    if failed_before:
        watch.say(f"{_trials(len(failed_before))} failed before under this code; --retry-failed trains them again.")
    watch.planned(replace(plan, trials=tuple(trials)), to_train, store)
    try:
        execute(to_train, store, run_spec, plugins, tracker, watch, plan.probes)
    finally:
        watch.close()
    for planned in to_train:
        outcomes[_name(planned)] = "trained" if _folder(store, planned).done() else "failed"
    return outcomes | {_name(planned): "failed" for planned in failed_before}


def _name(planned: Planned) -> str:
    return f"{planned.trial.key}/{planned.trial.code}"


def _rivals_to_train(tuning: Tuning, only: str) -> list[Planned]:
    """Return the trials of a tuning if its arm is to be trained."""
    return tuning.trials if tuning.arm is None or _is_selected(tuning.arm, only) else []


def _is_selected(arm: str, only: str) -> bool:
    """Return whether a pattern matches an arm; an arm's exact name matches even if it contains brackets."""
    return arm == only or fnmatch.fnmatchcase(arm, only)


def _with_tuning_decided(plan: Plan, store: Store) -> Plan:
    """Return the plan with every tuning decided whose trials have ended."""
    from vitlab.plan.tune import decide

    def result_of(trial: Trial) -> TrialResult | None:
        return store.trial(trial.key, trial.code).result()

    tuning = [decide(item, result_of, plan.analysis) if item.open else item for item in plan.tuning]
    return replace(plan, tuning=tuple(tuning))


def _decided_tunings(store: Store, study: Study) -> dict[str, Tuning]:
    """Return the decided tunings in the stored plan of a study, by key."""
    tuning = [Tuning.from_json(item) for item in _stored_plan(store, study).get("tuning", ())]
    return {item.key: item for item in tuning if not item.open}


def _stored_plan(store: Store, study: Study) -> Mapping[str, Any]:
    """Return the stored plan of a study as JSON data, or an empty mapping."""
    return plan_data(store.study(study.study) / "plan.json") or {}


def _with_benchmarks(
    study: Study,
    plan: Plan,
    store: Store,
    again: Callable[[], tuple[Study, Plan]],
    plugins: Sequence[str | Path],
    watch: Watch,
) -> Plan:
    """Benchmark the engines of the missing trials if the study asks for it, and return the plan."""
    missing = [planned for planned in (*plan.trials, *plan.pending) if not _folder(store, planned).done()]
    shapes = without_benchmark(missing, plan.probes) if study.run.engine == "measured" else {}
    if not shapes:
        return plan
    from vitlab.driver.benchmark import probe

    probes = {**plan.probes, **probe(shapes, store, study.run, plugins, watch.say)}
    _write_plan(store, replace(plan, probes=probes))
    return _write_plan(store, again()[1])


def _file_modules(study: Study | None, loaded: Sequence[registry.Origin]) -> frozenset[str]:
    """Return the modules of the files of components that the process of a trial will have loaded."""
    if study is not None:
        with suppress(VitlabError):  # a wrong executor is reported with the file's mistakes
            if registry.slot("executor").get(study.run.executor.type).in_driver:
                return registry.plugin_files.modules()
    return frozenset(map(registry.plugin_files.module_of, loaded))


def _streamed(plan: Plan) -> list[str]:
    """Return a sentence for each image data set that is not held in memory, with the place it is read from."""
    from vitlab.data.prepare import describe_storage

    of_arm = {planned.arm: planned.trial.spec.data for planned in (*plan.trials, *plan.pending)}
    distinct_sets = {str(data): data for data in of_arm.values()}
    return list(
        dict.fromkeys(sentence for data in distinct_sets.values() if (sentence := describe_storage(data)) is not None)
    )


def _absent(plan: Plan, store: Store) -> list[str]:
    """Return a sentence for each data set that a missing trial needs and this machine does not have."""
    return [f"data not here: {reason}" for reason in _missing(plan, store)]


def _missing(plan: Plan, store: Store) -> list[str]:
    """Return the reason for each data set that a missing trial needs and this machine does not have.

    Only trials whose data is missing are looked up in the store.
    """
    from vitlab.data.prepare import missing

    trials: dict[str, list[Planned]] = {}
    for planned in _all(plan):
        trials.setdefault(str(planned.trial.spec.data), []).append(planned)
    reasons = {name: missing(some[0].trial.spec.data) for name, some in trials.items()}
    names = [
        name for name in reasons if reasons[name] and not all(_folder(store, item).done() for item in trials[name])
    ]
    return list(dict.fromkeys(str(reasons[name]) for name in names))


def _count(choice: Mapping[str, Any], info: DataInfo) -> Cost:
    from vitlab.models.cost import cost_of

    return cost_of(choice, info)


def _folder(store: Store, planned: Planned) -> TrialFolder:
    return store.trial(planned.trial.key, planned.trial.code)


def _two_steps(tree: Any, place: str = "") -> dict[str, int]:
    """Return the changes that shorten a trial and the trials whose weights it starts from to two steps."""
    changes = {f"{place}train.steps": 2, f"{place}train.evaluations": 1}
    for path in SOURCES.values():
        source = tree
        for part in (*path, "trial"):
            source = source.get(part) if isinstance(source, Mapping) else None
        if isinstance(source, Mapping):
            changes |= _two_steps(source, f"{place}{'.'.join(path)}.trial.")
    return changes


def _is_trained(store: Store, planned: Planned, prerequisites: set[str]) -> bool:
    """Return whether a trial is trained; one that other trials start from must also have its weights."""
    folder = _folder(store, planned)
    is_prerequisite = f"{planned.trial.key}/{planned.trial.code}" in prerequisites
    return folder.has_weights() if is_prerequisite else folder.done()


def _with_data(plan: Plan, store: Store, file: str | Path, again: Any) -> Plan:
    """Read data sets without an identity, which may download them, and return the plan made anew.

    Raises:
        SpecError: if the data of a missing trial is not on this machine.
    """
    for reason in _missing(plan, store):
        raise SpecError([read_document(file).problem(("base", "data", "root"), reason)])
    pending = [planned.trial.spec.data for planned in _all(plan) if planned.trial.data is None]
    absent = {str(choice): choice for choice in pending}
    if not absent:
        return plan
    for choice in absent.values():
        registry.slot("dataset").build(choice).read("train")
    plan = again()
    if any(planned.trial.data is None for planned in _all(plan)):
        raise DataError("a data set was read and still has no identity; its info() must name one once it is here")
    return plan


def _all(plan: Plan) -> list[Planned]:
    """Return every trial of a plan, including pending trials and those of tunings."""
    return [*plan.trials, *plan.pending, *(planned for tuning in plan.tuning for planned in tuning.trials)]


def _write_study(
    store: Store,
    plan: Plan,
    file: str | Path,
    changes: Mapping[str, Any],
    plugins: Sequence[str | Path],
    watch: Watch,
) -> Plan:
    """Write the files of a study at the start of a run and return the plan as :func:`_write_plan` does.

    If the previous run was of another version of the study, keep that version and print the differences.
    """
    from vitlab.trackers.source import commit_of

    folder, source = store.study(plan.study), Path(file).resolve()
    latest, time_s = keep(folder, plan.version), time.time()
    plan = _write_plan(store, plan)
    write_bytes(folder / "study.yaml", source.read_bytes())
    write_json(folder / "changes.json", _without_password(changes))
    if latest is not None and source.is_relative_to(store.root / "studies"):  # a stored copy, run again
        source = Path(latest.run.get("file", source))
    circumstances = {
        "time": time_s,
        "file": str(source),
        "folder": str(Path.cwd()),
        "plugins": [str(Path(plugin).resolve()) for plugin in plugins],
        "commit": commit_of(source.parent),
    }
    record_run(folder, plan.version, circumstances)
    if latest is not None and latest.name != plan.version:
        previous = latest.run.get("file", "")
        place = f" from {previous}," if previous and previous != str(source) else ""
        now = content_of(folder / "study.yaml", changes)
        differ = "" if latest.content is None else f": {differences(latest.content, now)}"
        watch.say(
            f"study '{plan.study}' was last run{place} in another version ({latest.when}){differ}. Both are kept; "
            "'vitlab studies' lists them."
        )
    return plan


def _write_plan(store: Store, plan: Plan) -> Plan:
    """Write the plan and return it with the analysis registered at the first run."""
    plan = _with_registration(plan, store)
    write_json(store.study(plan.study) / "plan.json", plan.to_json())
    return plan


def _with_registration(plan: Plan, store: Store) -> Plan:
    """Return the plan with the analysis registered at the first run."""
    earlier = plan_data(store.study(plan.study) / "plan.json")
    return with_registration(plan, earlier, lambda *trial: store.trial(*trial).done())


def _without_memory() -> Any:
    import torch

    return torch.device("meta")


def _without_password(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes of the command line, with any password in the tracking URI masked."""
    from vitlab.trackers import public

    def masked(path: str, value: Any) -> Any:
        if path == "run" and isinstance(value, Mapping):
            return {name: masked(f"run.{name}", item) for name, item in value.items()}
        return public(value) if path == "run.tracking_uri" and isinstance(value, str) else value

    return {path: masked(path, value) for path, value in changes.items()}


def _run_spec(folder: Path) -> RunSpec:
    """Return the run section of a study's stored file with the stored changes of the command line."""
    changes = read_json(folder / "changes.json", mapping) or {}
    study, _, problems = read_study(folder / "study.yaml", {full_path(path): value for path, value in changes.items()})
    if study is None or problems:
        raise SpecError(problems)
    return _with_builtins(study.run)


def _with_builtins(run_spec: RunSpec) -> RunSpec:
    """Return ``run_spec`` with unset executor and tracker qualified as built-ins."""
    silent = [name for name in ("executor", "tracker") if name not in run_spec.model_fields_set]
    own = {name: Choice(registry.slot(name).qualify_builtin(getattr(run_spec, name).type)) for name in silent}
    return run_spec.model_copy(update=own)


def _tracker(plan: Plan, store: Store, run_spec: RunSpec) -> Tracker:
    from vitlab.trackers import BackgroundTracker

    built: Tracker = registry.slot("tracker").build(run_spec.tracker, plan, store, run_spec)
    return BackgroundTracker(built) if built.title else built


def _trials(count: int) -> str:
    return f"{count} trial{'s' if count != 1 else ''}"
