from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from clover.chat import ChatDelta, ChatParser, Message, ToolCall, parse_reply, render_reply

NUM_EXAMPLES = 300  # parsing takes well under a millisecond
NUM_REPLIES = 60  # drawing whole replies takes far longer than parsing them

# Whole tags, broken tags and text, so that random joins come near every state of the parser.
PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", "</function>"),
    *(
        "<function=f>",
        "<function=",
        "<parameter=a>",
        "<parameter=b>",
        "<parameter=",
        "</parameter>",
    ),
    *("<tool_call>\n<function=f>\n<parameter=a>\n", "\n</parameter>\n</function>\n</tool_call>"),
    *("<tool_call>\n<function=f>\n</function>\n</tool_call>", "\n</parameter>\n<parameter=b>\n"),
    *(
        "<",
        ">",
        "</",
        "<|",
        "<tool",
        "_call>",
        "</par",
        "ameter>",
        "<|im_",
        "=",
        "f",
        "a",
        "é",
        "e" * 255,
    ),
    *("\n", "\n\n", " ", "5", "null", "[1, 2]", '{"k": "<"}'),
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=25).map("".join)
ENDINGS = st.sampled_from(["", "<|im_end|>", "<|im_end|>\n"])
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
        },
    }
]


def read(
    chunks: list[str], *, starts_in_thinking: bool
) -> tuple[Message, list[ChatDelta], list[Message]]:
    """Returns the message, all deltas, and the message as it stood after each chunk."""
    parser = ChatParser(starts_in_thinking=starts_in_thinking, tools=TOOLS)
    deltas, stages = [], []
    for chunk in chunks:
        deltas += parser.push(chunk)
        stages.append(parser.message)
    deltas += parser.finish()
    return parser.message, deltas, stages


def merge(deltas: list[ChatDelta]) -> list[ChatDelta]:
    """Joins neighbours that append to the same text: what chunking may change."""
    merged: list[ChatDelta] = []
    for delta in deltas:
        last = merged[-1] if merged else None
        is_text = delta.kind in ("thinking", "content", "argument")
        if last and is_text and (last.kind, last.parameter) == (delta.kind, delta.parameter):
            span = None
            if last.span and delta.span:
                assert last.span[1] == delta.span[0]
                span = last.span[0], delta.span[1]
            merged[-1] = replace(last, text=last.text + delta.text, span=span)
        else:
            merged.append(delta)
    return merged


