"""``vitlab new study FILE``, a copy of a packaged study, ``new plugin``, a working package, and ``skill``, for agents.

What is written of a plugin stands in ``templates/``: files that are alike for all slots, a frame for the class, and for
each slot one file under ``components/`` with what differs.
"""

from __future__ import annotations

import importlib.util
import json
import keyword
import os
import re
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitlab._version import __version__
from vitlab.cli.completion import complete_packaged_or_file, complete_slot
from vitlab.cli.options import FOLDER
from vitlab.cli.show import Schema, describe_option_type, shown_default, study_schema
from vitlab.errors import SpecError, UserError
from vitlab.planning.packaged import SUFFIXES, find_study_file, packaged_name, stored_study_name
from vitlab.registry.slot_modules import SLOT_MODULES, built_ins, slot_module_name
from vitlab.spec.yaml import parse_document, read_document, read_value
from vitlab.store.files import temporary_path, write_bytes

if TYPE_CHECKING:
    from jinja2 import Environment, Template

TEMPLATES = Path(__file__).parent / "templates"
SCHEMA = "vitlab-schema.json"  #: file beside a study that editors read


@click.group()
def new_command() -> None:
    """Begin something new."""


@new_command.command()
@click.argument("file", default="study.yaml")
@click.option(
    "--from",
    "source",
    default="quickstart",
    shell_complete=complete_packaged_or_file,
    help="The study to begin with: a file, or a study that comes with vitlab, as 'vitlab list studies' lists them.",
)
def study(file: str, source: str) -> list[str]:
    """Write a study file, to be edited.

    FILE, by default study.yaml, is then a copy of a study that comes with vitlab; in a folder that is given,
    it has the folder's name.
    Beside it a schema is written, by which editors complete and check the file. An existing file is not overwritten.
    """
    path = Path(file, Path(file).resolve().name if os.path.isdir(file) or file.endswith("/") else "")
    path = path if path.suffix in SUFFIXES else path.with_name(f"{path.name}.yaml")
    if os.path.lexists(path):
        raise UserError(f"{path} exists already and is not overwritten; choose another FILE")
    if not re.fullmatch("[A-Za-z0-9][A-Za-z0-9._-]*", path.stem):
        raise UserError(f"{path}: a study has the name of its file; use letters, digits, '.', '_' and '-'")
    original = find_study_file(Path(source))
    body = _text_of_renamed_study(original, path.stem)
    if packaged_name(original):  # the comment at its top is about its results
        body = re.sub(r"\A(#.*\n|\n)*", "", body)
    template = template_environment().get_template("new_study.yaml.j2")
    former = template.render(schema=SCHEMA, file=original, body="").strip()  # at the top of a copy
    text = template.render(schema=SCHEMA, file=path, body=body.removeprefix(former).strip())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, text.encode())
    lines = [f"{path} is written, a copy of {source}."]
    schema = path.with_name(SCHEMA)
    if not schema.exists():
        write_bytes(schema, f"{json.dumps(study_schema(), indent=1)}\n".encode())
        lines.append(f"{schema} is written: completion and checks for editors.")
    return [*lines, "Next, once it is edited:", f"  vitlab plan {path}", f"  vitlab run {path}"]


def _text_of_renamed_study(file: Path, name: str) -> str:
    """Return the text of a study file with another name in the place of its own."""
    stored_study_name(str(file))  # a file that is no study gets a sentence
    text = file.read_text(encoding="utf-8-sig")
    line = r"""(?m)(^|[{,]\s*)(["']?)study\2:\s+('[^']*'|"[^"]*"|[^\s,}]+)"""
    renamed = re.sub(line, rf"\1\2study\2: '{name}'", text, count=1)
    with suppress(SpecError):
        if parse_document(renamed, str(file)).data == {**read_document(file).data, "study": name}:
            return renamed
    raise UserError(f"{file}: the name can be replaced only in a line 'study: NAME'; write it so")


@new_command.command()
@click.argument("name")
@click.option("--slot", required=True, shell_complete=complete_slot, help=f"What it offers: {', '.join(SLOT_MODULES)}.")
@click.option("--component", help="Its name in study files; by default the first word of NAME.")
@click.option(
    "--out", type=FOLDER, default=Path(), show_default="here", help="Folder in which the folder NAME is made."
)
def plugin(name: str, slot: str, component: str | None, out: Path) -> list[str]:
    """Write a package with a component.

    NAME is its name, such as acme-vit. It has a component for --slot, its test, a study, CI and a README.
    """
    folder = write_plugin(name, slot, component=component, out=out)
    component = component or name.partition("-")[0]
    return [
        f"{folder} is written.  Next:",
        f"  cd {folder}",
        '  pip install -e ".[test]"',
        "  pytest",
        f"  vitlab run --smoke studies/{component}.yaml",
        f"  vitlab run studies/{component}.yaml",
    ]


