"""One pass of rows in different phases gives each row what a pass of its own would."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from clover.config import (
    AttentionConfig,
    DeltaNetConfig,
    DenseMlpConfig,
    DiffusionConfig,
    ModelConfig,
    MoeConfig,
)
from clover.model.cache import Cache
from clover.model.transformer import CloverForCausalLM

TOLERANCE = 1e-4
"""fp32 logits near 1, the same formula with other shapes of products."""

# A commit with a preview, a prefill, a preview, a verification, a canvas of one, a verification with
# a preview, an autoregressive step
LENGTHS = [12, 0, 5, 9, 1, 7, 11]  # history
CLEAN = [3, 4, 0, 6, 1, 5, 1]
CANVAS = [8, 0, 5, 0, 1, 8, 0]
ACCEPTED = [3, 4, 0, 2, 1, 2, 1]


@functools.cache
@torch.no_grad()
def random_model(mlp: str) -> CloverForCausalLM:
    moe = MoeConfig(
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=8,
    )
    coreset_size = 3 if mlp == "coreset" else None
    config = ModelConfig(
        vocab_size=40,
        hidden_size=16,
        layer_types=("linear_attention", "full_attention", "linear_attention"),
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        max_position_embeddings=128,
        attention=AttentionConfig(
            num_heads=4, num_kv_heads=2, head_dim=6, rotary_dim=4, rope_theta=100.0
        ),
        delta_net=DeltaNetConfig(
            num_k_heads=2, num_v_heads=4, head_k_dim=6, head_v_dim=5, conv_kernel_size=4
        ),
        mlp=DenseMlpConfig(intermediate_size=16) if mlp == "dense" else moe,
        diffusion=DiffusionConfig(block_size=8, mask_token_id=39, expert_coreset_size=coreset_size),
    )
    model, generator = CloverForCausalLM(config).eval(), torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith(("A_log", "dt_bias")):
            weight.copy_(0.5 * noise - 1.0)
        elif weight.dim() == 1:
            weight.add_(0.3 * noise)  # c among them: the size of a padded block matters
        else:
            weight.copy_(noise if "embed" in name else noise * weight.shape[-1] ** -0.5)
    return model


def random_ids(tokens: int, seed: int) -> Tensor:
    return torch.randint(39, (len(LENGTHS), tokens), generator=torch.Generator().manual_seed(seed))


def filled_cache(model: CloverForCausalLM) -> Cache:
    cache = model.new_cache(len(LENGTHS))
    model.commit(cache, random_ids(12, seed=0), lengths=LENGTHS)
    return cache


every_mlp = pytest.mark.parametrize("mlp", ["dense", "moe", "coreset"])


@every_mlp
@torch.no_grad()
def test_every_row_of_a_mixed_pass_is_as_if_alone(mlp: str) -> None:
    model = random_model(mlp)
    cache, clean, canvas = filled_cache(model), random_ids(6, seed=1), random_ids(8, seed=2)
    hidden, transaction = model.mixed_pass(cache, clean, canvas, CLEAN, CANVAS, keep_trace=True)
    logits = model.logits(hidden)
    transaction.commit(ACCEPTED)
    for row, (num_clean, size, accepted) in enumerate(zip(CLEAN, CANVAS, ACCEPTED, strict=True)):
        alone = filled_cache(model).select([row])
        committed = alone.fork()
        tokens = clean[row : row + 1, :num_clean]
        if num_clean:
            expected = model.commit(committed, tokens)
            assert (logits[row : row + 1, :num_clean] - expected).abs().max() <= TOLERANCE
            model.commit(alone, tokens[:, :accepted])
        if size:
            previewed = model.preview(committed, canvas[row : row + 1, :size])
            assert (logits[row : row + 1, 6 : 6 + size] - previewed).abs().max() <= TOLERANCE
        if num_clean and size:
            one_canvas = canvas[row : row + 1, :size]
            verified, previewed, _ = model.verify_and_preview(
                filled_cache(model).select([row]), tokens, one_canvas
            )
            both = torch.cat([verified, previewed], dim=1)[0]
            found = torch.cat([logits[row, :num_clean], logits[row, 6 : 6 + size]])
            assert (found - both).abs().max() <= TOLERANCE
        assert cache.lengths[row] == alone.lengths[0] == LENGTHS[row] + accepted
        probe = random_ids(4, seed=3)[:1]
        found = model.commit(cache.select([row]), probe)
        assert (found - model.commit(alone, probe)).abs().max() <= TOLERANCE


@every_mlp
@torch.no_grad()
def test_what_lies_in_the_padding_of_a_canvas_changes_nothing(mlp: str) -> None:
    model = random_model(mlp)
    clean, canvas = random_ids(6, seed=1), random_ids(8, seed=2)
    other = canvas.clone()
    for row, size in enumerate(CANVAS):
        other[row, size:] = (other[row, size:] + 7) % 39
    first, second = (
        model.mixed_pass(filled_cache(model), clean, ids, CLEAN, CANVAS)[0]
        for ids in (canvas, other)
    )
    for row, size in enumerate(CANVAS):
        assert (first[row, 6 : 6 + size] - second[row, 6 : 6 + size]).abs().sum() <= TOLERANCE
        assert torch.isfinite(first).all()


@torch.no_grad()
def test_a_mixed_pass_that_is_not_committed_leaves_the_cache_as_it_was() -> None:
    model = random_model("moe")
    cache = filled_cache(model)
    before = [cache.snapshot(row) for row in range(len(LENGTHS))]
    model.mixed_pass(cache, random_ids(6, seed=1), random_ids(8, seed=2), CLEAN, CANVAS)
    for row, old in enumerate(before):
        new = cache.snapshot(row)
        assert new.length == old.length
        for x, y in zip(old.layers, new.layers, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(x, y, strict=True))


def test_counts_past_what_was_given_are_refused() -> None:
    model = random_model("dense")
    clean, canvas = random_ids(6, seed=1), random_ids(8, seed=2)
    with pytest.raises(ValueError, match="tokens per row"):
        model.mixed_pass(filled_cache(model), clean, canvas, CLEAN, [9, *[0] * 6])
