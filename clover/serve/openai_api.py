"""The OpenAI API: chat completions, completions, models."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from clover.backends.base import (
    CanvasShown,
    ChatEvent,
    ChatFinished,
    ChatRequest,
    ContentDelta,
    Sampling,
    ScoredToken,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from clover.backends.reply import write_arguments
from clover.chat import Message, ToolCall
from clover.errors import PromptError
from clover.serve.chats import find_backend, get_service, make_id, order_results, read_policy
from clover.serve.document import (
    ANSWER_ERRORS,
    ChatCompletion,
    Completion,
    ModelList,
    OpenAiError,
    say_responses,
)
from clover.serve.errors import json_response
from clover.serve.schemas import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    FunctionTool,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedToolChoice,
    OpenAiDecoding,
    ResponseFormat,
)
from clover.serve.stream import Answer, EventStreamResponse, collect, merge, write_event

router = APIRouter()

_DONE: Final = "[DONE]"
# In tokens; None: no bound of its own
_BUDGETS: Final = {"minimal": 64, "low": 256, "medium": 1024, "high": None}


@router.get("/v1/models", responses=say_responses(ModelList, OpenAiError, [500]))
async def list_models(request: Request) -> Response:
    """Returns the models that are served."""
    entries = [
        {"id": model, "object": "model", "created": 0, "owned_by": "clover"}
        for model in get_service(request).backends
    ]
    return json_response({"object": "list", "data": entries})


@router.post(
    "/v1/chat/completions",
    responses=say_responses(ChatCompletion, OpenAiError, ANSWER_ERRORS, is_streamed=True),
)
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answers a chat."""
    return await _answer(body, request, _read_chat(body, request), is_chat=True)


@router.post(
    "/v1/completions",
    responses=say_responses(Completion, OpenAiError, ANSWER_ERRORS, is_streamed=True),
)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Goes on from a text."""
    asked = ChatRequest(
        raw=body.prompt,
        max_tokens=body.max_tokens,
        top_logprobs=body.logprobs,
        **_read_decoding(body, request),
    )
    return await _answer(body, request, asked, is_chat=False)


async def _answer(
    body: OpenAiDecoding, request: Request, asked: ChatRequest, *, is_chat: bool
) -> Response:
    service = get_service(request)
    backend = find_backend(body.model, service)
    requests = [replace(asked, draw=index) for index in range(body.n)]
    answers = await service.start(backend, requests)
    has_logprobs = asked.top_logprobs is not None
    writer = _Writer(backend.model, is_chat=is_chat, has_logprobs=has_logprobs)
    if body.stream:
        has_usage = body.stream_options is not None and body.stream_options.include_usage
        events = writer.stream(answers, has_usage=has_usage)
        return EventStreamResponse(events, answers, path=request.url.path)
    return json_response(writer.whole(await collect(request, answers)))


def _read_chat(body: ChatCompletionRequest, request: Request) -> ChatRequest:
    choice = body.tool_choice or "auto"
    options, effort = body.chat_template_kwargs, body.reasoning_effort
    return ChatRequest(
        messages=tuple(_read_messages(body.messages)),
        tools=tuple(map(_read_tool, body.tools or ())),
        tool_choice=choice.function.name if isinstance(choice, NamedToolChoice) else choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        json_schema=_read_format(body.response_format),
        enable_thinking=effort != "none" and (options is None or options.enable_thinking),
        thinking_budget=body.thinking_budget or _BUDGETS.get(effort or ""),
        max_tokens=body.max_completion_tokens or body.max_tokens,
        wants_canvas=body.stream_canvas,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        **_read_decoding(body, request),
    )


def _read_decoding(body: OpenAiDecoding, request: Request) -> dict[str, Any]:
    """Returns the fields of a ChatRequest that say how to decode."""
    return {
        "sampling": Sampling(
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=_read_bias(body.logit_bias),
            seed=body.seed,
        ),
        "stop": (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        "policy": read_policy(body),
        "block_size": body.block_size,
        "timeout": request.app.state.request_timeout,
    }


def _read_bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    return None if bias is None else {int(key): value for key, value in bias.items()}


def _read_format(form: ResponseFormat | None) -> dict[str, Any] | None:
    match form:
        case JsonObjectFormat():
            return {"type": "object"}
        case JsonSchemaFormat():
            return form.json_schema.schema_
        case _:
            return None


def _read_tool(tool: FunctionTool) -> dict[str, Any]:
    """Returns the tool as prompts show it; `strict` is between client and server."""
    return tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})


def _read_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Returns the turns; tool results in the order of the calls, as the chat format has no ids.

    Raises:
        PromptError: A field does not belong to its role, or a result to no call.
    """
    turns: list[Message] = []
    awaited: list[str] = []  # ids of the calls of the last assistant's turn
    results: dict[str, Message] = {}
    for message in messages:
        if message.role == "tool":
            if message.tool_call_id is None or message.tool_call_id in results:
                raise PromptError(
                    f"expected a tool_call_id of its own, found {message.tool_call_id!r}"
                )
            results[message.tool_call_id] = Message("tool", _join(message))
            continue
        turns += order_results(awaited, results)
        turns.append(_read_turn(message))
        awaited, results = [call.id for call in message.tool_calls or ()], {}
    return turns + order_results(awaited, results)


