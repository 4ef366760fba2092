"""Noise: what is masked, how often, and that a counter is all its memory."""

from __future__ import annotations

import pytest
import torch

from clover.diffusion.noise import (
    EditConfig,
    NoisedBlocks,
    Predict,
    add_edits,
    choose_block_size,
    complement,
    counter_generator,
    draw_prefix_lengths,
    draw_wrong_tokens,
    noise_blocks,
    sample_wrong_tokens,
)
from clover.errors import ConfigError

MASK = 99
# Six standard deviations of a mean over at least 2,000 draws in [0, 1]
STATISTICAL_TOLERANCE = 6 * 0.3 / 2_000**0.5


def _noise(is_token: torch.Tensor, *, step: int = 0, min_level: float = 0.0) -> NoisedBlocks:
    targets = torch.arange(is_token.numel()).view(is_token.shape) % 50
    return noise_blocks(
        targets,
        is_token,
        mask_token_id=MASK,
        min_level=min_level,
        generator=counter_generator(0, step, "test"),
    )


def test_canvas_is_the_target_where_a_token_was_kept_and_a_mask_elsewhere() -> None:
    is_token = torch.ones(3, 5, 8, dtype=torch.bool)
    is_token[:, -1, 3:] = False
    noised = _noise(is_token)
    targets = torch.arange(120).view(3, 5, 8) % 50
    kept = is_token & ~noised.masked
    assert torch.equal(noised.canvas[kept], targets[kept])
    assert (noised.canvas[~kept] == MASK).all()
    assert kept.any() and noised.masked.any()


def test_positions_without_a_token_are_masks_that_nobody_predicts() -> None:
    is_token = torch.zeros(2, 4, 8, dtype=torch.bool)
    is_token[:, :2, :5] = True
    noised = _noise(is_token)
    assert not noised.masked[~is_token].any()
    assert (noised.canvas[~is_token] == MASK).all()


def test_every_block_with_a_token_has_at_least_one_masked() -> None:
    is_token = torch.zeros(1, 4_000, 4, dtype=torch.bool)
    is_token[..., 0] = True  # one token: at a low level it would nearly always be kept
    assert bool(_noise(is_token).masked[..., 0].all())


def test_level_is_uniform_and_is_the_share_of_masked_tokens() -> None:
    is_token = torch.ones(1, 4_000, 64, dtype=torch.bool)
    noised = _noise(is_token)
    share = noised.masked.float().mean(dim=-1)
    assert abs(float(noised.level.mean()) - 0.5) < STATISTICAL_TOLERANCE
    for low in (0.0, 0.25, 0.5, 0.75):
        chosen = (noised.level > low) & (noised.level <= low + 0.25)
        assert abs(float(chosen.float().mean()) - 0.25) < STATISTICAL_TOLERANCE
        difference = share[chosen].mean() - noised.level[chosen].mean()
        assert abs(float(difference)) < STATISTICAL_TOLERANCE


def test_min_level_bounds_the_level_from_below() -> None:
    noised = _noise(torch.ones(1, 2_000, 4, dtype=torch.bool), min_level=0.8)
    assert float(noised.level.min()) > 0.8
    assert float(noised.level.max()) <= 1.0


def test_min_level_of_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"min_level must be in \[0, 1\), found 1.0"):
        _noise(torch.ones(1, 1, 1, dtype=torch.bool), min_level=1.0)


def test_everything_right_of_a_visible_prefix_is_masked_and_other_blocks_are_as_ever() -> None:
    is_token = torch.ones(40, 60, 16, dtype=torch.bool)
    is_token[:, ::2, 5:] = False
    lengths = draw_prefix_lengths(is_token, 1.0, counter_generator(0, 0, "prefix"))
    assert set(lengths[:, ::2].unique().tolist()) == set(range(5))
    assert set(lengths[:, 1::2].unique().tolist()) == set(range(16))
    targets = torch.zeros(is_token.shape, dtype=torch.int64)
    noised = noise_blocks(
        targets,
        is_token,
        mask_token_id=MASK,
        min_level=0.0,
        generator=counter_generator(0, 0, "test"),
        prefix_lengths=lengths,
    )
    behind = is_token & (torch.arange(16) >= lengths[..., None])
    has_prefix = lengths > 0
    assert torch.equal(noised.masked[has_prefix], behind[has_prefix])
    assert (noised.level[has_prefix] == 1).all()
    without = noise_blocks(
        targets,
        is_token,
        mask_token_id=MASK,
        min_level=0.0,
        generator=counter_generator(0, 0, "test"),
    )
    assert torch.equal(noised.masked[~has_prefix], without.masked[~has_prefix])


