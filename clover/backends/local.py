"""A checkpoint on this machine: template, tokenizer, engine and parser in a row."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any, Final, Self

from clover.backends.base import (
    CanvasShown,
    ChatEvent,
    ChatFinished,
    ChatFinishReason,
    ChatRequest,
    Load,
    ScoredToken,
    Usage,
)
from clover.backends.reply import ReplyReader, find_stop
from clover.checkpoint.load import GenerationDefaults, LoadedCheckpoint
from clover.diffusion.constraint import ConstraintFactory
from clover.diffusion.generate import reserved_token_ids
from clover.diffusion.policies import (
    Autoregressive,
    CausalPolicy,
    Exact,
    Policy,
    parse_policy,
)
from clover.diffusion.requests import (
    BlockCommitted,
    CanvasUpdated,
    Finished,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    TokenLogprobs,
)
from clover.diffusion.sampling import SamplingParams
from clover.engine.async_engine import AsyncEngine, EventStream
from clover.engine.engine import Engine, EngineConfig
from clover.engine.grammar import GrammarCompiler
from clover.engine.lark import AnswerFormat, JsonSchema, Regex, ToolCalls
from clover.engine.request import EngineRequest
from clover.engine.thinking import ThinkingBudget
from clover.errors import PromptError, RequestError

_FINISH_REASONS: Final[Mapping[FinishReason, ChatFinishReason]] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "context": "length",
    "timeout": "length",
    "cancelled": "cancelled",
}
_END_THINK: Final = "</think>"
_NO_CALL: Final = Regex(pattern="(?s:.*)")  # a grammar's free text never holds a tag


def choose_sampling(asked: Mapping[str, Any], defaults: GenerationDefaults) -> SamplingParams:
    """Returns the sampling that was asked for, filled up by what the model's authors recommend.

    Without a recommendation to sample, text is greedy.
    """
    recommended: dict[str, Any] = {}
    if defaults.do_sample:
        recommended = {
            name: value
            for name, value in dataclasses.asdict(defaults).items()
            if name != "do_sample" and value is not None
        }
        recommended = {"temperature": 1.0} | recommended
    return SamplingParams(**recommended | dict(asked))


class LocalBackend:
    """Answers with a loaded checkpoint and an engine of its own.

    Args:
        checkpoint: From here on nobody else's.
        model: The name that it is served under.
        config: The engine's limits.
        policy: For requests that name none; None is `exact`, of a parent `autoregressive`.
    """

    def __init__(
        self,
        checkpoint: LoadedCheckpoint,
        *,
        model: str,
        config: EngineConfig | None = None,
        policy: Policy | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._model = model
        default = Exact() if checkpoint.config.diffusion else Autoregressive()
        self._policy = policy or default
        tokenizer = checkpoint.tokenizer
        self._engine = Engine(
            checkpoint.model,
            config,
            decode=tokenizer.decode,
            forbidden_token_ids=reserved_token_ids(checkpoint.config, len(tokenizer)),
        )
        self._serving = AsyncEngine(self._engine)
        added = (tokenizer.decode([token_id]) for token_id in tokenizer.added_token_ids)
        self._control_texts = tuple(text for text in added if text.startswith("<|"))

    @property
    def model(self) -> str:
        """The name of the model."""
        return self._model

    @property
    def load(self) -> Load:
        """How busy the engine is now."""
        scheduler = self._engine.scheduler
        return Load(running=len(scheduler.active), waiting=len(scheduler.waiting))

    async def __aenter__(self) -> Self:
        """Starts the engine's thread."""
        await self._serving.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stops the engine; see `AsyncEngine`."""
        await self._serving.__aexit__(kind, error, traceback)

    async def chat(self, request: ChatRequest) -> LocalStream:
        """Takes a request; returns the events of its answer.

        Raises:
            PromptError, TemplateError, RequestError: It cannot be answered as it is.
            CapacityError: The engine and its queue are full.
            EngineClosedError: The engine no longer serves.
        """
        # Rendering, tokenizing and compiling take milliseconds that the loop has for others
        prepared = await asyncio.to_thread(self._prepare, request)
        stream = await self._serving.submit(prepared.request)
        return LocalStream(stream, prepared, self._checkpoint)

    async def count_tokens(self, request: ChatRequest) -> int:
        """Returns how many tokens the prompt of a request has.

        Raises:
            PromptError, TemplateError: It has no prompt.
        """
        prompt = await asyncio.to_thread(self._render, request)
        return len(self._checkpoint.tokenizer.encode(prompt))

    def _prepare(self, request: ChatRequest) -> _Prepared:
        prompt = self._render(request)
        is_thinking = request.raw is None and prompt.rstrip().endswith("<think>")
        asked = dataclasses.asdict(request.sampling).items()
        policy = self._policy if request.policy is None else parse_policy(request.policy)
        if request.block_size is not None and isinstance(policy, CausalPolicy):
            raise RequestError(
                f"block_size is {request.block_size}, but the policy is autoregressive or "
                "prompt_lookup, which have no blocks; leave it out"
            )
        generation = GenerationRequest(
            prompt_ids=self._checkpoint.tokenizer.encode(prompt),
            max_tokens=request.max_tokens,
            sampling=choose_sampling(
                {name: value for name, value in asked if value is not None},
                self._checkpoint.generation,
            ),
            policy=policy,
            stop=request.stop,
            draw=request.draw,
            constraint=self._constraint(request, is_thinking=is_thinking),
            top_logprobs=request.top_logprobs,
            wants_confidence=request.wants_canvas,
        )
        return _Prepared(
            request=EngineRequest(
                generation=generation, block_size=request.block_size, timeout=request.timeout
            ),
            reader=ReplyReader(
                starts_in_thinking=is_thinking,
                tools=request.callable_tools,
                stop=request.stop,
                is_raw=request.raw is not None,
            ),
            is_thinking=is_thinking,
        )

    def _constraint(self, request: ChatRequest, *, is_thinking: bool) -> ConstraintFactory | None:
        """Returns what the text has to be, None if it is free."""
        form, answer = _answer_format(request), None
        if form is not None:
            answer = self.compiler.compile(form, starts_in_thinking=is_thinking)
        if request.thinking_budget is None:
            return answer
        tokenizer, config = self._checkpoint.tokenizer, self._checkpoint.config
        end = tokenizer.token_id(_END_THINK)
        if not is_thinking or end is None:
            raise RequestError(
                "thinking_budget needs a chat template that opens <think>, and </think> as a token "
                "of its own, found neither or one; leave it out"
            )
        # A grammar writes the empty line behind thinking itself
        gap = "" if answer else "\n\n"
        return ThinkingBudget(
            num_tokens=request.thinking_budget,
            closing=tuple(tokenizer.encode(f"\n{_END_THINK}{gap}")),
            end_token_id=end,
            vocab_size=config.vocab_size,
            eos_token_ids=frozenset(config.eos_token_ids),
            answer=answer,
        )

    def _render(self, request: ChatRequest) -> str:
        """Returns the prompt.

        Raises:
            PromptError: A text spells a control token, which the tokenizer would read as one: a
                user could speak for the system. Of a raw text that is the point.
        """
        if request.raw is not None:
            return request.raw
        try:
            said = json.dumps(
                [[message.to_dict() for message in request.messages], request.tools],
                ensure_ascii=False,
                default=dict,
            )
        except RecursionError:
            raise PromptError(
                "expected arguments that can be shown, found lists or objects hundreds of levels "
                "deep; make them flatter"
            ) from None
        if found := [text for text in self._control_texts if text in said]:
            raise PromptError(
                f"expected messages without the chat format's control tokens, found {found[0]}; "
                "write it differently"
            )
        return self._checkpoint.template.render(
            request.messages,
            tools=request.callable_tools,
            enable_thinking=request.enable_thinking,
        )

    @cached_property
    def compiler(self) -> GrammarCompiler:
        """Compiles constraints. Made with the first: reading a large vocabulary takes a second."""
        config = self._checkpoint.config
        return GrammarCompiler(
            self._checkpoint.tokenizer,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prepared:
    """A chat request in the engine's terms."""

    request: EngineRequest
    reader: ReplyReader
    is_thinking: bool  # where the prompt ends


