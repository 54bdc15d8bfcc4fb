"""``vitlab plan`` and ``validate``: what would be trained, and every mistake of files, before paying for anything."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from vitlab.cli import print_json, wants_json
from vitlab.cli.completion import complete_packaged_or_file
from vitlab.cli.options import PATH, add_study_options, find_study_file, parse_changes, plugin_option, set_option
from vitlab.errors import BrokenComponent, Problem, SpecError, UserError, format_count
from vitlab.executors.machine import device_type
from vitlab.planning.match import BACKWARD
from vitlab.planning.tune import PENDING, format_knobs
from vitlab.planning.values import Plan, Tuning
from vitlab.report.formats import parts_to_text
from vitlab.report.phrasing import Column, Columns, format_compact, format_duration
from vitlab.spec.design import format_value
from vitlab.store.folders import PAUSED, Store
from vitlab.store.result import Ending


@click.command()
@add_study_options
@click.option(
    "--cost",
    is_flag=True,
    help="Add parameters and multiply-accumulates (MACs) of each arm, and on a GPU its estimated training time.",
)
@click.option(
    "--device-tflops",
    type=click.FloatRange(min=0, min_open=True),
    help="Peak rate of a GPU for the times of --cost, in TFLOP/s: in bf16 an A100 has 312, the default, an H100 989. "
    "Without it, a study that will run on a CPU has no times: they are not known before a training.",
)
@click.option(
    "--power",
    is_flag=True,
    help="Say what the study will be able to detect, by the spread of earlier trainings in the output folder.",
)
def plan_command(
    file: Path,
    out: Path,
    changes: tuple[str, ...],
    plugins: tuple[Path, ...],
    cost: bool,
    device_tflops: float | None,
    power: bool,
) -> None:
    """Show the arms and trials of FILE: what runs, what is skipped and why, what has been trained."""
    from vitlab.driver.planning import plan_study
    from vitlab.driver.session import describe_outdated
    from vitlab.report.power import forecast

    file = find_study_file(file)
    study, plan = plan_study(file, changes=parse_changes(changes), plugins=plugins, out=out)
    store = Store(out.resolve())
    folders = {trial.name: store.folder(trial) for trial in plan.trials_with_keys}
    states = {name: Ending.DONE if folder.done() else folder.state() for name, folder in folders.items()}
    device = device_type(study.run)
    costs = _estimate_costs_by_arm(plan, file, device, device_tflops) if cost else {}
    if wants_json():
        data = plan.to_json()
        if power:
            data["power"] = asdict(forecast(plan, store))
        rival_trials = [trial for tuning in data["tuning"] for rival in tuning["rivals"] for trial in rival["trials"]]
        for trial in (*data["trials"], *rival_trials):
            state = states[f"{trial['key']}/{trial['code']}"]
            trial |= {"cached": state == Ending.DONE, "paused": state == PAUSED}
        for arm in data["arms"]:
            arm["cost"] = asdict(costs[arm["name"]]) if arm["name"] in costs else None
        print_json(data)
        return
    sentences = [*plan.notes, *(f"{arm.name}: {arm.note}" for arm in plan.arms if arm.note)]
    sentences += _describe_tuning(plan.tuning, states)
    # Figures are in the JSON; of several engines, the table has each arm's.
    reasons = {(arm.engine, arm.engine_reason.partition(":")[0]) for arm in plan.arms if arm.engine_reason}
    sentences += [f"Engine {engine} on {device}: {reason}." for engine, reason in sorted(reasons)]
    if len({arm.engine for arm in plan.arms if arm.engine}) > 1:
        sentences.append(
            "Engines round differently. To compute all arms alike, set run.engine: loop before the first run."
        )
    if costs:
        sentences.append(_describe_costs(plan, costs))
    sentences += [_describe_trials(plan, states), *describe_outdated(folders.values())]
    sentences += _describe_remaining_time(plan, store, states)
    columns = _arm_columns(plan, states, costs)
    click.echo(parts_to_text(*filter(None, [plan.question]), columns, *_skipped_arms(plan), *sentences), nl=False)
    if power:
        click.echo(parts_to_text(*forecast(plan, store).sentences(plan)), nl=False)


@dataclass(frozen=True)
class ArmCost:
    """Cost of an arm's model and of one training; None where it is unknown."""

    params: int
    macs: int  #: multiply-accumulates of one image, forward
    images: int | None
    train_macs: int | None
    hours_at_peak: float | None  #: of one GPU at its peak rate
    tflops: float | None  #: the peak rate; None for a CPU


