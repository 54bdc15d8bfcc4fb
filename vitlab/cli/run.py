"""``vitlab run FILE``: train, track and report a study."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitlab.cli import print_json, say, wants_json
from vitlab.cli.completion import complete_arm, completion_of_components
from vitlab.cli.options import add_study_options, find_study_file, parse_changes, words_of_given_options
from vitlab.errors import TrialFailed, UserError, format_count
from vitlab.store.files import display_path

if TYPE_CHECKING:
    from vitlab.report.api import Answer

DETACH = "--detach"
BEGIN_S = 60.0  #: how long one may take until it holds the study; a busy machine imports torch slowly
TAIL = 20  #: lines of its log that are shown where it does not get so far


@click.command()
@add_study_options
@click.option(
    "--executor",
    shell_complete=completion_of_components("executor"),
    help="Where trials run: local, inline, ray, slurm, or a plugin's.",
)
@click.option("--workers", type=click.IntRange(min=1), help="Trials at a time.")
@click.option("--tracking-uri", help="MLflow server or database; by default a database in the output folder.")
@click.option(
    "--only",
    metavar="PATTERN",
    default="*",
    shell_complete=complete_arm,
    help="Train these arms only: a name, or a pattern such as 'position=*'.",
    show_default=False,
)
@click.option(
    "--smoke",
    is_flag=True,
    help="Make the checks of 'vitlab validate --build', and train two steps of every combination of components.",
)
@click.option("--retry-failed", is_flag=True, help="Train again what failed under the same code.")
@click.option("--measure", is_flag=True, help="Also measure what each arm costs on this machine: speed and memory.")
@click.option(DETACH, is_flag=True, help="Run in the background, and say how to watch and to stop it.")
@click.pass_context
def run_command(
    context: click.Context,
    file: Path,
    out: Path,
    changes: tuple[str, ...],
    plugins: tuple[Path, ...],
    executor: str | None,
    workers: int | None,
    tracking_uri: str | None,
    only: str,
    smoke: bool,
    retry_failed: bool,
    measure: bool,
    detach: bool,
) -> list[str] | None:
    """Train what FILE asks for and is missing, track it, and answer its question.

    Trials that have been trained before, by this or another study, are not trained again.
    """
    say(f"reading {file}")  # the imports that follow take seconds
    values = parse_changes(changes)
    options = {"run.executor": executor, "run.workers": workers, "run.tracker.uri": tracking_uri}
    values |= {path: value for path, value in options.items() if value is not None}
    if detach:
        if smoke:
            raise UserError("--smoke is over in moments; leave out --detach")
        return _start_detached(file, out, values, plugins, list(words_of_given_options(context, without=(DETACH,))))
    # A scheduler ends a job with SIGTERM; handle it like Ctrl-C, with checkpoints.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    file = find_study_file(file)
    from vitlab import lab
    from vitlab.driver.progress import make_watch

    watch = make_watch()
    if smoke:
        if only != "*":
            raise UserError("--smoke trains each combination of components; leave out --only")
        from vitlab.driver.smoke import run_smoke_test
        from vitlab.testing import check_plugin_components

        count = run_smoke_test(
            file, out=out, changes=values, plugins=plugins, watch=watch, check_components=check_plugin_components
        )
        return [
            f"{format_count(count, 'combination')} of components ran two steps each, in this run or an earlier one."
        ]
    as_json, reports = wants_json(), list[str]()
    answer = lab.run(
        file,
        out=out,
        changes=values,
        plugins=plugins,
        only=only,
        retry_failed=retry_failed,
        measure=measure,
        watch=watch,
        on_report=lambda render: reports.append(str(render("json"))) if as_json else click.echo(render("terminal")),
    )
    if not as_json:
        click.echo(_format_run_summary(answer))
    elif not answer.failed:
        print_json(reports[0])
    if answer.failed:
        failures = format_count(answer.failed, "trial")
        why = answer.store.command("status", answer.plan.study)
        error = TrialFailed(f"{failures} failed; '{why}' shows why, --retry-failed trains them again.")
        error.result = json.loads(reports[0]) if as_json else None
        raise error
    return None


def _start_detached(
    file: Path, out: Path, changes: Mapping[str, Any], plugins: tuple[Path, ...], options: Sequence[str]
) -> list[str]:
    """Start the run in a session of its own, and return what to print; mistakes are raised before anything starts."""
    from vitlab import registry
    from vitlab.driver.planning import plan_study
    from vitlab.driver.session import describe_driver
    from vitlab.store.files import open_nofollow
    from vitlab.store.folders import Store

    # Mistakes are reported here, where the user looks, and not only in the log.
    study, plan = plan_study(find_study_file(file), changes=changes, plugins=plugins, out=out)
    store = Store(out.resolve())
    words = ["vitlab", "run", str(file), *options]
    again = shlex.join(words)
    if runner := describe_driver(plan, store):
        raise UserError(
            f"{plan.study} is already run by {runner}; '{again}' follows until it ends, then trains what is missing"
        )
    log = store.study(plan.study) / "driver.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    look = f"look    {store.command('status', plan.study)}"
    executor = registry.slot("executor").resolve_choice(study.run.executor)
    driver_words = [sys.executable, "-P", "-m", *words]  # imports nothing from the current folder
    if (elsewhere := executor.component.detach(executor.options, driver_words, log)) is not None:
        name, stop = elsewhere
        return [f"{plan.study} is run by {name}; its log will be {display_path(log)}", look, f"stop    {stop}"]
    say("starting in the background")
    with open(open_nofollow(log), "ab") as output:
        driver = subprocess.Popen(
            driver_words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    # The lock of the study says that the run has read its file and begun.
    deadline = time.monotonic() + BEGIN_S
    while driver.poll() is None and not describe_driver(plan, store) and time.monotonic() < deadline:
        time.sleep(0.1)
    if driver.returncode:
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
        sentence = f"it ended at once, with exit code {driver.returncode}; see {display_path(log)}"
        raise TrialFailed("\n".join([*tail, sentence]))
    if driver.returncode == 0:
        return [f"{plan.study} is answered; the answer is at the end of {display_path(log)}"]
    return [
        f"{plan.study} runs in the background, as process {driver.pid}; its log is {display_path(log)}",
        f"watch   {again}",
        look,
        f"stop    kill {driver.pid}   (running trials write a checkpoint)",
    ]


def _format_run_summary(answer: Answer) -> str:
    width = max(len("Report"), len(answer.tracker)) + 3
    lines = [f"{answer.counts}.", f"{'Report':{width}}{display_path(answer.report)}"]
    if answer.link:
        start = answer.start_command
        lines.append(f"{answer.tracker:{width}}{f'{start}   (opens the study)' if start else answer.link}")
    elif answer.tracker and answer.link is None:
        lines.append(f"{answer.tracker:{width}}not up to date; 'vitlab sync' delivers what is missing.")
    return "\n".join(lines)
