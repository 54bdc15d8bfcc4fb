"""``vitlab new plugin NAME --slot SLOT``: create a complete, working package with a component.

What is written stands in ``templates/``: a component per slot under ``components/``, and around it the files that are
alike for all.
"""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from vitlab import registry
from vitlab._version import __version__
from vitlab.cli.completion import complete_slot
from vitlab.cli.new_study import study
from vitlab.errors import UserError, nearest
from vitlab.spec.yaml import read_value

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Kind:
    """The texts of a plugin template that depend on the slot; ``NAME`` is replaced by the component's name."""

    contract: str  #: last part of the class's name
    what: str  #: what the component does as it is written
    question: str  #: of the study
    design: str  #: of the study: the guest beside a built-in
    use: str  #: a line for a study of one's own
    cost: str = "about a minute or two on 2 cores"  #: time of the study


def _swap(path: str, contract: str, what: str, built_in: str) -> Kind:
    """Return the texts for a component that replaces a built-in one."""
    return Kind(
        contract,
        what,
        f"Is {path.rpartition('.')[2]} NAME better than {built_in} on 8x8 digits?",
        f"one_at_a_time: {{{path}: [NAME]}}",
        f"{path}: [{built_in}, NAME]",
    )


KINDS = {
    "position": _swap("model.position", "Position", "a learned vector per ring around the centre", "learned"),
    "attention": _swap("model.attention", "Attention", "ReLU in the place of softmax", "auto"),
    "head": _swap("model.head", "Head", "a classifier on the class token and the mean of the patches", "linear"),
    "dataset": Kind(
        "Dataset",
        "stripes at eight angles, drawn by a formula",
        "What does a small ViT gain over a linear model on NAME?",
        "arms: {vit: {}, linear: {model: {type: linear}}}",
        "data: {type: NAME, noise_share: 0.7}",
    ),
    "block": _swap("model.block", "Block", "a block without norms whose branches start at zero", "prenorm"),
    "mlp": _swap("model.mlp", "MLP", "the square of a ReLU between two linear layers", "gelu"),
    "norm": _swap("model.norm", "Norm", "a dynamic tanh in the place of a norm", "layernorm"),
    "patch": _swap("model.patch", "Patch", "patches that overlap", "linear"),
    "init": _swap("model.init", "Init", "orthogonal weights", "timm"),
    "model": Kind(
        "Model",
        "a perceptron with one hidden layer",
        "Is a small ViT better than model NAME on 8x8 digits?",
        "arms: {vit: {}, NAME: {model: {type: NAME}}}",
        "model: {type: NAME, hidden: 64}",
    ),
    "optimizer": Kind(
        "Optimizer",
        "Adam with Nesterov's momentum",
        "Is optimizer NAME better than adamw at its rate on 8x8 digits?",
        "one_at_a_time: {train.optimizer: [{type: NAME, lr: 2.0e-3}]}",
        "train.optimizer: [adamw, {type: NAME, lr: 1.0e-3}]",
    ),
    "schedule": Kind(
        "Schedule",
        "a constant rate and a short cooldown",
        "Is schedule NAME better than cosine on 8x8 digits?",
        "one_at_a_time: {train.schedule: [{type: NAME, warmup: 0.1}]}",
        "train.schedule: [cosine, {type: NAME, cooldown: 0.1}]",
    ),
    "loss": _swap("train.loss", "Loss", "cross-entropy with another weight on its first term", "cross_entropy"),
    "objective": Kind(
        "Objective",
        "a loss on labels, and equal predictions for mirrored images",
        "Does objective NAME help on 8x8 digits?",
        "one_at_a_time: {train.objective: [NAME]}",
        "train.objective: [supervised, NAME, {type: NAME, share: 0.1}]",
    ),
    "metric": Kind(
        "Metric",
        "the correlation of labels and predictions",
        "What does a small ViT lose on 8x8 digits without a position encoding, by metric NAME?",
        "one_at_a_time: {model.position: [none]}",
        "base: {train: {metrics: [NAME]}}\nanalysis: {metric: val/NAME}",
    ),
    "augment": Kind(
        "Augment",
        "the negative of an image",
        "Does augmentation NAME help on 8x8 digits?",
        "one_at_a_time: {data.augment: [[NAME]]}",
        "data.augment: [[], [NAME], [{type: NAME, p: 0.1}]]",
    ),
    "executor": Kind(
        "Executor",
        "a process of low priority for each trial",
        "Does a small ViT on 8x8 digits need a position encoding?  NAME runs its trials.",
        "one_at_a_time: {model.position: [none]}",
        "run: {executor: {type: NAME, niceness: 19}}",
        cost="about two minutes on 2 idle cores, and longer on busy ones",
    ),
    "tracker": Kind(
        "Tracker",
        "every point of every trial as a row of a CSV table",
        "Does a small ViT on 8x8 digits need a position encoding?  NAME shows its trials.",
        "one_at_a_time: {model.position: [none]}",
        "run: {tracker: NAME}",
    ),
}
"""What a template is there for: every slot."""


