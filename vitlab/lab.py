"""The story: read, plan, execute, track, report.

Only this module sees the whole study; everybody else is handed the piece it needs.
"""

from __future__ import annotations

import fnmatch
import json
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
from vitlab.driver.scheduler import Watch, distinct, execute, with_prerequisites
from vitlab.driver.study_lock import sole_driver
from vitlab.errors import DataError, Problem, SpecError, TrialFailed, UserError, VitlabError, nearest
from vitlab.plan.cohorts import unprobed
from vitlab.plan.registration import registered
from vitlab.plan.values import Plan, Planned, Trial, Tuning, probes_of
from vitlab.plan.versions import began, content, content_of, differences, keep, name_of, rooted
from vitlab.plan.written import plan_data, read_plan
from vitlab.report.api import OUT, study_path
from vitlab.spec import Choice, RunSpec, Study, read_document, read_study
from vitlab.spec.changes import blamed, is_known, unknown
from vitlab.spec.trial import SOURCES
from vitlab.store.folders import Store, TrialFolder, mapping, read_json, write_bytes, write_json
from vitlab.store.result import Result

if TYPE_CHECKING:
    import pandas as pd

    from vitlab.geometry import DataInfo
    from vitlab.models.cost import Cost
    from vitlab.report.notebook import Compared, Results
    from vitlab.trackers import Tracker


log = logging.getLogger(__name__)


