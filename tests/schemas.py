"""Random JSON schemas whose texts are short."""

from __future__ import annotations

import json
import random
from typing import Any


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose texts are short; unbounded alone are the digits behind a decimal point."""
    kinds = ["string", "integer", "enum", "boolean", "null", "const", "number"]
    kind = rng.choice(kinds if depth == 2 else [*kinds, *["object", "array"] * 3])
    low = rng.randrange(-50, 50)
    match kind:
        case "string":
            length = rng.randrange(3)
            return {"type": "string", "minLength": length, "maxLength": length + rng.randrange(3)}
        case "integer":
            return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(99)}
        case "number":
            return {"type": "number", "minimum": low / 4, "exclusiveMaximum": low / 4 + 10}
        case "enum":
            return {"enum": rng.sample(["é", "日本", "🍀 x", 'quo"te', 1.5, 7, None, True], 3)}
        case "const":
            return {"const": {"ü": [1, "two", None]}}
        case "array":
            length = rng.randrange(2)
            items = random_schema(rng, depth + 1)
            return {
                "type": "array",
                "items": items,
                "minItems": length,
                "maxItems": length + rng.randrange(2),
            }
        case "object":
            names = rng.sample(["a", "name", "größe", "x y", "🍀", 'q"', "items"], rng.randrange(4))
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth + 1) for name in names},
                "required": rng.sample(names, rng.randrange(len(names) + 1)),
                "additionalProperties": False,
            }
        case _:
            return {"type": kind}


def has_fraction(schema: object) -> bool:
    """Returns whether a text of the schema may have digits without end."""
    return '"number"' in json.dumps(schema)
