"""The Anthropic API: messages, and how many tokens a prompt has."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from clover.backends.base import (
    ChatEvent,
    ChatFinished,
    ChatFinishReason,
    ChatRequest,
    ContentDelta,
    Sampling,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from clover.chat import Message, Role, ToolCall
from clover.errors import PromptError
from clover.serve.chats import find_backend, get_service, make_id, order_results, read_policy
from clover.serve.document import (
    ANSWER_ERRORS,
    PROMPT_ERRORS,
    AnthropicAnswer,
    AnthropicError,
    TokenCount,
    say_responses,
)
from clover.serve.errors import json_response
from clover.serve.schemas import (
    AnthropicBlock,
    AnthropicMessage,
    AnthropicPrompt,
    AnthropicText,
    AnthropicThinking,
    AnthropicTool,
    AnthropicToolResult,
    AnthropicToolUse,
    CountTokensRequest,
    MessagesRequest,
)
from clover.serve.stream import Answer, EventStreamResponse, collect, merge, write_event

router = APIRouter()

_STOP_REASONS: Final[dict[ChatFinishReason, str]] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


@router.post(
    "/v1/messages",
    responses=say_responses(AnthropicAnswer, AnthropicError, ANSWER_ERRORS, is_streamed=True),
)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answers a chat."""
    service = get_service(request)
    backend = find_backend(body.model, service)
    asked = ChatRequest(
        **_read_prompt(body),
        sampling=Sampling(temperature=body.temperature, top_p=body.top_p, top_k=body.top_k),
        max_tokens=body.max_tokens,
        stop=tuple(body.stop_sequences or ()),
        policy=read_policy(body),
        block_size=body.block_size,
        timeout=request.app.state.request_timeout,
    )
    num_tokens = await backend.count_tokens(asked) if body.stream else 0
    answers = await service.start(backend, [asked])
    if body.stream:
        events = _stream(answers, backend.model, num_tokens)
        return EventStreamResponse(events, answers, path=request.url.path)
    [end] = await collect(request, answers)
    message = {
        **_open_message(backend.model),
        "content": list(_write_blocks(end.message)),
        **_write_stop(end),
        "usage": _write_usage(end.usage),
    }
    return json_response(message)


@router.post(
    "/v1/messages/count_tokens",
    responses=say_responses(TokenCount, AnthropicError, PROMPT_ERRORS),
)
async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
    """Says how many tokens a prompt has."""
    service = get_service(request)
    backend = find_backend(body.model, service)
    num_tokens = await backend.count_tokens(ChatRequest(**_read_prompt(body)))
    return json_response({"input_tokens": num_tokens})


def _read_prompt(body: AnthropicPrompt) -> dict[str, Any]:
    """Returns the fields of a ChatRequest that make its prompt. Thinking is off unless asked for."""
    choice = body.tool_choice
    names = {"any": "required", "tool": choice.name if choice else None}
    kind = choice.type if choice else "auto"
    return {
        "messages": tuple(_read_messages(body)),
        "tools": tuple(map(_read_tool, body.tools or ())),
        "tool_choice": names.get(kind) or kind,
        "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
        "enable_thinking": body.thinking is not None and body.thinking.type != "disabled",
        "thinking_budget": body.thinking.budget_tokens if body.thinking else None,
    }


