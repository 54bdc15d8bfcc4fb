"""``vitlab list``, ``show`` and ``skill``: components and their options, studies that come with vitlab, timm's weights.

Listing imports no component.
"""

from __future__ import annotations

import inspect
import shutil
import sys
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import click
from pydantic.errors import PydanticInvalidForJsonSchema

from vitlab import registry
from vitlab.cli import print_json, wants_json
from vitlab.cli.completion import STUDIES, complete_component, complete_slot
from vitlab.cli.errors import wrapped
from vitlab.cli.options import plugin_option
from vitlab.errors import BrokenComponent, UserError
from vitlab.planning import packaged
from vitlab.registry.slots import without_markup
from vitlab.spec.choice import SLOT_MARK

Schema = Mapping[str, Any]
"""A part of a JSON Schema."""


@click.command()
@click.argument("slot", metavar="[SLOT|studies|weights]", required=False, shell_complete=complete_slot)
@click.argument("pattern", required=False)
@plugin_option
def list_command(slot: str | None, pattern: str | None, plugins: tuple[Path, ...]) -> None:
    """List the components of SLOT, or all slots with theirs, or the studies that come with vitlab.

    `vitlab list weights [PATTERN]` lists the weights that timm names and init_from takes as timm: NAME; PATTERN is a
    part of a name, in which * and ? stand for others.
    """
    if pattern is not None and slot != "weights":
        raise click.UsageError("PATTERN belongs to 'vitlab list weights' alone; remove it")
    for plugin in plugins:
        registry.load_file(plugin)
    if slot == "weights":
        _list_weights(pattern or "")
    elif slot or wants_json():
        _list(slot)
    else:
        for name in registry.SLOT_MODULES:
            _print(f"{name:12} ", ", ".join(entry.name for entry in registry.listing(name)))
        _print(f"{STUDIES[0]:12} ", ", ".join(packaged.packaged_studies()))


@click.command()
@click.argument("slot", metavar="SLOT|study", shell_complete=complete_slot)
@click.argument("name", required=False, shell_complete=complete_component)
@plugin_option
def show_command(slot: str, name: str | None, plugins: tuple[Path, ...]) -> list[str] | None:
    """Show the options of component NAME in SLOT, its documentation and where it comes from.

    Without NAME, list the components of SLOT. 'vitlab show study NAME' prints the file of a study that comes with
    vitlab.
    """
    for plugin in plugins:
        registry.load_file(plugin)
    if name is None:
        _list(slot)
    elif slot in STUDIES:
        return packaged.packaged_study(name).read_text(encoding="utf-8").splitlines()
    else:
        _show(slot, name)
    return None


@click.command()
def skill_command() -> list[str]:
    """Print a SKILL.md for agents: how to state a question, price it, run it and read its verdict.

    It lists every key of a study file and every installed component with its options.
    """
    from vitlab.cli.new import templates
    from vitlab.cli.schema import study_schema
    from vitlab.comparison import MEANINGS

    parts = study_schema()["$defs"]
    slots = {
        name.removeprefix("slot."): [form for form in part["anyOf"] if form.get("type") == "object"]
        for name, part in parts.items()
        if name.startswith("slot.")
    }
    template = templates().get_template("skill.md.j2")
    return template.render(
        example=packaged.packaged_study("quickstart").read_text(encoding="utf-8").partition("\nstudy: ")[2],
        parts=parts,
        slots=slots,
        verdicts=MEANINGS,
        option=_option,
    ).splitlines()


def _list(slot: str | None) -> None:
    """Print the packaged studies, or the components of a slot, or of all slots."""
    if slot in STUDIES:
        _list_studies()
        return
    entries = [entry for each in ([slot] if slot else registry.SLOT_MODULES) for entry in registry.listing(each)]
    if wants_json():
        print_json([{**vars(entry), "origin": str(entry.origin)} for entry in entries])
        return
    clashes = Counter(entry.name for entry in entries)
    for entry in entries:
        label = f"{entry.origin.source}:{entry.name}" if clashes[entry.name] > 1 else entry.name
        _print(f"{label:20} {entry.origin!s:20} ", entry.summary or entry.target)


def _list_weights(pattern: str) -> None:
    """Print timm's weights for Vision Transformers: name, pixels of an image, classes and licence."""
    from vitlab.weights import named_weights

    rows = named_weights(pattern)
    if wants_json():
        print_json([row._asdict() for row in rows])
        return
    if not rows:
        raise UserError(f"timm has no weights of Vision Transformers called '{pattern}'; PATTERN is a part of a name")
    width = max(len(row.name) for row in rows)
    for row in rows:
        classes = f"{row.classes:,} classes" if row.classes else "no head"
        click.echo(f"{row.name:{width}}  {row.image} pixels  {classes:14}  {row.license or 'licence not stated'}")


