"""The regression check: plan a study, run the tiers, and report or accept the result."""

import re
import shlex
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from vitlab import lab
from vitlab.driver.planning import fetch_unidentified_data
from vitlab.driver.session import Watch
from vitlab.errors import Problem, SpecError, TrialFailed, UserError, format_count
from vitlab.identity.code import imported_requirements
from vitlab.planning.study_folder import git_output
from vitlab.planning.values import Plan
from vitlab.regression import TIERS, Tier, gate
from vitlab.regression.baseline import Baseline, Values, accept_into_baseline, read_baseline, write_baseline
from vitlab.regression.checkout import Revision, checkout, resolve_commit, uncommitted_files
from vitlab.regression.cost import measure_and_judge_costs
from vitlab.regression.decide import Cell, Finding, worst_verdict
from vitlab.regression.facts import compare_exact_facts, compute_exact_facts
from vitlab.regression.gate import CheckResult, Outlook
from vitlab.spec import Study, read_document
from vitlab.store.folders import OUT, Store

MAX_NAME_LENGTH = 90  #: characters of a study's name in the name of the gate's own study


@dataclass(frozen=True)
class CheckRequest:
    """The study to check and its baseline; ``out`` to ``watch`` are as in :func:`vitlab.run`."""

    file: Path
    baseline: Path
    out: Path = OUT
    changes: Mapping[str, object] = field(default_factory=dict)
    plugins: Sequence[Path] = ()
    watch: Watch = field(default_factory=Watch)
    command: str = "vitlab check"  #: the command line, without what messages add to it

    @property
    def accept_command(self) -> str:
        """The command that messages advise."""
        return f"{self.command} --accept --reason TEXT"

    @property
    def study_arguments(self) -> dict[str, object]:
        """The study as arguments of :func:`vitlab.plan` for a process of any revision, which has its own plugins."""
        return {"file": self.file, "changes": self.changes, "out": self.out}

    def plan(self, changes: Mapping[str, object]) -> tuple[Study, Plan]:
        """Return the study with these changes in place of its own, and its plan."""
        return lab.plan_study(self.file, changes=changes, plugins=self.plugins, out=self.out)


def check(request: CheckRequest, tiers: Sequence[Tier] = TIERS) -> CheckResult:
    """Compare a study, as trained by the current code, with its baseline.

    Raises:
        UserError: if the baseline is missing, belongs to another study, or lacks the section of a tier.
        TrialFailed: if trials fail and no earlier tier has found a regression.
    """
    study, plan, baseline = _read_study_and_baseline(request, tiers)
    if study.check.cost is None:
        if set(tiers) == {"cost"}:
            raise UserError(f"{request.file} limits no cost; write check: {{cost: {{time: 1.2, memory: 1.1}}}}")
        tiers = [tier for tier in tiers if tier != "cost"]
    if "cost" in tiers and not baseline.commit:
        raise UserError(
            f"{request.baseline} names no commit that costs are measured beside; add it: {request.accept_command}"
        )
    request.watch.say(f"{study.study}: {', '.join(tiers)}")
    findings: list[Finding] = []
    cells: list[Cell] = []
    notes = _note_other_versions(plan, baseline)
    if "exact" in tiers and baseline.facts is not None:
        new_facts = compute_exact_facts(plan, request.file, request.plugins, request.watch)
        findings += compare_exact_facts(baseline.facts, new_facts)
    if "learning" in tiers:
        findings += gate.train_and_check_learning(plan, request.plugins, request.watch, baseline.learned)
    if "statistical" in tiers and baseline.values is not None:
        try:
            cells, counts, more_notes = gate.train_and_judge(
                study, baseline.values, partial(_train_missing, request, study)
            )
            cells = [gate.doubt_if_at_chance(cell, plan, baseline.values) for cell in cells]
            findings, notes = [*findings, *counts], [*notes, *more_notes]
        except TrialFailed as failed:
            if worst_verdict(finding.verdict for finding in findings) not in ("differs", "regressed"):
                raise
            notes.append(str(failed).rstrip("."))  # what an earlier tier has found is still reported
        if not cells:
            findings.append(Finding("", "statistical", "inconclusive", "no arm has values to compare over seeds"))
    if "cost" in tiers:
        commit = resolve_commit(baseline.commit)
        with checkout(commit, f"the baseline's commit {commit[:7]}", request.out, request.plugins) as old:
            this_code = Revision("this code", request.plugins)
            findings += measure_and_judge_costs(
                study, old, this_code, [*plan.first_trials], request.study_arguments, request.watch
            )
    result = gate.make_check_result(study, findings, cells, notes)
    if result.verdict in ("differs", "regressed"):
        own_study = str(changes_with_own_name_and_seeds("check", request, study)["study"])
        report = Store(request.out.resolve()).command("report", own_study)
        words = "rev-list", "-1", "--abbrev-commit", "HEAD", "--", request.baseline.name
        if commit := git_output(request.baseline.parent, *words):
            notes.append(f"see what has changed since the baseline was committed by 'git diff {commit}'")
        notes += [f"see the trainings of the check by '{report}'"] * bool(cells)
        by_baseline = {cell.verdict for cell in cells} | {item.verdict for item in findings if item.check != "learning"}
        if by_baseline & {"differs", "regressed"}:
            notes.append(f"if the change is meant, accept it: {request.accept_command}")
    return replace(result, notes=tuple(notes), units=plan.units)