@dataclass(frozen=True, repr=False)
class Answer:
    """The result of :func:`run`: counts of trainings, the answers, and the frames behind them.

    Each training counts once, those by which knobs are tuned among them.
    """

    plan: Plan
    store: Store
    trained: int  #: by this run
    cached: int  #: taken from earlier runs
    failed: int  #: without a result after this run
    tracker: str  #: what people call the tracker; empty where the study has none
    link: str | None  #: where the tracker shows it; None where it could not be reached

    @property
    def folder(self) -> Path:
        """The study's folder, with its report."""
        return self.store.study(self.plan.study)

    @property
    def report(self) -> Path:
        """The report as a page."""
        return self.folder / "report" / "report.html"

    @property
    def answers(self) -> list[str]:
        """One sentence per comparison."""
        return self.compare().answers

    def results(self) -> Results:
        """Return one row per trial, see :func:`vitlab.results`."""
        from vitlab.report import frame
        from vitlab.report.notebook import Results

        return Results(frame.results(self.plan, self.store))

    def compare(self) -> Compared:
        """Return one row per arm, see :func:`vitlab.compare`."""
        from vitlab.report.notebook import Compared

        return Compared.of_study(self.plan, self.store)

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
        # A notebook serves the files below its folder, and no others.
        link = self.report.relative_to(here).as_posix() if self.report.is_relative_to(here) else self.report.as_uri()
        shown = f'<a href="{escape(quote(link, safe="/:%"))}" target="_blank">{escape(self.report.name)}</a>'
        question = escape(self.plan.question or self.plan.study)
        return f"<div><b>{question}</b><ul>{answers}</ul><p>{escape(self._counts)}. Report: {shown}</p></div>"

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
    """Bring a study to its answer: train what is missing, track it, report.  Running it again trains nothing.

    While another process runs the study this one looks on, and goes on when that one has ended, however it did.

    Args:
        file: the study file.
        out: the output folder, shared by studies; a trial that another study has trained is not trained again.
        changes: dotted path to value, applied to the file before it is read, such as ``{"data.root": ...}``
            (a path that does not begin with a key of the file is taken below ``base``).
        plugins: Python files that register components.
        only: arms to train, as a shell pattern; the report still shows all.
        retry_failed: train again what failed under the same code.
        measure: benchmark every arm on this machine and report the costs; see :mod:`vitlab.driver.benchmark`.
        versions: versions that every result must come from, such as ``{"torch": "2.13.0+cpu"}``, of those that results
            record: python, torch, torchvision, numpy and pillow.  Results of others are not taken; such trials are kept
            beside those that name no version.
        watch: shows the progress; by default an updating display in a notebook, a live table in a terminal, and plain
            lines on stderr elsewhere.  ``vitlab.driver.scheduler.Watch()`` shows nothing.

    Raises:
        SpecError: with every mistake of the file; nothing is written then.
        UserError: if ``file`` is no path, or ``only`` names no arm; nothing is written then, either.
        Interrupted: after Ctrl-C, once every running trial has written its checkpoint.
    """
    from vitlab.driver.progress import watch_on

    file, watch = study_path(file), watch or watch_on()
    store = Store(Path(out).resolve())

    def planned() -> tuple[Study, Plan]:
        return plan_study(file, changes=changes, plugins=plugins, out=out, versions=versions)

    study, plan = planned()
    arms = [arm.name for arm in plan.arms]
    if not any(_is_asked(arm, only) for arm in arms):
        raise UserError(f"no arm is called '{only}'.{nearest(only, arms)} Arms: {'; '.join(arms)}.")
    plan = _with_data(plan, store, file, lambda: planned()[1])
    with sole_driver(plan, store, watch) as waited:
        if waited:
            study, plan = planned()
        store.clear(plan.study)

        def ready(plan: Plan) -> tuple[Plan, Tracker]:
            """The plan once engines are measured that are to be, and who is told of its trials."""
            plan = _probed(study, plan, store, planned, plugins, watch)
            return plan, _tracker(plan, store, study.run)

        plan, tracker = ready(_write_study(store, plan, file, changes, plugins, watch))
        stages: list[Mapping[str, str]] = []
        try:
            if plan.pending:
                rivals = [item for tuning in plan.tuning if tuning.open for item in _wanted(tuning, only)]
                stages.append(_train(plan, rivals, "*", store, study.run, plugins, retry_failed, tracker, watch))
                _write_plan(store, _chosen(plan, store))
                plan, tracker = ready(_write_plan(store, planned()[1]))
            stages.append(_train(plan, plan.trials, only, store, study.run, plugins, retry_failed, tracker, watch))
            again = planned()[1] if plan.looks is not None else plan
            if again.looks != plan.looks:
                known = {(item.arm, item.seed) for item in plan.trials}
                plan, tracker = ready(_write_plan(store, again))
                further = [item for item in plan.trials if (item.arm, item.seed) not in known]
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
    # What one stage has trained is found by the next one.
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
    """Read and plan a study.  Reads no pixels, writes nothing, and builds models, without memory, only to match arms.

    Args:
        file: the study file.
        changes: see :func:`run`.
        plugins: see :func:`run`.
        out: the output folder, in which the choices of earlier tunings stand, and what a first look has seen.
        versions: see :func:`run`.

    Raises:
        SpecError: with every mistake of the file; those that a change has made are blamed on it.
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

    raise SpecError(blamed(problems, changes, mistakes))


def _study_and_plan(
    file: str | Path,
    changes: Mapping[str, Any],
    plugins: Sequence[str | Path],
    out: str | Path,
    versions: Mapping[str, str],
) -> tuple[Study, Plan]:
    """Read and plan a study, see :func:`plan_study`."""
    loaded = [registry.load_file(plugin) for plugin in plugins]
    known = {path: value for path, value in changes.items() if is_known(path)}
    study, document, problems = read_study(file, {rooted(path): value for path, value in known.items()})
    problems += [unknown(path, changes[path], document) for path in changes if path not in known]
    if study is not None:
        study = study.model_copy(update={"run": _own(study.run)})
        problems += trust.find_problems(study, document, loaded, file, out, changes)
    from vitlab.data.prepare import data_info
    from vitlab.plan import make_plan
    from vitlab.plan.key import Surroundings

    store = Store(Path(out).resolve())
    sound = study is not None and not problems
    decided = _decided(store, study) if study is not None and sound and study.tune is not None else {}
    measured = study is not None and sound and study.run.engine == "measured"
    probes = probes_of(_kept(store, study)) if study is not None and measured else {}
    surroundings = Surroundings(_files(study, loaded), versions)
    plan = make_plan(study, document, problems, data_info, _count, decided, probes, surroundings=surroundings)
    assert study is not None
    if plan.looks is not None:
        from vitlab.report.escalation import inconclusive_arms

        kept = _kept(store, study).get("looks") or {}
        before = kept["open"] if tuple(kept.get("first", ())) == plan.looks.first else ()
        if unsettled := inconclusive_arms(_registered(plan, store), store, before):
            plan = make_plan(study, document, problems, data_info, _count, decided, probes, unsettled, surroundings)
    notes = (*plan.notes, *_stored(plan), *_absent(plan, store))
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
    """Train two steps of every distinct set of components of a study.  Returns how many there are.

    Raises:
        TrialFailed: naming those that failed.
    """
    from vitlab.plan.key import modules_beside
    from vitlab.trackers import Untracked

    watch = watch or Watch()
    # Whether components run does not depend on how much they cost, or on what suits them best.
    base = read_study(file, {rooted(path): value for path, value in changes.items()})[1].data.get("base")
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
    """Parameters and multiply-accumulates (one image, forward) of each arm's model, built without memory."""
    from vitlab.data.prepare import data_info
    from vitlab.models.cost import macs, parameters

    found: dict[str, dict[str, int]] = {}
    known: dict[tuple[str, DataInfo], dict[str, int]] = {}
    for planned in (*plan.trials, *plan.pending):
        if planned.arm in found:
            continue
        info = data_info(registry.slot("dataset").resolve(planned.trial.spec["data"]))
        choice = json.dumps(planned.trial.spec["model"], sort_keys=True), info
        if choice not in known:
            try:
                with _without_memory():
                    model = registry.slot("model").build(planned.trial.spec["model"], info)
                known[choice] = {"params": parameters(model), "macs": macs(model, info)}
            except Exception as error:
                error.add_note(f"in the model of arm '{planned.arm}'")
                raise
        found[planned.arm] = known[choice]
    return found


