"""The engine gives the plain loop's answers, whatever arrives, leaves or waits beside them.

Equality is token for token. The shape of a pass varies the last bits of its logits; these weights
are random in fp32, where two candidates or a confidence and its threshold never come that close.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clover.diffusion.generate import generate_all
from clover.diffusion.policies import (
    Autoregressive,
    EntropyBound,
    Exact,
    Policy,
    PromptLookup,
    Relaxed,
    Threshold,
)
from clover.diffusion.requests import (
    BlockCommitted,
    CanvasUpdated,
    Finished,
    GenerationRequest,
    GenerationResult,
)
from clover.diffusion.sampling import SamplingParams
from clover.engine.engine import Engine, EngineConfig
from clover.engine.request import EngineRequest, Failed
from clover.model.transformer import CloverForCausalLM

MASK_ID = 63
EOS_IDS = (2, 40)


def as_letters(token_ids: list[int]) -> str:
    return "".join(chr(ord("0") + token_id) for token_id in token_ids)


policies: st.SearchStrategy[Policy] = st.one_of(
    st.builds(Threshold, threshold=st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0])),
    st.builds(EntropyBound, bound=st.sampled_from([0.0, 0.5, 2.0])),
    st.builds(Exact, threshold=st.sampled_from([0.0, 0.2, 0.6, 1.0])),
    st.builds(
        PromptLookup,
        num_draft_tokens=st.sampled_from([1, 4, 10]),
        max_ngram_size=st.integers(1, 3),
    ),
    st.just(Autoregressive()),
)
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.5]),
    top_p=st.sampled_from([1.0, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    seed=st.integers(0, 2**40),
)
# Few ids and few beginnings, so that prompts begin alike and the prefix cache has something to say
prompts = st.builds(
    lambda seed, stem, tail: [
        *[3 + random.Random(seed).randrange(36) for _ in range(stem)],
        *[5 + token_id for token_id in tail],
    ],
    st.integers(0, 1),
    st.sampled_from([0, 3, 8, 17, 30]),
    st.lists(st.integers(0, 3), min_size=1, max_size=4),
)
generations = st.builds(
    GenerationRequest,
    prompt_ids=prompts,
    max_tokens=st.integers(1, 22),
    sampling=samplings,
    policy=policies,
    stop=st.sampled_from([(), (), ("A",), ("0", "B;")]),
    ignore_eos=st.booleans(),
    draw=st.integers(0, 2),
)


@dataclass(frozen=True)
class Visit:
    """A request, the step before which it arrives, and the one before which it is cancelled."""

    request: EngineRequest
    arrival: int
    cancellation: int | None


visits = st.lists(
    st.builds(
        Visit,
        request=st.builds(
            EngineRequest,
            generation=generations,
            block_size=st.sampled_from([None, 1, 2, 5, 8, 11]),
            priority=st.integers(0, 2),
        ),
        arrival=st.integers(0, 12),
        cancellation=st.one_of(st.none(), st.none(), st.integers(0, 20)),
    ),
    min_size=1,
    max_size=7,
)
configs = st.builds(
    EngineConfig,
    num_slots=st.integers(1, 5),
    max_waiting=st.just(7),
    prefill_chunk_size=st.sampled_from([1, 4, 16]),
    prefix_cache_bytes=st.sampled_from([0, 40_000, 2**24]),
    preview_tokens=st.sampled_from([None, None, 1, 4, 9]),
)


def serve(engine: Engine, plan: list[Visit]) -> dict[int, GenerationResult]:
    """Returns results by the visits' numbers, and checks on the way what events promise."""
    ids: dict[int, int] = {}
    results: dict[int, GenerationResult] = {}
    final: dict[int, list[int]] = {}
    step = 0
    while len(results) < len(plan):
        for number, visit in enumerate(plan):
            if visit.arrival == step:
                ids[engine.submit(visit.request)] = number
        for request_id, number in ids.items():
            if plan[number].cancellation == step:
                assert engine.cancel(request_id) == (number not in results)
        for event in engine.step():
            number = ids[event.row]
            assert number not in results
            match event:
                case CanvasUpdated():
                    assert event.kept
                    assert all(event.canvas[position] != MASK_ID for position in event.kept)
                case BlockCommitted():
                    final.setdefault(number, []).extend(event.token_ids)
                case Finished():
                    results[number] = event.result
                    assert tuple(final.get(number, ())) == event.result.token_ids
                case Failed():
                    raise event.error
        step += 1
    return results


