"""Thinking that has to end: when, with what, and what does not change."""

from __future__ import annotations

import pytest

from clover.diffusion.generate import GenerationRequest, generate_all
from clover.diffusion.policies import (
    Autoregressive,
    EntropyBound,
    Exact,
    Policy,
    Relaxed,
    Threshold,
)
from clover.diffusion.requests import Finished
from clover.diffusion.sampling import SamplingParams
from clover.engine.engine import Engine
from clover.engine.request import EngineRequest
from clover.engine.thinking import ThinkingBudget
from clover.errors import RequestError
from clover.model.transformer import CloverForCausalLM

END = 40
CLOSING = (41, END, 42)
EOS = frozenset({1})
POLICIES: list[Policy] = [
    Threshold(threshold=0.5),
    EntropyBound(bound=1.0),
    Exact(),
    Relaxed(tolerance=3.0),
    Autoregressive(),
]


def make_budget(num_tokens: int) -> ThinkingBudget:
    return ThinkingBudget(
        num_tokens=num_tokens,
        closing=CLOSING,
        end_token_id=END,
        vocab_size=64,
        eos_token_ids=EOS,
    )


def make_request(policy: Policy, budget: int | None) -> GenerationRequest:
    return GenerationRequest(
        prompt_ids=(5, 9, 12),
        max_tokens=24,
        policy=policy,
        sampling=SamplingParams(logit_bias={END: -100.0, 1: -100.0}),  # no end of itself
        constraint=None if budget is None else make_budget(budget),
    )


def answer(model: CloverForCausalLM, request: GenerationRequest) -> tuple[int, ...]:
    [result] = generate_all(model, [request], eos_token_ids=EOS)
    engine = Engine(model, eos_token_ids=EOS)
    engine.submit(EngineRequest(generation=request))
    [same] = [event.result for event in engine.run() if isinstance(event, Finished)]
    assert same.token_ids == result.token_ids
    return result.token_ids


@pytest.mark.parametrize("policy", POLICIES)
def test_a_spent_budget_closes_thinking(lively_model: CloverForCausalLM, policy: Policy) -> None:
    for budget in (1, 7, 8, 13):
        tokens = answer(lively_model, make_request(policy, budget))
        assert END not in tokens[:budget]
        assert tokens[budget : budget + len(CLOSING)] == CLOSING
        assert len(tokens) == 24  # and the answer follows


def test_until_then_the_text_is_the_parents(lively_model: CloverForCausalLM) -> None:
    free = answer(lively_model, make_request(Autoregressive(), None))
    for policy in (Autoregressive(), Exact()):
        assert answer(lively_model, make_request(policy, 13))[:13] == free[:13]
        assert answer(lively_model, make_request(policy, 24)) == free


def test_thinking_that_ends_in_time_owes_nothing() -> None:
    text = make_budget(3).start()
    text.commit([7, END, 8, 9])
    assert text.forced() == []
    assert text.allowed().all()
    assert text.validate([5, 1, 6]) == 2  # nothing follows the end of the text


def test_a_text_that_is_taken_back_owes_what_it_owed() -> None:
    text = make_budget(2).start()
    text.commit([7, 8, 41])
    assert text.forced() == [END, 42]
    assert text.validate([END, 42, 9]) == 3
    assert text.validate([42]) == 0
    assert text.allowed().nonzero().tolist() == [[END]]
    text.rollback(2)
    assert text.forced() == []
    assert text.validate([8, 41, 9]) == 2
    text.rollback(0)
    assert text.validate([8]) == 1


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(RequestError, match="budget"):
        make_budget(0)


def test_what_the_budget_has_closed_is_not_closed_again() -> None:
    text = make_budget(3).start()
    text.commit([5, 6, 7])
    text.commit(text.forced())
    assert not text.allowed()[END]
    assert text.allowed().sum() == 63
    assert text.validate([8, END, 9]) == 1
    text.rollback(1)
    assert text.validate([CLOSING[-1], 8, END]) == 2


def test_a_model_that_has_closed_thinking_itself_may_write_the_tag() -> None:
    text = make_budget(3).start()
    text.commit([5, END, 7, 8, 9, 10])
    assert text.allowed().all()
    assert text.validate([END]) == 1
