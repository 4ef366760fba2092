from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from clover.diffusion.sampling import (
    Proposals,
    SamplingParams,
    TokenCounts,
    adjust_logits,
    count_left,
    draw_tokens,
    filter_logits,
    gumbel_noise,
    measure_certainty,
    predict,
    remove_forbidden,
)
from clover.errors import GenerationError, RequestError

VOCAB_SIZE = 40
MASK_ID = 39
NOTHING = torch.tensor([], dtype=torch.int64)

# Chi-square with 7 degrees of freedom exceeds this with probability 0.001; the seeds are fixed.
CHI_SQUARE_7_AT_0_001 = 24.32


def random_logits(*shape: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(*shape, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def row_positions(num_rows: int, num_positions: int) -> Tensor:
    return torch.arange(num_positions).expand(num_rows, -1)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.1, "0 to 100"),
        ("temperature", math.nan, "0 to 100"),
        ("temperature", math.inf, "0 to 100"),
        ("top_k", -1, "an integer >= 0"),
        ("top_k", 1.5, "an integer >= 0"),
        ("top_p", 0.0, "above 0, up to 1"),
        ("top_p", 1.01, "above 0, up to 1"),
        ("min_p", -0.5, "0 to 1"),
        ("repetition_penalty", 0.0, "0.01 to 100"),
        ("presence_penalty", 2.5, "-2 to 2"),
        ("frequency_penalty", -3.0, "-2 to 2"),
        ("seed", 2**63, "None or a signed 64-bit integer"),
    ],
)
def test_a_knob_out_of_range_is_named_with_its_value_and_range(
    field: str, value: Any, allowed: str
) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**{field: value})
    assert str(error.value) == f"{field} is {value!r}; allowed: {allowed}"


@pytest.mark.parametrize("bias", [{3: 101.0}, {3: math.nan}, {-1: 1.0}])
def test_a_logit_bias_out_of_range_is_refused(bias: dict[int, float]) -> None:
    with pytest.raises(RequestError, match="logit_bias"):
        SamplingParams(logit_bias=bias)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.1, seed=1),
        SamplingParams(temperature=5.0, seed=1),
        SamplingParams(temperature=1.0, top_k=1, seed=1),
        SamplingParams(temperature=1.0, top_p=0.1, min_p=0.5, seed=1),
        SamplingParams(logit_bias={2: 100.0}),
        SamplingParams(repetition_penalty=9.0, presence_penalty=2.0, frequency_penalty=-2.0),
    ],
)
def test_confidence_and_entropy_ignore_every_knob(params: SamplingParams) -> None:
    logits = random_logits(1, 6)
    positions = row_positions(1, 6)
    counts = count_left([1, 2], [2, 3], [None, 4, None, 5, None, None], VOCAB_SIZE)
    forbidden = torch.tensor([MASK_ID])
    plain = predict(logits, [SamplingParams()], positions, forbidden_ids=forbidden)
    other = predict(logits, [params], positions, forbidden_ids=forbidden, counts=counts)
    assert torch.equal(plain.confidence, other.confidence)
    assert torch.equal(plain.entropy, other.entropy)


def test_confidence_is_the_largest_probability_among_allowed_ids() -> None:
    logits = torch.tensor([[[2.0, 1.0, 9.0, 0.0]]])
    confidence, entropy = measure_certainty(remove_forbidden(logits, torch.tensor([2])))
    weights = [math.exp(2), math.exp(1), math.exp(0)]
    probs = [weight / sum(weights) for weight in weights]
    assert confidence.item() == pytest.approx(max(probs), rel=1e-6)
    assert entropy.item() == pytest.approx(-sum(p * math.log(p) for p in probs), rel=1e-6)


def test_what_a_constraint_excludes_is_neither_drawn_nor_counted_in_the_confidence() -> None:
    logits = random_logits(2, 3)
    allowed = torch.rand(2, 3, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) < 0.3
    params = [SamplingParams(), SamplingParams(temperature=2.0, seed=4, logit_bias={0: 100.0})]
    prediction = predict(
        logits, params, row_positions(2, 3), forbidden_ids=torch.tensor([MASK_ID]), allowed=allowed
    )
    allowed[..., MASK_ID] = False
    assert allowed.gather(-1, prediction.tokens[..., None]).all()
    expected = logits.masked_fill(~allowed, -torch.inf).softmax(-1).amax(-1)
    torch.testing.assert_close(prediction.confidence, expected)


def test_a_forbidden_id_is_never_drawn_whatever_its_logit_and_bias() -> None:
    logits = random_logits(1, 200)
    logits[..., MASK_ID] = 50.0
    params = SamplingParams(temperature=100.0, logit_bias={MASK_ID: 100.0}, seed=4)
    forbidden = torch.tensor([MASK_ID, 0])
    tokens = predict(logits, [params], row_positions(1, 200), forbidden_ids=forbidden).tokens
    assert not {MASK_ID, 0} & set(tokens.flatten().tolist())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_stop_generation(bad: float) -> None:
    logits = random_logits(2, 3)
    logits[1, 2, 5] = bad
    with pytest.raises(GenerationError, match="batch row 1, position 2"):
        remove_forbidden(logits, torch.tensor([MASK_ID]))


