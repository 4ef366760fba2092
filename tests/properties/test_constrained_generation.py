"""What a constraint promises of every policy, on a random model: valid texts, exactly sampled."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor

import clover
from clover.chat import parse_reply
from clover.config import DiffusionConfig, ModelConfig
from clover.diffusion.generate import (
    BlockCommitted,
    GenerationRequest,
    GenerationResult,
    generate,
    generate_all,
    reserved_token_ids,
)
from clover.diffusion.policies import (
    Autoregressive,
    EntropyBound,
    Exact,
    Policy,
    PromptLookup,
    Relaxed,
    SelfVerifiedPolicy,
    Threshold,
    VerifiedPolicy,
)
from clover.diffusion.sampling import SamplingParams
from clover.engine.grammar import Grammar, GrammarCompiler
from clover.engine.lark import JsonSchema, Regex, ToolCalls
from clover.errors import GenerationError, RequestError
from clover.model.transformer import CloverForCausalLM
from clover.tokenizer import Tokenizer
from tests.schemas import has_fraction, random_schema

assert clover.__file__ is not None
TOKENIZER = Tokenizer.load(Path(clover.__file__).parent / "assets" / "nano")
VOCAB_SIZE = len(TOKENIZER) + 8
MASK_ID, IM_END, THINK_END = 3, 2, 5
PROMPT = (1, 20, 30, 40)
POLICIES: tuple[Policy, ...] = (
    Threshold(threshold=0.2),
    EntropyBound(bound=4.0),
    Exact(),
    Exact(threshold=0.2),
    Relaxed(tolerance=3.0, threshold=0.1),
    PromptLookup(num_draft_tokens=31),
    Autoregressive(),
)
# Every random schema but those with fractions has a longest text; this is more than any of them.
MAX_TOKENS = 400
# How often a right sampler would fail its test.
LEVEL = 0.01
NUM_SAMPLES, NUM_SIMULATIONS = 600, 999


def make_model(config: ModelConfig) -> CloverForCausalLM:
    model = CloverForCausalLM(config)
    model.init_weights(torch.Generator().manual_seed(1))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)
        model.lm_head.weight.mul_(4)  # peaked enough that policies keep several tokens a pass
    return model


@pytest.fixture(scope="module")
def models() -> dict[bool, CloverForCausalLM]:
    return {}


@pytest.fixture
def make(
    models: dict[bool, CloverForCausalLM], tiny_config: Callable[..., ModelConfig]
) -> Callable[[bool], CloverForCausalLM]:
    """A random model whose predictions are shifted, or (False) read in place."""

    def build(shift_logits: bool) -> CloverForCausalLM:
        if shift_logits not in models:
            config = tiny_config(vocab_size=VOCAB_SIZE, eos_token_ids=(IM_END,))
            diffusion = DiffusionConfig(
                block_size=8, mask_token_id=MASK_ID, shift_logits=shift_logits
            )
            models[shift_logits] = make_model(replace(config, diffusion=diffusion))
        return models[shift_logits]

    return build


@pytest.fixture
def model(make: Callable[[bool], CloverForCausalLM]) -> CloverForCausalLM:
    return make(True)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=[IM_END])


def run(
    model: CloverForCausalLM, requests: Sequence[GenerationRequest], **options: Any
) -> list[GenerationResult]:
    return generate_all(
        model,
        requests,
        decode=TOKENIZER.decode,
        forbidden_token_ids=reserved_token_ids(model.config, len(TOKENIZER)),
        **options,
    )


def request(grammar: Grammar | None, policy: Policy, **changes: Any) -> GenerationRequest:
    fields: dict[str, Any] = {"prompt_ids": PROMPT, "max_tokens": MAX_TOKENS}
    return GenerationRequest(**(fields | {"policy": policy, "constraint": grammar} | changes))


def check_random_schemas(
    model: CloverForCausalLM, compiler: GrammarCompiler, seed: int, num_schemas: int
) -> int:
    """Checks texts of random schemas at temperatures 0 and 1; returns how many ended in time."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 3, 8, 16])
    schemas = [random_schema(rng) for _ in range(num_schemas)]
    cases = [(schema, temperature) for schema in schemas for temperature in (0.0, 1.0)]
    texts: dict[Policy, list[tuple[int, ...]]] = {}
    num_ended = 0
    for policy in POLICIES:
        requests = [
            request(
                compiler.compile(JsonSchema(schema=schema)),
                policy,
                max_tokens=60 if has_fraction(schema) else MAX_TOKENS,
                sampling=SamplingParams(temperature=temperature, seed=index),
            )
            for index, (schema, temperature) in enumerate(cases)
        ]
        results = run(model, requests, block_size=block_size)
        texts[policy] = [result.token_ids for result in results]
        for (schema, _), result in zip(cases, results, strict=True):
            if result.finish_reason == "length" and has_fraction(schema):
                continue
            assert result.finish_reason == "eos", (schema, result.text)
            assert result.text is not None
            jsonschema.validate(json.loads(result.text), schema)
            # A draft and its verification are two passes, which may gain a single token.
            assert (
                isinstance(policy, SelfVerifiedPolicy) or result.stats.tokens >= result.stats.passes
            )
            num_ended += 1
    lossless = [texts[p] for p in POLICIES if isinstance(p, Exact | PromptLookup | Autoregressive)]
    assert all(text == lossless[0] for text in lossless)
    return num_ended


