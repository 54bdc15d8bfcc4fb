"""Planning of a study file with what this machine has: plugins, data sets, and the decisions of earlier runs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitlab import registry
from vitlab.driver.session import Session
from vitlab.errors import (
    BrokenComponent,
    ClashError,
    DataError,
    Problem,
    SpecError,
    UnknownComponent,
    UserError,
    VitlabError,
    public,
)
from vitlab.executors.machine import device_type, notes_on_unused_mps
from vitlab.planning.engine_choice import RULES, unbenchmarked_trials_by_shape
from vitlab.planning.packaged import find_or_write_study_file
from vitlab.planning.study_folder import qualify_default_builtins, read_decisions, select_result_content, version_name
from vitlab.planning.tune import decide_tuning
from vitlab.planning.values import UNDECIDED, Plan, Planned
from vitlab.registry import slot
from vitlab.registry.options import check_arguments
from vitlab.registry.slots import UNVERSIONED
from vitlab.spec import Choice, Document, RunSpec, Study, read_document, read_study
from vitlab.spec.changes import format_changes, full_path
from vitlab.spec.design import format_value
from vitlab.spec.tree import Tree, Values
from vitlab.spec.trial import SOURCES
from vitlab.store.files import read_json, require_mapping
from vitlab.store.folders import OUT, Store

if TYPE_CHECKING:
    import pandas as pd

    from vitlab.geometry import DataInfo
    from vitlab.identity.trial import Trial
    from vitlab.models.cost import Cost


def warm_up_tracker_and_executor(file: str | Path, changes: Values, store: Store) -> None:
    """Have tracker and executor of a study start up while it is planned, unless its last run left nothing to train."""
    with suppress(VitlabError, OSError, LookupError, TypeError):
        study, _, problems = read_study(file, changes)
        if study is None or problems:
            return
        folder = store.study(study.study)
        plan = read_json(folder / "plan.json", require_mapping) or {}
        same = (folder / "study.yaml").is_file() and (folder / "study.yaml").read_bytes() == Path(file).read_bytes()
        if not same or not all(store.trial(item["key"], item["code"]).done() for item in plan["trials"]):
            slot("tracker").get(study.run.tracker.type).prepare()  # first, as it may fork this process
            slot("executor").get(study.run.executor.type).prepare()


def plan_study(
    file: str | Path,
    *,
    changes: Values = {},
    plugins: Sequence[str | Path] = (),
    out: str | Path = OUT,
    versions: Mapping[str, str] = {},
) -> tuple[Study, Plan]:
    """Read and plan a study without reading images or writing files.

    Models are built on the meta device, and only to match arms.

    Args:
        file: the study file.
        changes: see :func:`vitlab.run`.
        plugins: see :func:`vitlab.run`.
        out: the output folder, which has the decisions of earlier runs, such as the choices of tunings.
        versions: see :func:`vitlab.run`.

    Raises:
        SpecError: if the file or a change is wrong, with every mistake; a value set by a change has it as its place.
    """
    loaded = [registry.load_file(plugin) for plugin in plugins]
    study, document, problems = _read_and_check_study(file, changes, loaded, out)
    from vitlab.data.prepare import data_info
    from vitlab.identity.code import Surroundings
    from vitlab.planning.expand import Machine, make_plan

    store = Store(Path(out).resolve())
    decisions = read_decisions(store, study) if study is not None and not problems else UNDECIDED
    surroundings = Surroundings(_component_file_modules(study, loaded), versions)
    machine = Machine(data_info, _count_cost, surroundings, "cpu" if study is None else device_type(study.run))
    try:
        plan = make_plan(study, document, problems, machine, decisions)
    except SpecError as error:
        mistakes = _leave_out_values_of_repeated_keys(error.mistakes, document)
        if any(cause.path[:2] == ("plugins", "require") for cause in problems):  # the plugin may have the component
            mistakes = [each for each in mistakes if not re.match(r"no \w+ called '", each.message)]
        plan_file = partial(plan_study, file, plugins=plugins, out=out)
        raise SpecError(
            _attribute_problems_to_changes(mistakes, document, changes, plan_file) if changes else mistakes
        ) from None
    assert study is not None  # otherwise make_plan has raised the problems
    if study.run.tracker.options:
        slot("tracker").build(study.run.tracker, plan, store, study.run)  # raises if they cannot work
    _require_components_of_workers(plan, study.run, plugins, document)
    _require_whole_batches(plan, study.run, document)
    notes = (*plan.notes, *_notes_on_data_and_averages(plan, document, store), *notes_on_unused_mps(study.run.device))
    plan = replace(plan, notes=notes, version=version_name(select_result_content(document.data)))
    # The plan's analysis has the goal of its metric, which a file may leave out.
    return study.model_copy(update={"analysis": plan.analysis}), plan


def _leave_out_values_of_repeated_keys(mistakes: Sequence[Problem], document: Document) -> Sequence[Problem]:
    """Return the mistakes without those in the value of a repeated key: nobody knows which value is meant."""
    keys = document.repeated
    return [
        each for each in mistakes if each in keys or not any(each.path[: len(key.path)] == key.path for key in keys)
    ]


def _notes_on_data_and_averages(plan: Plan, document: Document, store: Store) -> list[str]:
    """Return notes on the data of this machine, and on averages of weights by their number of images.

    Raises:
        SpecError: with the pictures that cannot be read.
    """
    from vitlab.data.prepare import DataSource
    from vitlab.planning.sources import notes_on_short_ema

    distinct = {str(data): data for data in (item.trial.spec.data for item in plan.trials_and_pending)}
    try:
        about_data = [note for data in distinct.values() for note in DataSource(data).check_pictures_and_note()]
    except DataError as error:
        raise SpecError([document.problem(("base", "data"), str(error))]) from None
    missing = [f"data not here: {reason}" for reason in _reasons_for_missing_data(plan, store)]
    about_averages = notes_on_short_ema(plan, lambda data, seeds: DataSource(data).count_training_images(seeds))
    return [*about_averages, *dict.fromkeys(about_data), *missing]


def _attribute_problems_to_changes(
    problems: Sequence[Problem], document: Document, changes: Values, plan_file: Callable[[], object]
) -> Iterator[Problem]:
    """Yield the problems; one that the file without changes does not have names these, or is at the closest."""
    in_file: Sequence[Problem] = ()
    try:
        plan_file()
    except VitlabError as error:
        in_file = error.mistakes
    for each in problems:
        if not each.line or each in in_file:
            yield each
        elif each.path[:1] == ("base",):
            yield document.problem(each.path, each.message, by_change=True)
        else:
            yield replace(each, message=f"{each.message} (with {format_changes(changes)})")


def _read_and_check_study(
    file: str | Path, changes: Values, loaded: Sequence[registry.Origin], out: str | Path
) -> tuple[Study | None, Document, list[Problem]]:
    """Return a study with the changes, its source, and the mistakes so far; None if too little of it is sound."""
    study, document, problems = read_study(file, changes)
    if study is not None:
        study = study.model_copy(update={"run": qualify_default_builtins(study.run)})
        files = {origin.source for origin in loaded}
        for index, name in enumerate(study.plugins.require):
            if name.endswith(".py"):
                sentence = None if name in files else f"this study needs {name}: add --plugin PATH/{name}"
            else:
                sentence = registry.plugins.why_requirement_unmet(name)
            if sentence:
                problems.append(document.problem(("plugins", "require", index), sentence))
        problems += _check_run_section(study, document) or _find_untrusted_options(study, document, out, changes)
    return study, document, problems


def plan_with_due_decisions(plan: Plan, session: Session) -> Plan:
    """Return the plan with the decisions that are due: tunings, looks, and engine benchmarks.

    Args:
        plan: the plan of a study, with its registration.
        session: the run; engines are measured, which takes a while, if its ``engine`` is ``measured``.
    """
    tunings = (
        decide_tuning(item, lambda trial: session.store.folder(trial).result(), plan.analysis) if item.open else item
        for item in plan.tuning
    )
    decided = replace(plan, tuning=tuple(tunings))
    if plan.looks is not None:
        from vitlab.report.comparison import looks_with_open_arms

        decided = replace(decided, looks=looks_with_open_arms(plan, session.store))
    if session.run.engine == "measured" and decided == plan:  # otherwise other trials may be planned
        missing = [item for item in plan.trials_and_pending if not session.store.folder(item.trial).done()]
        if shapes := unbenchmarked_trials_by_shape(missing, plan.probes):
            from vitlab.driver.benchmark import benchmark_engines

            decided = replace(plan, probes={**plan.probes, **benchmark_engines(plan, shapes, session)})
    return decided


def fetch_unidentified_data(plan: Plan, store: Store, file: str | Path) -> bool:
    """Read the data sets of a plan that have no identity yet, which may download them; return True if there were any.

    Raises:
        SpecError: if the data of a missing trial is not on this machine.
    """
    from vitlab.data.prepare import data_info

    if reasons := _reasons_for_missing_data(plan, store):
        document = read_document(file)
        raise SpecError([document.problem(("base", "data", "root"), reason) for reason in reasons])
    unread = {
        str(data): data for data in (item.trial.spec.data for item in _all_trials(plan) if item.trial.data is None)
    }
    for data in unread.values():
        slot("dataset").build(data).read("train")
        if data_info(data).identity is None:
            raise DataError(
                f"{data.type} has no identity after reading; its method 'info' must return one if the data exists"
            )
    return bool(unread)


@check_arguments()
def plan(
    file: str | Path | Mapping[str, object],
    *,
    out: str | Path = OUT,
    changes: Mapping[str, object] = {},
    plugins: Sequence[str | Path] = (),
) -> pd.DataFrame:
    """Return the plan of a study as a frame, one row per trial; nothing is trained.

    Columns: ``arm``, ``seed``, ``trained`` (whether its result is stored), ``params``, ``macs`` (the
    multiply-accumulates of one image, forward), and one per varied path, of numbers or short text.

    Args:
        file: see :func:`vitlab.run`.
        out: the output folder, which has the results of earlier runs.
        changes: see :func:`vitlab.run`.
        plugins: see :func:`vitlab.run`.

    Raises:
        SpecError: if the file is wrong, with every mistake.
    """
    import pandas as pd

    from vitlab.report.notebook import NamedFrame

    path = find_or_write_study_file(file, out)
    _, planned = plan_study(path, changes=changes, plugins=plugins, out=out)
    store, by_arm = Store(Path(out).resolve()), count_params_and_macs(planned, path)
    trials = pd.DataFrame(
        {
            "arm": item.arm,
            "seed": item.seed,
            "trained": store.folder(item.trial).done(),
            **by_arm[item.arm],
            **planned.arm(item.arm).values,
        }
        for item in planned.trials_and_pending
    ).map(lambda value: format_value(value) if isinstance(value, Mapping | list) else value)
    return NamedFrame.from_table(trials, f"plan of {planned.study}", ["arm", "seed", "trained", "params", "macs"])


def count_params_and_macs(
    plan: Plan,
    file: str | Path,
    check_components: Callable[[Plan], None] = lambda _: None,
    check_weights_of_role: Callable[[Trial, str], None] = lambda *_: None,
) -> dict[str, dict[str, int]]:
    """Return parameters and multiply-accumulates (one image, forward) of each arm's model, built on the meta device.

    Arms with the same model and weights share its cost, and arms with the same mistake its sentence.
    ``check_components`` is called if a model with a plugin's component fails in other code, as after a wrong shape, and
    may raise the reason.  ``check_weights_of_role`` raises if a trial's model and the weights of a role do not fit; by
    default, no weights are opened.

    Raises:
        SpecError: if models cannot be built, with every mistake.
        BrokenComponent: the same, if a plugin is the reason for one of them.
    """
    from vitlab.data.prepare import data_info

    alike: dict[tuple[str, DataInfo], list[Planned]] = defaultdict(list)
    firsts = {item.arm: item for item in reversed(plan.pending)} | plan.first_trials
    for planned in (*firsts.values(), *plan.labelled_prerequisites):
        spec = planned.trial.spec
        alike[str((spec.model, spec.init_from, spec.distill)), data_info(spec.data)].append(planned)
    by_arm: dict[str, dict[str, int]] = {}
    faults, is_plugin_broken = defaultdict[tuple[tuple[str, ...], str], list[str]](list), False
    for (_, info), arms in alike.items():
        trial, place = arms[0].trial, tuple[str, ...](("model",))
        model = trial.spec.model
        try:
            cost = _count_cost(model, info)
            for role in trial.spec.sources():
                place = SOURCES[role]
                check_weights_of_role(trial, role)
        except Exception as error:
            sentence = registry.plugins.sentence_with_place(error)
            is_plugin_broken |= not isinstance(error, UserError)
            if not isinstance(error, UserError) and registry.plugins.find_plugin_frame(error) is None:
                places = [
                    f"{part.slot} '{part.type}' ({registry.plugins.place_of_class(part.component)})"
                    for part in slot("model").resolve_choice(model).walk()
                    if part.origin.source != registry.BUILT_IN
                ]
                if not places:
                    raise  # a fault of vitlab, which its traceback explains
                check_components(plan)
                sentence += f"; what {', '.join(places)} returns may have a wrong shape"
            faults[place, sentence].append(f"'{arms[0].arm}'")
        else:
            by_arm |= {item.arm: {"params": cost.params, "macs": cost.macs} for item in arms}
    mistakes = [
        (("base", *place), f"in the {place[-1]} of arm {' and of arm '.join(names)}: {sentence}")
        for (place, sentence), names in faults.items()
    ]
    if is_plugin_broken:
        raise BrokenComponent(*(sentence for _, sentence in mistakes))
    if mistakes:
        document = read_document(file)
        raise SpecError(document.problem(*mistake) for mistake in mistakes)
    return {arm.name: by_arm[arm.name] for arm in plan.arms if arm.name in by_arm}


def _component_file_modules(study: Study | None, loaded: Sequence[registry.Origin]) -> frozenset[str]:
    """Return the modules of the files of components that the process of a trial will have loaded."""
    if study is not None:
        with suppress(VitlabError):  # a wrong executor is reported with the file's mistakes
            if slot("executor").get(study.run.executor.type).in_driver:
                return frozenset(registry.plugins.files)
    return frozenset(map(registry.plugins.file_module_name, loaded))


def _require_components_of_workers(plan: Plan, run: RunSpec, plugins: Sequence[str | Path], document: Document) -> None:
    """Raise SpecError for each component of a plan that is defined where the executor's workers do not find it."""
    problems = []
    trials = [*plan.prerequisites, *(item.trial for item in _all_trials(plan))]
    for origin in sorted({origin for trial in trials for origin in trial.origins}):
        component, source, version = origin.rsplit(" ", 2)
        name, is_main = component.replace(":", " '", 1), source == "__main__"
        # A plugin file may import another module, which the workers then find, too.
        if version != UNVERSIONED or (plugins and not is_main) or slot("executor").get(run.executor.type).in_driver:
            continue
        where = "this notebook or script" if is_main else f"module {source}"
        sentence = (
            f"{name}' is defined in {where}, which the workers of executor '{run.executor.type}' do not import; give "
            "them a file by --plugin FILE (in Python plugins=['FILE']) or a package with an entry point, or set "
            "run.executor: inline"
        )
        problems.append(document.problem(("run", "executor"), sentence))
    if problems:
        raise SpecError(problems)


