from __future__ import annotations

import itertools

import pytest
import torch

from clover.diffusion.policies import (
    MODES,
    Autoregressive,
    EntropyBound,
    Exact,
    Policy,
    PromptLookup,
    Relaxed,
    Threshold,
    choose_positions,
    keep_confident,
    keep_low_entropy,
    look_up,
    parse_policy,
)
from clover.errors import RequestError

ALL_OPEN = torch.ones(4, dtype=torch.bool)


def test_threshold_keeps_every_confidence_above_it() -> None:
    kept = keep_confident(torch.tensor([0.95, 0.9, 0.2, 0.91]), ALL_OPEN, 0.9)
    assert kept.tolist() == [True, False, False, True]


def test_threshold_keeps_the_leftmost_open_position_however_unsure() -> None:
    is_open = torch.tensor([False, True, True, True])
    kept = keep_confident(torch.tensor([0.8, 0.1, 0.3, 0.2]), is_open, 0.9)
    assert kept.tolist() == [False, True, False, False]
    kept = keep_confident(torch.tensor([0.8, 0.1, 0.3, 0.95]), is_open, 0.9)
    assert kept.tolist() == [False, True, False, True]


def test_threshold_never_keeps_a_closed_position() -> None:
    is_open = torch.tensor([False, True, False, False])
    kept = keep_confident(torch.tensor([0.99, 0.1, 0.99, 0.99]), is_open, 0.5)
    assert kept.tolist() == [False, True, False, False]


def test_threshold_one_keeps_one_and_threshold_zero_keeps_all() -> None:
    confidence = torch.tensor([1.0, 1.0, 0.5, 0.1])
    assert keep_confident(confidence, ALL_OPEN, 1.0).sum() == 1
    assert keep_confident(confidence, ALL_OPEN, 0.0).all()


def test_entropy_bound_keeps_the_most_positions_that_satisfy_the_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        entropy = torch.rand(5, generator=generator)
        is_open = torch.rand(5, generator=generator) < 0.7
        bound = float(2 * torch.rand((), generator=generator))
        kept = keep_low_entropy(entropy, is_open, bound)
        if not is_open.any():
            assert not kept.any()
            continue
        ranked = sorted(e for e, o in zip(entropy.tolist(), is_open.tolist(), strict=True) if o)
        sizes = [k for k in range(1, len(ranked) + 1) if sum(ranked[: k - 1]) <= bound]
        assert kept.sum() == max(sizes)
        assert sorted(entropy[kept].tolist()) == ranked[: max(sizes)]
        assert not (kept & ~is_open).any()


def test_entropy_bound_zero_keeps_the_most_certain_one() -> None:
    kept = keep_low_entropy(torch.tensor([0.4, 0.1, 0.3, 0.2]), ALL_OPEN, 0.0)
    assert kept.tolist() == [False, True, False, False]


@pytest.mark.parametrize("policy", [Threshold(threshold=1.0), EntropyBound(bound=0.0)])
def test_at_least_one_position_is_kept_while_any_is_open(policy: Threshold | EntropyBound) -> None:
    for flags in itertools.product([False, True], repeat=3):
        is_open = torch.tensor(flags)
        kept = choose_positions(
            policy, confidence=torch.zeros(3), entropy=torch.full((3,), 9.0), is_open=is_open
        )
        assert kept.any() == is_open.any()
        assert not (kept & ~is_open).any()


def test_a_draft_ends_before_the_first_doubtful_prediction() -> None:
    for confidence, length in [
        ([0.6, 0.5, 0.4, 0.9], 2),
        ([0.4, 0.9, 0.9, 0.9], 0),
        ([1.0] * 4, 4),
    ]:
        kept = choose_positions(
            Exact(threshold=0.5),
            confidence=torch.tensor(confidence),
            entropy=torch.zeros(4),
            is_open=ALL_OPEN,
        )
        assert kept.tolist() == [position < length for position in range(4)]


def test_policies_work_on_the_last_axis_of_any_shape() -> None:
    values = torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(1))
    is_open = torch.ones(2, 3, 5, dtype=torch.bool)
    for together, alone in [
        (keep_confident(values, is_open, 0.6), keep_confident(values[1, 2], is_open[1, 2], 0.6)),
        (
            keep_low_entropy(values, is_open, 0.6),
            keep_low_entropy(values[1, 2], is_open[1, 2], 0.6),
        ),
    ]:
        assert torch.equal(together[1, 2], alone)


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2]),  # three tokens agree
        ([7, 3, 8, 2, 3, 9, 2, 3], [9, 2, 3]),  # two agree, which beats the nearer one
        ([3, 8, 5, 3, 9, 5, 2, 3], [9, 5, 2]),  # one agrees in two places: the last
        ([1, 2, 3, 8, 1, 2, 3, 9, 0, 1, 2, 3], [9, 0, 1]),  # no more than three count
        ([4, 4, 4], [4, 4, 4]),  # what reaches the end goes on as a period
        ([6, 5, 6, 5], [6, 5, 6]),
        ([5, 6], []),
        ([5], []),
    ],
)
def test_a_looked_up_draft_follows_the_last_of_the_longest_matches(
    tokens: list[int], draft: list[int]
) -> None:
    assert look_up(tokens, max_ngram_size=3, max_tokens=3) == draft


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("threshold", Threshold()),
        ("threshold=0.75", Threshold(threshold=0.75)),
        ("entropy_bound", EntropyBound()),
        ("entropy_bound=0.5", EntropyBound(bound=0.5)),
        ("exact", Exact()),
        ("exact=0.8", Exact(threshold=0.8)),
        ("relaxed", Relaxed()),
        ("relaxed=2.5", Relaxed(tolerance=2.5)),
        ("fast", MODES["fast"]),
        ("balanced", MODES["balanced"]),
        ("prompt_lookup", PromptLookup()),
        ("prompt_lookup=4", PromptLookup(num_draft_tokens=4)),
        ("autoregressive", Autoregressive()),
    ],
)
def test_a_policy_is_read_from_its_name_and_value(text: str, policy: Policy) -> None:
    assert parse_policy(text) == policy


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("greedy", "greedy"),
        ("", "allowed"),
        ("autoregressive=1", "autoregressive=1"),
        ("threshold=", "policy is 'threshold='; allowed: fast, balanced, exact"),
        ("threshold=high", "policy is 'threshold=high'; allowed: fast"),
        ("threshold=1.5", "threshold is 1.5; allowed: 0 to 1"),
        ("threshold=nan", "threshold is nan"),
        ("entropy_bound=-1", "bound is -1.0; allowed: 0 or more"),
        ("entropy_bound=inf", "bound is inf"),
        ("relaxed=-1", "tolerance is -1.0; allowed: 0 or more"),
        ("fast=1", "policy is 'fast=1'; allowed: fast, balanced, exact[=0..1]"),
        ("exact=1.5", "threshold is 1.5; allowed: 0 to 1"),
        ("exact=long", "exact[=0..1]"),
        ("prompt_lookup=0", "num_draft_tokens is 0; allowed: 1 to 256"),
        ("prompt_lookup=1000000000", "num_draft_tokens is 1000000000; allowed: 1 to 256"),
        ("prompt_lookup=2.5", "prompt_lookup[=tokens]"),
    ],
)
def test_a_policy_that_is_not_understood_says_what_is_wrong(text: str, named: str) -> None:
    with pytest.raises(RequestError) as error:
        parse_policy(text)
    assert named in str(error.value)
