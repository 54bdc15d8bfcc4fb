"""``vitlab list``, ``show``, ``schema`` and ``plugins``: components, packaged studies, timm's weights.

Listing imports no component.
"""

import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel
from pydantic.errors import PydanticInvalidForJsonSchema

from vitlab import registry
from vitlab.cli import print_json, say, wants_json
from vitlab.cli.completion import STUDIES, complete_component, complete_slot
from vitlab.cli.options import loading_plugin_option, print_indented
from vitlab.errors import BrokenComponent, ClashError, UserError, nearest, one_line
from vitlab.planning import packaged
from vitlab.registry import plugins as plugin_sources
from vitlab.registry.slots import first_line, without_markup
from vitlab.spec import Study, read_document
from vitlab.spec.changes import TOP_KEYS, full_path, paths_by_name
from vitlab.spec.choice import SLOT_MARK, TOGETHER, Choice, component_label
from vitlab.spec.mistakes import foreign_option_hint, models_in
from vitlab.spec.tree import NewTree

Schema = Mapping[str, Any]
"""A part of a JSON Schema."""


@click.command()
@click.argument("slot", metavar="[SLOT|studies|weights]", required=False, shell_complete=complete_slot)
@click.argument("pattern", required=False)
@loading_plugin_option
def list_command(slot: str | None, pattern: str | None) -> None:
    """List the components of SLOT, or all slots with theirs, or the studies that come with vitlab.

    `vitlab list weights [PATTERN]` lists the weights that timm names and init_from takes as timm: NAME; PATTERN is a
    part of a name, in which * and ? stand for others.
    """
    if pattern is not None and slot != "weights":
        raise click.UsageError(f"PATTERN belongs to 'vitlab list weights'; type vitlab list {slot} | grep {pattern}")
    if slot in ("components", "slots"):  # what all of them are called
        slot = None
    names = (*registry.SLOT_MODULES, "studies", "weights")
    if slot not in (None, "study", *names):
        hint = nearest(str(slot), names) or f" For a component, an option or a study, type 'vitlab show {slot}'."
        raise UserError(f"no slot called '{slot}'.{hint} Slots: {', '.join(names)}.")
    if slot == "weights":
        _print_weights(pattern or "")
    elif slot or wants_json():
        _print_components_or_studies(slot)
    else:
        for name in registry.SLOT_MODULES:
            print_indented(f"{name:12} ", ", ".join(entry.name for entry in registry.list_entries(name)))
        print_indented(f"{'studies':12} ", ", ".join(packaged.packaged_studies()))


@click.command()
@click.argument("slot", metavar="[SLOT|study]", shell_complete=complete_slot)
@click.argument("name", metavar="NAME", required=False, shell_complete=complete_component)
@loading_plugin_option
def show_command(slot: str, name: str | None) -> list[str] | None:
    """Show the options of component NAME in SLOT, its documentation and where it comes from.

    A NAME that only one slot has needs no SLOT, and a SLOT without NAME lists its components. 'vitlab show study NAME'
    prints the file of a study that comes with vitlab, and 'vitlab show base.train.ema' describes a key of study files.
    """
    if slot == "weights":
        _print_weights(name or "")
        return None
    if slot not in (*registry.SLOT_MODULES, *STUDIES):
        if name is None and ("." in slot or slot in TOP_KEYS) and _print_key(full_path(slot)):
            return None
        slot, name, option = _find_slot_of_component(slot), slot, name
        if option is not None:
            raise UserError(f"'{name}' is no slot; type 'vitlab show {name}', which prints it with all its options")
    if name is None:
        _print_components_or_studies(slot)
    elif slot in STUDIES:
        file = packaged.find_study_file(Path(name))
        read_document(file)  # a file that is no study gets a sentence
        return file.read_text(encoding="utf-8").splitlines()
    else:
        _print_component(slot, name)
    return None


