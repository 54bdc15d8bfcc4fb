"""``vitlab show SLOT NAME``: a component's options and documentation; ``vitlab show study NAME``: a study's file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import click
from pydantic.errors import PydanticInvalidForJsonSchema

from vitlab import registry
from vitlab.cli import print_json, print_lines
from vitlab.cli.completion import STUDIES, complete_component, complete_slot
from vitlab.cli.list import show_components, show_studies
from vitlab.cli.options import json_option, plugin_option
from vitlab.errors import BrokenComponent
from vitlab.plan.metrics import unit_of
from vitlab.plan.packaged import packaged_study
from vitlab.registry.slots import without_markup
from vitlab.spec.choice import SLOT_MARK

Schema = Mapping[str, Any]
"""A part of a JSON Schema."""


@click.command()
@click.argument("slot", metavar="SLOT|study", shell_complete=complete_slot)
@click.argument("name", required=False, shell_complete=complete_component)
@plugin_option
@json_option
def command(slot: str, name: str | None, plugins: tuple[str, ...], as_json: bool) -> None:
    """Show the options of component NAME in SLOT, its documentation and where it comes from.

    Without NAME, list the components of SLOT. 'vitlab show study NAME' prints the file of a study that comes with
    vitlab.
    """
    for plugin in plugins:
        registry.load_file(plugin)
    if slot in STUDIES and name is not None:
        print_lines(packaged_study(name).read_text(encoding="utf-8").splitlines())
        return
    if slot in STUDIES:
        show_studies(as_json)
        return
    if name is None:
        show_components([slot], as_json)
        return
    room = registry.slot(slot)
    component, origin = room.find(name)
    text = without_markup(inspect.getdoc(component) or "")
    try:
        schema = room.options(component).model_json_schema()
    except PydanticInvalidForJsonSchema as error:
        raise BrokenComponent(f"{slot} '{name}': its options have no JSON Schema: {error.message}") from error
    if as_json:
        place = {"slot": slot, "name": name, "origin": str(origin), "place": _place(component)}
        print_json({**place, "documentation": text, "options": schema})
        return
    click.echo(f"{slot} {name}   {origin}   {_place(component)}\n")
    if slot == "metric":
        click.echo(f"{_metric_facts(component)}\n")
    click.echo(text or "(no documentation)")
    shared = set(room.shared.model_fields) if room.shared else set()
    own = {option: field for option, field in schema.get("properties", {}).items() if option not in shared}
    _print("Options", own, schema)
    _print(f"Options of every {slot}", {option: schema["properties"][option] for option in sorted(shared)}, schema)


def _place(component: type) -> str:
    """Return file and line of a class, or its module if it has no source."""
    try:
        return f"{inspect.getsourcefile(component)}:{inspect.getsourcelines(component)[1]}"
    except (OSError, TypeError):
        return component.__module__


def _metric_facts(component: Any) -> str:
    """Return the facts that a metric declares: ``goal min; unit images; bounds 0 to inf; tasks classification``."""
    low, high = component.bounds
    facts = [f"goal {component.goal}", f"unit {unit_of(component)}", f"bounds {low:g} to {high:g}"]
    facts += [f"{name} {value:g}" for name in ("quantum", "step") if (value := getattr(component, name))]
    return "; ".join([*facts, f"tasks {', '.join(component.tasks)}"])


def _print(title: str, options: Schema, schema: Schema) -> None:
    if options:
        click.echo(f"\n{title}")
    for option, field in options.items():
        default = "required" if option in schema.get("required", []) else f"= {shown_default(field.get('default'))}"
        click.echo(f"  {option:20} {shown_type(field):34} {default}")


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
