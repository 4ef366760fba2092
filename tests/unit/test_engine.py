"""Slots, queue, cancellation, timeouts, counters, and what the prefix cache may and may not change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from clover.diffusion.generate import generate_all
from clover.diffusion.policies import (
    Autoregressive,
    EntropyBound,
    Exact,
    Policy,
    PromptLookup,
    Threshold,
)
from clover.diffusion.requests import Event, Finished, GenerationRequest, GenerationResult
from clover.diffusion.sampling import SamplingParams
from clover.engine.engine import Engine, EngineConfig
from clover.engine.request import EngineRequest
from clover.errors import CapacityError, ConfigError, GenerationError, PromptError, RequestError
from clover.model.transformer import CloverForCausalLM

PROMPT = tuple(3 + 7 * i % 50 for i in range(37))
POLICIES: tuple[Policy, ...] = (
    Threshold(threshold=0.5),
    EntropyBound(bound=1.5),
    Exact(threshold=0.2),
    PromptLookup(),
    Autoregressive(),
)


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_request(
    policy: Policy | None = None,
    *,
    priority: int = 0,
    timeout: float | None = None,
    block_size: int | None = None,
    **changes: Any,
) -> EngineRequest:
    fields: dict[str, Any] = {
        "prompt_ids": PROMPT,
        "max_tokens": 20,
        "policy": policy or Threshold(threshold=0.5),
    }
    return EngineRequest(
        generation=GenerationRequest(**(fields | changes)),
        priority=priority,
        timeout=timeout,
        block_size=block_size,
    )


def ended(events: list[Event]) -> dict[int, GenerationResult]:
    return {event.row: event.result for event in events if isinstance(event, Finished)}


def answer(engine: Engine, *requests: EngineRequest) -> list[GenerationResult]:
    ids = [engine.submit(request) for request in requests]
    results = ended(list(engine.run()))
    return [results[request_id] for request_id in ids]


def test_a_full_engine_queues_and_a_full_queue_refuses(lively_model: CloverForCausalLM) -> None:
    engine = Engine(lively_model, EngineConfig(num_slots=2, max_waiting=1))
    ids = [engine.submit(make_request()) for _ in range(3)]
    with pytest.raises(CapacityError, match="fewer than 3 unfinished"):
        engine.submit(make_request())
    engine.step()
    assert [job.id for job in engine.runner.jobs] == ids[:2]
    with pytest.raises(CapacityError):
        engine.submit(make_request())
    results = ended(list(engine.run()))
    assert sorted(results) == ids
    assert answer(engine, make_request())[0].token_ids == results[0].token_ids


def test_the_highest_priority_is_admitted_first_and_equals_by_arrival(
    lively_model: CloverForCausalLM,
) -> None:
    engine = Engine(lively_model, EngineConfig(num_slots=1))
    ids = [engine.submit(make_request(priority=priority)) for priority in (0, 1, 0, 1)]
    order = [event.row for event in engine.run() if isinstance(event, Finished)]
    assert order == [ids[1], ids[3], ids[0], ids[2]]


def test_a_cancelled_request_frees_its_slot_before_the_next_pass(
    lively_model: CloverForCausalLM,
) -> None:
    engine = Engine(lively_model, EngineConfig(num_slots=1))
    first, second = (engine.submit(make_request(Autoregressive())) for _ in range(2))
    for _ in range(5):
        engine.step()
    assert engine.cancel(first)
    results = ended(engine.step())
    assert [job.id for job in engine.runner.jobs] == [second]
    assert results[first].finish_reason == "cancelled"
    assert len(results[first].token_ids) == 5
    rest = ended(list(engine.run()))
    assert rest[second].token_ids[:5] == results[first].token_ids
    assert not engine.cancel(first)
    assert not engine.cancel(99)


def test_a_request_may_be_cancelled_while_it_waits_or_is_prefilled(
    lively_model: CloverForCausalLM,
) -> None:
    engine = Engine(lively_model, EngineConfig(num_slots=1, prefill_chunk_size=4))
    prefilled, waiting = engine.submit(make_request()), engine.submit(make_request())
    engine.step()
    assert engine.runner.jobs == []  # the prompt takes nine steps
    engine.cancel(prefilled)
    engine.cancel(waiting)
    results = ended(engine.step())
    assert sorted(results) == [prefilled, waiting]
    for result in results.values():
        assert (result.token_ids, result.stats.passes, result.stats.tpf) == ((), 0, 0.0)
    assert not engine.has_work


def test_a_request_ends_when_its_time_is_over_running_or_waiting(
    lively_model: CloverForCausalLM,
) -> None:
    clock = Clock()
    engine = Engine(lively_model, EngineConfig(num_slots=1), clock=clock)
    running = engine.submit(make_request(Autoregressive(), timeout=2.0))
    waiting = engine.submit(make_request(timeout=1.0))
    patient = engine.submit(make_request())
    ends = []
    for _ in range(5):
        ends.append({row: result.finish_reason for row, result in ended(engine.step()).items()})
        clock.now += 0.5
    assert ends == [{}, {}, {waiting: "timeout"}, {}, {running: "timeout"}]
    assert ended(list(engine.run()))[patient].finish_reason == "length"


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan")])
def test_a_timeout_that_is_no_time_is_refused(timeout: float) -> None:
    with pytest.raises(RequestError, match="timeout is"):
        make_request(timeout=timeout)


@pytest.mark.parametrize(
    "name", ["num_slots", "max_waiting", "prefill_chunk_size", "prefix_cache_bytes"]
)
def test_a_limit_out_of_range_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is -1"):
        EngineConfig(**{name: -1})


def test_what_the_plain_loop_refuses_is_refused_and_takes_no_place(
    lively_model: CloverForCausalLM,
) -> None:
    engine = Engine(lively_model, EngineConfig(num_slots=1, max_waiting=0))
    with pytest.raises(PromptError):
        engine.submit(make_request(prompt_ids=(5, 63)))
    with pytest.raises(RequestError, match="decode"):
        engine.submit(make_request(stop=("x",)))
    with pytest.raises(RequestError, match="block_size is 0"):
        engine.submit(make_request(block_size=0))
    engine.submit(make_request())


@pytest.mark.parametrize("policy", POLICIES[:3])
def test_a_commit_costs_no_pass_of_its_own(lively_model: CloverForCausalLM, policy: Policy) -> None:
    engine = Engine(lively_model)
    answer(engine, *(make_request(policy, max_tokens=count) for count in (5, 20, 31)))
    if isinstance(policy, Exact):  # the last pass of a text verifies alone
        assert engine.stats.row_passes == engine.stats.commits > engine.stats.previews
    else:
        assert engine.stats.row_passes == engine.stats.previews
        assert engine.stats.commits == 1 + 3 + 4  # prompts, and blocks but for the last of each
    assert engine.stats.tokens == 5 + 20 + 31
    assert engine.stats.tpf == engine.stats.tokens / engine.stats.row_passes


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_that_is_alone_ends_in_the_first_pass_and_is_known_afterwards(
    lively_model: CloverForCausalLM, policy: Policy
) -> None:
    engine = Engine(lively_model)
    [first] = answer(engine, make_request(policy))
    assert engine.stats.prefill_passes == 0
    assert engine.stats.passes == first.stats.passes
    [again] = answer(engine, make_request(policy))
    assert (first.stats.cached_tokens, again.stats.cached_tokens) == (0, len(PROMPT) - 1)
    assert again.token_ids == first.token_ids
    answer(engine, *(make_request(policy, prompt_ids=(7 + i, 9, 3)) for i in range(2)))
    assert engine.stats.prefill_passes == 2  # who is not alone is prefilled apart


def test_many_rows_of_exact_get_shorter_blocks_and_the_same_texts(
    lively_model: CloverForCausalLM,
) -> None:
    requests = [
        make_request(Exact(threshold=0.0), max_tokens=20, prompt_ids=(5, i)) for i in range(4)
    ]
    texts, previewed = [], []
    for preview_tokens in (None, 8, 1):
        engine = Engine(lively_model, EngineConfig(num_slots=4, preview_tokens=preview_tokens))
        texts.append([result.token_ids for result in answer(engine, *requests)])
        previewed.append(engine.stats.previews)
        if preview_tokens == 1:  # autoregressive steps
            assert engine.stats.row_passes == engine.stats.tokens
    assert texts[0] == texts[1] == texts[2]
    assert previewed[2] == 0 < previewed[0]


def test_rows_of_all_policies_and_block_sizes_share_passes(lively_model: CloverForCausalLM) -> None:
    requests = [make_request(policy, block_size=3 + 2 * i) for i, policy in enumerate(POLICIES)]
    engine = Engine(lively_model)
    results = answer(engine, *requests)
    assert engine.stats.passes == max(result.stats.passes for result in results)
    for request, result in zip(requests, results, strict=True):
        (expected,) = generate_all(
            lively_model, [request.generation], block_size=request.block_size
        )
        assert result.token_ids == expected.token_ids
        assert result.stats.passes == expected.stats.passes


def test_rows_that_arrive_apart_never_wait_for_each_other(lively_model: CloverForCausalLM) -> None:
    engine = Engine(lively_model)
    arrivals: dict[int, int] = {}
    ends: dict[int, int] = {}
    results: dict[int, GenerationResult] = {}
    for step, policy in enumerate([*POLICIES, *POLICIES]):
        arrivals[engine.submit(make_request(policy))] = step
        results |= (found := ended(engine.step()))
        ends |= dict.fromkeys(found, step)
    while engine.has_work:
        step += 1
        results |= (found := ended(engine.step()))
        ends |= dict.fromkeys(found, step)
    for row, result in results.items():
        assert ends[row] - arrivals[row] + 1 == result.stats.passes


def test_logits_that_are_not_finite_stop_the_step(lively_model: CloverForCausalLM) -> None:
    engine = Engine(lively_model)
    engine.submit(make_request(Autoregressive()))
    weight = lively_model.lm_head.weight
    with torch.no_grad():
        kept = weight[3].clone()
        weight[3] = torch.nan
        with pytest.raises(GenerationError, match="NaN"):
            engine.step()
        weight[3] = kept


@pytest.mark.parametrize("policy", POLICIES)
def test_a_later_turn_starts_from_the_state_that_the_earlier_one_left(
    lively_model: CloverForCausalLM, policy: Policy
) -> None:
    engine = Engine(lively_model, EngineConfig(prefill_chunk_size=16))
    (first,) = answer(engine, make_request(policy))
    assert first.stats.cached_tokens == 0
    turn = make_request(policy, prompt_ids=(*PROMPT, *first.token_ids, 8, 9, 10))
    num_prefilled = engine.stats.prefill_passes
    (second,) = answer(engine, turn)
    # The last block of a text is never committed; what lies before it is
    assert len(PROMPT) - 1 < second.stats.cached_tokens < len(turn.generation.prompt_ids)
    assert second.stats.cached_tokens >= len(PROMPT) + 20 - 8 - 1
    assert engine.stats.prefill_passes - num_prefilled <= 2
    (expected,) = generate_all(lively_model, [turn.generation])
    assert second.token_ids == expected.token_ids
    assert engine.stats.cached_tokens == second.stats.cached_tokens


def test_a_text_that_ends_inside_an_accepted_draft_leaves_the_state_at_its_end(
    lively_model: CloverForCausalLM,
) -> None:
    engine = Engine(lively_model)
    always_nine = SamplingParams(logit_bias={9: 100.0})
    (first,) = answer(
        engine, make_request(Exact(threshold=0.0), sampling=always_nine, max_tokens=5)
    )
    assert (first.token_ids, first.stats.passes) == ((9,) * 5, 2)  # a draft of seven, cut at four
    turn = make_request(prompt_ids=(*PROMPT, *first.token_ids, 8, 10))
    (second,) = answer(engine, turn)
    assert second.stats.cached_tokens == len(PROMPT) + 5
    (expected,) = generate_all(lively_model, [turn.generation])
    assert second.token_ids == expected.token_ids


def test_predictions_may_be_read_in_place(lively_model: CloverForCausalLM) -> None:
    diffusion = lively_model.config.diffusion
    assert diffusion is not None
    in_place = CloverForCausalLM(
        replace(lively_model.config, diffusion=replace(diffusion, shift_logits=False))
    )
    in_place.load_state_dict(lively_model.state_dict())
    requests = [make_request(policy) for policy in POLICIES]
    results = answer(Engine(in_place), *requests)
    for request, result in zip(requests, results, strict=True):
        (expected,) = generate_all(in_place, [request.generation])
        assert result.token_ids == expected.token_ids
        assert result.stats.passes == expected.stats.passes


def test_concurrent_requests_share_a_prefix(lively_model: CloverForCausalLM) -> None:
    engine = Engine(lively_model, EngineConfig(prefill_chunk_size=16))
    prompts = [(*PROMPT, tail) for tail in (5, 6, 7)]
    results = answer(engine, *(make_request(prompt_ids=prompt) for prompt in prompts))
    assert [result.stats.cached_tokens for result in results] == [0, len(PROMPT), len(PROMPT)]


@torch.no_grad()
def test_a_hit_at_a_chunk_boundary_gives_the_state_bit_for_bit(
    lively_model: CloverForCausalLM,
) -> None:
    def state_after_prefill(engine: Engine, prompt: tuple[int, ...]) -> list[torch.Tensor]:
        engine.submit(make_request(prompt_ids=(*prompt, 4)))
        while not engine.runner.jobs:
            engine.step()
        cache = lively_model.new_cache(1)
        assert engine.runner.prefix_cache.restore(cache, 0, prompt) == len(prompt)
        return [tensor for layer in cache.snapshot(0).layers for tensor in layer]

    config = EngineConfig(prefill_chunk_size=16)
    warm = Engine(lively_model, config)
    state_after_prefill(warm, PROMPT[:32])
    list(warm.run())
    found = state_after_prefill(warm, PROMPT)
    assert warm.runner.jobs[0].row.cached_tokens == 32
    cold = Engine(lively_model, config)
    expected = state_after_prefill(cold, PROMPT)
    assert cold.runner.jobs[0].row.cached_tokens == 0
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_without_a_budget_nothing_is_cached(lively_model: CloverForCausalLM) -> None:
    engine = Engine(lively_model, EngineConfig(prefix_cache_bytes=0))
    results = [answer(engine, make_request())[0] for _ in range(2)]
    assert [result.stats.cached_tokens for result in results] == [0, 0]
    assert len(engine.runner.prefix_cache) == 0
