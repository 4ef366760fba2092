"""What the server answers, as its OpenAPI document says it: bodies, errors, headers.

Answers are written by hand, in `openai_api.py` and `anthropic_api.py`; a test holds them against this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class OpenAiErrorDetail(_Answer):
    """What went wrong; `param` is the field to blame, where it is one."""

    message: str
    type: str
    param: str | None
    code: None


class OpenAiError(_Answer):
    """An error, as OpenAI's clients read it."""

    error: OpenAiErrorDetail


class AnthropicErrorDetail(_Answer):
    """What went wrong."""

    type: str
    message: str


class AnthropicError(_Answer):
    """An error, as Anthropic's clients read it."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class Health(_Answer):
    """The server answers."""

    status: Literal["ok"]


class Model(_Answer):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(_Answer):
    """All of them."""

    object: Literal["list"]
    data: list[Model]


class PromptTokens(_Answer):
    """Of the prompt's tokens, those that the prefix cache had."""

    cached_tokens: int


class CompletionTokens(_Answer):
    """Of the answer's tokens, those of thinking."""

    reasoning_tokens: int


class OpenAiUsage(_Answer):
    """What all choices cost together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens
    passes: int
    previews: int
    tpf: float


class NamedToken(_Answer):
    """A token and its log-probability, in nats."""

    token: str
    bytes: list[int]
    logprob: float


class ContentToken(NamedToken):
    """A token of the content, and the likeliest in its place."""

    top_logprobs: list[NamedToken]


class ChatLogprobs(_Answer):
    """Those of the content."""

    content: list[ContentToken]
    refusal: None


class TextLogprobs(_Answer):
    """Those of the text: lists of one length."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class AnsweredFunction(_Answer):
    """A function to call; its arguments are JSON text."""

    name: str
    arguments: str


class AnsweredCall(_Answer):
    """A call."""

    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AnsweredMessage(_Answer):
    """The assistant's turn; thinking under both of its names."""

    role: Literal["assistant"]
    content: str | None
    reasoning: str = ""
    reasoning_content: str = ""
    tool_calls: list[AnsweredCall] = Field(default_factory=list)


class ChatChoice(_Answer):
    """One of `n` answers."""

    index: int
    message: AnsweredMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(_Answer):
    """An answered chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: OpenAiUsage


class TextChoice(_Answer):
    """One of `n` texts."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(_Answer):
    """A text that went on."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: OpenAiUsage


class AnsweredThinking(_Answer):
    """Thinking."""

    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]


class AnsweredText(_Answer):
    """Text."""

    type: Literal["text"]
    text: str


class AnsweredToolUse(_Answer):
    """A call."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class AnthropicUsage(_Answer):
    """What the answer cost."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    passes: int
    tpf: float


class AnthropicAnswer(_Answer):
    """An answered chat."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredThinking | AnsweredText | AnsweredToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "tool_use", "stop_sequence"]
    stop_sequence: str | None
    usage: AnthropicUsage


class TokenCount(_Answer):
    """How many tokens a prompt has."""

    input_tokens: int


PROMPT_ERRORS: Final = (400, 404, 413, 500)
"""What a route that reads a prompt may answer instead."""

ANSWER_ERRORS: Final = (*PROMPT_ERRORS, 429, 502, 503)
"""What a route that answers one may."""

_ERRORS: Final = {
    400: "The body is not what it should be, or cannot be honoured. The message names the field.",
    401: "The API key is missing or another one.",
    404: "There is no such model.",
    413: "The body is larger than the server takes.",
    429: "All slots are taken and the queue is full.",
    500: "The server has failed.",
    502: "The server behind this one has failed.",
    503: "The server shuts down, or its engine has stopped.",
}
_EVENT: Final = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_WAIT: Final = {
    "Retry-After": {
        "description": "Seconds to wait.",
        "required": True,
        "schema": {"type": "integer", "minimum": 1},
    }
}
_KEYS: Final = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def say_responses(
    answer: type[BaseModel] | None,
    error: type[BaseModel],
    statuses: Sequence[int],
    *,
    is_streamed: bool = False,
    is_open: bool = False,
) -> dict[int | str, dict[str, Any]]:
    """Returns the responses of a route, for FastAPI's `responses`.

    Args:
        answer: The body of status 200; None: plain text.
        error: The body of every other status.
        statuses: Those that may be answered besides, 401 aside.
        is_streamed: Whether the answer may also be server-sent events.
        is_open: Whether the route never asks for a key.
    """
    content: dict[str, Any] = {}
    if is_streamed:
        content["text/event-stream"] = {"itemSchema": _EVENT}
    if answer is None:
        content["text/plain"] = {"schema": {"type": "string"}}
    succeeded: dict[str, Any] = {"description": "The answer.", "content": content}
    responses: dict[int | str, dict[str, Any]] = {
        200: succeeded if answer is None else succeeded | {"model": answer}
    }
    for status in (*statuses, *(() if is_open else (401,))):
        responses[status] = {"model": error, "description": _ERRORS[status]}
        if status in (429, 503):
            responses[status]["headers"] = _WAIT
    return responses


def correct_document(
    document: dict[str, Any], *, models: Sequence[str], asks_for_key: bool
) -> None:
    """Makes FastAPI's document that of one server, in place: its errors, its models, its keys."""
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # a wrong body is a 400 here
            needs_key = "401" in operation["responses"] and asks_for_key
            if needs_key:
                operation["security"] = [{name: []} for name in _KEYS]
            else:
                operation["responses"].pop("401", None)
    components = document["components"]
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
    for schema in components["schemas"].values():
        if schema["title"].endswith("Request"):
            schema["properties"]["model"]["enum"] = list(models)
    if asks_for_key:
        components["securitySchemes"] = _KEYS