def test_a_block_of_all_masks_shows_nothing_and_others_are_as_ever() -> None:
    is_token = torch.ones(2, 40, 8, dtype=torch.bool)
    is_token[:, ::4, 3:] = False
    all_masks = torch.zeros(2, 40, dtype=torch.bool)
    all_masks[:, ::2] = True
    prefixes = draw_prefix_lengths(is_token, 0.5, counter_generator(0, 0, "prefix"))

    def noise(all_masks: torch.Tensor | None) -> NoisedBlocks:
        return noise_blocks(
            torch.zeros(is_token.shape, dtype=torch.int64),
            is_token,
            mask_token_id=MASK,
            min_level=0.1,
            generator=counter_generator(0, 0, "test"),
            prefix_lengths=prefixes,
            all_masks=all_masks,
        )

    noised, without = noise(all_masks), noise(None)
    assert (prefixes[all_masks] > 0).any()
    assert torch.equal(noised.masked[all_masks], is_token[all_masks])
    assert (noised.canvas[all_masks] == MASK).all() and (noised.level[all_masks] == 1).all()
    assert torch.equal(noised.masked[~all_masks], without.masked[~all_masks])
    assert torch.equal(noised.level[~all_masks], without.level[~all_masks])


def test_prefixes_are_as_frequent_as_asked() -> None:
    is_token = torch.ones(50, 80, 32, dtype=torch.bool)
    for probability in (0.0, 0.5):
        lengths = draw_prefix_lengths(is_token, probability, counter_generator(0, 0, "prefix"))
        # A prefix is empty once in 32 times
        expected = probability * 31 / 32
        assert float((lengths > 0).float().mean()) == pytest.approx(expected, abs=0.03)


def test_noise_depends_on_seed_step_and_purpose_alone() -> None:
    is_token = torch.ones(2, 3, 16, dtype=torch.bool)
    torch.manual_seed(1)
    first = _noise(is_token, step=7)
    torch.manual_seed(2)
    again, other = _noise(is_token, step=7), _noise(is_token, step=8)
    assert torch.equal(first.masked, again.masked)
    assert not torch.equal(first.masked, other.masked)
    seeds = {
        counter_generator(seed, step, purpose).initial_seed()
        for seed in range(3)
        for step in range(3)
        for purpose in ("a", "b")
    }
    assert len(seeds) == 18


def test_complement_masks_exactly_what_the_first_canvas_shows() -> None:
    is_token = torch.ones(4, 500, 8, dtype=torch.bool)
    is_token[:, ::5, 3:] = False
    is_token[:, ::7, 1:] = False
    targets = torch.arange(is_token.numel()).view(is_token.shape) % 50
    first = _noise(is_token)
    second = complement(first, targets, is_token, mask_token_id=MASK)
    is_whole = (first.masked == is_token).all(dim=-1)
    assert is_whole.any() and not is_whole.all()
    assert torch.equal(second.masked[~is_whole], (is_token & ~first.masked)[~is_whole])
    # Nothing was shown: decoding's first canvas, once more
    assert torch.equal(second.masked[is_whole], first.masked[is_whole])
    assert second.masked.any(dim=-1).all()
    kept = is_token & ~second.masked
    assert torch.equal(second.canvas[kept], targets[kept])
    assert (second.canvas[~kept] == MASK).all()


def test_a_complements_level_is_the_chance_that_its_tokens_had_to_be_masked() -> None:
    is_token = torch.ones(1, 4_000, 16, dtype=torch.bool)
    first = _noise(is_token)
    second = complement(first, torch.zeros_like(is_token).long(), is_token, mask_token_id=MASK)
    is_whole = first.masked.all(dim=-1)
    inner = ~is_whole & (first.level < 15 / 16)
    assert torch.equal(second.level[inner], 1.0 - first.level[inner])
    assert torch.equal(second.level[is_whole], first.level[is_whole])
    # A level near 0 would give the few tokens that 1/level weights an unbounded weight
    assert float(second.level.min()) >= 1 / 16
    share = second.masked[inner].float().mean() - second.level[inner].mean()
    assert abs(float(share)) < 2 * STATISTICAL_TOLERANCE


def test_the_complement_of_a_prefix_masks_the_prefix_at_the_level_of_its_share() -> None:
    is_token = torch.ones(1, 3, 8, dtype=torch.bool)
    targets = torch.arange(24).view(1, 3, 8)
    first = noise_blocks(
        targets,
        is_token,
        mask_token_id=MASK,
        min_level=0.0,
        generator=counter_generator(0, 0, "test"),
        prefix_lengths=torch.tensor([[1, 4, 7]]),
    )
    second = complement(first, targets, is_token, mask_token_id=MASK)
    assert second.masked.sum(dim=-1).tolist() == [[1, 4, 7]]
    assert torch.equal(second.level, torch.tensor([[1, 4, 7]]) / 8)


