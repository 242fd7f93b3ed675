"""The part of JSON Schema that tools are described in: an object of named values; and a call's arguments against it."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def schema_faults(schema: object) -> list[str]:
    """What keeps a schema from describing a tool's arguments; empty where nothing does."""
    if not isinstance(schema, Mapping):
        return ["it is no object"]
    fields = cast(Mapping[str, Any], schema)
    if fields.get("type") != "object":
        return ['its "type" is not "object"']
    properties, required = fields.get("properties", {}), fields.get("required", [])
    if not isinstance(properties, Mapping):
        return ['its "properties" are no object']
    if not isinstance(required, Sequence) or isinstance(required, str):
        return ['"required" is no list']
    named = cast(Mapping[str, Any], properties)
    faults = [f"{name!r} is required and no property" for name in cast(Sequence[Any], required) if name not in named]
    for name, one in named.items():
        if not isinstance(one, Mapping):
            faults.append(f"property {name!r} is no object")
        elif unknown := [kind for kind in _kinds(cast(Mapping[str, Any], one)) if kind not in _TYPES]:
            faults.append(f"property {name!r} has the unknown type {unknown[0]!r}")
    return faults


def argument_fault(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str | None:
    """What is wrong with a call's arguments, for the model to read; None where nothing is."""
    properties = cast(Mapping[str, Mapping[str, Any]], schema.get("properties", {}))
    for name in cast(Sequence[str], schema.get("required", [])):
        if name not in arguments:
            return f'"{name}" is missing'
    for name, value in arguments.items():
        if name not in properties:
            return f'"{str(name)[:40]}" is unknown; the arguments are {", ".join(properties) or "none"}'
        kinds = _kinds(properties[name])
        if kinds and not any(_is_a(value, kind) for kind in kinds):
            return f'"{name}" is not of type {" or ".join(kinds)}'
        choices = properties[name].get("enum")
        if isinstance(choices, list) and value not in choices:
            return f'"{name}" is none of {", ".join(str(choice) for choice in cast(list[Any], choices))[:200]}'
    return None


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return [kinds]
    return [str(kind) for kind in cast(list[Any], kinds)] if isinstance(kinds, list) else []


def _is_a(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES.get(kind, (object,)))
