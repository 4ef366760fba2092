"""Answer formats, and the grammars that say them, in llguidance's dialect of Lark. Text only.

Tool calls follow the chat format that `clover/chat.py` reads: strings raw, everything else JSON.
JSON is written as Python's `json.dumps` and the chat templates write it: one space after commas and
colons and no other, so that most of what stands between values is forced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from llguidance import regex_to_lark

from clover.chat import is_tag_name, read_tool_schemas, resolve_reference, value_types
from clover.engine.schema import SchemaChecker, fixed_values, is_annotation
from clover.errors import RequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonSchema:
    """One JSON value that validates against a schema (draft 2020-12), properties in its order."""

    schema: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Regex:
    """A text that a regular expression matches as a whole; no look-around, no back-references."""

    pattern: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCalls:
    """Calls of the tools, in the chat format.

    Attributes:
        tools: As in the OpenAI API.
        choice: `auto` allows content before the calls, or in place of them; `required` demands a
            call, and any other text a call of the function of that name.
        parallel: Whether there may be several calls.
    """

    tools: Sequence[Mapping[str, Any]]
    choice: str = "auto"
    parallel: bool = True


AnswerFormat = JsonSchema | Regex | ToolCalls

_THINK_END: Final = "</think>"
_CALL: Final = "<tool_call>"
_CALL_END: Final = "</tool_call>"
_PARAMETER_END: Final = "</parameter>"
# Spelled out with ordinary tokens these would be read as the tags that they spell.
_TAGS: Final = ("<|im_end|>", _CALL, _THINK_END)

# A \u escape may name half of a surrogate pair, which is no text; nearly every character can be
# written as it is.
_JSON_STYLE: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',
    "coerce_one_of": False,
    "lenient": False,
}
_DEFINITIONS: Final = ("$defs", "definitions")
_UNBOUNDED: Final = frozenset({"type"})
_FREE_TEXT: Final = _UNBOUNDED | {"minLength", "maxLength"}
_FIXED: Final = _UNBOUNDED | {"enum", "const"}
_PARAMETERS: Final = _UNBOUNDED | {
    "properties",
    "required",
    "additionalProperties",
    "$id",
    *_DEFINITIONS,
}
_MAX_ALTERNATIVES: Final = 256  # of one parameter; nested anyOf multiply
_MAX_REFERENCES: Final = 16
# Any number of this form is finite; without bounds a schema would allow 1e999, which is not.
_NUMBER: Final = r"/-?(0|[1-9][0-9]{0,99})(\.[0-9]{1,99})?([eE][+-]?[0-9]{1,2})?/"


def write_lark(form: AnswerFormat, *, token: Callable[[str], str], starts_in_thinking: bool) -> str:
    """Returns the grammar of an answer.

    Args:
        form: What the answer has to be.
        token: How a grammar names the single token of a tag.
        starts_in_thinking: Whether free text up to `</think>` comes first.

    Raises:
        RequestError: The format uses what this grammar cannot say.
        PromptError: A tool has no name, or its parameters are not a JSON schema.
    """
    thinking = f'TEXT {token(_THINK_END)} "\\n\\n" ' if starts_in_thinking else ""
    rules = ["%llguidance {}", f"start: {thinking}answer", "TEXT: /(?s:.*)/"]
    match form:
        case JsonSchema(schema=schema):
            SchemaChecker(tags=_TAGS).check(schema, "the schema")
            rules.append(f"answer: {_json(schema)}")
        case Regex(pattern=pattern):
            rules.append(f"answer: /{regex_to_lark(pattern, '')}/")
        case ToolCalls():
            rules += _tool_call_rules(form, token)
    return "\n".join(rules) + "\n"


def write_avoidance(form: AnswerFormat, *, token_ids: Sequence[int]) -> str:
    """Returns the grammar of all texts that spell no tag with ordinary tokens.

    A JSON string may hold any characters, and a grammar of JSON cannot say which it must not: an
    answer has to satisfy this grammar beside its own.

    Args:
        form: What the answer has to be.
        token_ids: Added tokens, which may stand anywhere as far as this grammar is concerned.
    """
    tags = [re.escape(tag) for tag in _TAGS]
    if isinstance(form, ToolCalls):
        # A newline before the end of a value is part of the format, and JSON has none inside.
        tags.append(rf"[^\n]{re.escape(_PARAMETER_END)}")
    more = f"(<[{','.join(map(str, token_ids))}]> TEXT)*" if token_ids else ""
    return (
        f"%llguidance {{}}\nstart: TEXT {more}\n"
        f"TEXT: /(?s:.*)/ & ~/(?s:.*)({regex_to_lark('|'.join(tags), '')})(?s:.*)/\n"
    )


def _tool_call_rules(form: ToolCalls, token: Callable[[str], str]) -> list[str]:
    schemas = read_tool_schemas(form.tools)
    names = list(schemas) if form.choice in ("auto", "required") else [form.choice]
    if not schemas or (missing := [name for name in names if name not in schemas]):
        found = f"no {missing[0]!r} among them" if schemas else "none"
        raise RequestError(
            f"tool choice {form.choice!r} needs a tool to call, found {found}; allowed: auto, "
            f"required{''.join(f', {name}' for name in schemas)}"
        )
    calls = 'call ("\\n" call)*' if form.parallel else "call"
    functions = [f"function_{index}" for index in range(len(names))]
    rules = [
        "answer: TEXT calls?" if form.choice == "auto" else "answer: calls",
        f"calls: {calls}",
        f'call: {token(_CALL)} "\\n" ({" | ".join(functions)}) "</function>\\n" {token(_CALL_END)}',
        # Ends at the first end tag, which stands on its own line.
        rf"NO_END: ~/(?s:.*){regex_to_lark(_PARAMETER_END, '')}(?s:.*)/",
        f"NUMBER: {_NUMBER}",
    ]
    checker = SchemaChecker(tags=(*_TAGS, _PARAMETER_END))
    for name, schema in schemas.items():
        _check_parameters(checker, schema, _where(name))
    for rule, name in zip(functions, names, strict=True):
        rules += _function_rules(rule, name, schemas[name])
    return rules


def _check_parameters(checker: SchemaChecker, schema: Mapping[str, Any], where: str) -> None:
    """Refuses the schema of a function's parameters unless it is a plain object's."""
    # What a grammar is made of is one parameter, to which definitions are added.
    checker.check(schema, where, references=[f"#/{key}" for key in _DEFINITIONS])
    _allow_keywords(schema, _PARAMETERS, f"{where}: the object of its parameters")
    if "object" not in (types := schema.get("type", "object")):
        raise RequestError(f"{where}: parameters are an object, found type {types!r}")


def _where(tool: str) -> str:
    return f"tool {tool[:64]!r}"


def _function_rules(rule: str, name: str, schema: Mapping[str, Any]) -> list[str]:
    """Returns the rules of one function: its parameters in the order of the schema."""
    where = _where(name)
    required = list(schema.get("required", ()))
    properties = dict(schema.get("properties", {}))
    for key in required:
        properties.setdefault(key, schema.get("additionalProperties", {}))
    for tag_name in (name, *properties):
        if not is_tag_name(tag_name):
            raise RequestError(
                f"{where}: expected names without <, > and newlines, found {tag_name[:64]!r}; rename it"
            )
    head = json.dumps(f"<function={name}>\n", ensure_ascii=False)
    body, rules = [], []
    for index, (key, value) in enumerate(properties.items()):
        if value is False:
            raise RequestError(f"{where}: parameter {key!r} can have no value; leave it out")
        parameter = f"{rule}_{index}"
        body.append(parameter if key in required else f"{parameter}?")
        rules += _parameter_rules(parameter, key, value, schema, f"{where}, parameter {key!r}")
    return [f"{rule}: {' '.join([head, *body])}", *rules]


def _parameter_rules(
    rule: str, key: str, schema: object, root: Mapping[str, Any], where: str
) -> list[str]:
    """Returns the rules of one parameter, from its tag to the newline behind its end tag."""
    head = json.dumps(f"<parameter={key}>\n", ensure_ascii=False)
    end = json.dumps(f"\n{_PARAMETER_END}\n")
    alternatives, rules = [], []
    for index, value in enumerate(_value_alternatives(schema, root, where)):
        alternative = f"{rule}_{index}"
        alternatives.append(alternative)
        if value.is_text:
            terminal = alternative.upper()
            rules += [f"{alternative}[lazy]: {terminal}", f"{terminal}: {value.lark} {end}"]
        else:
            rules.append(f"{alternative}: {value.lark} {end}")
    return [f"{rule}: {head} ({' | '.join(alternatives)})", *rules]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Value:
    """One form that a parameter's value may take."""

    lark: str
    is_text: bool  # a terminal, to be joined with the end tag into one; otherwise a rule