def _find_slot_of_component(name: str) -> str:
    """Return the slot that has a component of this name, or ``study``; several of them, or none, raise UserError."""
    named = [(entry.name, entry.slot) for entry in registry.list_entries()]
    named += [(study, "study") for study in packaged.packaged_studies()]
    slots = list(dict.fromkeys(slot for other, slot in named if other == name.rpartition(":")[2]))
    if len(slots) == 1:
        return slots[0]
    if slots:
        raise UserError(
            f"'{name}' is in {', '.join(slots)}; write one of them before it: 'vitlab show {slots[0]} {name}'"
        )
    paths = paths_by_name({})
    path = paths.get(name.rpartition(".")[2])
    names = [*registry.SLOT_MODULES, *dict(named), *paths, *map(full_path, paths.values())]
    key = f" Type 'vitlab show {full_path(path)}' for the key." if path else ""
    slot = name.split(".")[-2:][0]
    if slot in registry.SLOT_MODULES:  # as in train.optimizer.lr
        key = f" 'vitlab list {slot}' lists the components of {slot}, 'vitlab show {slot} NAME' the options of one."
    hint = key or foreign_option_hint(name) or nearest(name, names)
    raise UserError(
        f"no slot, component or study called '{name}'.{hint} 'vitlab list' lists what can be shown, 'vitlab schema' "
        "all keys, and 'vitlab show optimizer adamw' the options of a component."
    )


def _print_key(path: str) -> bool:
    """Print a key of study files and the keys below it, if there is one at a path; return whether there is."""
    *sections, key = path.split(".")
    model: type[BaseModel] = Study
    with suppress(LookupError):
        for section in sections:
            model = models_in(model.model_fields[section].annotation)[0]
        schema = model.model_json_schema()
        definitions = schema.get("$defs", {})
        schema = definitions.get(model.__name__, schema)  # a model that contains itself is among the definitions
        field = schema["properties"][key]
        names = re.findall(r"#/\$defs/(\w+)", str(field))
        if wants_json():
            print_json({**field, "$defs": definitions} if names else field)
            return True
        _print_options([key], schema)
        for name in names:
            click.echo(f"\n{name}")
            _print_options(definitions[name]["properties"], definitions[name])
        return True
    return False


def _print_components_or_studies(slot: str | None) -> None:
    """Print the packaged studies, or the components of a slot, or of all slots."""
    if slot in STUDIES:
        _print_packaged_studies()
        return
    entries = registry.list_entries(slot)
    if wants_json():
        print_json([{**vars(entry), "origin": str(entry.origin)} for entry in entries])
        return
    clashes = Counter(entry.name for entry in entries)
    for entry in entries:
        label = f"{entry.origin.source}:{entry.name}" if clashes[entry.name] > 1 else entry.name
        foreign = "" if entry.origin.source == registry.BUILT_IN else f"{entry.origin}: "
        described = entry.summary or f"described by 'vitlab show {entry.slot} {label}'"  # plugins are not imported
        print_indented(f"{label:20} ", f"{foreign}{described}")


def _print_weights(pattern: str) -> None:
    from vitlab.weights.hub import list_timm_weights

    rows = list_timm_weights(pattern)
    if wants_json():
        print_json([row._asdict() for row in rows])
        return
    if not rows:
        raise UserError(f"timm has no weights of Vision Transformers called '{pattern}'; PATTERN is a part of a name")
    width = max(len(row.name) for row in rows)
    for row in rows:
        classes = f"{row.classes:,} classes" if row.classes else "no head"
        click.echo(f"{row.name:{width}}  {row.image} pixels  {classes:14}  {row.license or 'licence not stated'}")


def _print_packaged_studies() -> None:
    rows = []
    for name, file in packaged.packaged_studies().items():
        data = read_document(file).data
        rows.append(
            {
                "name": name,
                "question": data["question"],
                "cost": packaged.read_cost(file),
                "data": component_label(data["base"]["data"]),
                "file": str(file),
            }
        )
    if wants_json():
        print_json(rows)
        return
    for row in rows:
        click.echo(f"{row['name']}  ({row['data']})")
        for line in (row["question"], row["cost"]):
            print_indented("    ", line)


def _print_component(slot: str, name: str) -> None:
    room = registry.slot(slot)
    component, origin = room.find(name)
    text = without_markup(inspect.getdoc(component) or "")
    try:
        schema = room.options(component).model_json_schema()
    except PydanticInvalidForJsonSchema as error:
        raise BrokenComponent(f"{slot} '{name}': its options have no JSON Schema: {error.message}") from error
    place = plugin_sources.place_of_class(component)
    if wants_json():
        print_json(
            {
                "slot": slot,
                "name": name,
                "origin": str(origin),
                "place": place,
                "documentation": text,
                "options": schema,
            }
        )
        return
    click.echo(f"{slot} {name}   {origin}   {place}\n")
    if slot == "metric":
        click.echo(f"{_metric_facts(component)}\n")
    for paragraph in (text.partition("\nArgs:\n")[0].rstrip() or "(no documentation)").split("\n\n"):
        has_columns = re.search(r"\n |==|\w  +\w", paragraph)  # indented text, or a table
        print_indented("", paragraph if has_columns else one_line(paragraph))
        click.echo()
    shared = set(room.shared.model_fields) if room.shared else set()
    for title, are_shared in (("Options", False), (f"Options of every {slot}", True)):
        options = {option: field for option, field in schema["properties"].items() if (option in shared) == are_shared}
        if options:
            click.echo(title)
        _print_options(options, schema)


