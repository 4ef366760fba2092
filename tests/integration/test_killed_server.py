"""What clients see when `clover serve` is killed or asked to stop while it answers them."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from clover.backends.base import ChatFinished, ChatRequest, Sampling
from clover.backends.remote import RemoteBackend
from clover.chat import Message
from clover.errors import RemoteError

REPOSITORY = Path(__file__).parents[2]
SECONDS = 300.0
"""More than anything here takes on a busy machine."""
SUM: list[Any] = [{"role": "user", "content": "What is 47 + 38?"}]
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SLOW: dict[str, Any] = {"policy": "autoregressive", "temperature": 2.0}
NEVER_ENDS: dict[str, Any] = SLOW | {"logit_bias": {"2": -100}}  # 2 is <|im_end|>
DIGITS: dict[str, Any] = {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 400}
LONG_CALL: list[Any] = [
    {
        "name": "count",
        "input_schema": {
            "type": "object",
            "properties": {"digits": DIGITS},
            "required": ["digits"],
        },
    }
]
SLOTS = 3

Ask = Callable[[], Coroutine[Any, Any, str]]


@contextmanager
def running(port: int, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Yields a server that listens; it is killed if it still runs at the end."""
    command = [sys.executable, "-m", "clover", "serve", "-m", "clover-nano", "--port", str(port)]
    with subprocess.Popen(
        [*command, "--slots", str(SLOTS), *options],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stderr is not None
        first = server.stderr.readline()
        try:
            assert json.loads(first)["event"] == "listening", first
            yield server
        finally:
            server.kill()


@pytest.fixture
def port() -> int:
    """A port that is free, and will be so again."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        number: int = taken.getsockname()[1]
        return number


class Clients:
    """Both SDKs, each with a stream and a whole answer, and the remote backend."""

    def __init__(self, url: str) -> None:
        """Connects to nothing yet."""
        options: dict[str, Any] = {"api_key": "any", "max_retries": 0, "timeout": SECONDS}
        self.url = url
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", **options)
        self.anthropic = anthropic.AsyncAnthropic(base_url=url, **options)
        self.remote = RemoteBackend(url)
        self.num_streaming = 0  # streams that have begun

    async def stream_openai(self, messages: Any, **fields: Any) -> str:
        text = ""
        stream = await self.openai.chat.completions.create(
            model="clover-nano", messages=messages, stream=True, extra_body=fields
        )
        async for chunk in self._note(stream):
            text += chunk.choices[0].delta.content or ""
        return text

    async def ask_openai(self, messages: Any, **fields: Any) -> str:
        whole = await self.openai.chat.completions.create(
            model="clover-nano", messages=messages, extra_body=fields
        )
        return whole.choices[0].message.content or ""

    async def stream_anthropic(self, messages: Any, **fields: Any) -> str:
        fields = {"max_tokens": 200} | fields
        async with self.anthropic.messages.stream(
            model="clover-nano", messages=messages, **fields
        ) as stream:
            async for _ in self._note(stream):
                pass
            return await stream.get_final_text()

    async def ask_anthropic(self, messages: Any, **fields: Any) -> str:
        fields = {"max_tokens": 200} | fields
        message = await self.anthropic.messages.create(
            model="clover-nano", messages=messages, **fields
        )
        return "".join(block.text for block in message.content if block.type == "text")

    async def ask_remote(self, messages: Any, **fields: Any) -> str:
        turns = tuple(Message(turn["role"], turn["content"]) for turn in messages)
        stream = await self.remote.chat(ChatRequest(messages=turns, **fields))
        async for event in self._note(stream):
            if isinstance(event, ChatFinished):
                return event.message.content
        raise AssertionError("a stream has ended without its end")

    async def _note(self, stream: Any) -> AsyncIterator[Any]:
        """Yields what a stream has, and counts the stream once something has come."""
        is_new = True
        async for event in stream:
            self.num_streaming += is_new
            is_new = False
            yield event

    async def wait_for_load(self, *, running: int, waiting: int) -> None:
        """Returns once so many answers are under way at the server."""
        wanted = {f'clover_running{{model="clover-nano"}} {running}.0'}
        wanted.add(f'clover_waiting{{model="clover-nano"}} {waiting}.0')
        async with httpx2.AsyncClient(timeout=SECONDS) as client:
            deadline = time.monotonic() + SECONDS
            while wanted - set((await client.get(f"{self.url}/metrics")).text.splitlines()):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)


@asynccontextmanager
async def connecting(url: str) -> AsyncIterator[Clients]:
    clients = Clients(url)
    async with clients.openai, clients.anthropic, clients.remote:
        yield clients


@contextmanager
def chatting(url: str) -> Iterator[subprocess.Popen[str]]:
    """Yields `clover chat --url` in a pipe."""
    with subprocess.Popen(
        [sys.executable, "-m", "clover", "chat", "--url", url],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as chat:
        try:
            yield chat
        finally:
            chat.kill()


def say(chat: subprocess.Popen[str], line: str) -> None:
    assert chat.stdin is not None
    chat.stdin.write(f"{line}\n")
    chat.stdin.flush()


async def start_streams(clients: Clients) -> list[asyncio.Task[str]]:
    """Returns an answer of each kind that takes every slot for a long time, all under way."""
    sampling = Sampling(temperature=2.0, logit_bias={2: -100.0})
    call = {"tools": LONG_CALL, "tool_choice": {"type": "any"}, "max_tokens": 900}
    tasks = [
        asyncio.create_task(clients.stream_openai(HELLO, **NEVER_ENDS)),
        asyncio.create_task(clients.stream_anthropic(HELLO, extra_body=SLOW, **call)),
        asyncio.create_task(clients.ask_remote(HELLO, policy="autoregressive", sampling=sampling)),
    ]
    assert len(tasks) == SLOTS
    await clients.wait_for_load(running=SLOTS, waiting=0)
    while clients.num_streaming < SLOTS:
        await asyncio.sleep(0.01)
    return tasks


async def errors_of(tasks: list[asyncio.Task[str]]) -> list[Any]:
    """Returns how tasks fail, which they have to within the time that a test has."""
    async with asyncio.timeout(SECONDS):
        return await asyncio.gather(*tasks, return_exceptions=True)


def test_who_is_answered_by_a_killed_server_gets_an_error_and_the_next_one_answers(
    port: int,
) -> None:
    url = f"http://127.0.0.1:{port}"

    async def check(chat: subprocess.Popen[str], server: subprocess.Popen[str]) -> None:
        async with connecting(url) as clients:
            tasks = await start_streams(clients)
            tasks += [
                asyncio.create_task(clients.ask_openai(HELLO)),
                asyncio.create_task(clients.ask_anthropic(HELLO)),
            ]
            say(chat, "hello")
            await clients.wait_for_load(running=SLOTS, waiting=3)
            server.kill()
            server.wait()
            streamed, uttered, remote, whole, other = await errors_of(tasks)
            assert type(streamed) is type(whole) is openai.APIConnectionError
            assert type(other) is anthropic.APIConnectionError
            # Mid-stream this SDK lets through what its transport raises
            assert isinstance(uttered, anthropic.APIConnectionError | httpx2.RemoteProtocolError)
            assert type(remote) is RemoteError
            assert "breaks off after" in str(remote)
            assert chat.stderr is not None
            assert "breaks off after 0" in await asyncio.to_thread(chat.stderr.readline)
            asks: list[Ask] = [
                lambda: clients.stream_openai(SUM),
                lambda: clients.ask_openai(SUM),
                lambda: clients.stream_anthropic(SUM, thinking={"type": "adaptive"}),
                lambda: clients.ask_anthropic(SUM, thinking={"type": "adaptive"}),
                lambda: clients.ask_remote(SUM),
            ]
            with pytest.raises(openai.APIConnectionError):  # nobody listens
                await asks[0]()
            with running(port):
                say(chat, SUM[0]["content"])
                texts = [await ask() for ask in asks]
                assert chat.stdout is not None
                texts.append(await asyncio.to_thread(chat.stdout.readline))
            assert [text.strip() for text in texts] == ["85"] * 6

    with running(port) as server, chatting(url) as chat:
        assert server.stderr is not None
        while "/v1/models" not in server.stderr.readline():  # the chat has found its model
            pass
        asyncio.run(check(chat, server))


def test_after_sigterm_nothing_new_is_taken_and_streams_end_with_an_error(port: int) -> None:
    url = f"http://127.0.0.1:{port}"

    async def check(server: subprocess.Popen[str]) -> None:
        async with connecting(url) as clients:
            tasks = await start_streams(clients)
            server.send_signal(signal.SIGTERM)
            streamed, uttered, remote = await errors_of(tasks)
            assert isinstance(streamed, openai.APIError)
            assert isinstance(uttered, anthropic.APIError)
            assert isinstance(remote, RemoteError)
            for error in (streamed, uttered, remote):
                assert "shuts down" in str(error)
            with pytest.raises(openai.APIConnectionError):
                await clients.ask_openai(SUM)

    with running(port, "--shutdown-seconds", "0.5") as server:
        asyncio.run(check(server))
        assert server.wait(SECONDS) == -signal.SIGTERM  # as whoever sent it expects
        assert server.stderr is not None
        assert "Traceback" not in server.stderr.read()
