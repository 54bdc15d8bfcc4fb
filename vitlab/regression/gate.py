"""The tiers of the gate, and what they come to together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from vitlab.errors import UserError, nearest
from vitlab.plan.values import Plan
from vitlab.regression import decide as judging
from vitlab.regression.baseline import Baseline, Values
from vitlab.regression.decide import FEWEST, Against, Cell, Pair, Verdict
from vitlab.regression.facts import Finding, first_of_arms
from vitlab.report import frame
from vitlab.spec import Study
from vitlab.spec.check import Goal
from vitlab.store.folders import Store

STEPPED = ("accuracy", "top")
"""Metrics that begin so are shares of images, and move in steps of one image."""
LIKELY = 0.8  #: an unchanged model should pass with this probability

Train = Callable[[Sequence[int] | None, Sequence[str]], Values]
"""Trains the given seeds (None: those of the file) of the given arms (none: all) and returns all there is."""


@dataclass(frozen=True)
class Checked:
    """What the gate says."""

    study: str
    verdict: Verdict
    fails: bool  #: whether it is to stop people: it has regressed, or is inconclusive where the study says so
    findings: tuple[Finding, ...] = ()  #: of the exact tier, and of learning
    cells: tuple[Cell, ...] = ()  #: of the statistical tier
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outlook:
    """How likely an unchanged model passes a cell, if nothing but its rounding has changed."""

    arm: str
    metric: str
    against: Against
    n: int  #: seeds; of the second look, where there is one
    sd: float  #: pooled, of the baseline
    margin: float
    chance: float
    needs: int | None  #: seeds for a chance of 80 % of this cell


def values_of(plan: Plan, store: Store, study: Study) -> Values:
    """The final values of a study that has been trained, by metric, arm and seed.

    Raises:
        UserError: for a metric that its trials do not have.
    """
    found = frame.gather(plan, store)
    table = frame.table(plan, found)
    ended = table["status"].eq("done").any()
    metrics: dict[str, dict[str, dict[int, float]]] = {}
    for metric, goal in goals(study).items():
        if metric not in table:
            table[metric] = math.nan
        if ended and table[metric].isna().all():
            known = [name for name in map(str, table) if frame.is_metric(name) and table[name].notna().any()]
            raise UserError(f"no trial has the metric {metric}.{nearest(metric, known)} Metrics: {', '.join(known)}.")
        own = metric == study.analysis.metric
        analysis = study.analysis if own else study.analysis.model_copy(update={"metric": metric, "goal": goal})
        if not own:
            analysis = analysis.model_copy(update={"at": "last"})
        metrics[metric] = frame.usable(table, analysis)
    images = _images(found)
    quanta = {}
    for metric in metrics:
        group, _, name = metric.partition("/")
        quanta[metric] = 1 / images[group] if name.startswith(STEPPED) and images.get(group) else 0.0
    diverged: dict[str, tuple[int, ...]] = {}
    for item in found:
        final = item.result.outcome.metrics if item.result is not None else {}
        if item.status == "diverged" or not all(math.isfinite(final.get(metric, 0.0)) for metric in metrics):
            diverged[item.planned.arm] = (*diverged.get(item.planned.arm, ()), item.planned.seed)
    devices = sorted({str(device) for device in table["device"].dropna()})
    data = {planned.arm: str(planned.trial.data) for planned in first_of_arms(plan)}
    return Values(
        device=", ".join(devices),
        data=data,
        metrics=metrics,
        quanta=quanta,
        diverged=diverged,
        behind=_behind(plan),
        versions=_versions(found),
    )


def of_other_versions(plan: Plan, store: Store, here: Mapping[str, str]) -> list[str]:
    """Return the versions under which results of a plan were trained where these are not those here, in words.

    Args:
        plan: whose results, those that its trials start from included.
        store: in which they are.
        here: name to version of what is installed here.
    """
    found: dict[str, None] = {}
    for trial in (*(planned.trial for planned in plan.trials), *plan.prerequisites):
        result = store.trial(trial.key, trial.code).result()
        if result is not None:
            found |= dict.fromkeys(_others(result.circumstances.installed, here))
    return list(found)


def other_versions(baseline: Baseline, here: Mapping[str, str]) -> list[str]:
    """Return a sentence for each side of the comparison that was trained under other versions than those here."""
    sides = {against: values.versions for against, values in _sides(baseline)} if baseline.values is not None else {}
    if not sides.get("baseline") and baseline.facts is not None:
        same = baseline.facts.torch == here["torch"].partition("+")[0]
        sides["baseline"] = {"torch": here["torch"] if same else baseline.facts.torch}
    found = []
    for against, known in sides.items():
        if others := _others(known, here):
            now = ", ".join(
                f"{name} {version}" for name, version in here.items() if known.get(name, version) != version
            )
            found.append(f"the {against} was trained under {', '.join(others)}, and this environment has {now}")
    return found


def goals(study: Study) -> dict[str, Goal]:
    """Every metric that is judged, with its goal; that of the analysis first."""
    assert study.check is not None
    return {**{study.analysis.metric: study.analysis.goal}, **study.check.metrics}


def family(study: Study, baseline: Baseline, new: Values) -> tuple[list[Pair], list[str]]:
    """Every cell, with the reason of those that cannot be judged, and what else must be said.

    Raises:
        UserError: if the baseline has no values.
    """
    pairs, notes = [], []
    for against, values in _sides(baseline):
        if values.device != new.device:
            notes.append(f"the {against} was trained on {values.device}, and the candidate on {new.device}")
        for metric, goal in goals(study).items():
            known = values.metrics.get(metric, {})
            margin, min_abs = _margins(study, values, metric)
            for arm, found in new.metrics[metric].items():
                if arm not in known and against == "anchor":
                    notes.append(f"arm '{arm}' has no {metric} in the anchor: its drift is not measured")
                    continue
                if arm not in known:
                    why = f"the baseline has no {metric} of it: accept it anew"
                    pairs.append(Pair(arm, metric, goal, {}, found, margin, min_abs, refused=why))
                    continue
                if not known[arm] and not found and arm not in new.diverged:
                    notes.append(f"arm '{arm}' has no {metric}, and had none in the {against}: it is not judged")
                    continue
                before, after = values.data.get(arm), new.data.get(arm)
                lost = set(new.diverged.get(arm, ())) - set(values.diverged.get(arm, ())) - found.keys()
                pairs.append(
                    Pair(
                        arm=arm,
                        metric=metric,
                        goal=goal,
                        old=known[arm],
                        new=found,
                        margin=margin,
                        min_abs=min_abs,
                        quantum=values.quanta.get(metric, 0.0),
                        against=against,
                        lost=len(lost),
                        refused="" if before == after else f"its data was {before} and is {after}",
                        no_sample=_no_sample(new.behind.get(arm)),
                    )
                )
        notes += [f"arm '{arm}' of the {against} is not trained any more" for arm in values.data if arm not in new.data]
    return pairs, list(dict.fromkeys(notes))


def statistical(study: Study, baseline: Baseline, train: Train) -> tuple[list[Cell], list[str]]:
    """Train, and judge every cell; where the study says so, train more seeds of the arms that are inconclusive.

    Two looks spend half of alpha each, so that looking twice raises no false alarm twice.
    """
    assert study.check is not None
    old = _values(baseline)  # before anything is trained
    alpha = _level(study)
    pairs, notes = family(study, baseline, train(None, ()))
    cells = judging.judge(pairs, alpha)
    unsettled = list(dict.fromkeys(cell.arm for cell in cells if cell.verdict == "inconclusive" and cell.se > 0))
    more = more_seeds(study)
    if more is None or not unsettled:
        return cells, notes
    there = {seed for arms in old.metrics.values() for arm in unsettled for seed in arms.get(arm, {})}
    seeds = tuple(seed for seed in more if seed in there or seed in study.seeds.values)
    if len(seeds) == len(study.seeds.values):
        notes.append("more seeds would settle nothing, for the baseline has none: accept it anew, with escalate_to")
        return cells, notes
    pairs, notes = family(study, baseline, train(seeds, unsettled))
    again = {(cell.arm, cell.metric, cell.against): cell for cell in judging.judge(pairs, alpha)}
    notes.append(f"{len(seeds)} seeds of {', '.join(unsettled)}, for {len(study.seeds.values)} were inconclusive")
    return [
        again.get((cell.arm, cell.metric, cell.against), cell)
        if cell.arm in unsettled and cell.verdict == "inconclusive"
        else cell
        for cell in cells
    ], notes


def more_seeds(study: Study) -> tuple[int, ...] | None:
    """The seeds of the second look, those of the first among them; None where there is no second look."""
    assert study.check is not None
    most = study.check.escalate_to
    return None if most is None or most <= len(study.seeds.values) else study.seeds.up_to(most)


def learning(plan: Plan, plugins: Sequence[str | Path] = ()) -> list[Finding]:
    """Whether every arm learns at all: in a hundred steps the loss falls, on training or on validation images.

    That only one of them falls is for people to look at: it happens to sound networks, whose batches are noisy.
    """
    from vitlab.regression.traces import LEARNING_STEPS, trace

    found = []
    for planned in first_of_arms(plan):
        if planned.trial.spec["train"].get("steps") == 0:
            continue  # what is solved for in closed form takes no steps to learn
        seen = trace(plan, planned, LEARNING_STEPS, plugins=plugins)
        half = max(1, len(seen.losses) // 2)  # long enough for the noise of batches to even out
        first, last = (sum(part) / half for part in (seen.losses[:half], seen.losses[-half:]))
        said = [
            f"the {which} loss went from {before:.4g} to {after:.4g} in {len(seen.losses)} steps"
            for which, before, after in (("training", first, last), ("validation", seen.before, seen.after))
            if not after < before
        ]
        verdict: Verdict = ("pass", "inconclusive", "regressed")[len(said)]
        found.append(Finding(planned.arm, "learning", verdict, "; ".join(said)))
    return found


def outlook(study: Study, baseline: Baseline) -> list[Outlook]:
    """What an unchanged model may hope for, cell by cell, if its rounding has changed and nothing else.

    Against the anchor, what has been lost since is lost already.
    """
    assert study.check is not None
    alpha, more, now = _level(study), more_seeds(study) or (), _values(baseline)
    found = []
    for against, values in _sides(baseline):
        for metric, goal in goals(study).items():
            known = values.metrics.get(metric, {})
            sd = judging.pooled_sd([*seeds.values()] for seeds in known.values())
            margin, _ = _margins(study, values, metric)
            for arm, seeds in known.items():
                is_now = now.metrics.get(metric, {}).get(arm, {})
                if not seeds or not is_now:
                    continue
                sign = 1 if goal == "max" else -1
                drop = sign * (fmean(seeds.values()) - fmean(is_now.values()))
                own = judging.pooled_sd([[*seeds.values()]]) or sd
                n, then = (len(seeds.keys() & set(some)) for some in (study.seeds.values, more))
                if FEWEST <= n < then and own > 0:
                    chance = judging.chance_in_two_looks(n, then, own, margin - drop, alpha)
                else:
                    chance = judging.chance_to_pass(n, own, margin - drop, alpha) if drop < margin else 0.0
                needs = judging.seeds_to_pass(own * math.sqrt(2), margin - drop, alpha) if drop < margin else None
                found.append(Outlook(arm, metric, against, max(n, then), own, margin, chance, needs))
    return found


# -- how it is done ---------------------------------------------------------------------------------------------------


def _level(study: Study) -> float:
    """Alpha of a look: where there may be two, either spends half."""
    assert study.check is not None
    return study.check.alpha if more_seeds(study) is None else study.check.alpha / 2


def _sides(baseline: Baseline) -> Iterator[tuple[Against, Values]]:
    """What a candidate is held against."""
    values = _values(baseline)
    yield "baseline", values
    if baseline.anchor is not None and baseline.anchor.metrics != values.metrics:
        yield "anchor", baseline.anchor


def _behind(plan: Plan) -> dict[str, int]:
    """Arm to how many trainings its seeds start from, where they start from any."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for planned in plan.trials:
        for role, needed in planned.trial.needs.items():
            found[planned.arm][role].add(needed.partition("/")[0])
    return {arm: min(map(len, roles.values())) for arm, roles in found.items()}


