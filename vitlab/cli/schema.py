"""``vitlab schema``: the JSON Schema of study files, with the options of every installed component, for editors."""

from __future__ import annotations

import inspect
from typing import Any

import click
from pydantic.errors import PydanticInvalidForJsonSchema

from vitlab import registry
from vitlab.cli import print_json
from vitlab.errors import BrokenComponent, ClashError
from vitlab.registry.slots import first_line
from vitlab.spec import Study
from vitlab.spec.choice import SLOT_MARK, TOGETHER, Choice
from vitlab.spec.tree import NewTree


@click.command()
def schema_command() -> None:
    """Print the JSON Schema of study files, with the options of every installed component, plugins included."""
    print_json(study_schema())


def study_schema() -> NewTree:
    """Return the JSON Schema (draft 2020-12) of a study file, without broken plugins."""
    schema = Study.model_json_schema()
    for name in registry.SLOT_MODULES:
        schema["$defs"][f"slot.{name}"] = _slot_schema(name, schema["$defs"])
    result: NewTree = _replace_marks(schema)
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


def _replace_marks(value: Any) -> Any:
    """Return the schema with every slot mark replaced by a reference."""
    if isinstance(value, list):
        return [_replace_marks(item) for item in value]
    if not isinstance(value, dict):
        return value
    fields = {key: _replace_marks(item) for key, item in value.items() if key != SLOT_MARK}
    if SLOT_MARK not in value:
        return fields
    if set(fields.get("default") or ()) == {"type", "options"}:
        fields["default"] = Choice(**fields["default"]).plain()  # pydantic writes the attributes of a Choice
    # Not a reference from the start: pydantic would look for its definition in each model.
    name = value[SLOT_MARK]
    description = first_line(inspect.getdoc(registry.slot(name).contract))
    return {"$ref": f"#/$defs/slot.{name}", "description": description, **fields}
