"""Random schemas over HTTP, as formats and as tools: every answer that is not cut validates."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import openai
import pytest

from tests.schemas import random_schema
from tests.serving import serving
from tests.tiny import make_tiny_backend

MODEL = "tiny"
NUM_UNDER_WAY = 32
MAX_TOKENS = 600
"""More than the texts of a schema have, save fractions whose digits a random model never ends."""
MAX_CUT = 0.02
"""Of the answers. A cut one proves nothing, so that there may be only a few."""
SECONDS = 600.0


@dataclass(kw_only=True)
class Tally:
    """How answers ended. `wrong` has a sentence for each that does not validate."""

    valid: int = 0
    cut: int = 0
    wrong: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A model whose text is noise: that an answer validates is the server's doing alone."""
    with serving(make_tiny_backend(context=4096, num_slots=8, max_waiting=NUM_UNDER_WAY)) as url:
        yield url


def write_format(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that demand an answer of a schema."""
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema},
        }
    }


def write_tool(schema: dict[str, Any], *, is_named: bool) -> dict[str, Any]:
    """Returns the fields that demand a call of one tool, by its name, or of any."""
    function = {"name": "tell", "parameters": schema}
    named = {"type": "function", "function": {"name": "tell"}}
    return {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": named if is_named else "required",
        "parallel_tool_calls": False,
    }


async def ask(client: openai.AsyncOpenAI, fields: dict[str, Any], is_stream: bool) -> Any:
    """Returns the text of an answer, or the arguments of its call, and its finish reason."""
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Say it."}],
        "max_tokens": MAX_TOKENS,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
    }
    if not is_stream:
        [choice] = (await client.chat.completions.create(**options, **fields)).choices
        calls = choice.message.tool_calls or ()
        text = "".join(call.function.arguments for call in calls) or choice.message.content
        return text, choice.finish_reason
    text, reason = "", None
    async for chunk in await client.chat.completions.create(**options, **fields, stream=True):
        [choice] = chunk.choices
        calls = choice.delta.tool_calls or ()
        text += "".join(call.function.arguments for call in calls) + (choice.delta.content or "")
        reason = choice.finish_reason or reason
    return text, reason


async def check_schemas(url: str, num_schemas: int) -> Tally:
    """Asks for a text and for a call of each schema; the ways of asking take turns."""
    rng = random.Random(7)
    tally = Tally()
    room = asyncio.Semaphore(NUM_UNDER_WAY)

    async def check(index: int, schema: dict[str, Any], fields: dict[str, Any]) -> None:
        sampling = {"temperature": float(index % 2), "seed": index}
        is_stream = bool(index // 2 % 2)
        async with room:
            text, reason = await ask(client, fields | sampling, is_stream)
        if reason == "length":
            tally.cut += 1
            return
        try:
            jsonschema.validate(json.loads(text), schema)
            tally.valid += 1
        except (ValueError, jsonschema.ValidationError) as error:
            tally.wrong.append(f"{schema}: {text!r} ({reason}): {error}")

    async with (
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=SECONDS
        ) as client,
        asyncio.TaskGroup() as group,
    ):
        for index in range(num_schemas):
            schema = random_schema(rng)
            group.create_task(check(index, schema, write_format(schema)))
            names = rng.sample(["a", "größe", "x y", "🍀"], 1 + rng.randrange(2))
            parameters = {
                "type": "object",
                "properties": {name: random_schema(rng, depth=1) for name in names},
                "required": names[:1],
            }
            tool = write_tool(parameters, is_named=bool(index // 4 % 2))
            group.create_task(check(index, parameters, tool))
    return tally


def check_tally(tally: Tally, num_answers: int) -> None:
    assert tally.wrong == []
    assert tally.valid + tally.cut == num_answers
    assert tally.cut <= MAX_CUT * num_answers


def test_answers_of_random_schemas_validate(server: str) -> None:
    check_tally(asyncio.run(check_schemas(server, 40)), 80)


@pytest.mark.slow
def test_answers_of_a_thousand_random_schemas_validate(server: str) -> None:
    check_tally(asyncio.run(check_schemas(server, 1000)), 2000)
