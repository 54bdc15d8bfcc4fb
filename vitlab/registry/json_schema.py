"""The JSON Schema of study files, with the options of every installed component."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.errors import PydanticInvalidForJsonSchema

from vitlab import registry
from vitlab.errors import BrokenComponent, ClashError
from vitlab.registry.catalogue import meanings
from vitlab.spec import RunSpec, Study
from vitlab.spec.choice import TOGETHER
from vitlab.spec.mistakes import models_in
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
    for name in ("executor", "tracker"):
        default = RunSpec.model_fields[name].default.type
        definitions["RunSpec"]["properties"][name] = {"$ref": f"#/$defs/slot.{name}", "default": default}
    described = {model.__name__: model for model in _models(Study)}
    for name, definition in [("Study", schema), *definitions.items()]:
        if name in described:
            _describe(definition, described[name])
    result: dict[str, Any] = _replace_marks(schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **result}


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
        nested = {model.__name__: model for model in _models(component_slot.options(component))}
        for definition_name, definition in options.pop("$defs", {}).items():
            if definition_name in nested:
                _describe(definition, nested[definition_name])
            definitions[definition_name] = definition
        names.append(component_name)
        summary = _first_line(component)
        form = {
            "type": "object",
            "title": f"{name} {component_name}",
            "description": summary,
            "properties": {"type": {"const": component_name, "description": summary}, **options.get("properties", {})},
            "required": ["type", *options.get("required", [])],
            "additionalProperties": False,
        }
        _describe(form, component)
        if component_slot.shared is not None:
            _describe(form, component_slot.shared)
        forms.append(form)
    if TOGETHER in names:
        forms.append({"type": "array", "title": f"{name}, several together", "items": {registry.SLOT_MARK: name}})
    return {"anyOf": [{"enum": names}, *forms]}


def _describe(definition: dict[str, Any], cls: type) -> None:
    """Add the documentation of a class's fields or constructor arguments to the properties of a schema."""
    texts = meanings(cls)
    for name, info in getattr(cls, "model_fields", {}).items():
        models = models_in(info.annotation)
        text = texts.pop(name, None) or (_first_line(models[0]) if len(models) == 1 else None)
        if text is not None:
            texts[info.alias or name] = text
    for form in (definition, *definition.get("anyOf", ())):
        for name, field in form.get("properties", {}).items():
            slot_name = field.get(registry.SLOT_MARK)
            text = texts.get(name) or (_first_line(registry.slot(slot_name).contract) if slot_name else None)
            if text is not None:
                field.setdefault("description", text)


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").strip().split("\n")[0]


def _models(model: type[BaseModel]) -> set[type[BaseModel]]:
    """Return a model and all models in its fields."""
    result, pending = set(), [model]
    while pending:
        current = pending.pop()
        if current not in result:
            result.add(current)
            pending += [nested for info in current.model_fields.values() for nested in models_in(info.annotation)]
    return result


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
