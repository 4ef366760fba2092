"""However a text is cut into pieces, its events add up to the same message."""

from __future__ import annotations

import asyncio
import itertools
import json
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from clover.backends.base import (
    ChatDeltaEvent,
    ChatFinished,
    ChatRequest,
    ContentDelta,
    ScoredToken,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallStarted,
)
from clover.backends.reply import ReplyReader, find_stop
from clover.backends.scripted import ScriptedBackend
from clover.chat import Message, ToolCall, parse_reply

NUM_EXAMPLES = 200  # reading takes well under a millisecond
PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", "</function>", "</thi"),
    *("<function=f>", "<parameter=a>", "</parameter>", "<tool", "_call>", "<", ">", "\n", " "),
    *("<tool_call>\n<function=f>\n<parameter=a>\n", "\n</parameter>\n</function>\n</tool_call>"),
    *("<tool_call>\n<function=f>\n</function>\n</tool_call>", "STOP", "STO", "S", "P", "é", "5"),
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=25).map("".join)
STOPS = st.lists(st.sampled_from(["STOP", "STO", "OP", "\n\n", "é5", "</think>"]), max_size=3)


def join(events: list[ChatDeltaEvent]) -> Message:
    """Returns the message that a client puts together."""
    content = thinking = ""
    calls: list[tuple[str, str]] = []
    for event in events:
        match event:
            case ContentDelta(text):
                content += text
            case ThinkingDelta(text):
                thinking += text
            case ToolCallStarted(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case ToolCallDelta(index, text):
                calls[index] = (calls[index][0], calls[index][1] + text)
    read = tuple(ToolCall(name, json.loads(arguments)) for name, arguments in calls)
    return Message("assistant", content, thinking or None, read)


@settings(max_examples=NUM_EXAMPLES)
@given(TEXTS, STOPS, st.booleans(), st.lists(st.integers(0, 10_000), max_size=20))
def test_no_chunking_changes_the_message(
    text: str, stop: list[str], is_thinking: bool, points: list[int]
) -> None:
    found = find_stop(text, stop)
    length = found[0] if found else len(text)
    expected = parse_reply(text[:length], starts_in_thinking=is_thinking)
    edges = [0, *sorted(point % (len(text) + 1) for point in points), len(text)]
    chunkings = [[text], list(text), [text[start:end] for start, end in pairwise(edges)]]
    for chunks in chunkings:
        reader = ReplyReader(starts_in_thinking=is_thinking, stop=stop)
        events: list[ChatDeltaEvent] = []
        for chunk in chunks:
            events += reader.push(chunk)
        events += reader.finish(length)
        assert join(events) == reader.message == expected


def cut(text: str, points: list[int]) -> list[str]:
    edges = [0, *sorted({point % (len(text) + 1) for point in points}), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@settings(max_examples=NUM_EXAMPLES)
@given(
    TEXTS,
    STOPS,
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(0, 10_000), max_size=30),
    st.lists(st.integers(0, 10_000), max_size=30),
)
def test_the_tokens_of_the_content_are_those_that_write_it(
    text: str,
    stop: list[str],
    is_thinking: bool,
    is_raw: bool,
    points: list[int],
    pieces: list[int],
) -> None:
    found = find_stop(text, stop)
    length = found[0] if found else len(text)

    def read(parts: list[list[ScoredToken]]) -> tuple[str, list[ScoredToken]]:
        """Returns content and tokens as the deltas have them."""
        reader = ReplyReader(starts_in_thinking=is_thinking, stop=stop, is_raw=is_raw)
        events: list[ChatDeltaEvent] = []
        for part in parts:
            events += reader.push("".join(token.token.decode() for token in part), part)
        events += reader.finish(length)
        deltas = [event for event in events if isinstance(event, ContentDelta)]
        tokens = [token for delta in deltas for token in delta.tokens]
        assert tokens == reader.content_tokens
        return "".join(delta.text for delta in deltas), tokens

    def score(words: list[str]) -> list[ScoredToken]:
        ends = itertools.accumulate(map(len, words))
        return [
            ScoredToken(token=word.encode(), logprob=0.0, top=(), span=(end - len(word), end))
            for word, end in zip(words, ends, strict=True)
        ]

    # A token a character: they are the content, but for a newline that no token wrote
    content, characters = read([[token] for token in score(list(text))])
    written = "".join(token.token.decode() for token in characters)
    assert written.replace("\n", "") == content.replace("\n", "")
    # Longer ones: those that hold such a character, each once, whatever comes at a time
    words = score(cut(text, points))
    places = {token.span[0] for token in characters}
    expected = [word for word in words if places.intersection(range(*word.span))]
    edges = [0, *sorted(piece % (len(words) + 1) for piece in pieces), len(words)]
    for chunks in ([words], [words[start:end] for start, end in pairwise(edges)]):
        assert read(chunks) == (content, expected)


@settings(max_examples=NUM_EXAMPLES)
@given(TEXTS, st.booleans())
def test_raw_text_stays_as_it_is(text: str, is_thinking: bool) -> None:
    reader = ReplyReader(starts_in_thinking=is_thinking, is_raw=True)
    events = [event for character in text for event in reader.push(character)]
    events += reader.finish(len(text))
    assert join(events).content == reader.message.content == text


@given(TEXTS, STOPS, st.integers(1, 20))
def test_a_stream_adds_up_to_its_last_event(text: str, stop: list[str], limit: int) -> None:
    async def ask() -> None:
        request = ChatRequest(messages=(Message("user", "x"),), stop=tuple(stop), max_tokens=limit)
        events = [event async for event in await ScriptedBackend([text]).chat(request)]
        end = events.pop()
        assert isinstance(end, ChatFinished)
        assert join(events) == end.message  # type: ignore[arg-type]
        assert end.usage.thinking_tokens <= end.usage.completion_tokens <= limit

    asyncio.run(ask())
