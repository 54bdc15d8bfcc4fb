"""The story of the gate: plan, compare what is exact, see that every arm learns, train, judge, or accept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitlab import lab, registry
from vitlab._version import __version__
from vitlab.driver.scheduler import Watch
from vitlab.errors import TrialFailed, UserError
from vitlab.plan.key import requirements_of
from vitlab.plan.values import Plan
from vitlab.regression import TIERS, Tier, gate
from vitlab.regression.baseline import Baseline, Facts, Values, accepted, read_baseline, write_baseline
from vitlab.regression.decide import Cell, overall
from vitlab.regression.facts import Finding, compare_facts, find_facts, first_of_arms
from vitlab.regression.gate import Checked, Outlook
from vitlab.report.api import OUT, logs_command
from vitlab.spec import Study, read_document
from vitlab.spec.check import Check
from vitlab.store.folders import Store

LONGEST = 90  #: letters of a study's name that its trainings for the gate keep


@dataclass(frozen=True)
class CheckRequest:
    """Which study is meant, and what it is compared with; the rest as for :func:`vitlab.run`."""

    file: Path
    baseline: Path
    out: Path = OUT
    changes: Mapping[str, Any] = field(default_factory=dict)
    plugins: Sequence[Path] = ()
    watch: Watch = field(default_factory=Watch)


def check(asked: CheckRequest, tiers: Sequence[Tier] = TIERS) -> Checked:
    """Hold a study, as the code here trains it, against its baseline.

    Raises:
        UserError: if the baseline is missing, is another study's, or lacks what a tier asks for.
        TrialFailed: if trials fail and nothing has regressed by then; nothing is judged.
    """
    baseline = _baseline(asked)
    study, plan = _planned(asked)
    findings: list[Finding] = []
    cells: list[Cell] = []
    here = _installed()
    notes = gate.other_versions(baseline, here | _imported(plan))
    if "exact" in tiers:
        if baseline.facts is None:
            raise UserError(f"{asked.baseline} holds nothing exact; accept it anew")
        asked.watch.say(f"{study.study}: exact tier, {_arms(plan)}.")
        findings += compare_facts(baseline.facts, _facts(asked, plan))
    if "learning" in tiers:
        asked.watch.say(f"{study.study}: learning tier, {_arms(plan)}.")
        findings += gate.learning(plan, asked.plugins)
    if "statistical" in tiers:
        own = _own_versions(asked, study, here)
        try:
            cells, said = gate.statistical(
                study, baseline, lambda seeds, arms: _trained(asked, study, seeds, arms, own)
            )
            notes += said
        except TrialFailed as failed:
            if overall(finding.verdict for finding in findings) != "regressed":
                raise
            notes.append(str(failed).rstrip("."))  # what has regressed is said all the same
        if not cells:
            notes.append("there is nothing to judge by seeds")
    verdicts = [*(finding.verdict for finding in findings), *(cell.verdict for cell in cells)]
    verdict = overall(verdicts if cells or "statistical" not in tiers else [*verdicts, "inconclusive"])
    assert study.check is not None
    fails = verdict == "regressed" or (verdict == "inconclusive" and study.check.on_inconclusive == "fail")
    return Checked(study.study, verdict, fails, tuple(findings), tuple(cells), tuple(notes))


def accept(asked: CheckRequest, reason: str, tiers: Sequence[Tier] = TIERS, anchor: bool = False) -> Baseline:
    """Make what the code here computes the baseline.

    Args:
        asked: the study.
        reason: why; kept in the file.
        tiers: without ``statistical`` nothing is trained, and the values that stand go on standing.
        anchor: whether drift is measured from here on.
    """
    study, plan = _planned(asked)
    old = _baseline(asked) if asked.baseline.exists() else None
    asked.watch.say(f"{study.study}: exact tier, {_arms(plan)}.")
    facts = _facts(asked, plan)
    values = None
    if "statistical" in tiers:
        own = _own_versions(asked, study, _installed())
        values = _trained(asked, study, gate.more_seeds(study), (), own)
    baseline = accepted(old, study.study, facts, values, reason, __version__, anchor)
    write_baseline(asked.baseline, baseline)
    return baseline


def exit_code(checked: Checked) -> int:
    """0 unless something has regressed, or is inconclusive and the study says that this is to fail."""
    if not checked.fails:
        return 0
    return 1 if checked.verdict == "regressed" else 5


def outlook(asked: CheckRequest) -> list[Outlook]:
    """How likely an unchanged model passes; trains nothing."""
    study, _ = _planned(asked)
    return gate.outlook(study, _baseline(asked))


# -- how it is done ---------------------------------------------------------------------------------------------------


def _baseline(asked: CheckRequest) -> Baseline:
    baseline = read_baseline(asked.baseline)
    name = read_document(asked.file).data.get("study")
    if baseline.study != name:
        raise UserError(f"{asked.baseline} is the baseline of study '{baseline.study}', and {asked.file} is '{name}'")
    return baseline


def _planned(asked: CheckRequest) -> tuple[Study, Plan]:
    """The study, with the gate's settings, and its plan once its data is here."""

    def plan_study() -> tuple[Study, Plan]:
        study, plan = lab.plan_study(asked.file, changes=asked.changes, plugins=asked.plugins, out=asked.out)
        if plan.looks is None:
            return study, plan
        # What a second look trains depends on results, and the gate has one of its own.
        once = {**asked.changes, "seeds": _seeds(study)}
        return lab.plan_study(asked.file, changes=once, plugins=asked.plugins, out=asked.out)

    study, plan = plan_study()
    if study.tune is not None:
        raise UserError(f"{asked.file} tunes knobs, which would hide a change; check a study with the knobs it chose")
    absent = {str(item.trial.spec["data"]): item.trial for item in plan.trials if item.trial.data is None}
    for trial in absent.values():
        registry.slot("dataset").build(trial.spec["data"]).read("train")
    if absent:
        study, plan = plan_study()
    return study.model_copy(update={"check": study.check or Check()}), plan


