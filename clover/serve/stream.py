"""Answers under way: started, timed, merged, cancelled when nobody listens, sent as events."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any, Final

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from clover.backends.base import (
    Backend,
    CanvasShown,
    ChatEvent,
    ChatFinished,
    ChatRequest,
    ChatStream,
    Load,
)
from clover.errors import CapacityError, CloverError, RequestError
from clover.serve.errors import CLIENT_LEFT, ApiError, from_clover_error
from clover.serve.metrics import AnswerTimer, Metrics

logger = logging.getLogger("clover.serve")

_NUM_RECENT: Final = 32  # answers whose seconds are remembered
_WAIT_BOUNDS: Final = (1, 60)  # seconds: what a client is told to wait at least, and at most
_SSE_HEADERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Service:
    """The backends as the endpoints see them.

    Attributes:
        backends: Who answers, by the names of their models, in the order in which they are listed.
        metrics: What is counted.
    """

    def __init__(self, backends: Sequence[Backend]) -> None:
        """Starts counting.

        Raises:
            RequestError: No backend, or two models of one name.
        """
        self.backends = {backend.model: backend for backend in backends}
        if not backends or len(self.backends) < len(backends):
            names = [backend.model for backend in backends]
            raise RequestError(f"expected models, each with a name of its own, found {names}")
        self.metrics = Metrics(self.backends)
        self._answers: set[Answer] = set()
        self._writing_seconds: dict[str, deque[float]] = {
            model: deque(maxlen=_NUM_RECENT) for model in self.backends
        }

    async def start(self, backend: Backend, requests: Sequence[ChatRequest]) -> list[Answer]:
        """Starts all answers, or none: one that is refused cancels the others.

        Raises:
            ApiError: There are too many already; it says when to come back.
            CloverError: As `Backend.chat` does.
        """
        answers: list[Answer] = []
        try:
            for request in requests:
                timer = self.metrics.time_answer(backend.model)
                answers.append(Answer(self, await backend.chat(request), timer))
        except BaseException as error:
            for answer in answers:
                answer.cancel()
            if isinstance(error, CapacityError):
                wait = estimate_wait(backend.load, self._writing_seconds[backend.model])
                raise ApiError(429, str(error), retry_seconds=wait) from error
            raise
        self._answers.update(answers)
        return answers

    def cut_all(self) -> None:
        """Ends every answer now; who reads it is told that the server shuts down."""
        for answer in self._answers:
            answer.cut()

    def learn(self, model: str, writing_seconds: float) -> None:
        """Says how long an answer that has ended took, from its first text."""
        self._writing_seconds[model].append(writing_seconds)

    def forget(self, answer: Answer) -> None:
        """Says that an answer has ended, or that nobody reads it any more."""
        self._answers.discard(answer)


def estimate_wait(load: Load, writing_seconds: Collection[float]) -> int:
    """Returns the seconds after which those who wait now, and one more, may have had their turn.

    Args:
        load: Of the backend; as it is full, all of its slots are running.
        writing_seconds: What recent answers took. Not their time in the queue, which is what is to
            be found; nor that of their prompts, so that it is rather too short than too long.
    """
    if not writing_seconds:
        return _WAIT_BOUNDS[0]
    mean = sum(writing_seconds) / len(writing_seconds)
    seconds = math.ceil((load.waiting + 1) * mean / max(load.running, 1))
    return min(max(seconds, _WAIT_BOUNDS[0]), _WAIT_BOUNDS[1])


class Answer:
    """One answer under way, timed and counted. An async iterator of its events."""

    def __init__(self, service: Service, stream: ChatStream, timer: AnswerTimer) -> None:
        """Reads a backend's stream."""
        self._service = service
        self._stream = stream
        self._timer = timer
        self._is_over = False

    def __aiter__(self) -> Answer:
        """Returns the iterator."""
        return self

    async def __anext__(self) -> ChatEvent:
        """Returns the next event.

        Raises:
            ApiError: The server shuts down, and has cut the answer.
            CloverError: As the backend's stream does.
        """
        event = await anext(self._stream)
        match event:
            case ChatFinished():
                self._finish(event)
            case CanvasShown():
                pass
            case _:
                self._timer.text()
        return event

    def cancel(self) -> None:
        """Ends an answer that nobody reads any more; of no effect on one that has ended."""
        self._stream.cancel()
        self._service.forget(self)
        if not self._is_over:
            self._is_over = True
            self._timer.abandon()

    def cut(self) -> None:
        """Ends an answer that is still read."""
        self._stream.cancel()

    def _finish(self, end: ChatFinished) -> None:
        self._is_over = True
        self._service.forget(self)
        self._timer.finish(end)
        self._service.learn(self._timer.model, self._timer.writing_seconds)
        usage = end.usage
        log(
            event="answer",
            model=self._timer.model,
            finish_reason=end.finish_reason,
            seconds=round(self._timer.seconds, 4),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            tpf=round(usage.tpf, 2),
        )
        if end.finish_reason == "cancelled":
            raise ApiError(503, "the server shuts down and has cut the answer; try again later")


