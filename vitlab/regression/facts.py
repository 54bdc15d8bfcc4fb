"""Exact tier: comparison of facts that must be equal, without statistics.

A difference counts as ``regressed`` until it is accepted: a changed option, another number of parameters, another loss
in one of the first steps.  A trace that differs under another torch or processor is ``inconclusive``, because rounding
differs there; but one in double precision that differs by more than a processor can explain has regressed.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.errors import count
from vitlab.plan.values import Plan, Planned
from vitlab.regression.baseline import ArmFacts, Facts, TraceRecord
from vitlab.regression.decide import Finding

TOLERANCE = {"fp64": 1e-7, "fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}
"""Relative difference of losses attributed to rounding, by precision; twenty steps amplify it some hundredfold."""
NO_ROUNDING = 1e-4
"""Relative difference of losses in double precision that another processor cannot explain: kernels for AVX-512, for
AVX2 and for neither differed by at most 4e-8, which initial values drawn in single precision bring in."""
MAX_LISTED_CHANGES = 8  #: changed options that are listed by name


def compute_facts(plan: Plan, costs: Mapping[str, Mapping[str, int]], plugins: Sequence[str | Path] = ()) -> Facts:
    """Compute the facts of a study, its traces included.

    Args:
        plan: of the study.
        costs: arm to ``params`` and ``macs``.
        plugins: files of components.
    """
    import torch

    from vitlab.regression.traces import EXACT_STEPS, trace

    arms = {}
    for planned in first_of_arms(plan):
        own = planned.trial.spec.train.precision
        engine = plan.arm(planned.arm).engine  # engines use different kernels, and a fault may be in one of them
        by_precision = {
            name: trace(plan, planned, EXACT_STEPS, name, engine, plugins) for name in dict.fromkeys(("fp64", own))
        }
        traces = tuple(
            TraceRecord(
                precision=name, engine=result.engine, losses=result.losses, before=result.before, after=result.after
            )
            for name, result in by_precision.items()
        )
        trial = planned.trial
        arms[planned.arm] = ArmFacts(
            key=trial.key,
            origins=trial.origins,
            data=None if trial.data is None else str(trial.data),
            seeds=dict(trial.seeds),
            spec=dict(_flat(trial.spec.plain())),
            params=costs[planned.arm]["params"],
            macs=costs[planned.arm]["macs"],
            traces=traces,
        )
    return Facts(
        torch=torch.__version__.partition("+")[0],
        processor=f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        seeds=tuple(dict.fromkeys(planned.seed for planned in plan.trials)),
        skipped={arm.name: arm.skip for arm in plan.arms if arm.skip},
        arms=arms,
    )


def first_of_arms(plan: Plan) -> list[Planned]:
    """Return the first seed of every arm that is run."""
    first: dict[str, Planned] = {}
    for planned in plan.trials:
        first.setdefault(planned.arm, planned)
    return [*first.values()]


def compare_facts(old: Facts, new: Facts) -> list[Finding]:
    """Return one finding per check, whether it passes or not."""
    findings = [*_plan(old, new)]
    for arm in new.arms:
        if arm in old.arms:
            findings += _arm(arm, old, new)
    return findings


def _plan(old: Facts, new: Facts) -> Iterator[Finding]:
    changes = [f"arm '{arm}' is new" for arm in new.arms if arm not in old.arms]
    changes += [f"arm '{arm}' is gone" for arm in old.arms if arm not in new.arms]
    for arm in {**old.skipped, **new.skipped}:
        before, after = old.skipped.get(arm, "not skipped"), new.skipped.get(arm, "not skipped")
        if before != after:
            changes.append(f"arm '{arm}': {before} -> {after}")
    if len(old.seeds) != len(new.seeds):
        changes.append(f"{count(len(old.seeds), 'seed')} -> {len(new.seeds)}")
    elif old.seeds != new.seeds:
        changes.append("other seeds")
    yield _finding("", "plan", changes)


def _arm(arm: str, before: Facts, after: Facts) -> Iterator[Finding]:
    old, new = before.arms[arm], after.arms[arm]
    # With equal keys, specs differ in options outside keys alone: folders, and options added since with their defaults.
    paths = list(dict.fromkeys([*old.spec, *new.spec])) if old.key != new.key else []
    changes = [
        f"{path}: {old.spec.get(path, 'nothing')} -> {new.spec.get(path, 'nothing')}"
        for path in paths
        if old.spec.get(path, _NOTHING) != new.spec.get(path, _NOTHING)
    ]
    if len(changes) > MAX_LISTED_CHANGES:
        changes = [*changes[:MAX_LISTED_CHANGES], f"and {len(changes) - MAX_LISTED_CHANGES} more"]
    if old.data != new.data:
        changes.append(f"the data: {old.data} -> {new.data}")
    changes += [
        f"seed of {stream}: {old.seeds.get(stream)} -> {new.seeds.get(stream)}"
        for stream in dict.fromkeys([*old.seeds, *new.seeds])
        if old.seeds.get(stream) != new.seeds.get(stream)
    ]
    origins = sorted(set(old.origins) ^ set(new.origins))
    if not changes and not origins and old.key != new.key:
        changes.append("the trial that it starts from has changed")
    if not changes and origins:
        yield Finding(arm, "key", "pass", "; ".join(_changed_origins(old.origins, new.origins)))
    else:
        yield _finding(arm, "key", changes)
    for name in ("params", "macs"):
        was, now = getattr(old, name), getattr(new, name)
        yield _finding(arm, name, [] if was == now else [f"{was:,} -> {now:,}"])
    by_precision = {trace.precision: trace for trace in old.traces}
    for trace in new.traces:
        if trace.precision in by_precision:
            yield _trace(arm, by_precision[trace.precision], trace, before, after)


def _changed_origins(old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each plugin that has changed since; an origin is ``SLOT:NAME PACKAGE VERSION``."""
    before, after = (dict(origin.split(" ", 1) for origin in origins) for origins in (old, new))
    changes = {}
    for component in dict.fromkeys([*before, *after]):
        was, now = before.get(component), after.get(component)
        if was == now:
            continue
        if was is None or now is None:
            changes[component] = f"{component} came from {was}" if now is None else f"{component} comes from {now}"
            continue
        (package, version), (other, now_version) = was.rsplit(" ", 1), now.rsplit(" ", 1)
        if package == other:
            changes[package] = f"{package} has changed ({version} -> {now_version})"
        else:
            changes[component] = f"{component} came from {was} and comes from {now}"
    yield from changes.values()


