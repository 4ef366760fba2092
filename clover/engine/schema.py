"""What a JSON Schema may say, checked before a grammar is made of it. Text only.

llguidance passes over keywords that it does not know, and some that are malformed; and what no answer
can satisfy it may notice half way through one. Here each is refused, by the place where it stands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from clover.chat import json_type_names, resolve_reference
from clover.errors import RequestError

ANNOTATIONS: Final = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "discriminator",
        "nullable",
        "$comment",
        "$schema",
    }
)
"""Keywords that change no answer. So do all that begin with `x-`."""

MAX_DEPTH: Final = 48
"""Most schemas inside one another; llguidance reads JSON of 127 levels, and one may take two."""

MAX_PARTS: Final = 4096
"""Most schemas in one format: compiling takes a time that grows with the square of an object's."""

_MAX_REFERENCES: Final = 256  # different ones
_MAX_COUNT: Final = 2**31 - 1
_MAX_DEMANDED: Final = 2**20  # items or characters: no context holds more
_MAX_NUMBER: Final = 2**53  # up to here a double has every whole number
_TYPES: Final = ("null", "boolean", "object", "array", "number", "string", "integer")
_DEMANDS: Final = ("minLength", "minItems", "minProperties")
_BOUNDS: Final = (
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
    ("minimum", "maximum"),
)
_CONTROLS: Final = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")  # JSON has no short escape for these


def is_annotation(keyword: str) -> bool:
    """Returns whether a keyword changes no answer."""
    is_extension = keyword.startswith("x-") and keyword != "x-guidance"  # llguidance's options
    return is_extension or keyword in ANNOTATIONS


def fixed_values(schema: Mapping[str, Any]) -> list[Any]:
    """Returns the values that `const` and `enum` leave, if need be of the schema's type."""
    values = [schema["const"]] if "const" in schema else list(schema.get("enum", ()))
    types = _types(schema)
    return [value for value in values if not types or json_type_names(value) & types]


@dataclass(kw_only=True, slots=True)
class SchemaChecker:
    """Checks the schemas of one answer format.

    Attributes:
        tags: Texts that no name and no choice may hold.
    """

    tags: Sequence[str]
    _num_parts: int = field(default=0, init=False)

    def check(
        self, schema: Mapping[str, Any], where: str, *, references: Sequence[str] = ("#",)
    ) -> None:
        """Refuses a schema that is malformed, that contradicts itself, or that is too large.

        Args:
            schema: The whole of it.
            where: What it belongs to, for messages.
            references: Where a `$ref` in it may lead: to these places and what they hold.

        Raises:
            RequestError: It names the place and the keyword.
        """
        found = _Found()
        self._check(schema, f"{where}, #", 0, found)
        targets = {}
        for place, reference in found.references:
            target = targets[reference] = resolve_reference(reference, schema)
            if not any(f"{reference}/".startswith(f"{start}/") for start in references):
                raise RequestError(
                    f"{place}/$ref: expected a reference within {' or '.join(references)}, found "
                    f"{_show(reference)}"
                )
            if not isinstance(target, bool) and id(target) not in found.schemas:
                raise RequestError(
                    f"{place}/$ref: expected the place of a schema, found {_show(reference)}, "
                    "where there is none"
                )
        if len(targets) > _MAX_REFERENCES:
            raise RequestError(
                f"{where}: expected at most {_MAX_REFERENCES} different $ref, found {len(targets)}; "
                "make the schema smaller"
            )
        _check_ends(schema, where, targets)

    def _check(self, schema: object, place: str, depth: int, found: _Found) -> None:
        self._num_parts += 1
        if depth > MAX_DEPTH or self._num_parts > MAX_PARTS:
            raise RequestError(
                f"{place}: expected at most {MAX_DEPTH} schemas inside one another and "
                f"{MAX_PARTS} in all, found more; make the schema smaller"
            )
        if isinstance(schema, bool):
            return
        if not isinstance(schema, Mapping):
            raise RequestError(f"{place}: expected an object or a boolean, found {_show(schema)}")
        found.schemas.add(id(schema))
        for keyword, value in schema.items():
            if depth or keyword != "$id":  # inside, it would change what references mean
                _check_keyword(keyword, value, place)
        _check_together(schema, place)
        self._check_texts(schema, place)
        if "$ref" in schema:
            found.references.append((place, schema["$ref"]))
        for path, part in _parts(schema):
            self._check(part, f"{place}/{path}", depth + 1, found)

    def _check_texts(self, schema: Mapping[str, Any], place: str) -> None:
        texts = [
            *([schema["const"]] if "const" in schema else ()),
            *schema.get("enum", ()),
            *schema.get("required", ()),
            *schema.get("properties", ()),
        ]
        try:
            written = json.dumps(texts, ensure_ascii=False, allow_nan=False)
            written.encode()
        except (ValueError, RecursionError):
            raise RequestError(
                f"{place}: expected names and choices that JSON can write, found a lone surrogate, "
                "an infinite number, or lists without end"
            ) from None
        if tag := next((tag for tag in self.tags if tag in written), None):
            raise RequestError(
                f"{place}: expected names and choices without the chat's own tags, found {tag}; "
                "rename it"
            )
        if any(_CONTROLS.search(text) for text in _strings(texts)):
            raise RequestError(
                f"{place}: expected names and choices without control characters, found one that "
                "only a \\u escape can write"
            )