def split(text: str, points: list[int]) -> list[str]:
    edges = [0, *sorted(point % (len(text) + 1) for point in points), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@settings(max_examples=NUM_EXAMPLES)
@given(TEXTS, ENDINGS, st.booleans(), st.lists(st.integers(0, 10_000), max_size=30))
@example("A\n\n<tool_call>\n<function=f>\n<parameter=a>\n\n\n</parameter>", "", False, [20, 40])
def test_no_chunking_changes_the_result(
    text: str, ending: str, starts_in_thinking: bool, points: list[int]
) -> None:
    text += ending
    at_once, deltas, _ = read([text], starts_in_thinking=starts_in_thinking)
    for chunks in (split(text, points), list(text), ["", text, ""]):
        message, parts, _ = read(chunks, starts_in_thinking=starts_in_thinking)
        assert message == at_once
        assert merge(parts) == merge(deltas)
    assert parse_reply(text, starts_in_thinking=starts_in_thinking, tools=TOOLS) == at_once


@settings(max_examples=NUM_EXAMPLES)
@given(TEXTS, st.booleans())
def test_the_deltas_add_up_to_the_message(text: str, starts_in_thinking: bool) -> None:
    message, deltas, stages = read(list(text), starts_in_thinking=starts_in_thinking)
    thinking = "".join(delta.text for delta in deltas if delta.kind == "thinking")
    content = "".join(delta.text for delta in deltas if delta.kind == "content")
    calls = tuple(delta.call for delta in deltas if delta.call)
    assert Message("assistant", content, thinking or None, calls) == message
    for stage in stages:  # what was said once is never taken back
        assert message.content.startswith(stage.content)
        assert (message.thinking or "").startswith(stage.thinking or "")
        assert message.tool_calls[: len(stage.tool_calls)] == stage.tool_calls


@settings(max_examples=NUM_EXAMPLES)
@given(TEXTS, st.booleans(), st.lists(st.integers(0, 10_000), max_size=30))
@example("<tool_call>\n<function=f>\n</function>\n</tool_call>A", False, [])
def test_a_delta_says_where_its_text_stands(
    text: str, starts_in_thinking: bool, points: list[int]
) -> None:
    text = "A" * (not starts_in_thinking) + text
    _, deltas, _ = read(split(text, points), starts_in_thinking=starts_in_thinking)
    for delta in deltas:
        assert (delta.span is None) == (delta.kind not in ("thinking", "content"))
        if delta.span:
            source = text[slice(*delta.span)]
            assert delta.text in (
                source,
                f"\n{source}",
            )  # the newline that joins content to content


@settings(max_examples=NUM_EXAMPLES)
@given(TEXTS)
def test_what_is_held_is_what_the_message_lacks(text: str) -> None:
    assume("<|im_end|>" not in text and not text.lstrip("\n").startswith("<think>"))
    parser = ChatParser(starts_in_thinking=False, tools=TOOLS)
    parser.push(text)
    if not parser.message.tool_calls:
        told = parser.message.content + parser.held
        assert told.replace("\n", "") == text.replace("\n", "")  # those between belong to nobody


@settings(max_examples=NUM_EXAMPLES)
@given(TEXTS, st.booleans())
def test_calls_open_and_close_in_order(text: str, starts_in_thinking: bool) -> None:
    _, deltas, _ = read(list(text), starts_in_thinking=starts_in_thinking)
    is_open = False
    for delta in deltas:
        is_inside = delta.kind in ("argument", "call", "call_dropped")
        assert is_open == is_inside
        is_open = delta.kind in ("call_started", "argument")
    assert not is_open


@settings(max_examples=NUM_EXAMPLES)
@given(TEXTS)
def test_nothing_but_newlines_is_lost_when_no_call_is_complete(text: str) -> None:
    assume("<|im_end|>" not in text and not text.lstrip("\n").startswith("<think>"))
    message, _, _ = read([text], starts_in_thinking=False)
    if not message.tool_calls:
        assert message.content == text.strip("\n")


NAMES = st.text(
    st.characters(exclude_characters="<>\n", exclude_categories=["Cs"]), min_size=1, max_size=20
)
PLAIN = st.lists(st.sampled_from([*PIECES, "x y", "</think>", "{"]), max_size=8).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda below: st.lists(below | PLAIN, max_size=3) | st.dictionaries(NAMES, below, max_size=3),
    max_leaves=5,
)
VALUES = (PLAIN | JSON).filter(lambda value: "</parameter>" not in str(value))


@settings(max_examples=NUM_REPLIES)
@given(
    thinking=st.none() | PLAIN.map(str.strip).filter(lambda text: text and "</think>" not in text),
    content=PLAIN.map(str.strip).filter(lambda text: "<tool_call>" not in text),
    calls=st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=4)), max_size=3),
)
def test_a_rendered_reply_is_read_back(
    thinking: str | None, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    reply = Message("assistant", content, thinking, tuple(ToolCall(*call) for call in calls))
    text = render_reply(reply, enable_thinking=True)
    assume(text.count("<|im_end|>") == 1)
    assume(not (thinking or "").startswith("<think>"))
    tools = [describe(name, arguments) for name, arguments in calls]
    assume(len({name for name, _ in calls}) == len(calls))
    assert parse_reply(text, starts_in_thinking=True, tools=tools) == reply


def describe(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool whose schema says which of the arguments are strings."""
    others = ["null", "boolean", "number", "array", "object"]
    properties = {
        key: {"type": "string" if isinstance(value, str) else others}
        for key, value in arguments.items()
    }
    return {"function": {"name": name, "parameters": {"properties": properties}}}
