"""Routing, the ways to compute the experts, and the coreset that a preview's block shares."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clover.config import (
    AttentionConfig,
    DeltaNetConfig,
    DiffusionConfig,
    ModelConfig,
    MoeConfig,
)
from clover.model.moe import (
    Experts,
    SparseMoe,
    record_router_logits,
    restrict_to_coreset,
)
from clover.model.streams import Streams
from clover.model.transformer import CloverForCausalLM

TOLERANCE = 1e-5
"""fp32 against float64, outputs and gradients near 1: sums of some tens of terms."""

BF16_TOLERANCE = 0.02
"""bf16 keeps eight bits: 0.4 % a rounding, three products one after the other."""

HIDDEN_SIZE = 12


def random_moe(
    num_experts: int,
    per_token: int,
    coreset_size: int | None = None,
    seed: int = 0,
    hidden_size: int = HIDDEN_SIZE,
) -> SparseMoe:
    config = MoeConfig(
        num_experts=num_experts,
        num_experts_per_tok=per_token,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=10,
    )
    moe = SparseMoe(config, hidden_size, coreset_size)
    generator = torch.Generator().manual_seed(seed)
    for weight in moe.parameters():
        weight.data = torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5
    return moe


def layout(num_clean: int, num_blocks: int = 0, block_size: int = 0) -> Streams:
    num_tokens = num_clean + num_blocks * block_size
    return Streams(
        num_clean=num_clean,
        num_blocks=num_blocks,
        block_size=block_size,
        position_ids=torch.arange(num_tokens)[None],
        attention_mask=None,
    )


def random_hidden(rows: int, tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, tokens, HIDDEN_SIZE, generator=generator)


def slow_moe(moe: SparseMoe, x: Tensor, allowed: list[list[int]]) -> Tensor:
    """Returns the layer's output [X, D] token by token in float64; `allowed` experts per token."""
    w = {name: weight.double() for name, weight in moe.named_parameters()}
    outputs = []
    for token, experts in zip(x.double(), allowed, strict=True):
        p = (w["gate.weight"] @ token).softmax(0)
        ranked = sorted(experts, key=(-p).tolist().__getitem__)
        chosen = ranked[: moe.num_experts_per_tok]
        total = torch.zeros_like(token)
        for expert in chosen:
            gate, up = (w["experts.gate_up_proj"][expert] @ token).chunk(2)
            share = p[expert] / sum(p[e] for e in chosen)
            total = total + share * (w["experts.down_proj"][expert] @ (F.silu(gate) * up))
        gate = w["shared_expert.gate_proj.weight"] @ token
        up = w["shared_expert.up_proj.weight"] @ token
        shared = w["shared_expert.down_proj.weight"] @ (F.silu(gate) * up)
        outputs.append(total + torch.sigmoid(w["shared_expert_gate.weight"] @ token) * shared)
    return torch.stack(outputs)


def slow_coreset(moe: SparseMoe, block: Tensor, size: int) -> list[int]:
    """Returns the experts that the tokens of one block [n, D] may use."""
    rows = [(moe.gate.weight.double() @ x.double()).softmax(0).tolist() for x in block]
    scores = [max(row[expert] for row in rows) for expert in range(len(rows[0]))]
    return sorted(range(len(scores)), key=lambda expert: -scores[expert])[:size]


# One token reads its own experts alone, more are sorted by expert.
ways = pytest.mark.parametrize(
    ("num_experts", "per_token", "tokens"),
    [
        (6, 2, 10),
        (3, 1, 5),
        (4, 4, 20),
        (6, 2, 90),
        (20, 3, 4),
        (40, 5, 70),
        (3, 1, 80),
        (6, 2, 1),
        (40, 5, 1),
    ],
)


@ways
def test_the_layer_is_its_slow_formula_with_the_same_gradients(
    num_experts: int, per_token: int, tokens: int
) -> None:
    moe, x = random_moe(num_experts, per_token), random_hidden(1, tokens).requires_grad_()
    everyone = [list(range(num_experts))] * tokens
    found, expected = moe(x, layout(tokens))[0], slow_moe(moe, x[0], everyone)
    assert (found - expected).abs().max() <= TOLERANCE
    direction = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    weights = [x, *moe.parameters()]
    gradients = torch.autograd.grad((found * direction).sum(), weights)
    wanted = torch.autograd.grad((expected * direction).sum(), weights)
    for gradient, reference in zip(gradients, wanted, strict=True):
        error = (gradient - reference).abs().max()
        assert error <= TOLERANCE * reference.abs().max().clamp(min=1.0)


