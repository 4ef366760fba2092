"""The bodies that clients send, field by field. What is not here is refused by its name.

Fields that clients send by habit, and whose neglect changes no text, are marked "Without effect", and
listed in `docs/serving.md`. They are accepted only with values that ask for nothing.

Source: the OpenAI and Anthropic API references. JSON null means the same as a field left out.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

MAX_CHOICES = 64
"""Most answers to one request: each takes a slot of the engine."""


MAX_BLOCK_SIZE = 256
"""Widest canvas: requests that share a pass are padded to it."""

# Stop strings are looked for after each pass.
MAX_STOPS = 16
MAX_STOP_LENGTH = 256  # characters
MAX_BIASES = 1024

_MAX_LEVELS: Final = 100


def _check_json(value: dict[str, Any]) -> dict[str, Any]:
    """Refuses what Python's JSON reader lets through and no one can write."""
    level: list[Any] = [value]
    for _ in range(_MAX_LEVELS):
        inner: list[Any] = []
        for part in level:
            if isinstance(part, dict):
                inner += [*part.keys(), *part.values()]
            elif isinstance(part, list):
                inner += part
            elif isinstance(part, float) and not math.isfinite(part):
                raise ValueError(f"expected finite numbers, found {part}")
            elif isinstance(part, str) and not _is_text(part):
                raise ValueError("expected Unicode text, found half of a surrogate pair")
        if not inner:
            return value
        level = inner
    raise ValueError(f"expected at most {_MAX_LEVELS} levels of lists and objects, found more")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_false(value: bool) -> bool:
    if value:
        raise ValueError("only false is supported; leave it out")
    return value


No = Annotated[bool, AfterValidator(_check_false), Field(json_schema_extra={"const": False})]
"""False and nothing else: a `Literal[False]` would take 0, which equals it."""

JsonObject = Annotated[dict[str, Any], AfterValidator(_check_json)]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]


def _number(least: float, most: float | None = None, **more: Any) -> Any:
    """Returns a field whose range the document shows, and `SamplingParams` checks."""
    bounds: dict[str, Any] = {"minimum": least, **({} if most is None else {"maximum": most})}
    return Field(None, json_schema_extra=bounds, **more)


StopString = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]


class _Body(BaseModel):
    """Strict: a number in quotes is not a number, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Returns the model's JSON schema, in which null is what `_drop_nulls` makes of it."""
        schema = handler(core_schema)
        model = handler.resolve_ref_schema(schema)
        model["additionalProperties"] = {"type": "null"}
        for name, part in model.get("properties", {}).items():
            if name not in model.get("required", ()) and {"type": "null"} not in part.get(
                "anyOf", ()
            ):
                model["properties"][name] = {"anyOf": [part, {"type": "null"}]}
        return schema


class CacheControl(_Body):
    """Without effect: what can be taken from the prefix cache always is."""

    type: Literal["ephemeral"]
    ttl: str | None = None


class TextPart(_Body):
    """A piece of text; images and sound are refused."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


Text = str | list[TextPart]


class CalledFunction(_Body):
    """A function that an earlier turn called."""

    name: str
    arguments: str = "{}"  # JSON


class MessageToolCall(_Body):
    """A tool call of an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # as it stands in streamed deltas, which some clients send back


class ChatMessage(_Body):
    """One turn. Thinking may come back under either of its names.

    Without effect: `name`, for which the chat format has no place, and `annotations`, the sources of
    an answer that another server gave.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    annotations: list[JsonObject] | None = None


class Function(_Body):
    """A function that may be called. Calls satisfy `parameters` whatever `strict` says."""

    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class FunctionTool(_Body):
    """A tool that may be called."""

    type: Literal["function"]
    function: Function


class FunctionName(_Body):
    """Names a function."""

    name: str


class NamedToolChoice(_Body):
    """Demands calls of one tool."""

    type: Literal["function"]
    function: FunctionName


class TextFormat(_Body):
    """A free answer."""

    type: Literal["text"]


class JsonObjectFormat(_Body):
    """An answer that is a JSON object."""

    type: Literal["json_object"]


class NamedSchema(_Body):
    """A JSON Schema, draft 2020-12. Answers satisfy it whatever `strict` says."""

    name: str
    description: str | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(_Body):
    """An answer that satisfies a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class StreamOptions(_Body):
    """What a stream holds besides its deltas. An answer that is not streamed always has its usage."""

    include_usage: bool = False
    include_obfuscation: No = False


class ChatTemplateOptions(_Body):
    """What the chat template is told."""

    enable_thinking: bool = True


Mode = Literal["fast", "balanced", "exact"]


class Decoding(_Body):
    """What every way of asking has in common. None: the model's own choice."""

    model: str
    temperature: float | None = _number(0, 100)
    top_p: float | None = _number(0, 1)
    top_k: int | None = _number(0)
    stream: bool = False
    policy: str | None = Field(
        None,
        description="exact[=0..1], relaxed[=nats], threshold[=0..1], entropy_bound[=nats], "
        "prompt_lookup[=tokens], autoregressive",
        json_schema_extra={"pattern": "^[a-z_]+(=[0-9.]+)?$"},
    )
    threshold: float | None = _number(0, 1, description="Short for policy threshold=X.")
    mode: Mode | None = Field(None, description="A policy that we recommend.")
    block_size: int | None = Field(None, ge=1, le=MAX_BLOCK_SIZE)


