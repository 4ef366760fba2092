"""Streams of events on an asyncio loop: order, cancellation, refusal, and every way to stop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest
import torch

from clover.diffusion.generate import generate_all
from clover.diffusion.policies import Autoregressive, Exact, Policy, Threshold
from clover.diffusion.requests import BlockCommitted, Finished, GenerationRequest, GenerationResult
from clover.engine.async_engine import AsyncEngine, EventStream
from clover.engine.engine import Engine, EngineConfig
from clover.engine.request import EngineRequest
from clover.errors import CapacityError, EngineClosedError, GenerationError, PromptError
from clover.model.transformer import CloverForCausalLM

SECONDS = 120.0
"""More than any of these takes on a busy machine; a stream that never ends fails here."""


def make_request(policy: Policy | None = None, max_tokens: int | None = 12) -> EngineRequest:
    return EngineRequest(
        generation=GenerationRequest(
            prompt_ids=(5, 9, 12), max_tokens=max_tokens, policy=policy or Threshold(threshold=0.5)
        )
    )


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    async def in_time() -> None:
        await asyncio.wait_for(coroutine, SECONDS)

    asyncio.run(in_time())


async def read(stream: EventStream) -> GenerationResult:
    """Returns a stream's result, which is its last event and what the others add up to."""
    final: list[int] = []
    result = None
    async for event in stream:
        assert result is None
        match event:
            case BlockCommitted():
                final += event.token_ids
            case Finished():
                result = event.result
    assert result is not None
    assert tuple(final) == result.token_ids
    return result


def test_concurrent_streams_get_the_plain_loops_answers(lively_model: CloverForCausalLM) -> None:
    requests = [
        make_request(policy, max_tokens)
        for policy in (Threshold(threshold=0.5), Exact(), Autoregressive())
        for max_tokens in (3, 17)
    ]

    async def serve() -> None:
        async with AsyncEngine(Engine(lively_model, EngineConfig(num_slots=4))) as engine:

            async def ask(request: EngineRequest) -> GenerationResult:
                return await read(await engine.submit(request))

            results = await asyncio.gather(*map(ask, requests))
            again = await ask(requests[0])  # after it has idled
        expected = generate_all(lively_model, [request.generation for request in requests])
        assert [r.token_ids for r in results] == [r.token_ids for r in expected]
        assert again.token_ids == expected[0].token_ids

    run(serve())


def test_a_cancelled_stream_ends_with_what_is_final(lively_model: CloverForCausalLM) -> None:
    async def serve() -> None:
        async with AsyncEngine(Engine(lively_model)) as engine:
            stream = await engine.submit(make_request(Autoregressive(), max_tokens=None))
            first = await anext(stream)
            stream.cancel()
            rest = [event async for event in stream]
            assert isinstance(first, BlockCommitted)
            assert isinstance(rest[-1], Finished)
            assert rest[-1].result.finish_reason == "cancelled"
            assert rest[-1].result.token_ids[:1] == first.token_ids
            stream.cancel()  # of no effect

    run(serve())


def test_a_submission_that_nobody_waits_for_leaves_no_request_behind(
    lively_model: CloverForCausalLM,
) -> None:
    engine = Engine(lively_model)

    async def serve() -> None:
        async with AsyncEngine(engine) as serving:
            endless = make_request(Autoregressive(), max_tokens=None)
            for wait in (0, 1, 2):
                task = asyncio.create_task(serving.submit(endless))
                for _ in range(wait):
                    await asyncio.sleep(0.001)
                task.cancel()
                for stream in await asyncio.gather(task, return_exceptions=True):
                    if isinstance(stream, EventStream):  # it was faster
                        stream.cancel()

    run(serve())
    assert not engine.has_work


def test_what_the_engine_refuses_is_raised_by_submit(lively_model: CloverForCausalLM) -> None:
    async def serve() -> None:
        config = EngineConfig(num_slots=1, max_waiting=0)
        async with AsyncEngine(Engine(lively_model, config)) as engine:
            stream = await engine.submit(make_request(Autoregressive(), max_tokens=None))
            with pytest.raises(CapacityError):
                await engine.submit(make_request())
            with pytest.raises(PromptError):
                await engine.submit(EngineRequest(generation=GenerationRequest(prompt_ids=())))
            stream.cancel()
            assert (await read(stream)).finish_reason == "cancelled"

    run(serve())


def test_leaving_waits_for_the_requests_under_way(lively_model: CloverForCausalLM) -> None:
    async def serve() -> None:
        async with AsyncEngine(Engine(lively_model)) as engine:
            streams = [await engine.submit(make_request()) for _ in range(3)]
        for stream in streams:
            assert (await read(stream)).finish_reason == "length"
        with pytest.raises(EngineClosedError, match="closed"):
            await engine.submit(make_request())

    run(serve())
    assert not any(thread.name.startswith("clover-engine") for thread in threading.enumerate())


def test_leaving_with_an_error_fails_the_requests_under_way(
    lively_model: CloverForCausalLM,
) -> None:
    engine = Engine(lively_model)
    streams: list[EventStream] = []

    async def fail_inside() -> None:
        async with AsyncEngine(engine) as serving:
            for _ in range(2):
                request = make_request(Autoregressive(), max_tokens=None)
                streams.append(await serving.submit(request))
            raise KeyError

    async def serve() -> None:
        with pytest.raises(KeyError):
            await fail_inside()
        for stream in streams:
            with pytest.raises(EngineClosedError, match="closed"):
                await read(stream)
            assert [event async for event in stream] == []

    run(serve())
    assert not engine.has_work


@torch.no_grad()
def test_an_error_of_the_model_fails_every_stream_and_says_why(
    lively_model: CloverForCausalLM,
) -> None:
    weight = lively_model.lm_head.weight
    kept = weight[3].clone()

    async def serve() -> None:
        async with AsyncEngine(Engine(lively_model)) as engine:
            weight[3] = torch.nan
            stream = await engine.submit(make_request(Autoregressive()))
            late = asyncio.create_task(engine.submit(make_request()))  # during the failing step
            with pytest.raises(EngineClosedError, match="NaN") as found:
                await read(stream)
            assert isinstance(found.value.__cause__, GenerationError)
            with pytest.raises(EngineClosedError, match="NaN"):
                await read(await late)
            await engine.submit(make_request())

    async def check() -> None:
        with pytest.raises(EngineClosedError, match="NaN"):
            await serve()

    try:
        run(check())
    finally:
        weight[3] = kept
