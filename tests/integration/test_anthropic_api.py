"""The official Anthropic client against a server whose answers are a script."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from clover.backends.base import ChatRequest, Sampling
from clover.backends.scripted import ScriptedBackend
from clover.chat import Message, ToolCall
from tests.serving import serving

THOUGHTFUL = """\
I look.
</think>

Both at once.

<tool_call>
<function=book>
<parameter=city>
Rome "é"
</parameter>
</function>
</tool_call>
<tool_call>
<function=book>
<parameter=city>
Oslo
</parameter>
</function>
</tool_call><|im_end|>"""
TOOLS: list[Any] = [
    {
        "name": "book",
        "description": "Books.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
THINKING: Any = {"type": "adaptive"}


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend([THOUGHTFUL])


@pytest.fixture
def client(backend: ScriptedBackend) -> Iterator[anthropic.Anthropic]:
    with (
        serving(backend, request_timeout=50.0) as url,
        anthropic.Anthropic(base_url=url, api_key="any", max_retries=0) as client,
    ):
        yield client


def ask(client: anthropic.Anthropic, **fields: Any) -> Any:
    defaults = {"model": "scripted", "messages": HELLO, "max_tokens": 100}
    return client.messages.create(**{**defaults, **fields})


def test_an_answer_is_thinking_text_and_tool_use(client: anthropic.Anthropic) -> None:
    message = ask(client, tools=TOOLS, thinking=THINKING)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, first, second = message.content
    assert (thinking.thinking, text.text) == ("I look.", "Both at once.")
    assert (first.input, second.input) == ({"city": 'Rome "é"'}, {"city": "Oslo"})
    assert first.id != second.id
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens > 0
    assert message.usage.input_tokens == 1


def test_a_stream_adds_up_to_the_whole_answer(client: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "thinking": THINKING}
    whole = ask(client, **fields)
    with client.messages.stream(
        model="scripted", messages=HELLO, max_tokens=100, **fields
    ) as stream:
        streamed = stream.get_final_message()
    ignored = {"id"}
    assert [block.model_dump(exclude=ignored) for block in streamed.content] == [
        block.model_dump(exclude=ignored) for block in whole.content
    ]
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_every_field_reaches_the_backend(
    client: anthropic.Anthropic, backend: ScriptedBackend
) -> None:
    ask(
        client,
        system=[{"type": "text", "text": "be brief"}],
        stop_sequences=["x"],
        tools=TOOLS,
        tool_choice={"type": "tool", "name": "book", "disable_parallel_tool_use": True},
        extra_body={
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 4,
            "policy": "exact",
            "block_size": 16,
        },
    )
    function = {
        "name": "book",
        "description": "Books.",
        "parameters": TOOLS[0]["input_schema"],
    }
    assert backend.requests == [
        ChatRequest(
            messages=(Message("system", "be brief"), Message("user", "hello")),
            tools=({"type": "function", "function": function},),
            tool_choice="book",
            parallel_tool_calls=False,
            sampling=Sampling(temperature=0.5, top_p=0.9, top_k=4),
            policy="exact",
            block_size=16,
            enable_thinking=False,
            max_tokens=100,
            stop=("x",),
            timeout=50.0,
        )
    ]


def test_a_turn_with_tool_results_is_read_in_the_order_of_the_calls(
    client: anthropic.Anthropic, backend: ScriptedBackend
) -> None:
    message = ask(client, tools=TOOLS, thinking=THINKING)
    uses = [block.id for block in message.content if block.type == "tool_use"]
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": uses[1], "content": "second"},
        {"type": "tool_result", "tool_use_id": uses[0], "content": "first"},
        {"type": "text", "text": "and now?"},
    ]
    turns = [*HELLO, {"role": "assistant", "content": message.content}]
    ask(client, messages=[*turns, {"role": "user", "content": results}], tools=TOOLS)
    _, assistant, *rest = backend.requests[-1].messages
    assert assistant.thinking == "I look."
    assert assistant.tool_calls[1] == ToolCall("book", {"city": "Oslo"})
    assert rest == [
        Message("tool", "first"),
        Message("tool", "second"),
        Message("user", "and now?"),
    ]
    with pytest.raises(anthropic.BadRequestError, match="one tool result for each call"):
        ask(client, messages=[*turns, *HELLO], tools=TOOLS)


def test_limits_and_stop_sequences_end_with_their_reason(client: anthropic.Anthropic) -> None:
    cut = ask(client, max_tokens=1)
    assert cut.stop_reason == "max_tokens"
    stopped = ask(client, thinking=THINKING, stop_sequences=["zzz", " at once"])
    assert stopped.content[-1].text == "Both"
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " at once")


def test_a_budget_of_thinking_is_kept(client: anthropic.Anthropic) -> None:
    message = ask(client, thinking={"type": "enabled", "budget_tokens": 1})
    assert [block.type for block in message.content[:2]] == ["thinking", "text"]
    assert (message.content[0].thinking, message.content[1].text) == ("I", "Both at once.")


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    turn: list[Any] = [{"role": "user", "content": "one two three"}]
    counted = client.messages.count_tokens(model="scripted", messages=turn)
    assert counted.input_tokens == 3


def test_habits_of_clients_change_nothing(
    client: anthropic.Anthropic, backend: ScriptedBackend
) -> None:
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    tool = {**TOOLS[0], **cached, "type": "custom", "strict": True, "eager_input_streaming": True}
    system = {"type": "text", "text": "be brief"}
    user = {"type": "text", "text": "hello"}
    plain = ask(client, system=[system], tools=TOOLS, thinking=THINKING)
    usual = ask(
        client,
        system=[{**system, **cached}],
        messages=[{"role": "user", "content": [{**user, **cached}]}],
        tools=[tool],
        tool_choice={"type": "auto"},
        thinking=THINKING,
        metadata={"user_id": "u"},
        service_tier="standard_only",
        extra_headers={"anthropic-beta": "interleaved-thinking-2025-05-14"},
        extra_query={"beta": "true"},
        extra_body=cached,
    )
    assert backend.requests[0] == backend.requests[1]
    assert usual.content[:2] == plain.content[:2]
    ask(client, tool_choice={"type": "none"})


def test_what_the_sdk_makes_of_a_message_may_come_back(
    client: anthropic.Anthropic, backend: ScriptedBackend
) -> None:
    message = ask(client, tools=TOOLS, thinking=THINKING)
    blocks: list[Any] = [block.model_dump() for block in message.content]
    assert "signature" in blocks[0]
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "no room", "is_error": True}
        for block in blocks[2:]
    ]
    results[1]["cache_control"] = {"type": "ephemeral"}
    turns = [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    ask(client, messages=[*HELLO, *turns], tools=TOOLS)
    _, assistant, *rest = backend.requests[-1].messages
    assert (assistant.thinking, assistant.content) == ("I look.", "Both at once.")
    assert len(assistant.tool_calls) == 2
    assert rest == [Message("tool", "no room")] * 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"metadata": {"user": "x"}}, "metadata.user"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"thinking": {"type": "disabled", "budget_tokens": 2000}}, "thinking_budget"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "{"}]}, "user's turn"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(
    client: anthropic.Anthropic, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=said) as refused:
        ask(client, **fields)
    assert refused.value.body == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": refused.value.body["error"]["message"],
        },  # type: ignore[index]
    }


def test_another_model_is_not_found(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="scripted"):
        ask(client, model="claude")
