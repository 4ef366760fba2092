"""The sampling contract over thousands of settings, and what `exact` promises, as properties."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from clover.config import ModelConfig
from clover.diffusion.generate import GenerationRequest, GenerationResult, generate_all
from clover.diffusion.policies import (
    Autoregressive,
    EntropyBound,
    Exact,
    Policy,
    PromptLookup,
    Threshold,
)
from clover.diffusion.sampling import SamplingParams, TokenCounts, count_left, predict
from clover.model.transformer import CloverForCausalLM

MASK_ID = 63
VOCAB_SIZE = 64
PADDED_IDS = (60, 61, 62)

# The level of the statistical test: how often equal samplers would be called different.
LEVEL = 0.01
NUM_PERMUTATIONS = 999


@pytest.fixture(scope="module")
def models() -> dict[str, CloverForCausalLM]:
    return {}


@pytest.fixture
def model(
    models: dict[str, CloverForCausalLM], tiny_config: Callable[..., ModelConfig]
) -> CloverForCausalLM:
    """A random model whose mask row is by far the most likely: only forbidding it keeps it out."""
    if not models:
        model = CloverForCausalLM(tiny_config(eos_token_ids=()))
        model.init_weights(torch.Generator().manual_seed(1))
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.mul_(4)
            model.lm_head.weight.mul_(4)
            model.lm_head.weight[MASK_ID] *= 4
        models["tiny"] = model
    return models["tiny"]


def random_params(rng: random.Random) -> SamplingParams:
    def sometimes(value: float, default: float) -> float:
        return value if rng.random() < 0.4 else default

    bias = {rng.randrange(60): rng.uniform(-100, 100) for _ in range(rng.choice([0, 0, 3]))}
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0001, 0.1, 0.7, 1.0, 2.0, 100.0]),
        top_k=int(sometimes(rng.randrange(1, 100), 0)),
        top_p=sometimes(rng.uniform(0.001, 1.0), 1.0),
        min_p=sometimes(rng.random(), 0.0),
        repetition_penalty=sometimes(rng.uniform(0.01, 10), 1.0),
        presence_penalty=sometimes(rng.uniform(-2, 2), 0.0),
        frequency_penalty=sometimes(rng.uniform(-2, 2), 0.0),
        logit_bias=bias,
        seed=rng.randrange(-(2**63), 2**63),
    )


def random_policy(rng: random.Random) -> Policy:
    policies: list[Policy] = [
        Threshold(threshold=rng.random()),
        EntropyBound(bound=rng.uniform(0, 5)),
        Exact(threshold=rng.random()),
        PromptLookup(max_ngram_size=rng.randint(1, 3)),
        Autoregressive(),
    ]
    return rng.choice(policies)


def random_request(rng: random.Random) -> GenerationRequest:
    return GenerationRequest(
        prompt_ids=[rng.randrange(60) for _ in range(rng.randrange(1, 12))],
        max_tokens=rng.randrange(1, 14),
        sampling=random_params(rng),
        policy=random_policy(rng),
        draw=rng.randrange(3),
    )


def random_counts(rng: random.Random, num_rows: int) -> TokenCounts:
    canvas = [None if rng.random() < 0.5 else rng.randrange(60) for _ in range(4)]
    output = [rng.randrange(60) for _ in range(20)]
    counts = count_left([1, 2, 3, 3], output, canvas, VOCAB_SIZE)
    return TokenCounts(
        seen=counts.seen.expand(num_rows, -1, -1), output=counts.output.expand(num_rows, -1, -1)
    )


def test_no_setting_of_ten_thousand_draws_a_forbidden_id_or_moves_the_confidence() -> None:
    rng = random.Random(0)
    forbidden = torch.tensor([*PADDED_IDS, MASK_ID])
    positions = torch.arange(4).expand(100, -1)
    for batch in range(100):
        scale = rng.choice([0.0, 1.0, 10.0, 1e6])
        logits = scale * torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(batch))
        logits[..., MASK_ID] += 100 * scale
        logits = logits.expand(100, -1, -1)
        params = [random_params(rng) for _ in range(100)]
        prediction = predict(
            logits,
            params,
            positions,
            forbidden_ids=forbidden,
            draws=[rng.randrange(5) for _ in params],
            counts=random_counts(rng, 100),
        )
        assert ((prediction.tokens >= 0) & (prediction.tokens < 60)).all()
        assert (prediction.confidence == prediction.confidence[:1]).all()
        assert (prediction.entropy == prediction.entropy[:1]).all()


@pytest.mark.parametrize("block_size", [1, 2, 5, 8])
def test_every_random_request_ends_without_a_mask_token(
    model: CloverForCausalLM, block_size: int
) -> None:
    rng = random.Random(block_size)
    requests = [random_request(rng) for _ in range(100)]
    results = generate_all(
        model,
        requests,
        eos_token_ids=[2, 40],
        forbidden_token_ids=PADDED_IDS,
        fused=rng.random() < 0.5,
        block_size=block_size,
    )
    for request, result in zip(requests, results, strict=True):
        assert all(0 <= token_id < 60 for token_id in result.token_ids)
        assert not {2, 40} & set(result.token_ids)
        has_eos = result.finish_reason == "eos"
        assert result.stats.tokens == len(result.token_ids) + has_eos
        assert request.max_tokens is not None
        if has_eos:
            assert result.stats.tokens <= request.max_tokens
        else:
            assert (result.finish_reason, result.stats.tokens) == ("length", request.max_tokens)


def test_a_text_is_the_same_alone_and_in_a_batch_of_eight(model: CloverForCausalLM) -> None:
    rng = random.Random(7)
    for _ in range(4):
        requests = [random_request(rng) for _ in range(8)]
        together = generate_all(model, requests, eos_token_ids=[2], block_size=5)
        for request, result in zip(requests, together, strict=True):
            (alone,) = generate_all(model, [request], eos_token_ids=[2], block_size=5)
            assert summary(alone) == summary(result), request


def test_a_seed_reproduces_its_text_and_another_seed_does_not(model: CloverForCausalLM) -> None:
    for policy in (Threshold(), EntropyBound(), Exact(), PromptLookup(), Autoregressive()):
        sampling = SamplingParams(temperature=1.5, seed=5)
        request = GenerationRequest(
            prompt_ids=[4, 5], max_tokens=12, policy=policy, sampling=sampling
        )
        first, again = (generate_all(model, [request])[0] for _ in range(2))
        other = generate_all(model, [replace(request, sampling=replace(sampling, seed=6))])[0]
        assert first.token_ids == again.token_ids != other.token_ids


@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 32])
def test_verified_drafts_give_the_autoregressive_text_under_any_knobs(
    model: CloverForCausalLM, block_size: int
) -> None:
    rng = random.Random(block_size)
    requests = [random_request(rng) for _ in range(24)]
    drafted = [
        replace(request, policy=Exact(threshold=(0.0, 0.5, 0.9)[i % 3]))
        for i, request in enumerate(requests)
    ]
    plain = [replace(request, policy=Autoregressive()) for request in requests]
    options: dict[str, Any] = {"eos_token_ids": [2, 40], "forbidden_token_ids": PADDED_IDS}
    exact = generate_all(model, drafted, block_size=block_size, **options)
    looked_up = [replace(request, policy=PromptLookup()) for request in requests]
    expected = generate_all(model, plain, **options)
    for verified in (exact, generate_all(model, looked_up, **options)):
        for request, a, b in zip(requests, verified, expected, strict=True):
            assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason), request
    assert all(result.stats.tpf == 1.0 for result in expected)


def test_exact_and_autoregressive_samples_come_from_one_distribution(
    model: CloverForCausalLM,
) -> None:
    """A permutation test at level 0.01, and a look at whether it has the power to say no."""
    exact = draw_samples(model, Exact(), 1.0, seeds=range(400))
    plain = draw_samples(model, Autoregressive(), 1.0, seeds=range(1000, 1400))
    hotter = draw_samples(model, Autoregressive(), 1.4, seeds=range(2000, 2400))
    assert permutation_p_value(exact, plain) > LEVEL
    assert permutation_p_value(exact, hotter) <= LEVEL


def draw_samples(
    model: CloverForCausalLM, policy: Policy, temperature: float, seeds: range
) -> Tensor:
    """Returns int64 [samples, 4]."""
    requests = [
        GenerationRequest(
            prompt_ids=[4, 5, 6],
            max_tokens=4,
            policy=policy,
            sampling=SamplingParams(temperature=temperature, seed=seed),
        )
        for seed in seeds
    ]
    results = generate_all(model, requests, block_size=4)
    return torch.tensor([result.token_ids for result in results])


def permutation_p_value(first: Tensor, second: Tensor) -> float:
    """Returns how often shuffled labels separate the samples as well as the true ones do.

    The statistic is the two-sample chi-square over the tokens of each position, summed.
    """
    both = torch.cat([first, second])
    one_hot = torch.nn.functional.one_hot(both, VOCAB_SIZE).flatten(1).float()
    pooled = one_hot.sum(0)
    generator = torch.Generator().manual_seed(0)
    orders = [torch.arange(len(both))]
    orders += [torch.randperm(len(both), generator=generator) for _ in range(NUM_PERMUTATIONS)]
    chosen = torch.stack([order[: len(first)] for order in orders])
    labels = torch.zeros(len(orders), len(both)).scatter(1, chosen, 1.0)
    observed = labels @ one_hot
    expected = pooled * len(first) / len(both)
    statistics = ((observed - expected) ** 2 / expected.clamp(min=1e-9)).sum(1)
    return float((statistics >= statistics[0]).float().mean())


def summary(result: GenerationResult) -> tuple[object, ...]:
    stats = result.stats
    return result.token_ids, result.finish_reason, stats.previews, stats.commits, stats.passes