def _read_tool(tool: AnthropicTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    given = {key: value for key, value in function.items() if value is not None}
    return {"type": "function", "function": given}


def _read_messages(body: AnthropicPrompt) -> list[Message]:
    """Returns the turns; tool results in the order of the calls, as the chat format has no ids.

    Raises:
        PromptError: A block does not belong to its role, or a result to no call.
    """
    if body.messages[-1].role == "assistant":
        raise PromptError("expected a user's turn at the end; an answer cannot be begun for it")
    turns = [Message("system", _join(body.system))] if body.system else []
    awaited: list[str] = []  # ids of the calls of the last assistant's turn
    for message in body.messages:
        blocks = _blocks(message)
        results = {
            block.tool_use_id: Message("tool", _join(block.content))
            for block in blocks
            if isinstance(block, AnthropicToolResult)
        }
        if message.role == "assistant" and results:
            raise PromptError("tool_result belongs to the user's turns, found it in an assistant's")
        turns += order_results(awaited, results)
        awaited = [block.id for block in blocks if isinstance(block, AnthropicToolUse)]
        turns += _read_turn(message.role, blocks)
    return turns


def _read_turn(role: Role, blocks: Sequence[AnthropicBlock]) -> list[Message]:
    """Returns what a turn says beside tool results: one message, or none."""
    texts = [block.text for block in blocks if isinstance(block, AnthropicText)]
    thoughts = [block.thinking for block in blocks if isinstance(block, AnthropicThinking)]
    uses = [block for block in blocks if isinstance(block, AnthropicToolUse)]
    if not (texts or thoughts or uses):
        return []
    calls = tuple(ToolCall(use.name, use.input) for use in uses)
    return [Message(role, "".join(texts), "".join(thoughts) or None, calls)]


def _blocks(message: AnthropicMessage) -> Sequence[AnthropicBlock]:
    if isinstance(message.content, str):
        return [AnthropicText(type="text", text=message.content)]
    return message.content


def _join(content: str | Sequence[AnthropicText]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _open_message(model: str) -> dict[str, Any]:
    return {
        "id": make_id("msg"),
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _write_blocks(message: Message) -> Iterator[dict[str, Any]]:
    if message.thinking is not None:
        yield {"type": "thinking", "thinking": message.thinking, "signature": ""}
    if message.content:
        yield {"type": "text", "text": message.content}
    for call in message.tool_calls:
        call_id = make_id("toolu")
        yield {"type": "tool_use", "id": call_id, "name": call.name, "input": call.arguments}


def _write_stop(end: ChatFinished) -> dict[str, Any]:
    reason = "stop_sequence" if end.stop else _STOP_REASONS[end.finish_reason]
    return {"stop_reason": reason, "stop_sequence": end.stop}


def _write_usage(usage: Usage) -> dict[str, Any]:
    """Returns what an answer cost; `passes` and `tpf` are ours."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "passes": usage.passes,
        "tpf": usage.tpf,
    }


async def _stream(
    answers: Sequence[Answer], model: str, num_prompt_tokens: int
) -> AsyncIterator[str]:
    usage = {"input_tokens": num_prompt_tokens, "output_tokens": 0}
    message = {**_open_message(model), "usage": usage}
    yield _event("message_start", message=message)
    blocks = _BlockWriter()
    async for _, event in merge(answers):
        if isinstance(event, ChatFinished):
            for line in blocks.close():
                yield line
            yield _event("message_delta", delta=_write_stop(event), usage=_write_usage(event.usage))
            yield _event("message_stop")
        else:
            for line in blocks.write(event):
                yield line


class _BlockWriter:
    """Writes deltas as blocks, one after the other."""

    def __init__(self) -> None:
        self._index = -1
        self._kind: str | None = None  # of the open block

    def write(self, event: ChatEvent) -> Iterator[str]:
        match event:
            case ThinkingDelta(text):
                yield from self._open("thinking", thinking="", signature="")
                yield self._delta("thinking_delta", thinking=text)
            case ContentDelta(text):
                yield from self._open("text", text="")
                yield self._delta("text_delta", text=text)
            case ToolCallStarted(_, name):
                yield from self.close()
                yield from self._open("tool_use", id=make_id("toolu"), name=name, input={})
            case ToolCallDelta(_, text):
                yield self._delta("input_json_delta", partial_json=text)

    def close(self) -> Iterator[str]:
        if self._kind is not None:
            self._kind = None
            yield _event("content_block_stop", index=self._index)

    def _open(self, kind: str, **fields: Any) -> Iterator[str]:
        if kind == self._kind:
            return
        yield from self.close()
        self._kind = kind
        self._index += 1
        block = {"type": kind, **fields}
        yield _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, kind: str, **fields: Any) -> str:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **fields})


def _event(name: str, **fields: Any) -> str:
    return write_event({"type": name, **fields}, name=name)