def _print_options(names: Iterable[str], schema: Schema) -> None:
    for name in names:
        field = schema["properties"][name]
        default = "required" if name in schema.get("required", []) else f"= {shown_default(field.get('default'))}"
        click.echo(f"  {name:20} {describe_option_type(field):34} {default}")
        print_indented(" " * 6, one_line(without_markup(field.get("description", ""))))


def _metric_facts(component: Any) -> str:
    """Return the facts that a metric declares: ``goal min; unit images; bounds 0 to inf; tasks classification``."""
    from vitlab.planning.metrics import unit_of

    low, high = component.bounds
    facts = [f"goal {component.goal}", f"unit {unit_of(component)}", f"bounds {low:g} to {high:g}"]
    facts += [f"{name} {value:g}" for name in ("quantum", "step") if (value := getattr(component, name))]
    return "; ".join([*facts, f"tasks {', '.join(component.tasks)}"])


def shown_default(value: Any) -> str:
    """Return a default as it is written in YAML; a number with at most six digits."""
    value = float(f"{value:.6g}") if isinstance(value, float) else value
    return "not set" if value is None else json.dumps(component_label(value)).strip('"')


WORDS = {
    "integer": "whole number",
    "string": "text",
    "boolean": "true or false",
    "array": "list",
    "object": "mapping",
}
"""Type in a JSON Schema to the word for it, where they differ."""


def describe_option_type(field: Schema) -> str:
    """Return a short description of a JSON Schema field: ``number > 0``, ``one of cls, gap``, ``choice of norm``."""
    if SLOT_MARK in field:
        return f"choice of {field[SLOT_MARK]}"
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "anyOf" in field:
        parts = [part for part in field["anyOf"] if part != {"type": "null"}]
        return " or ".join(dict.fromkeys(map(describe_option_type, parts)))
    if "enum" in field:
        return "one of " + ", ".join(map(str, field["enum"]))
    if "const" in field:
        return str(field["const"])
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    bounds = " and ".join(f"{sign} {field[name]:g}" for name, sign in signs.items() if name in field)
    kind = WORDS.get(kind := str(field.get("type", "any value")), kind)
    items = field.get("items") or field.get("prefixItems", [None])[0]
    if isinstance(items, dict):
        kind = f"list of {describe_option_type(items)}"
    return f"{kind} {bounds}".strip()


@click.command()
def schema_command() -> None:
    """Print the JSON Schema of study files, with the options of every installed component, plugins included."""
    print_json(study_schema())


def study_schema() -> NewTree:
    """Return the JSON Schema (draft 2020-12) of a study file, without broken plugins."""
    schema = Study.model_json_schema()
    for name in registry.SLOT_MODULES:
        schema["$defs"][f"slot.{name}"] = _slot_schema(name, schema["$defs"])
    result: NewTree = _slot_marks_to_refs(schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **result}


def _slot_schema(name: str, definitions: NewTree) -> NewTree:
    """Return the schema of a choice: a bare name, or a mapping of ``type`` and that component's options."""
    component_slot = registry.slot(name)
    names, forms = [], []
    for component_name in component_slot.names():
        try:
            component = component_slot.get(component_name)
            options = component_slot.options(component).model_json_schema(ref_template="#/$defs/{model}")
        except (BrokenComponent, ClashError, PydanticInvalidForJsonSchema):
            continue
        definitions.update(options.pop("$defs", {}))
        names.append(component_name)
        summary = first_line(inspect.getdoc(component))
        forms.append(
            {
                "type": "object",
                "title": f"{name} {component_name}",
                "description": summary,
                "properties": {"type": {"const": component_name, "description": summary}, **options["properties"]},
                "required": ["type", *options.get("required", [])],
                "additionalProperties": False,
            }
        )
    if TOGETHER in names:
        forms.append({"type": "array", "title": f"{name}, several together", "items": {SLOT_MARK: name}})
    return {"anyOf": [{"enum": names}, *forms]}