@click.group()
def command() -> None:
    """Begin something new."""


command.add_command(study)


@command.command()
@click.argument("name")
@click.option("--slot", required=True, shell_complete=complete_slot, help=f"What it offers: {', '.join(KINDS)}.")
@click.option("--component", help="Its name in study files; by default the first word of NAME.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    show_default="here",
    help="Folder in which the folder NAME is made.",
)
def plugin(name: str, slot: str, component: str | None, out: Path) -> None:
    """Write a package NAME, such as acme-vit, with a component for --slot, its test, a study, CI and a README."""
    folder = write_plugin(name, slot, component=component, out=out)
    component = component or name.partition("-")[0]
    click.echo(f"{folder} is written.  Next:")
    for line in (
        f"cd {folder}",
        'pip install -e ".[test]"',
        "pytest",
        f"vitlab run --smoke studies/{component}.yaml",
        f"vitlab run studies/{component}.yaml",
    ):
        click.echo(f"  {line}")


def write_plugin(name: str, slot: str, *, component: str | None = None, out: Path = Path()) -> Path:
    """Write a package and return its folder.

    Args:
        name: of the distribution: lower-case words and digits joined by ``-``.
        slot: one of :data:`KINDS`.
        component: name in study files; by default the first word of ``name``.
        out: where the folder ``name`` is made.

    Raises:
        UserError: for a name that cannot be used, or a folder that exists already.  Nothing is written then.
    """
    if slot not in KINDS:
        raise UserError(f"no slot called '{slot}'.{nearest(slot, KINDS)} Slots: {', '.join(KINDS)}.")
    _check_distribution(name)
    component = name.partition("-")[0] if component is None else component
    _check_component(component, slot)
    folder = out / name
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} exists already and is not overwritten; choose another NAME or --out")
    kind = KINDS[slot]
    values = {
        "distribution": name,
        "module": name.replace("-", "_"),
        "slot": slot,
        "article": "An" if slot[0] in "aeiou" else "A",
        "component": component,
        "cls": "".join(word.capitalize() for word in component.split("_")) + kind.contract,
        "what": kind.what,
        "question": kind.question.replace("NAME", component),
        "design": kind.design.replace("NAME", component),
        "use": kind.use.replace("NAME", component),
        "cost": kind.cost,
        "vitlab": __version__,
    }
    _write(folder, _render(values))
    return folder


def _render(values: Mapping[str, str]) -> dict[str, str]:
    """Return the text of each file by its path inside the package."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    component = values["component"]
    sources = {
        "pyproject.toml": "pyproject.toml.j2",
        "README.md": "README.md.j2",
        ".gitignore": "gitignore.j2",
        ".github/workflows/ci.yml": "ci.yml.j2",
        f"src/{values['module']}/__init__.py": f"components/{values['slot']}.py.j2",
        f"tests/test_{component}.py": "test.py.j2",
        f"studies/{component}.yaml": "study.yaml.j2",
    }
    # No autoescape: the files are not HTML, and the names have been checked.
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return {path: environment.get_template(source).render(values) for path, source in sources.items()}


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Write all files or none: write them to a temporary folder beside ``folder`` and rename it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".vitlab-new-", dir=folder.parent) as temporary:
            package = Path(temporary) / folder.name
            for path, text in files.items():
                file = package / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
            os.rename(package, folder)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror or error}") from None


def _check_distribution(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or len(name) > 60:
        raise UserError(
            f"'{name}' cannot be the name of a package; use at most 60 lower-case letters, digits and single '-' "
            "between words, and begin with a letter, such as acme-vit"
        )
    module = name.replace("-", "_")
    if keyword.iskeyword(module) or importlib.util.find_spec(module) is not None:
        raise UserError(f"'{name}' would be imported as {module}, which Python has already; choose another name")


def _check_component(name: str, slot: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or len(name) > 40 or keyword.iskeyword(name):
        raise UserError(
            f"'{name}' cannot be the name of a component; use at most 40 lower-case letters, digits and '_', begin "
            "with a letter, and use no keyword of Python; set it with --component"
        )
    if not isinstance(read_value(name), str):
        raise UserError(f"YAML would read the name '{name}' as {read_value(name)!r}; set another with --component")
    existing = [entry.name for entry in registry.listing(slot) if entry.origin.source == registry.BUILT_IN]
    if name in existing:
        raise UserError(f"there is a built-in {slot} called '{name}'; set another with --component")
