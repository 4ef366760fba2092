from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from clover.config import DiffusionConfig, ModelConfig
from clover.diffusion.generate import (
    BlockCommitted,
    CanvasUpdated,
    Finished,
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
    Threshold,
)
from clover.diffusion.rows import make_rules, start_row
from clover.diffusion.sampling import SamplingParams
from clover.errors import GenerationError, PromptError, RequestError
from clover.model.transformer import CloverForCausalLM

MASK_ID = 63
BLOCK_SIZE = 8
PROMPT = (5, 9, 2, 30, 7)
POLICIES: tuple[Policy, ...] = (
    Threshold(threshold=0.5),
    EntropyBound(bound=1.5),
    Exact(),
    Exact(threshold=0.0),
    Relaxed(tolerance=2.0, threshold=0.0),
    Autoregressive(),
    PromptLookup(),
)


def make_model(config: ModelConfig) -> CloverForCausalLM:
    model = CloverForCausalLM(config)
    model.init_weights(torch.Generator().manual_seed(1))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)  # a lively text instead of one token for ever
        model.lm_head.weight.mul_(8)  # peaked enough that confidences differ
    return model


@pytest.fixture(scope="module")
def models() -> dict[str, CloverForCausalLM]:
    return {}


@pytest.fixture
def model(
    models: dict[str, CloverForCausalLM], tiny_config: Callable[..., ModelConfig]
) -> CloverForCausalLM:
    if "shifted" not in models:
        models["shifted"] = make_model(tiny_config(eos_token_ids=()))
    return models["shifted"]


@pytest.fixture
def in_place_model(tiny_config: Callable[..., ModelConfig]) -> CloverForCausalLM:
    diffusion = DiffusionConfig(block_size=BLOCK_SIZE, mask_token_id=MASK_ID, shift_logits=False)
    return make_model(replace(tiny_config(eos_token_ids=()), diffusion=diffusion))


def as_letters(token_ids: Sequence[int]) -> str:
    return "".join(chr(ord("0") + token_id) for token_id in token_ids)


def request(policy: Policy, **changes: Any) -> GenerationRequest:
    fields: dict[str, Any] = {"prompt_ids": PROMPT, "max_tokens": 21, "policy": policy}
    return GenerationRequest(**(fields | changes))


def run_one(
    model: CloverForCausalLM, policy: Policy, *, eos: Sequence[int] = (), **changes: Any
) -> GenerationResult:
    options = {
        key: changes.pop(key)
        for key in ("fused", "block_size", "forbidden_token_ids")
        if key in changes
    }
    (result,) = generate_all(
        model, [request(policy, **changes)], decode=as_letters, eos_token_ids=eos, **options
    )
    return result


def allowed_argmax(logits: Tensor) -> Tensor:
    return logits.index_fill(-1, torch.tensor([MASK_ID]), -torch.inf).argmax(-1)


def test_autoregressive_is_the_greedy_continuation_of_the_causal_forward(
    model: CloverForCausalLM,
) -> None:
    tokens = list(PROMPT)
    for _ in range(12):
        with torch.no_grad():
            tokens.append(int(allowed_argmax(model(torch.tensor([tokens]))[0, -1])))
    result = run_one(model, Autoregressive(), max_tokens=12)
    assert result.token_ids == tuple(tokens[len(PROMPT) :])


def test_a_parent_is_decoded_autoregressively_and_refuses_other_policies(
    tiny_config: Callable[..., ModelConfig],
) -> None:
    parent = make_model(tiny_config(diffusion=False))
    result = run_one(parent, Autoregressive(), sampling=SamplingParams(temperature=1.0, seed=2))
    assert len(result.token_ids) == 21
    for policy in POLICIES[:-2]:
        with pytest.raises(RequestError, match="autoregressive parent"):
            generate(parent, [request(policy)])


def test_the_first_token_of_a_block_comes_from_the_commit_and_the_rest_one_row_earlier(
    model: CloverForCausalLM,
) -> None:
    cache = model.new_cache(1)
    last = model.commit(cache, torch.tensor([PROMPT]))[:, -1:]
    preview = model.preview(cache, torch.full((1, BLOCK_SIZE), MASK_ID))
    expected = allowed_argmax(torch.cat([last, preview[:, :-1]], dim=1))[0]
    result = run_one(model, Threshold(threshold=0.0), max_tokens=BLOCK_SIZE)
    assert result.token_ids == tuple(expected.tolist())


