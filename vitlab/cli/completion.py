"""``vitlab completion SHELL``: completion of commands, options, studies, slots, components and arms in a shell.

The shell calls ``vitlab`` with :data:`VARIABLE` in the environment.  Nothing heavy is imported for an answer: names of
components are read from source, and arms from stored plans.
"""

from __future__ import annotations

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


def _completion(values: Callable[[click.Context, str], Iterable[str]]) -> Complete:
    """Return the completion of an argument by values, which depend on the command line and on what was typed."""
    return lambda context, parameter, incomplete: _items(values(context, incomplete), incomplete)


def _packaged() -> Iterable[str]:
    from vitlab.plan.packaged import packaged_studies

    return packaged_studies()


complete_file = _completion(lambda context, typed: [*_packaged(), *_files(typed)])
"""Completion of the name of a packaged study, or of the path of a study file."""

complete_packaged = _completion(lambda context, typed: _packaged())
"""Completion of the name of a packaged study."""

complete_study = _completion(lambda context, typed: [*(path.parent.name for path in _plans(context)), *_files(typed)])
"""Completion of the name of a study that has been run, or of the path of a study file."""


def complete_slot(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a slot."""
    from vitlab.registry import SLOT_MODULES

    studies = STUDIES[:1] if context.info_name == "list" else STUDIES[1:]
    return _items([*SLOT_MODULES, *(studies if parameter.param_type_name == "argument" else ())], incomplete)


def complete_component(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a component of the slot before it on the command line, or of a packaged study."""
    slot = str(context.params.get("slot"))
    return complete_packaged(context, parameter, incomplete) if slot in STUDIES else _components(slot, incomplete)


def components_of(slot: str) -> Complete:
    """Return the completion of the names of a slot's components."""
    return lambda context, parameter, incomplete: _components(slot, incomplete)


def complete_arm(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of an arm of the study on the command line, if it has been run; ``arm=NAME`` for --only."""
    from vitlab.plan.packaged import study_name
    from vitlab.spec import read_document

    params = [context.params.get(name) for name in ("file", "study", "trial", "checkpoint")]
    # click assigns no argument while an option lacks its value.
    path = Path(str(next(filter(None, [*params, *context.args]), "")))
    name, arms = path.name.partition("@")[0], []
    with suppress(VitlabError, LookupError):
        name = read_document(path).data["study"] if path.is_file() else study_name(name)
    for plan in (plan for plan in _plans(context) if plan.parent.name == name):
        with suppress(ValueError, LookupError, TypeError):  # a damaged plan offers nothing
            # read_plan would import planning, which takes longer than a user waits for a completion.
            arms = [arm["name"] for arm in json.loads(plan.read_bytes())["arms"] if not arm.get("skip")]
    return _items([f"arm={arm}" for arm in arms] if "--only" in parameter.opts else arms, incomplete)


def _items(values: Iterable[str], incomplete: str) -> list[CompletionItem]:
    matching = [value for value in dict.fromkeys(values) if value.startswith(incomplete)]
    if os.environ.get(VARIABLE) == "bash_complete":  # the other shells quote what they insert
        matching = [re.sub(r"([^\w@%+=:,./-])", r"\\\1", value) for value in matching]
    return [CompletionItem(value) for value in matching]


def _components(slot: str, incomplete: str) -> list[CompletionItem]:
    from vitlab.registry import SLOT_MODULES, listing

    entries = listing(slot) if slot in SLOT_MODULES else ()
    return [CompletionItem(entry.name, help=entry.summary) for entry in entries if entry.name.startswith(incomplete)]


def _plans(context: click.Context) -> list[Path]:
    """Return the stored plans of the output folder on the command line, or of the default one."""
    from vitlab.store.folders import OUT

    return sorted(Path(context.params.get("out") or OUT).glob("studies/*/plan.json"))


def _files(incomplete: str) -> list[str]:
    """Return the study files whose paths begin with a text, and those in the folders whose paths do."""
    start = glob.escape(incomplete)
    return sorted(file for pattern in ("*.y*ml", "*/*.y*ml") for file in glob.glob(start + pattern))
