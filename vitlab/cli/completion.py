"""``vitlab completion SHELL``: completion of commands, options, studies, slots, components and arms in a shell.

The shell calls ``vitlab`` with :data:`VARIABLE` in the environment.  Nothing heavy is imported for an answer: names of
components are read from source, and arms from stored plans.
"""

import glob
import json
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import click
from click.shell_completion import CompletionItem, get_completion_class

from vitlab.errors import VitlabError

VARIABLE = "_VITLAB_COMPLETE"
STUDIES = ("studies", "study")
"""Names of the studies that come with vitlab, where ``list`` and ``show`` take a slot."""

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> list[str]:
    """Print the script that completes vitlab's commands, options and names in SHELL.

    For bash, write 'eval "$(vitlab completion bash)"' into ~/.bashrc; for zsh, the same with zsh into ~/.zshrc, after
    compinit; for fish, 'vitlab completion fish | source' into ~/.config/fish/config.fish.
    """
    from vitlab.cli import cli

    shell_class = get_completion_class(shell)
    assert shell_class is not None
    # click's scripts call the program with VARIABLE set, and its main answers.
    source = shell_class(cli, {}, "vitlab", VARIABLE).source()
    if shell == "bash":  # which otherwise breaks words such as position=none
        source = f"COMP_WORDBREAKS=${{COMP_WORDBREAKS//[=:]/}}\n{source}"
    if shell == "fish":  # click's script cuts names at their first comma
        source = source.replace('string split ","', 'string split -m 1 ","')
    return source.splitlines()


def _completion_from_values(values: Callable[[click.Context, str], Iterable[str]]) -> Complete:
    """Return the completion of an argument by values, which depend on the command line and on what was typed."""

    def complete(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
        matching = [value for value in dict.fromkeys(values(context, typed)) if value.startswith(typed)]
        if os.environ.get(VARIABLE) == "bash_complete":  # the other shells quote what they insert
            matching = [re.sub(r"([^\w@%+=:,./-])", r"\\\1", value) for value in matching]
        return [CompletionItem(value) for value in matching]

    return complete


@_completion_from_values
def complete_packaged_or_file(context: click.Context, typed: str) -> Iterable[str]:
    """Complete the name of a packaged study, or the path of a study file."""
    from vitlab.planning.packaged import packaged_studies

    return [*packaged_studies(), *_matching_files(typed)]


@_completion_from_values
def complete_study(context: click.Context, typed: str) -> Iterable[str]:
    """Complete the name of a study that has been run, or the path of a study file."""
    return [*sorted(plan.parent.name for plan in _studies_folder(context).glob("*/plan.json")), *_matching_files(typed)]


@_completion_from_values
def complete_slot(context: click.Context, typed: str) -> Iterable[str]:
    """Complete the name of a slot, or of the studies that ``list`` and ``show`` take in its place."""
    from vitlab.registry import SLOT_MODULES

    return [*SLOT_MODULES, *{"list": ["studies"], "show": ["study"]}.get(str(context.info_name), ())]


def complete_component(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete the name of a component of the slot before it on the command line, or of a study."""
    slot = str(context.params.get("slot"))
    return (complete_packaged_or_file if slot in STUDIES else completion_of_components(slot))(context, parameter, typed)


def completion_of_components(slot: str) -> Complete:
    """Return the completion of the names of a slot's components."""

    def complete(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
        from vitlab.registry import SLOT_MODULES, list_entries

        entries = list_entries(slot) if slot in SLOT_MODULES else ()
        return [CompletionItem(entry.name, help=entry.summary) for entry in entries if entry.name.startswith(typed)]

    return complete


@_completion_from_values
def complete_arm(context: click.Context, typed: str) -> Iterable[str]:
    """Complete the name of an arm of the study on the command line, if it has been run."""
    from vitlab.planning.packaged import stored_study_name

    params = [context.params.get(name) for name in ("file", "study")]
    # click assigns no argument while an option lacks its value.
    path = Path(str(next(filter(None, [*params, *context.args]), "")))
    # A damaged file or plan offers nothing.
    with suppress(VitlabError, OSError, ValueError, LookupError, TypeError):
        name = stored_study_name(str(path) if path.is_file() else path.name.partition("@")[0])
        # read_plan would import planning, which takes longer than a user waits for a completion.
        plan = json.loads((_studies_folder(context) / name / "plan.json").read_bytes())
        return [arm["name"] for arm in plan["arms"] if not arm.get("skip")]
    return ()


def _studies_folder(context: click.Context) -> Path:
    """Return the folder of studies in the output folder on the command line, or in the default one."""
    from vitlab.store.folders import OUT

    return Path(context.params.get("out") or OUT) / "studies"


def _matching_files(typed: str) -> list[str]:
    """Return the study files whose paths begin with a text, and those in the folders whose paths do."""
    start = glob.escape(typed)
    return sorted(file for pattern in ("*.y*ml", "*/*.y*ml") for file in glob.glob(start + pattern))
