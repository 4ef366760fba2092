"""What a chat request is, what comes back, and the Protocol of whoever answers. No tensors.

async with backend:
    stream = await backend.chat(request)
    async for event in stream:
        ...
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from clover.chat import Message
from clover.errors import RequestError

ChatFinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are drawn; None is the model's own choice.

    The fields are those of `diffusion.sampling.SamplingParams`, which checks their ranges.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """One chat, or one text, and how to go on with it.

    Attributes:
        messages: The chat so far. Exactly one of `messages` and `raw` is given.
        raw: A text to go on from as it is, without a template; the answer is content alone.
        tools: As in the OpenAI API.
        tool_choice: `auto`, `none`, `required` or the name of the tool to call. Calls satisfy the
            schemas of their tools.
        parallel_tool_calls: Whether there may be several calls.
        json_schema: What the content has to be, draft 2020-12; None leaves it free.
        sampling: How tokens are drawn.
        policy: Which predictions are kept, as `diffusion.policies.parse_policy` reads it; None is
            the backend's own.
        block_size: Tokens denoised together; None is the model's own number.
        enable_thinking: Whether the answer starts as thought.
        thinking_budget: Most tokens of thinking; it is closed then, and the answer begins. None:
            no bound of its own.
        max_tokens: Most tokens to produce, thinking included; None goes on to the context limit.
        stop: Strings that end the text, thinking included; they are not part of it.
        draw: Which of several samples with one seed this is.
        timeout: Seconds, waiting included, after which the text is cut; None: never.
        wants_canvas: Whether `CanvasShown` events are wanted.
        top_logprobs: How many of the most likely tokens are named with the log-probability of each
            token of the content, 0 to 20; None wants no log-probabilities.
    """

    messages: tuple[Message, ...] = ()
    raw: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    json_schema: Mapping[str, Any] | None = None
    sampling: Sampling = field(default_factory=Sampling)
    policy: str | None = None
    block_size: int | None = None
    enable_thinking: bool = True
    thinking_budget: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    draw: int = 0
    timeout: float | None = None
    wants_canvas: bool = False
    top_logprobs: int | None = None

    def __post_init__(self) -> None:
        if bool(self.messages) == (self.raw is not None):
            raise RequestError("expected messages or a raw text, found both or neither")
        if self.json_schema is not None and self.tools and self.tool_choice != "none":
            raise RequestError(
                "expected tools or a JSON schema of the answer, found both; leave one out, or set "
                "tool_choice to none"
            )
        if self.thinking_budget is not None and (self.raw is not None or not self.enable_thinking):
            raise RequestError(
                f"thinking_budget is {self.thinking_budget}, but nothing is thought; leave it out"
            )
        if self.thinking_budget is not None and self.thinking_budget < 1:
            raise RequestError(f"thinking_budget is {self.thinking_budget}; allowed: 1 and more")
        if not self.tools and self.tool_choice not in ("auto", "none"):
            raise RequestError(f"tool_choice is {self.tool_choice!r}, but there are no tools")

    @property
    def callable_tools(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that may be called."""
        return () if self.tool_choice == "none" else self.tools


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What one answer cost. A number that a remote server does not say is 0.

    Attributes:
        prompt_tokens: Of the rendered prompt.
        cached_tokens: Those of them that a prefix cache had.
        completion_tokens: Produced, thinking and the end token included.
        thinking_tokens: Produced up to the end of thinking.
        passes: Forward passes that served the answer.
        previews: Those of them that previewed its canvas.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    thinking_tokens: int
    passes: int
    previews: int

    @property
    def tpf(self) -> float:
        """Tokens per forward pass; 0 without a pass, or where their number is not known."""
        return self.completion_tokens / self.passes if self.passes else 0.0


@dataclass(frozen=True, slots=True)
class ThinkingDelta:
    """`text` is appended to the thinking."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredToken:
    """A token of the text and its log-probability, whose definition is the backend's.

    Attributes:
        token: Its bytes, which may be less than a character.
        logprob: In nats.
        top: The most likely tokens in its place, by their bytes, with their log-probabilities.
        span: The characters of the whole text that it writes, alone or with its neighbours: the
            first, and the one behind the last.
    """

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]
    span: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """`text` is appended to the content.

    `tokens`, where log-probabilities are wanted, are those that write a part of `text` and of no
    content before it.
    """

    text: str
    tokens: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """Call number `index` (from 0) of the function `name` begins."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """`text` is appended to the JSON text of the arguments of call number `index`."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CanvasShown:
    """The canvas after a pass, for display: nothing of it is final.

    Attributes:
        cells: The text of each token, None where it is still a mask.
        confidences: Of each cell, how probable the model found its first choice in the pass that
            filled it, 0..1; None for masks and for what a grammar had laid out before.
        start: How many tokens of the answer are final, and stand before the canvas.
        held: Their text that no delta has given out yet: a call that is not whole, or what a tag or
            a stop string may begin with.
    """

    cells: tuple[str | None, ...]
    confidences: tuple[float | None, ...]
    start: int
    held: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatFinished:
    """The end, and the last event.

    Attributes:
        message: What the deltas add up to.
        finish_reason: `length` is any limit: tokens, context or time.
        stop: The stop string that ended the text, None if none did.
        usage: What it cost.
        content_tokens: What the deltas' `tokens` add up to; None where none were wanted.
    """

    message: Message
    finish_reason: ChatFinishReason
    stop: str | None
    usage: Usage
    content_tokens: tuple[ScoredToken, ...] | None = None


ChatDeltaEvent = ThinkingDelta | ContentDelta | ToolCallStarted | ToolCallDelta
ChatEvent = ChatDeltaEvent | CanvasShown | ChatFinished


class ChatStream(Protocol):
    """The events of one answer, the last of them `ChatFinished`.

    Raises:
        ConstraintError: While iterating: what was demanded of the answer cannot be written.
        GenerationError: While iterating: the answer cannot go on.
        EngineClosedError: While iterating: the backend has stopped before the end.
        RemoteError: While iterating: the server behind it has failed or broken off.
    """

    def __aiter__(self) -> AsyncIterator[ChatEvent]:
        """Returns the iterator."""
        ...

    async def __anext__(self) -> ChatEvent:
        """Returns the next event."""
        ...

    def cancel(self) -> None:
        """Ends the answer before the next pass; its last event says `cancelled`.

        Whoever stops iterating early has to call it. Of no effect on one that has ended.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """How busy a backend is, in requests."""

    running: int
    waiting: int


class Backend(Protocol):
    """Answers chats; to be used as an async context manager, in which it serves."""

    @property
    def model(self) -> str:
        """The name of the model."""
        ...

    @property
    def load(self) -> Load:
        """How busy it is now."""
        ...

    async def __aenter__(self) -> Self:
        """Starts to serve."""
        ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Waits for the answers under way, or fails them if an exception leaves the context."""
        ...

    async def chat(self, request: ChatRequest) -> ChatStream:
        """Takes a request; returns the events of its answer.

        Raises:
            PromptError, TemplateError, RequestError: It cannot be answered as it is.
            CapacityError: There are too many requests; try again later.
            EngineClosedError: The backend no longer serves.
            RemoteError: The server behind it cannot be reached, or fails.
        """
        ...

    async def count_tokens(self, request: ChatRequest) -> int:
        """Returns how many tokens the prompt of a request has.

        Raises:
            PromptError, TemplateError: It has no prompt.
        """
        ...
