"""``vitlab status``, ``studies``, ``logs`` and ``gc``: what is in an output folder, and what of it no study needs."""

import json
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from itertools import chain
from pathlib import Path

import click

from vitlab.cli import print_json, say, wants_json
from vitlab.cli.completion import complete_arm, complete_study
from vitlab.cli.options import PATH, out_option, parse_changes, print_indented, set_option
from vitlab.errors import UserError
from vitlab.planning.study_folder import EARLIER, Version, format_differences, read_plan, read_version, read_versions
from vitlab.planning.values import Plan, Planned
from vitlab.spec.tree import NewTree, flatten
from vitlab.store.files import display_path, remove
from vitlab.store.folders import STATUSES, Event, Store, TrialFolder
from vitlab.store.locks import Busy
from vitlab.store.result import Ending

GATE = re.compile(r"(?=.*seeds=).*study=\S+-(check|[0-9a-f]{7})( |$)")
"""Options of a run by which 'vitlab check' or 'ab' has named a study, after the study that it compares."""

_latest_study_argument = click.argument("study", type=PATH, required=False, shell_complete=complete_study)


@click.command()
@_latest_study_argument
@out_option
@set_option
def status_command(study: Path | None, out: Path, changes: tuple[str, ...]) -> None:
    """Show how many trials of STUDY (its file, folder or name) are done, diverged, running, paused or failed, and why.

    By default STUDY is the one that was run last. A paused trial has a checkpoint, from which the next run goes on.
    """
    from vitlab.driver.progress import format_arms_with_seeds
    from vitlab.driver.session import describe_driver, describe_killed_driver
    from vitlab.report.api import open_study
    from vitlab.report.formats import parts_to_text
    from vitlab.report.phrasing import Column
    from vitlab.report.provenance import describe_version, rerun_instructions

    plan, store = open_study(study or _find_latest_study_and_name_others(out), out=out, changes=parse_changes(changes))
    counts: dict[str, Counter[str]] = {arm.name: Counter() for arm in plan.arms}
    tuning, teachers = Counter[str](), Counter[str]()
    reasons, in_progress = defaultdict[str, list[Planned]](list), defaultdict[tuple[str, str], list[Planned]](list)
    # Trials of tunings belong to no arm until a choice is made.
    rivals = [planned for item in plan.tuning if item.open for planned in item.trials]
    groups = [(planned, counts[planned.arm]) for planned in plan.trials]
    groups += [*((each, tuning) for each in rivals), *((each, teachers) for each in plan.labelled_prerequisites)]
    for planned, count in groups:
        folder = store.folder(planned.trial)
        state = folder.state()
        if state in (Ending.DIVERGED, Ending.FAILED):
            reasons[_describe_state(folder)].append(planned)
        if state in ("running", "paused"):
            in_progress[planned.arm, state].append(planned)
        count[state] += 1
    for planned in plan.pending:
        counts[planned.arm]["pending"] += 1
    progress = [_describe_progress(*group, trials, store) for group, trials in in_progress.items()]
    failures = [f"{format_arms_with_seeds(trials)} {why}" for why, trials in reasons.items()]
    driver = describe_driver(plan, store)
    if killed := describe_killed_driver(plan, store):
        progress.append(f"it was run by {killed}, which was killed, or whose machine stopped")
    if wants_json():
        print_json(
            {
                "study": plan.study,
                "arms": counts,
                "tuning": tuning,
                "teachers": teachers,
                "failures": failures,
                "progress": progress,
                "driver": driver,
            }
        )
        return
    others = ("(teachers, pre-training)", teachers), ("(tuning)", tuning)
    rows = {name: row for name, row in others if row} | counts
    skipped = {arm.name: f"skipped: {arm.skip}" for arm in plan.arms if arm.skip}
    columns = [Column(plan.study, tuple(rows), right=False)]
    for state in [*STATUSES, "pending"] if plan.pending else STATUSES:
        cells = tuple(str(row[state] or "") for row in rows.values())
        columns.append(Column(state, cells, rank=0 if any(cells) else 1))  # narrow terminals leave out empty columns
    if skipped:
        columns.append(Column("", tuple(skipped.get(name, "") for name in rows), right=False))
    if failures:
        failures.append(f"'{store.command('logs', plan.study)} --arm ARM --seed N' shows what a trial wrote.")
    states = {*chain.from_iterable(rows.values())}
    if driver:
        log = store.study(plan.study) / "driver.log"
        progress.insert(0, f"run by {driver}" + (f"; its log is {display_path(log)}" if log.exists() else ""))
    elif killed or states - {Ending.DONE, Ending.DIVERGED}:
        place, again, _ = rerun_instructions(read_version(store.study(plan.study), plan.version), store)
        retry = Ending.FAILED in states
        failures += [f"{place}, this trains what has no result:", f"{again}{' --retry-failed' * retry}"]
    click.echo(parts_to_text(columns, *describe_version(plan, store), *progress, *failures), nl=False)


def _describe_state(folder: TrialFolder) -> str:
    """Return the state of a trial, and the reason why it diverged or failed: ``diverged: the loss is nan``."""
    state = folder.state()
    end = folder.failure() if state == Ending.FAILED else folder.result()
    return f"{state}: {end.failure}" if end is not None and end.failure else state