@click.command()
def skill_command() -> list[str]:
    """Print a SKILL.md for agents: how to state a question, price it, run it and read its verdict.

    It lists every key of a study file and every installed component with its options.
    """
    from vitlab.comparison import MEANINGS
    from vitlab.planning.packaged import packaged_studies

    parts = study_schema()["$defs"]
    slots = {
        name.removeprefix("slot."): [form for form in part["anyOf"] if form.get("type") == "object"]
        for name, part in parts.items()
        if name.startswith("slot.")
    }
    template = template_environment().get_template("skill.md.j2")
    return template.render(
        example=packaged_studies()["quickstart"].read_text(encoding="utf-8").partition("\nstudy: ")[2],
        parts=parts,
        slots=slots,
        verdicts=MEANINGS,
        option=_describe_schema_option,
    ).splitlines()


def _describe_schema_option(name: str, field: Schema, required: Collection[str]) -> str:
    kind, default = describe_option_type(field).replace("slot.", "component of "), field.get("default")
    value = "" if default in (None, "", [], {}) else f" = {shown_default(default)}"
    return f"{name}: {kind}{' (required)' if name in required else value}"


def write_plugin(name: str, slot: str, *, component: str | None = None, out: Path) -> Path:
    """Write a package with a component for a slot, and return its folder.

    Raises:
        UserError: for a name that cannot be used, or a folder that exists already.  Nothing is written then.
    """
    slot_module_name(slot)  # raises for a name that no slot has
    _require_valid_package_name(name)
    component = name.partition("-")[0] if component is None else component
    _require_valid_component_name(component, slot)
    folder = out / name
    if os.path.lexists(folder):
        raise UserError(f"{folder} exists already and is not overwritten; choose another NAME or --out")
    major, minor = map(int, __version__.split(".")[:2])
    values = {
        "distribution": name,
        "module": name.replace("-", "_"),
        "slot": slot,
        "article": "An" if slot[0] in "aeiou" else "A",
        "component": component,
        "vitlab": f">={major}.{minor},<{major}.{minor + 1}",  # below the next breaking change
    }
    partial = temporary_path(folder)
    try:
        for path, text in _render_plugin_files(values).items():
            file = partial / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        partial.rename(folder)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; nothing is left of it") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _render_plugin_files(values: Mapping[str, str]) -> dict[str, str]:
    environment = template_environment()
    component, slot = values["component"], values["slot"]
    source = environment.get_template(f"components/{slot}.py.j2")
    facts: dict[str, Any] = {"base": "", "cls": "", "cost": "about a minute or two on 2 cores"}
    facts |= vars(source.make_module({**facts, **values}))  # what the template of the slot sets
    facts["cls"] = "".join(word.capitalize() for word in component.split("_")) + facts["contract"]
    sources: dict[str, str | Template] = {
        "pyproject.toml": "pyproject.toml.j2",
        "README.md": "README.md.j2",
        ".gitignore": "gitignore.j2",
        ".github/workflows/ci.yml": "ci.yml.j2",
        f"src/{values['module']}/__init__.py": source,
        f"tests/test_{component}.py": "test.py.j2",
        f"studies/{component}.yaml": "study.yaml.j2",
    }
    return {path: environment.get_template(source).render({**facts, **values}) for path, source in sources.items()}


def template_environment() -> Environment:
    """Return the templates of packages and studies, which have no autoescape: their values have been checked."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        keep_trailing_newline=True,
    )


def _require_valid_package_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or len(name) > 60:
        raise UserError(
            f"'{name}' cannot be the name of a package; use at most 60 lower-case letters, digits and single '-' "
            "between words, and begin with a letter, such as acme-vit"
        )
    module = name.replace("-", "_")
    if keyword.iskeyword(module) or importlib.util.find_spec(module) is not None:
        raise UserError(f"'{name}' would be imported as {module}, which Python has already; choose another name")


def _require_valid_component_name(name: str, slot: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or len(name) > 40 or keyword.iskeyword(name):
        raise UserError(
            f"'{name}' cannot be the name of a component; use at most 40 lower-case letters, digits and '_', begin "
            "with a letter, and use no keyword of Python; set it with --component"
        )
    if not isinstance(read_value(name), str):
        raise UserError(f"YAML would read the name '{name}' as {read_value(name)!r}; set another with --component")
    # A study could then not tell the two apart without naming the source.
    if name in built_ins(slot):
        raise UserError(f"there is a built-in {slot} called '{name}'; set another with --component")