def test_a_position_without_any_allowed_token_stops_generation() -> None:
    with pytest.raises(GenerationError, match="none"):
        remove_forbidden(random_logits(1, 1), torch.arange(VOCAB_SIZE))


def test_every_row_of_a_batch_is_drawn_as_if_it_were_alone() -> None:
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=2.0, top_k=3, seed=2),
        SamplingParams(temperature=2.0, top_p=0.3, seed=3),
        SamplingParams(temperature=2.0, min_p=0.2, seed=4),
        SamplingParams(temperature=1.0, repetition_penalty=4.0, seed=5),
        SamplingParams(presence_penalty=2.0, frequency_penalty=1.0),
        SamplingParams(temperature=0.5, logit_bias={7: 8.0}, seed=6),
    ]
    logits = random_logits(1, 12).expand(8, -1, -1)
    one = count_left([1, 2, 3], [23, 23, 5], [None, 19] * 6, VOCAB_SIZE)
    counts = TokenCounts(seen=one.seen.expand(8, -1, -1), output=one.output.expand(8, -1, -1))
    together = draw_tokens(logits, params, row_positions(8, 12), counts=counts)
    for row, row_params in enumerate(params):
        alone = draw_tokens(logits[:1], [row_params], row_positions(1, 12), counts=one)
        assert torch.equal(together[row], alone[0])
    assert len({tuple(row) for row in together.tolist()}) == 8


def test_greedy_takes_the_most_likely_token_and_no_filter_changes_that() -> None:
    logits = random_logits(1, 30)
    params = SamplingParams(top_k=2, top_p=0.1, min_p=0.9, seed=8)
    tokens = draw_tokens(logits, [params], row_positions(1, 30))
    assert torch.equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1e-4, 1e-3, 100.0])
def test_extreme_temperatures_and_logits_still_draw_real_tokens(temperature: float) -> None:
    logits = random_logits(1, 30) * 1e37
    params = SamplingParams(temperature=temperature, repetition_penalty=0.01, top_p=0.5, seed=1)
    counts = count_left([1, 2, 3], [], [None] * 30, VOCAB_SIZE)
    tokens = draw_tokens(logits, [params], row_positions(1, 30), counts=counts)
    assert ((tokens >= 0) & (tokens < VOCAB_SIZE)).all()


def test_draws_follow_the_tempered_softmax() -> None:
    num_draws, temperature = 20_000, 1.7
    logits = torch.linspace(-2, 2, 8)
    expected = (logits / temperature).softmax(-1) * num_draws
    for axis in ("seed", "position", "draw"):
        steps = torch.arange(num_draws)[:, None]
        zeros = torch.zeros_like(steps)
        noise = gumbel_noise(
            steps if axis == "seed" else zeros,
            steps if axis == "position" else zeros,
            steps if axis == "draw" else zeros,
            8,
        )
        drawn = (logits / temperature + noise[:, 0]).argmax(-1)
        observed = drawn.bincount(minlength=8)
        chi_square = ((observed - expected) ** 2 / expected).sum()
        assert chi_square < CHI_SQUARE_7_AT_0_001, axis


def test_noise_has_the_moments_of_a_standard_gumbel_and_no_correlation() -> None:
    noise = gumbel_noise(torch.tensor([[11]]), torch.arange(1000)[None], torch.tensor([[0]]), 400)[
        0
    ]
    # 400,000 values: six standard errors are 0.013 for the mean, 0.026 for the variance.
    assert noise.mean().item() == pytest.approx(0.5772157, abs=0.013)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)
    flat = torch.stack([noise[:-1].flatten(), noise[1:].flatten()])
    assert abs(torch.corrcoef(flat)[0, 1].item()) < 0.01
    flat = torch.stack([noise[:, :-1].flatten(), noise[:, 1:].flatten()])
    assert abs(torch.corrcoef(flat)[0, 1].item()) < 0.01


def test_noise_is_splitmix64_in_wrapping_integers() -> None:
    def mix(state: int) -> int:
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
        return state ^ (state >> 31)

    gamma = 0x9E3779B97F4A7C15
    for seed, position, draw in [(0, 0, 0), (-5, 7, 1), (2**63 - 1, 10**6, 3)]:
        key = mix((seed + gamma) % 2**64)
        key = mix((key + position * gamma) % 2**64)
        key = mix((key + draw * gamma) % 2**64)
        bits = [mix((key + (token_id + 1) * gamma) % 2**64) >> 12 for token_id in range(5)]
        expected = [-math.log(-math.log((b + 0.5) / 2**52)) for b in bits]
        noise = gumbel_noise(torch.tensor(seed), torch.tensor(position), torch.tensor(draw), 5)
        assert noise.tolist() == pytest.approx(expected, rel=1e-12)


