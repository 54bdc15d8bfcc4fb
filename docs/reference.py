"""The reference: pages made from the slots, the signatures and the commands, each time the site is built.

A hook of MkDocs.  :func:`pages` needs nothing but vitlab, so that tests read the pages without building the site.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import vitlab
from vitlab import registry
from vitlab.cli import COMMANDS
from vitlab.cli.show import shown_default, shown_type
from vitlab.components.head import DistilledLogits, DistilledProbabilities, Logits, Probabilities
from vitlab.lab import Answer
from vitlab.report import api, comparison, frame, verdict
from vitlab.training.artifacts import Transform

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
    found["reference/python.md"] = "\n".join(_python())
    for name in registry.SLOT_MODULES:
        found[f"reference/{name}.md"] = "\n".join(_slot(name))
    return found


def _title(text: str) -> str:
    return text.partition("\n")[0].removeprefix("# ").replace("`", "")


def _slot(name: str) -> Iterator[str]:
    room = registry.slot(name)
    built_in = [entry for entry in registry.listing(name) if entry.origin.source == registry.BUILT_IN]
    contract = f"{room.contract.__module__}.{room.contract.__qualname__}"
    yield f"# Slot `{name}`\n"
    yield f"Contract: `{contract}`. Entry-point group of plugins: `vitlab.{name}`.\n"
    yield f"{_prose(inspect.getdoc(room.contract) or '')}\n"
    yield "| name | in one line |\n| --- | --- |"
    for entry in built_in:
        first = (inspect.getdoc(room.get(f"{registry.BUILT_IN}:{entry.name}")) or "").partition("\n")[0]
        said = _inline(first.partition("  Reference:")[0]).replace("|", "&#124;")
        yield f"| [`{entry.name}`](#{entry.name}) | {said} |"
    yield ""
    shared = set(room.shared.model_fields) if room.shared else set()
    for entry in built_in:
        component = room.get(f"{registry.BUILT_IN}:{entry.name}")
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
    return _arguments(inspect.getdoc(component.__init__) or "")  # type: ignore[misc]


def _arguments(text: str) -> dict[str, str]:
    """The entries of a docstring's "Args:" section."""
    _, found, arguments = text.partition("Args:\n")
    if not found:
        return {}
    arguments = re.split(r"\n(?=\S)", arguments)[0]
    entries = re.findall(r"(?ms)^    (\w+): (.*?)(?=^    \w+: |\Z)", arguments)
    return {name: " ".join(said.split()) for name, said in entries}


def _python() -> Iterator[str]:
    yield "# Python API\n"
    yield (
        "`import vitlab` takes no time: a name is loaded when it is first used. A study is named by its file or its "
        "folder in the output folder. Frames are pandas frames; they have the columns named here whatever the study, "
        "in this order and of these types.\n"
    )
    yield from _function("run")
    yield "`repr(answer)` is one line; in a notebook an answer shows its sentences and a link to the report.\n"
    yield "| of an `Answer` | meaning |\n| --- | --- |"
    for name in ("answers", "results", "compare", "history", "folder", "report"):
        member = inspect.getattr_static(Answer, name)
        call = "" if isinstance(member, property) else "()"
        yield f"| `{name}{call}` | {_inline(inspect.getdoc(member) or '')} |"
    for field in dataclasses.fields(Answer):
        yield f"| `{field.name}` | {ANSWER[field.name]} |"
    yield ""
    yield from _function("results")
    yield "Also `results.parquet` and `results.csv` of a report. A row for every trial, whatever became of it.\n"
    between = {
        "PATH": ("int64, float64 or string", "one for every path the study varies, such as `model.patch_size`"),
        "val/NAME, test/NAME, train/NAME": (
            "float64",
            "final values; with `at: best`, the best value of the judged metric stands in `METRIC@best`",
        ),
    }
    yield from _meanings_of(frame.BEFORE | between | frame.AFTER)
    yield from _function("compare")
    yield (
        "Also `summary.csv` of a report. A row for every arm. Values are shares of one where the report shows percent. "
        "After these columns follow the mean and the standard deviation of `test/NAME`, if it was measured.\n"
    )
    yield from _meanings_of(comparison.MEANINGS)
    yield "The column `verdict` has the word that the sentences and the tables of the report have:\n"
    yield "| verdict | meaning |\n| --- | --- |"
    for word, meaning in verdict.MEANINGS.items():
        yield f"| `{word}` | {meaning} |"
    yield ""
    yield from _function("history")
    yield "Also `history.parquet` of a report. A row for every measurement.\n"
    yield from _meanings_of(frame.HISTORY)
    yield from _function("predictions")
    yield from _meanings_of(api.PREDICTIONS)
    yield from _function("load")
    yield f"`transform` is a `Transform`: {_inline(inspect.getdoc(Transform) or '')}\n"
    yield "`model(transform(image))` is a NamedTuple, as the arm's head has it:\n"
    yield "| NamedTuple | fields | meaning |\n| --- | --- | --- |"
    for logits in (Logits, Probabilities, DistilledLogits, DistilledProbabilities):
        fields = ", ".join(f"`{name}`" for name in logits._fields)
        yield f"| `{logits.__name__}` | {fields} | {_inline(' '.join((inspect.getdoc(logits) or '').split()))} |"
    yield '\n`model.views(output)[""]` are the logits of the prediction, whatever the head.\n'
    yield "## Errors {#errors}\n"
    yield "Everything raised on purpose is a `vitlab.VitlabError`.\n"
    yield "| error | meaning |\n| --- | --- |"
    for error in (vitlab.VitlabError, vitlab.UserError, vitlab.SpecError):
        yield f"| `vitlab.{error.__name__}` | {_inline((inspect.getdoc(error) or '').partition(chr(10))[0])} |"
    yield ""


ANSWER = {
    "plan": "every trial of the study, in order",
    "store": "the output folder",
    "trained": "trainings of this run",
    "cached": "trainings taken from earlier runs",
    "failed": "trainings without a result after this run",
    "tracker": "name of the tracker; empty without one",
    "link": "address of the study in the tracker; None if it could not be reached",
}
"""Fields of an answer."""


def _function(name: str) -> Iterator[str]:
    """A public function: its signature, its docstring, and a table of its arguments."""
    function = getattr(vitlab, name)
    text = inspect.getdoc(function) or ""
    prose, arguments = re.split(r"\n(?:Args|Raises|Returns):\n", text)[0], _arguments(text)
    yield f"## `vitlab.{name}` {{#{name}}}\n"
    parameters = ",\n".join(f"    {parameter}" for parameter in _parameters(function))
    yield f"```python\nvitlab.{name}(\n{parameters},\n)\n```\n"
    yield f"{_prose(prose)}\n"
    if arguments:
        yield "| argument | meaning |\n| --- | --- |"
        for argument, meaning in arguments.items():
            yield f"| `{argument}` | {_inline(meaning)} |"
        yield ""


def _parameters(function: Any) -> Iterator[str]:
    star = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            star = True
            yield "*"
        default = parameter.default
        shown = "" if default is parameter.empty else f" = {(str(default) if isinstance(default, Path) else default)!r}"
        yield f"{parameter.name}: {parameter.annotation}{shown}"


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
