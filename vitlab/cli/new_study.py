"""``vitlab new study [FILE]``: write a study file from five answers, asked on a terminal or given as options."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from vitlab.cli.completion import components_of
from vitlab.cli.errors import wrapped
from vitlab.errors import Problem, SpecError, UserError, count
from vitlab.spec.yaml import Document, parse_document, read_value

SCHEMA = "vitlab-schema.json"  #: file beside a study that editors read
SMALL, LARGE = 8, 128  #: pixels per side up to which images are small, and from which they are large
MAX_TOKENS = 196  #: patches per image at most: 14 x 14

QUESTIONS = {
    "data": "Data set, a name of 'vitlab list dataset'",
    "differs": "What differs, as PATH=VALUE,VALUE",
    "seeds": "Seeds, the trainings of every arm",
    "length": "Length of a training in epochs, steps or images",
    "metric": "Metric of the comparison",
}
PLACES = {
    ("base", "data"): "data",
    ("base", "train", "metrics"): "metric",
    ("base", "train"): "length",
    ("base",): "data",
    ("design",): "differs",
    ("seeds",): "seeds",
    ("analysis",): "metric",
    ("study",): "file",
}
"""Place in the written file to the answer that is written there; the first that a path starts with."""


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default="study.yaml")
@click.option(
    "--data",
    shell_complete=components_of("dataset"),
    help="Data set: a name, or its options in YAML.  [default: digits]",
)
@click.option(
    "--differs",
    metavar="PATH=VALUE,...",
    multiple=True,
    help="A value of the base and its alternatives, such as model.position=none,sincos2d; repeatable.",
)
@click.option("--seeds", help="Number of seeds.  [default: 5]")
@click.option("--length", help="Length of a training, such as '20 epochs', '500 steps' or '100000 images'.")
@click.option("--metric", help="Metric of the comparison.  [default: val/accuracy, or val/miou]")
def study(
    file: Path, data: str | None, differs: tuple[str, ...], seeds: str | None, length: str | None, metric: str | None
) -> None:
    """Write a commented study to FILE, by default study.yaml, from five answers.

    Answers that are not given as options are asked on a terminal. An existing file is not overwritten.
    """
    file = file if file.suffix in (".yaml", ".yml") else file.with_name(f"{file.name}.yaml")
    if file.exists() or file.is_symlink():
        raise UserError(f"{file} exists already and is not overwritten; choose another FILE")
    arguments = {
        "data": data,
        "differs": "; ".join(differs) or None,
        "seeds": seeds,
        "length": length,
        "metric": metric,
    }
    answers = {name: value for name, value in arguments.items() if value is not None}
    missing = [name for name in QUESTIONS if name not in answers]
    if missing and not sys.stdin.isatty():
        options = ", ".join(f"--{name}" for name in missing)
        raise UserError(f"stdin is not a terminal; give {options}. Nothing is written.")
    if missing:
        click.echo("Press Enter for the value in brackets; every line of the file can be edited later.", err=True)
    for name in missing:
        answers[name] = _ask(name, file, answers)
    if mistakes := _mistakes(file, answers):
        lines = [f"{_option(name, file)}: {message}" for name, messages in mistakes.items() for message in messages]
        raise UserError("\n".join([*lines, "Nothing is written."]))
    _write(file, answers)


def _ask(name: str, file: Path, answers: Mapping[str, str]) -> str:
    """Return the answer to a question, which is asked again after a mistake."""
    while True:
        answer: str = click.prompt(QUESTIONS[name], default=_defaults(answers)[name], err=True)
        mistakes = _mistakes(file, {**answers, name: answer})
        if name not in mistakes:
            return answer
        click.echo(wrapped(mistakes[name][0], shutil.get_terminal_size().columns), err=True)


def _option(name: str, file: Path) -> str:
    return str(file) if name == "file" else f"--{name}"


def _write(file: Path, answers: Mapping[str, str]) -> None:
    from vitlab.driver.planning import plan_study
    from vitlab.registry.json_schema import study_schema

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "x", encoding="utf-8") as writer:  # fails if the file exists by now
            writer.write(render(file, answers))
        schema = file.with_name(SCHEMA)
        if with_schema := not schema.exists():
            schema.write_text(json.dumps(study_schema(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{error.filename}: {str(error.strerror).lower()}") from None
    _, plan = plan_study(file)
    click.echo(f"{file} is written: {count(len(plan.arms), 'arm')}, {count(len(plan.trials), 'trial')}.")
    if with_schema:
        click.echo(f"{schema} is written: completion and checks for editors.")
    click.echo("Next:")
    for command in ("plan", "run"):
        click.echo(f"  vitlab {command} {file}")
    for note in plan.notes:
        click.echo(note, err=True)


def render(file: Path, answers: Mapping[str, str]) -> str:
    """Return the text of a study file.

    Args:
        file: The file, whose name is that of the study.
        answers: Answer to each of :data:`QUESTIONS`, or some of them; the others have defaults.

    Raises:
        UserError: If an answer cannot be parsed.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from vitlab.cli.new import TEMPLATES

    answers = {**_defaults(answers), **answers}
    data, metric = _value("data", answers["data"]), answers["metric"]
    paths = dict(_alternatives(text) for text in answers["differs"].split(";") if text.strip())
    number, unit = _length(answers["length"])
    name = data.get("type") if isinstance(data, dict) else data
    variables = {
        "schema": SCHEMA,
        "file": file,
        "study": _flow(file.stem),
        "question": _flow(_question(name, paths)),
        "data": _flow(data),
        **_base(data),
        "unit": unit,
        "length": _flow(number),
        "metrics": _extra_metrics(data, metric),
        "differs": {_flow(path): _flow(values) for path, values in paths.items()},
        "seeds": _flow(_value("seeds", answers["seeds"])),
        "metric": _flow(metric),
    }
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        autoescape=False,  # the file is YAML and not HTML: every value is dumped as YAML
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("new_study.yaml.j2").render(variables)