def test_seed_position_and_draw_each_change_the_noise_and_nothing_else_does() -> None:
    def noise(seed: int, position: int, draw: int) -> list[float]:
        values = gumbel_noise(torch.tensor(seed), torch.tensor(position), torch.tensor(draw), 4)
        result: list[float] = values.tolist()
        return result

    assert noise(1, 2, 3) == noise(1, 2, 3)
    assert len({tuple(noise(*key)) for key in [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4)]}) == 4


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.1)])
def test_filters_keep_what_a_plain_loop_keeps(top_k: int, top_p: float, min_p: float) -> None:
    logits = random_logits(1, 20)
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = filter_logits(logits, [params]).isfinite()[0]
    for position in range(20):
        probs = logits[0, position].double().softmax(-1).tolist()
        ranked = sorted(range(VOCAB_SIZE), key=lambda token_id: -probs[token_id])
        expected, mass = set(), 0.0
        for rank, token_id in enumerate(ranked):
            if (top_k and rank >= top_k) or mass >= top_p or probs[token_id] < min_p * max(probs):
                break
            expected.add(token_id)
            mass += probs[token_id]
        assert set(kept[position].nonzero().flatten().tolist()) == expected


def test_a_full_top_p_drops_nothing() -> None:
    logits = random_logits(2, 50)
    params = [SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=4)]
    assert torch.equal(filter_logits(logits, params)[0], logits[0])


def test_counts_see_prompt_output_and_the_canvas_to_the_left() -> None:
    counts = count_left([1, 1], [2], [3, None, 2, None], 5)
    assert counts.output[0].tolist() == [
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 2, 1, 0],
    ]
    assert counts.seen[0].tolist() == [
        [False, True, True, False, False],
        [False, True, True, True, False],
        [False, True, True, True, False],
        [False, True, True, True, False],
    ]


def test_penalties_are_applied_after_the_bias_as_documented() -> None:
    logits = torch.tensor([[[1.0, -1.0, 1.0, 0.0, 1.0]]])
    params = SamplingParams(
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={2: 3.0, 4: -1.0},
    )
    counts = count_left([0, 1], [2, 2], [None], 5)
    adjusted = adjust_logits(logits, [params], counts)
    assert adjusted.flatten().tolist() == [0.5, -2.0, (1.0 + 3.0) / 2 - 0.5 - 2 * 0.25, 0.0, 0.0]


def test_penalties_without_counts_are_a_programming_error() -> None:
    with pytest.raises(ValueError, match="counts"):
        adjust_logits(random_logits(1, 1), [SamplingParams(presence_penalty=1.0)], None)


def test_nothing_forbidden_leaves_logits_as_they_are() -> None:
    logits = random_logits(2, 3)
    assert torch.equal(remove_forbidden(logits, NOTHING), logits)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_proposal_is_drawn_where_its_score_is_within_the_tolerance_of_the_best(
    temperature: float,
) -> None:
    tolerances = torch.tensor([0.0, 2.0, 50.0])
    logits, positions = random_logits(3, 30), row_positions(3, 30)
    params = [SamplingParams(temperature=temperature, seed=4, top_k=8)] * 3
    tokens = logits.topk(3).indices[..., 2]
    tokens[:, ::5] = -1
    proposals = Proposals(tokens=tokens, tolerance=tolerances)
    drawn = draw_tokens(logits, params, positions, proposals=proposals)
    for row, tolerance in enumerate(tolerances.tolist()):
        for position in range(30):
            scores = logits[row, position].double()
            if temperature:
                # What top-k leaves out is never drawn, however large the tolerance
                scores[scores < scores.topk(8).values[-1]] = -torch.inf
                noise = gumbel_noise(
                    torch.tensor(4), torch.tensor(position), torch.tensor(0), VOCAB_SIZE
                )
                scores = scores / temperature + noise
            proposed = int(tokens[row, position])
            is_close = proposed >= 0 and scores.max() - scores[proposed] < tolerance
            expected = proposed if is_close else int(scores.argmax())
            assert drawn[row, position] == expected


def test_a_proposal_that_is_not_allowed_is_not_drawn() -> None:
    logits = random_logits(1, 4)
    allowed = torch.ones_like(logits, dtype=torch.bool)
    allowed[..., :20] = False
    proposals = Proposals(tokens=torch.tensor([[0, 5, 25, -1]]), tolerance=torch.tensor([1e9]))
    drawn = predict(
        logits,
        [SamplingParams()],
        row_positions(1, 4),
        forbidden_ids=NOTHING,
        allowed=allowed,
        proposals=proposals,
    ).tokens
    best = logits[..., 20:].argmax(-1)[0] + 20
    assert drawn[0].tolist() == [int(best[0]), int(best[1]), 25, int(best[3])]
