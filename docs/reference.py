"""The reference: pages made from the slots, the signatures and the commands, each time the site is built.

A hook of MkDocs.  :func:`pages` needs nothing but vitlab, so that tests read the pages without building the site.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitlab import slots
from vitlab.cli import COMMANDS
from vitlab.cli.show import shown_default, shown_type
from vitlab.report import frame, judgement

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]

CAPABILITIES = ("needs_bias", "needs_rotation", "takes_bias", "takes_rotation", "vmap_safe", "goal")
"""Class variables that say what a component can be combined with, and of a metric which way is better."""


# -- hooks of MkDocs --------------------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name the pages under "Reference"."""
    assert config.nav is not None
    (section,) = [entry for entry in config.nav if "Reference" in entry]
    section["Reference"] = [{_title(text): path} for path, text in pages().items()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put the pages beside those that are written by hand."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


# -- pages ------------------------------------------------------------------------------------------------------------


def pages() -> dict[str, str]:
    """Path below the pages to Markdown: the study file, the commands, and every slot with its built-in components."""
    study = (ROOT / "pipelines" / "README.md").read_text(encoding="utf-8")
    found = {"reference/study.md": study, "reference/commands.md": "\n".join(_commands())}
    found["reference/frames.md"] = "\n".join(_frames())
    for name in slots.ROOMS:
        found[f"reference/{name}.md"] = "\n".join(_slot(name))
    return found


def _title(text: str) -> str:
    return text.partition("\n")[0].removeprefix("# ")


def _slot(name: str) -> Iterator[str]:
    room = slots.slot(name)
    built_in = [entry for entry in slots.listing(name) if entry.origin.source == slots.BUILT_IN]
    contract = f"{room.contract.__module__}.{room.contract.__qualname__}"
    yield f"# Slot `{name}`\n"
    yield f"Contract: `{contract}`. Entry-point group of plugins: `vitlab.{name}`.\n"
    yield f"{_prose(inspect.getdoc(room.contract) or '')}\n"
    yield "| name | in one line |\n| --- | --- |"
    for entry in built_in:
        first = (inspect.getdoc(room.get(f"{slots.BUILT_IN}:{entry.name}")) or "").partition("\n")[0]
        said = _inline(first.partition("  Reference:")[0]).replace("|", "&#124;")
        yield f"| [`{entry.name}`](#{entry.name}) | {said} |"
    yield ""
    shared = set(room.shared.model_fields) if room.shared else set()
    for entry in built_in:
        component = room.get(f"{slots.BUILT_IN}:{entry.name}")
        yield f"## `{entry.name}` {{#{entry.name}}}\n"
        yield f"{_prose(inspect.getdoc(component) or '')}\n"
        schema = room.options(component).model_json_schema()
        own = {option: field for option, field in schema.get("properties", {}).items() if option not in shared}
        yield from _options(own, schema, _meanings(component))
        marks = [(mark, getattr(component, mark, None)) for mark in CAPABILITIES]
        if said := [f"`{mark} = {value}`" for mark, value in marks if isinstance(value, bool | str)]:
            yield f"Says of itself: {', '.join(said)}.\n"
        yield f"Class `{entry.target.replace(':', '.')}`.\n"
    if room.shared:
        yield f"## Options of every {name}\n"
        yield f"{_prose(inspect.getdoc(room.shared) or '')}\n"
        schema = room.shared.model_json_schema()
        yield from _options(schema["properties"], schema, {})


def _options(fields: dict[str, Any], schema: dict[str, Any], meanings: dict[str, str]) -> Iterator[str]:
    if not fields:
        yield "No options.\n"
        return
    known = any(option in meanings for option in fields)
    yield "| option | type | default |" + (" meaning |" if known else "")
    yield "| --- | --- | --- |" + (" --- |" if known else "")
    for option, field in fields.items():
        default = "required" if option in schema.get("required", []) else f"`{shown_default(field.get('default'))}`"
        meaning = f" {_inline(meanings.get(option, ''))} |" if known else ""
        yield f"| `{option}` | {shown_type(field)} | {default} |{meaning}"
    yield ""


def _meanings(component: type) -> dict[str, str]:
    """What the constructor's docstring says of its arguments."""
    text = inspect.getdoc(component.__init__) or ""  # type: ignore[misc]
    _, found, arguments = text.partition("Args:\n")
    if not found:
        return {}
    arguments = re.split(r"\n(?=\S)", arguments)[0]
    entries = re.findall(r"(?ms)^    (\w+): (.*?)(?=^    \w+: |\Z)", arguments)
    return {name: " ".join(said.split()) for name, said in entries}


def _frames() -> Iterator[str]:
    yield "# Frames\n"
    yield (
        "What `vitlab.results`, `vitlab.compare` and the files of a report hold, as pandas frames. The columns named "
        "here are there whatever the study, in this order and of these types.\n"
    )
    yield "## Results {#results}\n"
    yield "`vitlab.results(path)`, `results.parquet` and `results.csv`: a row for every trial, whatever became of it.\n"
    between = {
        "PATH": ("int64, float64 or string", "one for every path the study varies, such as `model.patch_size`"),
        "val/NAME, test/NAME, train/NAME": (
            "float64",
            "final values; with `at: best`, the best value of the judged metric stands in `METRIC@best`",
        ),
    }
    yield from _meanings_of(frame.BEFORE | between | frame.AFTER)
    yield "## History {#history}\n"
    yield "`history.parquet`: a row for every measurement.\n"
    yield from _meanings_of(frame.HISTORY)
    yield "## Comparisons {#comparisons}\n"
    yield (
        "`vitlab.compare(path)`, `vitlab.compare(first, second)` and `summary.csv`: a row for every arm. Values are "
        "shares of one where the report shows percent. Behind these columns stands the mean of `test/NAME`.\n"
    )
    yield from _meanings_of(judgement.MEANINGS)


def _meanings_of(columns: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    yield "| column | type | says |\n| --- | --- | --- |"
    for name, (kind, meaning) in columns.items():
        yield f"| `{name}` | {kind} | {meaning} |"
    yield ""


def _commands() -> Iterator[str]:
    yield "# Commands\n"
    yield "Results go to stdout, progress and warnings to stderr.\n"
    yield "| exit code | means |\n| --- | --- |"
    (codes,) = re.findall(
        r"Exit codes: (.*?)\.", " ".join((inspect.getdoc(importlib.import_module("vitlab.cli")) or "").split())
    )
    for code in codes.split(", "):
        number, _, meaning = code.partition(" ")
        yield f"| {number} | {meaning} |"
    yield ""
    for name in COMMANDS:
        command: click.Command = importlib.import_module(f"vitlab.cli.{name}").command
        yield from _command(f"vitlab {name}", command)


def _command(name: str, command: click.Command) -> Iterator[str]:
    if isinstance(command, click.Group):
        for sub in command.commands.values():
            yield from _command(f"{name} {sub.name}", sub)
        return
    arguments = [p.make_metavar(click.Context(command)) for p in command.params if isinstance(p, click.Argument)]
    yield f"## `{' '.join([name, *arguments])}` {{#{name.replace(' ', '-')}}}\n"
    yield f"{_prose(inspect.cleandoc(command.help or ''))}\n"
    options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
    if options:
        yield "| option | says |\n| --- | --- |"
    for option in options:
        names, said = option.get_help_record(click.Context(command)) or ("", "")
        yield f"| `{names}` | {said} |"
    yield ""


# -- from docstrings to Markdown --------------------------------------------------------------------------------------


def _prose(text: str) -> str:
    """A docstring as Markdown: roles and double backticks become code, and papers links."""
    text = re.sub(r"::\n\n((?:    .*\n?|\n)+)", lambda code: ":\n\n" + code.group(1), text)
    return _inline(text)


def _inline(text: str) -> str:
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    text = text.replace("``", "`")
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