def _no_preview(canvas: torch.Tensor) -> torch.Tensor:
    raise AssertionError("edits by chance alone need no preview")


def _edit(
    noised: NoisedBlocks,
    targets: torch.Tensor,
    is_token: torch.Tensor,
    config: EditConfig,
    predict: Predict = _no_preview,
) -> NoisedBlocks:
    return add_edits(
        noised,
        targets,
        is_token,
        config,
        mask_token_id=MASK,
        text_ids=torch.arange(2, 50),
        predict=predict,
        generator=counter_generator(0, 0, "edits"),
    )


def test_edits_are_wrong_tokens_of_text_in_visible_places_as_often_as_asked() -> None:
    is_token = torch.ones(4, 500, 8, dtype=torch.bool)
    is_token[:, ::3, 5:] = False
    targets = 2 + torch.arange(is_token.numel()).view(is_token.shape) % 48
    noised = _noise(torch.ones_like(is_token))
    edited = _edit(noised, targets, is_token, EditConfig(probability=0.25))
    visible = is_token & ~noised.masked
    assert not edited.edited[~visible].any()
    share = edited.edited[visible].float().mean()
    assert abs(float(share) - 0.25) < STATISTICAL_TOLERANCE
    wrong = edited.canvas[edited.edited]
    assert (wrong != targets[edited.edited]).all() and (wrong >= 2).all() and (wrong < 50).all()
    assert torch.equal(edited.canvas[~edited.edited], noised.canvas[~edited.edited])
    assert torch.equal(edited.masked, noised.masked)
    again = _edit(noised, targets, is_token, EditConfig(probability=0.25))
    assert torch.equal(edited.canvas, again.canvas)


def test_the_model_draws_edits_looking_at_masks_in_their_place() -> None:
    is_token = torch.ones(2, 200, 8, dtype=torch.bool)
    targets = 2 + torch.arange(is_token.numel()).view(is_token.shape) % 40
    noised = _noise(is_token)
    seen = []

    def predict(canvas: torch.Tensor) -> torch.Tensor:
        seen.append(canvas)
        logits = torch.full((*canvas.shape, MASK + 1), -torch.inf)
        logits[..., 45] = 0.0
        return logits.scatter(-1, targets.unsqueeze(-1), 20.0)  # nearly sure of the truth

    config = EditConfig(probability=0.5, model_share=0.5)
    edited = _edit(noised, targets, is_token, config, predict)
    (canvas,) = seen
    by_model = (canvas == MASK) & ~noised.masked
    assert by_model.any() and (edited.edited & ~by_model).any()
    assert (edited.canvas[by_model] == 45).all() and edited.edited[by_model].all()
    assert torch.equal(canvas[~by_model], noised.canvas[~by_model])


def test_wrong_tokens_by_chance_are_uniform_over_the_others() -> None:
    text_ids = torch.tensor([3, 5, 8, 9])
    targets = torch.full((8_000,), 5)
    drawn = draw_wrong_tokens(targets, text_ids, counter_generator(0, 0, "draws"))
    for token_id, share in ((3, 1 / 3), (5, 0.0), (8, 1 / 3), (9, 1 / 3)):
        assert abs(float((drawn == token_id).float().mean()) - share) < STATISTICAL_TOLERANCE


def test_wrong_tokens_of_the_model_follow_its_probabilities_without_the_target() -> None:
    logits = torch.tensor([-torch.inf, 0.2, 3.0, 1.0, -torch.inf]).expand(8_000, 5)
    targets = torch.full((8_000,), 2)
    drawn = sample_wrong_tokens(logits, targets, counter_generator(0, 0, "draws"))
    expected = torch.tensor([0.2, 1.0]).softmax(-1)
    assert set(drawn.tolist()) == {1, 3}
    assert abs(float((drawn == 1).float().mean() - expected[0])) < STATISTICAL_TOLERANCE


def test_a_share_outside_its_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"edits\.model_share must be in \[0, 1\], found 1.5"):
        EditConfig(model_share=1.5)


def test_every_block_size_is_chosen_about_equally_often() -> None:
    generator = counter_generator(0, 0, "sizes")
    chosen = [choose_block_size((4, 8, 32), generator) for _ in range(3_000)]
    for size in (4, 8, 32):
        assert abs(chosen.count(size) / 3_000 - 1 / 3) < STATISTICAL_TOLERANCE