def _question(data: Any, paths: Mapping[str, Sequence[Any]]) -> str:
    """Return the question of a study: its alternatives in words, by the last part of each path."""
    changes = [f"{path.rpartition('.')[2]} {' or '.join(map(_flow, values))}" for path, values in paths.items()]
    return f"Is {', or '.join(changes) or 'an alternative'} better than the base on {data}?"


def _defaults(answers: Mapping[str, str]) -> dict[str, str]:
    """Return the default of every answer; that of the metric depends on the data."""
    info = _info(_value("data", answers["data"])) if "data" in answers else None
    dense = info is not None and info.task == "segmentation"
    return {
        "data": "digits",
        "differs": "model.position=none,sincos2d",
        "seeds": "5",
        "length": "20 epochs",
        "metric": "val/miou" if dense else "val/accuracy",
    }


def _mistakes(file: Path, answers: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the messages by answer, or by ``file``, of the study that these answers make."""
    from vitlab.driver.planning import plan_study

    try:
        text = render(file, answers)
    except _Unreadable as error:
        return {error.answer: [str(error)]}
    document = parse_document(text, str(file))
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / "study.yaml"
        draft.write_text(text, encoding="utf-8")
        try:
            plan_study(draft)
        except SpecError as error:
            return _by_answer(error.problems, document)
    return {}


def _by_answer(problems: Sequence[Problem], document: Document) -> dict[str, list[str]]:
    paths = {place: path for path, place in (*document.places.items(), *document.values.items())}
    messages: dict[str, list[str]] = {}
    for problem in problems:
        path = paths.get((problem.line, problem.column), ())
        answer = next((name for start, name in PLACES.items() if path[: len(start)] == start), "data")
        messages.setdefault(answer, []).append(problem.message)
    return messages


class _Unreadable(UserError):
    """An answer that cannot be parsed."""

    def __init__(self, answer: str, message: str) -> None:
        super().__init__(message)
        self.answer = answer


def _value(answer: str, text: str) -> Any:
    try:
        return read_value(text)
    except ValueError as error:
        raise _Unreadable(answer, f"{text}: {error}") from None


def _alternatives(text: str) -> tuple[str, list[Any]]:
    """Return the path and the values of ``PATH=VALUE,VALUE``."""
    path, equals, values = (part.strip() for part in text.partition("="))
    if not (path and equals and values):
        raise _Unreadable("differs", f"{text.strip()}: write PATH=VALUE,VALUE, such as model.position=none,sincos2d")
    parsed = _value("differs", f"[{values}]")
    return path, parsed


def _length(text: str) -> tuple[Any, str]:
    """Return the number and the unit of a length such as ``20 epochs``; a number alone counts epochs."""
    match = re.fullmatch(r"\s*([\d_.e+]+)\s*(epoch|step|image|)s?\s*", text)
    if match is None:
        raise _Unreadable("length", f"{text}: write a number of epochs, steps or images, such as '20 epochs'")
    return _value("length", match[1]), f"{match[2] or 'epoch'}s"


def _info(data: Any) -> Any:
    """Return the properties of a data set; None if it cannot be described, for which planning gives the reason."""
    from vitlab.data.prepare import data_info

    try:
        return data_info(data)
    except UserError:
        return None


def _base(data: Any) -> dict[str, Any]:
    """Return a model and a training that suit the size of the images."""
    info = _info(data)
    side = SMALL if info is None else max(info.image)
    patch = 2 if info is None else _patch(info.image)
    size = (
        "size: Ti"
        if side >= LARGE
        else "dim: 32, depth: 2, heads: 4"
        if side <= SMALL
        else "dim: 64, depth: 4, heads: 4"
    )
    head = "segmentation" if info is not None and info.task == "segmentation" else "linear"
    return {
        "model": f"{{type: vit, patch_size: {patch}, {size}, position: learned, head: {head}}}",
        "batch_size": 64 if side <= SMALL else 128,
        "lr": "5.0e-3" if side <= SMALL else "1.0e-3",
    }


def _patch(image: tuple[int, int]) -> int:
    """Return the smallest side from 2 that divides an image into at most :data:`MAX_TOKENS` patches."""
    sides = [side for side in range(2, min(image) + 1) if image[0] % side == image[1] % side == 0]
    small = [side for side in sides if (image[0] // side) * (image[1] // side) <= MAX_TOKENS]
    return next(iter(small), 1)


def _extra_metrics(data: Any, metric: str) -> str:
    """Return the list with the metric if it is installed and not one that every trial reports; otherwise nothing."""
    from vitlab import registry
    from vitlab.training.metrics import metrics_of

    info, name = _info(data), metric.rpartition("/")[2]
    if info is None or name in metrics_of(info) or name not in registry.slot("metric").names():
        return ""
    return "" if registry.slot("metric").get(name).option else f"[{name}]"


def _flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    import yaml

    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=sys.maxsize, allow_unicode=True)
    return text.removesuffix("...\n").strip()
