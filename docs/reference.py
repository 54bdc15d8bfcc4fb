"""Reference pages in ``pages/reference``, generated from the slots, the signatures and the commands.

``make reference`` writes them after a change of these; a test compares them with the code.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

import vitlab
from vitlab import errors, registry
from vitlab.cli import COMMANDS, cli
from vitlab.cli.show import describe_option_type, shown_default, study_schema
from vitlab.comparison import MEANINGS
from vitlab.components.head import DistilledLogits, Logits
from vitlab.lab import Answer
from vitlab.registry.options import parse_docstring_args
from vitlab.report import api, comparison, frame
from vitlab.report.notebook import Comparison
from vitlab.report.sections import all_sections
from vitlab.training.artifacts import Transform

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pages" / "reference"
SAMPLES = ROOT / "docs" / "samples"  #: what commands print, which tests compare with what they do print

CAPABILITIES = ("takes_bias", "takes_rotation", "vmap_safe", "goal")
"""Class variables that say what a component can be combined with, and whether more of a metric is better."""

HOOKS = ("add", "rotation", "bias", "mix")
"""Methods of a position encoding, of which it overrides some; the attention must apply a rotation and a bias."""


# -- pages ------------------------------------------------------------------------------------------------------------


def pages() -> dict[str, str]:
    """Return Markdown by file name: the study file, its keys, the commands, and every slot with its components."""
    study = (ROOT / "pipelines" / "README.md").read_text(encoding="utf-8")
    study = study.replace("../docs/pages/reference/", "").replace("../docs/pages/", "../")
    generated = {"study.md": study, "keys.md": "\n".join(_keys())}
    generated["commands.md"] = "\n".join(_commands())
    generated["python.md"] = "\n".join(_python())
    for name in registry.SLOT_MODULES:
        generated[f"{name}.md"] = "\n".join(_slot(name))
    return generated


def write() -> None:
    """Write the pages, and delete pages of slots that are no more."""
    generated = pages()
    for file in FOLDER.glob("*.md"):
        if file.name not in generated:
            file.unlink()
    for name, text in generated.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def _keys() -> Iterator[str]:
    """Yield every key of a study file, section by section, as the JSON Schema has it."""
    schema = study_schema()
    yield "# Keys of the study file\n"
    yield (
        "Every key with its type, default and meaning, from the schema that `vitlab schema` prints for editors. "
        "[The study file](study.md) explains how they belong together. A type such as `choice of norm` "
        "names a slot: a component's name, or a mapping with `type` and its options.\n"
    )
    paths: dict[str, str] = {}  # of the sections that follow, by their name in the schema
    sections = [("", schema)]
    for path, part in sections:  # grows while it is read
        yield f"## Under `{path}`\n" if path else "## The file\n"
        if text := path and part.get("description"):
            yield f"{_prose(text)}\n"
        mapping = next((form for form in (part, *part.get("anyOf", part.get("oneOf", []))) if "properties" in form), {})
        for key, field in mapping.get("properties", {}).items():
            for name in re.findall(r"#/\$defs/(\w+)'", str(field)):
                if name not in paths:
                    paths[name] = f"{path}.{key}".lstrip(".")
                    sections.append((paths[name], schema["$defs"][name]))
            value = field.get("default")
            has_section = field.get("$ref", "").rpartition("/")[2] in paths
            is_shown = not (has_section or value in (None, "", []) or isinstance(value, dict))
            default = f", by default `{shown_default(value)}`" if is_shown else ""
            default = ", required" if key in mapping.get("required", []) else default
            # A heading of its own, which search and links find, and not a row: some meanings are a paragraph.
            yield f"### `{f'{path}.{key}'.lstrip('.')}`\n"
            yield f"*{_linked_type(field, paths)}{default}*\n"
            yield f"{_inline(' '.join(field.get('description', '').split()))}\n"


def _linked_type(field: dict[str, Any], paths: Mapping[str, str]) -> str:
    """Return the type of a key, with links to the pages of slots and to other sections of the page."""
    text = describe_option_type(field)
    text = re.sub(r"\bslot\.(\w+)", r"[choice of \1](\1.md)", text)
    for name, path in paths.items():
        text = re.sub(rf"\b{name}\b", f"[`{path}`](#{_anchor(path)})", text)
    return text


def _anchor(path: str) -> str:
    """Return the anchor that code hosts and MkDocs give the heading of a section."""
    return f"under-{path.replace('.', '')}"


def _slot(name: str) -> Iterator[str]:
    component_slot = registry.slot(name)
    built_in = [entry for entry in registry.list_entries(name) if entry.origin.source == registry.BUILT_IN]
    contract = component_slot.contract.__qualname__
    contract = f"vitlab.plugin.{'Replay' if contract == 'Tracker' else contract}"
    yield f"# Slot `{name}`\n"
    yield f"Contract: `{contract}`. Entry-point group of plugins: `vitlab.{name}`.\n"
    yield f"{_prose(_split_sections(inspect.getdoc(component_slot.contract) or '')[0])}\n"
    yield "| name | in one line |\n| --- | --- |"
    for entry in built_in:
        first = (inspect.getdoc(component_slot.get(f"{registry.BUILT_IN}:{entry.name}")) or "").partition("\n")[0]
        summary = _inline(first.partition("  Reference:")[0]).replace("|", "&#124;")
        yield f"| [`{entry.name}`](#{entry.name}) | {summary} |"
    yield ""
    if packages := _packages_of(name):
        listed = "; ".join(f"`{package}` with {components}" for package, components in packages.items())
        yield f"Packages in the folder `plugins`, each installed by `pip install ./plugins/NAME`: {listed}.\n"
    shared = set(component_slot.shared.model_fields) if component_slot.shared else set()
    for entry in built_in:
        component = component_slot.get(f"{registry.BUILT_IN}:{entry.name}")
        yield f"## `{entry.name}`\n"
        yield f"{_prose(_split_sections(inspect.getdoc(component) or '')[0])}\n"
        schema = component_slot.options(component).model_json_schema()
        own = {option: field for option, field in schema.get("properties", {}).items() if option not in shared}
        yield from _options(own, schema)
        marks = [(mark, getattr(component, mark, None)) for mark in CAPABILITIES]
        if properties := [f"`{mark} = {value}`" for mark, value in marks if isinstance(value, bool | str)]:
            yield f"Properties: {', '.join(properties)}.\n"
        if name == "position" and (hooks := [f"`{hook}`" for hook in HOOKS if component.overrides(hook)]):
            yield f"Hooks: {', '.join(hooks)}.\n"
        yield f"Class `{entry.target.replace(':', '.')}`.\n"
    if component_slot.shared:
        yield f"## Options of every {name}\n"
        yield f"{_prose(inspect.getdoc(component_slot.shared) or '')}\n"
        schema = component_slot.shared.model_json_schema()
        yield from _options(schema["properties"], schema)


def _packages_of(slot: str) -> dict[str, str]:
    """Return the components that each package of the folder ``plugins`` adds to a slot, by the package's name."""
    packages = {}
    for file in sorted((ROOT / "plugins").glob("*/pyproject.toml")):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        if components := project.get("entry-points", {}).get(f"vitlab.{slot}"):
            packages[project["name"]] = ", ".join(f"`{name}`" for name in components)
    return packages