def test_without_the_shift_predictions_are_read_in_place(in_place_model: CloverForCausalLM) -> None:
    cache = in_place_model.new_cache(1)
    in_place_model.commit(cache, torch.tensor([PROMPT]))
    preview = in_place_model.preview(cache, torch.full((1, BLOCK_SIZE), MASK_ID))
    result = run_one(in_place_model, Threshold(threshold=0.0), max_tokens=BLOCK_SIZE)
    assert result.token_ids == tuple(allowed_argmax(preview)[0].tolist())


@pytest.mark.parametrize("policy", [Exact(), Exact(threshold=0.0)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_exact_without_the_shift_is_autoregressive_too(
    in_place_model: CloverForCausalLM, policy: Policy, temperature: float
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=5)
    exact = run_one(in_place_model, policy, sampling=sampling)
    assert exact.token_ids == run_one(in_place_model, Autoregressive(), sampling=sampling).token_ids


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_relaxed_without_tolerance_is_exact(model: CloverForCausalLM, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=5)
    exact, relaxed = (
        run_one(model, policy, sampling=sampling)
        for policy in (Exact(threshold=0.0), Relaxed(tolerance=0.0, threshold=0.0))
    )
    assert relaxed.token_ids == exact.token_ids
    assert relaxed.stats.passes == exact.stats.passes


def test_relaxed_keeps_drafts_within_its_tolerance_of_the_most_likely_token(
    model: CloverForCausalLM,
) -> None:
    tolerance = 2.0
    result = run_one(model, Relaxed(tolerance=tolerance, threshold=0.0), max_tokens=64)
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *result.token_ids]]))[0, len(PROMPT) - 1 : -1]
    logits = logits.index_fill(-1, torch.tensor([MASK_ID]), -torch.inf)
    drawn = logits.gather(-1, torch.tensor(result.token_ids)[:, None])[:, 0]
    missing = logits.amax(-1) - drawn
    assert missing.max() < tolerance
    assert missing.max() > 0  # something was let pass
    assert result.stats.tpf > run_one(model, Exact(threshold=0.0), max_tokens=64).stats.tpf


@pytest.mark.parametrize("policy", POLICIES)
def test_the_answer_has_exactly_max_tokens_wherever_they_end_in_a_block(
    model: CloverForCausalLM, policy: Policy
) -> None:
    longest = run_one(model, policy, max_tokens=20)
    assert longest.finish_reason == "length"
    for max_tokens in (1, 7, 8, 9, 16):
        result = run_one(model, policy, max_tokens=max_tokens)
        assert result.token_ids == longest.token_ids[:max_tokens]
        assert result.stats.tokens == max_tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_eos_ends_the_text_and_is_no_part_of_it(model: CloverForCausalLM, policy: Policy) -> None:
    tokens = run_one(model, policy).token_ids
    eos = next(t for i, t in enumerate(tokens) if i >= 3 and t not in tokens[:i])
    result = run_one(model, policy, eos=[eos])
    assert result.finish_reason == "eos"
    assert eos not in result.token_ids
    assert result.stats.tokens == len(result.token_ids) + 1
    assert result.text == as_letters(result.token_ids)
    if isinstance(policy, Exact | Autoregressive | PromptLookup):
        assert result.token_ids == tokens[: tokens.index(eos)]


def test_what_lies_right_of_eos_is_neither_resolved_nor_waited_for(
    model: CloverForCausalLM,
) -> None:
    policy = Threshold(threshold=1.0)  # one token a pass
    events = list(generate(model, [request(policy, max_tokens=8)], eos_token_ids=()))
    canvases = [event for event in events if isinstance(event, CanvasUpdated)]
    order = [event.kept[0] for event in canvases]
    last = canvases[-1].canvas
    place = next(p for p in order if p < BLOCK_SIZE - 1)  # the first resolved that has a right side
    result = run_one(model, policy, eos=[last[place]], max_tokens=8)
    assert result.finish_reason == "eos"
    assert len(result.token_ids) <= place
    assert result.stats.passes <= place + 1 + order.index(place)


@pytest.mark.parametrize("policy", POLICIES)
def test_ignore_eos_writes_eos_like_any_token(model: CloverForCausalLM, policy: Policy) -> None:
    tokens = run_one(model, policy).token_ids
    result = run_one(model, policy, eos=[tokens[3]], ignore_eos=True)
    assert result.token_ids == tokens
    assert result.finish_reason == "length"


