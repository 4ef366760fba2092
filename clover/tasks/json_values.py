"""When two JSON values mean the same under a schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


def is_same(found: object, expected: object, schema: Mapping[str, Any]) -> bool:
    """Returns whether `found` has the schema's type and the value `expected`.

    `schema` uses type, enum, properties and items. The order of keys is free. True is not 1 and "1"
    is not 1; 1.0 is 1 where the schema says number, and wrong where it says integer.
    """
    if not _has_type(found, schema["type"]) or found not in schema.get("enum", [found]):
        return False
    if isinstance(found, dict) and isinstance(expected, dict):
        properties = schema["properties"]
        return found.keys() == expected.keys() and all(
            key in properties and is_same(value, expected[key], properties[key])
            for key, value in found.items()
        )
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(
            is_same(a, b, schema["items"]) for a, b in zip(found, expected, strict=True)
        )
    return found == expected


def _has_type(value: object, name: str) -> bool:
    if isinstance(value, bool):  # in Python a bool is an int, in JSON it is not
        return name == "boolean"
    return isinstance(value, _TYPES[name])