def _no_sample(behind: int | None) -> str:
    """As in a report: five students of one teacher are one sample of the teacher."""
    if behind is None or behind >= FEWEST:
        return ""
    return f"all its seeds start from {behind} training{'s' * (behind > 1)}, and fewer than {FEWEST} are no sample"


def _values(baseline: Baseline) -> Values:
    if baseline.values is None:
        raise UserError(
            "the baseline has no results of trials; 'vitlab check --accept --reason TEXT' without --tier adds them"
        )
    return baseline.values


def _others(known: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Return those of the known versions that are others here, as ``torch 2.12.0``."""
    return [f"{name} {version}" for name, version in known.items() if here.get(name, version) != version]


def _versions(found: Sequence[frame.Found]) -> dict[str, str]:
    """Return name to version, or versions, of what was installed where results were trained."""
    versions: dict[str, set[str]] = defaultdict(set)
    for item in found:
        if item.result is not None:
            for name, version in item.result.circumstances.installed.items():
                versions[name].add(version)
    return {name: ", ".join(sorted(versions[name])) for name in sorted(versions)}


def _margins(study: Study, values: Values, metric: str) -> tuple[float, float]:
    """The margin of a metric, and its least drop that counts, from the spread of the baseline where nobody says."""
    assert study.check is not None
    sd = judging.pooled_sd([*seeds.values()] for seeds in values.metrics.get(metric, {}).values())
    steps = 2 * values.quanta.get(metric, 0.0)
    min_abs = study.check.min_abs.get(metric, max(sd, steps))
    return study.check.margin.get(metric, max(study.check.margin_sd * sd, steps, min_abs)), min_abs


def _images(found: Sequence[frame.Found]) -> Mapping[str, int]:
    """Split to how many images it has, of one trial that has left its predictions."""
    from pyarrow import parquet

    for item in found:
        if item.status == "done" and item.folder.predictions.exists():
            splits = parquet.read_table(item.folder.predictions, columns=["split"]).column("split")
            return {count["values"]: count["counts"] for count in splits.value_counts().to_pylist()}
    return {}