def test_an_eos_that_is_the_first_token_gives_an_empty_text(model: CloverForCausalLM) -> None:
    first = run_one(model, Autoregressive()).token_ids[0]
    for policy in POLICIES:
        result = run_one(model, policy, eos=[first])
        assert (result.token_ids, result.text, result.finish_reason) == ((), "", "eos")
        assert result.stats.tokens == 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("start", [1, 6, 11])
def test_a_stop_string_cuts_the_text_wherever_it_spans(
    model: CloverForCausalLM, policy: Policy, start: int
) -> None:
    full = run_one(model, policy, sampling=SamplingParams(temperature=1.0, seed=3))
    assert full.text is not None
    stop = full.text[start : start + 4]
    result = run_one(
        model,
        policy,
        sampling=SamplingParams(temperature=1.0, seed=3),
        stop=("not in the text", stop),
    )
    assert result.finish_reason == "stop"
    assert result.text == full.text[: full.text.find(stop)]
    assert as_letters(result.token_ids) == result.text + stop
    assert result.stats.tokens == len(result.token_ids)


def test_of_two_stop_strings_the_first_to_be_complete_counts(model: CloverForCausalLM) -> None:
    full = run_one(
        model, Threshold(threshold=0.0), sampling=SamplingParams(temperature=1.5, seed=9)
    )
    assert full.text is not None
    result = run_one(
        model,
        Threshold(threshold=0.0),
        sampling=SamplingParams(temperature=1.5, seed=9),
        stop=(full.text[2:7], full.text[3:5]),
    )
    start = full.text.find(full.text[3:5])
    assert result.text == full.text[:start]
    assert result.token_ids == full.token_ids[: start + 2]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_context_limit_ends_the_text(model: CloverForCausalLM, policy: Policy) -> None:
    prompt = [3 + i % 50 for i in range(model.config.max_position_embeddings - 10)]
    result = run_one(model, policy, prompt_ids=prompt, max_tokens=None)
    assert result.finish_reason == "context"
    assert len(result.token_ids) == 10


@pytest.mark.parametrize("policy", POLICIES[:2])
def test_the_plain_variant_of_the_fused_pass_gives_the_same_tokens(
    model: CloverForCausalLM, policy: Policy
) -> None:
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature, seed=1)
        fused = run_one(model, policy, sampling=sampling, max_tokens=28)
        plain = run_one(model, policy, sampling=sampling, max_tokens=28, fused=False)
        assert fused.token_ids == plain.token_ids
        assert fused.stats.previews == plain.stats.previews
        assert fused.stats.commits == plain.stats.commits
        assert plain.stats.passes == plain.stats.previews + plain.stats.commits


def test_a_fused_pass_counts_once(model: CloverForCausalLM) -> None:
    stats = run_one(model, Threshold(threshold=0.0), max_tokens=3 * BLOCK_SIZE).stats
    assert (stats.passes, stats.previews, stats.commits) == (3, 3, 3)
    assert stats.tpf == BLOCK_SIZE
    assert stats.seconds > 0


@pytest.mark.parametrize("is_parent", [False, True])
def test_a_looked_up_draft_saves_passes_where_the_text_repeats_itself(
    tiny_config: Callable[..., ModelConfig], is_parent: bool
) -> None:
    dull = CloverForCausalLM(tiny_config(diffusion=not is_parent, eos_token_ids=()))
    dull.init_weights(torch.Generator().manual_seed(1))  # soon one token for ever
    plain = run_one(dull, Autoregressive(), max_tokens=60)
    result = run_one(dull, PromptLookup(num_draft_tokens=7), max_tokens=60)
    assert result.token_ids == plain.token_ids
    assert result.stats.previews == 0
    assert result.stats.commits == result.stats.passes
    assert 60 / 8 <= result.stats.passes < 20


def test_autoregressive_takes_exactly_one_pass_a_token(model: CloverForCausalLM) -> None:
    tokens = run_one(model, Autoregressive()).token_ids
    full = run_one(model, Autoregressive())
    assert (full.stats.tpf, full.stats.passes, full.stats.previews) == (1.0, 21, 0)
    assert run_one(model, Autoregressive(), eos=[tokens[5]]).stats.tpf == 1.0
    assert run_one(model, Autoregressive(), stop=(as_letters(tokens[4:6]),)).stats.tpf == 1.0