States = Mapping[str, str]
"""The state of each trial by its name; see :meth:`~vitlab.store.folders.TrialFolder.state`."""

PEAK_SHARES = 36, 8
"""Percent of an H100's 989 TFLOP/s in bf16 at which ViT-B/16 by ``compiled`` and ViT-Ti/16 by ``loop`` were trained.

The MFU of BENCHMARKS.md is relative to a measured 720."""

Costs = Mapping[str, ArmCost]
"""The cost of each arm by its name."""


def _estimate_costs_by_arm(plan: Plan, file: Path, device: str, tflops: float | None) -> Costs:
    from vitlab.data.prepare import DataSource
    from vitlab.driver.planning import count_params_and_macs

    if not tflops and device != "cpu":
        tflops = 312.0
    trials = {planned.arm: planned.trial for planned in reversed(plan.trials_and_pending)}
    examples_by_data: dict[tuple[str, int, int], int | None] = {}
    by_arm = {}
    for arm, cost in count_params_and_macs(plan, file).items():
        spec, seeds = trials[arm].spec, trials[arm].seeds
        data = str(spec.data), seeds["split"], seeds["subset"]
        # Only epochs depend on the number of examples, for which data may have to be read.
        if spec.train.epochs is not None and data not in examples_by_data:
            examples_by_data[data] = DataSource(spec.data).count_training_images(seeds)
        images = spec.train.images_seen(examples_by_data.get(data))
        work = None if images is None else BACKWARD * cost["macs"] * images
        # A multiply-accumulate is two operations, and an hour has 3600 s.
        hours = work and tflops and work / (tflops * 1.8e15)
        by_arm[arm] = ArmCost(cost["params"], cost["macs"], images, work, hours, tflops)
    return by_arm


def _skipped_arms(plan: Plan) -> list[str]:
    return [f"{arm.name}: skipped: {arm.skip}" for arm in plan.arms if arm.skip]


def _arm_columns(plan: Plan, states: States, costs: Costs) -> list[Column]:
    """Return the table of the arms; columns that repeat an arm's name are the first to go in a narrow terminal."""
    trials = Counter(planned.arm for planned in plan.trials_and_pending)
    by_state = Counter((planned.arm, states[planned.trial.name]) for planned in plan.trials)
    pending = {planned.arm for planned in plan.pending}
    column, engines = Columns(plan.arms), {arm.engine for arm in plan.arms if arm.engine}
    values = ((path, tuple(format_value(arm.values[path]) for arm in plan.arms)) for path in plan.paths)
    columns = [
        column("arm", lambda arm: arm.name, right=False),
        *(Column(path.rpartition(".")[2], texts, rank=6, right=False) for path, texts in values),
        column("against", lambda arm: arm.baseline or "", rank=1, right=False),
        column("trials", lambda arm: str(trials[arm.name])),
        column("cached", lambda arm: PENDING if arm.name in pending else str(by_state[arm.name, Ending.DONE])),
        *([column("paused", lambda arm: str(by_state[arm.name, PAUSED] or ""))] if PAUSED in states.values() else []),
        column("engine", lambda arm: arm.engine, rank=0 if len(engines) > 1 else 7, right=False),
    ]
    if costs:
        column_of_costs = Columns([costs.get(arm.name) for arm in plan.arms])
        columns += [
            column_of_costs("params", lambda cost: format_compact(cost.params) if cost else ""),
            column_of_costs("MACs", lambda cost: format_compact(cost.macs) if cost else ""),
            column_of_costs("training time", lambda cost: _format_hours(cost.hours_at_peak) if cost else ""),
        ][: 3 if next(iter(costs.values())).tflops else 2]
    return columns