def sync(
    folder: str | Path, *, tracker: str | None = None, tracking_uri: str | None = None
) -> list[tuple[str, str | None]]:
    """Deliver the journals of every study in an output folder.

    Args:
        folder: the output folder.
        tracker: the tracker to deliver to; by default the one each study names, and none where it names none.
        tracking_uri: an MLflow server or database, in the place of what the study names.  A server on another machine
            has to be named again, here or in MLFLOW_TRACKING_URI.

    Returns:
        study and link, None where the tracker could not be reached.

    Raises:
        UserError: for a tracker that is not installed, or a URI that MLflow cannot deliver to; and for studies whose
            files are damaged, once all others have been delivered.
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
            continue  # it went while this looked
        run_spec = run_spec.model_copy(update=changes)
        uri = run_spec.tracking_uri
        if uri is not None and not elsewhere:
            if sentence := unconfirmed(uri, store.root):
                log.warning("%s is not delivered to %s: %s.", plan.study, uri, sentence)
                links.append((plan.study, None))
                continue
            if MASK in uri:  # the environment has it in full
                run_spec = run_spec.model_copy(update={"tracking_uri": None})
        found = _tracker(plan, store, run_spec)
        if found.title:
            links.append((plan.study, found.close(sorted((file.parent / "report").glob("*")))))
    if unreadable:
        raise UserError("\n".join(unreadable))
    return links


# -- how it is done ---------------------------------------------------------------------------------------------------


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
    """Train what is missing of some trials.

    Returns:
        trained, cached (there already) or failed, for every training by its ``key/code``, those that the trials start
        from among them.
    """
    starters = [*(planned.trial for planned in trials), *plan.prerequisites]
    needed = {name for trial in starters for name in trial.needs.values()}
    missing: list[Planned] = []
    sources = {f"{trial.key}/{trial.code}": store.trial(trial.key, trial.code) for trial in plan.prerequisites}
    outcomes = {name: "cached" for name, folder in sources.items() if folder.usable()}
    for planned in trials:
        if _is_there(store, planned, needed):
            _folder(store, planned).remove_checkpoint(planned.trial.to_json())
            outcomes[_name(planned)] = "cached"
        else:
            missing.append(planned)
    parked: list[Planned] = []

    def unparked(some: Sequence[Planned]) -> list[Planned]:
        left: list[Planned] = []
        for planned in some:
            failed = not retry_failed and _folder(store, planned).has_failed_for_good()
            (parked if failed else left).append(planned)
        return left

    todo = unparked(distinct([planned for planned in missing if _is_asked(planned.arm, only)]))
    todo = unparked(with_prerequisites(plan, todo, store))
    if parked:
        watch.say(f"{_trials(len(parked))} failed before under this code; --retry-failed trains them again.")
    watch.planned(replace(plan, trials=tuple(trials)), todo, store)
    try:
        execute(todo, store, run_spec, plugins, tracker, watch, plan.probes)
    finally:
        watch.close()
    for planned in todo:
        outcomes[_name(planned)] = "trained" if _folder(store, planned).done() else "failed"
    return outcomes | {_name(planned): "failed" for planned in parked}


def _name(planned: Planned) -> str:
    return f"{planned.trial.key}/{planned.trial.code}"


def _wanted(tuning: Tuning, only: str) -> list[Planned]:
    """The trials of a tuning, if its arm is to be trained."""
    return tuning.trials if tuning.arm is None or _is_asked(tuning.arm, only) else []


def _is_asked(arm: str, only: str) -> bool:
    """Whether a pattern names an arm; brackets in an arm's own name are no pattern."""
    return arm == only or fnmatch.fnmatchcase(arm, only)


