"""``vitlab plan FILE``: what would be trained, before paying for it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from vitlab.cli.options import (
    file_argument,
    no_plugin_option,
    out_option,
    parse_changes,
    plugin_option,
    set_option,
    study_file,
)
from vitlab.report.phrasing import Column, compact
from vitlab.report.terminal import fitted_table


@click.command()
@file_argument
@out_option
@set_option
@plugin_option
@no_plugin_option
@click.option(
    "--cost",
    is_flag=True,
    help="Add parameters, multiply-accumulates and GPU-hours of each arm (builds each model once).",
)
@click.option(
    "--device-tflops",
    type=click.FloatRange(min=0, min_open=True),
    default=312.0,
    show_default=True,
    help="Peak rate of the GPU for the GPU-hours of --cost, in TFLOP/s; in bf16 an A100 has 312, an H100 989.",
)
@click.option(
    "--power",
    is_flag=True,
    help="Say what the study will be able to detect, by the spread of earlier trainings in the output folder.",
)
@click.option(
    "--width",
    metavar="AMOUNT",
    help="With --power, add the seeds for intervals of this half-width, such as '1 point' or 0.01.",
)
@click.option("--full", is_flag=True, help="Print every arm's resolved spec, defaults included.")
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True)
def command(
    file: Path,
    out: Path,
    changes: tuple[str, ...],
    plugins: tuple[Path, ...],
    cost: bool,
    device_tflops: float,
    power: bool,
    width: str | None,
    full: bool,
    form: str,
) -> None:
    """Show the arms and trials of FILE: what runs, what is skipped and why, what has been trained already."""
    from vitlab.driver.planning import plan_study
    from vitlab.store.folders import Store

    if width is not None and not power:
        raise click.UsageError("--width needs --power")
    study, plan = plan_study(study_file(file), changes=parse_changes(changes), plugins=plugins, out=out)
    store = Store(out.resolve())
    rivals = [planned for tuning in plan.tuning for planned in tuning.trials]
    cached = {
        (planned.arm, planned.seed): store.trial(planned.trial.key, planned.trial.code).done()
        for planned in (*plan.trials, *rivals)
    }
    costs = _costs(plan, device_tflops) if cost else {}
    forecast = _forecast(plan, store, width) if power else None
    if form == "json":
        data = plan.to_json()
        if forecast is not None:
            data["power"] = forecast.to_json()
        rival_trials = [trial for tuning in data["tuning"] for rival in tuning["rivals"] for trial in rival["trials"]]
        for trial in (*data["trials"], *rival_trials):
            trial["cached"] = cached[trial["arm"], trial["seed"]]
        for arm in data["arms"]:
            arm["cost"] = costs.get(arm["name"])
        click.echo(json.dumps(data, indent=1))
        return
    _table(plan, cached, costs, device_tflops, study.run.engine == "measured")
    if forecast is not None:
        for sentence in forecast.sentences(plan):
            click.echo(sentence)
    if full:
        for arm, spec in plan.to_json()["specs"].items():
            click.echo(f"\n# {arm}\n{json.dumps(spec, indent=1)}")


def _forecast(plan: Any, store: Any, width: str | None) -> Any:
    """Return what the study will be able to detect, and the seeds for intervals of a half-width, if one is given.

    Raises:
        UserError: for a width that no interval of the metric has.
    """
    from pydantic import TypeAdapter, ValidationError

    from vitlab.errors import UserError
    from vitlab.report.phrasing import Scale
    from vitlab.report.power import forecast
    from vitlab.spec.choice import Amount
    from vitlab.spec.yaml import read_value

    if width is None:
        return forecast(plan, store)
    metric = plan.analysis.metric
    facts, is_share = plan.facts(metric), Scale.of(metric, plan.units).is_share
    low, high = (None, None) if facts is None else facts.bounds
    try:
        half_width = TypeAdapter(Amount).validate_python(read_value(width))
    except (ValidationError, ValueError):
        half_width = 0.0
    too_wide = low is not None and high is not None and half_width >= high - low
    if half_width <= 0 or too_wide or ("point" in width and not is_share):
        allowed = "0.01 or '1 point'" if is_share else "2.5"
        raise UserError(f"--width {width}: write a number above 0 in units of {metric}, such as {allowed}")
    return forecast(plan, store, half_width)


def _costs(plan: Any, tflops: float) -> dict[str, dict[str, Any]]:
    """Return the costs of each arm's model and of one training, which are None if the number of images is unknown."""
    from vitlab.data.prepare import DataSource
    from vitlab.driver.planning import costs
    from vitlab.plan.match import gpu_hours, images_seen, train_macs

    trials = {planned.arm: planned.trial for planned in reversed((*plan.trials, *plan.pending))}
    images_by_data: dict[str, int | None] = {}
    by_arm: dict[str, dict[str, Any]] = {}
    for arm, cost in costs(plan).items():
        trial = trials[arm]
        images = images_seen(trial.spec.train)
        if images is None:
            data = json.dumps([trial.spec.data.plain(), trial.seeds["split"], trial.seeds["subset"]], sort_keys=True)
            if data not in images_by_data:
                images_by_data[data] = DataSource(trial.spec.data).training_images(trial.seeds)
            images = images_seen(trial.spec.train, images_by_data[data])
        work = None if images is None else train_macs(cost["macs"], images)
        hours = None if work is None else gpu_hours(work, tflops)
        by_arm[arm] = {**cost, "images": images, "train_macs": work, "gpu_hours": hours}
    return by_arm


