from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer as TokenizerFile

import clover
from clover.chat import Message, ToolCall, parse_reply, render_reply
from clover.engine.grammar import Grammar, GrammarCompiler, GrammarConstraint
from clover.engine.lark import AnswerFormat, JsonSchema, Regex, ToolCalls
from clover.errors import GenerationError, RequestError
from clover.tokenizer import Tokenizer

assert clover.__file__ is not None
FOLDER = Path(clover.__file__).parent / "assets" / "nano"
TOKENIZER = Tokenizer.load(FOLDER)
NUM_PADDED_ROWS = 6
VOCAB_SIZE = len(TOKENIZER) + NUM_PADDED_ROWS
END_OF_TEXT, IM_END = 0, 2
# Long enough for every bounded text of this file; free text ends by chance, or is left unfinished.
MAX_WALK = 600

PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["alice", "bob"]},
        "nick": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 3, "maximum": 12},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "move",
            "parameters": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "minLength": 1, "maxLength": 6},
                    "mode": {"type": "string", "enum": ["fast", "faster", "two\nlines"]},
                    "steps": {"type": "integer", "minimum": -5, "maximum": 20},
                    "speed": {"type": "number"},
                    "tags": {
                        "type": "array",
                        "items": {"type": "string", "maxLength": 3},
                        "maxItems": 2,
                    },
                    "note": {
                        "anyOf": [{"type": "string", "minLength": 2, "maxLength": 3}],
                    },
                    "maybe": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
                    "either": {"type": ["string", "integer"], "maxLength": 2},
                    "choice": {"enum": ["a", 1, None, True]},
                    "point": {"$ref": "#/$defs/point"},
                },
                "required": ["name", "steps"],
                "additionalProperties": False,
                "$defs": {
                    "point": {
                        "type": "object",
                        "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
                        "required": ["x"],
                        "additionalProperties": False,
                    }
                },
            },
        },
    },
    {"type": "function", "function": {"name": "stop", "description": "Stops."}},
]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=[END_OF_TEXT, IM_END])


def walk(grammar: Grammar, seed: int) -> tuple[str, bool]:
    """Returns a random text of the grammar, uniform over the tokens, and whether it has ended."""
    rng = random.Random(seed)
    constraint = grammar.start()
    tokens: list[int] = []
    while len(tokens) < MAX_WALK:
        chosen = constraint.forced() or [rng.choice(allowed_ids(constraint))]
        constraint.commit(chosen)
        tokens += chosen
        if tokens[-1] in grammar.eos_token_ids:
            return TOKENIZER.decode(tokens[:-1]), True
    return TOKENIZER.decode(tokens), False


def allowed_ids(constraint: GrammarConstraint) -> list[int]:
    return [int(token_id) for token_id in constraint.allowed().nonzero().flatten()]


def count_valid(grammar: Grammar, text: str) -> tuple[int, int]:
    """Returns how many tokens of the text and a final EOS are valid, and how many there are."""
    tokens = [*TOKENIZER.encode(text), IM_END]
    return grammar.start().validate(tokens), len(tokens)


def accepts(grammar: Grammar, text: str) -> bool:
    num_valid, num_tokens = count_valid(grammar, text)
    return num_valid == num_tokens


def tool(parameters: object, name: str = "f") -> list[dict[str, Any]]:
    return [{"function": {"name": name, "parameters": parameters}}]