def _value_alternatives(schema: object, root: Mapping[str, Any], where: str) -> Iterator[_Value]:
    """Yields the forms of a value, such that the reader finds a valid value in each.

    The reader takes a text as JSON where the schema allows another type beside string. Free text
    may look like any value of that type, so that none of them may be excluded.
    """
    types, _ = value_types(schema, root)
    branches = [_mapping(schema)]
    if "string" in types:
        branches = list(islice(_branches(schema, root, where), _MAX_ALTERNATIVES + 1))
    if len(branches) > _MAX_ALTERNATIVES:
        raise RequestError(
            f"{where}: expected at most {_MAX_ALTERNATIVES} alternatives, found more; leave some out"
        )
    has_free_text = any(_is_free_text(branch) for branch in branches)
    for branch in branches:
        if has_free_text and not _is_readable_beside_text(branch):
            raise RequestError(
                f"{where}: beside a free string no other type can have bounds, found "
                f"{json.dumps(branch)}; leave out its bounds, or the string"
            )
        if "string" in types and fixed_values(branch):
            yield _fixed_text(branch, where)
        elif _is_free_text(branch):
            yield _free_text(branch, where)
        elif branch.get("type") == "number" and _constraints(branch) <= _UNBOUNDED:
            yield _Value(lark="NUMBER", is_text=True)
        elif "string" in value_types(branch, root)[0]:
            raise RequestError(
                f"{where}: expected a string's type, enum or const, alone or in anyOf, found "
                f"{json.dumps(branch)}; say it so"
            )
        else:
            definitions = {key: root[key] for key in _DEFINITIONS if key in root}
            yield _Value(lark=_json(branch | definitions), is_text=False)


