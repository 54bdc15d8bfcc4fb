"""``vitlab new study [FILE]``: write a study file from five answers, asked on a terminal or given as options."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitlab.cli.completion import components_of
from vitlab.errors import SpecError, UserError, count
from vitlab.spec.yaml import read_value

if TYPE_CHECKING:
    from vitlab.geometry import DataInfo

SCHEMA = "vitlab-schema.json"  #: file beside a study that editors read
MAX_TOKENS = 196  #: patches per image at most: 14 x 14

QUESTIONS = {
    "data": "Data set, a name of 'vitlab list dataset'",
    "differs": "What differs, as PATH=VALUE,VALUE",
    "seeds": "Seeds, the trainings of every arm",
    "length": "Length of a training in epochs, steps or images",
    "metric": "Metric of the comparison",
}


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
    options = {"data": data, "differs": "; ".join(differs), "seeds": seeds, "length": length, "metric": metric}
    if (missing := [name for name in QUESTIONS if not options[name]]) and not sys.stdin.isatty():
        raise UserError(f"stdin is not a terminal; give --{', --'.join(missing)}. Nothing is written.")
    if missing:
        click.echo("Press Enter for the value in brackets; every line of the file can be edited later.", err=True)
    try:
        _checked(file, {}, "data")("digits")
    except click.BadParameter as error:
        raise UserError(f"{file}: {error.message}\nNothing is written.") from None
    answers: dict[str, str] = {}
    mistakes = []
    for name, question in QUESTIONS.items():
        check = _checked(file, answers, name)
        try:
            given = options[name]
            answers[name] = (
                check(given)
                if given
                else click.prompt(question, default=_defaults(answers)[name], value_proc=check, err=True)
            )
        except click.BadParameter as error:
            mistakes.append(f"--{name}: {error.message}")
    if mistakes:
        raise UserError("\n".join([*mistakes, "Nothing is written."]))
    _write(file, render(file, answers))


def _checked(file: Path, answers: Mapping[str, str], name: str) -> Callable[[str], str]:
    """Return a function that returns an answer, or raises what is wrong with the study of it and the earlier ones."""

    def check(answer: str) -> str:
        from vitlab.driver.planning import plan_study

        with tempfile.TemporaryDirectory() as folder:
            draft = Path(folder) / "study.yaml"
            try:
                draft.write_text(render(file, {**answers, name: answer}), encoding="utf-8")
                plan_study(draft)
            except SpecError as error:
                raise click.BadParameter("; ".join(problem.message for problem in error.problems)) from None
            except (UserError, ValueError) as error:
                raise click.BadParameter(f"{answer}: {error}") from None
        return answer

    return check


def _write(file: Path, text: str) -> None:
    from vitlab.driver.planning import plan_study
    from vitlab.registry.json_schema import study_schema

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "x", encoding="utf-8") as writer:  # fails if the file exists by now
            writer.write(text)
        schema = file.with_name(SCHEMA)
        if with_schema := not schema.exists():
            schema.write_text(json.dumps(study_schema(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{error.filename}: {str(error.strerror).lower()}") from None
    _, plan = plan_study(file)
    click.echo(f"{file} is written: {count(len(plan.arms), 'arm')}, {count(len(plan.trials), 'trial')}.")
    if with_schema:
        click.echo(f"{schema} is written: completion and checks for editors.")
    click.echo(f"Next:\n  vitlab plan {file}\n  vitlab run {file}")
    for note in plan.notes:
        click.echo(note, err=True)


def render(file: Path, answers: Mapping[str, str]) -> str:
    """Return the text of a study file.

    Args:
        file: The file, whose name is that of the study.
        answers: Answer to each of :data:`QUESTIONS`, or some of them; the others have defaults.

    Raises:
        UserError: If an answer cannot be parsed.
        ValueError: If an answer is no YAML.
    """
    from vitlab.cli.new import templates

    answers = {**_defaults(answers), **answers}
    data = read_value(answers["data"])
    paths = dict(_alternatives(text) for text in answers["differs"].split(";") if text.strip())
    length = re.fullmatch(r"\s*([\d_.e+]+)\s*(epoch|step|image|)s?\s*", answers["length"])
    if length is None:
        raise UserError("write a number of epochs, steps or images, such as '20 epochs'")
    changes = [f"{path.rpartition('.')[2]} {' or '.join(map(_flow, values))}" for path, values in paths.items()]
    name = data.get("type") if isinstance(data, dict) else data
    variables = {
        "schema": SCHEMA,
        "file": file,
        "study": _flow(file.stem),
        "question": _flow(f"Is {', or '.join(changes) or 'an alternative'} better than the base on {name}?"),
        "data": _flow(data),
        **_model(_info(data)),
        "unit": f"{length[2] or 'epoch'}s",
        "length": _flow(read_value(length[1])),
        "metrics": _extra_metrics(_info(data), answers["metric"]),
        "differs": {_flow(path): _flow(values) for path, values in paths.items()},
        "seeds": _flow(read_value(answers["seeds"])),
        "metric": _flow(answers["metric"]),
    }
    return templates().get_template("new_study.yaml.j2").render(variables)


def _defaults(answers: Mapping[str, str]) -> dict[str, str]:
    """Return the default of every answer; the default metric depends on the data."""
    info = _info(read_value(answers["data"])) if "data" in answers else None
    return {
        "data": "digits",
        "differs": "model.position=none,sincos2d",
        "seeds": "5",
        "length": "20 epochs",
        "metric": "val/miou" if info is not None and info.task == "segmentation" else "val/accuracy",
    }


def _alternatives(text: str) -> tuple[str, list[Any]]:
    """Return the path and the values of ``PATH=VALUE,VALUE``."""
    path, equals, values = (part.strip() for part in text.partition("="))
    if not (path and equals and values):
        raise UserError("write PATH=VALUE,VALUE, such as model.position=none,sincos2d")
    return path, read_value(f"[{values}]")


def _info(data: Any) -> DataInfo | None:
    """Return the properties of a data set; None if it cannot be described, for which planning gives the reason."""
    from vitlab.data.prepare import data_info

    try:
        return data_info(data)
    except UserError:
        return None


def _model(info: DataInfo | None) -> dict[str, str]:
    """Return a model and a training for images of this size: patches from 2 pixels, at most :data:`MAX_TOKENS`."""
    height, width = (8, 8) if info is None else info.image
    sides = [side for side in range(2, min(height, width) + 1) if height % side == width % side == 0]
    patch = next((side for side in sides if (height // side) * (width // side) <= MAX_TOKENS), 1)
    small = max(height, width) <= 8
    large = max(height, width) >= 128
    size = "dim: 32, depth: 2, heads: 4" if small else "size: Ti" if large else "dim: 64, depth: 4, heads: 4"
    head = "segmentation" if info is not None and info.task == "segmentation" else "linear"
    return {
        "model": f"{{type: vit, patch_size: {patch}, {size}, position: learned, head: {head}}}",
        "batch_size": "64" if small else "128",
        "lr": "5.0e-3" if small else "1.0e-3",
    }


def _extra_metrics(info: DataInfo | None, metric: str) -> str:
    """Return the list with the metric if it is installed and not one that every trial reports; otherwise nothing."""
    from vitlab import registry
    from vitlab.training.metrics import metrics_of

    name = metric.rpartition("/")[2]
    if info is None or name in metrics_of(info) or name not in registry.slot("metric").names():
        return ""
    return "" if registry.slot("metric").get(name).option else f"[{name}]"


def _flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    import yaml

    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=sys.maxsize, allow_unicode=True)
    return text.removesuffix("...\n").strip()