def _chosen(plan: Plan, store: Store) -> Plan:
    """The plan with every choice that the trials which have ended allow."""
    from vitlab.plan.tune import decide

    def result_of(trial: Trial) -> Result | None:
        return store.trial(trial.key, trial.code).result()

    tuning = [decide(item, result_of, plan.analysis) if item.open else item for item in plan.tuning]
    return replace(plan, tuning=tuple(tuning))


def _decided(store: Store, study: Study) -> dict[str, Tuning]:
    """The choices that stand in the plan of a study that was run before, by their keys."""
    tuning = [Tuning.from_json(item) for item in _kept(store, study).get("tuning", ())]
    return {item.key: item for item in tuning if not item.open}


def _kept(store: Store, study: Study) -> Mapping[str, Any]:
    """The plan of a study that was run before, in JSON."""
    return plan_data(store.study(study.study) / "plan.json") or {}


def _probed(
    study: Study,
    plan: Plan,
    store: Store,
    again: Callable[[], tuple[Study, Plan]],
    plugins: Sequence[str | Path],
    watch: Watch,
) -> Plan:
    """The plan, once the engine of what is to be trained has been measured, where the study asks for that."""
    todo = [planned for planned in (*plan.trials, *plan.pending) if not _folder(store, planned).done()]
    shapes = unprobed(todo, plan.probes) if study.run.engine == "measured" else {}
    if not shapes:
        return plan
    from vitlab.driver.benchmark import probe

    found = {**plan.probes, **probe(shapes, store, study.run, plugins, watch.say)}
    _write_plan(store, replace(plan, probes=found))
    return _write_plan(store, again()[1])


def _files(study: Study | None, loaded: Sequence[registry.Origin]) -> frozenset[str]:
    """Return the modules of the files of components that the process of a trial will have loaded."""
    if study is not None:
        with suppress(VitlabError):  # of a wrong executor the file's mistakes tell
            if registry.slot("executor").get(study.run.executor.type).in_driver:
                return registry.plugin_files.modules()
    return frozenset(map(registry.plugin_files.module_of, loaded))


def _stored(plan: Plan) -> list[str]:
    """Where pictures are read from that this machine does not keep in memory, in a sentence for each set of them."""
    from vitlab.data.prepare import describe_storage

    of_arm = {planned.arm: planned.trial.spec["data"] for planned in (*plan.trials, *plan.pending)}
    distinct_sets = {json.dumps(data, sort_keys=True): data for data in of_arm.values()}
    return list(dict.fromkeys(said for data in distinct_sets.values() if (said := describe_storage(data)) is not None))


def _absent(plan: Plan, store: Store) -> list[str]:
    """Return which data is not on this machine, of trials that are still to be trained: a sentence for each set."""
    return [f"data not here: {reason}" for reason in _missing(plan, store)]


def _missing(plan: Plan, store: Store) -> list[str]:
    """Return why data is not on this machine, for each set that trials which are still to be trained need.

    Only trials whose data is missing are looked up in the store.
    """
    from vitlab.data.prepare import missing

    trials: dict[str, list[Planned]] = {}
    for planned in _all(plan):
        trials.setdefault(str(planned.trial.spec["data"]), []).append(planned)
    reasons = {name: missing(some[0].trial.spec["data"]) for name, some in trials.items()}
    needed = [
        name for name in reasons if reasons[name] and not all(_folder(store, item).done() for item in trials[name])
    ]
    return list(dict.fromkeys(str(reasons[name]) for name in needed))


def _count(choice: Mapping[str, Any], info: DataInfo) -> Cost:
    from vitlab.models.cost import cost_of

    return cost_of(choice, info)


def _folder(store: Store, planned: Planned) -> TrialFolder:
    return store.trial(planned.trial.key, planned.trial.code)


def _two_steps(tree: Any, place: str = "") -> dict[str, int]:
    """The changes that shorten a trial, and those whose weights it takes."""
    found = {f"{place}train.steps": 2, f"{place}train.evaluations": 1}
    for path in SOURCES.values():
        source = tree
        for part in (*path, "trial"):
            source = source.get(part) if isinstance(source, Mapping) else None
        if isinstance(source, Mapping):
            found |= _two_steps(source, f"{place}{'.'.join(path)}.trial.")
    return found


def _is_there(store: Store, planned: Planned, needed: set[str]) -> bool:
    """Whether a trial need not be trained; one that others start from must have kept its weights, too."""
    folder = _folder(store, planned)
    named = f"{planned.trial.key}/{planned.trial.code}" in needed
    return folder.usable() if named else folder.done()


