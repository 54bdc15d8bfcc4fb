"""``vitlab check`` and ``ab``, trials beside a stored baseline or of two commits, and ``coordinates``, for mup."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import click

from vitlab._version import __version__
from vitlab.cli import print_json, print_lines, say, wants_json
from vitlab.cli.options import (
    FILE,
    add_study_options,
    find_study_file,
    junit_option,
    parse_changes,
    parse_numbers,
    words_of_given_options,
)
from vitlab.errors import Interrupted, UserError
from vitlab.planning.study_folder import git_output
from vitlab.regression import TIERS
from vitlab.trackers.service import without_user

if TYPE_CHECKING:
    from vitlab.regression.baseline import Baseline
    from vitlab.regression.gate import CheckResult
    from vitlab.report import Report

CHOICES = ("--tier", "--accept", "--reason", "--plan", "--workflow", "--junit", "--json", "--format")
"""Options that the command line in messages leaves out."""
UNENDED = """<?xml version='1.0' encoding='us-ascii'?>
<testsuite name="vitlab" tests="1" failures="0" errors="1" skipped="0">
  <testcase classname="vitlab" name="check">
    <error message="no result: the command runs, or has failed; its messages on stderr have the reason" />
  </testcase>
</testsuite>
"""  #: JUnit XML until there is a result
UNKNOWN = "https://HOST/OWNER/vitlab@COMMIT"  #: repository and commit that are not known

_format_option = click.option("--format", "form", type=click.Choice(["terminal", "md"]), default="terminal")


@click.command()
@add_study_options
@click.option("--baseline", type=FILE, help="By default FILE's name with .baseline.yaml.")
@click.option(
    "--tier", "tiers", type=click.Choice(TIERS), multiple=True, help="Run only this tier; repeatable.  By default all."
)
@click.option("--accept", is_flag=True, help="Write the results of this run as the baseline; needs --reason.")
@click.option("--reason", metavar="TEXT", help="Reason for the new baseline, stored in it.")
@click.option("--plan", "plan_only", is_flag=True, help="Print how likely an unchanged model passes.  Trains nothing.")
@click.option(
    "--workflow",
    is_flag=True,
    help="Print a workflow of GitHub Actions that runs this check, under Python and torch of the baseline.",
)
@junit_option
@_format_option
@click.pass_context
def check_command(
    context: click.Context,
    file: Path,
    baseline: Path | None,
    tiers: tuple[Any, ...],
    out: Path,
    changes: tuple[str, ...],
    plugins: tuple[Path, ...],
    accept: bool,
    reason: str | None,
    plan_only: bool,
    workflow: bool,
    junit: Path | None,
    form: str,
) -> None:
    """Compare FILE's study, trained by the installed code, with its baseline.

    It passes (exit code 0), differs or has regressed (1), or is inconclusive (5, if the file makes that a failure).
    """
    if sum((accept, plan_only, workflow)) > 1:
        raise UserError("--accept, --plan and --workflow exclude each other; give one of them")
    if accept != bool(reason and reason.strip()):
        raise UserError("--accept needs --reason TEXT, and --reason needs --accept")
    if (accept or plan_only or workflow) and (wants_json() or junit is not None):
        raise UserError(
            "--json and --junit write the result of a check, and --accept, --plan and --workflow do no check; leave "
            "out one or the other"
        )
    _write_junit(junit, UNENDED)  # first, so that a mistake leaves no result of an earlier check
    name, file = file, find_study_file(file)
    if baseline is None:  # a packaged study has its own in the current folder
        baseline = (file if file == name else Path(name.name)).with_suffix(".baseline.yaml")
    if workflow:
        from vitlab.regression.baseline import read_baseline

        stored = read_baseline(baseline) if baseline.exists() else None
        if stored is None:
            say(f"{baseline} does not exist: the workflow has the installed versions; print it again after --accept")
        words = [str(name), *words_of_given_options(context, without=(*CHOICES, "--baseline", "--out"))]
        click.echo(_render_workflow("check", [*words, "--baseline", str(baseline)], stored))
        return
    say(f"reading {file}")
    from vitlab.driver.progress import make_watch
    from vitlab.regression import check, phrasing

    typed = shlex.join(["vitlab", "check", str(name), *words_of_given_options(context, without=CHOICES)])
    request = check.CheckRequest(file, baseline, out, parse_changes(changes), plugins, make_watch(), typed)
    tiers = tiers or TIERS
    if accept:
        warnings = check.accept(request, str(reason).strip(), tiers)
        print_lines([*warnings, f"{baseline} is written; review it, and commit it."])
    if plan_only or (accept and "statistical" in tiers):
        cells, units = check.forecast_check(request)
        outlook = phrasing.render_forecast(cells, units, form) if cells else f"{baseline} has no values to judge."
        click.echo(outlook.rstrip())
    if accept or plan_only:
        return
    checked = check.check(request, tiers)
    _print_check_and_exit(checked, partial(phrasing.render_check, checked), form, junit)


@click.command()
@click.argument("revisions", metavar="BASE..HEAD")
@add_study_options
@click.option(
    "--install",
    metavar="WORDS",
    help="Give each revision an environment of its own, filled by 'pip install WORDS' in its folder, such as '.'.",
)
@click.option("--workflow", is_flag=True, help="Print a workflow of GitHub Actions that compares each pull request.")
@junit_option
@_format_option
@click.pass_context
def ab_command(
    context: click.Context,
    revisions: str,
    file: Path,
    out: Path,
    changes: tuple[str, ...],
    plugins: tuple[Path, ...],
    install: str | None,
    workflow: bool,
    junit: Path | None,
    form: str,
) -> None:
    """Train FILE's study by two commits of this repository, and say whether HEAD is better, worse or equivalent.

    Exit code 0: no regression; 1: HEAD is worse, or costs more than check.cost allows; 5: it cannot be told, if the
    file makes that a failure.
    """
    if workflow:
        words = words_of_given_options(context, without=(*CHOICES, "--out"))
        click.echo(_render_workflow("ab", [str(file), *words]))
        return
    _write_junit(junit, UNENDED)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's end is handled like Ctrl-C
    from vitlab.driver.progress import make_watch
    from vitlab.regression.ab import compare_revisions
    from vitlab.regression.check import CheckRequest

    request = CheckRequest(find_study_file(file), Path(), out, parse_changes(changes), plugins, make_watch())
    try:
        report, result = compare_revisions(revisions, request, install)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; the same command goes on") from None
    _print_check_and_exit(result, report.render, form, junit, report)


def _print_check_and_exit(
    checked: CheckResult,
    render: Callable[[str], str | bytes],
    output_format: str,
    junit: Path | None,
    report: Report | None = None,
) -> None:
    """Print a result, write JUnit and the summary of a GitHub job, and exit with the code of a check."""
    from vitlab.regression import phrasing

    if wants_json():
        print_json(phrasing.render_json(checked, report))
    else:
        click.echo(render(output_format).rstrip())
    name = f"vitlab {click.get_current_context().info_name} {checked.study}"
    _write_junit(junit, phrasing.render_junit(checked, name))
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a", encoding="utf-8") as file:
            file.write(str(render("md")))
    failure = 5 if checked.verdict == "inconclusive" else 1
    click.get_current_context().exit(failure if checked.fails else 0)


def _write_junit(file: Path | None, text: str) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def _render_workflow(command: str, words: Sequence[str], stored: Baseline | None = None) -> str:
    """Return the workflow of a command, with Python and torch of its baseline, or the installed ones without one."""
    from vitlab.cli.new import template_environment
    from vitlab.runner.circumstances import versions

    recorded = dict(versions())
    if stored is not None and stored.values is not None:
        recorded |= stored.values.versions
    torch = recorded["torch"] if stored is None or stored.facts is None else stored.facts.torch
    requirements = [] if (source := _pip_source_of_vitlab()) == "." else [source]
    if UNKNOWN in source:
        say(f"vitlab was installed from what others cannot reach: replace {UNKNOWN} in the workflow")
    # A folder with a pyproject.toml is vitlab itself, or a package of plugins that depends on it.
    requirements += ["-e", "."] if Path("pyproject.toml").is_file() else []
    # Values used in a shell are quoted.
    workflow = (
        template_environment()
        .get_template(f"{command}.yml.j2")
        .render(
            words=shlex.join(words),
            python=".".join(recorded["python"].split(".")[:2]),
            torch=shlex.quote(torch.partition("+")[0]),
            requirements=shlex.join(requirements),
            commit="" if stored is None else stored.commit,
        )
    )
    return workflow.rstrip()


def _pip_source_of_vitlab() -> str:
    """Return what pip installs vitlab from elsewhere: where it is from here, at the same commit or version.

    "." is the current folder; ``UNKNOWN`` stands for what others cannot reach.
    """
    origin = json.loads(distribution("vitlab").read_text("direct_url.json") or "{}")
    if not origin:
        return f"vitlab=={__version__}"
    address, commit = origin["url"], origin.get("vcs_info", {}).get("commit_id")
    if "dir_info" in origin:  # as the README installs it: a clone, whose repository others can install from
        folder = Path(url2pathname(urlsplit(address).path)).resolve()
        if folder == Path.cwd().resolve():
            return "."
        address = git_output(folder, "config", "--get", "remote.origin.url")
        commit = git_output(folder, "rev-parse", "HEAD")
    # Without a dot, what follows git@ is an alias in the configuration of ssh.
    address = re.sub(r"^git@([^:/]+\.[^:/]+):", r"https://\1/", address)
    is_reachable = commit and address.startswith(("http://", "https://"))
    return f"git+{without_user(address)}@{commit}" if is_reachable else f"git+{UNKNOWN}"


@click.command()
@add_study_options
@click.option("--widths", type=parse_numbers, metavar="N,N,...", default="32,64,128,256", help="Values of model.dim.")
@click.option("--steps", type=click.IntRange(1), default=4, help="Optimizer steps of a training.")
@click.option("--seeds", type=click.IntRange(1), default=3, help="Seeds, over which is averaged.")
@click.option(
    "--factor",
    type=click.FloatRange(1),
    default=2.0,
    help="Largest change over widths, relative to the smallest, that counts as none.",
)
@click.pass_context
def coordinates_command(
    context: click.Context,
    file: Path,
    out: Path,
    changes: tuple[str, ...],
    plugins: tuple[Path, ...],
    widths: tuple[int, ...],
    steps: int,
    seeds: int,
    factor: float,
) -> None:
    """Say whether the outputs of layers change equally at all widths, in the base of FILE (coordinate check).

    The base is trained on the CPU for a few steps at a constant rate, at every width, with model.parametrization
    standard and mup.  Exit code 1 if mup is beyond the factor.
    """
    if len(set(widths)) < 2 or min(widths) < 1:
        raise UserError("--widths: give at least two different positive widths, such as 32,64,128")
    file, widths = find_study_file(file), tuple(sorted(set(widths)))
    say("importing PyTorch")
    from vitlab.driver.coordinates import check_coordinates

    results = check_coordinates(
        file, widths, steps=steps, seeds=seeds, changes=parse_changes(changes), plugins=plugins, out=out, say=say
    )
    head = "".join(f"{width:>11}" for width in widths)
    lines = [f"Mean absolute change of outputs after {steps} steps, by model.dim; last, largest over smallest."]
    for one in results:
        lines += ["", f"{one.parametrization:20}{head}{'ratio':>9}"]
        for layer, by_width in one.changes.items():
            numbers = "".join(f"{by_width[width]:11.3g}" for width in widths)
            lines.append(f"{layer:20}{numbers}{one.ratio(layer):9.3g}")
    lines += ["", *(one.describe_width_dependence(factor) for one in results)]
    print_lines(lines)
    if any(one.parametrization == "mup" and one.ratio(one.worst) > factor for one in results):
        context.exit(1)