def test_every_finished_text_of_a_random_schema_validates_under_every_policy(
    model: CloverForCausalLM, compiler: GrammarCompiler
) -> None:
    assert check_random_schemas(model, compiler, seed=1, num_schemas=8) > 40


@pytest.mark.slow
def test_a_thousand_texts_validate(model: CloverForCausalLM, compiler: GrammarCompiler) -> None:
    num_ended = seed = 0
    while num_ended < 1000:
        num_ended += check_random_schemas(model, compiler, seed=seed, num_schemas=40)
        seed += 1


def test_exact_is_autoregressive_under_any_knobs_and_where_predictions_are_read_in_place(
    make: Callable[[bool], CloverForCausalLM], compiler: GrammarCompiler
) -> None:
    rng = random.Random(5)
    grammar = compiler.compile(JsonSchema(schema=SHORT))
    samplings = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.5, 2.0]),
            top_p=rng.choice([0.3, 1.0]),
            top_k=rng.choice([0, 3]),
            repetition_penalty=rng.choice([1.0, 1.5]),
            seed=seed,
        )
        for seed in range(10)
    ]
    for shift_logits in (True, False):
        plain, exact = (
            [request(grammar, policy, sampling=sampling) for sampling in samplings]
            for policy in (Autoregressive(), Exact(threshold=0.1))
        )
        expected = run(make(shift_logits), plain)
        for block_size in (1, 2, 8):
            results = run(make(shift_logits), exact, block_size=block_size)
            assert [r.token_ids for r in results] == [r.token_ids for r in expected]


SHORT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "on": {"type": "boolean"}},
    "required": ["name"],
    "additionalProperties": False,
}


def sequence_probabilities(
    model: CloverForCausalLM, grammar: Grammar
) -> dict[tuple[int, ...], float]:
    """Returns each text of a small grammar with the probability that sampling gives it."""
    found: dict[tuple[int, ...], float] = {}
    under_way: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while under_way:
        tokens, probability = under_way.pop()
        if tokens[-1:] == (IM_END,):
            found[tokens[:-1]] = probability
            continue
        constraint = grammar.start()
        constraint.commit(tokens)
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *tokens]]))[0, -1].float()
        probs = logits.masked_fill(~constraint.allowed(), -torch.inf).softmax(-1)
        for token_id in constraint.allowed().nonzero().flatten().tolist():
            under_way.append(((*tokens, token_id), probability * float(probs[token_id])))
    return found


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Returns how often a right sampler's counts lie as far from the probabilities as these."""
    generator = torch.Generator().manual_seed(0)
    num_samples = int(counts.sum())
    draws = torch.multinomial(
        probabilities.expand(NUM_SIMULATIONS, -1), num_samples, True, generator=generator
    )
    simulated = torch.zeros(NUM_SIMULATIONS, len(probabilities)).scatter_add(
        1, draws, torch.ones(draws.shape)
    )
    expected = probabilities * num_samples
    distances = ((torch.cat([counts[None], simulated]) - expected) ** 2 / expected).sum(1)
    return float((distances >= distances[0]).float().mean())


def test_samples_come_from_the_constrained_distribution(
    model: CloverForCausalLM, compiler: GrammarCompiler
) -> None:
    """At level 0.01 against all texts of a grammar, with a look at the power to say no."""
    grammar = compiler.compile(Regex(pattern="(a|b|cd)(x|yz)?"))
    truth = sequence_probabilities(model, grammar)
    assert len(truth) >= 9
    assert sum(truth.values()) == pytest.approx(1.0)
    probabilities = torch.tensor(list(truth.values()))

    def measure(policy: Policy, temperature: float) -> float:
        requests = [
            request(grammar, policy, sampling=SamplingParams(temperature=temperature, seed=seed))
            for seed in range(NUM_SAMPLES)
        ]
        texts = [result.token_ids for result in run(model, requests, block_size=4)]
        return p_value(torch.tensor([float(texts.count(text)) for text in truth]), probabilities)

    assert measure(Autoregressive(), 1.0) > LEVEL
    assert measure(Exact(), 1.0) > LEVEL
    assert measure(Autoregressive(), 2.0) <= LEVEL


@pytest.mark.parametrize("policy", POLICIES)
def test_a_text_cut_by_max_tokens_is_the_beginning_of_the_whole_and_says_so(
    model: CloverForCausalLM, compiler: GrammarCompiler, policy: Policy
) -> None:
    grammar = compiler.compile(JsonSchema(schema=SHORT))
    (whole,) = run(model, [request(grammar, policy)])
    for max_tokens in (1, 4, len(whole.token_ids)):
        (cut,) = run(model, [request(grammar, policy, max_tokens=max_tokens)])
        assert cut.finish_reason == "length"
        assert cut.token_ids == whole.token_ids[:max_tokens]