@dataclass(slots=True)
class _Found:
    """What a walk over a schema has met."""

    schemas: set[int] = field(default_factory=set)  # the ids of those that are objects
    references: list[tuple[str, str]] = field(default_factory=list)  # where, and what they name


def _check_ends(schema: Mapping[str, Any], where: str, targets: Mapping[str, object]) -> None:
    """Refuses references whose values would have to hold a value of themselves, and so on.

    Raises:
        RequestError: It names one of them.
    """
    open_, num_before = set(targets), -1
    while len(open_) != num_before:  # a round closes those that need none but closed ones
        num_before = len(open_)
        for reference in targets:
            if reference in open_ and _can_end(targets[reference], open_):
                open_.remove(reference)
    if not _can_end(schema, open_):
        raise RequestError(
            f"{where}: expected a value that can come to an end, found that one of "
            f"{_show(min(open_))} always holds another; make a part of it optional"
        )


def _can_end(schema: object, open_: set[str]) -> bool:
    """Returns whether a value may be finite if none of `open_` is; of a wrong schema, True."""
    if not isinstance(schema, Mapping):
        return True
    if schema.get("$ref") in open_:
        return False
    if not all(_can_end(part, open_) for part in schema.get("allOf", ())):
        return False
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema and not any(_can_end(part, open_) for part in schema[keyword]):
            return False
    types = _types(schema)
    if not types or types - {"object", "array"} or "const" in schema or "enum" in schema:
        return True
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    members = [properties.get(key, others) for key in schema.get("required", ())]
    least = schema.get("minItems", 0)
    items = list(schema.get("prefixItems", ()))
    rest = [schema["items"]] if "items" in schema and least > len(items) else []
    return ("object" in types and all(_can_end(part, open_) for part in members)) or (
        "array" in types and all(_can_end(part, open_) for part in [*items[:least], *rest])
    )


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yields the schemas directly inside one that is well-formed, and their paths from there."""
    for keyword, value in schema.items():
        if keyword in _MAPS:
            yield from ((f"{keyword}/{name}", part) for name, part in value.items())
        elif keyword in _LISTS:
            yield from ((f"{keyword}/{index}", part) for index, part in enumerate(value))
        elif keyword in _SINGLE:
            yield keyword, value


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Returns the types that a schema names."""
    declared = schema.get("type", ())
    return frozenset([declared] if isinstance(declared, str) else declared)


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield key
            yield from _strings(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _strings(part)


# Keywords: what each may be


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the value of a keyword has to be."""

    expected: str
    is_valid: Callable[[Any], bool]


def _is_whole(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= _MAX_NUMBER  # which NaN is not


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


_TEXT: Final = _Kind("a text", lambda value: isinstance(value, str))
_FLAG: Final = _Kind("true or false", lambda value: isinstance(value, bool))
_OBJECT: Final = _Kind("an object", lambda value: isinstance(value, Mapping))
_LIST: Final = _Kind("a list", _is_list)
_FILLED: Final = _Kind("a list that is not empty", lambda value: _is_list(value) and bool(value))
_ANY: Final = _Kind("anything", lambda value: True)
_SCHEMA: Final = _Kind("a schema", lambda value: isinstance(value, Mapping | bool))
_ITEMS: Final = _Kind("a schema (prefixItems has one for each item)", _SCHEMA.is_valid)
_COUNT: Final = _Kind(
    f"a whole number, 0 to {_MAX_COUNT}", lambda value: _is_whole(value, _MAX_COUNT)
)
_LEAST: Final = _Kind(
    f"a whole number, 0 to {_MAX_DEMANDED}", lambda value: _is_whole(value, _MAX_DEMANDED)
)
_NUMBER: Final = _Kind("a number from -2**53 to 2**53", _is_number)
_NAMES: Final = _Kind(
    "a list of different texts",
    lambda value: (
        _is_list(value)
        and all(isinstance(name, str) for name in value)
        and len(set(value)) == len(value)
    ),
)
_TYPE: Final = _Kind(
    f"one or several different of {', '.join(_TYPES)}",
    lambda value: (
        value in _TYPES
        if isinstance(value, str)
        else _is_list(value)
        and bool(value)
        and all(name in _TYPES for name in value)
        and len(set(value)) == len(value)
    ),
)
_FACTOR: Final = _Kind(
    "a number above 0, up to 2**53", lambda value: _is_number(value) and value > 0
)

_SINGLE: Final = ("items", "additionalProperties")
_LISTS: Final = ("prefixItems", "anyOf", "oneOf", "allOf")
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
_KINDS: Final[Mapping[str, _Kind]] = {
    "type": _TYPE,
    "enum": _FILLED,
    "const": _ANY,
    "$ref": _TEXT,
    "anyOf": _FILLED,
    "oneOf": _FILLED,
    "allOf": _FILLED,
    **dict.fromkeys(_MAPS, _OBJECT),
    "items": _ITEMS,
    "additionalProperties": _SCHEMA,
    "required": _NAMES,
    "prefixItems": _FILLED,
    **dict.fromkeys(("maxLength", "maxItems", "maxProperties"), _COUNT),
    **dict.fromkeys(_DEMANDS, _LEAST),
    "pattern": _TEXT,
    "format": _TEXT,
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER),
    "multipleOf": _FACTOR,
    **dict.fromkeys(("title", "description", "$comment", "$schema"), _TEXT),
    **dict.fromkeys(("deprecated", "readOnly", "writeOnly", "nullable"), _FLAG),
    "examples": _LIST,
    "discriminator": _OBJECT,
    "default": _ANY,
}


def _check_keyword(keyword: str, value: object, place: str) -> None:
    kind = _ANY if is_annotation(keyword) else None
    kind = _KINDS.get(keyword, kind)
    if kind is None:
        raise RequestError(
            f"{place}/{keyword}: expected keywords that a grammar can say, found one that it "
            f"cannot; leave it out. Those that it can: "
            f"{', '.join(key for key in _KINDS if not is_annotation(key))}"
        )
    if not kind.is_valid(value):
        raise RequestError(f"{place}/{keyword}: expected {kind.expected}, found {_show(value)}")


def _check_together(schema: Mapping[str, Any], place: str) -> None:
    """Refuses keywords that contradict each other, each of them being well-formed."""
    for least, most in _BOUNDS:
        if least in schema and most in schema and schema[least] > schema[most]:
            raise RequestError(
                f"{place}: expected {least} up to {most}, found {schema[least]} above "
                f"{schema[most]}; no value satisfies both"
            )
    # Only keys from `properties` are held to be unique.
    if schema.get("minProperties", 0) > max(1, len(schema.get("required", ()))):
        raise RequestError(
            f"{place}: minProperties is {schema['minProperties']}, but keys may repeat; name the "
            "properties and require them"
        )
    has_choices = "const" in schema or "enum" in schema
    is_excluded = "const" in schema and "enum" in schema and schema["const"] not in schema["enum"]
    if has_choices and (is_excluded or not fixed_values(schema)):
        raise RequestError(
            f"{place}: expected an enum or a const with a value of the type, found none; no value "
            "satisfies both"
        )


def _show(value: object) -> str:
    return repr(value)[:80]
