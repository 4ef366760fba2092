"""Log-probabilities are those of one causal forward over prompt and text, whoever wrote it, and how."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import clover
from clover.config import DiffusionConfig, ModelConfig
from clover.diffusion.generate import generate, generate_all
from clover.diffusion.logprobs import score_tokens
from clover.diffusion.policies import (
    Autoregressive,
    EntropyBound,
    Exact,
    Policy,
    PromptLookup,
    Threshold,
)
from clover.diffusion.requests import (
    BlockCommitted,
    Event,
    Finished,
    GenerationRequest,
    GenerationResult,
    TokenLogprobs,
)
from clover.diffusion.sampling import SamplingParams
from clover.engine.engine import Engine, EngineConfig
from clover.engine.grammar import GrammarCompiler
from clover.engine.lark import JsonSchema, Regex
from clover.engine.request import EngineEvent, EngineRequest
from clover.errors import GenerationError, RequestError
from clover.model.transformer import CloverForCausalLM
from clover.tokenizer import Tokenizer

TOLERANCE = 2e-4
"""In nats. fp32 logits of these weights reach 50, and the shape of a pass varies their last bits."""

assert clover.__file__ is not None
TOKENIZER = Tokenizer.load(Path(clover.__file__).parent / "assets" / "nano")
EOS_IDS = (2, 40)
NUM_TOP = 5
POLICIES: tuple[Policy, ...] = (
    Threshold(threshold=0.3),
    Threshold(threshold=0.0),
    EntropyBound(bound=1.5),
    Exact(threshold=0.2),
    PromptLookup(num_draft_tokens=4),
    Autoregressive(),
)


def reference(
    model: CloverForCausalLM, prompt_ids: Sequence[int], token_ids: Sequence[int]
) -> list[list[float]]:
    """Returns the log-probabilities of the whole vocabulary at each token, from one forward."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt_ids, *token_ids]]))[0]
    logprobs: list[list[float]] = logits.log_softmax(-1)[len(prompt_ids) - 1 : -1].tolist()
    return logprobs


def check(model: CloverForCausalLM, request: GenerationRequest, result: GenerationResult) -> None:
    """Holds a result against one causal forward."""
    found, num_top = result.logprobs, request.top_logprobs
    assert found is not None
    assert num_top is not None
    assert tuple(entry.token_id for entry in found) == result.token_ids
    if not result.token_ids:
        return
    expected = reference(model, request.prompt_ids, result.token_ids)
    for entry, row in zip(found, expected, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=TOLERANCE)
        likeliest = sorted(row, reverse=True)[:num_top]
        assert [value for _, value in entry.top] == pytest.approx(likeliest, abs=TOLERANCE)
        assert len({token_id for token_id, _ in entry.top}) == num_top
        assert [row[token_id] for token_id, _ in entry.top] == pytest.approx(
            likeliest, abs=TOLERANCE
        )


def collect(events: Sequence[Event | EngineEvent]) -> dict[int, GenerationResult]:
    """Returns the results, and checks that the events add up to them."""
    scored: dict[int, list[TokenLogprobs]] = {}
    results: dict[int, GenerationResult] = {}
    for event in events:
        match event:
            case BlockCommitted(logprobs=logprobs):
                assert logprobs is not None
                assert tuple(entry.token_id for entry in logprobs) == event.token_ids
                scored.setdefault(event.row, []).extend(logprobs)
            case Finished(result=result):
                assert tuple(scored.get(event.row, ())) == result.logprobs
                results[event.row] = result
    return results


def as_letters(token_ids: Sequence[int]) -> str:
    return "".join(chr(ord("0") + token_id) for token_id in token_ids)


requests = st.builds(
    GenerationRequest,
    prompt_ids=st.lists(st.integers(3, 9), min_size=1, max_size=20),
    max_tokens=st.integers(1, 22),
    sampling=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1.0, 1.5]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        logit_bias=st.sampled_from([{}, {7: 20.0}]),
        seed=st.integers(0, 2**40),
    ),
    policy=st.sampled_from(POLICIES),
    stop=st.sampled_from([(), (), ("A",), ("0", "B;")]),
    ignore_eos=st.booleans(),
    top_logprobs=st.sampled_from([0, 1, NUM_TOP, 20]),
)
block_sizes = st.sampled_from([None, 1, 2, 5, 8, 11])