@ways
def test_the_experts_equal_their_own_reference(
    num_experts: int, per_token: int, tokens: int
) -> None:
    experts: Experts = random_moe(num_experts, per_token).experts
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, HIDDEN_SIZE, generator=generator)
    weights, indices = torch.rand(tokens, num_experts, generator=generator).topk(per_token)
    with torch.no_grad():
        error = experts(x, weights, indices) - experts.forward_reference(x, weights, indices)
    assert error.abs().max() <= TOLERANCE


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, TOLERANCE), (torch.bfloat16, BF16_TOLERANCE)]
)
@pytest.mark.parametrize(
    ("num_experts", "per_token", "tokens"), [(6, 2, 10), (40, 5, 70), (9, 1, 1)]
)
def test_grouped_products_equal_the_experts_reference(
    num_experts: int, per_token: int, tokens: int, dtype: torch.dtype, tolerance: float
) -> None:
    experts: Experts = random_moe(num_experts, per_token, hidden_size=16).experts.to(dtype)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(tokens, 16, generator=generator).to(dtype)
    # The last expert gets no token: a group may be empty.
    scores = torch.rand(tokens, num_experts - 1, generator=generator)
    weights, indices = scores.topk(per_token)
    with torch.no_grad():
        found = experts._forward_grouped(x, weights.to(dtype), indices)
        expected = experts.float().forward_reference(x.float(), weights, indices)
    assert found.dtype == dtype
    assert (found - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("tokens", [10, 90])
def test_tokens_do_not_depend_on_their_batch(tokens: int) -> None:
    moe, x = random_moe(6, 2), random_hidden(2, tokens)
    with torch.no_grad():
        together = moe(x, layout(tokens))
        for token in (0, tokens - 1):
            alone = moe(x[1:, token : token + 1], layout(1))
            assert (together[1:, token : token + 1] - alone).abs().max() <= TOLERANCE


@pytest.mark.parametrize("tokens", [10, 90])
def test_bf16_weights_are_routed_in_fp32(tokens: int) -> None:
    moe, x = random_moe(6, 2), random_hidden(1, tokens)
    # Router logits that bf16 probabilities could not tell apart near 1/6, exact in bf16 themselves.
    moe.gate.weight.data = torch.zeros(6, HIDDEN_SIZE)
    moe.gate.weight.data[:, 0] = torch.tensor([0, 1, 2, 3, 5, 4]) * 2.0**-10
    x[..., 0] = 1.0
    x = x.bfloat16()
    moe = moe.bfloat16()
    with torch.no_grad():
        found = moe(x, layout(tokens))
    assert found.dtype == torch.bfloat16
    expected = slow_moe(moe, x[0], [[4, 5]] * tokens)
    correlation = torch.corrcoef(torch.stack([found[0].double().flatten(), expected.flatten()]))
    assert correlation[0, 1] > 0.999


def test_an_experts_score_is_its_best_token_not_its_mean() -> None:
    probabilities = torch.tensor([[0.5, 0.5, 0.0], [0.45, 0.55, 0.0], [0.4, 0.0, 0.6]])
    # By the mean 0 (0.45) and 1 (0.35) would be in; by the best token 2 (0.6) and 1 (0.55) are.
    expected = torch.tensor([[0.0, 0.5, 0.0], [0.0, 0.55, 0.0], [0.0, 0.0, 0.6]])
    assert torch.equal(restrict_to_coreset(probabilities, 2), expected)


def test_blocks_choose_their_coresets_apart() -> None:
    probabilities = torch.tensor([[[0.7, 0.2, 0.1]], [[0.1, 0.2, 0.7]]])  # two blocks of one token
    restricted = restrict_to_coreset(probabilities, 1)
    assert torch.equal(restricted, torch.tensor([[[0.7, 0.0, 0.0]], [[0.0, 0.0, 0.7]]]))


@given(
    seed=st.integers(0, 2**31),
    num_clean=st.integers(0, 12),
    num_blocks=st.integers(1, 3),
    block_size=st.integers(1, 8),
    coreset_size=st.integers(2, 6),
)
@settings(max_examples=20)
@torch.no_grad()
def test_a_coreset_restricts_each_block_and_no_clean_token(
    seed: int, num_clean: int, num_blocks: int, block_size: int, coreset_size: int
) -> None:
    moe = random_moe(6, 2, coreset_size, seed)
    streams = layout(num_clean, num_blocks, block_size)
    x = random_hidden(2, num_clean + num_blocks * block_size, seed)
    found = moe(x, streams)
    for row in range(2):
        allowed = [list(range(6))] * num_clean
        for block in x[row, num_clean:].split(block_size):
            allowed += [slow_coreset(moe, block, coreset_size)] * block_size
        assert (found[row] - slow_moe(moe, x[row], allowed)).abs().max() <= TOLERANCE


CONFIG = ModelConfig(
    vocab_size=40,
    hidden_size=16,
    layer_types=("linear_attention", "full_attention"),
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    max_position_embeddings=128,
    attention=AttentionConfig(
        num_heads=2, num_kv_heads=1, head_dim=8, rotary_dim=4, rope_theta=100.0
    ),
    delta_net=DeltaNetConfig(
        num_k_heads=1, num_v_heads=2, head_k_dim=8, head_v_dim=8, conv_kernel_size=4
    ),
    mlp=MoeConfig(
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
    ),
)


def model_with_coreset(size: int | None) -> CloverForCausalLM:
    diffusion = DiffusionConfig(block_size=8, mask_token_id=39, expert_coreset_size=size)
    model = CloverForCausalLM(replace(CONFIG, diffusion=diffusion)).eval()
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            scale = 1.0 if "embed" in name else weight.shape[-1] ** -0.5
            weight.data = scale * torch.randn(weight.shape, generator=generator)
    return model


@torch.no_grad()
def run_all_passes(model: CloverForCausalLM) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the logits of clean tokens and those of canvas tokens, from every pass."""
    generator = torch.Generator().manual_seed(3)
    input_ids, canvas = (torch.randint(39, (2, 8), generator=generator) for _ in range(2))
    cache, fused = model.new_cache(2), model.new_cache(2)
    starts = torch.tensor([[4], [8]])
    clean, noised = model.two_stream(input_ids, None, canvas[:, None], starts)
    committed, previewed = model.commit_and_preview(fused, input_ids, canvas)
    verified, _ = model.verify(model.new_cache(2), input_ids)
    commits = [model(input_ids), clean, committed, verified, model.commit(cache, input_ids)]
    return commits, [noised, previewed, model.preview(cache, canvas)]


def test_a_coreset_of_all_experts_is_no_coreset() -> None:
    commits, previews = run_all_passes(model_with_coreset(6))
    free_commits, free_previews = run_all_passes(model_with_coreset(None))
    for x, y in zip(commits + previews, free_commits + free_previews, strict=True):
        assert torch.equal(x, y)


def test_a_small_coreset_changes_every_preview_and_no_commit() -> None:
    commits, previews = run_all_passes(model_with_coreset(2))
    free_commits, free_previews = run_all_passes(model_with_coreset(None))
    for x, y in zip(commits, free_commits, strict=True):
        # An expert's product also holds the canvas's rows, and their number moves the rounding
        assert (x - y).abs().max() <= TOLERANCE
    for x, y in zip(previews, free_previews, strict=True):
        assert (x - y).abs().max() > 0.01


def test_router_logits_are_recorded_inside_the_context_alone_and_change_nothing() -> None:
    model = model_with_coreset(2)
    input_ids = torch.arange(16).view(2, 8)
    canvas, starts = torch.full((2, 1, 4), 39), torch.tensor([[4], [8]])
    before = model.two_stream(input_ids, None, canvas, starts)
    with record_router_logits(model) as records:
        during = model.two_stream(input_ids, None, canvas, starts)
    after = model.two_stream(input_ids, None, canvas, starts)
    assert [tuple(logits.shape) for logits in records] == [(24, 6), (24, 6)]
    for x, y, z in zip(before, during, after, strict=True):
        assert torch.equal(x, y) and torch.equal(x, z)
    with record_router_logits(model, enabled=False) as nothing:
        model(input_ids)
    assert nothing == []


@torch.no_grad()
def test_a_pass_may_have_a_coreset_of_its_own() -> None:
    input_ids = torch.arange(16).view(2, 8)
    canvas, starts = torch.full((2, 1, 4), 39), torch.tensor([[4], [8]])
    small, middle = model_with_coreset(2), model_with_coreset(4)
    clean, noised = small.two_stream(input_ids, None, canvas, starts, coreset_size=4)
    for x, y in zip(
        (clean, noised), middle.two_stream(input_ids, None, canvas, starts), strict=True
    ):
        assert torch.equal(x, y)
    assert not torch.equal(noised, small.two_stream(input_ids, None, canvas, starts)[1])


def test_autocast_experts_compute_in_bf16_and_learn_in_fp32() -> None:
    moe = random_moe(num_experts=4, per_token=2)
    x = random_hidden(1, 128)[0]
    weights, indices = torch.rand(len(x), 4).topk(2)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        output = moe.experts(x, weights, indices)
    assert output.dtype == torch.bfloat16
    expected = moe.experts.forward_reference(x, weights, indices)
    assert (output - expected).norm() < BF16_TOLERANCE * expected.norm()
    output.sum().backward()
    for weight in moe.experts.parameters():
        assert weight.grad is not None and weight.grad.dtype == torch.float32