def _trace(arm: str, old: TraceRecord, new: TraceRecord, before: Facts, after: Facts) -> Finding:
    check = f"trace {new.precision}"
    difference = _difference(old, new, TOLERANCE[new.precision])
    if not difference:
        return Finding(arm, check, "pass")
    pairs = {"processor": (before.processor, after.processor), "torch": (before.torch, after.torch)}
    pairs["engine"] = old.engine, new.engine
    environment = ", ".join(f"{name} was {was} and is {now}" for name, (was, now) in pairs.items() if was != now)
    if not environment:
        return Finding(arm, check, "regressed", difference)
    # Another torch may draw different random numbers; another processor or engine only rounds differently.
    if new.precision == "fp64" and before.torch == after.torch and _difference(old, new, NO_ROUNDING):
        return Finding(arm, check, "regressed", f"{difference}, which is more than rounding, although {environment}")
    return Finding(arm, check, "inconclusive", f"{difference}; but {environment}")


def _difference(old: TraceRecord, new: TraceRecord, tolerance: float) -> str:
    """Describe the first loss that differs; empty if none does."""
    if len(old.losses) != len(new.losses):
        return f"{count(len(old.losses), 'step')} -> {len(new.losses)}"
    steps = zip(old.losses, new.losses, strict=True)
    pairs = {"before the first step": (old.before, new.before)}
    pairs |= {f"of step {step}": pair for step, pair in enumerate(steps, start=1)}
    pairs["on validation images after the last step"] = old.after, new.after
    for where, (before, after) in pairs.items():
        if not _close(before, after, tolerance):
            return f"the loss {where}: {before:#.9g} -> {after:#.9g}"
    return ""


def _close(before: float, after: float, tolerance: float) -> bool:
    if not (math.isfinite(before) and math.isfinite(after)):
        return before == after or (math.isnan(before) and math.isnan(after))
    return math.isclose(before, after, rel_tol=tolerance, abs_tol=tolerance)


def _finding(arm: str, check: str, changes: Sequence[str]) -> Finding:
    return Finding(arm, check, "regressed" if changes else "pass", "; ".join(changes))


_NOTHING = object()


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted path and value of every leaf of a spec."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _flat(item, f"{path}.{name}" if path else str(name))
    else:
        yield path, list(value) if isinstance(value, tuple) else value