def _table(
    plan: Any,
    is_cached: dict[tuple[str, int], bool],
    costs: dict[str, dict[str, Any]],
    device_tflops: float,
    benchmarked: bool,
) -> None:
    from rich.console import Console
    from rich.text import Text

    from vitlab.errors import count

    console = Console()
    if plan.question:
        console.print(Text(plan.question), style="italic")
    cached = sum(is_cached[planned.arm, planned.seed] for planned in plan.trials)
    skipped = [arm is None or bool(arm.skip) for arm in _ends(plan.arms)]
    console.print(fitted_table(_arms(plan, is_cached, costs), console, skipped))
    for arm in _ends(plan.arms):
        if arm is not None and arm.skip:
            console.print(Text(f"{arm.name}: skipped: {arm.skip}"), style="dim")
    notes = [*plan.notes, *(f"{arm.name}: {arm.note}" for arm in plan.arms if arm.note)]
    for note in _ends(notes):
        console.print(Text(note if note is not None else f"... {len(notes) - 2 * ROWS:,} more notes ..."))
    for sentence in _describe_tuning(plan.tuning, is_cached):
        console.print(Text(sentence))
    for sentence in _describe_benchmarks(plan) if benchmarked else ():
        console.print(Text(sentence))
    if costs:
        console.print(Text(_describe_costs(plan, costs, device_tflops)))
    waiting = f", {len(plan.pending)} more once their knobs are tuned" if plan.pending else ""
    if plan.looks is not None and len(plan.looks.open) < len(plan.looks.seeds) - 1:
        *sizes, last = map(len, plan.looks.seeds)
        waiting += f", up to {last} seeds for arms that are inconclusive after {', '.join(map(str, sizes))}"
    console.print(
        f"{count(len(plan.trials), 'trial')}, {cached} of them trained already{waiting}; metric {plan.analysis.metric}."
    )


MAX_ROWS = 60  #: rows of the table; with more arms only the first and the last are shown
ROWS = 20  #: number of first and of last rows then


def _ends(items: Sequence[Any]) -> list[Any]:
    """Return the items, or if there are many, the first and the last with None between them."""
    return [*items] if len(items) <= MAX_ROWS else [*items[:ROWS], None, *items[-ROWS:]]


def _arms(plan: Any, is_cached: dict[tuple[str, int], bool], costs: dict[str, dict[str, Any]]) -> list[Column]:
    """Return the table of the arms; columns that repeat an arm's name are the first to go in a narrow terminal."""
    from vitlab.plan.design import text
    from vitlab.plan.tune import PENDING

    paths, displayed = plan.paths, _ends(plan.arms)
    trials = Counter(planned.arm for planned in plan.trials)
    cached = Counter(planned.arm for planned in plan.trials if is_cached[planned.arm, planned.seed])
    pending = Counter(planned.arm for planned in plan.pending)

    def cells(cell: Callable[[Any], str], between: str = "") -> tuple[str, ...]:
        return tuple(cell(arm) if arm is not None else between for arm in displayed)

    columns = [Column("arm", cells(lambda arm: arm.name, f"... {len(plan.arms) - 2 * ROWS:,} more ..."), right=False)]
    for path in paths:
        values = tuple("" if arm is None else text(_short(paths, path, arm.values[path])) for arm in displayed)
        columns.append(Column(path.rpartition(".")[2], values, rank=3, right=False))
    columns += [
        Column("against", cells(lambda arm: arm.baseline or ""), rank=1, right=False),
        Column("trials", cells(lambda arm: str(pending[arm.name] or trials[arm.name]))),
        Column("cached", cells(lambda arm: PENDING if pending[arm.name] else str(cached[arm.name]))),
        Column("engine", cells(lambda arm: arm.engine), rank=2, right=False),
    ]
    if costs:
        columns += [
            Column("params", cells(lambda arm: compact(costs[arm.name]["params"]) if arm.name in costs else "")),
            Column("MACs", cells(lambda arm: compact(costs[arm.name]["macs"]) if arm.name in costs else "")),
            Column("GPU-h", cells(lambda arm: _hours(costs[arm.name]["gpu_hours"]) if arm.name in costs else "")),
        ]
    return columns


