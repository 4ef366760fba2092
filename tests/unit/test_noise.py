"""Noise: what is masked, how often, and that a counter is all its memory."""

from __future__ import annotations

import pytest
import torch

from clover.diffusion.noise import (
    NoisedBlocks,
    choose_block_size,
    counter_generator,
    draw_prefix_lengths,
    noise_blocks,
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


def test_every_block_size_is_chosen_about_equally_often() -> None:
    generator = counter_generator(0, 0, "sizes")
    chosen = [choose_block_size((4, 8, 32), generator) for _ in range(3_000)]
    for size in (4, 8, 32):
        assert abs(chosen.count(size) / 3_000 - 1 / 3) < STATISTICAL_TOLERANCE