def log(**fields: object) -> None:
    """Logs one line of JSON. Nothing that a user or a model wrote goes in here."""
    logger.info(json.dumps(fields))


async def merge(answers: Sequence[Answer]) -> AsyncIterator[tuple[int, ChatEvent]]:
    """Yields the events of all answers as they come, each with the number of its answer.

    Raises:
        ApiError, CloverError: One of them has failed.
    """
    items: asyncio.Queue[tuple[int, ChatEvent | Exception]] = asyncio.Queue()

    async def read(index: int, answer: Answer) -> None:
        try:
            async for event in answer:
                items.put_nowait((index, event))
        except Exception as error:  # raised where the events are read
            items.put_nowait((index, error))

    tasks = [asyncio.create_task(read(index, answer)) for index, answer in enumerate(answers)]
    num_open = len(tasks)
    try:
        while num_open:
            index, item = await items.get()
            if isinstance(item, Exception):
                raise item
            num_open -= isinstance(item, ChatFinished)
            yield index, item
    finally:
        for task in tasks:
            task.cancel()


async def collect(request: Request, answers: Sequence[Answer]) -> list[ChatFinished]:
    """Returns the ends of all answers, in order; a client that leaves cancels them.

    Raises:
        ApiError: The client has left, or the server shuts down.
        CloverError: An answer has failed.
    """

    async def read() -> list[ChatFinished]:
        ends = {
            index: event async for index, event in merge(answers) if isinstance(event, ChatFinished)
        }
        return [ends[index] for index in sorted(ends)]

    reading = asyncio.create_task(read())
    leaving = asyncio.create_task(_wait_until_left(request.receive))
    try:
        await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            raise ApiError(CLIENT_LEFT, "the client has left")
        return reading.result()
    finally:
        for answer in answers:
            answer.cancel()
        reading.cancel()
        leaving.cancel()


async def _wait_until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStreamResponse(StreamingResponse):
    """Server-sent events. When it ends, or the client leaves, its answers are cancelled."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], answers: Sequence[Answer], *, path: str) -> None:
        """Sends `events`, each the text of one event; an error becomes the last of them."""
        super().__init__(_end_with_error(events, path), headers=_SSE_HEADERS)
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response."""
        try:
            await super().__call__(scope, receive, send)
        finally:  # also before the first event is asked for
            for answer in self._answers:
                answer.cancel()


async def _end_with_error(events: AsyncIterator[str], path: str) -> AsyncIterator[str]:
    try:
        async for event in events:
            yield event
    except (ApiError, CloverError) as error:
        api_error = from_clover_error(error) if isinstance(error, CloverError) else error
        body = api_error.body(path)
        yield write_event(body, name=body.get("type"))


def write_event(data: Any, name: str | None = None) -> str:
    """Returns one server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {data if isinstance(data, str) else json.dumps(data)}\n\n"