def _read_turn(message: ChatMessage) -> Message:
    if message.tool_call_id is not None:
        raise PromptError(f"tool_call_id belongs to tool results, found role {message.role!r}")
    thoughts = {message.reasoning, message.reasoning_content} - {None}
    if len(thoughts) > 1:
        raise PromptError("reasoning and reasoning_content differ; leave one out")
    calls = [call.function.model_dump() for call in message.tool_calls or ()]
    return Message(
        role="system" if message.role == "developer" else message.role,
        content=_join(message),
        thinking=thoughts.pop() if thoughts else None,
        tool_calls=tuple(map(ToolCall.from_dict, calls)),
    )


def _join(message: ChatMessage) -> str:
    content = message.content or ""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class _Writer:
    """Writes the answers to one request, whole or as a stream of chunks."""

    def __init__(self, model: str, *, is_chat: bool, has_logprobs: bool) -> None:
        prefix, name = ("chatcmpl", "chat.completion") if is_chat else ("cmpl", "text_completion")
        self._is_chat = is_chat
        self._has_logprobs = has_logprobs
        self._chunk_name = f"{name}.chunk" if is_chat else name
        self._name = name
        self._id = make_id(prefix)
        self._head = {"id": self._id, "created": int(time.time()), "model": model}

    def whole(self, ends: Sequence[ChatFinished]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                **self._result(end.message),
                "logprobs": self._logprobs(end.content_tokens or ()),
                "finish_reason": end.finish_reason,
            }
            for index, end in enumerate(ends)
        ]
        usage = _write_usage([end.usage for end in ends])
        return {**self._head, "object": self._name, "choices": choices, "usage": usage}

    async def stream(self, answers: Sequence[Answer], *, has_usage: bool) -> AsyncIterator[str]:
        if self._is_chat:
            for index in range(len(answers)):
                yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}})
        usages: list[Usage] = []
        async for index, event in merge(answers):
            if isinstance(event, ChatFinished):
                usages.append(event.usage)
                empty: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
                yield self._chunk(index, empty, event.finish_reason)
            elif isinstance(event, CanvasShown):
                canvas = {"index": index, **asdict(event)}
                body = {"object": "clover.canvas", "choices": [], "canvas": canvas}
                yield write_event(self._head | body)
            else:
                yield self._chunk(index, self._delta(event))
        if has_usage:
            body = {"object": self._chunk_name, "choices": [], "usage": _write_usage(usages)}
            yield write_event(self._head | body)
        yield write_event(_DONE)

    def _chunk(self, index: int, part: Mapping[str, Any], finish_reason: str | None = None) -> str:
        choice = {"index": index, "logprobs": None, **part, "finish_reason": finish_reason}
        return write_event({**self._head, "object": self._chunk_name, "choices": [choice]})

    def _delta(self, event: ChatEvent) -> dict[str, Any]:
        match event:
            case ContentDelta(text, tokens):
                part = {"delta": {"content": text}} if self._is_chat else {"text": text}
                return {**part, "logprobs": self._logprobs(tokens)}
            case ThinkingDelta(text):
                delta: dict[str, Any] = {"reasoning": text, "reasoning_content": text}
            case ToolCallStarted(index, name):
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": make_id("call"), "type": "function"}
                delta = {"tool_calls": [{**call, "function": function}]}
            case ToolCallDelta(index, text):
                delta = {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case _:
                raise TypeError(f"expected a delta, found {type(event).__name__}")
        return {"delta": delta}

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        """Returns the tokens of a piece of content, in the shape of the API; None if none are wanted."""
        if not self._has_logprobs:
            return None
        if self._is_chat:
            entries = [
                {
                    **_write_token(token.token, token.logprob),
                    "top_logprobs": [_write_token(*candidate) for candidate in token.top],
                }
                for token in tokens
            ]
            return {"content": entries, "refusal": None}
        return {
            "tokens": [_name_token(token.token) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [  # with the token itself, which may not be among the likeliest
                {
                    _name_token(name): value
                    for name, value in (*token.top, (token.token, token.logprob))
                }
                for token in tokens
            ],
            "text_offset": [token.span[0] for token in tokens],
        }

    def _result(self, message: Message) -> dict[str, Any]:
        if not self._is_chat:
            return {"text": message.content}
        written: dict[str, Any] = {"role": "assistant", "content": message.content or None}
        if message.thinking is not None:
            written |= {"reasoning": message.thinking, "reasoning_content": message.thinking}
        if message.tool_calls:
            written["tool_calls"] = [
                {
                    "id": make_id("call"),
                    "type": "function",
                    "function": {"name": call.name, "arguments": write_arguments(call)},
                }
                for call in message.tool_calls
            ]
        elif not message.content:
            written["content"] = ""
        return {"message": written}


def _write_token(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _name_token(token), "bytes": list(token), "logprob": logprob}


def _name_token(token: bytes) -> str:
    """Returns a token's text; the bytes of one that is part of a character, as OpenAI spells them."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _write_usage(usages: Sequence[Usage]) -> dict[str, Any]:
    """Returns what the answers to one prompt cost together; `tpf` and `passes` are ours."""
    prompt = usages[0].prompt_tokens
    completion = sum(usage.completion_tokens for usage in usages)
    passes = sum(usage.passes for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": max(usage.cached_tokens for usage in usages)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(usage.thinking_tokens for usage in usages)
        },
        "passes": passes,
        "previews": sum(usage.previews for usage in usages),
        "tpf": completion / passes if passes else 0.0,
    }