class LocalStream:
    """The events of one answer: a `ChatStream`."""

    def __init__(
        self, stream: EventStream, prepared: _Prepared, checkpoint: LoadedCheckpoint
    ) -> None:
        """Reads the engine's events as text."""
        self._stream = stream
        self._prepared = prepared
        self._reader = prepared.reader
        self._tokenizer = checkpoint.tokenizer
        self._config = checkpoint.config
        self._decoder = checkpoint.tokenizer.stream()
        self._num_final = 0  # tokens
        self._confidences: dict[int, float] = {}  # by position on the canvas
        self._ready: deque[ChatEvent] = deque()

    def __aiter__(self) -> Self:
        """Returns the iterator."""
        return self

    async def __anext__(self) -> ChatEvent:
        """Returns the next event."""
        while not self._ready:
            match await anext(self._stream):
                case BlockCommitted(token_ids=token_ids, logprobs=logprobs):
                    self._num_final += len(token_ids)
                    self._confidences.clear()
                    if logprobs is None:
                        self._ready += self._reader.push(self._decoder.push(token_ids))
                    else:
                        self._ready += self._reader.push(*self._score(logprobs))
                case CanvasUpdated() as update if self._request.wants_confidence:
                    self._ready.append(self._show(update))
                case Finished(result=result):
                    self._finish(result)
        return self._ready.popleft()

    def cancel(self) -> None:
        """Ends the answer before the next pass; of no effect on one that has ended."""
        self._stream.cancel()

    def _score(self, logprobs: Sequence[TokenLogprobs]) -> tuple[str, list[ScoredToken]]:
        """Returns the text of the next tokens, and which of its characters each of them writes."""
        num_before, text, tokens = len(self._reader.text), "", []
        to_bytes = self._tokenizer.to_bytes
        for entry in logprobs:
            start = num_before + len(text)
            text += self._decoder.push([entry.token_id])
            end = num_before + len(text) + self._decoder.is_inside_character
            tokens.append(
                ScoredToken(
                    token=to_bytes([entry.token_id]),
                    logprob=entry.logprob,
                    top=tuple((to_bytes([token_id]), value) for token_id, value in entry.top),
                    span=(start, end),
                )
            )
        return text, tokens

    def _show(self, update: CanvasUpdated) -> CanvasShown:
        self._confidences.update(zip(update.kept, update.confidence, strict=True))
        cells = tuple(self._cells(update.canvas))
        return CanvasShown(
            cells=cells,
            confidences=tuple(self._confidences.get(position) for position in range(len(cells))),
            start=self._num_final,
            held=self._reader.held,
        )

    def _cells(self, canvas: Sequence[int]) -> Iterator[str | None]:
        """Yields the canvas up to its first end token: what lies right of it will be dropped."""
        diffusion = self._config.diffusion
        for token_id in canvas:
            if token_id in self._config.eos_token_ids:
                return
            is_mask = diffusion is not None and token_id == diffusion.mask_token_id
            yield None if is_mask else self._tokenizer.decode([token_id])

    def _finish(self, result: GenerationResult) -> None:
        reader, stats = self._reader, result.stats
        assert result.text is not None  # the engine decodes
        self._ready += reader.push(self._decoder.flush())
        self._ready += reader.finish(len(result.text))
        reason = _FINISH_REASONS[result.finish_reason]
        stop = None
        if result.finish_reason == "stop":
            found = find_stop(reader.text[len(result.text) :], self._request.stop)
            stop = found[1] if found else None
        message = reader.message
        usage = Usage(
            prompt_tokens=len(self._request.prompt_ids),
            cached_tokens=stats.cached_tokens,
            completion_tokens=stats.tokens,
            thinking_tokens=self._count_thinking(result.token_ids),
            passes=stats.passes,
            previews=stats.previews,
        )
        self._ready.append(
            ChatFinished(
                message=message,
                finish_reason="tool_calls" if reason == "stop" and message.tool_calls else reason,
                stop=stop,
                usage=usage,
                content_tokens=(
                    None if self._request.top_logprobs is None else tuple(reader.content_tokens)
                ),
            )
        )

    @property
    def _request(self) -> GenerationRequest:
        return self._prepared.request.generation

    def _count_thinking(self, token_ids: Sequence[int]) -> int:
        """Returns how many tokens it took to think, the end tag included."""
        if not self._prepared.is_thinking and self._reader.message.thinking is None:
            return 0
        end = _END_THINK.encode()
        written = b""
        for count, token_id in enumerate(token_ids, start=1):
            written += self._tokenizer.to_bytes([token_id])
            if end in written:
                return count
        return len(token_ids)


def _answer_format(request: ChatRequest) -> AnswerFormat | None:
    """Returns what the answer has to be, None if it is free."""
    if request.json_schema is not None:
        return JsonSchema(schema=request.json_schema)
    if not request.tools:
        return None
    if request.tool_choice == "none":
        return _NO_CALL
    return ToolCalls(
        tools=request.tools, choice=request.tool_choice, parallel=request.parallel_tool_calls
    )