def _options(fields: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    if not fields:
        yield "No options.\n"
        return
    has_meanings = any(field.get("description") for field in fields.values())
    yield "| option | type | default |" + (" meaning |" if has_meanings else "")
    yield "| --- | --- | --- |" + (" --- |" if has_meanings else "")
    for option, field in fields.items():
        default = "required" if option in schema.get("required", []) else f"`{shown_default(field.get('default'))}`"
        meaning = f" {_inline(field.get('description', ''))} |" if has_meanings else ""
        yield f"| `{option}` | {describe_option_type(field)} | {default} |{meaning}"
    yield ""


def _split_sections(text: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's prose and the entries of its "Args:" section."""
    return re.split(r"\n+(?:Args|Raises|Returns):\n", text)[0], parse_docstring_args(text)


def _python() -> Iterator[str]:
    yield "# Python API\n"
    yield (
        "`import vitlab` loads nothing: a name is imported when it is first used. A study is given by its file, its "
        "folder or its name, of which `NAME@VERSION` is an earlier version, or by a mapping with the content of a "
        "file, also where results are read; `vitlab.run` and `vitlab.plan` take no names of studies that were run. "
        "Frames are pandas frames; every study has "
        "the columns named here, in this order and of these types. Where a frame has many columns, its text shows a "
        "few of them, names all, and says what it shows; `frame[[...]]` shows what is selected. The examples use the "
        "study of the [tutorial](../tutorial.md).\n"
    )
    yield "| command | in Python |\n| --- | --- |"
    for command, call in IN_PYTHON.items():
        yield f"| `vitlab {command}` | {call} |"
    yield (
        "\nThe other commands have no function; `vitlab plan FILE --power --json`, for example, prints as one JSON "
        "document what the study will be able to detect.\n"
    )
    yield from _function("run")
    yield "`repr(answer)` is one line; in a notebook an answer shows its sentences and a link to the report.\n"
    yield "| of an `Answer` | meaning |\n| --- | --- |"
    for name in ("answers", "results", "compare", "history", "folder", "report"):
        member = inspect.getattr_static(Answer, name)
        call = "" if isinstance(member, property) else "()"
        yield f"| `{name}{call}` | {_inline(_split_sections(inspect.getdoc(member) or '')[0])} |"
    for field in dataclasses.fields(Answer):
        yield f"| `{field.name}` | {ANSWER[field.name]} |"
    yield ""
    yield from _function("plan")
    yield from _function("results")
    yield "Also `results.parquet` and `results.csv` of a report. One row per trial, failed trials included.\n"
    path = {
        "PATH": ("int64, float64 or string", "one column per path the study varies, such as `model.patch_size`"),
    }
    last = {
        "train/NAME, test/NAME, val/NAME": (
            "float64",
            "final values, the study's metric last; with `at: best`, its best value is in `METRIC@best`",
        ),
    }
    yield from _meanings_of(frame.BEFORE | path | frame.AFTER | last)
    yield from _function("compare")
    yield (
        "Also `summary.csv` of a report. One row per arm. Shares are between 0 and 1 where the report shows percent. "
        "The mean and the standard deviation of `test/NAME` follow these columns. Arms are compared by another metric "
        'of the `results` by `vitlab.judge(vitlab.results("first.yaml"), metric="test/accuracy")`.\n'
    )
    yield from _meanings_of(comparison.COLUMNS)
    yield "The column `verdict` has the word used in the sentences and tables of the report:\n"
    yield "| verdict | meaning |\n| --- | --- |"
    for word, meaning in MEANINGS.items():
        yield f"| `{word}` | {meaning} |"
    yield ""
    yield "| of a `Comparison`, beside what every frame has | meaning |\n| --- | --- |"
    for name in ("answers", "notes", "figures", "curves", "tables", "render"):
        member = inspect.getattr_static(Comparison, name)
        call = "" if isinstance(member, property) else "()"
        yield f"| `{name}{call}` | {_inline(_split_sections(inspect.getdoc(member) or '')[0])} |"
    yield ""
    yield from _tables()
    yield from _function("judge")
    yield from _function("list_components")
    yield from _function("history")
    yield "Also `history.parquet` of a report. One row per measurement.\n"
    yield from _meanings_of(frame.HISTORY)
    yield from _function("predictions")
    yield from _meanings_of(api.PREDICTIONS)
    yield from _function("load")
    yield f"`transform` is a `Transform`: {_inline(inspect.getdoc(Transform) or '')}\n"
    yield "`model(transform(image))` is a NamedTuple that depends on the arm's head:\n"
    yield "| NamedTuple | fields | meaning |\n| --- | --- | --- |"
    for logits in (Logits, DistilledLogits):
        fields = ", ".join(f"`{name}`" for name in logits._fields)
        yield f"| `{logits.__name__}` | {fields} | {_inline(' '.join((inspect.getdoc(logits) or '').split()))} |"
    yield '\n`model.logits_by_head(output)[""]` are the logits of the prediction, whatever the head.\n'
    yield from _function("explain")
    yield "## Errors\n"
    yield (
        "Every error that vitlab raises on purpose is a `vitlab.VitlabError`, and a mistake of the caller is a "
        "`vitlab.UserError`. The others say more, and are in `vitlab.errors`. `problems` of a `SpecError` has every "
        "mistake of a study:\n"
    )
    yield f"```python{EXAMPLES['errors']}```\n"
    yield "| error | is a | meaning |\n| --- | --- | --- |"
    for name, error in vars(errors).items():
        if inspect.isclass(error) and issubclass(error, vitlab.VitlabError):
            place, base = "vitlab" if name in vitlab.__all__ else "vitlab.errors", error.__base__
            meaning = _inline((inspect.getdoc(error) or "").partition("\n")[0])
            yield f"| `{place}.{name}` | `{base.__name__ if base else ''}` | {meaning} |"
    yield ""


def _tables() -> Iterator[str]:
    """Yield the keys of ``.tables``, and what their columns mean, by the comments of the fields of their rows."""
    yield (
        "`.tables` has the sections of the report that store rows, and only those for which the study has data, as "
        'frames: `comparison.tables["main_effects"]`. A section of a plugin is there under its name. Numbers are in '
        "units of the metric, shares between 0 and 1.\n"
    )
    built_in = {entry.name for entry in registry.list_entries("section") if entry.origin.source == registry.BUILT_IN}
    for name, part in all_sections().items():
        if part.row and name in built_in:
            yield f'`tables["{name}"]`: {_inline((inspect.getdoc(type(part)) or "").partition(chr(10))[0])}\n'
            yield "| column | meaning |\n| --- | --- |"
            meanings = dict(re.findall(r"^    (\w+): .*?#: (.*)$", inspect.getsource(part.row), re.MULTILINE))
            for field in dataclasses.fields(part.row):
                each = ".NAME" if "Mapping" in str(field.type) else ""  # a column for each name of a mapping
                yield f"| `{field.name}{each}` | {_inline(meanings[field.name])} |"
            yield ""


ANSWER = {
    "plan": "every trial of the study, in order",
    "store": "the output folder",
    "trained": "trainings of this run",
    "cached": "trainings of earlier runs, which are not repeated",
    "failed": "trainings without a result after this run; a training that diverged has a result",
    "tracker": "name of the tracker; empty without one",
    "link": "address of the study in the tracker; None if it could not be reached",
    "elsewhere": "trials that other runs trained meanwhile",
    "start_command": "command that serves the address; empty if it is served already",
}
"""Fields of an answer."""


IN_PYTHON = {
    "run FILE": "`vitlab.run(FILE)`",
    "validate --build FILE": "`vitlab.plan(FILE)` raises a `SpecError`, [whose `problems` are all mistakes](#errors)",
    "plan --cost FILE": "`vitlab.plan(FILE)`",
    "status STUDY": '`vitlab.results(STUDY).groupby("arm")["status"].value_counts().unstack()`, and column `failure`',
    "report STUDY": "`vitlab.compare(STUDY)`; `.render(FORMAT)` has the other formats",
    "compare FIRST SECOND": "`vitlab.compare(FIRST, SECOND)`",
    "judge TABLE": "`vitlab.judge(TABLE, ...)`",
    "list SLOT": "`vitlab.list_components(SLOT)`",
    "explain STUDY": "`vitlab.explain(STUDY, IMAGE)`",
}
"""Commands and the public functions that answer the same question."""


EXAMPLES = {
    "run": """
import vitlab

answer = vitlab.run("first.yaml")
print("\\n".join(answer.answers))  # a sentence for each comparison
print(f"{answer.trained} trained, {answer.cached} cached; {answer.report}")
""",
    "plan": """
import vitlab

plan = vitlab.plan("first.yaml", changes={"seeds": 8})
print(plan.groupby("arm")["trained"].agg(["sum", "count"]))  # trials that are stored, and all trials
""",
    "results": """
import vitlab

results = vitlab.results("first.yaml")
print(results.query("status != 'done'")[["arm", "seed", "status", "failure"]])  # trials without a result, and why
print(results.groupby("arm")["test/accuracy"].agg(["mean", "std"]))
""",
    "compare": """
import vitlab

comparison = vitlab.compare("first.yaml")
print(comparison)  # the answers, and a row for each arm
print(comparison[["arm", "difference", "p_corrected", "verdict"]])
comparison.figures["arms"].savefig("arms.pdf")
print(comparison.render("latex"))  # the table for a paper
""",
    "predictions": """
import vitlab

frame = vitlab.predictions("first.yaml")
wrong = frame.query("split == 'test' and label != prediction")
print(wrong.groupby(["arm", "label", "prediction"]).size().nlargest(5))  # the most frequent confusions
""",
    "load": """
import torch
from sklearn.datasets import load_digits
import vitlab

model, transform = vitlab.load("first.yaml", arm="baseline", seed=0)
image_CHW = torch.tensor(load_digits().images[:1] / 16 * 255).to(torch.uint8)
with torch.no_grad():
    output = model(transform(image_CHW))
print(model.logits_by_head(output)[""].argmax(-1))  # the predicted class
""",
    "explain": """
import vitlab

explanation = vitlab.explain("first.yaml", 3, arm="baseline")
print(explanation.maps["attribution"].values_YX.round(2))  # a row of numbers for each row of patches
explanation.overlay("attribution").save("three.png")
""",
    "errors": """
import vitlab

try:
    vitlab.plan("first.yaml", changes={"model.positon": "none"})
except vitlab.SpecError as error:
    for problem in error.problems:
        print(problem)  # its place and its message, also as .line, .column and .message
""",
}
"""Examples of public functions, which a test runs on the study of the tutorial."""


def _function(name: str) -> Iterator[str]:
    """Yield a public function's signature, its docstring, a table of its arguments and an example."""
    function = getattr(vitlab, name)
    text = inspect.getdoc(function) or ""
    prose, arguments = _split_sections(text)
    yield f"## `vitlab.{name}`\n"
    parameters = ",\n".join(f"    {parameter}" for parameter in _parameters(function))
    yield f"```python\nvitlab.{name}(\n{parameters},\n)\n```\n"
    yield f"{_prose(prose)}\n"
    if arguments:
        yield "| argument | meaning |\n| --- | --- |"
        for argument, meaning in arguments.items():
            yield f"| `{argument}` | {_inline(meaning)} |"
        yield ""
    if name in EXAMPLES:
        yield f"```python{EXAMPLES[name]}```\n"


def _parameters(function: Any) -> Iterator[str]:
    star = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            star = True
            yield "*"
        default = parameter.default
        text = "" if default is parameter.empty else f" = {(str(default) if isinstance(default, Path) else default)!r}"
        yield f"{parameter.name}: {parameter.annotation}{text}"


def _meanings_of(columns: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    yield "| column | type | meaning |\n| --- | --- | --- |"
    for name, (kind, meaning) in columns.items():
        yield f"| `{name}` | {kind} | {meaning} |"
    yield ""


def _commands() -> Iterator[str]:
    yield "# Commands\n"
    yield "Results go to stdout, progress and warnings to stderr.\n"
    yield "| exit code | meaning |\n| --- | --- |"
    (codes,) = re.findall(
        r"Exit codes: (.*?)\.", " ".join((inspect.getdoc(importlib.import_module("vitlab.cli")) or "").split())
    )
    for code in codes.split(", "):
        number, _, meaning = code.partition(" ")
        yield f"| {number} | {meaning} |"
    yield ""
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        yield from _command(f"vitlab {name}", command)


def _command(name: str, command: click.Command) -> Iterator[str]:
    if isinstance(command, click.Group):
        for sub in command.commands.values():
            yield from _command(f"{name} {sub.name}", sub)
        return
    arguments = [p.make_metavar(click.Context(command)) for p in command.params if isinstance(p, click.Argument)]
    yield f"## `{name}`\n"
    yield f"```text\n{' '.join([name, *arguments])} [OPTIONS]\n```\n"
    yield f"{_prose(inspect.cleandoc(command.help or ''))}\n"
    if (sample := SAMPLES / f"{name.partition(' ')[2]}.txt").exists():
        yield f"For example:\n\n```text\n{sample.read_text(encoding='utf-8')}```\n"
    options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
    if options:
        yield "| option | meaning |\n| --- | --- |"
    for option in options:
        names, help = option.get_help_record(click.Context(command)) or ("", "")
        yield f"| `{names}` | {help} |"
    yield ""


# -- docstrings to Markdown -------------------------------------------------------------------------------------------


def _prose(text: str) -> str:
    """Return a docstring as Markdown: roles and double backticks become code, and papers links."""
    text = re.sub(r"::\n\n((?:    .*\n?|\n)+)", lambda code: ":\n\n" + code.group(1), text)
    return _inline(text)


def _inline(text: str) -> str:
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    text = text.replace("``", "`")
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


if __name__ == "__main__":
    write()
