"""Answers from a script, piece by piece: for tests, demos, and clients under development.

The script is what a model would have written, tags and all, and is read the way a model's text is.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Literal, Self

from clover.backends.base import (
    CanvasShown,
    ChatEvent,
    ChatFinished,
    ChatRequest,
    Load,
    ScoredToken,
    Usage,
)
from clover.backends.reply import ReplyReader, find_stop
from clover.errors import CapacityError, RequestError

_PIECES: Final = re.compile(r"\s*\S+|\s+")
_PASSES_PER_BLOCK: Final = 2  # the first fills every other cell


class ScriptedBackend:
    """Gives its answers in turn, from the start again after the last.

    A word with the space before it counts as a token, and each takes a pass of its own, or a block
    of them two previews. Limits, stop strings and cancellation are honoured; how tokens would be
    drawn has no meaning here. A script knows no other word than the next, whose log-probability is 0.

    Args:
        answers: As a model writes them: thinking up to `</think>` first where the request enables
            thinking, then content and calls.
        model: The name to be served under.
        seconds_per_token: How long a pass takes.
        block_size: Pieces written together, on a canvas that is shown; 1: one by one, without.
        capacity: Most answers at a time.
    """

    def __init__(
        self,
        answers: Sequence[str],
        *,
        model: str = "scripted",
        seconds_per_token: float = 0.0,
        block_size: int = 1,
        capacity: int = 256,
    ) -> None:
        if not answers:
            raise RequestError("expected at least one answer, found none")
        if block_size < 1:
            raise RequestError(f"block_size is {block_size}; allowed: 1 or more")
        self.requests: list[ChatRequest] = []  # as they came
        self.running: set[ScriptedStream] = set()
        self._answers = itertools.cycle(answers)
        self._model = model
        self._seconds_per_token = seconds_per_token
        self._block_size = block_size
        self._capacity = capacity

    @property
    def model(self) -> str:
        """The name of the model."""
        return self._model

    @property
    def load(self) -> Load:
        """How many answers are under way; none waits."""
        return Load(running=len(self.running), waiting=0)

    async def __aenter__(self) -> Self:
        """Needs no start."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leaves nothing behind: an answer goes on only while somebody reads it."""

    async def chat(self, request: ChatRequest) -> ScriptedStream:
        """Takes a request; returns the events of the next answer.

        Raises:
            PromptError: A tool is not one.
            CapacityError: As many answers are under way as there may be.
        """
        if len(self.running) >= self._capacity:
            raise CapacityError(
                f"expected fewer than {self._capacity} answers under way, found as many; try again "
                "later"
            )
        stream = ScriptedStream(
            self,
            request,
            next(self._answers),
            seconds_per_token=self._seconds_per_token,
            block_size=self._block_size,
        )
        self.requests.append(request)
        self.running.add(stream)
        return stream

    async def count_tokens(self, request: ChatRequest) -> int:
        """Returns how many pieces the texts of the request have."""
        return _count_prompt(request)