def test_exact_verifies_and_drafts_in_one_pass_and_never_takes_more_than_one_a_token(
    model: CloverForCausalLM,
) -> None:
    for threshold in (0.0, 0.3, 1.0):
        stats = run_one(model, Exact(threshold=threshold)).stats
        assert stats.previews < stats.passes == stats.commits <= stats.tokens


def test_behind_a_draft_that_ends_the_text_nothing_is_previewed(model: CloverForCausalLM) -> None:
    plain = run_one(model, Autoregressive(), max_tokens=BLOCK_SIZE)
    one = run_one(model, Exact(threshold=0.0), max_tokens=1)
    assert (one.stats.passes, one.stats.previews) == (1, 0)
    # Its last pass verifies what fills up the text: as long as it is free to draft on, it previews
    full = run_one(model, Exact(threshold=0.0), max_tokens=BLOCK_SIZE)
    assert full.token_ids == plain.token_ids
    assert full.stats.previews < full.stats.passes
    row = start_row(
        0,
        GenerationRequest(prompt_ids=(5, 6), policy=Exact(), max_tokens=8),
        make_rules(model.config, decode=None, eos_token_ids=[9], forbidden_token_ids=()),
        4,
        0.0,
    )
    row.begin()
    canvases: list[tuple[list[int | None], bool]] = [
        ([None, None, None], True),
        ([7, None, None], True),
        ([9, None, None], False),
        ([7, 7, 9], False),
        ([7, None, 9], True),  # what lies behind an open position is no part of the draft
    ]
    for canvas, is_needed in canvases:
        row.canvas = canvas
        assert row.needs_preview() is is_needed
    row.canvas, row.output = [7, 7, 7], [7] * 4
    assert not row.needs_preview()  # three, and the verification's own: all that is left
    row.output.pop()
    assert row.needs_preview()


def test_a_draft_that_is_right_needs_no_pass_of_its_own(model: CloverForCausalLM) -> None:
    always_nine = SamplingParams(temperature=0.0, logit_bias={9: 100.0})
    stats = run_one(
        model, Exact(threshold=0.0), sampling=always_nine, max_tokens=1 + 2 * BLOCK_SIZE
    ).stats
    # The first pass has no draft; then each has one of n - 1 tokens and adds the token after it
    assert (stats.tokens, stats.passes) == (1 + 2 * BLOCK_SIZE, 3)


def test_block_size_one_with_the_shift_is_autoregressive(model: CloverForCausalLM) -> None:
    expected = run_one(model, Autoregressive(), max_tokens=9).token_ids
    for policy in POLICIES:
        assert run_one(model, policy, block_size=1, max_tokens=9).token_ids == expected
    assert run_one(model, Exact(), block_size=1).stats.tpf == 1.0


def test_prompts_of_one_token_and_of_many_share_a_batch(model: CloverForCausalLM) -> None:
    prompts = [(7,), PROMPT, (9,), tuple(range(2, 60)) * 3]
    for policy in POLICIES:
        requests = [request(policy, prompt_ids=prompt, max_tokens=9) for prompt in prompts]
        together = generate_all(model, requests)
        alone = [run_one(model, policy, prompt_ids=prompt, max_tokens=9) for prompt in prompts]
        assert [r.token_ids for r in together] == [r.token_ids for r in alone]


def test_rows_of_every_policy_share_one_call(model: CloverForCausalLM) -> None:
    requests = [request(policy, max_tokens=5 + i) for i, policy in enumerate(POLICIES)]
    results = generate_all(model, requests)
    for i, (policy, result) in enumerate(zip(POLICIES, results, strict=True)):
        assert result.token_ids == run_one(model, policy, max_tokens=5 + i).token_ids


def test_no_requests_give_no_results(model: CloverForCausalLM) -> None:
    assert generate_all(model, []) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_events_tell_the_whole_story(model: CloverForCausalLM, policy: Policy) -> None:
    requests = [request(policy), request(policy, max_tokens=5)]
    final: dict[int, list[int]] = {0: [], 1: []}
    results: dict[int, GenerationResult] = {}
    canvas: dict[int, tuple[int, ...]] = {}
    for event in generate(model, requests):
        assert event.row not in results
        match event:
            case CanvasUpdated(row=row):
                assert event.kept
                before = canvas.get(row, (MASK_ID,) * len(event.canvas))
                for position, token_id in enumerate(event.canvas):
                    is_new = position in event.kept
                    assert (before[position] == MASK_ID) if is_new else before[position] == token_id
                    assert not is_new or token_id != MASK_ID
                canvas[row] = event.canvas
            case BlockCommitted(row=row):
                assert event.token_ids
                final[row] += event.token_ids
                canvas.pop(row, None)
            case Finished(row=row):
                results[row] = event.result
    for row, result in results.items():
        assert tuple(final[row]) == result.token_ids
    assert len(results) == 2


