"""The story: read, plan, execute, track, report.

Only this module sees the whole study; everybody else is handed the piece it needs.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitlab import guests, slots
from vitlab.errors import DataError, OptionError, Problem, SpecError, TrialFailed, UserError, nearest
from vitlab.execution import Watch, distinct, execute, look_on, with_prerequisites
from vitlab.plan.cohorts import unprobed
from vitlab.plan.registration import registered
from vitlab.plan.values import Plan, Planned, Trial, Tuning, probes_of
from vitlab.result import Result
from vitlab.spec import Choice, Document, RunSpec, Study, read_document, read_study
from vitlab.spec.trial import SOURCES
from vitlab.store import Busy, Store, TrialFolder, held, hold, holder, read_json, write_bytes, write_json

if TYPE_CHECKING:
    import pandas as pd

    from vitlab.geometry import DataInfo
    from vitlab.models.cost import Cost
    from vitlab.report.notebook import Compared, Results
    from vitlab.trackers import Tracker

OUT = Path("vitlab-runs")
"""Where everything is written unless told otherwise."""


@dataclass(frozen=True)
class Answer:
    """What ``run`` leaves behind."""

    plan: Plan
    store: Store
    trained: int
    cached: int
    failed: int
    tracker: str  #: what people call the tracker; empty where the study has none
    link: str | None  #: where the tracker shows it; None where it could not be reached

    @property
    def folder(self) -> Path:
        """The study's folder, with its report."""
        return self.store.study(self.plan.study)

    def results(self) -> pd.DataFrame:
        """One row per trial."""
        from vitlab.report import frame

        return frame.results(self.plan, self.store)