def test_every_text_of_a_json_grammar_validates(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(JsonSchema(schema=PERSON))
    for seed in range(40):
        text, has_ended = walk(grammar, seed)
        assert has_ended
        jsonschema.validate(json.loads(text), PERSON)


def test_json_is_written_as_json_dumps_writes_it(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(JsonSchema(schema=PERSON))
    value = {"name": "bob", "nick": "é🍀", "age": 7}
    assert accepts(grammar, json.dumps(value, ensure_ascii=False))
    assert not accepts(grammar, json.dumps(value, indent=1))
    assert not accepts(grammar, json.dumps({"age": 7, "name": "bob"}))  # the schema has an order


def test_a_schema_may_ask_for_fixed_objects_and_for_anything(compiler: GrammarCompiler) -> None:
    fixed = compiler.compile(JsonSchema(schema={"enum": [{"a": 1, "b": [1, 2]}, None]}))
    assert accepts(fixed, '{"a": 1, "b": [1, 2]}')
    assert accepts(fixed, "null")
    assert not accepts(fixed, '{"a": 1}')
    anything = compiler.compile(JsonSchema(schema={}))
    assert accepts(anything, '{"x": [1e5, "y", {"z": false}]}')


def test_a_json_string_holds_any_character_but_no_half_of_a_surrogate_pair(
    compiler: GrammarCompiler,
) -> None:
    grammar = compiler.compile(JsonSchema(schema={"type": "string"}))
    assert accepts(grammar, json.dumps('日本 🍀 \\ " \n \t /', ensure_ascii=False))
    assert not accepts(grammar, '"\\ud83c"')


@pytest.mark.parametrize(
    "pattern",
    ["(ab|cd){2,3}x?", "[a-z]{3,5}@[0-9]{2}", "^a/b$", "é{2}[^\\n]{1,3}", "a?", ""],
)
def test_every_text_of_a_regex_grammar_matches_as_a_whole(
    compiler: GrammarCompiler, pattern: str
) -> None:
    grammar = compiler.compile(Regex(pattern=pattern))
    for seed in range(10):
        text, has_ended = walk(grammar, seed)
        assert has_ended
        assert re.fullmatch(pattern, text)


def read_calls(text: str) -> Sequence[ToolCall]:
    return parse_reply(text, starts_in_thinking=False, tools=TOOLS).tool_calls


def check_calls(calls: Sequence[ToolCall]) -> None:
    schemas: dict[str, Mapping[str, Any]] = {
        tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS
    }
    for call in calls:
        jsonschema.validate(call.arguments, schemas[call.name])


def test_every_text_of_required_calls_is_read_as_valid_calls(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(ToolCalls(tools=TOOLS, choice="required"))
    num_calls = set()
    for seed in range(60):
        text, has_ended = walk(grammar, seed)
        assert has_ended
        message = parse_reply(text, starts_in_thinking=False, tools=TOOLS)
        assert message.content == ""
        assert len(message.tool_calls) == text.count("<tool_call>") > 0
        check_calls(message.tool_calls)
        num_calls.add(len(message.tool_calls))
    assert len(num_calls) > 1


def test_a_named_function_is_called_once_where_calls_are_not_parallel(
    compiler: GrammarCompiler,
) -> None:
    grammar = compiler.compile(ToolCalls(tools=TOOLS, choice="move", parallel=False))
    for seed in range(40):
        (call,) = read_calls(walk(grammar, seed)[0])
        assert call.name == "move"
        check_calls([call])


def test_what_the_template_renders_is_what_the_grammar_allows(compiler: GrammarCompiler) -> None:
    arguments = {
        "name": "a</b>\n",
        "mode": "two\nlines",
        "steps": -5,
        "speed": -1.5e-05,
        "tags": ["<x>", "é"],
        "note": "\n\n",
        "maybe": None,
        "either": 7,
        "choice": True,
        "point": {"x": 4},
    }
    calls = (ToolCall("move", arguments), ToolCall("stop", {}))
    for content, choice in (("", "required"), ("", "auto"), ("I <move> now.", "auto")):
        grammar = compiler.compile(ToolCalls(tools=TOOLS, choice=choice))
        message = Message("assistant", content=content, tool_calls=calls)
        text = render_reply(message, enable_thinking=False).removesuffix("<|im_end|>")
        assert accepts(grammar, text)
        assert read_calls(text) == calls


def test_auto_allows_content_alone_before_calls_and_calls_alone(compiler: GrammarCompiler) -> None:
    auto = compiler.compile(ToolCalls(tools=TOOLS))
    required = compiler.compile(ToolCalls(tools=TOOLS, choice="required"))
    call = "<tool_call>\n<function=stop>\n</function>\n</tool_call>"
    assert accepts(auto, "No need.")
    assert accepts(auto, f"Wait.\n\n{call}\n{call}")
    assert accepts(auto, call)
    assert not accepts(required, "No need.")
    assert not accepts(required, f"Wait.\n\n{call}")
    for text in ("<tool_call>", f"{call}\nmore", call.replace("stop", "other")):
        assert not accepts(auto, text)


def test_a_required_parameter_is_not_left_out_and_an_optional_one_may_be(
    compiler: GrammarCompiler,
) -> None:
    grammar = compiler.compile(ToolCalls(tools=TOOLS, choice="required"))
    head, end = "<tool_call>\n<function=move>\n", "</function>\n</tool_call>"
    name = "<parameter=name>\nx\n</parameter>\n"
    steps = "<parameter=steps>\n7\n</parameter>\n"
    assert accepts(grammar, head + name + steps + end)
    for body in (name, steps, steps + name, name + steps.replace("7", "21")):
        assert not accepts(grammar, head + body + end)


def spell(text: str) -> list[int]:
    """Returns one token per character: a tag is ordinary text then."""
    return [token_id for character in text for token_id in TOKENIZER.encode(character)]


def test_no_answer_spells_a_tag_with_ordinary_tokens(compiler: GrammarCompiler) -> None:
    list_tool = tool({"properties": {"a": {"type": "array", "items": {"type": "string"}}}})
    call = compiler.compile(ToolCalls(tools=list_tool, choice="required"))
    before = '<tool_call>\n<function=f>\n<parameter=a>\n["'
    forms: list[tuple[Grammar, list[int], str]] = [
        (compiler.compile(JsonSchema(schema={"type": "string"})), spell('"'), "<tool_call>"),
        (compiler.compile(JsonSchema(schema={"type": "string"})), spell('"'), "<|im_end|>"),
        (compiler.compile(Regex(pattern="(?s:.*)")), [], "<tool_call>"),
        (compiler.compile(ToolCalls(tools=TOOLS)), [], "<tool_call>"),
        (call, TOKENIZER.encode(before), "</parameter>"),
    ]
    for grammar, start, tag in forms:
        tokens = [*start, *spell(f"<{tag}")]
        assert grammar.start().validate(tokens) == len(tokens) - 1
        constraint = grammar.start()
        constraint.commit(tokens[:-1])
        assert not constraint.allowed()[spell(">")[0]]


def test_thinking_is_free_up_to_its_end_and_the_answer_is_not(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(Regex(pattern="yes|no"), starts_in_thinking=True)
    assert accepts(grammar, "yes or no?\nwell\n</think>\n\nno")
    assert accepts(grammar, "</think>\n\nyes")
    assert not accepts(grammar, "yes")
    assert not accepts(grammar, "hm</think>\n\nmaybe")
    num_valid, num_tokens = count_valid(grammar, "hm\n</think>\n\nno</think>")
    assert num_valid == num_tokens - 2


def test_forced_tokens_are_what_the_tokenizer_would_write(compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(JsonSchema(schema=PERSON)).start()
    assert constraint.forced() == TOKENIZER.encode('{"name": "')
    for token_id in constraint.forced():
        assert allowed_ids(constraint) == [token_id]
        constraint.commit([token_id])
    assert constraint.forced() == []
    assert len(allowed_ids(constraint)) > 1


def test_a_text_that_can_only_end_is_forced_to(compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(Regex(pattern="hello")).start()
    constraint.commit(TOKENIZER.encode("hello"))
    assert constraint.forced() == [END_OF_TEXT]
    constraint.commit([END_OF_TEXT])
    assert constraint.forced() == []
    assert not constraint.allowed().any()
    assert constraint.validate([END_OF_TEXT]) == 0


def test_every_eos_is_allowed_where_the_text_may_end_and_only_there(
    compiler: GrammarCompiler,
) -> None:
    constraint = compiler.compile(Regex(pattern="a(b|cd)?")).start()
    assert not {END_OF_TEXT, IM_END} & set(allowed_ids(constraint))
    constraint.commit(spell("a"))
    assert {END_OF_TEXT, IM_END} < set(allowed_ids(constraint))
    constraint.commit(spell("c"))
    assert not {END_OF_TEXT, IM_END} & set(allowed_ids(constraint))


def test_padded_rows_and_special_tokens_are_never_allowed_in_text(
    compiler: GrammarCompiler,
) -> None:
    allowed = compiler.compile(Regex(pattern="(?s:.+)")).start().allowed()
    assert allowed.shape == (VOCAB_SIZE,)
    assert not allowed[len(TOKENIZER) :].any()
    assert not allowed[sorted(TOKENIZER.added_token_ids)].any()
    assert allowed.sum() > len(TOKENIZER) / 2


@pytest.mark.parametrize(
    "form",
    [
        JsonSchema(schema=PERSON),
        Regex(pattern="(ab|cd){2,3}x?"),
        ToolCalls(tools=TOOLS, choice="move", parallel=False),
    ],
)
def test_what_is_allowed_depends_on_the_tokens_alone(
    compiler: GrammarCompiler, form: AnswerFormat
) -> None:
    """Going back and forth, validating, and committing in pieces or at once change nothing."""
    rng = random.Random(0)
    grammar = compiler.compile(form)
    restless, tokens = grammar.start(), list[int]()
    while not tokens or tokens[-1] not in grammar.eos_token_ids:
        token_id = rng.choice(allowed_ids(restless))
        assert restless.validate([token_id]) == 1
        restless.commit([token_id])
        tokens.append(token_id)
        num_back = rng.randrange(len(tokens) + 1)
        restless.rollback(num_back)
        restless.commit(tokens[len(tokens) - num_back :])
        at_once = grammar.start()
        assert at_once.validate(tokens) == len(tokens)
        at_once.commit(tokens)
        assert torch.equal(at_once.allowed(), restless.allowed())
        assert at_once.forced() == restless.forced()


def test_a_token_that_may_not_come_is_an_error(compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(Regex(pattern="ab|cd")).start()
    with pytest.raises(GenerationError, match=f"found id {spell('x')[0]}"):
        constraint.commit(spell("x"))


NESTED = {"type": "object", "properties": {"inner": {"type": "array", "items": {"not": {}}}}}


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        (NESTED, "not"),
        ({"if": {}, "then": {}}, "if"),
        ({"contains": {}}, "contains"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "string", "format": "banana"}, "banana"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"$ref": "https://example.org/schema"}, "https://example.org/schema"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "no value satisfies both"),
        ({"minimum": 5, "exclusiveMinimum": True}, "exclusiveMinimum"),
        ({"type": "array", "items": [{"type": "integer"}]}, "prefixItems"),
        ({"type": "object", "minProperties": 2}, "minProperties is 2"),
        ({"enum": ["x<tool_call>"]}, "<tool_call>"),
        ({"properties": {"a": {"required": ["<|im_end|>"]}}}, r"<\|im_end\|>"),
    ],
)
def test_a_schema_that_no_grammar_can_say_is_refused(
    compiler: GrammarCompiler, schema: dict[str, Any], named: str
) -> None:
    with pytest.raises(RequestError, match=named):
        compiler.compile(JsonSchema(schema=schema))


@pytest.mark.parametrize("pattern", ["a(b", r"a(?!b)", r"(a)\1", r"\bword\b"])
def test_a_pattern_that_no_grammar_can_say_is_refused(
    compiler: GrammarCompiler, pattern: str
) -> None:
    with pytest.raises(RequestError, match="invalid regex"):
        compiler.compile(Regex(pattern=pattern))


@pytest.mark.parametrize(
    ("tools", "choice", "named"),
    [
        ([], "auto", "found none"),
        (TOOLS, "fly", "no 'fly' among them; allowed: auto, required, move, stop"),
        (tool({}, name="a>b"), "auto", "'a>b'"),
        (tool({"properties": {"a<": {}}}), "auto", "'a<'"),
        (tool({"anyOf": [{"properties": {}}]}), "auto", "found anyOf"),
        (tool({"maxProperties": 1}), "auto", "found maxProperties"),
        (tool({"properties": {"a": {"type": "string", "pattern": "x"}}}), "auto", "found pattern"),
        (tool({"properties": {"a": {"type": "string", "format": "date"}}}), "auto", "found format"),
        (tool({"properties": {"a": {"enum": ["</parameter>"]}}}), "auto", "</parameter>"),
        (tool({"properties": {"a": {"type": "array", "contains": {}}}}), "auto", "contains"),
        (tool({"properties": {"a": {"oneOf": [{"type": "string"}]}}}), "auto", "oneOf"),
        (
            tool(
                {
                    "properties": {
                        "a": {"anyOf": [{"type": "string"}, {"type": "integer", "maximum": 3}]}
                    }
                }
            ),
            "auto",
            "maximum",
        ),
        (
            tool({"properties": {"a": {"anyOf": [{"type": "string"}, {"enum": [5]}]}}}),
            "auto",
            "[5]",
        ),
        (
            tool({"properties": {"a": {"$ref": "#/properties/a", "type": "string"}}}),
            "auto",
            "ref",
        ),
    ],
)
def test_tools_that_no_grammar_can_say_are_refused(
    compiler: GrammarCompiler, tools: list[dict[str, Any]], choice: str, named: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(named)):
        compiler.compile(ToolCalls(tools=tools, choice=choice))


def test_a_tokenizer_without_the_tags_cannot_call_tools() -> None:
    file = TokenizerFile.from_file(str(FOLDER / "tokenizer.json"))
    fields = json.loads(file.to_str())
    fields["added_tokens"] = []
    plain = Tokenizer(TokenizerFile.from_str(json.dumps(fields)))
    compiler = GrammarCompiler(plain, vocab_size=VOCAB_SIZE, eos_token_ids=[IM_END])
    with pytest.raises(RequestError, match="needs <tool_call> as a token of its own"):
        compiler.compile(ToolCalls(tools=TOOLS))
    with pytest.raises(RequestError, match="needs </think> as a token of its own"):
        compiler.compile(Regex(pattern="a"), starts_in_thinking=True)
    compiler.compile(Regex(pattern="a"))


def test_a_grammar_needs_an_eos() -> None:
    with pytest.raises(RequestError, match="eos_token_ids"):
        GrammarCompiler(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=[])


def test_a_format_is_compiled_once_and_one_of_another_order_again() -> None:
    compiler = GrammarCompiler(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=(IM_END,))
    forms: list[AnswerFormat] = [
        JsonSchema(schema=PERSON),
        JsonSchema(schema=PERSON | {"properties": dict(reversed(PERSON["properties"].items()))}),  # type: ignore[attr-defined]
        JsonSchema(schema={"enum": [1]}),
        JsonSchema(schema={"enum": [True]}),
        Regex(pattern="a"),
        ToolCalls(tools=TOOLS),
        ToolCalls(tools=TOOLS, parallel=False),
    ]
    first = [compiler.compile(form) for form in forms]
    assert len(set(map(id, first))) == len(forms)
    again = [compiler.compile(copy.deepcopy(form)) for form in forms]
    assert list(map(id, again)) == list(map(id, first))
    assert compiler.compile(forms[0], starts_in_thinking=True) is not first[0]


def test_texts_under_one_grammar_know_nothing_of_each_other() -> None:
    compiler = GrammarCompiler(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=(IM_END,))
    ahead, behind = (compiler.compile(Regex(pattern="(ab|cd)e")).start() for _ in range(2))
    ahead.commit(TOKENIZER.encode("abe"))
    assert behind.validate(TOKENIZER.encode("cde")) == len(TOKENIZER.encode("cde"))
    assert ahead.forced() == [IM_END]


def test_threads_may_compile_at_once() -> None:
    compiler = GrammarCompiler(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=(IM_END,))
    patterns = [f"a{number}" for number in range(4)] * 8
    with ThreadPoolExecutor(4) as threads:
        forms = [Regex(pattern=pattern) for pattern in patterns]
        grammars = list(threads.map(compiler.compile, forms))
    for pattern, grammar in zip(patterns, grammars, strict=True):
        token_ids = TOKENIZER.encode(pattern)
        assert grammar.start().validate(token_ids) == len(token_ids)