def _find_latest_study_and_name_others(out: Path) -> Path:
    """Return the folder of the study that was run last, and name the others on stderr."""
    plans = sorted(out.glob("studies/*/plan.json"), key=lambda file: file.stat().st_mtime)
    if not plans:
        raise UserError(f"no study has been run in {out}; 'vitlab run FILE' runs one")
    *others, latest = (file.parent for file in plans)
    if others:
        say(f"{latest.name} was run last; STUDY may be another: {', '.join(sorted(folder.name for folder in others))}")
    return latest


def _describe_progress(arm: str, state: str, trials: Sequence[Planned], store: Store) -> str:
    """Return how far the running, or the paused trials of an arm are."""
    from vitlab.driver.progress import TrialProgress
    from vitlab.report.phrasing import format_seeds

    steps, total = [], ""
    for planned in trials:
        progress = TrialProgress(store.folder(planned.trial))
        # A damaged checkpoint is set aside, and the trial begins again.
        (progress.rewind_to_checkpoint if state == "paused" else progress.read_new_events)()
        steps.append(progress.step)
        total = f" of {progress.latest['steps']:,}" if "steps" in progress.latest else total
    span = " to ".join(f"{step:,}" for step in sorted({min(steps), max(steps)}))
    seeds = format_seeds(planned.seed for planned in trials)
    return f"{arm}: seed{'s' * (len(trials) > 1)} {seeds} {state}, at step {span}{total}"


@click.command()
@out_option
def studies_command(out: Path) -> None:
    """List the studies in the output folder, each with its question and its versions.

    A version is what the file of a study said when it was run, with the changes of the command line. VERSION names one
    as NAME@VERSION, for 'vitlab report' and wherever else a study is asked for; NAME alone is the latest.
    """
    store = Store(out.resolve())
    studies = [
        item for file in sorted(out.glob("studies/*/plan.json")) if (item := _study_with_versions(file.parent, store))
    ]
    if wants_json():
        print_json(studies)
        return
    if not studies:
        say(f"no study has been run in {out}")
    gate_studies = [study["study"] for study in studies if GATE.match(study["versions"][0]["set"])]
    for study in studies:
        if study["study"] not in gate_studies:
            _print_study_versions(study)
    if gate_studies:
        print_indented("of 'vitlab check' and 'vitlab ab': ", ", ".join(gate_studies))


def _study_with_versions(folder: Path, store: Store) -> NewTree | None:
    """Return a study with its versions, the latest first, as ``--json`` prints it; None if it was deleted meanwhile."""
    recorded = read_versions(folder.resolve())
    plans = [(version, plan) for version in recorded if (plan := read_plan(version.folder / "plan.json"))]
    rows = [_version_row(version, plan, recorded[0], store) for version, plan in plans]
    return {"study": folder.name, "question": plans[0][1].question, "versions": rows} if plans else None


def _version_row(version: Version, plan: Plan, latest: Version, store: Store) -> NewTree:
    if version.folder != store.study(plan.study):
        plan = replace(plan, version=version.name)
    trials = {(item.trial.key, item.trial.code) for item in plan.trials}  # arms may share trials
    states = Counter(store.trial(key, code).state() for key, code in trials)
    states["missing"] += len(plan.pending)
    comparable = version.content is not None and latest.content is not None
    return {
        "version": version.name,
        "run": version.when,
        "file": version.run.file,
        "set": version.set_options_text,
        "differs": format_differences(version.content or {}, latest.content or {}) if comparable else "",
        **{state: states[state] for state in STATUSES},
        "answer": _format_verdict_counts(plan, store),
    }


def _format_verdict_counts(plan: Plan, store: Store) -> str:
    from vitlab import report

    rows = json.loads(report.render(plan, store, "json"))["arms"]
    counts = Counter(row["verdict"] for row in rows if row["pairs"] or row["lost"])  # baselines have none
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "nothing compared"


def _print_study_versions(study: NewTree) -> None:
    from vitlab.planning.packaged import packaged_name

    print_indented(f"{study['study']}  ", study["question"])
    for row in study["versions"]:
        file = Path(row["file"])
        place = packaged_name(file) or display_path(file) if row["file"] else ""
        trials = ", ".join(f"{row[state]} {state}" for state in STATUSES if row[state]) or "none planned"
        differs = f"changes to the latest: {row['differs']}" if row["differs"] else ""
        parts = filter(None, [trials, row["answer"], f"{place} {row['set']}".strip(), differs])
        print_indented(f"  {row['version'][:8]}  {row['run']}  ", "; ".join(parts))


