"""The official OpenAI client against a server whose answers are a script."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from clover.backends.base import ChatRequest, Sampling
from clover.backends.scripted import ScriptedBackend
from clover.chat import Message, ToolCall
from tests.serving import serving

CALLS = """\
I look.
</think>

Both at once.

<tool_call>
<function=book>
<parameter=city>
Rome "é"
</parameter>
<parameter=days>
3
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
        "type": "function",
        "function": {
            "name": "book",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
QUIET: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
SCRIPT = ["so\n</think>\n\none two three", CALLS]


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend(SCRIPT)


@pytest.fixture
def client(backend: ScriptedBackend) -> Iterator[openai.OpenAI]:
    with (
        serving(backend, request_timeout=50.0) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "scripted", "messages": HELLO, **fields})


def join(chunks: Iterator[ChatCompletionChunk]) -> dict[int, dict[str, Any]]:
    """Returns what the chunks of each choice add up to."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            empty = {"content": "", "reasoning": "", "reasoning_content": "", "calls": []}
            whole = choices.setdefault(choice.index, empty)
            assert "finish_reason" not in whole  # nothing comes behind the end
            delta = choice.delta.model_dump()
            for key in ("content", "reasoning", "reasoning_content"):
                whole[key] += delta.get(key) or ""
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                if call.id:
                    assert call.index == len(whole["calls"])
                    whole["calls"].append([call.function.name, ""])
                whole["calls"][call.index][1] += call.function.arguments or ""
            if choice.finish_reason:
                whole["finish_reason"] = choice.finish_reason
    return choices


def test_an_answer_has_thinking_content_and_usage(client: openai.OpenAI) -> None:
    done = ask(client)
    [choice] = done.choices
    assert choice.message.content == "one two three"
    assert choice.message.reasoning == choice.message.reasoning_content == "so"
    assert choice.finish_reason == "stop"
    assert done.usage.completion_tokens == 5
    assert done.usage.completion_tokens_details.reasoning_tokens == 2
    assert done.usage.prompt_tokens_details.cached_tokens == 0
    assert done.usage.total_tokens == done.usage.prompt_tokens + 5
    assert done.usage.tpf == 1.0


def test_a_stream_adds_up_to_the_whole_answer(client: openai.OpenAI) -> None:
    for _ in SCRIPT:
        [choice] = ask(client, tools=TOOLS).choices
        for _ in SCRIPT[1:]:
            ask(client)  # the script goes round
        [streamed] = join(ask(client, tools=TOOLS, stream=True)).values()
        message = choice.message
        assert streamed["content"] == (message.content or "")
        assert streamed["reasoning"] == streamed["reasoning_content"] == message.reasoning
        assert streamed["finish_reason"] == choice.finish_reason
        calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or ()]
        assert streamed["calls"] == calls


def test_tool_calls_are_typed_and_their_arguments_json(client: openai.OpenAI) -> None:
    ask(client)
    [choice] = ask(client, tools=TOOLS).choices
    assert choice.finish_reason == "tool_calls"
    first, second = choice.message.tool_calls
    assert json.loads(first.function.arguments) == {"city": 'Rome "é"', "days": 3}
    assert json.loads(second.function.arguments) == {"city": "Oslo"}
    assert first.id != second.id


def test_every_field_reaches_the_backend(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    ask(
        client,
        messages=[
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}],
            },
        ],
        temperature=0.5,
        top_p=0.9,
        seed=7,
        max_completion_tokens=9,
        stop=["x", "y"],
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={"11": -3},
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "book"}},
        parallel_tool_calls=False,
        extra_body={
            "top_k": 4,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "policy": "exact=0.7",
            "block_size": 16,
            "chat_template_kwargs": {"enable_thinking": False},
        },
    )
    assert backend.requests == [
        ChatRequest(
            messages=(Message("system", "be brief"), Message("user", "hello")),
            tools=tuple(TOOLS),
            tool_choice="book",
            parallel_tool_calls=False,
            sampling=Sampling(
                temperature=0.5,
                top_p=0.9,
                seed=7,
                presence_penalty=0.1,
                frequency_penalty=0.2,
                logit_bias={11: -3.0},
                top_k=4,
                min_p=0.05,
                repetition_penalty=1.1,
            ),
            policy="exact=0.7",
            block_size=16,
            enable_thinking=False,
            max_tokens=9,
            stop=("x", "y"),
            timeout=50.0,
        )
    ]


def test_formats_choices_and_shorthands_reach_the_backend(
    client: openai.OpenAI, backend: ScriptedBackend
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": ["null", "string"]}}}
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    ask(client, response_format={"type": "text"}, max_tokens=3, stop="x")
    ask(client, response_format={"type": "json_object"}, extra_body={"threshold": 0.8})
    ask(client, response_format=named)
    ask(client, tools=TOOLS, tool_choice="required", extra_body={"mode": "balanced"})
    ask(client, tools=TOOLS, tool_choice="none", response_format=named)
    free, any_object, typed, required, none = backend.requests
    assert (free.json_schema, free.max_tokens, free.stop) == (None, 3, ("x",))
    assert (any_object.json_schema, any_object.policy) == ({"type": "object"}, "threshold=0.8")
    assert typed.json_schema == schema
    assert (required.tool_choice, required.parallel_tool_calls) == ("required", True)
    assert required.policy == "balanced"
    assert (none.tool_choice, none.json_schema) == ("none", schema)


def test_limits_and_stop_strings_end_with_their_reason(client: openai.OpenAI) -> None:
    [cut] = ask(client, max_tokens=3).choices
    assert (cut.message.content, cut.finish_reason) == ("one", "length")
    ask(client)
    [stopped] = ask(client, stop=" th").choices
    assert (stopped.message.content, stopped.finish_reason) == ("one two", "stop")


def test_n_answers_are_as_many_draws(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    whole = ask(client, n=4, seed=1)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [request.draw for request in backend.requests] == [0, 1, 2, 3]
    streamed = join(ask(client, n=4, stream=True))
    for choice in whole.choices:
        assert streamed[choice.index]["content"] == (choice.message.content or "")
        assert streamed[choice.index]["finish_reason"] == choice.finish_reason


def test_effort_is_a_budget_of_thinking(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    for effort in ("none", "low", "high"):
        ask(client, reasoning_effort=effort)
    ask(client, extra_body={"thinking_budget": 1})
    assert [(request.enable_thinking, request.thinking_budget) for request in backend.requests] == [
        (False, None),
        (True, 256),
        (True, None),
        (True, 1),
    ]


def test_usage_comes_last_in_a_stream_that_asks_for_it(client: openai.OpenAI) -> None:
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 5


def test_tool_results_are_put_in_the_order_of_their_calls(
    client: openai.OpenAI, backend: ScriptedBackend
) -> None:
    ask(client)
    message = ask(client, tools=TOOLS).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"{index}"}
        for index, call in enumerate(message.tool_calls)
    ]
    ask(client, messages=[*HELLO, message, *reversed(results)], tools=TOOLS)
    _, assistant, first, second = backend.requests[-1].messages
    assert assistant.thinking == "I look."
    assert assistant.tool_calls[1] == ToolCall("book", {"city": "Oslo"})
    assert (first, second) == (Message("tool", "0"), Message("tool", "1"))
    with pytest.raises(openai.BadRequestError, match="one tool result for each call"):
        ask(client, messages=[*HELLO, message, results[0]], tools=TOOLS)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"extra_body": {"tempreature": 1}}, "tempreature"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages.0.colour"),
        ({"extra_body": {"temperature": "1"}}, "temperature"),
        ({"extra_body": {"temperature": True}}, "temperature"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"stop": 5}, "stop"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"extra_body": {"chat_template_kwargs": {"style": 1}}}, "chat_template_kwargs.style"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(
    client: openai.OpenAI, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **fields)
    assert refused.value.type == "invalid_request_error"
    assert refused.value.param is not None
    assert refused.value.param.startswith(named)
    assert named in refused.value.message


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"store": True}, "store"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"extra_body": {"functions": []}}, "functions"),
        ({"extra_body": {"stream_canvas": True}}, "stream_canvas"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"extra_body": {"policy": "exact", "threshold": 0.5}}, "threshold"),
        ({"extra_body": {"policy": "exact", "mode": "fast"}}, "mode is 'fast'"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning_effort": "low", "extra_body": {"thinking_budget": 5}}, "reasoning_effort"),
        ({"extra_body": {"thinking_budget": 5} | QUIET}, "thinking_budget"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "y"}]}, "tool result"),
    ],
)
def test_what_contradicts_itself_is_refused(
    client: openai.OpenAI, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        ask(client, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "safety_identifier": "u", "metadata": {"run": "7"}},
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h"},
        {"store": False, "service_tier": "auto", "modalities": ["text"]},
        {"service_tier": "default", "extra_body": {"top_logprobs": None, "audio": None}},
        {"parallel_tool_calls": False},
        {"parallel_tool_calls": True, "tools": [], "tool_choice": "none"},
        {"tool_choice": "auto"},
        {"stream_options": {"include_usage": True, "include_obfuscation": False}},
        {"messages": [{"role": "user", "content": "hello", "name": "ann"}]},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}
                    ],
                }
            ]
        },
    ],
)
def test_habits_of_clients_change_nothing(
    client: openai.OpenAI, backend: ScriptedBackend, fields: dict[str, Any]
) -> None:
    plain = ask(client)
    ask(client)  # the script goes round
    assert ask(client, **fields).choices == plain.choices
    assert (
        replace(backend.requests[2], parallel_tool_calls=True, tool_choice="auto")
        == (backend.requests[0])
    )


def test_what_the_sdk_makes_of_a_message_may_come_back(
    client: openai.OpenAI, backend: ScriptedBackend
) -> None:
    said = ask(client).choices[0].message
    called = ask(client, tools=TOOLS).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": "done"}
        for call in called.tool_calls
    ]
    for nulls in (True, False):
        echoed = [
            {**message.model_dump(exclude_none=not nulls), "annotations": []}
            for message in (said, called)
        ]
        assert ("refusal" in echoed[0]) == nulls
        ask(client, messages=[*HELLO, echoed[0], *HELLO, echoed[1], *results], tools=TOOLS)
        _, first, _, second, *rest = backend.requests[-1].messages
        assert first == Message("assistant", "one two three", "so")
        assert second.tool_calls[1] == ToolCall("book", {"city": "Oslo"})
        assert rest == [Message("tool", "done")] * 2


def test_a_text_is_gone_on_with_as_it_is(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    done = client.completions.create(model="scripted", prompt="once", stop=" three")
    assert done.choices[0].text == "so\n</think>\n\none two"
    ask(client)
    chunks = client.completions.create(model="scripted", prompt="once", stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == SCRIPT[0]
    assert backend.requests[0].raw == "once"


def test_log_probabilities_are_those_of_the_contents_tokens(
    client: openai.OpenAI, backend: ScriptedBackend
) -> None:
    expected = ["\n\none", " two", " three"]  # each whole, also with newlines of the format
    for fields, num_top in ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 3}, 1):
        [choice] = ask(client, **fields).choices
        entries = choice.logprobs.content
        assert [entry.token for entry in entries] == expected
        assert [bytes(entry.bytes).decode() for entry in entries] == expected
        assert all(entry.logprob == 0 for entry in entries)
        assert [len(entry.top_logprobs) for entry in entries] == [num_top] * 3
        ask(client)  # the script goes round
        streamed = [
            entry
            for chunk in ask(client, stream=True, **fields)
            if chunk.choices[0].logprobs
            for entry in chunk.choices[0].logprobs.content
        ]
        assert streamed == entries
        ask(client)
    asked = [request.top_logprobs for request in backend.requests]
    assert asked == [0, None, 0, None, 3, None, 3, None]


def test_thinking_and_calls_have_no_log_probabilities(client: openai.OpenAI) -> None:
    ask(client)
    [choice] = ask(client, tools=TOOLS, logprobs=True).choices
    assert choice.message.tool_calls
    assert [entry.token for entry in choice.logprobs.content] == ["\n\nBoth", " at", " once."]
    [choice] = ask(client).choices
    assert choice.logprobs is None


def test_log_probabilities_of_a_text_say_where_each_token_stands(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "scripted", "prompt": "once", "logprobs": 0, "stop": "ree"}
    done = client.completions.create(**asked).choices[0]
    found = done.logprobs
    assert found is not None
    assert found.tokens == ["so", "\n</think>", "\n\none", " two", " three"]
    assert found.token_logprobs == [0.0] * 5
    assert found.top_logprobs == [{token: 0.0} for token in found.tokens]
    assert found.text_offset == [0, 2, 11, 16, 20]
    assert done.text == "so\n</think>\n\none two th"
    client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True))
    parts = [part for chunk in chunks if (part := chunk.choices[0].logprobs)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [item for part in parts for item in getattr(part, name) or ()]
        assert joined == getattr(found, name)


def test_models_are_listed_and_others_are_not_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["scripted"]
    with pytest.raises(openai.NotFoundError, match="scripted"):
        ask(client, model="gpt")


def test_broken_json_is_no_field_s_fault(client: openai.OpenAI) -> None:
    with httpx2.Client(timeout=None) as plain:
        answer = plain.post(
            f"{client.base_url}chat/completions",
            content=b'{"model": broken',
            headers={"content-type": "application/json"},
        )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] is None
    assert error["message"].startswith("expected a body of JSON, found at character 10: ")


def test_what_is_no_request_at_all_gets_an_error_of_the_same_shape(client: openai.OpenAI) -> None:
    url = f"{client.base_url}chat/completions"
    with httpx2.Client(timeout=None) as plain:
        bodies = [b"{", b"[]", b'"x"', b"[" * 5000, b"\xff", b""]
        answers = [plain.post(url, content=body) for body in bodies]
        answers += [plain.get(url), plain.get(f"{client.base_url}nothing")]
        surrogate = b'{"model": "\\ud800", "messages": [{"role": "user", "content": "x"}]}'
        answers.append(
            plain.post(url, content=surrogate, headers={"content-type": "application/json"})
        )
    for answer in answers:
        assert 400 <= answer.status_code < 500
        assert answer.json()["error"]["message"]