class ScriptedStream:
    """The events of one scripted answer: a `ChatStream`."""

    def __init__(
        self,
        owner: ScriptedBackend,
        request: ChatRequest,
        answer: str,
        *,
        seconds_per_token: float,
        block_size: int,
    ) -> None:
        """Starts an answer."""
        self._owner = owner
        self._request = request
        self._pieces = deque(_PIECES.findall(answer))
        self._seconds_per_token = seconds_per_token
        self._block_size = block_size
        self._deadline = None if request.timeout is None else _now() + request.timeout
        self._is_thinking = request.raw is None and request.enable_thinking
        self._reader = ReplyReader(
            starts_in_thinking=self._is_thinking,
            tools=request.callable_tools,
            stop=request.stop,
            is_raw=request.raw is not None,
        )
        self._num_tokens = 0
        self._num_thinking = 0
        self._passes = 0
        self._previews = 0
        self._ready: deque[ChatEvent] = deque()
        self._is_over = False
        self._cancelled = asyncio.Event()

    def __aiter__(self) -> Self:
        """Returns the iterator."""
        return self

    async def __anext__(self) -> ChatEvent:
        """Returns the next event."""
        while not self._ready:
            if self._is_over:
                raise StopAsyncIteration
            await self._step()
        return self._ready.popleft()

    def cancel(self) -> None:
        """Ends the answer; of no effect on one that has ended."""
        self._cancelled.set()
        self._owner.running.discard(self)

    async def _step(self) -> None:
        """Runs one more pass, or ends."""
        found = find_stop(self._reader.text, self._request.stop)
        is_late = self._deadline is not None and _now() >= self._deadline
        if self._cancelled.is_set():
            self._finish("cancelled")
        elif found:
            self._finish("stop", *found)
        elif not self._pieces:
            self._finish("stop")
        elif is_late or self._num_tokens == self._request.max_tokens:
            self._finish("length")
        else:
            if self._is_thinking and self._num_tokens == self._request.thinking_budget:
                self._close_thinking()
            try:
                await asyncio.wait_for(self._cancelled.wait(), self._seconds_per_token)
            except TimeoutError:
                self._pass()

    def _pass(self) -> None:
        """Writes a piece, or previews a block and writes it once it is whole."""
        self._passes += 1
        if self._block_size == 1:
            self._write(self._pieces.popleft())
            return
        self._previews += 1
        block = list(itertools.islice(self._pieces, self._room()))
        is_whole = self._previews % _PASSES_PER_BLOCK == 0
        if self._request.wants_canvas:
            self._ready.append(self._show(block, is_whole=is_whole))
        while is_whole and block and not find_stop(self._reader.text, self._request.stop):
            self._write(self._pieces.popleft())
            block.pop()

    def _room(self) -> int:
        """Returns how many pieces the next block may have before a limit."""
        limits = [self._block_size]
        if self._request.max_tokens is not None:
            limits.append(self._request.max_tokens - self._num_tokens)
        budget = self._request.thinking_budget
        if self._is_thinking and budget is not None and budget > self._num_tokens:
            limits.append(budget - self._num_tokens)
        return min(limits)

    def _show(self, block: list[str], *, is_whole: bool) -> CanvasShown:
        """Returns the canvas of a block: all of it, or every other cell."""
        filled = [is_whole or not position % 2 for position in range(len(block))]
        return CanvasShown(
            cells=tuple(
                piece if is_filled else None for piece, is_filled in zip(block, filled, strict=True)
            ),
            confidences=tuple(
                1 - position / (2 * len(block)) if is_filled else None
                for position, is_filled in enumerate(filled)
            ),
            start=self._num_tokens,
            held=self._reader.held,
        )

    def _close_thinking(self) -> None:
        """Replaces what is left of the thinking by its end."""
        if "</think>" in self._reader.text:
            return
        _, _, rest = "".join(self._pieces).partition("</think>")
        self._pieces = deque(["\n</think>", *_PIECES.findall(rest)])

    def _write(self, piece: str) -> None:
        self._num_tokens += 1
        if self._is_thinking and "</think>" not in self._reader.text:
            self._num_thinking += 1
        self._ready += self._reader.push(piece, self._score(piece))

    def _score(self, piece: str) -> list[ScoredToken]:
        """Returns the token of the next piece where log-probabilities are wanted."""
        if self._request.top_logprobs is None:
            return []
        start, token = len(self._reader.text), piece.encode()
        top = ((token, 0.0),) if self._request.top_logprobs else ()
        return [ScoredToken(token=token, logprob=0.0, top=top, span=(start, start + len(piece)))]

    def _finish(
        self,
        reason: Literal["stop", "length", "cancelled"],
        length: int | None = None,
        stop: str | None = None,
    ) -> None:
        reader = self._reader
        self._ready += reader.finish(len(reader.text) if length is None else length)
        self._is_over = True
        self._owner.running.discard(self)
        has_calls = bool(reader.message.tool_calls)
        usage = Usage(
            prompt_tokens=_count_prompt(self._request),
            cached_tokens=0,
            completion_tokens=self._num_tokens,
            thinking_tokens=self._num_thinking,
            passes=self._passes,
            previews=self._previews,
        )
        self._ready.append(
            ChatFinished(
                message=reader.message,
                finish_reason="tool_calls" if reason == "stop" and has_calls else reason,
                stop=stop,
                usage=usage,
                content_tokens=(
                    None if self._request.top_logprobs is None else tuple(reader.content_tokens)
                ),
            )
        )


def _now() -> float:
    return asyncio.get_running_loop().time()


def _count_prompt(request: ChatRequest) -> int:
    texts = [request.raw or "", *(message.content for message in request.messages)]
    return sum(len(_PIECES.findall(text)) for text in texts)