def _with_data(plan: Plan, store: Store, file: str | Path, again: Any) -> Plan:
    """The plan, once its data is here: reading a set that is not fetches it where its options allow that.

    Raises:
        SpecError: if it is not, and trials that are to be trained need it.
    """
    for reason in _missing(plan, store):
        raise SpecError([read_document(file).problem(("base", "data", "root"), reason)])
    pending = [planned.trial.spec["data"] for planned in _all(plan) if planned.trial.data is None]
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
    """Every trial a plan names, those that a tuning awaits or consists of among them."""
    return [*plan.trials, *plan.pending, *(planned for tuning in plan.tuning for planned in tuning.trials)]


def _write_study(
    store: Store,
    plan: Plan,
    file: str | Path,
    changes: Mapping[str, Any],
    plugins: Sequence[str | Path],
    watch: Watch,
) -> Plan:
    """Write what a study is, when a run of it begins.  Returns the plan as :func:`_write_plan` does.

    Where the run before was of another version of the study, that one is kept, and a message names what differs.
    """
    from vitlab.trackers.source import commit_of

    folder, source = store.study(plan.study), Path(file).resolve()
    latest, time_s = keep(folder, plan.version), time.time()
    plan = _write_plan(store, plan)
    write_bytes(folder / "study.yaml", source.read_bytes())
    write_json(folder / "changes.json", _without_password(changes))
    if latest is not None and source.is_relative_to(store.root / "studies"):  # what a report says to run again
        source = Path(latest.run.get("file", source))
    circumstances = {
        "time": time_s,
        "file": str(source),
        "folder": str(Path.cwd()),
        "plugins": [str(Path(plugin).resolve()) for plugin in plugins],
        "commit": commit_of(source.parent),
    }
    began(folder, plan.version, circumstances)
    if latest is not None and latest.name != plan.version:
        known = latest.run.get("file", "")
        place = f" from {known}," if known and known != str(source) else ""
        now = content_of(folder / "study.yaml", changes)
        differ = "" if latest.content is None else f": {differences(latest.content, now)}"
        watch.say(
            f"study '{plan.study}' was last run{place} in another version ({latest.when}){differ}. Both are kept; "
            "'vitlab studies' lists them."
        )
    return plan


def _write_plan(store: Store, plan: Plan) -> Plan:
    """Write what is to be run.  Returns the plan, with how its answer was to be judged when it was first run."""
    plan = _registered(plan, store)
    write_json(store.study(plan.study) / "plan.json", plan.to_json())
    return plan


def _registered(plan: Plan, store: Store) -> Plan:
    """The plan, with how its answer was to be judged when it was first run."""
    earlier = plan_data(store.study(plan.study) / "plan.json")
    return registered(plan, earlier, lambda *trial: store.trial(*trial).done())


def _without_memory() -> Any:
    import torch

    return torch.device("meta")


def _without_password(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the command line changes, with a password in the tracking URI masked."""
    from vitlab.trackers import public

    def masked(path: str, value: Any) -> Any:
        if path == "run" and isinstance(value, Mapping):
            return {name: masked(f"run.{name}", item) for name, item in value.items()}
        return public(value) if path == "run.tracking_uri" and isinstance(value, str) else value

    return {path: masked(path, value) for path, value in changes.items()}


def _run_spec(folder: Path) -> RunSpec:
    """How a study was last run: its file, and what was changed on the command line."""
    changes = read_json(folder / "changes.json", mapping) or {}
    study, _, problems = read_study(folder / "study.yaml", {rooted(path): value for path, value in changes.items()})
    if study is None or problems:
        raise SpecError(problems)
    return _own(study.run)


def _own(run_spec: RunSpec) -> RunSpec:
    """How a study is run: by our executor and tracker where it names none, whoever else offers their names."""
    silent = [name for name in ("executor", "tracker") if name not in run_spec.model_fields_set]
    own = {name: Choice(registry.slot(name).qualify_builtin(getattr(run_spec, name).type)) for name in silent}
    return run_spec.model_copy(update=own)


def _tracker(plan: Plan, store: Store, run_spec: RunSpec) -> Tracker:
    from vitlab.trackers import BackgroundTracker

    built: Tracker = registry.slot("tracker").build(run_spec.tracker, plan, store, run_spec)
    return BackgroundTracker(built) if built.title else built


def _trials(count: int) -> str:
    return f"{count} trial{'s' if count != 1 else ''}"