def _count_cost(choice: Choice | Tree, info: DataInfo) -> Cost:
    from vitlab.models.cost import cost_of

    return cost_of(choice, info)


def _require_whole_batches(plan: Plan, run: RunSpec, document: Document) -> None:
    """Raise SpecError if a setting cuts the batches of an objective that needs them whole."""
    name = "micro_batch_size" if run.micro_batch_size is not None else "resources" if run.resources.together > 1 else ""
    for choice in (planned.trial.spec.train.objective for planned in _all_trials(plan) if name):
        component: Any = slot("objective").get(choice.type)
        if component.whole_batch:
            what = "run.micro_batch_size" if name == "micro_batch_size" else "the several processes of run.resources"
            sentence = f"objective '{choice.type}' needs the images of a step in one piece; remove {what}"
            raise SpecError([document.problem(("run", name), sentence)])


def _reasons_for_missing_data(plan: Plan, store: Store) -> list[str]:
    """Return the reason for each data set that a missing trial needs and this machine does not have.

    Only trials whose data is missing are looked up in the store.
    """
    from vitlab.data.prepare import DataSource

    trials: defaultdict[str, list[Planned]] = defaultdict(list)
    for planned in _all_trials(plan):
        trials[str(planned.trial.spec.data)].append(planned)
    reasons = (
        reason
        for items in trials.values()
        if (reason := DataSource(items[0].trial.spec.data).missing())
        and not all(store.folder(item.trial).done() for item in items)
    )
    return list(dict.fromkeys(map(str, reasons)))