@click.command()
@_latest_study_argument
@click.option("--arm", shell_complete=complete_arm, help="Arm of STUDY, or another name that 'vitlab status' prints.")
@click.option("--seed", type=int, help="Seed of STUDY.")
@click.option("--lines", type=click.IntRange(min=1), default=20, help="Number of lines; the last ones are printed.")
@out_option
def logs_command(study: Path | None, arm: str | None, seed: int | None, lines: int, out: Path) -> list[str]:
    """Print how a trial of STUDY (its file, folder or name) ended, or how far it is, and the last lines that it wrote.

    Without --arm and --seed, it is the trial that is running, or else one that failed, or else the last one. By default
    STUDY is the one that was run last. The lines are what the trial printed, its measurements, and the traceback of a
    failure.
    """
    from vitlab.report.api import open_study

    plan, store = open_study(study or _find_latest_study_and_name_others(out), out=out)
    planned = _find_running_failed_or_latest_trial(plan, store, arm, seed)
    folder = store.folder(planned.trial)
    log, failure = folder.path / "log.txt", folder.failure()
    wrote = [*map(_format_event, folder.events()[0])]
    wrote += log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    if failure is not None and folder.state() == Ending.FAILED:  # not of an earlier attempt
        wrote += failure.traceback.splitlines()
    return [
        f"{planned.arm}, seed {planned.seed}: {_describe_state(folder)}",
        *wrote[-lines:],
        f"{display_path(folder.path)} has all {len(wrote):,} lines in its files",
    ]


def _find_running_failed_or_latest_trial(plan: Plan, store: Store, arm: str | None, seed: int | None) -> Planned:
    """Return a trial that is running, or else failed, or else was written to last, among those that are asked for.

    Raises:
        UserError: if the study has no such trial, or none has begun.
    """
    every = (*plan.trials, *plan.rival_trials, *plan.labelled_prerequisites)
    trials = [item for item in every if arm in (None, item.arm) and seed in (None, item.seed)]
    begun = [item for item in trials if store.folder(item.trial).path.is_dir()]
    if not trials:
        plan.find(arm, seed)  # raises, with what there is
    if not begun:
        raise UserError("no such trial has begun; type vitlab run FILE, with the study's file")

    def urgency(item: Planned) -> tuple[bool, bool, float]:
        folder = store.folder(item.trial)
        # A trial that failed before it had a journal has its folder alone.
        file = folder.journal if folder.journal.is_file() else folder.path
        return folder.is_locked(), folder.state() == Ending.FAILED, file.stat().st_mtime

    return max(begun, key=urgency)


def _format_event(event: Event) -> str:
    moment = datetime.fromtimestamp(event.t / 1000).isoformat(" ", "seconds")
    pairs = (
        f"{name.rpartition('.')[2]} {f'{value:.4g}' if isinstance(value, float) else value}"
        for name, value in flatten(event.body).items()
        if value != {} and not name.startswith("metrics.system")
    )
    return f"{moment}  {event.kind:8}  {'  '.join(pairs)}"


@click.command()
@out_option
@click.option("--yes", is_flag=True, help="Delete; without it, only say what would be deleted.")
def gc_command(out: Path, yes: bool) -> list[str]:
    """Delete trials that no version of a study needs: results of older code, and of versions that were deleted.

    Damaged files that were set aside, and temporary files of killed processes, are deleted too. 'vitlab studies' lists
    the versions. To delete an earlier one, delete its folder first: studies/NAME/versions/VERSION.
    """
    for folder in (out / "trials", out / "studies"):
        if folder.is_symlink():  # results may come from other people, and the link may lead to any folder of the user
            raise UserError(f"{folder} is a link, and nothing outside of the output folder is deleted; move it there")
    required, names = set(), dict[str, str]()
    # The latest plans twice, because a run that starts meanwhile replaces one.
    patterns = "studies/*/plan.json", f"studies/*/{EARLIER}/*/plan.json", "studies/*/plan.json"
    for file in chain.from_iterable(map(out.glob, patterns)):
        try:
            plan = read_plan(file)
        except UserError as error:
            raise UserError(
                "nothing is deleted, because the plan of a study cannot be read, so the trials that it needs are not "
                f"known: {error}"
            ) from None
        if plan is None:
            continue  # deleted meanwhile
        for item in (*plan.rival_trials, *plan.labelled_prerequisites, *plan.trials):
            required.add((item.trial.key, item.trial.code))
            names[item.trial.key] = f"study {plan.study}, arm {item.arm}, seed {item.seed}"
    store = Store(out)
    freed, lines = 0, []
    for path in store.find_leftover_files():
        freed += _folder_size(path)
        lines.append(str(path))
        if yes:
            remove(path)
    for trial in store.trial_folders():
        path = trial.path
        if (path.parent.name, path.name) in required or trial.is_locked():
            continue
        freed += _folder_size(path)
        lines.append(f"{path}\t{names.get(path.parent.name, 'belongs to no study, such as from --smoke')}")
        if not yes:
            continue
        with suppress(Busy), trial.lease():  # so that no process starts to train it now
            shutil.rmtree(path, ignore_errors=True)
            with suppress(OSError):  # not empty: it has the results of other code
                path.parent.rmdir()
    done = "deleted" if yes else "would be deleted; add --yes"
    say(f"{freed / 1e6:.1f} MB {done}" if freed else "nothing to delete")
    return lines


def _folder_size(path: Path) -> int:
    return sum(file.lstat().st_size for file in (path, *path.rglob("*")) if file.is_file())
