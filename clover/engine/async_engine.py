"""An engine for callers on an asyncio loop.

    async with AsyncEngine(engine) as serving:
        stream = await serving.submit(request)
        async for event in stream:
            ...

All calls of the engine, which is not thread-safe, happen one after another on one thread of their
own. Requests are taken in between two steps, and the loop is never held up by a pass.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from clover.diffusion.requests import Event, Finished
from clover.engine.engine import Engine
from clover.engine.request import EngineEvent, EngineRequest, Failed
from clover.errors import CloverError, EngineClosedError


class EventStream:
    """One request's events as they happen, the last of them `Finished`. An async iterator.

    Raises:
        ConstraintError: While iterating: the request's constraint could not go on.
        EngineClosedError: While iterating: the engine has stopped before the end.
    """

    def __init__(self, owner: AsyncEngine) -> None:
        self._owner = owner
        self._items: asyncio.Queue[Event | CloverError] = asyncio.Queue()
        self._is_over = False  # nothing more will be put
        self._request_id: int | None = None  # until the engine has accepted it

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> Event:
        if self._is_over and self._items.empty():
            raise StopAsyncIteration
        item = await self._items.get()
        if isinstance(item, CloverError):
            raise item
        return item

    def cancel(self) -> None:
        """Ends the request; its last event says `cancelled`, unless it has ended already.

        Whoever stops iterating early should call it, or the request goes on for nobody.
        """
        if not self._is_over:
            self._owner._worker.submit(self._owner._cancel, self)


class AsyncEngine:
    """Steps an engine while it has work; to be used as an async context manager.

    Leaving it waits for the requests under way; leaving it with an exception fails them with an
    `EngineClosedError`. Either way the thread is gone then.

    Args:
        engine: From here on nobody else's.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._streams: dict[int, EventStream] = {}  # of requests that have not ended
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="clover-engine")
        self._has_changed = asyncio.Event()  # a request has come, or the end
        self._is_closed = False
        self._error: Exception | None = None  # what stopped the engine

    async def __aenter__(self) -> AsyncEngine:
        self._loop = asyncio.get_running_loop()
        self._serving = asyncio.create_task(self._serve())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_closed = True
        await self._loop.run_in_executor(self._worker, lambda: None)  # behind the last start
        if kind is not None and self._streams and not self._error:
            abandoned = list(self._streams)
            self._fail_all()
            await self._loop.run_in_executor(self._worker, self._abandon, abandoned)
        self._has_changed.set()
        await self._serving
        self._worker.shutdown()

    async def submit(self, request: EngineRequest) -> EventStream:
        """Hands a request to the engine between two steps; returns its events.

        Raises:
            PromptError, RequestError: As the plain loop does.
            CapacityError: The engine and its queue are full.
            EngineClosedError: It is closed, or an error has stopped it.
        """
        if self._is_closed:
            raise self._closed_error()
        stream = EventStream(self)
        try:
            await self._loop.run_in_executor(self._worker, self._start, request, stream)
        except asyncio.CancelledError:
            self._worker.submit(self._cancel, stream)  # behind the start, if that has begun
            raise
        if self._error:  # the step before the start has failed, and nobody serves the stream
            raise self._closed_error()
        return stream

    async def _serve(self) -> None:
        try:
            while self._streams or not self._is_closed:
                if self._streams:
                    for event in await self._loop.run_in_executor(self._worker, self._engine.step):
                        self._give_out(event)
                else:
                    self._has_changed.clear()
                    await self._has_changed.wait()
        except Exception as error:
            self._error = error
        finally:  # whatever has happened, nobody may wait for ever
            self._is_closed = True
            self._fail_all()

    def _give_out(self, event: EngineEvent) -> None:
        stream = self._streams.get(event.row)
        if stream is None:  # failed while the step ran
            return
        if isinstance(event, Finished | Failed):
            del self._streams[event.row]
            stream._is_over = True
        stream._items.put_nowait(event.error if isinstance(event, Failed) else event)

    def _fail_all(self) -> None:
        for stream in self._streams.values():
            stream._is_over = True
            stream._items.put_nowait(self._closed_error())
        self._streams.clear()

    def _closed_error(self) -> EngineClosedError:
        reason = f"stopped by an error: {self._error}" if self._error else "closed"
        error = EngineClosedError(f"expected an engine at work, found one that is {reason}")
        error.__cause__ = self._error
        return error

    # On the worker's thread

    def _start(self, request: EngineRequest, stream: EventStream) -> None:
        stream._request_id = self._engine.submit(request)
        self._streams[stream._request_id] = stream
        self._loop.call_soon_threadsafe(self._has_changed.set)

    def _cancel(self, stream: EventStream) -> None:
        if stream._request_id is not None:
            self._engine.cancel(stream._request_id)

    def _abandon(self, request_ids: list[int]) -> None:
        for request_id in request_ids:
            self._engine.cancel(request_id)
        self._engine.step()  # those that are cancelled leave; no pass is left to run
