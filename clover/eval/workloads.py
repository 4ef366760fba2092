"""What a benchmark asks: held-out tasks with short and with long answers, and an agent's turns."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from clover.chat import Message, ToolCall, render_reply
from clover.checkpoint.load import LoadedCheckpoint
from clover.tasks import Task
from clover.tasks.domains import draw_domain
from clover.tasks.tools import ACTIONS, draw_tool
from clover.train.answers import draw_items

_RECORD_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_record",
        "description": "Returns the record with this id.",
        "parameters": {
            "type": "object",
            "properties": {"id": {"type": "integer"}},
            "required": ["id"],
        },
    },
}
_TRACE_SEED = 1
_TRACE_TOKENS = 4096
_REPLY_ROOM = 64  # of a context, for the last turn's answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A task and the prompt that asks it."""

    task: Task
    prompt_ids: tuple[int, ...]


def draw_workloads(
    checkpoint: LoadedCheckpoint, num_items: int, families: Sequence[str]
) -> dict[str, list[Item]]:
    """Returns `num_items` held-out items of each workload, always the same ones.

    "short" is the half whose reference replies have fewer tokens, "long" the other.
    """
    tasks = list(islice(draw_items("heldout", families), 2 * num_items))
    tasks.sort(key=lambda task: _reply_length(checkpoint, task))
    items = [Item(task=task, prompt_ids=_encode_prompt(checkpoint, task)) for task in tasks]
    return {"short": items[:num_items], "long": items[num_items:]}


def draw_trace(checkpoint: LoadedCheckpoint, num_turns: int) -> list[tuple[int, ...]]:
    """Returns the prompts of one agent's turns: each begins with the whole of the one before it.

    The agent fetches records one by one. Its history has the right calls whatever a model answers, so
    that all models are asked the same. It has as many other tools as leave room for the turns, in the
    model's context and in `_TRACE_TOKENS`: an agent's tools are most of its prompt.
    """
    rng = random.Random(_TRACE_SEED)
    ids = rng.sample(range(100, 1000), num_turns)
    messages = [Message("user", content=f"Get the records {', '.join(map(str, ids))}.")]
    for record_id in ids[:-1]:
        call = ToolCall("get_record", {"id": record_id})
        messages.append(Message("assistant", tool_calls=(call,)))
        result = f'{{"id": {record_id}, "count": {rng.randrange(1000)}}}'
        messages.append(Message("tool", content=result))

    def encode(num_messages: int, tools: Sequence[dict[str, Any]]) -> tuple[int, ...]:
        text = checkpoint.template.render(
            messages[:num_messages], tools=tools, enable_thinking=False
        )
        return tuple(checkpoint.tokenizer.encode(text))

    context = checkpoint.config.max_position_embeddings
    most = min(_TRACE_TOKENS, context - _REPLY_ROOM)
    tools = {"get_record": _RECORD_TOOL}
    more = tools
    while len(encode(len(messages), [*more.values()])) <= most:
        tools = more
        other = draw_tool(rng, draw_domain(rng, "seen"), rng.choice(ACTIONS))
        more = {other.name: other.schema(rng)} | tools
    return [encode(1 + 2 * turn, [*tools.values()]) for turn in range(num_turns)]


def _encode_prompt(checkpoint: LoadedCheckpoint, task: Task) -> tuple[int, ...]:
    text = checkpoint.template.render(
        task.messages, tools=task.tools, enable_thinking=task.enable_thinking
    )
    return tuple(checkpoint.tokenizer.encode(text))


def _reply_length(checkpoint: LoadedCheckpoint, task: Task) -> int:
    reply = render_reply(task.reply, enable_thinking=task.enable_thinking)
    return len(checkpoint.tokenizer.encode(reply))