@given(
    batch=st.lists(requests, min_size=1, max_size=4), block_size=block_sizes, fused=st.booleans()
)
def test_the_plain_loop_gives_those_of_one_forward(
    lively_model: CloverForCausalLM,
    batch: list[GenerationRequest],
    block_size: int | None,
    fused: bool,
) -> None:
    options = {"decode": as_letters, "eos_token_ids": EOS_IDS, "block_size": block_size}
    events = list(generate(lively_model, batch, fused=fused, **options))  # type: ignore[arg-type]
    results = collect(events)
    silent = [replace(request, top_logprobs=None) for request in batch]
    texts = generate_all(lively_model, silent, fused=fused, **options)  # type: ignore[arg-type]
    for row, request in enumerate(batch):
        check(lively_model, request, results[row])
        assert results[row].token_ids == texts[row].token_ids
        assert results[row].finish_reason == texts[row].finish_reason
        assert texts[row].logprobs is None


@given(
    batch=st.lists(st.tuples(requests, block_sizes), min_size=1, max_size=5),
    num_slots=st.integers(1, 4),
    prefill_chunk_size=st.sampled_from([1, 4, 16]),
)
def test_the_engine_gives_those_of_the_plain_loop(
    lively_model: CloverForCausalLM,
    batch: list[tuple[GenerationRequest, int | None]],
    num_slots: int,
    prefill_chunk_size: int,
) -> None:
    config = EngineConfig(num_slots=num_slots, prefill_chunk_size=prefill_chunk_size)
    engine = Engine(lively_model, config, decode=as_letters, eos_token_ids=EOS_IDS)
    events: list[EngineEvent] = []
    for request, block_size in batch:
        engine.submit(EngineRequest(generation=request, block_size=block_size))
        events += engine.step()
    results = collect([*events, *engine.run()])
    for row, (request, block_size) in enumerate(batch):
        found = results[row]
        check(lively_model, request, found)
        (expected,) = generate_all(
            lively_model,
            [request],
            decode=as_letters,
            eos_token_ids=EOS_IDS,
            block_size=block_size,
        )
        assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
        for count in ("tokens", "previews", "commits", "passes"):
            assert getattr(found.stats, count) == getattr(expected.stats, count)


def test_a_prefix_cache_hit_changes_no_log_probability(lively_model: CloverForCausalLM) -> None:
    engine = Engine(lively_model, EngineConfig(prefill_chunk_size=4), eos_token_ids=())
    prompt = tuple(3 + index * index % 30 for index in range(21))
    for policy in POLICIES:
        request = GenerationRequest(
            prompt_ids=prompt, max_tokens=13, policy=policy, top_logprobs=NUM_TOP
        )
        results = {}
        for turn in range(2):
            row = engine.submit(EngineRequest(generation=request))
            results[turn] = collect(list(engine.run()))[row]
            check(lively_model, request, results[turn])
        assert results[1].stats.cached_tokens == len(prompt) - 1


def test_one_text_has_the_same_ones_whatever_policy_writes_it(
    lively_model: CloverForCausalLM,
) -> None:
    plain = GenerationRequest(prompt_ids=(5, 9, 30), max_tokens=19, top_logprobs=NUM_TOP)
    policies = (Autoregressive(), Exact(threshold=0.1), PromptLookup(), Threshold(threshold=1.0))
    # At block size 1 what the threshold policy writes is the autoregressive text, too
    written = [
        generate_all(
            lively_model,
            [replace(plain, policy=policy)],
            eos_token_ids=(),
            block_size=1 if isinstance(policy, Threshold) else None,
        )[0]
        for policy in policies
    ]
    for result in written:
        assert result.token_ids == written[0].token_ids
        assert result.logprobs is not None
        assert written[0].logprobs is not None
        for entry, expected in zip(result.logprobs, written[0].logprobs, strict=True):
            assert entry.logprob == pytest.approx(expected.logprob, abs=TOLERANCE)


def test_only_the_last_tokens_of_a_block_policy_take_a_pass_more(
    lively_model: CloverForCausalLM,
) -> None:
    for policy in POLICIES:
        silent = GenerationRequest(prompt_ids=(5, 9), max_tokens=19, policy=policy)
        asked = replace(silent, top_logprobs=0)
        without, with_logprobs = (
            generate_all(lively_model, [request], eos_token_ids=())[0].stats
            for request in (silent, asked)
        )
        is_block_policy = isinstance(policy, Threshold | EntropyBound)
        assert with_logprobs.previews == without.previews
        assert with_logprobs.passes - without.passes == int(is_block_policy)
        assert with_logprobs.commits - without.commits == int(is_block_policy)