def _facts(asked: CheckRequest, plan: Plan) -> Facts:
    return find_facts(plan, lab.costs(plan), asked.plugins)


def _installed() -> dict[str, str]:
    """Return name to version of what is installed here and decides a trial's numbers, vitlab itself left out."""
    from vitlab.runner.circumstances import versions

    return {name: version for name, version in versions().items() if name != "vitlab"}


def _imported(plan: Plan) -> dict[str, str]:
    """Return name to version of the installed distributions that the components of a plan import."""
    found: dict[str, str] = {}
    for planned in first_of_arms(plan):
        found |= requirements_of(planned.trial.spec)
    return found


def _own_versions(asked: CheckRequest, study: Study, here: Mapping[str, str]) -> Mapping[str, str]:
    """Return the versions that the gate's trials are to name: nothing where every result there is was trained under
    those here, and is as good as one of the gate's own."""
    changes = _changes(asked, study, gate.more_seeds(study))
    _, plan = lab.plan_study(asked.file, changes=changes, plugins=asked.plugins, out=asked.out)
    others = gate.of_other_versions(plan, Store(asked.out.resolve()), here)
    if not others:
        return {}
    asked.watch.say(
        f"results were trained under {', '.join(others)}, which is not what is installed here; the gate trains its own"
    )
    return here


def _trained(
    asked: CheckRequest, study: Study, seeds: Sequence[int] | None, arms: Sequence[str], versions: Mapping[str, str]
) -> Values:
    """Train what is missing, and say what there is.

    That is a study of its own name, with its own report: what the study itself has registered, and how its report
    judges it, is no affair of the gate's, whose second look has other seeds.

    Raises:
        TrialFailed: if trials fail.
    """
    for only in arms or ("*",):
        answer = lab.run(
            asked.file,
            out=asked.out,
            changes=_changes(asked, study, seeds),
            plugins=asked.plugins,
            only=only,
            versions=versions,
            watch=asked.watch,
        )
        if answer.failed:
            why = logs_command(answer.plan, answer.store)
            raise TrialFailed(f"{answer.failed} trials failed, so nothing is judged; '{why}' shows why.")
    return gate.values_of(answer.plan, answer.store, study)


def _changes(asked: CheckRequest, study: Study, seeds: Sequence[int] | None) -> dict[str, Any]:
    """Return what is changed of a study's file where the gate trains it."""
    changes: dict[str, Any] = {**asked.changes, "study": f"{study.study[:LONGEST]}-check"}
    changes["seeds"] = _seeds(study) | ({} if seeds is None else {"values": list(seeds)})
    return changes


def _seeds(study: Study) -> dict[str, list[Any]]:
    """The seeds of a study's first look, as a file has them."""
    return {"values": list(study.seeds.values), "vary": list(study.seeds.vary)}


def _arms(plan: Plan) -> str:
    count = sum(not arm.skip for arm in plan.arms)
    return f"{count} arm{'s' if count != 1 else ''}"
