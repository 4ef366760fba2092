"""Schemas that are wrong, contradict themselves or cannot be promised: each is a 400 that says where.

Through both APIs, into a real engine, in which somebody else's answer is being written all the while.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serving import serving
from tests.tiny import make_tiny_backend

Schema = dict[str, Any]
NUM_EXAMPLES = int(os.environ.get("CLOVER_FUZZ_EXAMPLES", "20"))
"""Of schemas drawn by chance; more by hand."""


def nest(schema: Any, levels: int, wrap: Callable[[Any], Schema]) -> Schema:
    for _ in range(levels):
        schema = wrap(schema)
    return schema  # type: ignore[no-any-return]


def text(**keywords: Any) -> Schema:
    return {"type": "string", **keywords}


def numbers(**keywords: Any) -> Schema:
    return {"type": "number", **keywords}


def items(**keywords: Any) -> Schema:
    return {"type": "array", **keywords}


def members(**keywords: Any) -> Schema:
    return {"type": "object", **keywords}


def refer(name: str, **definitions: Any) -> Schema:
    return {"$ref": f"#/$defs/{name}", "$defs": definitions}


SELF = {"$ref": "#/$defs/a"}
INFINITE = float("inf")

# Any of its members may come next: more than the parser keeps in mind.
WIDE = members(properties={f"p{index}": {} for index in range(2000)}, additionalProperties=False)

# The schema, and what its refusal names beside the place.
WRONG: list[tuple[Schema, str]] = [
    # Types of keywords
    ({"type": 3}, "#/type"),
    ({"type": "strin"}, "#/type"),
    ({"type": []}, "#/type"),
    ({"type": ["string", 3]}, "#/type"),
    ({"type": {}}, "#/type"),
    (members(properties=[]), "#/properties"),
    (members(properties="ab"), "#/properties"),
    (members(properties={"a": 3}), "#/properties/a"),
    (members(properties={"a": None}), "#/properties/a"),
    (members(patternProperties=[]), "#/patternProperties"),
    (members(patternProperties={"a": "b"}), "#/patternProperties/a"),
    (members(additionalProperties="no"), "#/additionalProperties"),
    (members(required="ab"), "#/required"),
    (members(required=3), "#/required"),
    (members(required=None), "#/required"),
    (members(required=[1]), "#/required"),
    (members(required=["a", "a"]), "#/required"),
    ({"type": ["string", "string"]}, "#/type"),
    (items(prefixItems=[]), "#/prefixItems"),
    (members(minProperties="2"), "#/minProperties"),
    (members(maxProperties=-1), "#/maxProperties"),
    (items(items="x"), "#/items"),
    (items(items=[{}]), "prefixItems"),
    (items(prefixItems={}), "#/prefixItems"),
    (items(minItems=1.5), "#/minItems"),
    (items(minItems=True), "#/minItems"),
    (items(maxItems="3"), "#/maxItems"),
    (text(minLength=-1), "#/minLength"),
    (text(minLength="a"), "#/minLength"),
    (text(maxLength=[]), "#/maxLength"),
    (text(pattern=3), "#/pattern"),
    (text(format=3), "#/format"),
    (numbers(minimum="0"), "#/minimum"),
    (numbers(maximum=[]), "#/maximum"),
    (numbers(exclusiveMinimum=True), "#/exclusiveMinimum"),
    (numbers(multipleOf="a"), "#/multipleOf"),
    (numbers(multipleOf=0), "#/multipleOf"),
    (numbers(multipleOf=-1), "#/multipleOf"),
    ({"enum": "ab"}, "#/enum"),
    ({"enum": 3}, "#/enum"),
    ({"enum": None}, "#/enum"),
    ({"anyOf": {}}, "#/anyOf"),
    ({"anyOf": []}, "#/anyOf"),
    ({"anyOf": [1]}, "#/anyOf/0"),
    ({"oneOf": "x"}, "#/oneOf"),
    ({"allOf": 3}, "#/allOf"),
    ({"$ref": 3}, "#/$ref"),
    ({"$defs": []}, "#/$defs"),
    ({"$defs": {"a": 3}}, "#/$defs/a"),
    ({"$schema": 3}, "#/$schema"),
    (text(title=3), "#/title"),
    (text(nullable="yes"), "#/nullable"),
    # No value satisfies them
    (numbers(minimum=5, maximum=1), "minimum up to maximum"),
    (numbers(exclusiveMinimum=1, exclusiveMaximum=1), "nsatisfiable"),
    ({"type": "integer", "minimum": 0.2, "maximum": 0.8}, "atisf"),
    (text(minLength=3, maxLength=2), "minLength up to maxLength"),
    (items(minItems=3, maxItems=2), "minItems up to maxItems"),
    (members(minProperties=1, maxProperties=0), "minProperties up to maxProperties"),
    (members(minProperties=2), "minProperties is 2"),
    (members(required=["a"], additionalProperties=False), "a"),
    ({"enum": []}, "#/enum"),
    (text(enum=[1, 2]), "no value satisfies both"),
    (text(const=3), "no value satisfies both"),
    ({"const": 1, "enum": [2]}, "no value satisfies both"),
    ({"allOf": [text(), numbers()]}, "nsatisfiable"),
    (text(pattern="[^\\s\\S]"), "Regex is empty"),
    # References
    ({"$ref": "#/$defs/none"}, "#/$defs/none"),
    ({"$ref": "https://example.org/schema"}, "https://example.org/schema"),
    ({"$ref": "#anchor"}, "#anchor"),
    (refer("a/title", a={"title": "no schema"}), "$ref"),
    ({"anyOf": [{}, {"$ref": "#/anyOf/" + "9" * 5000}]}, "where there is none"),
    (refer("a", a=members(required=["n"], additionalProperties=SELF)), "always holds another"),
    (refer("a", a=SELF), "always holds another"),
    (refer("a", a={"$ref": "#/$defs/b"}, b=SELF), "always holds another"),
    (refer("a", a={"anyOf": [SELF, SELF]}), "always holds another"),
    (refer("a", a=members(properties={"n": SELF}, required=["n"])), "always holds another"),
    (refer("a", a=items(items=SELF, minItems=1)), "always holds another"),
    # Size
    (nest({}, 60, lambda part: {"items": part}), "inside one another"),
    (nest({}, 400, lambda part: {"items": part}), "levels"),
    (nest({}, 400, lambda part: {"anyOf": [part]}), "levels"),
    ({"const": nest(1, 400, lambda part: {"a": part})}, "levels"),
    (members(properties={f"p{index}": {} for index in range(5000)}), "in all"),
    ({"anyOf": [numbers(minimum=index) for index in range(5000)]}, "in all"),
    (refer("0", **{f"{index}": {"$ref": f"#/$defs/{index + 1}"} for index in range(300)}), "$ref"),
    (text(minLength=10**9), "#/minLength"),
    (text(maxLength=10**30), "#/maxLength"),
    (items(minItems=10**9), "#/minItems"),
    (numbers(minimum=10**400), "#/minimum"),
    (numbers(maximum=1e300), "#/maximum"),
    # What JSON cannot say, or the chat's format
    (numbers(minimum=float("nan")), "finite"),
    (numbers(maximum=INFINITE), "finite"),
    ({"enum": [INFINITE]}, "finite"),
    (text(default=float("nan")), "finite"),
    ({"enum": ["\ud800"]}, "surrogate"),
    (text(pattern="\ud800"), "surrogate"),
    (text(description="\udfff"), "surrogate"),
    ({"\ud800": 1}, "surrogate"),
    (members(properties={"\ud800": {}}), "surrogate"),
    ({"enum": ["\0"]}, "control characters"),
    (members(properties={"a\x1b": {}}), "control characters"),
    ({"enum": ["</think>"]}, "</think>"),
    (members(properties={"<tool_call>": {}}), "<tool_call>"),
    # Keywords that no grammar says
    (text(fooBar=1), "#/fooBar"),
    (text(contentEncoding="base64"), "#/contentEncoding"),
    ({"x-guidance": {"lenient": True}}, "#/x-guidance"),
    ({"not": {}}, "#/not"),
    ({"if": {}}, "#/if"),
    (items(uniqueItems=True), "#/uniqueItems"),
    (items(contains={}), "#/contains"),
    (members(propertyNames={}), "#/propertyNames"),
    (members(dependentRequired={}), "#/dependentRequired"),
    (members(unevaluatedProperties=False), "#/unevaluatedProperties"),
    ({"$dynamicRef": "#a"}, "#/$dynamicRef"),
    ({"oneOf": [numbers(), {"type": "integer"}]}, "oneOf"),
    (text(format="banana"), "banana"),
    (text(pattern="("), "regex"),
    (text(pattern="(?=a)"), "look-around"),
    (text(pattern="(a)\\1"), "backreferences"),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(make_tiny_backend()) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=url, timeout=60.0) as client:
        yield client


def post(client: httpx2.Client, path: str, body: Any) -> httpx2.Response:
    head = {"content-type": "application/json"}
    asked = {"model": "tiny", "max_tokens": 20, "messages": [{"role": "user", "content": "x"}]}
    return client.post(path, content=json.dumps(asked | body), headers=head)


def ask(client: httpx2.Client, schema: Any, **more: Any) -> httpx2.Response:
    """Asks for an answer that satisfies a schema."""
    wanted = {"type": "json_schema", "json_schema": {"name": "wanted", "schema": schema}}
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    return post(client, "/v1/chat/completions", quiet | {"response_format": wanted} | more)


def call(client: httpx2.Client, *tools: Any, **more: Any) -> httpx2.Response:
    """Asks for a call of one of the tools."""
    body = {"tools": tools, "tool_choice": {"type": "any"}, **more}
    return post(client, "/v1/messages", body)


def tool(schema: Any, name: str = "f") -> dict[str, Any]:
    return {"name": name, "input_schema": schema}


def refusal(response: httpx2.Response) -> str:
    """Returns why a request was refused, once it was."""
    error = response.json().get("error", {})
    assert (response.status_code, error.get("type")) == (400, "invalid_request_error"), (
        response.text
    )
    message: str = error["message"]
    return message


@pytest.mark.parametrize(("schema", "named"), WRONG)
def test_a_schema_that_cannot_be_promised_is_refused_by_its_place(
    client: httpx2.Client, schema: Schema, named: str
) -> None:
    assert named in refusal(ask(client, schema))


@pytest.mark.parametrize("schema", [schema for schema, _ in WRONG])
def test_so_is_one_of_a_parameter_and_of_all_parameters(
    client: httpx2.Client, schema: Schema
) -> None:
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    assert refusal(call(client, tool(parameters)))
    if schema.keys() & {"enum", "const", "anyOf", "oneOf", "allOf", "not"} or "type" in schema:
        assert refusal(call(client, tool({"type": "object", **schema})))


def test_tools_that_cannot_be_told_apart_or_called_are_refused(client: httpx2.Client) -> None:
    plain = tool(members())
    assert "'f' twice" in refusal(call(client, plain, plain))
    for parameters in (3, None, [], "object"):
        assert "input_schema" in refusal(call(client, tool(parameters)))
    for parameters in ({"type": "array"}, {"type": ["string", "null"]}):
        assert "parameters are an object" in refusal(call(client, tool(parameters)))
    for name in ("", "a>b", "a\nb", "x" * 2000):
        assert "rename" in refusal(call(client, tool(members(), name)))
    nothing = members(properties={"a": False})
    assert "'a' can have no value" in refusal(call(client, tool(nothing)))


def test_a_parameter_cannot_refer_to_what_its_grammar_lacks(client: httpx2.Client) -> None:
    point = {"type": "integer"}
    parameters = members(properties={"a": point, "b": {"$ref": "#/properties/a"}})
    assert "within #/$defs or #/definitions" in refusal(call(client, tool(parameters)))
    parameters = members(properties={"b": {"$ref": "#/$defs/a"}}, **{"$defs": {"a": point}})
    assert call(client, tool(parameters)).status_code == 200


def test_alternatives_that_multiply_are_counted_before_they_are_made(
    client: httpx2.Client,
) -> None:
    levels = {f"{level}": {"anyOf": [{"$ref": f"#/$defs/{level + 1}"}] * 40} for level in range(5)}
    parameters = members(
        properties={"a": {"$ref": "#/$defs/0"}}, **{"$defs": levels | {"5": text(enum=["x"])}}
    )
    assert "256 alternatives" in refusal(call(client, tool(parameters)))


def test_an_answer_that_its_schema_drives_into_a_corner_is_the_clients_fault(
    client: httpx2.Client,
) -> None:
    cornered = text(pattern="^<tool_call>$")  # which no text may spell, as a search would find out
    assert "chat tag" in refusal(ask(client, cornered))
    assert "grammar of the answer cannot go on" in refusal(ask(client, WIDE))
    streamed = ask(client, cornered, stream=True)
    assert streamed.status_code == 200
    last = json.loads(streamed.text.strip().rpartition("data: ")[2])
    assert last["error"]["type"] == "invalid_request_error"


def test_what_a_request_may_cost_those_who_share_its_passes_is_bounded(
    client: httpx2.Client,
) -> None:
    chat = "/v1/chat/completions"
    for field, value, named in (
        ("policy", "prompt_lookup=1000000000", "1 to 256"),
        ("block_size", 512, "block_size"),
        ("stop", ["x"] * 17, "stop"),
        ("stop", "x" * 257, "stop"),
        ("logit_bias", {f"{index}": 1.0 for index in range(1025)}, "logit_bias"),
        ("logit_bias", {"9" * 5000: 1.0}, "logit_bias"),
    ):
        assert named in refusal(post(client, chat, {field: value}))
    assert "stop_sequences" in refusal(call(client, tool(members()), stop_sequences=["x"] * 17))


@pytest.mark.parametrize("value", [True, 0, 0.0, "false"])
def test_what_is_accepted_only_as_false_is_that(client: httpx2.Client, value: Any) -> None:
    for body in ({"store": value}, {"stream_options": {"include_obfuscation": value}}):
        assert next(iter(body)) in refusal(post(client, "/v1/chat/completions", body))


def test_a_refusal_repeats_little_of_a_large_request(client: httpx2.Client) -> None:
    assert len(refusal(ask(client, text(enum=["<tool_call>" * 10_000])))) < 1100
    long = "x" * 100_000
    for body in ({"policy": long}, {long: 1}):
        assert len(post(client, "/v1/chat/completions", body).text) < 2000


def test_bodies_that_are_no_json_are_refused(client: httpx2.Client) -> None:
    head = {"content-type": "application/json"}
    for content in (b"", b"{", b"[" * 100_000, b'{"model": "\xff"}', b"1" * 5000, b"NaN"):
        response = client.post("/v1/chat/completions", content=content, headers=head)
        assert refusal(response)


def test_arguments_of_earlier_calls_cannot_be_nested_without_end(client: httpx2.Client) -> None:
    arguments = '{"a":' * 900 + "1" + "}" * 900
    calls = [{"id": "1", "function": {"name": "f", "arguments": arguments}}]
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ]
    assert refusal(post(client, "/v1/chat/completions", {"messages": messages}))


def test_what_is_refused_hurts_nobody_else(client: httpx2.Client) -> None:
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 400, "seed": 1, "temperature": 1.0}
    alone = client.post("/v1/completions", json=body).json()["choices"]
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        written = [json.loads(next(lines)[6:])]
        for schema, _ in WRONG:
            ask(client, schema)
        assert "cannot go on" in refusal(ask(client, WIDE))
        written += [json.loads(line[6:]) for line in lines]
    assert "".join(chunk["choices"][0]["text"] for chunk in written) == alone[0]["text"]


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.sampled_from([10**9, 10**30, 0.5, 1e300, INFINITE]),
    st.sampled_from(["a", "string", "#", "#/$defs/a", "date", "[ab]{2}", "(", "", "\0", "\ud800"]),
)


def half_wrong(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Returns schemas, each of whose keywords is right, or has another's value, or junk."""
    named = st.dictionaries(st.sampled_from("ab"), schemas, max_size=2)
    listed = st.lists(schemas, max_size=2)
    count, bound = st.integers(0, 4), st.integers(-4, 4) | st.floats(-4, 4)
    right: dict[str, st.SearchStrategy[Any]] = {
        "type": st.sampled_from(["object", "array", "string", "integer", "number", "null"])
        | st.lists(st.sampled_from(["object", "string", "boolean"]), max_size=2),
        "enum": st.lists(JUNK, max_size=3),
        "const": JUNK,
        "$ref": st.sampled_from(["#/$defs/a", "#/$defs/b", "#"]),
        **dict.fromkeys(("properties", "$defs", "patternProperties"), named),
        **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), listed),
        **dict.fromkeys(("items", "additionalProperties", "not"), schemas),
        "required": st.lists(st.sampled_from("abc"), max_size=2),
        **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "maxProperties"), count),
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "multipleOf"), bound),
        "pattern": st.sampled_from(["^a+$", "b", "(a|b){2,3}", "</think>"]),
        "format": st.sampled_from(["date", "uuid", "email", "ipv6"]),
        "nullable": st.booleans(),
    }
    keywords = st.fixed_dictionaries({}, optional=right)
    few = st.lists(st.sampled_from(list(right)), max_size=4, unique=True)
    mostly = st.tuples(keywords, few).map(
        lambda pair: {k: pair[0][k] for k in pair[1] if k in pair[0]}
    )
    wrong = st.dictionaries(st.sampled_from(list(right)), JUNK | schemas, max_size=1)
    return st.builds(lambda one, other: one | other, mostly, st.just({}) | wrong)


SCHEMAS = st.recursive(st.just({}) | st.booleans() | JUNK, half_wrong, max_leaves=6)


@settings(max_examples=NUM_EXAMPLES)
@given(schema=half_wrong(SCHEMAS), seed=st.integers(0, 99), is_tool=st.booleans())
def test_no_schema_is_a_failure_and_no_answer_breaks_one(
    client: httpx2.Client, schema: Schema, seed: int, is_tool: bool
) -> None:
    if is_tool:
        response = call(client, tool(members(properties={"a": schema}, required=["a"])))
    else:
        response = ask(client, schema, seed=seed, temperature=1.0, max_tokens=40)
    assert response.status_code == 200 or refusal(response)
    if response.status_code == 200:
        jsonschema.Draft202012Validator.check_schema(schema)
        choices = response.json().get("choices", [])
        for choice in choices:
            if choice["finish_reason"] == "stop":
                answer = json.loads(choice["message"]["content"])
                jsonschema.validate(answer, schema, jsonschema.Draft202012Validator)
        for block in response.json().get("content", []):
            if block["type"] == "tool_use":
                jsonschema.validate(block["input"]["a"], schema, jsonschema.Draft202012Validator)