def _format_hours(hours: float | None) -> str:
    """Format the shortest and the longest time of a GPU that would take these hours at its peak rate."""
    return "?" if hours is None else " to ".join(format_duration(360_000 * hours / share) for share in PEAK_SHARES)


def _describe_costs(plan: Plan, costs: Costs) -> str:
    """Return what the times are, and the time of the whole study."""
    cost = next(iter(costs.values()))
    if not cost.tflops:
        return (
            "How long a training takes on this CPU is not known before one of these arms has ended, and then said "
            "below. 'vitlab run FILE' shows the time that is left, and after Ctrl-C it continues where it stopped."
        )
    sentence = (
        "Training time is of one GPU, computed and not measured: 3 x MACs x images seen, of 2 operations each, at "
        f"{PEAK_SHARES[0]} to {PEAK_SHARES[1]} % of {cost.tflops:g} TFLOP/s (--device-tflops), as an H100 trained "
        "ViT-B/16 by engine compiled and ViT-Ti/16 by loop; other GPUs and smaller models may attain another share"
    )
    hours = {arm: cost.hours_at_peak for arm, cost in costs.items() if cost.hours_at_peak is not None}
    if len(hours) < len(costs):
        return f"{sentence}; '?' where the length is in epochs of data that is not read for this."
    total = sum(hours[planned.arm] for planned in plan.trials_and_pending)
    exclusion = ", without teachers and pre-training" if plan.prerequisites else ""
    for tuning in plan.tuning:
        if tuning.arm not in hours:  # tuned once, at the base, for all arms
            return f"{sentence}; in all {_format_hours(total)}, without the tuning{exclusion}."
        total += len(tuning.trials) * hours[tuning.arm]
    return f"{sentence}; in all {_format_hours(total)}{exclusion}."


def _count_trials(plan: Plan) -> str:
    """Return the number of trainings by what they are for."""
    groups = {
        "of arms": plan.trials,
        "of arms, once their knobs are tuned": plan.pending,
        "of tuning": plan.rival_trials,
        "of teachers or pre-training": plan.prerequisites,
    }
    parts = [f"{len(trials):,} {purpose}" for purpose, trials in groups.items() if trials]
    total = format_count(sum(map(len, groups.values())), "trial")
    return f"{total} ({'; '.join(parts)})" if len(parts) > 1 else total


def _describe_trials(plan: Plan, states: States) -> str:
    """Return the number of trainings by what they are for, and how many of all have been trained."""
    count = Counter(states[trial.name] for trial in plan.trials_with_keys)
    waiting = f", {count[PAUSED]} paused, which go on from a checkpoint" if count[PAUSED] else ""
    if plan.looks is not None and len(plan.looks.open) < len(plan.looks.seeds) - 1:
        *sizes, last = map(len, plan.looks.seeds)
        waiting += f", up to {last} seeds for arms that are inconclusive after {', '.join(map(str, sizes))}"
    return (
        f"{_count_trials(plan)}, {count[Ending.DONE]} of them trained already{waiting}; metric {plan.analysis.metric}."
    )


