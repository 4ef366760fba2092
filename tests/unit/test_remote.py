"""The remote backend against our own server, and against one that knows the bare API only."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clover.backends.base import (
    Backend,
    CanvasShown,
    ChatEvent,
    ChatFinished,
    ChatRequest,
    ContentDelta,
    Sampling,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallStarted,
)
from clover.backends.local import LocalBackend
from clover.backends.remote import RemoteBackend
from clover.backends.scripted import ScriptedBackend
from clover.chat import Message, ToolCall
from clover.checkpoint.load import load_checkpoint, resolve_checkpoint
from clover.engine.engine import EngineConfig
from clover.errors import (
    CapacityError,
    CloverError,
    EngineClosedError,
    GenerationError,
    PromptError,
    RemoteError,
    RequestError,
)
from tests.serving import serving, wait_until

T = TypeVar("T")
SECONDS = 120.0
"""More than any of these takes on a busy machine; a stream that never ends fails here."""
SLOW = 0.02
"""Seconds per token: the long script takes minutes, far more than a test waits."""
LONG = ["word " * 20_000]
HELLO = ChatRequest(messages=(Message("user", "hello"),))
QUIET = replace(HELLO, enable_thinking=False)
TOOL = {
    "type": "function",
    "function": {
        "name": "book",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = "<tool_call>\n<function=book>\n<parameter=city>\nRome é\n</parameter>\n</function>\n</tool_call>"


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    async def in_time() -> T:
        return await asyncio.wait_for(coroutine, SECONDS)

    return asyncio.run(in_time())


async def read(backend: Backend, request: ChatRequest) -> tuple[list[ChatEvent], ChatFinished]:
    """Returns all events but the last, and the last, which is what the others add up to."""
    events = [event async for event in await backend.chat(request)]
    end = events.pop()
    assert isinstance(end, ChatFinished)
    assert join(events) == end.message
    return events, end


def join(events: Sequence[ChatEvent]) -> Message:
    names = [event.name for event in events if isinstance(event, ToolCallStarted)]
    deltas = [event for event in events if isinstance(event, ToolCallDelta)]
    calls = (
        ToolCall(name, json.loads("".join(part.text for part in deltas if part.index == index)))
        for index, name in enumerate(names)
    )
    return Message(
        "assistant",
        "".join(event.text for event in events if isinstance(event, ContentDelta)),
        "".join(event.text for event in events if isinstance(event, ThinkingDelta)) or None,
        tuple(calls),
    )


def ask(url: str, request: ChatRequest, **options: Any) -> tuple[list[ChatEvent], ChatFinished]:
    async def one() -> tuple[list[ChatEvent], ChatFinished]:
        async with RemoteBackend(url, **options) as backend:
            return await read(backend, request)

    return run(one())


def test_every_field_of_a_request_comes_through() -> None:
    call = ToolCall("book", {"city": "Rome é", "n": [1, None]})
    messages = (
        Message("system", "be brief"),
        Message("user", "hello"),
        Message("assistant", "so", "hm", (call, call)),
        Message("tool", "first"),
        Message("tool", "second"),
        Message("assistant", "", None, (call,)),
        Message("tool", "third"),
    )
    full = ChatRequest(
        messages=messages,
        tools=(TOOL,),
        tool_choice="book",
        parallel_tool_calls=False,
        sampling=Sampling(
            temperature=0.5,
            top_k=4,
            top_p=0.9,
            min_p=0.05,
            repetition_penalty=1.1,
            presence_penalty=0.1,
            frequency_penalty=0.2,
            logit_bias={11: -3.0},
            seed=7,
        ),
        policy="exact=0.7",
        block_size=16,
        thinking_budget=9,
        max_tokens=5,
        stop=("x", "y"),
        timeout=50.0,
        wants_canvas=True,
    )
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    requests = [
        full,
        replace(HELLO, timeout=50.0),
        replace(QUIET, timeout=50.0, json_schema=schema),
        replace(QUIET, timeout=50.0, json_schema={"type": "object"}),
        replace(HELLO, timeout=50.0, tools=(TOOL,), tool_choice="none"),
        replace(HELLO, timeout=50.0, tools=(TOOL,), tool_choice="required"),
        ChatRequest(raw="once", max_tokens=3, timeout=50.0),
    ]
    backend = ScriptedBackend(["yes"])
    with serving(backend, request_timeout=50.0) as url:
        for request in requests:
            ask(url, request)
    assert backend.requests == requests


TEXTS = st.lists(
    st.sampled_from(
        ["</think>", CALL, "STOP", "ST", "é🙂", "\n", " two", "<tool_call>", '"', "\\"]
    ),
    max_size=12,
).map("".join)


ASKED = st.tuples(TEXTS, st.booleans(), st.sampled_from([None, 3]), st.booleans())


@settings(max_examples=8)  # each starts a server, and asks it up to twelve times
@given(st.lists(ASKED, min_size=1, max_size=12))
def test_a_server_of_a_backend_answers_as_the_backend_does(
    asked: list[tuple[str, bool, int | None, bool]],
) -> None:
    texts = [text for text, *_ in asked]
    requests = [
        replace(
            HELLO,
            enable_thinking=is_thinking,
            max_tokens=limit,
            stop=("STOP",),
            tools=(TOOL,) if has_tools else (),
        )
        for _, is_thinking, limit, has_tools in asked
    ]

    async def answer_all(backend: Backend) -> list[ChatFinished]:
        async with backend:
            return [(await read(backend, request))[1] for request in requests]

    expected = run(answer_all(ScriptedBackend(texts)))
    with serving(ScriptedBackend(texts)) as url:
        found = run(answer_all(RemoteBackend(url)))
    assert found == [replace(end, stop=None) for end in expected]


def test_a_server_of_nano_answers_as_nano_does() -> None:
    requests = [
        replace(HELLO, messages=(Message("user", "What is 47 + 38?"),), max_tokens=80),
        replace(QUIET, tools=(TOOL,), tool_choice="book", max_tokens=60),
        ChatRequest(raw="one two", max_tokens=12),
        replace(HELLO, sampling=Sampling(temperature=1.0, seed=3), max_tokens=20),
    ]
    nano = load_checkpoint(resolve_checkpoint("clover-nano"))
    config = EngineConfig(num_slots=1)

    async def answer_here() -> list[ChatFinished]:
        async with LocalBackend(nano, model="nano", config=config) as local:
            return [(await read(local, request))[1] for request in requests]

    expected = run(answer_here())
    with serving(LocalBackend(nano, model="nano", config=config)) as url:
        for request, end in zip(requests, expected, strict=True):
            events, answer = ask(url, replace(request, wants_canvas=request.raw is None))
            assert (answer.message, answer.finish_reason) == (end.message, end.finish_reason)
            assert answer.usage.completion_tokens == end.usage.completion_tokens
            assert answer.usage.tpf > 0
            assert request.raw or any(isinstance(event, CanvasShown) for event in events)


def test_tokens_are_counted_by_asking_for_one() -> None:
    async def count(url: str) -> int:
        async with RemoteBackend(url) as backend:
            return await backend.count_tokens(
                replace(HELLO, messages=(Message("user", "one two three"),))
            )

    with serving(ScriptedBackend(LONG)) as url:
        assert run(count(url)) == 3
    with foreign([delta(content="x"), end("stop")]) as url, pytest.raises(RemoteError):
        run(count(url))


def test_draws_of_a_seed_are_as_many_seeds() -> None:
    backend = ScriptedBackend(["yes"])
    with serving(backend) as url:
        for draw in (0, 2):
            ask(url, replace(HELLO, sampling=Sampling(seed=5), draw=draw))
    assert [request.sampling.seed for request in backend.requests] == [5, 7]


def test_cancelling_closes_the_connection() -> None:
    backend = ScriptedBackend(LONG, seconds_per_token=SLOW)

    async def cancel(url: str) -> ChatFinished:
        async with RemoteBackend(url) as remote:
            stream = await remote.chat(QUIET)
            first = await anext(stream)
            assert isinstance(first, ContentDelta)
            assert (remote.load.running, backend.load.running) == (1, 1)
            stream.cancel()
            *_, last = [event async for event in stream]
            assert remote.load.running == 0
            unread = await remote.chat(QUIET)
            unread.cancel()  # nobody iterates; leaving would wait for it for ever
        assert isinstance(last, ChatFinished)
        return last

    with serving(backend, shutdown_seconds=0.0) as url:
        end = run(cancel(url))
        wait_until(lambda: backend.load.running == 0)
    assert end.finish_reason == "cancelled"
    assert end.message.content.startswith("word")


def test_a_timeout_of_the_request_cuts_the_text() -> None:
    backend = ScriptedBackend(LONG, seconds_per_token=SLOW)
    with serving(backend, shutdown_seconds=0.0) as url:
        _, cut = ask(url, replace(QUIET, timeout=0.5))
        wait_until(lambda: backend.load.running == 0)
    assert cut.finish_reason == "length"
    assert cut.message.content.startswith("word")


def test_leaving_with_an_exception_fails_the_answers_under_way() -> None:
    async def leave(url: str) -> None:
        remote = await RemoteBackend(url).__aenter__()
        stream = await remote.chat(QUIET)
        error = ZeroDivisionError()
        await remote.__aexit__(type(error), error, None)
        with pytest.raises(EngineClosedError):
            [event async for event in stream]

    with serving(ScriptedBackend(LONG, seconds_per_token=SLOW), shutdown_seconds=0.0) as url:
        run(leave(url))


def test_what_the_server_refuses_has_its_reason() -> None:
    refused: list[tuple[dict[str, Any], type[CloverError], str]] = [
        ({"model": "gpt"}, RequestError, "'gpt'.*has 'scripted'"),
        ({"api_key": "wrong"}, RemoteError, "API key.*CLOVER_API_KEY"),
    ]
    with serving(ScriptedBackend(["yes"]), api_key="right") as url:
        for options, error, said in refused:
            with pytest.raises(error, match=said):
                ask(url, HELLO, **{"api_key": "right", **options})
        with pytest.raises(RequestError, match="log-probabilities are not read"):
            ask(url, replace(HELLO, top_logprobs=2), api_key="right")
        with pytest.raises(RequestError, match="refuses the request: max_completion_tokens"):
            ask(url, replace(HELLO, max_tokens=0), api_key="right")
    with serving(ScriptedBackend(LONG, seconds_per_token=SLOW, capacity=1)) as url:

        async def fill() -> None:
            async with RemoteBackend(url) as remote:
                stream = await remote.chat(HELLO)
                with pytest.raises(CapacityError, match="try again in 1 seconds"):
                    await remote.chat(HELLO)
                stream.cancel()

        run(fill())


def test_a_server_that_is_not_there_is_said_to_be_missing() -> None:
    with serving(ScriptedBackend(["yes"])) as url:
        pass
    with pytest.raises(RemoteError, match=f"expected a server at {url}/v1.*clover serve"):
        ask(url, HELLO)
    with pytest.raises(RequestError, match="http://"):
        RemoteBackend("localhost:8000")


# A server that knows the bare API only: no thinking, no canvas, no usage, whatever is asked for


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def end(reason: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}


def call_part(index: int | None, call_id: str | None, **function: str) -> dict[str, Any]:
    return delta(tool_calls=[{"index": index, "id": call_id, "function": function}])


@contextmanager
def foreign(
    chunks: Sequence[dict[str, Any] | str],
    *,
    models: Any = ({"id": "m"},),
    bodies: list[dict[str, Any]] | None = None,
    wait: Callable[[], object] = lambda: None,
) -> Iterator[str]:
    """Yields the address of a server that answers every chat with `chunks`.

    Args:
        chunks: Objects, or lines as they are.
        models: What it lists; None: it has no list.
        bodies: Where requests are kept.
        wait: Is called before the answer ends.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404 if models is None else 200)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps({"data": models}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if bodies is not None:
                bodies.append(body)
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            for chunk in chunks:
                line = chunk if isinstance(chunk, str) else json.dumps(chunk)
                self.wfile.write(f"data: {line}\n\n".encode())
            self.wfile.flush()
            wait()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join(SECONDS)


def test_a_bare_server_gets_nothing_that_it_may_not_know() -> None:
    bodies: list[dict[str, Any]] = []
    chunks = [delta(role="assistant"), delta(content="one"), delta(content=" two"), end("stop")]
    with foreign([*chunks, "[DONE]"], bodies=bodies) as url:
        _, answer = ask(url, replace(HELLO, max_tokens=9, wants_canvas=True))
    assert answer.message == Message("assistant", "one two")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (0, 0)
    assert answer.usage.tpf == 0.0
    assert bodies == [
        {
            "model": "m",
            "messages": [{"role": "user", "content": "hello"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": 9,
        }
    ]


def test_pieces_of_calls_are_put_together_however_a_server_numbers_them() -> None:
    numbered = [
        call_part(0, "a", name="book", arguments=""),
        call_part(0, None, arguments='{"city": '),
        call_part(1, "b", name="book", arguments=""),
        call_part(0, None, arguments='"Rome"}'),
    ]
    unnumbered = [
        call_part(None, "a", name="book", arguments='{"city": "Rome"}'),
        call_part(None, "b", name="book", arguments="{}"),
    ]
    repeated = [
        call_part(0, "a", name="book", arguments='{"city": '),
        call_part(0, "a", arguments='"Rome"}'),
        call_part(0, "b", name="book", arguments="{}"),
    ]
    for chunks in (numbered, unnumbered, repeated):
        with foreign([*chunks, end("stop")]) as url:
            _, answer = ask(url, replace(HELLO, tools=(TOOL,)))
        assert answer.finish_reason == "tool_calls"
        assert answer.message.tool_calls == (
            ToolCall("book", {"city": "Rome"}),
            ToolCall("book", {}),
        )


def test_a_call_that_was_cut_is_left_out_and_one_that_is_wrong_an_error() -> None:
    chunks = [call_part(0, "a", name="book", arguments="{}"), call_part(1, "b", name="book")]
    chunks.append(call_part(1, None, arguments='{"city'))
    with foreign([*chunks, end("length")]) as url:
        _, answer = ask(url, HELLO)
        assert (answer.finish_reason, len(answer.message.tool_calls)) == ("length", 1)
    with (
        foreign([*chunks, end("tool_calls")]) as url,
        pytest.raises(GenerationError, match="not JSON"),
    ):
        ask(url, HELLO)


@pytest.mark.parametrize(
    ("chunks", "error", "said"),
    [
        ([delta(content="four")], RemoteError, "breaks off after 4 characters"),
        ([], RemoteError, "breaks off after 0"),
        ([end("content_filter")], GenerationError, "content_filter"),
        (["{"], RemoteError, "cannot be read"),
        ([{"choices": [5]}], RemoteError, "cannot be read"),
        ([{"error": {"message": "out of memory"}}], RemoteError, "out of memory"),
    ],
)
def test_an_answer_that_does_not_end_is_an_error(
    chunks: list[Any], error: type[CloverError], said: str
) -> None:
    with foreign(chunks) as url, pytest.raises(error, match=said):
        ask(url, HELLO)


def test_silence_is_given_up() -> None:
    released = threading.Event()
    try:
        with foreign([delta(content="x")], wait=released.wait) as url:
            with pytest.raises(RemoteError, match=r"silence for 0\.3 seconds"):
                ask(url, HELLO, timeout=0.3)
            released.set()
    finally:
        released.set()


def test_a_model_has_to_be_named_where_there_are_several_or_no_list() -> None:
    with foreign([end("stop")], models=[{"id": "a"}, {"id": "b"}]) as url:
        with pytest.raises(RequestError, match="found a, b; name the one"):
            ask(url, HELLO)
        ask(url, HELLO, model="b")
    with foreign([end("stop")], models=None) as url:
        with pytest.raises(RequestError, match="found none"):
            ask(url, HELLO)
        ask(url, HELLO, model="any")
    with foreign([], models=5) as url, pytest.raises(RemoteError, match="OpenAI-compatible"):
        ask(url, HELLO)


def test_a_tool_result_without_its_call_is_refused() -> None:
    lost = replace(HELLO, messages=(Message("user", "x"), Message("tool", "y")))
    with foreign([end("stop")]) as url, pytest.raises(PromptError, match="follow its call"):
        ask(url, lost)