def _list_studies() -> None:
    """Print the packaged studies: name, question, cost, and the data set, which may have to be given."""
    from vitlab.spec import read_document

    rows = []
    for name, file in packaged.packaged_studies().items():
        data = read_document(file).data
        choice = data["base"]["data"]
        rows.append(
            {
                "name": name,
                "question": data["question"],
                "cost": packaged.header(file).get("Cost", "").partition("  ")[0],
                "data": choice if isinstance(choice, str) else choice["type"],
                "file": str(file),
            }
        )
    if wants_json():
        print_json(rows)
        return
    for row in rows:
        click.echo(f"{row['name']}  ({row['data']})")
        for line in (row["question"], row["cost"]):
            _print("    ", line)


def _print(head: str, text: str) -> None:
    """Print a text behind a head; on a terminal, break lines between words and indent them below the text."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    click.echo(wrapped(head + text, width, " " * (len(head) if len(head) < width // 2 else 4)))


def _show(slot: str, name: str) -> None:
    """Print a component's origin, documentation and options."""
    room = registry.slot(slot)
    component, origin = room.find(name)
    text = without_markup(inspect.getdoc(component) or "")
    try:
        schema = room.options(component).model_json_schema()
    except PydanticInvalidForJsonSchema as error:
        raise BrokenComponent(f"{slot} '{name}': its options have no JSON Schema: {error.message}") from error
    place = _place(component)
    if wants_json():
        where = {"slot": slot, "name": name, "origin": str(origin), "place": place}
        print_json({**where, "documentation": text, "options": schema})
        return
    click.echo(f"{slot} {name}   {origin}   {place}\n")
    if slot == "metric":
        click.echo(f"{_metric_facts(component)}\n")
    click.echo(text or "(no documentation)")
    shared = set(room.shared.model_fields) if room.shared else set()
    for title, are_shared in (("Options", False), (f"Options of every {slot}", True)):
        options = {option: field for option, field in schema["properties"].items() if (option in shared) == are_shared}
        if options:
            click.echo(f"\n{title}")
        for option, field in options.items():
            default = "required" if option in schema.get("required", []) else f"= {shown_default(field.get('default'))}"
            click.echo(f"  {option:20} {shown_type(field):34} {default}")


def _place(component: type) -> str:
    """Return file and line of a class, or its module if it has no source."""
    try:
        return f"{inspect.getsourcefile(component)}:{inspect.getsourcelines(component)[1]}"
    except (OSError, TypeError):
        return component.__module__


def _metric_facts(component: Any) -> str:
    """Return the facts that a metric declares: ``goal min; unit images; bounds 0 to inf; tasks classification``."""
    from vitlab.planning.metrics import unit_of

    low, high = component.bounds
    facts = [f"goal {component.goal}", f"unit {unit_of(component)}", f"bounds {low:g} to {high:g}"]
    facts += [f"{name} {value:g}" for name in ("quantum", "step") if (value := getattr(component, name))]
    return "; ".join([*facts, f"tasks {', '.join(component.tasks)}"])


def shown_default(value: Any) -> str:
    """Return a default as it is written in YAML."""
    return str(value["type"]) if isinstance(value, dict) and set(value) == {"type"} else str(value)


def shown_type(field: Schema) -> str:
    """Return a short description of a JSON Schema field: ``number > 0``, ``one of cls, gap``, ``choice of norm``."""
    if SLOT_MARK in field:
        return f"choice of {field[SLOT_MARK]}"
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(shown_type(part) for part in field["anyOf"]))
    if "enum" in field:
        return "one of " + ", ".join(map(str, field["enum"]))
    if "const" in field:
        return str(field["const"])
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    bounds = " and ".join(f"{sign} {field[name]:g}" for name, sign in signs.items() if name in field)
    kind = str(field.get("type", "any"))
    if kind == "array" and isinstance(field.get("items"), dict):
        kind = f"list of {shown_type(field['items'])}"
    return f"{kind} {bounds}".strip()


def _option(name: str, field: Schema, required: Collection[str]) -> str:
    """Return ``name: type = default`` of an option."""
    kind, default = shown_type(field).replace("slot.", "component of "), field.get("default")
    value = "" if default in (None, "", [], {}) else f" = {shown_default(default)}"
    return f"{name}: {kind}{' (required)' if name in required else value}"