class OpenAiHabits(_Body):
    """Without effect: labels of a request, and the defaults of services that are not offered."""

    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    metadata: dict[str, str] | None = None
    store: No | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = None


class OpenAiDecoding(Decoding, OpenAiHabits):
    """What both OpenAI ways of asking have in common."""

    min_p: float | None = _number(0, 1)
    repetition_penalty: float | None = _number(0.01, 100)
    presence_penalty: float | None = _number(-2, 2)
    frequency_penalty: float | None = _number(-2, 2)
    logit_bias: dict[TokenId, float] | None = Field(None, max_length=MAX_BIASES)
    seed: int | None = _number(-(2**63), 2**63 - 1)
    max_tokens: int | None = Field(None, ge=1)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stream_options: StreamOptions | None = None


class ChatCompletionRequest(OpenAiDecoding):
    """The body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: ChatTemplateOptions | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    thinking_budget: int | None = Field(None, ge=1, description="Most tokens of thinking.")
    logprobs: bool = Field(False, description="Whether to tell those of the content's tokens.")
    top_logprobs: int | None = Field(None, ge=0, le=20)
    stream_canvas: bool = Field(
        False, description="Also stream what the canvas holds after each pass, not final."
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> ChatCompletionRequest:
        if self.stream_canvas and not self.stream:
            raise ValueError("stream_canvas has no meaning without stream; leave it out")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs has no meaning without logprobs; leave it out")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise ValueError("max_tokens and max_completion_tokens differ; leave one out")
        if self.reasoning_effort and (self.thinking_budget or self.chat_template_kwargs):
            raise ValueError(
                "reasoning_effort stands for a thinking_budget and enable_thinking; leave one out"
            )
        if not self.tools and self.tool_choice not in (None, "auto", "none"):
            raise ValueError("tool_choice demands a call, and there are no tools; leave it out")
        return self


class CompletionRequest(OpenAiDecoding):
    """The body of `POST /v1/completions`: one text, to go on from as it is."""

    prompt: str
    logprobs: int | None = Field(
        None, ge=0, le=5, description="How many of the most likely tokens to name with each token."
    )


class AnthropicText(_Body):
    """A piece of text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: list[JsonObject] | None = None  # without effect: sources of an earlier answer


class AnthropicThinking(_Body):
    """Thinking of an earlier turn. Without effect: the signature, which this server leaves empty."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class DirectCaller(_Body):
    """Without effect: says that the model has called a tool itself, as it always does here."""

    type: Literal["direct"]


class AnthropicToolUse(_Body):
    """A tool call of an earlier turn."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject
    cache_control: CacheControl | None = None
    caller: DirectCaller | None = None


class AnthropicToolResult(_Body):
    """What a tool call of the turn before gave.

    Without effect: `is_error`, for which the chat format has no place; the content says it.
    """

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[AnthropicText] = ""
    is_error: bool | None = None
    cache_control: CacheControl | None = None


AnthropicBlock = Annotated[
    AnthropicText | AnthropicThinking | AnthropicToolUse | AnthropicToolResult,
    Field(discriminator="type"),
]


class AnthropicMessage(_Body):
    """One turn."""

    role: Literal["user", "assistant"]
    content: str | list[AnthropicBlock]


class AnthropicTool(_Body):
    """A tool that may be called. Calls satisfy `input_schema` whatever `strict` says.

    Without effect: `eager_input_streaming`, as the input of a call is sent once it is whole.
    """

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    cache_control: CacheControl | None = None


class AnthropicToolChoice(_Body):
    """Which tools may or must be called."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check_name(self) -> AnthropicToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("tool_choice has a name if its type is tool, and else none")
        return self


class AnthropicThinkingOption(_Body):
    """Whether the answer starts as thought, and for how many tokens at most."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=1)


class AnthropicPrompt(_Body):
    """What a prompt is made of."""

    model: str
    messages: list[AnthropicMessage] = Field(min_length=1)
    system: str | list[AnthropicText] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: AnthropicThinkingOption | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> AnthropicPrompt:
        if self.tool_choice and self.tool_choice.type in ("any", "tool") and not self.tools:
            raise ValueError("tool_choice demands a call, and there are no tools; leave it out")
        return self


class AnthropicMetadata(_Body):
    """Without effect: who asks."""

    user_id: str | None = None


class MessagesRequest(Decoding, AnthropicPrompt):
    """The body of `POST /v1/messages`."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[StopString] | None = Field(None, max_length=MAX_STOPS)
    metadata: AnthropicMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


class CountTokensRequest(AnthropicPrompt):
    """The body of `POST /v1/messages/count_tokens`."""