def _all_trials(plan: Plan) -> list[Planned]:
    """Return every trial of a plan, including pending trials and trials of tunings."""
    return [*plan.trials_and_pending, *plan.rival_trials]


# -- checks before planning -------------------------------------------------------------------------------------------


def _check_run_section(study: Study, document: Document) -> list[Problem]:
    """Return the problems of the engine, the executor and the tracker, which are part of no trial's identity."""
    problems = []
    for name, choice in (("executor", study.run.executor), ("tracker", study.run.tracker)):
        faults = slot(name).check_choice(choice).faults
        problems += [document.problem(("run", name, *path), sentence) for path, sentence in faults]
    executor, nodes = slot("executor"), study.run.resources.nodes
    if not problems and nodes > 1 and not executor.get(study.run.executor.type).several_nodes:
        sentence = (
            f"executor '{study.run.executor.type}' runs a trial on one machine; use ray or slurm, or remove nodes"
        )
        problems.append(document.problem(("run", "resources", "nodes"), sentence))
    if study.run.engine not in RULES:
        try:
            slot("engine").find(study.run.engine)
        except (UnknownComponent, ClashError) as error:
            sentence = f"{error} Rules that choose one: {', '.join(RULES)}."
            problems.append(document.problem(("run", "engine"), sentence))
    return problems


