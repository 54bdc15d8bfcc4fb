"""The JSON Schema of study files, with the options of every installed component."""

from __future__ import annotations

from typing import Any

from pydantic.errors import PydanticInvalidForJsonSchema

from vitlab import registry
from vitlab.errors import BrokenComponent, ClashError
from vitlab.spec import Study
from vitlab.spec.trial import METRICS, SLOTS_OF_A_TRIAL


def study_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a study file.  Broken plugins are left out."""
    schema = Study.model_json_schema()
    definitions = schema["$defs"]
    for name in registry.ROOMS:
        definitions[f"slot.{name}"] = _slot_schema(name, definitions)
    for path, name in SLOTS_OF_A_TRIAL.items():
        owner = definitions["TrialSpec" if len(path) == 1 else "TrainSpec"]
        field = owner["properties"][path[-1]]
        owner["properties"][path[-1]] = {"$ref": f"#/$defs/slot.{name}", **_kept(field)}
    definitions["TrainSpec"]["properties"][METRICS[-1]]["items"] = {"$ref": "#/$defs/slot.metric"}
    for name, default in (("executor", "local"), ("tracker", "mlflow")):
        definitions["RunSpec"]["properties"][name] = {"$ref": f"#/$defs/slot.{name}", "default": default}
    referred: dict[str, Any] = _referred(schema)
    return referred


def _slot_schema(name: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """A bare name, or a mapping whose type is one and whose other keys are that component's options."""
    room = registry.slot(name)
    names, forms = [], []
    for component_name in room.names():
        try:
            component = room.get(component_name)
            options = room.options(component).model_json_schema(ref_template="#/$defs/{model}")
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


def _referred(value: Any) -> Any:
    """The schema with a reference in the place of every mark of a slot."""
    if isinstance(value, dict):
        found = {key: _referred(item) for key, item in value.items() if key != registry.SLOT_MARK}
        return {"$ref": f"#/$defs/slot.{value[registry.SLOT_MARK]}", **found} if registry.SLOT_MARK in value else found
    return [_referred(item) for item in value] if isinstance(value, list) else value


def _kept(field: dict[str, Any]) -> dict[str, Any]:
    return {key: field[key] for key in ("default", "description") if key in field}
