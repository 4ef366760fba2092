"""The official clients of both APIs, and a bare one, as `benchmarks.load` needs them."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx2
import openai
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.load_requests import Answer, BadRequest, Choice, Item

ANSWER_SECONDS = 300.0
"""After which an answer counts as one that never comes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """An answer, and what it took. `first_seconds` is None where it came whole."""

    answer: Answer
    num_tokens: int
    first_seconds: float | None
    seconds: float


class Clients:
    """The clients of both APIs, and a bare one, with connections of their own."""

    def __init__(self, url: str, model: str) -> None:
        """Connects to nothing yet."""
        self._model = model
        options: dict[str, Any] = {
            "api_key": "any",
            "max_retries": 0,  # what is refused is counted here
            "timeout": ANSWER_SECONDS,
        }
        self._openai = openai.AsyncOpenAI(base_url=f"{url}/v1", **options)
        self._anthropic = anthropic.AsyncAnthropic(base_url=url, **options)
        self._bare = httpx2.AsyncClient(base_url=url, timeout=ANSWER_SECONDS)

    async def __aenter__(self) -> Clients:
        """Returns itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes all connections."""
        await self._openai.close()
        await self._anthropic.close()
        await self._bare.aclose()

    async def ask(self, item: Item, *, is_stream: bool) -> Reply:
        """Returns the answer to a request.

        Raises:
            openai.APIError, anthropic.APIError: There is none.
        """
        started = time.perf_counter()
        fields = {key: value for key, value in item.body.items() if value is not None}
        messages = fields.pop("messages")
        if item.api == "openai":
            read = self._stream_openai if is_stream else self._ask_openai
        else:
            read = self._stream_anthropic if is_stream else self._ask_anthropic
        answer, num_tokens, first = await read(messages, fields)
        return Reply(
            answer=answer,
            num_tokens=num_tokens,
            first_seconds=None if first is None else first - started,
            seconds=time.perf_counter() - started,
        )

    async def send(self, bad: BadRequest) -> int:
        """Returns the status that a bad request gets."""
        head = {"content-type": "application/json"}
        response = await self._bare.post(bad.path, content=bad.content, headers=head)
        return response.status_code

    async def read_load(self) -> dict[str, float]:
        """Returns the sums of `clover_running` and `clover_waiting` over the models."""
        text = (await self._bare.get("/metrics")).text
        loads = {"clover_running": 0.0, "clover_waiting": 0.0}
        for family in text_string_to_metric_families(text):
            if family.name in loads:
                loads[family.name] = sum(sample.value for sample in family.samples)
        return loads

    async def _ask_openai(
        self, messages: Any, fields: dict[str, Any]
    ) -> tuple[Answer, int, float | None]:
        whole = await self._openai.chat.completions.create(
            model=self._model, messages=messages, extra_body=fields
        )
        choices = []
        for choice in whole.choices:
            message = choice.message
            functions = [
                call.function for call in message.tool_calls or () if call.type == "function"
            ]
            choices.append(
                Choice(
                    text=message.content or "",
                    thinking=getattr(message, "reasoning", None) or "",
                    calls=tuple((called.name, called.arguments) for called in functions),
                    finish_reason=choice.finish_reason,
                )
            )
        assert whole.usage is not None
        return tuple(choices), whole.usage.completion_tokens, None

    async def _stream_openai(
        self, messages: Any, fields: dict[str, Any]
    ) -> tuple[Answer, int, float | None]:
        stream = await self._openai.chat.completions.create(
            model=self._model,
            messages=messages,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=fields,
        )
        num_choices = fields.get("n", 1)
        texts, thoughts = [""] * num_choices, [""] * num_choices
        calls: list[list[list[str]]] = [[] for _ in range(num_choices)]
        reasons = [""] * num_choices
        num_tokens, first = 0, None
        async with stream:
            async for chunk in stream:
                num_tokens = chunk.usage.completion_tokens if chunk.usage else num_tokens
                for choice in chunk.choices:
                    index, delta = choice.index, choice.delta
                    thought = getattr(delta, "reasoning", None) or ""
                    texts[index] += delta.content or ""
                    thoughts[index] += thought
                    for part in delta.tool_calls or ():
                        assert part.function is not None
                        if part.index == len(calls[index]):
                            calls[index].append(["", ""])
                        calls[index][part.index][0] += part.function.name or ""
                        calls[index][part.index][1] += part.function.arguments or ""
                    reasons[index] = choice.finish_reason or reasons[index]
                    if first is None and (delta.content or thought or delta.tool_calls):
                        first = time.perf_counter()
        answer = tuple(
            Choice(
                text=texts[index],
                thinking=thoughts[index],
                calls=tuple((name, arguments) for name, arguments in calls[index]),
                finish_reason=reasons[index],
            )
            for index in range(num_choices)
        )
        return answer, num_tokens, first

    async def _ask_anthropic(
        self, messages: Any, fields: dict[str, Any]
    ) -> tuple[Answer, int, float | None]:
        max_tokens = fields.pop("max_tokens")
        message = await self._anthropic.messages.create(
            model=self._model, messages=messages, max_tokens=max_tokens, extra_body=fields
        )
        return (_read_message(message),), message.usage.output_tokens, None

    async def _stream_anthropic(
        self, messages: Any, fields: dict[str, Any]
    ) -> tuple[Answer, int, float | None]:
        max_tokens = fields.pop("max_tokens")
        first = None
        async with self._anthropic.messages.stream(
            model=self._model, messages=messages, max_tokens=max_tokens, extra_body=fields
        ) as stream:
            async for event in stream:
                if first is None and event.type == "content_block_delta":
                    first = time.perf_counter()
            message = await stream.get_final_message()
        return (_read_message(message),), message.usage.output_tokens, first


def _read_message(message: anthropic.types.Message) -> Choice:
    """Returns the choice that an Anthropic message is."""
    blocks = message.content
    uses = [block for block in blocks if block.type == "tool_use"]
    return Choice(
        text="".join(block.text for block in blocks if block.type == "text"),
        thinking="".join(block.thinking for block in blocks if block.type == "thinking"),
        calls=tuple((use.name, json.dumps(use.input)) for use in uses),
        finish_reason=message.stop_reason or "",
        stop=message.stop_sequence,
    )