def test_generation_can_be_left_at_any_event(model: CloverForCausalLM) -> None:
    expected = run_one(model, Threshold())
    for policy in POLICIES:
        events = generate(model, [request(policy)])
        next(events)
        events.close()  # type: ignore[attr-defined]
    assert run_one(model, Threshold()).token_ids == expected.token_ids
    assert torch.is_grad_enabled()


def test_a_missing_seed_is_drawn_once_and_reported(model: CloverForCausalLM) -> None:
    sampling = SamplingParams(temperature=1.5)
    first, second = (run_one(model, Exact(), sampling=sampling) for _ in range(2))
    assert first.seed != second.seed
    again = run_one(model, Exact(), sampling=replace(sampling, seed=first.seed))
    assert again.token_ids == first.token_ids


def test_draws_with_one_seed_differ_and_are_reproducible(model: CloverForCausalLM) -> None:
    sampling = SamplingParams(temperature=1.5, seed=7)
    texts = [run_one(model, Autoregressive(), sampling=sampling, draw=i).token_ids for i in (0, 1)]
    assert texts[0] != texts[1]
    assert texts[1] == run_one(model, Exact(), sampling=sampling, draw=1).token_ids


def test_text_is_none_without_decode(model: CloverForCausalLM) -> None:
    (result,) = generate_all(model, [request(Threshold())])
    assert result.text is None


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ((), "found 0"),
        ((5,) * 512, "found 512"),
        ((5,) * 600, "found 600"),
        ((5, 6, MASK_ID), f"token id {MASK_ID} at position 2"),
        ((5, -1), "token id -1 at position 1"),
        ((64,), "token id 64 at position 0"),
        ((5, 60), "token id 60 at position 1"),
    ],
)
def test_a_prompt_that_cannot_be_answered_is_refused_before_any_pass(
    model: CloverForCausalLM, prompt: tuple[int, ...], named: str
) -> None:
    reserved = reserved_token_ids(model.config, num_token_ids=60)
    requests = [request(Threshold()), request(Threshold(), prompt_ids=prompt)]
    with pytest.raises(PromptError, match=f"request 1.*{named}"):
        generate(model, requests, forbidden_token_ids=reserved)


def test_reserved_ids_are_the_mask_and_the_rows_that_the_tokenizer_lacks(
    model: CloverForCausalLM, tiny_config: Callable[..., ModelConfig]
) -> None:
    assert reserved_token_ids(model.config, 61) == {61, 62, 63}
    assert reserved_token_ids(model.config, 64) == {63}
    assert reserved_token_ids(tiny_config(diffusion=False), 64) == frozenset()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"stop": ("a", "")}, "stop is"),
        ({"stop": "text"}, "stop is 'text'"),
        ({"draw": -1}, "draw is -1"),
    ],
)
def test_a_request_knob_out_of_range_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        request(Threshold(), **changes)


def test_knobs_that_cannot_be_honoured_are_refused(model: CloverForCausalLM) -> None:
    with pytest.raises(RequestError, match="decode"):
        generate(model, [request(Threshold(), stop=("x",))])
    with pytest.raises(RequestError, match="block_size is 0"):
        generate(model, [request(Threshold())], block_size=0)
    context = model.config.max_position_embeddings
    with pytest.raises(RequestError, match=f"allowed: 1 to {context}, the context"):
        generate(model, [request(Threshold())], block_size=context + 1)
    for token_id in (MASK_ID, 64):
        sampling = SamplingParams(logit_bias={token_id: 1.0})
        with pytest.raises(RequestError, match=f"token id {token_id}"):
            generate(model, [request(Threshold(), sampling=sampling)])


@pytest.mark.parametrize("policy", POLICIES)
def test_broken_weights_stop_generation_with_an_error(
    tiny_config: Callable[..., ModelConfig], policy: Policy
) -> None:
    broken = make_model(tiny_config())
    with torch.no_grad():
        broken.lm_head.weight[3] = torch.nan
    with pytest.raises(GenerationError, match="NaN"):
        generate_all(broken, [request(policy)])