def _describe_remaining_time(plan: Plan, store: Store, states: States) -> Iterator[str]:
    """Yield how long trainings of the arms have taken, also under other code, and what that makes for the missing."""
    folders = [folder for item in plan.trials for folder in store.folders_of_codes(item.trial.key)]
    times = [
        result.circumstances.wall_s
        for folder in folders
        if (result := folder.result()) and result.status == Ending.DONE  # others ended early
    ]
    if not times:
        return
    missing = sum(states[item.trial.name] != Ending.DONE for item in plan.trials)
    each, total = (
        " to ".join(dict.fromkeys(format_duration(count * end(times)) for end in (min, max))) for count in (1, missing)
    )
    yield f"Measured: an earlier training of these arms took {each}."
    if missing:
        yield f"At that, the missing trainings of arms add up to {total} on one worker."


def _describe_tuning(tunings: Sequence[Tuning], states: States) -> Iterator[str]:
    """Yield a sentence for arms with the same choice, and one for arms that will choose among the same rivals."""
    alike: dict[str, list[Tuning]] = {}
    for tuning in tunings:
        names = [format_knobs(rival.values) for rival in tuning.rivals]
        if tuning.failure:
            yield tuning.failure
        elif tuning.winner is not None:
            alike.setdefault(f"{names[tuning.winner]} was chosen by {tuning.select}", []).append(tuning)
        else:
            alike.setdefault(f"To be tuned first, by {tuning.select}, among {'; '.join(names)},", []).append(tuning)
    for sentence, some in alike.items():
        arms = [tuning.arm for tuning in some if tuning.arm is not None]
        which = "; ".join(arms) if arms and (len(some) < len(tunings) or len(some) == 1) else "all arms"
        trials = [planned for tuning in some for planned in tuning.trials if tuning.open]
        done = sum(states[planned.trial.name] == Ending.DONE for planned in trials)
        counts = f": {format_count(len(trials), 'trial')}, {done} of them trained already" if trials else ""
        yield f"{sentence} for {which}{counts}."


@click.command()
@click.argument("files", nargs=-1, required=True, type=PATH, shell_complete=complete_packaged_or_file)
@set_option
@plugin_option
@click.option(
    "--build",
    is_flag=True,
    help="Also build every distinct trial's model, open the weights that it starts or learns from, and test the "
    "contracts of the trials' components from plugins, except models and data sets.",
)
def validate_command(files: tuple[Path, ...], changes: tuple[str, ...], plugins: tuple[Path, ...], build: bool) -> None:
    """Check study FILES against the installed components.  Writes nothing.

    Baselines of 'vitlab check' (.baseline.yaml), which lie beside studies, are skipped.
    """
    from vitlab.driver.planning import count_params_and_macs, plan_study

    problems, is_plugin_broken, rows = list[Problem](), False, []
    for path in files:
        if path.name.endswith(".baseline.yaml"):
            click.echo(f"{path}: a baseline of 'vitlab check', no study: skipped", err=wants_json())
            continue
        try:
            file = find_study_file(path)
            _, plan = plan_study(file, changes=parse_changes(changes), plugins=plugins)
            if build:
                from vitlab.runner.models import check_weights_of_role
                from vitlab.testing import check_plugin_components

                count_params_and_macs(plan, file, check_plugin_components, check_weights_of_role)
                check_plugin_components(plan)
        except (UserError, BrokenComponent) as error:
            problems += error.mistakes
            is_plugin_broken |= isinstance(error, BrokenComponent)
            continue
        arms, skipped = len(plan.arms), _skipped_arms(plan)
        notes, trials = [*skipped, *plan.notes], len(plan.trials_and_pending)
        rows.append({"file": str(path), "arms": arms, "trials": trials, "skipped": len(skipped), "notes": notes})
        if not wants_json():
            and_skipped = f", {format_count(len(skipped), 'arm')} skipped" if skipped else ""
            click.echo(f"{path}: {format_count(arms, 'arm')}, {_count_trials(plan)}{and_skipped}")
            for note in notes:
                click.echo(f"  {note}")
    if is_plugin_broken:
        raise BrokenComponent(*dict.fromkeys(problems))
    if problems:
        raise SpecError(problems)
    if wants_json():
        print_json(rows)