def _branches(
    schema: object, root: Mapping[str, Any], where: str, depth: int = 0
) -> Iterator[dict[str, Any]]:
    """Yields schemas of one type each, which together allow what `schema` does."""
    node = _mapping(schema)
    constraints = _constraints(node)
    if depth > _MAX_REFERENCES:
        raise RequestError(f"{where}: expected a string schema that ends, found a circle of $ref")
    if constraints == {"$ref"}:
        yield from _branches(resolve_reference(str(node["$ref"]), root), root, where, depth + 1)
    elif constraints == {"anyOf"} or (constraints == {"allOf"} and len(node["allOf"]) == 1):
        for part in node[min(constraints)]:
            yield from _branches(part, root, where, depth + 1)
    elif isinstance(node.get("type"), list) and not fixed_values(node):
        for name in node["type"]:
            ignored = () if name == "string" else ("minLength", "maxLength")
            yield {key: node[key] for key in node if key not in ignored} | {"type": name}
    else:
        yield node


def _is_free_text(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "string" and not fixed_values(schema)


def _is_readable_beside_text(schema: Mapping[str, Any]) -> bool:
    """Returns whether no free text can be read as a value of a type that the schema excludes."""
    if values := fixed_values(schema):
        return all(isinstance(value, str | None) for value in values)
    return _is_free_text(schema) or _constraints(schema) <= _UNBOUNDED


def _free_text(schema: Mapping[str, Any], where: str) -> _Value:
    _allow_keywords(schema, _FREE_TEXT, f"{where}: a string written raw")
    bounds = f"{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
    return _Value(lark=f"(/(?s:.{bounds})/ & NO_END)", is_text=True)


def _fixed_text(schema: Mapping[str, Any], where: str) -> _Value:
    _allow_keywords(schema, _FIXED, f"{where}: a choice of strings")
    texts = [
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for value in fixed_values(schema)
    ]
    literals = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    return _Value(lark=f"({literals})", is_text=True)


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(dict(schema) | {'x-guidance': _JSON_STYLE})}"


def _mapping(schema: object) -> dict[str, Any]:
    """Returns a schema as an object: `true`, which allows anything, is an empty one."""
    return dict(schema) if isinstance(schema, Mapping) else {} if schema is True else {"not": {}}


def _constraints(schema: Mapping[str, Any]) -> frozenset[str]:
    """Returns the keywords that say which values are valid."""
    return frozenset(key for key in schema if not is_annotation(key))


def _allow_keywords(schema: Mapping[str, Any], allowed: frozenset[str], where: str) -> None:
    if unknown := _constraints(schema) - allowed:
        raise RequestError(
            f"{where} can have {', '.join(sorted(allowed))}, found {', '.join(sorted(unknown))}; "
            "leave that out"
        )