@pytest.mark.parametrize("policy", POLICIES)
def test_forced_tokens_cost_no_pass(
    model: CloverForCausalLM, compiler: GrammarCompiler, policy: Policy
) -> None:
    (whole,) = run(model, [request(compiler.compile(Regex(pattern="hello there")), policy)])
    assert whole.text == "hello there"
    assert whole.finish_reason == "eos"
    if not isinstance(policy, VerifiedPolicy):  # which verifies what is forced like any draft
        assert whole.stats.passes == 0
    grammar = compiler.compile(Regex(pattern="hello (a|b), hello again, hello there"))
    (result,) = run(model, [request(grammar, policy)], block_size=32)
    assert result.stats.passes <= (2 if isinstance(policy, VerifiedPolicy) else 1)
    assert result.stats.tokens > 8


@pytest.mark.parametrize("policy", POLICIES)
def test_free_and_constrained_rows_share_passes_and_do_not_touch_each_other(
    model: CloverForCausalLM, compiler: GrammarCompiler, policy: Policy
) -> None:
    grammar = compiler.compile(JsonSchema(schema=SHORT))
    requests = [
        request(grammar if index % 2 else None, policy, max_tokens=20, prompt_ids=(7 + index, 30))
        for index in range(4)
    ]
    together = run(model, requests)
    alone = [run(model, [each])[0] for each in requests]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]


@pytest.mark.parametrize("policy", POLICIES)
def test_events_join_to_the_text_also_where_tokens_are_forced(
    model: CloverForCausalLM, compiler: GrammarCompiler, policy: Policy
) -> None:
    grammar = compiler.compile(JsonSchema(schema=SHORT))
    committed: list[int] = []
    for event in generate(model, [request(grammar, policy)], block_size=4):
        if isinstance(event, BlockCommitted):
            committed += event.token_ids
    assert tuple(committed) == run(model, [request(grammar, policy)], block_size=4)[0].token_ids


@pytest.mark.parametrize("policy", POLICIES)
def test_an_answer_after_thinking_is_valid(
    model: CloverForCausalLM, compiler: GrammarCompiler, policy: Policy
) -> None:
    grammar = compiler.compile(Regex(pattern="(yes|no)!{1,3}"), starts_in_thinking=True)
    # A random model thinks for ever; above this the end of thought is drawn within a few tokens.
    sampling = SamplingParams(temperature=1.0, seed=3, logit_bias={THINK_END: 8.0})
    (result,) = run(model, [request(grammar, policy, sampling=sampling, max_tokens=300)])
    assert result.finish_reason == "eos"
    assert result.text is not None
    message = parse_reply(result.text, starts_in_thinking=True)
    assert message.thinking
    assert re.fullmatch("(yes|no)!{1,3}", message.content)


TOOLS = [
    {
        "name": "greet",
        "parameters": {
            "properties": {
                "who": {"type": "string", "maxLength": 4},
                "times": {"type": "integer", "minimum": 1, "maximum": 3},
            },
            "required": ["who", "times"],
        },
    }
]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_random_model_calls_tools_validly(
    model: CloverForCausalLM, compiler: GrammarCompiler, policy: Policy
) -> None:
    grammar = compiler.compile(ToolCalls(tools=TOOLS, choice="required", parallel=False))
    requests = [
        request(grammar, policy, sampling=SamplingParams(temperature=1.0, seed=seed))
        for seed in range(6)
    ]
    for result in run(model, requests):
        assert result.text is not None
        (call,) = parse_reply(result.text, starts_in_thinking=False, tools=TOOLS).tool_calls
        assert call.name == "greet"
        jsonschema.validate(call.arguments, TOOLS[0]["parameters"])


def test_constraints_that_do_not_fit_the_model_are_refused(
    model: CloverForCausalLM, compiler: GrammarCompiler
) -> None:
    form = Regex(pattern="a")
    narrow = GrammarCompiler(TOKENIZER, vocab_size=1024, eos_token_ids=[IM_END]).compile(form)
    with pytest.raises(RequestError, match="vocabulary of 1024"):
        run(model, [request(narrow, Exact())])
    with pytest.raises(RequestError, match=r"ends with one of \[2\], this loop with one of \[7\]"):
        run(model, [request(compiler.compile(form), Exact())], eos_token_ids=[7])
    with pytest.raises(RequestError, match="ignore_eos"):
        request(compiler.compile(form), Exact(), ignore_eos=True)


@pytest.mark.parametrize("policy", POLICIES)
def test_forbidden_ids_that_leave_a_grammar_nothing_are_an_error(
    model: CloverForCausalLM, compiler: GrammarCompiler, policy: Policy
) -> None:
    digits = [token_id for digit in "01" for token_id in TOKENIZER.encode(digit)]
    grammar = compiler.compile(Regex(pattern="[01]{3}"))
    with pytest.raises(GenerationError, match="forbidden ids leave over"):
        generate_all(model, [request(grammar, policy)], forbidden_token_ids=digits)
    forced = compiler.compile(Regex(pattern="0 or more"))
    with pytest.raises(GenerationError, match="forbidden id"):
        generate_all(model, [request(forced, policy)], forbidden_token_ids=digits)