def _short(paths: Sequence[str], path: str, value: Any) -> Any:
    """Return the value of a cell; only the name of a component whose options have columns of their own."""
    apart = isinstance(value, Mapping) and any(other.startswith(f"{path}.") for other in paths)
    return value.get("type", value) if apart else value


def _hours(hours: float | None) -> str:
    return "?" if hours is None else f"{hours:,.1f}" if hours >= 1 else f"{hours:.2g}"


def _describe_costs(plan: Any, costs: dict[str, dict[str, Any]], device_tflops: float) -> str:
    """Return a sentence that defines the GPU-hours and gives those of the whole study."""
    from vitlab.plan.match import UTILISATION

    sentence = (
        f"GPU-hours are those of one training: 3 x MACs x images seen, of 2 operations each, at "
        f"{100 * UTILISATION:g} % of {device_tflops:g} TFLOP/s (--device-tflops)"
    )
    if any(cost["gpu_hours"] is None for cost in costs.values()):
        return f"{sentence}; '?' where the length is in epochs of data that is not read for this."
    arms = [planned.arm for planned in (*plan.trials, *plan.pending)]
    total = sum(costs[arm]["gpu_hours"] for arm in arms)
    for tuning in plan.tuning:
        of_tuning = costs[tuning.arm]["gpu_hours"] if tuning.arm in costs else None
        if of_tuning is None:  # tuned once, at the base, for all arms
            return f"{sentence}; in all {_hours(total)}, and the tuning."
        total += len(tuning.trials) * of_tuning
    return f"{sentence}; in all {_hours(total)}."


def _describe_benchmarks(plan: Any) -> Iterator[str]:
    """Yield the results of engine benchmarks, and the arms that still need one."""
    from vitlab.plan.engine_choice import shape, without_benchmark

    trials = (*plan.trials, *plan.pending)
    arms: dict[str, list[str]] = {}
    for planned in {planned.arm: planned for planned in trials}.values():
        arms.setdefault(shape(planned.trial), []).append(planned.arm)
    for name, probe in plan.probes.items():
        if name in arms:
            yield f"{', '.join(arms[name])}: {probe.summary}"
    if remaining := without_benchmark(trials, plan.probes):
        names = dict.fromkeys(planned.arm for some in remaining.values() for planned in some)
        yield f"{'; '.join(names)}: the engine is measured when the study is run; until then, the default rule applies."


def _describe_tuning(tunings: Sequence[Any], is_cached: dict[tuple[str, int], bool]) -> Iterator[str]:
    """Yield a sentence for arms with the same choice, and one for arms that will choose among the same rivals."""
    from vitlab.errors import count
    from vitlab.plan.tune import name_of

    def arms(some: Sequence[Any]) -> str:
        every = len(some) == len(tunings)
        return "all arms" if every and (len(some) > 1 or some[0].arm is None) else "; ".join(item.arm for item in some)

    winners: dict[tuple[str, str], list[Any]] = {}
    waiting: dict[tuple[str, str], list[Any]] = {}
    for tuning in tunings:
        names = [name_of(rival.values) for rival in tuning.rivals]
        if tuning.failure:
            yield tuning.failure
        elif tuning.winner is not None:
            winners.setdefault((names[tuning.winner], tuning.select), []).append(tuning)
        else:
            waiting.setdefault(("; ".join(names), tuning.select), []).append(tuning)
    for (name, metric), some in winners.items():
        yield f"{name} was chosen by {metric} for {arms(some)}."
    for (rivals, metric), some in waiting.items():
        trials = [planned for tuning in some for planned in tuning.trials]
        trained = sum(is_cached[planned.arm, planned.seed] for planned in trials)
        yield (
            f"To be tuned first, by {metric}, among {rivals}, for {arms(some)}: {count(len(trials), 'trial')}, "
            f"{trained} of them trained already."
        )
