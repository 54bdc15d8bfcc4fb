"""Comparison of two revisions of the user's repository on a study: ``vitlab ab BASE..HEAD STUDY``.

Both revisions train every arm, with the same data, seeds and draws, and each arm is compared with itself.  Both plan
the study first: an arm whose trials have equal keys and code is out of the diff's reach, and is not trained.  Trials
are stored like those of any study, so a stopped comparison resumes, and the revisions share what they can.

Keys and code say nothing of the versions of torch and other requirements of vitlab.  Where environments of their own
differ in these, all arms are trained, and each environment has a folder of results.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from glob import escape

from vitlab.comparison import Verdict
from vitlab.errors import SpecError, format_count
from vitlab.identity.trial import hash_of
from vitlab.regression import gate
from vitlab.regression.check import CheckRequest, changes_with_own_name_and_seeds, refuse_tuning
from vitlab.regression.checkout import checkout, resolve_revisions, uncommitted_files
from vitlab.regression.cost import measure_and_judge_costs
from vitlab.regression.decide import Finding
from vitlab.regression.decide import Verdict as CheckVerdict
from vitlab.report.api import open_study
from vitlab.report.report import Report
from vitlab.report.two_studies import compare_studies
from vitlab.spec.changes import read_study

OUT_OF_REACH = "same: the diff does not reach it, so it was not trained"
VERDICTS: Mapping[str, CheckVerdict] = {
    Verdict.WORSE: "regressed",
    Verdict.CANNOT_TELL: "inconclusive",
    Verdict.REFUSED: "inconclusive",
}
"""Verdicts as a check has them; the others pass."""
VERSIONS = (
    "import json; from vitlab.runner.circumstances import versions; print(json.dumps({**versions(), 'vitlab': ''}))"
)
"""A program that prints the installed versions that determine a trial's numbers and that its code does not cover."""


def compare_revisions(revisions: str, request: CheckRequest, install: str | None) -> tuple[Report, gate.CheckResult]:
    """Train a study by two revisions, and return the report of their comparison, and its result like one of a check.

    Revisions are two commits, such as ``main..HEAD``; for ``install``, see :func:`vitlab.regression.checkout.checkout`.

    Raises:
        UserError: if there is no such commit, or a revision cannot run the study.
        TrialFailed: if trials fail.
    """
    study, _, problems = read_study(request.file, request.changes)
    if study is None or problems:
        raise SpecError(problems)
    refuse_tuning(study, request.file)
    metric, sides, findings, costs = study.analysis.metric, [], [], list[Finding]()
    changed = ", ".join(uncommitted_files(request.file))
    remarks = [f"Uncommitted changes of {changed} are in neither commit; 'git commit -a' adds them."] if changed else []
    with ExitStack() as stack:
        commits = resolve_revisions(revisions)
        pair = []
        for name, commit in commits:
            request.watch.say(f"checking out {name} and its packages")
            pair.append(stack.enter_context(checkout(commit, name, request.out, request.plugins, install)))
        versions = [json.loads(each.run_python("-c", VERSIONS).splitlines()[-1]) if install else {} for each in pair]
        differing = [gate.differing_versions(versions[side], versions[1 - side]) for side in (0, 1)]
        for revision, (_, commit), installed in zip(pair, commits, versions, strict=True):
            changes = changes_with_own_name_and_seeds(commit[:7], request, study)
            out = request.out / "versions" / hash_of(installed)[:12] if any(differing) else request.out
            words = [f"--set={path}={json.dumps(value, default=str)}" for path, value in changes.items()]
            words += [f"--out={out}", *(f"--plugin={plugin}" for plugin in revision.plugins)]
            sides.append((revision, str(changes["study"]), out, [str(request.file), *words]))
        if any(differing):
            had, has = (text or "nothing else" for text in differing)
            remarks.append(f"{pair[0].name} was trained under {had}, and {pair[1].name} under {has}.")

        def run(command: str, doing: str, *options: str) -> list[str]:
            """Run a command of vitlab on the study in both revisions, and say what they are doing."""
            printed = []
            for revision, _, _, words in sides:
                request.watch.say(f"{revision.name}: {doing}")
                printed.append(revision.run_python("-m", "vitlab", command, *words, *options))
            return printed

        before, after = map(_trial_keys, run("plan", "planning", "--json"))
        reached = [
            arm
            for arm, trials in after.items()
            if any(differing) or trials != before.get(arm) or not all(map(all, trials))
        ]
        number = format_count(sum(len(after[arm]) for arm in reached), "trial")
        request.watch.say(
            f"the diff reaches {len(reached)} of {format_count(len(after), 'arm')}: {number} by each commit"
        )
        for pattern in map(escape, reached) if len(reached) < len(after) else "*":
            run("run", "training", f"--only={pattern}")
        old, new = pair
        question = f"How does {new.name} differ from {old.name}?"
        report = Report(study.study, question, study.analysis, {}, "", (), (), {}, ())
        if reached:
            results = []
            for revision, name, out, _ in sides:
                plan, store = open_study(name, out=out)
                arms = tuple(arm if arm.name in reached else replace(arm, skip=OUT_OF_REACH) for arm in plan.arms)
                results.append((replace(plan, study=revision.name, arms=arms), store))
            report = compare_studies(results[0], results[1], exploratory=None)
            rows = [row for row in report.arms if row["baseline"] is not None]
            for row, answer in zip(rows, report.answers, strict=True):
                verdict, arm = row["verdict"], row["arm"].removeprefix(f"{new.name}: ")
                sentence = answer if answer.startswith(verdict) else f"{verdict}: {answer}"
                findings.append(Finding(arm, metric, VERDICTS.get(verdict, "pass"), sentence, row["wall_s"]))
            if study.check.cost is not None:
                costs = [*measure_and_judge_costs(study, old, new, reached, request.study_arguments, request.watch)]
    same = [Finding(arm, metric, "pass", OUT_OF_REACH) for arm in after if arm not in reached]
    report = replace(
        report,
        answers=[*report.answers, *(f"{item.arm}: {item.sentence}." for item in same)],
        notes=[*(f"{item.arm}: {item.check} {item.sentence}." for item in costs), *remarks, *report.notes],
    )
    return report, gate.make_check_result(study, [*findings, *same, *costs])


def _trial_keys(plan_json: str) -> dict[str, set[tuple[str, str]]]:
    """Return key and code of the trials of each arm in a plan; of data that is still to be read, a key is empty."""
    trials: dict[str, set[tuple[str, str]]] = {}
    for planned in json.loads(plan_json)["trials"]:
        trials.setdefault(planned["arm"], set()).add((planned["key"], planned["code"]))
    return trials