def _slot_marks_to_refs(value: Any) -> Any:
    """Return the schema with every slot mark replaced by a reference."""
    if isinstance(value, list):
        return [_slot_marks_to_refs(item) for item in value]
    if not isinstance(value, dict):
        return value
    fields = {key: _slot_marks_to_refs(item) for key, item in value.items() if key != SLOT_MARK}
    if SLOT_MARK not in value:
        return fields
    if set(fields.get("default") or ()) == {"type", "options"}:
        fields["default"] = Choice(**fields["default"]).plain()  # pydantic writes the attributes of a Choice
    # Not a reference from the start: pydantic would look for its definition in each model.
    name = value[SLOT_MARK]
    description = first_line(inspect.getdoc(registry.slot(name).contract))
    return {"$ref": f"#/$defs/slot.{name}", "description": description, **fields}


@dataclass(frozen=True)
class Offer:
    """A component offered by a distribution."""

    slot: str
    name: str
    plugin: str
    version: str
    origin: str  #: where the distribution was installed from, or into
    health: str  #: works, refused (it needs another vitlab), broken
    reason: str  #: one sentence, where it does not work
    detail: str  #: the lines below the sentence: the frames of the plugin


@click.command()
@click.option(
    "--strict", is_flag=True, help="Exit with 3 if a plugin does not load; stderr shows its lines that failed."
)
def plugins_command(strict: bool) -> None:
    """List what installed plugins offer, loading each to see whether it works."""
    offered = list(load_plugin_components())
    failing = [offer for offer in offered if offer.health != "works"]
    rows = [asdict(offer) for offer in offered]
    if not wants_json():
        _print_plugin_offers(offered)
    elif not (failing and strict):
        print_json(rows)
    if failing and strict:
        for offer in failing:
            say(f"\n{offer.reason}\n{offer.detail}".rstrip())
        count = len({offer.plugin for offer in failing})
        error = BrokenComponent(f"{count} plugin{'s do' if count > 1 else ' does'} not load")
        error.result = rows
        raise error


def load_plugin_components() -> Iterator[Offer]:
    """Yield the components of every installed distribution, slot by slot, importing them."""
    for slot in registry.SLOT_MODULES:
        for point in sorted(plugin_sources.slot_points(slot)):
            health, text = _component_health_and_reason(slot, point)
            reason, _, detail = text.partition("\n")
            offering, place = plugin_sources.dist_origin(point), _install_location(point.dist)
            yield Offer(slot, point.name, offering.source, offering.version, place, health, reason, detail)


def _component_health_and_reason(slot: str, point: EntryPoint) -> tuple[str, str]:
    name = plugin_sources.dist_name(point)
    if reason := plugin_sources.why_unusable(point.dist):
        return "refused", reason
    others = {entry.origin.source for entry in registry.list_entries(slot) if entry.name == point.name} - {name}
    try:
        # Output of a plugin while it is imported must not mix with the list.
        with redirect_stdout(sys.stderr):
            component_slot = registry.slot(slot)
            component_slot.options(component_slot.find(f"{name}:{point.name}")[0])
    except (BrokenComponent, ClashError) as error:
        return "broken", str(error)
    if others:
        return "works", f"{' and '.join(sorted(others))} has one of that name: write {name}:{point.name}"
    return "works", ""


def _print_plugin_offers(offered: list[Offer]) -> None:
    if not offered:
        click.echo("no plugins are installed")
    for plugin in sorted({offer.plugin for offer in offered}):
        own = [offer for offer in offered if offer.plugin == plugin]
        click.echo(f"{plugin} {own[0].version}   {own[0].origin}")
        for offer in own:
            detail = f"{offer.health}: {offer.reason}" if offer.reason else offer.health
            click.echo(f"  {offer.slot:12} {offer.name:20} {detail}")


def _install_location(dist: Distribution | None) -> str:
    """Return the recorded folder or address a distribution was installed from, or else its location."""
    if dist is None:
        return "unknown"
    try:
        return str(json.loads(dist.read_text("direct_url.json") or "")["url"])
    except (ValueError, KeyError, TypeError):
        return str(dist.locate_file(""))
