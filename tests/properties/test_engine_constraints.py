"""Constraints in the engine: the plain loop's text, and failures that stay with their request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import clover
from clover.config import DiffusionConfig, ModelConfig
from clover.diffusion.generate import generate_all
from clover.diffusion.policies import (
    Autoregressive,
    EntropyBound,
    Exact,
    Policy,
    PromptLookup,
    Threshold,
)
from clover.diffusion.requests import Finished, GenerationRequest, GenerationResult
from clover.diffusion.sampling import SamplingParams
from clover.engine.engine import Engine
from clover.engine.grammar import Grammar, GrammarCompiler
from clover.engine.lark import JsonSchema, Regex
from clover.engine.request import EngineRequest, Failed
from clover.model.transformer import CloverForCausalLM
from clover.tokenizer import Tokenizer

assert clover.__file__ is not None
TOKENIZER = Tokenizer.load(Path(clover.__file__).parent / "assets" / "nano")
VOCAB_SIZE = len(TOKENIZER) + 8
MASK_ID, IM_END = 3, 2
PADDING_IDS = range(len(TOKENIZER), VOCAB_SIZE)
POLICIES: tuple[Policy, ...] = (
    Threshold(threshold=0.2),
    EntropyBound(bound=4.0),
    Exact(threshold=0.2),
    PromptLookup(),
    Autoregressive(),
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "on": {"type": "boolean"}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tiny_config: Callable[..., ModelConfig]) -> CloverForCausalLM:
    diffusion = DiffusionConfig(block_size=8, mask_token_id=MASK_ID)
    config = tiny_config(vocab_size=VOCAB_SIZE, eos_token_ids=(IM_END,), diffusion=diffusion)
    model = CloverForCausalLM(config)
    model.init_weights(torch.Generator().manual_seed(1))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)
        model.lm_head.weight.mul_(4)  # peaked enough that policies keep several tokens a pass
    return model


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=[IM_END])


def request(grammar: Grammar | None, policy: Policy, seed: int = 0) -> GenerationRequest:
    return GenerationRequest(
        prompt_ids=(1, 20, 30, 40 + seed),
        max_tokens=40,
        policy=policy,
        constraint=grammar,
        sampling=SamplingParams(temperature=float(seed % 2), seed=seed),
    )


def serve(
    engine: Engine, requests: list[GenerationRequest]
) -> tuple[dict[int, GenerationResult], dict[int, Failed]]:
    """Returns results and failures by the requests' numbers; one request arrives a step."""
    results: dict[int, GenerationResult] = {}
    failures: dict[int, Failed] = {}
    for generation in requests:
        engine.submit(EngineRequest(generation=generation))
        for event in engine.step() if generation is not requests[-1] else engine.run():
            if isinstance(event, Finished):
                results[event.row] = event.result
            elif isinstance(event, Failed):
                failures[event.row] = event
    return results, failures


def test_constrained_and_free_rows_share_passes_and_get_the_plain_loops_text(
    model: CloverForCausalLM, compiler: GrammarCompiler
) -> None:
    schema = compiler.compile(JsonSchema(schema=SCHEMA))
    forced = compiler.compile(Regex(pattern="hello there"))
    requests = [
        request(grammar, policy, seed)
        for seed, grammar in enumerate((schema, None, schema, forced))
        for policy in POLICIES
    ]
    results, failures = serve(
        Engine(model, decode=TOKENIZER.decode, forbidden_token_ids=PADDING_IDS), requests
    )
    assert not failures
    for number, generation in enumerate(requests):
        (expected,) = generate_all(
            model, [generation], decode=TOKENIZER.decode, forbidden_token_ids=PADDING_IDS
        )
        found = results[number]
        assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
        assert found.finish_reason == expected.finish_reason
        for count in ("tokens", "previews", "commits", "passes"):
            assert getattr(found.stats, count) == getattr(expected.stats, count)


@pytest.mark.parametrize("pattern", ["[01]{3}", "0 or more"])  # one chooses, the other is forced
def test_a_constraint_that_cannot_go_on_ends_its_own_request_alone(
    model: CloverForCausalLM, compiler: GrammarCompiler, pattern: str
) -> None:
    digits = [token_id for digit in "01" for token_id in TOKENIZER.encode(digit)]
    broken, fine = (compiler.compile(Regex(pattern=p)) for p in (pattern, "(a|b|cd){4}"))
    requests = [request(grammar, policy) for policy in POLICIES for grammar in (fine, broken, None)]
    engine = Engine(model, forbidden_token_ids=digits)
    results, failures = serve(engine, requests)
    assert sorted(failures) == list(range(1, len(requests), 3))
    assert all("forbidden id" in str(failure.error) for failure in failures.values())
    assert not engine.has_work
    assert engine.runner.cache.batch_size == 0
    for number, result in results.items():
        (expected,) = generate_all(model, [requests[number]], forbidden_token_ids=digits)
        assert result.token_ids == expected.token_ids