def test_a_text_that_is_cancelled_ends_with_the_last_scored_token(
    lively_model: CloverForCausalLM,
) -> None:
    for policy, num_steps in itertools.product(POLICIES, range(8)):
        engine = Engine(lively_model, decode=as_letters, eos_token_ids=())
        request = GenerationRequest(
            prompt_ids=(5, 9), max_tokens=60, policy=policy, top_logprobs=NUM_TOP
        )
        row = engine.submit(EngineRequest(generation=request, block_size=4))
        events = [event for _ in range(num_steps) for event in engine.step()]
        engine.cancel(row)
        result = collect([*events, *engine.run()])[row]
        check(lively_model, request, result)
        assert result.text == as_letters(result.token_ids)
        assert result.stats.tokens == len(result.token_ids)


def test_a_parent_and_a_model_without_the_shift_have_theirs(
    tiny_config: Callable[..., ModelConfig],
) -> None:
    in_place = DiffusionConfig(block_size=8, mask_token_id=63, shift_logits=False)
    configs = {
        tiny_config(eos_token_ids=(), diffusion=False): (Autoregressive(), PromptLookup()),
        replace(tiny_config(eos_token_ids=()), diffusion=in_place): POLICIES,
    }
    for config, policies in configs.items():
        model = CloverForCausalLM(config)
        model.init_weights(torch.Generator().manual_seed(1))
        engine = Engine(model)
        for policy in policies:
            request = GenerationRequest(
                prompt_ids=(5, 9), max_tokens=19, policy=policy, top_logprobs=NUM_TOP
            )
            (result,) = generate_all(model, [request])
            check(model, request, result)
            row = engine.submit(EngineRequest(generation=request))
            check(model, request, collect(list(engine.run()))[row])


def test_logits_that_are_not_finite_have_no_log_probabilities() -> None:
    for broken in (torch.nan, torch.inf):
        logits = torch.zeros(2, 8)
        logits[1, 3] = broken
        with pytest.raises(GenerationError, match="finite"):
            score_tokens([0, 0], logits, 1)


@pytest.fixture(scope="module")
def speaker(tiny_config: Callable[..., ModelConfig]) -> CloverForCausalLM:
    """A tiny random model over clover-nano's tokenizer."""
    diffusion = DiffusionConfig(block_size=8, mask_token_id=3)
    config = tiny_config(vocab_size=len(TOKENIZER), eos_token_ids=(2,), diffusion=diffusion)
    model = CloverForCausalLM(config)
    model.init_weights(torch.Generator().manual_seed(1))
    return model


def test_tokens_that_a_grammar_forces_have_the_models_own_log_probability(
    speaker: CloverForCausalLM,
) -> None:
    compiler = GrammarCompiler(TOKENIZER, vocab_size=len(TOKENIZER), eos_token_ids=[2])
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    forms = (
        JsonSchema(schema=schema),
        Regex(pattern="hello there, all of this is forced"),  # longer than a block
        Regex(pattern="[ab]{3} and on"),  # a forced end
    )
    batch = [
        GenerationRequest(
            prompt_ids=(1, 20, 30),
            max_tokens=40,
            policy=policy,
            constraint=compiler.compile(form),
            top_logprobs=NUM_TOP,
        )
        for form in forms
        for policy in POLICIES
    ]
    engine = Engine(speaker, decode=TOKENIZER.decode)
    for request in batch:
        engine.submit(EngineRequest(generation=request))
    served = collect(list(engine.run()))
    written = collect(list(generate(speaker, batch, decode=TOKENIZER.decode)))
    for row, request in enumerate(batch):
        check(speaker, request, served[row])
        check(speaker, request, written[row])
        assert served[row].token_ids == written[row].token_ids
        assert served[row].stats.passes == written[row].stats.passes


def test_more_than_twenty_alternatives_are_refused() -> None:
    for number in (-1, 21):
        with pytest.raises(RequestError, match="top_logprobs"):
            GenerationRequest(prompt_ids=(5,), top_logprobs=number)