def accept(request: CheckRequest, reason: str, tiers: Sequence[Tier] = TIERS) -> list[str]:
    """Accept the results of the current code as the baseline, record the reason, and return warnings.

    Without ``statistical`` among the tiers nothing is trained, and the previous values are kept.  What the tier
    ``learning`` finds is accepted, too, with a warning.
    """
    study, plan = _read_data_and_plan(request)
    commit = "" if study.check.cost is None else resolve_commit("HEAD")
    if commit and (changed := uncommitted_files(request.baseline)):
        raise UserError(
            f"{', '.join(changed)}: not committed, and check.cost measures beside a commit; run 'git commit "
            "-a', then the same command again"
        )
    old = _read_baseline(request) if request.baseline.exists() else Baseline(study=study.study, accepted=())
    facts = compute_exact_facts(plan, request.file, request.plugins, request.watch)
    learning: list[Finding] = []
    if "learning" in tiers:
        learning += gate.train_and_check_learning(plan, request.plugins, request.watch)
        old = old.model_copy(update={"learned": tuple(item.arm for item in learning if item.verdict == "pass")})
    values = None
    if "statistical" in tiers:
        values = _train_missing(request, study, gate.second_look_seeds(study))
    write_baseline(request.baseline, accept_into_baseline(old, facts, values, reason, commit))
    return [
        f"Warning: {item.arm}: learning: {item.sentence}; `learning` will be {item.verdict} at every check until the "
        "arm changes"
        for item in learning
        if item.verdict != "pass"
    ]


def forecast_check(request: CheckRequest) -> tuple[list[Outlook], Mapping[str, str]]:
    """Return what the seeds of the baseline can tell, without training, and the units of metrics."""
    study, plan, baseline = _read_study_and_baseline(request, ("statistical",))
    assert baseline.values is not None
    cells = [gate.make_unreachable_drop_infinite(cell, plan) for cell in gate.forecast_cells(study, baseline.values)]
    return [gate.doubt_if_at_chance(cell, plan, baseline.values) for cell in cells], plan.units


def _read_study_and_baseline(request: CheckRequest, tiers: Sequence[Tier]) -> tuple[Study, Plan, Baseline]:
    """Return a study, its plan and its baseline; raise the mistakes of both together."""
    try:
        baseline = _read_baseline(request, tiers)
    except SpecError:  # of the study file, which is read there, too
        raise
    except UserError as error:
        try:
            request.plan(request.changes)
        except SpecError as mistakes:
            raise SpecError([*mistakes.problems, *error.mistakes]) from None
        raise
    try:
        return *_read_data_and_plan(request), baseline
    except SpecError as mistakes:
        problems, given = mistakes.problems, {plugin.name for plugin in request.plugins}
        arms = () if baseline.facts is None else baseline.facts.arms.values()
        origins = "\n".join(origin for arm in arms for origin in arm.origins)
        if files := sorted({*re.findall(r"(?m)^\w+:\S+ (.+\.py) \S+$", origins)} - given):
            beside = (request.file.parent / file for file in files)
            paths = (file if file.exists() else Path("PATH", file.name) for file in beside)
            words = " ".join(f"--plugin {shlex.quote(str(path))}" for path in paths)
            # Options of an unknown component are checked as those of the one with the nearest name.
            unknown = {item.path[:-1] for item in problems if re.match(r"no \w+ called '", item.message)}
            problems = [item for item in problems if item.path[:-1] not in unknown]
            problems.append(Problem(str(request.baseline), 0, 0, f"it was accepted with {words}; add this"))
        raise SpecError(problems) from None


