"""Exact tier: comparison of facts that must be equal, without statistics.

What differs fails until it is accepted: a changed option, another number of parameters, another loss in one of the
first steps.  A trace that differs under another torch or processor is ``inconclusive``, because rounding differs there,
unless it is in double precision and differs by more than a processor can explain.

A trace is the losses of the first training steps.  In double precision it agrees to many digits across processors; a
second one in the arm's own precision covers the kernels of that precision.
"""

from __future__ import annotations

import itertools
import math
import platform
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vitlab.driver.planning import count_params_and_macs
from vitlab.driver.session import Watch, iterate_with_time_left
from vitlab.errors import format_count
from vitlab.planning.values import Plan, Planned
from vitlab.regression.baseline import ArmFacts, Facts, Trace
from vitlab.regression.decide import Finding
from vitlab.spec.tree import flatten

if TYPE_CHECKING:
    from vitlab.training.loop import Training

EXACT_STEPS = 20
LEARNING_STEPS = 100
TOLERANCE = {"fp64": 1e-7, "fp32": 1e-5, "tf32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}
"""Relative difference of losses attributed to rounding, by precision; twenty steps amplify it some hundredfold."""
NO_ROUNDING = 1e-4
"""Relative difference of losses in double precision that another processor cannot explain: kernels for AVX-512, for
AVX2 and for neither differed by at most 4e-8, which initial values drawn in single precision bring in."""


def compute_exact_facts(plan: Plan, file: Path, plugins: Sequence[str | Path], watch: Watch) -> Facts:
    """Compute the facts of a study, its traces included; mistakes name its file."""
    import torch

    costs = count_params_and_macs(plan, file)  # first, as it finds mistakes in models
    work = [
        (planned, precision)
        for planned in plan.first_trials.values()
        for precision in dict.fromkeys(("fp64", planned.trial.spec.train.precision))
    ]
    traces = defaultdict[str, list[Trace]](list)
    watch.say(f"exact: the first {EXACT_STEPS} steps of {format_count(len(work), 'training')}, on the CPU")
    for planned, precision in iterate_with_time_left("exact: training", work, watch):
        engine = plan.arm(planned.arm).engine  # engines use different kernels, and a fault may be in one of them
        traces[planned.arm].append(train_trace(plan, planned, EXACT_STEPS, precision, engine, plugins))
    arms = {}
    for arm, planned in plan.first_trials.items():
        trial = planned.trial
        arms[arm] = ArmFacts(
            key=trial.key,
            origins=trial.origins,
            data=trial.data,
            seeds=dict(trial.seeds),
            spec={path: list(x) if isinstance(x, tuple) else x for path, x in flatten(trial.spec.plain()).items()},
            params=costs[arm]["params"],
            macs=costs[arm]["macs"],
            traces=tuple(traces[arm]),
        )
    return Facts(
        torch=torch.__version__.partition("+")[0],
        processor=f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        seeds=tuple(dict.fromkeys(planned.seed for planned in plan.trials)),
        skipped={arm.name: arm.skip for arm in plan.arms if arm.skip},
        arms=arms,
    )


def compare_exact_facts(old: Facts, new: Facts) -> list[Finding]:
    """Return one finding per check, whether it passes or not."""
    changes = [f"arm '{arm}' is new" for arm in new.arms if arm not in old.arms]
    changes += [f"arm '{arm}' is gone" for arm in old.arms if arm not in new.arms]
    changes += _describe_differences(old.skipped, new.skipped, "skipped arm ")
    changes += _describe_differences({"seeds": [*old.seeds]}, {"seeds": [*new.seeds]})
    findings = [_make_finding("", "plan", changes)]
    for arm in new.arms:
        if arm in old.arms:
            findings += _compare_arm(arm, old, new)
    return findings


def _compare_arm(arm: str, before: Facts, after: Facts) -> Iterator[Finding]:
    old, new = before.arms[arm], after.arms[arm]
    # With equal keys, specs differ in options outside keys alone: folders, and options added since with their defaults.
    changes = _describe_differences(old.spec, new.spec) if old.key != new.key else []
    changes += _describe_differences({"the data": old.data}, {"the data": new.data})
    changes += _describe_differences(old.seeds, new.seeds, "seed of ")
    # An origin is "SLOT:NAME PACKAGE VERSION".
    gone, added = (
        ", ".join(sorted({origin.partition(" ")[2] for origin in some}))
        for some in ({*old.origins} - {*new.origins}, {*new.origins} - {*old.origins})
    )
    if not changes and (gone or added):
        yield Finding(arm, "key", "pass", f"other code: {gone or 'nothing'} -> {added or 'nothing'}")
    else:
        if not changes and old.key != new.key:
            changes.append("the trial that it starts from has changed")
        yield _make_finding(arm, "key", changes)
    for name in ("params", "macs"):
        was, now = getattr(old, name), getattr(new, name)
        yield _make_finding(arm, name, [] if was == now else [f"{was:,} -> {now:,}"])
    by_precision = {trace.precision: trace for trace in old.traces}
    for trace in new.traces:
        if trace.precision in by_precision:
            finding = _compare_traces(arm, by_precision[trace.precision], trace, before, after)
            yield replace(finding, sentence=finding.sentence or "all losses are equal" * bool(gone or added))


def _describe_differences(old: Mapping[str, object], new: Mapping[str, object], what: str = "") -> list[str]:
    """Return a text for each name whose values differ."""
    return [
        f"{what}{name}: {old.get(name, 'nothing')} -> {new.get(name, 'nothing')}"
        for name in dict.fromkeys([*old, *new])
        if name not in old or name not in new or old[name] != new[name]
    ]


def _compare_traces(arm: str, old: Trace, new: Trace, before: Facts, after: Facts) -> Finding:
    check, limit = f"trace {new.precision}", TOLERANCE[new.precision]
    difference = _describe_first_loss_difference(old, new, limit)
    if not difference:
        largest = max(itertools.starmap(_scaled_distance, _loss_pairs(old, new)))
        how = f"losses differ by at most {largest:.2g}; up to {limit:g} is rounding" if largest else ""
        return Finding(arm, check, "pass", how)
    was, now = (
        {"processor": facts.processor, "torch": facts.torch, "engine": trace.engine}
        for facts, trace in ((before, old), (after, new))
    )
    environment = ", ".join(_describe_differences(was, now))
    if not environment:
        return Finding(arm, check, "differs", difference)
    # Another torch may draw different random numbers; another processor or engine only rounds differently.
    if (
        new.precision == "fp64"
        and before.torch == after.torch
        and _describe_first_loss_difference(old, new, NO_ROUNDING)
    ):
        return Finding(
            arm,
            check,
            "differs",
            f"{difference}, and up to {NO_ROUNDING:g} by another processor or engine; {environment}",
        )
    return Finding(arm, check, "inconclusive", f"{difference}, but under other conditions; {environment}")


def _describe_first_loss_difference(old: Trace, new: Trace, tolerance: float) -> str:
    """Describe the first loss that differs; empty if none does."""
    if len(old.losses) != len(new.losses):
        return f"{format_count(len(old.losses), 'step')} -> {len(new.losses)}"
    for place, (before, after) in enumerate(_loss_pairs(old, new)):
        if not _scaled_distance(before, after) <= tolerance:
            where = f"of step {place}" if place else "before the first step"
            where = "on validation images after the last step" if place > len(old.losses) else where
            how_large = f"a relative difference of {_scaled_distance(before, after):.2g}"
            return f"the loss {where}: {before:#.9g} -> {after:#.9g}, {how_large}; up to {tolerance:g} is rounding"
    return ""


def _loss_pairs(old: Trace, new: Trace) -> list[tuple[float, float]]:
    """Return old and new losses: before the first step, of every step, and after the last one."""
    first, second = ((trace.before, *trace.losses, trace.after) for trace in (old, new))
    return list(zip(first, second, strict=True))


def _scaled_distance(before: float, after: float) -> float:
    """Return the difference of two losses, relative to the larger one if that is above 1; NaN if one is not finite."""
    is_equal = before == after or (math.isnan(before) and math.isnan(after))
    return 0.0 if is_equal else abs(after - before) / max(1.0, abs(before), abs(after))


def _make_finding(arm: str, check: str, changes: Sequence[str]) -> Finding:
    return Finding(arm, check, "differs" if changes else "pass", "; ".join(changes))


def train_trace(
    plan: Plan,
    planned: Planned,
    steps: int,
    precision: str | None = None,
    engine: str = "loop",
    plugins: Sequence[str | Path] = (),
) -> Trace:
    """Train the first steps of one trial of a plan on the CPU, with one thread and the schedule shortened to them.

    Stored results are neither read nor written.  A ``precision`` replaces the trial's own; the engine, or a fallback
    that supports the trial, trains it by itself.
    """
    # Imported here, because 'vitlab ab' needs no torch in its own process.
    import torch

    from vitlab.driver.benchmark import temporary_short_trial
    from vitlab.engines import engine_or_fallback
    from vitlab.engines.base import EngineFailed
    from vitlab.runner.execution import begin_attempt
    from vitlab.runner.job import Settings

    settings = Settings(device="cpu", plugins=tuple(str(Path(plugin).resolve()) for plugin in plugins))
    with temporary_short_trial(plan, planned, steps, settings, precision) as (trial, folder):
        while True:
            with begin_attempt(trial, folder, settings) as attempt:
                training = attempt.training
                before = _first_batch_validation_loss(training)
                engine, engine_type, _ = engine_or_fallback(engine, training)
                try:
                    computation = engine_type([training])
                    while training.step < training.steps:
                        computation.train_step()
                except EngineFailed as failed:
                    engine = failed.fallback
                    continue
                losses = torch.stack(training.losses["loss"]).double().tolist() if training.steps else []
                return Trace(
                    precision=trial.spec.train.precision,
                    engine=engine,
                    losses=tuple(losses),
                    before=before,
                    after=_first_batch_validation_loss(training),
                )


def _first_batch_validation_loss(training: Training) -> float:
    """Return the mean loss on the first batch of validation images, as in an evaluation."""
    import torch
    import torch.nn.functional as F

    from vitlab.training.evaluation import evaluation_batches

    objective = training.objective
    with torch.no_grad():
        batch = objective.evaluation_batch(next(evaluation_batches(training.feed, "val")))
        objective.module.eval()
        view = objective.views(batch.x_BCHW, batch.y_B)[""]
        objective.module.train()
    if not objective.labels:
        return float(view.mean())
    return float(F.cross_entropy(view, batch.y_B))  # its default ignore_index leaves out pixels without a label
