"""The JSON Schema of study files, with the options of every installed component."""

from __future__ import annotations

from typing import Any

from pydantic.errors import PydanticInvalidForJsonSchema

from vitlab import registry
from vitlab.errors import BrokenComponent, ClashError
from vitlab.spec import Study
from vitlab.spec.trial import METRICS, SLOTS_OF_A_TRIAL


def study_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a study file, without broken plugins."""
    schema = Study.model_json_schema()
    definitions = schema["$defs"]
    for name in registry.SLOT_MODULES:
        definitions[f"slot.{name}"] = _slot_schema(name, definitions)
    for path, name in SLOTS_OF_A_TRIAL.items():
        owner = definitions["TrialSpec" if len(path) == 1 else "TrainSpec"]
        field = owner["properties"][path[-1]]
        owner["properties"][path[-1]] = {"$ref": f"#/$defs/slot.{name}", **_default_and_description(field)}
    definitions["TrainSpec"]["properties"][METRICS[-1]]["items"] = {"$ref": "#/$defs/slot.metric"}
    for name, default in (("executor", "local"), ("tracker", "mlflow")):
        definitions["RunSpec"]["properties"][name] = {"$ref": f"#/$defs/slot.{name}", "default": default}
    result: dict[str, Any] = _replace_marks(schema)
    return result


def _slot_schema(name: str, definitions: dict[str, Any]) -> dict[str, Any]:
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
        forms.append(
            {
                "type": "object",
                "title": f"{name} {component_name}",
                "description": (component.__doc__ or "").strip().split("\n")[0],
                "properties": {"type": {"const": component_name}, **options.get("properties", {})},
                "required": ["type", *options.get("required", [])],
                "additionalProperties": False,
            }
        )
    return {"anyOf": [{"enum": names}, *forms]}


def _replace_marks(value: Any) -> Any:
    """Return the schema with every slot mark replaced by a reference."""
    if isinstance(value, dict):
        fields = {key: _replace_marks(item) for key, item in value.items() if key != registry.SLOT_MARK}
        return (
            {"$ref": f"#/$defs/slot.{value[registry.SLOT_MARK]}", **fields} if registry.SLOT_MARK in value else fields
        )
    return [_replace_marks(item) for item in value] if isinstance(value, list) else value


def _default_and_description(field: dict[str, Any]) -> dict[str, Any]:
    return {key: field[key] for key in ("default", "description") if key in field}