def _read_baseline(request: CheckRequest, tiers: Sequence[Tier] = ()) -> Baseline:
    """Read the baseline of a study, with the sections of tiers; without these, raise UserError."""
    name = read_document(request.file).data.get("study")
    baseline = read_baseline(request.baseline, f"; write it: {request.accept_command}")
    if baseline.study != name:
        raise UserError(
            f"{request.baseline} is the baseline of study '{baseline.study}', and {request.file} is '{name}'"
        )
    sections = {"exact": baseline.facts, "statistical": baseline.values}
    if missing := [tier for tier, section in sections.items() if tier in tiers and section is None]:
        what = f"no section of the {' and '.join(missing)} tier"
        raise UserError(f"{request.baseline} has {what}; add it from the current code: {request.accept_command}")
    return baseline


def _read_data_and_plan(request: CheckRequest) -> tuple[Study, Plan]:
    """Return the study and its plan, after its data was read."""
    study, plan = request.plan(request.changes)
    refuse_tuning(study, request.file)
    if fetch_unidentified_data(plan, Store(request.out.resolve()), request.file) or plan.looks is not None:
        # The trials of a second look depend on results, and the gate has its own second look.
        study, plan = request.plan({**request.changes, "seeds": _seed_options(study)})
    return study, plan


def _note_other_versions(plan: Plan, baseline: Baseline) -> list[str]:
    """Return a note if the baseline was trained under other versions of what determines a trial's numbers."""
    imported = [imported_requirements(planned.trial.spec) for planned in plan.first_trials.values()]
    here = dict(ChainMap(*imported, _installed_versions()))
    then = {} if baseline.values is None else baseline.values.versions
    recorded, differing = gate.differing_versions(then, here), gate.differing_versions(here, then)
    return [f"the baseline was trained under {recorded}, and this environment has {differing}"] * bool(recorded)


def _installed_versions() -> dict[str, str]:
    """Return the installed versions that determine a trial's numbers, without vitlab itself."""
    from vitlab.runner.circumstances import versions

    return {name: version for name, version in versions().items() if name != "vitlab"}


def _train_missing(
    request: CheckRequest, study: Study, seeds: Sequence[int] | None, arms: Sequence[str] = ()
) -> Values:
    """Train the missing trials and return all values.

    The gate trains a study under a name of its own, with its own report, so that the registration and the report of
    the checked study are not affected: the second look of the gate has other seeds.
    """
    _, plan = request.plan(changes_with_own_name_and_seeds("check", request, study, gate.second_look_seeds(study)))
    store = Store(request.out.resolve())
    recorded = gate.recorded_versions(store.folder(trial).result() for trial in plan.trials_with_keys)
    installed = _installed_versions()
    # Without a requirement, stored results of the installed versions are used again.
    versions = installed if gate.differing_versions(recorded, installed) else {}
    for only in arms or ("*",):
        answer = lab.run(
            request.file,
            out=request.out,
            changes=changes_with_own_name_and_seeds("check", request, study, seeds),
            plugins=request.plugins,
            only=only,
            versions=versions,
            watch=request.watch,
        )
        if answer.failed:
            command = answer.store.command("status", answer.plan.study)
            raise TrialFailed(
                f"{format_count(answer.failed, 'trial')} failed, so the gate has no verdict; '{command}' shows why."
            )
    return gate.read_final_values(answer.plan, answer.store, study)


def changes_with_own_name_and_seeds(
    what: str, request: CheckRequest, study: Study, seeds: Sequence[int] | None = None
) -> dict[str, object]:
    """Return the changes to a study's file for a study of its own, named after ``what``."""
    own_seeds = _seed_options(study) | ({} if seeds is None else {"values": list(seeds)})
    return {**request.changes, "study": f"{study.study[:MAX_NAME_LENGTH]}-{what}", "seeds": own_seeds}


def _seed_options(study: Study) -> dict[str, object]:
    return {"values": list(study.seeds.values), "vary": list(study.seeds.vary)}


def refuse_tuning(study: Study, file: Path) -> None:
    """Raise UserError for a study that tunes its arms, as its choices would follow the code."""
    if study.tune is not None:
        raise UserError(f"{file} has 'tune', which would hide a change; replace 'tune' by the chosen values")