def _find_untrusted_options(study: Study, document: Document, out: str | Path, changes: Values) -> Iterator[Problem]:
    """Yield the problems of options that would let a study file run code, write elsewhere or send results away.

    A study file may come from other people, so whoever starts the study gives such options on the command line.
    """
    run = document.written.get("run")
    run = run if isinstance(run, Mapping) else {}
    choice = run.get("executor")
    if isinstance(choice, Mapping) and choice.get("type") == study.run.executor.type:
        name = slot("executor").resolve_choice(study.run.executor).component.cli_only_option(choice)
        if name is not None and study.run.executor.options.get(name) == choice[name]:
            sentence = f"'{name}' runs code, so a study file may not set it; write --set run.executor.{name}=..."
            yield document.problem(("run", "executor", name), sentence)
    choice, component = run.get("tracker"), slot("tracker").resolve_choice(study.run.tracker).component
    for name, value in choice.items() if isinstance(choice, Mapping) else ():
        sentence = ""
        if isinstance(value, str) and public(value) != value:  # the file is copied to the output folder
            sentence = f"a study file holds no password; give this option as --set run.tracker.{name}=..."
        elif not any(f"run.tracker.{name}.".startswith(f"{change}.") for change in map(full_path, changes)):
            sentence = component.reason_to_confirm(name, value, Path(out).resolve())
        if sentence:
            yield document.problem(("run", "tracker", name), sentence)