def plain_loop(model: CloverForCausalLM, request: EngineRequest) -> GenerationResult:
    (result,) = generate_all(
        model,
        [request.generation],
        decode=as_letters,
        eos_token_ids=EOS_IDS,
        block_size=request.block_size,
    )
    return result


def summary(result: GenerationResult, *, has_counts: bool = True) -> tuple[object, ...]:
    stats = result.stats
    counts = (stats.tokens, stats.previews, stats.commits, stats.passes) if has_counts else None
    return result.token_ids, result.text, result.finish_reason, counts


@given(plan=visits, config=configs)
def test_every_answer_is_the_plain_loops(
    lively_model: CloverForCausalLM, plan: list[Visit], config: EngineConfig
) -> None:
    engine = Engine(lively_model, config, decode=as_letters, eos_token_ids=EOS_IDS)
    results = serve(engine, plan)
    for number, visit in enumerate(plan):
        expected, found = plain_loop(lively_model, visit.request), results[number]
        if found.finish_reason == "cancelled":
            assert visit.cancellation is not None
            assert found.token_ids == expected.token_ids[: len(found.token_ids)]
        else:
            # Shorter blocks are the same text in other passes; without a limit none is shortened
            has_counts = config.preview_tokens is None
            assert summary(found, has_counts=has_counts) == summary(expected, has_counts=has_counts)
    assert_empty(engine)


def assert_empty(engine: Engine) -> None:
    assert not engine.has_work
    assert engine.step() == []
    assert engine.runner.jobs == []
    assert engine.runner.cache.batch_size == 0
    prefixes = engine.runner.prefix_cache
    assert prefixes.num_bytes <= engine.config.prefix_cache_bytes


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_requests", [60, pytest.param(10_000, marks=pytest.mark.slow)])
def test_many_requests_leave_nothing_behind(
    lively_model: CloverForCausalLM, num_requests: int
) -> None:
    rng = random.Random(0)
    config = EngineConfig(num_slots=16, max_waiting=16, prefix_cache_bytes=200_000)
    engine = Engine(lively_model, config, eos_token_ids=EOS_IDS)
    num_submitted = num_finished = 0
    sizes: list[int] = []
    while num_finished < num_requests:
        while num_submitted < num_requests and engine.scheduler.num_jobs < 32:
            request_id = engine.submit(small_request(rng))
            num_submitted += 1
            if rng.random() < 0.1:
                engine.cancel(request_id - rng.randrange(8))
        events = engine.step()
        num_finished += sum(isinstance(event, Finished) for event in events)
        assert engine.runner.cache.batch_size == len(engine.runner.jobs) <= 16
        assert num_submitted - num_finished == engine.scheduler.num_jobs
        assert engine.runner.prefix_cache.num_bytes <= 200_000
        sizes.append(engine.runner.cache.num_bytes)
    assert engine.stats.finished == num_requests
    assert_empty(engine)
    # Room is used again: the cache is no larger at the end than at any time in the first half
    assert max(sizes[len(sizes) // 2 :]) <= max(sizes[: len(sizes) // 2])


def small_request(rng: random.Random) -> EngineRequest:
    generation = GenerationRequest(
        prompt_ids=[3 + rng.randrange(4) for _ in range(rng.randrange(1, 9))],
        max_tokens=rng.randrange(1, 10),
        sampling=SamplingParams(temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(2**40)),
        policy=rng.choice(
            [
                *(Threshold(threshold=0.2), EntropyBound(), Exact(), PromptLookup()),
                *(Relaxed(tolerance=1.0, threshold=0.0), Autoregressive()),
            ]
        ),
    )
    return EngineRequest(generation=generation, block_size=rng.choice([None, 4, 8]))
