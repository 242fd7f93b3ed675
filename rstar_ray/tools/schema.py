"""Checks tools' schemas (a subset of JSON Schema: an object of named values), and a call's arguments against them."""

import ast
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
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
MAX_DEPTH = 64
"""Deepest nesting of lists and objects in an argument."""
_BRANCHES = ("anyOf", "oneOf", "allOf")


def schema_faults(schema: object) -> list[str]:
    """Why a schema cannot describe a tool's arguments; empty if it can."""
    if not isinstance(schema, Mapping):
        return ["it is not an object"]
    fields = cast(Mapping[str, Any], schema)
    if fields.get("type") != "object":
        return ['its "type" is not "object"']
    properties, required = fields.get("properties", {}), fields.get("required", [])
    if not isinstance(properties, Mapping):
        return ['its "properties" is not an object']
    if not isinstance(required, Sequence) or isinstance(required, str):
        return ['"required" is not a list']
    named = cast(Mapping[str, Any], properties)
    faults = [f"{name!r} is required and no property" for name in cast(Sequence[Any], required) if name not in named]
    for name, one in named.items():
        if not isinstance(one, Mapping):
            faults.append(f"property {name!r} is not an object")
        elif unknown := [kind for kind in _kinds(cast(Mapping[str, Any], one)) if kind not in _TYPES]:
            faults.append(f"property {name!r} has the unknown type {unknown[0]!r}")
    return faults


def argument_fault(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str | None:
    """The first error in a call's arguments, for the model to read; None if there is none."""
    properties = cast(Mapping[str, Mapping[str, Any]], schema.get("properties", {}))
    for name in cast(Sequence[str], schema.get("required", [])):
        if name not in arguments:
            return f'"{name}" is missing'
    for name, value in arguments.items():
        if name not in properties:
            return f'"{str(name)[:40]}" is unknown; the arguments are {", ".join(properties) or "none"}'
        if _is_deep(value):
            return f'"{name}" is nested more than {MAX_DEPTH} deep'
        one = _without_references(properties[name], schema)
        kinds = _kinds(one)
        if kinds and not any(_is_a(value, kind) for kind in kinds):
            return f'"{name}" is not of type {" or ".join(kinds)}'
        choices = one.get("enum")
        if isinstance(choices, list) and value not in choices:
            return f'"{name}" is not one of {", ".join(str(choice) for choice in cast(list[Any], choices))[:200]}'
    return None


def _is_deep(value: object) -> bool:
    """Whether lists and objects are nested more than `MAX_DEPTH` deep, which pickle could not send to a tool host."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for one in level if isinstance(one, dict | list) for inner in _members(one)]
    return bool(level)


def _members(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def typed(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that a model wrote as text, converted to the types of the schema.

    Text that cannot be converted is unchanged, and `argument_fault` reports it. If a string is allowed, it stays one.

    >>> typed({"limit": "3", "name": "3"}, {"properties": {"limit": {"type": "integer"}, "name": {"type": "string"}}})
    {'limit': 3, 'name': '3'}
    """
    properties = _object(schema.get("properties"))
    return {
        name: _typed(value, _without_references(_object(properties.get(name)), schema))
        for name, value in arguments.items()
    }


def _without_references(one: Mapping[str, Any], schema: Mapping[str, Any], depth: int = 4) -> Mapping[str, Any]:
    """A property in which `{"$ref": "#/$defs/NAME"}`, also in its branches, is what the schema defines there.

    Deeper references than `depth` are of any type.
    """
    if not depth:
        return {}
    if isinstance(reference := one.get("$ref"), str):
        found: Mapping[str, Any] = schema
        for part in reference.removeprefix("#/").split("/"):
            found = _object(found.get(part))
        return _without_references(found, schema, depth - 1)
    branches = {
        name: [_without_references(_object(branch), schema, depth - 1) for branch in cast(list[Any], one[name])]
        for name in _BRANCHES
        if isinstance(one.get(name), list)
    }
    return {**one, **branches}


def _object(value: Any) -> Mapping[str, Any]:
    """The schema; empty if it is true or false, which have no types."""
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {}


def _typed(value: Any, schema: Mapping[str, Any]) -> Any:
    if not isinstance(value, str):
        return value
    kinds, word = _kinds(schema), value.strip()
    if "null" in kinds and word.lower() in ("null", "none"):
        return None
    if "string" in kinds:
        return value
    if not kinds:
        enum = schema.get("enum")
        choices = cast(list[Any], enum) if isinstance(enum, list) else []
        return next((choice for choice in choices if not isinstance(choice, str) and json.dumps(choice) == word), value)
    read = _value(word)
    if isinstance(read, float) and "integer" in kinds and "number" not in kinds and read.is_integer():
        return int(read)
    return read if any(_is_a(read, kind) for kind in kinds) else value


_MAX_LITERAL_CHARS = 20_000
_WORDS = {"true": True, "false": False, "null": None, "none": None}


def _value(word: str) -> Any:
    """The word parsed as JSON, or as Python, which some templates write booleans in; otherwise the word itself."""
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if re.fullmatch(r"\+\d+", word):
        word = word[1:]
    for read in (json.loads, ast.literal_eval):
        if read is ast.literal_eval and (len(word) > _MAX_LITERAL_CHARS or word[:1] not in "[{"):
            break
        try:
            found = read(word)
            json.dumps(found)  # Python's literals include sets, bytes and `...`
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
        return word if isinstance(found, float) and not math.isfinite(found) else found
    return word


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    """The types that a value may have, including those of branches; empty if any type is allowed."""
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return [kinds]
    if isinstance(kinds, list):
        return [str(kind) for kind in cast(list[Any], kinds)]
    parts = [_kinds(part) for part in _branches(schema)]
    return [kind for part in parts for kind in part] if all(parts) else []


def _branches(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = next((schema[name] for name in _BRANCHES if schema.get(name)), None)
    return [one for one in cast(list[Any], found) if isinstance(one, Mapping)] if isinstance(found, list) else []


def _is_a(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES.get(kind, (object,)))