def run(
    file: str | Path,
    *,
    out: str | Path = OUT,
    changes: Mapping[str, Any] = {},
    plugins: Sequence[str | Path] = (),
    only: str = "*",
    retry_failed: bool = False,
    measure: bool = False,
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
        measure: measure what every arm costs on this machine, and put it into the report; see :mod:`vitlab.measuring`.
        watch: is told what happens.

    Raises:
        SpecError: with every mistake of the file; nothing is written then.
        UserError: if ``only`` names no arm; nothing is written then, either.
        Interrupted: after Ctrl-C, once every running trial has written its checkpoint.
    """
    watch = watch or Watch()
    store = Store(Path(out).resolve())

    def planned() -> tuple[Study, Plan]:
        return plan_study(file, changes=changes, plugins=plugins, out=out)

    study, plan = planned()
    arms = [arm.name for arm in plan.arms]
    if not any(_is_asked(arm, only) for arm in arms):
        raise UserError(f"no arm is called '{only}'.{nearest(only, arms)} Arms: {', '.join(arms)}.")
    plan = _with_data(plan, store, file, lambda: planned()[1])
    with _sole_driver(plan, store, watch) as waited:
        if waited:
            study, plan = planned()
        plan = _write_study(store, plan, file, changes)

        plan = _probed(study, plan, store, file, changes, plugins, watch)

        stages = []
        tracker = _tracker(plan, store, study.run)
        try:
            if plan.pending:
                rivals = [item for tuning in plan.tuning if tuning.open for item in _wanted(tuning, only)]
                stages.append(_train(plan, rivals, "*", store, study.run, plugins, retry_failed, tracker, watch))
                _write_study(store, _chosen(plan, store), file, changes)
                _, plan = planned()
                plan = _write_study(store, plan, file, changes)
                plan = _probed(study, plan, store, file, changes, plugins, watch)
                tracker = _tracker(plan, store, study.run)
            stages.append(_train(plan, plan.trials, only, store, study.run, plugins, retry_failed, tracker, watch))
            if study.run.explain:
                from vitlab.examination import examine_arms

                for sentence in examine_arms(plan, store, study.run.explain):
                    watch.say(sentence)
            if measure:
                from vitlab.measuring import measure_arms

                measure_arms(plan, store, study.run, plugins, watch.say)
        finally:
            from vitlab import report

            files = report.write(plan, store, store.study(plan.study) / "report")
            link = tracker.close(files)
    reasons = {tuning.failure for tuning in plan.tuning if tuning.failure}
    untuned = len(study.seeds.values) * sum(arm.skip in reasons for arm in plan.arms)
    trained, cached, failed = (sum(numbers) for numbers in zip(*stages, strict=True))
    return Answer(plan, store, trained, cached, failed + untuned, tracker.title, link)


def plan_study(
    file: str | Path,
    *,
    changes: Mapping[str, Any] = {},
    plugins: Sequence[str | Path] = (),
    out: str | Path = OUT,
) -> tuple[Study, Plan]:
    """Read and plan a study.  Reads no pixels, writes nothing, and builds models, without memory, only to match arms.

    Args:
        file: the study file.
        changes: see :func:`run`.
        plugins: see :func:`run`.
        out: the output folder, in which the choices of earlier tunings stand.

    Raises:
        SpecError: with every mistake of the file.
    """
    loaded = [slots.load_file(plugin) for plugin in plugins]
    study, document, problems = read_study(file, {_rooted(path): value for path, value in changes.items()})
    if study is not None:
        study = study.model_copy(update={"run": _own(study.run)})
        problems += _required(study, document, loaded)
        around = _around(study, document)
        problems += around or _untrusted(study, file, out)
    from vitlab.data.prepare import data_info
    from vitlab.plan import make_plan

    decided = _decided(Store(Path(out).resolve()), study) if study is not None and study.tune is not None else {}
    measured = study is not None and study.run.engine == "measured"
    probes = probes_of(_kept(Store(Path(out).resolve()), study)) if study is not None and measured else {}
    plan = make_plan(study, document, problems, data_info, _count, decided, probes)
    assert study is not None
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
    base = read_study(file, {_rooted(path): value for path, value in changes.items()})[1].data.get("base")
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
        info = data_info(slots.slot("dataset").resolve(planned.trial.spec["data"]))
        choice = json.dumps(planned.trial.spec["model"], sort_keys=True), info
        if choice not in known:
            with _without_memory():
                model = slots.slot("model").build(planned.trial.spec["model"], info)
            known[choice] = {"params": parameters(model), "macs": macs(model, info)}
        found[planned.arm] = known[choice]
    return found


def sync(
    folder: str | Path, *, tracker: str | None = None, tracking_uri: str | None = None
) -> list[tuple[str, str | None]]:
    """Deliver the journals of every study in an output folder.

    Args:
        folder: the output folder.
        tracker: the tracker to deliver to; by default the one each study names, and none where it names none.
        tracking_uri: an MLflow server or database, in the place of what the study names.

    Returns:
        study and link, None where the tracker could not be reached.

    Raises:
        UserError: for a tracker that is not installed, or a URI that MLflow cannot deliver to.
    """
    store = Store(Path(folder).resolve())
    if tracking_uri is not None and tracker not in (None, "mlflow"):
        raise UserError(f"a tracking URI is where MLflow is, and the tracker is {tracker}")
    elsewhere = tracker is not None or tracking_uri is not None
    changes = {"tracker": Choice(tracker or "mlflow"), "tracking_uri": tracking_uri} if elsewhere else {}
    links = []
    for file in sorted(store.root.glob("studies/*/plan.json")):
        plan = Plan.from_json(read_json(file))
        found = _tracker(plan, store, _run_spec(file.parent).model_copy(update=changes))
        if found.title:
            links.append((plan.study, found.close(sorted((file.parent / "report").glob("*")))))
    return links


def open_study(path: str | Path, *, out: str | Path = OUT) -> tuple[Plan, Store]:
    """The plan of a study that has been run, from its file or its folder.

    Raises:
        UserError: if it has not been run in ``out``.
    """
    path = Path(path)
    folder = path if path.is_dir() else Store(Path(out).resolve()).study(_name(path))
    data = read_json(folder / "plan.json")
    if data is None:
        known = sorted(item.parent.name for item in Path(out).glob("studies/*/plan.json"))
        studies = f" Studies there: {', '.join(known)}.{nearest(folder.name, known)}" if known else ""
        raise UserError(f"study '{folder.name}' has not been run in {out}; 'vitlab run' runs it.{studies}")
    return Plan.from_json(data), Store(folder.resolve().parent.parent)


def driver_of(study: str, store: Store) -> str:
    """Who runs a study at present, in words; empty where nobody does."""
    lock = store.driver(study)
    if not held(lock):
        return ""
    host, _, rest = holder(lock)[0].partition("/")
    return f"process {rest.partition('/')[0]} on {host}" if host else "another process"


def results(path: str | Path, *, out: str | Path = OUT) -> Results:
    """The results of a study as a frame, one row per trial, whatever became of it.

    Columns: ``study, arm, baseline, seed, trial, code, status, failure_kind, failure``, one per varied path,
    ``val/...``, ``test/...`` and ``train/...``, and ``params, macs, steps, images, wall_s, engine, threads, device,
    origins``.  Types and meanings stand in ``BEFORE`` and ``AFTER`` of :mod:`vitlab.report.frame`.  In a notebook the
    frame shows what a reader looks up about each trial.

    Raises:
        UserError: if the study has not been run in ``out``.
    """
    from vitlab.report import frame
    from vitlab.report.notebook import Results

    return Results(frame.results(*open_study(path, out=out)))


def compare(first: str | Path, second: str | Path | None = None, *, out: str | Path = OUT) -> Compared:
    """The judgement of a study as a frame, one row per arm, or that of two studies.

    Of two studies, every arm of ``second`` is compared with its namesake in ``first``.  The columns are those of
    ``MEANINGS`` in :mod:`vitlab.report.judgement`, whatever the study.  In a notebook the frame shows the answers
    first; ``.answers`` holds them as text, and ``.notes`` what the reader must know before believing them.

    Raises:
        UserError: if a study has not been run in ``out``, or the two have no metric or no arm in common.
    """
    from vitlab.report.between import between
    from vitlab.report.notebook import Compared

    plan, store = open_study(first, out=out)
    if second is None:
        return Compared.of_study(plan, store)
    found = between((plan, store), open_study(second, out=out))
    return Compared.of(found.summary, found.plan.analysis, found.notes)


def predictions(path: str | Path, *, out: str | Path = OUT) -> pd.DataFrame:
    """Per-example predictions of every finished trial of a study, with the arm and the seed they belong to."""
    import pandas as pd

    plan, store = open_study(path, out=out)
    frames = []
    for planned in plan.trials:
        folder = _folder(store, planned)
        if folder.predictions.exists():
            frames.append(pd.read_parquet(folder.predictions).assign(arm=planned.arm, seed=planned.seed))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def load(path: str | Path, *, arm: str = "baseline", seed: int = 0, out: str | Path = OUT) -> Any:
    """A trained model and the transform that turns images into what it reads: ``model, transform = vitlab.load(...)``.

    Args:
        path: of a study, or a folder that MLflow gave back for a model stored there.
        arm: of the study.
        seed: of the study.
        out: the output folder, where ``path`` is a study's file.

    Raises:
        UserError: if there is no such trial, or it kept no weights.
    """
    from vitlab.trial.models import load_model

    folder = TrialFolder(Path(path))
    if folder.weights.is_file() and folder.spec.is_file():
        return load_model(folder)
    plan, store = open_study(path, out=out)
    trial = plan.find(arm, seed)
    return load_model(store.trial(trial.key, trial.code))


# -- how it is done ---------------------------------------------------------------------------------------------------


@contextmanager
def _sole_driver(plan: Plan, store: Store, watch: Watch) -> Iterator[bool]:
    """Hold the study; as long as another process does, look on.  Yields whether there was one."""
    lock = store.driver(plan.study)
    waited = False
    with ExitStack() as held_here:
        while True:
            try:
                held_here.enter_context(hold(lock))
                break
            except Busy:
                waited = True
            other = driver_of(plan.study, store) or "another process"
            watch.say(f"{plan.study} is run by {other}; this one looks on until that ends.")
            trials = distinct(
                [*plan.trials, *(item for tuning in plan.tuning if tuning.open for item in tuning.trials)]
            )
            watch.planned(plan, [item for item in trials if not _folder(store, item).done()], store)
            try:
                look_on(trials, store, lambda: held(lock), watch)
            finally:
                watch.close()
        yield waited


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
) -> tuple[int, int, int]:
    """Train what is missing of some trials.  Returns how many were trained, were there already, and failed."""
    starters = [*(planned.trial for planned in trials), *plan.prerequisites]
    needed = {name for trial in starters for name in trial.needs.values()}
    missing: list[Planned] = []
    for planned in trials:
        if _is_there(store, planned, needed):
            _folder(store, planned).tidy()
        else:
            missing.append(planned)
    parked: list[Planned] = []

    def unparked(some: Sequence[Planned]) -> list[Planned]:
        left: list[Planned] = []
        for planned in some:
            failed = not retry_failed and _folder(store, planned).given_up()
            (parked if failed else left).append(planned)
        return left

    todo = unparked(distinct([planned for planned in missing if _is_asked(planned.arm, only)]))
    todo = unparked(with_prerequisites(plan, todo, store))
    if parked:
        watch.say(f"{_trials(len(parked))} failed before under this code; --retry-failed trains them again.")
    watch.planned(replace(plan, trials=tuple(trials)), todo, store)
    try:
        failed = execute(todo, store, run_spec, plugins, tracker, watch, plan.probes)
    finally:
        watch.close()
    return len(todo), len(trials) - len(missing), failed + len(parked)


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
    return read_json(store.study(study.study) / "plan.json") or {}


def _probed(
    study: Study,
    plan: Plan,
    store: Store,
    file: str | Path,
    changes: Mapping[str, Any],
    plugins: Sequence[str | Path],
    watch: Watch,
) -> Plan:
    """The plan, once the engine of what is to be trained has been measured, where the study asks for that."""
    todo = [planned for planned in (*plan.trials, *plan.pending) if not _folder(store, planned).done()]
    shapes = unprobed(todo, plan.probes) if study.run.engine == "measured" else {}
    if not shapes:
        return plan
    from vitlab.measuring import probe

    found = {**plan.probes, **probe(shapes, store, study.run, plugins, watch.say)}
    _write_study(store, replace(plan, probes=found), file, changes)
    again = plan_study(file, changes=changes, plugins=plugins, out=store.root)[1]
    return _write_study(store, again, file, changes)


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
    from vitlab.data.prepare import missing

    needed = [planned.trial.spec["data"] for planned in _all(plan) if not _folder(store, planned).done()]
    for choice in {str(choice): choice for choice in needed}.values():
        if reason := missing(choice):
            raise SpecError([read_document(file).problem(("base", "data", "root"), reason)])
    pending = [planned.trial.spec["data"] for planned in _all(plan) if planned.trial.data is None]
    absent = {str(choice): choice for choice in pending}
    if not absent:
        return plan
    for choice in absent.values():
        slots.slot("dataset").build(choice).read("train")
    plan = again()
    if any(planned.trial.data is None for planned in _all(plan)):
        raise DataError("a data set was read and still has no identity; its info() must name one once it is here")
    return plan


def _all(plan: Plan) -> list[Planned]:
    """Every trial a plan names, those that a tuning awaits or consists of among them."""
    return [*plan.trials, *plan.pending, *(planned for tuning in plan.tuning for planned in tuning.trials)]


def _write_study(store: Store, plan: Plan, file: str | Path, changes: Mapping[str, Any]) -> Plan:
    """Write what a study is.  Returns the plan, with how its answer was to be judged when it was first run."""
    folder = store.study(plan.study)
    plan = registered(plan, read_json(folder / "plan.json"), lambda *trial: store.trial(*trial).done())
    write_bytes(folder / "study.yaml", Path(file).read_bytes())
    write_json(folder / "changes.json", dict(changes))
    write_json(folder / "plan.json", plan.to_json())
    return plan


def _without_memory() -> Any:
    import torch

    return torch.device("meta")


def _run_spec(folder: Path) -> RunSpec:
    """How a study was last run: its file, and what was changed on the command line."""
    changes: Mapping[str, Any] = read_json(folder / "changes.json") or {}
    study, _, problems = read_study(folder / "study.yaml", {_rooted(path): value for path, value in changes.items()})
    if study is None:
        raise SpecError(problems)
    return _own(study.run)


def _own(run_spec: RunSpec) -> RunSpec:
    """How a study is run: by our executor and tracker where it names none, whoever else offers their names."""
    silent = [name for name in ("executor", "tracker") if name not in run_spec.model_fields_set]
    own = {name: Choice(slots.slot(name).own(getattr(run_spec, name).type)) for name in silent}
    return run_spec.model_copy(update=own)


def _required(study: Study, document: Document, loaded: Iterable[slots.Origin]) -> list[Any]:
    problems = []
    files = {origin.source for origin in loaded}
    for index, name in enumerate(study.plugins.require):
        place = ("plugins", "require", index)
        if name.endswith(".py"):
            if name not in files:
                problems.append(document.problem(place, f"this study needs {name}: add --plugin PATH/{name}"))
            continue
        if sentence := guests.unmet(name):
            problems.append(document.problem(place, sentence))
    return problems


def _tracker(plan: Plan, store: Store, run_spec: RunSpec) -> Tracker:
    from vitlab.trackers import Aside

    built: Tracker = slots.slot("tracker").build(run_spec.tracker, plan, store, run_spec)
    return Aside(built) if built.title else built


def _around(study: Study, document: Document) -> list[Problem]:
    """What is wrong with the choices of an executor and a tracker, which no trial's identity holds."""
    problems = []
    for name, choice in (("executor", study.run.executor), ("tracker", study.run.tracker)):
        try:
            slots.slot(name).resolve(choice)
        except OptionError as error:
            problems += [document.problem(("run", name, *path), sentence) for path, sentence in error.faults]
    return problems


def _untrusted(study: Study, file: str | Path, out: str | Path) -> list[Problem]:
    """What a study file may not say, because it comes from others: it would run code, or write elsewhere."""
    document = read_document(file)
    said = document.data.get("run")
    said = said if isinstance(said, Mapping) else {}
    problems = []
    choice = said.get("executor")
    if isinstance(choice, Mapping) and choice.get("type") == study.run.executor.type:
        name = slots.slot("executor").resolve(study.run.executor).component.by_hand(choice)  # type: ignore[attr-defined]
        if name is not None and study.run.executor.options.get(name) == choice[name]:
            sentence = f"'{name}' has code run, so only who starts the study may give it: --set run.executor.{name}=..."
            problems.append(document.problem(("run", "executor", name), sentence))
    uri = said.get("tracking_uri")
    if isinstance(uri, str) and uri == study.run.tracking_uri:
        from vitlab.trackers.address import locate

        root, sentence = Path(out).resolve(), ""
        try:
            database = locate(uri, root).database
            if database is not None and not database.is_relative_to(root):
                sentence = f"a study file writes nowhere but to the output folder, and {database} is not in it; "
                sentence += "give it as --tracking-uri, or set MLFLOW_TRACKING_URI"
        except UserError as error:
            sentence = str(error)
        if sentence:
            problems.append(document.problem(("run", "tracking_uri"), sentence))
    return problems


def _rooted(path: str) -> str:
    """``data.root`` is short for ``base.data.root``."""
    return path if path.split(".")[0] in Study.model_fields else f"base.{path}"


def _name(file: Path) -> str:
    if not file.exists() and file.suffix not in (".yaml", ".yml"):
        return str(file)
    name = read_document(file).data.get("study")
    if not isinstance(name, str):
        raise UserError(f"{file} names no study; it begins with 'study: NAME'")
    return name


def _trials(count: int) -> str:
    return f"{count} trial{'s' if count != 1 else ''}"
