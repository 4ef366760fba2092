"""Commit and preview give the numbers of a slow model written straight from the design's formulas.

The reference below works token by token, head by head, in float64, on one sequence. It shares no
code with the package; it reads the weights by their checkpoint names.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clover.config import (
    AttentionConfig,
    DeltaNetConfig,
    DenseMlpConfig,
    DiffusionConfig,
    ModelConfig,
    MoeConfig,
)
from clover.model.cache import DeltaNetCache
from clover.model.transformer import CloverForCausalLM

LOGIT_TOLERANCE = 1e-4
"""Of the standard deviation of the logits: fp32 against float64, 6e-8 a rounding."""

STATE_TOLERANCE = 1e-4
"""Of the largest entry of a recurrent state, for the same reason."""

VOCAB_SIZE = 50


@dataclass
class LayerHistory:
    """What one layer remembers: rotated keys and values, or pre-conv rows and states per head."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    mixed: list[Tensor] = field(default_factory=list)
    states: dict[int, Tensor] = field(default_factory=dict)


class SlowModel:
    """One sequence of one model, in float64."""

    def __init__(self, model: CloverForCausalLM) -> None:
        self.config = model.config
        self.weights = {name: w.detach().double() for name, w in model.named_parameters()}
        self.history = [LayerHistory() for _ in range(self.config.num_layers)]
        self.length = 0

    def commit(self, token_ids: list[int]) -> Tensor:
        """Returns AR logits [T, V] and appends the tokens to the history."""
        logits = []
        for token in token_ids:
            logits.append(self._run([token], is_preview=False))
            self.length += 1
        return torch.cat(logits)

    def preview(self, canvas: list[int]) -> Tensor:
        """Returns canvas logits [n, V]."""
        return self._run(canvas, is_preview=True)

    def _run(self, token_ids: list[int], *, is_preview: bool) -> Tensor:
        x = self.weights["model.embed_tokens.weight"][token_ids]
        for index, layer_type in enumerate(self.config.layer_types):
            name, history = f"model.layers.{index}.", self.history[index]
            normed = self._norm(x, name + "input_layernorm")
            if layer_type == "full_attention":
                x = x + self._attention(normed, name + "self_attn.", history, is_preview)
            elif is_preview:
                x = x + self._gdn_preview(normed, name + "linear_attn.", history)
            else:
                x = x + self._gdn_commit(normed, name + "linear_attn.", history)
            normed = self._norm(x, name + "post_attention_layernorm")
            x = x + self._mlp(normed, name + "mlp.", is_preview)
        x = self._norm(x, "model.norm")
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return x @ head.T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        return x * scale * (1.0 + self.weights[name + ".weight"])

    def _rotate(self, x: Tensor, position: int) -> Tensor:
        width = self.config.attention.rotary_dim
        out = x.clone()
        for i in range(width // 2):
            angle = position / self.config.attention.rope_theta ** (2 * i / width)
            a, b = x[i], x[i + width // 2]
            out[i] = a * math.cos(angle) - b * math.sin(angle)
            out[i + width // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def _attention(self, x: Tensor, name: str, history: LayerHistory, is_preview: bool) -> Tensor:
        shape, w = self.config.attention, self.weights
        dim = shape.head_dim
        keys, values = list(history.keys), list(history.values)
        for t, row in enumerate(x):
            key = (w[name + "k_proj.weight"] @ row).view(shape.num_kv_heads, dim)
            key = self._norm(key, name + "k_norm")
            keys.append(torch.stack([self._rotate(head, self.length + t) for head in key]))
            values.append((w[name + "v_proj.weight"] @ row).view(shape.num_kv_heads, dim))
        outputs = []
        for t, row in enumerate(x):
            heads = []
            for head, rows in enumerate((w[name + "q_proj.weight"] @ row).split(2 * dim)):
                query, gate = rows.split(dim)
                query = self._rotate(self._norm(query, name + "q_norm"), self.length + t)
                kv_head = head * shape.num_kv_heads // shape.num_heads
                logits = torch.stack([query @ key[kv_head] for key in keys]) / dim**0.5
                shares = logits.softmax(0)
                mixed = sum(s * v[kv_head] for s, v in zip(shares, values, strict=True))
                heads.append(mixed * torch.sigmoid(gate))
            outputs.append(w[name + "o_proj.weight"] @ torch.cat(heads))
        if not is_preview:
            assert len(x) == 1  # causal: one token at a time
            history.keys, history.values = keys, values
        return torch.stack(outputs)

    def _gdn_heads(self, convolved: Tensor, head: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q^, k^ and v of one value head from the conv's output [C] after SiLU."""
        shape = self.config.delta_net
        key_head = head // (shape.num_v_heads // shape.num_k_heads)
        q, k, v = convolved.split([shape.key_dim, shape.key_dim, shape.value_dim])
        q = q.view(shape.num_k_heads, -1)[key_head]
        k = k.view(shape.num_k_heads, -1)[key_head]
        q, k = (x / (x.pow(2).sum() + 1e-6).sqrt() for x in (q, k))
        return q, k, v.view(shape.num_v_heads, -1)[head]

    def _gdn_output(self, o: Tensor, x: Tensor, name: str) -> Tensor:
        """Returns W_o [RMSNorm(o) * w * SiLU(z)] of one token; o is [H, V], x is [D]."""
        w = self.weights
        z = (w[name + "in_proj_z.weight"] @ x).view_as(o)
        scale = (o.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        gated = o * scale * w[name + "norm.weight"] * F.silu(z)
        return w[name + "out_proj.weight"] @ gated.flatten()

    def _ring(self, history: LayerHistory) -> list[Tensor]:
        """Returns the last kernel-1 pre-conv rows of history, zeros before its start."""
        shape = self.config.delta_net
        width = shape.conv_kernel_size - 1
        nothing = [torch.zeros(shape.conv_dim, dtype=torch.float64)] * width
        return (nothing + history.mixed)[len(history.mixed) :]

    def _state(self, history: LayerHistory, head: int) -> Tensor:
        shape = self.config.delta_net
        zeros = torch.zeros(shape.head_k_dim, shape.head_v_dim, dtype=torch.float64)
        return history.states.get(head, zeros)

    def _gdn_commit(self, x: Tensor, name: str, history: LayerHistory) -> Tensor:
        shape, w, row = self.config.delta_net, self.weights, x[0]
        window = [*self._ring(history), w[name + "in_proj_qkv.weight"] @ row]
        taps = w[name + "conv1d.weight"][:, 0].T  # [W, C], the oldest row first
        convolved = F.silu(sum(tap * rows for tap, rows in zip(taps, window, strict=True)))
        outputs = []
        for head in range(shape.num_v_heads):
            q, k, v = self._gdn_heads(convolved, head)
            beta = torch.sigmoid(w[name + "in_proj_b.weight"][head] @ row)
            step = F.softplus(w[name + "in_proj_a.weight"][head] @ row + w[name + "dt_bias"][head])
            state = torch.exp(-w[name + "A_log"][head].exp() * step) * self._state(history, head)
            state = state + beta * torch.outer(k, v - state.T @ k)
            outputs.append(state.T @ q / shape.head_k_dim**0.5)
            history.states[head] = state
        history.mixed.append(window[-1])
        return self._gdn_output(torch.stack(outputs), row, name)[None]

    def _gdn_preview(self, x: Tensor, name: str, history: LayerHistory) -> Tensor:
        shape, w, n = self.config.delta_net, self.weights, len(x)
        kernel = shape.conv_kernel_size
        block = [w[name + "in_proj_qkv.weight"] @ row for row in x]
        rows = [*self._ring(history), *block]  # [R|m]
        left, right = w[name + "conv1d.weight"][:, 0], w[name + "conv_right_weight"]
        convolved = []
        for t in range(n):
            total = sum(left[:, j] * rows[t + j] for j in range(kernel))
            for d in range(1, kernel):
                if t + d < n:
                    total = total + right[:, d - 1] * block[t + d]
            convolved.append(F.silu(total))
        outputs = []
        for i in range(n):
            heads = []
            for head in range(shape.num_v_heads):
                q = self._gdn_heads(convolved[i], head)[0]
                others = [self._gdn_heads(y, head) for y in convolved]
                logits = [
                    w[name + "bd_softmax_history_bias"][head]
                    + w[name + "bd_softmax_history_c"][head] * math.log(n)
                ]
                tau = w[name + "bd_softmax_logit_scale"][head]
                logits += [tau * (q @ k) for _, k, _ in others]
                shares = torch.stack(logits).softmax(0)
                mixed = shares[0] * (self._state(history, head).T @ q)
                for share, (_, _, v) in zip(shares[1:], others, strict=True):
                    mixed = mixed + share * v
                heads.append(mixed / shape.head_k_dim**0.5)
            outputs.append(self._gdn_output(torch.stack(heads), x[i], name))
        return torch.stack(outputs)

    def _swiglu(self, x: Tensor, name: str) -> Tensor:
        w = self.weights
        gate, up = w[name + "gate_proj.weight"] @ x, w[name + "up_proj.weight"] @ x
        return w[name + "down_proj.weight"] @ (F.silu(gate) * up)

    def _mlp(self, x: Tensor, name: str, is_preview: bool) -> Tensor:
        if isinstance(self.config.mlp, DenseMlpConfig):
            return torch.stack([self._swiglu(row, name) for row in x])
        w, per_token = self.weights, self.config.mlp.num_experts_per_tok
        probabilities = [(w[name + "gate.weight"] @ row).softmax(0).tolist() for row in x]
        experts = list(range(self.config.mlp.num_experts))
        diffusion = self.config.diffusion
        if is_preview and diffusion is not None and diffusion.expert_coreset_size is not None:
            # An expert's score is its best probability over the block; the best C are admitted.
            scores = [max(row[expert] for row in probabilities) for expert in experts]
            experts.sort(key=lambda expert: -scores[expert])
            experts = experts[: diffusion.expert_coreset_size]
        outputs = []
        for row, p in zip(x, probabilities, strict=True):
            chosen = sorted(experts, key=lambda expert: -p[expert])[:per_token]
            total = torch.zeros_like(row)
            for expert in chosen:
                gate, up = (w[name + "experts.gate_up_proj"][expert] @ row).chunk(2)
                down = w[name + "experts.down_proj"][expert] @ (F.silu(gate) * up)
                total = total + p[expert] / sum(p[e] for e in chosen) * down
            shared = torch.sigmoid(w[name + "shared_expert_gate.weight"] @ row)
            outputs.append(total + shared * self._swiglu(row, name + "shared_expert."))
        return torch.stack(outputs)


MOE = MoeConfig(
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=10,
    shared_expert_intermediate_size=12,
)
BASE = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=24,
    layer_types=("linear_attention", "full_attention", "linear_attention"),
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    max_position_embeddings=512,
    attention=AttentionConfig(
        num_heads=4, num_kv_heads=2, head_dim=8, rotary_dim=4, rope_theta=100.0
    ),
    delta_net=DeltaNetConfig(
        num_k_heads=2, num_v_heads=4, head_k_dim=6, head_v_dim=8, conv_kernel_size=4
    ),
    mlp=DenseMlpConfig(intermediate_size=20),
    diffusion=DiffusionConfig(block_size=4, mask_token_id=1),
)
CONFIGS = {
    "one GDN layer": replace(BASE, layer_types=("linear_attention",)),
    "one attention layer": replace(BASE, layer_types=("full_attention",)),
    "dense": BASE,
    "dense, tied, kernel 3, other heads": replace(
        BASE,
        tie_word_embeddings=True,
        attention=AttentionConfig(
            num_heads=3, num_kv_heads=1, head_dim=6, rotary_dim=6, rope_theta=50.0
        ),
        delta_net=DeltaNetConfig(
            num_k_heads=1, num_v_heads=3, head_k_dim=8, head_v_dim=6, conv_kernel_size=3
        ),
    ),
    "moe": replace(BASE, mlp=MOE),
    "moe with a coreset": replace(
        BASE,
        mlp=MOE,
        diffusion=DiffusionConfig(block_size=4, mask_token_id=1, expert_coreset_size=3),
    ),
}
every_config = pytest.mark.parametrize("name", CONFIGS)


@functools.cache
@torch.no_grad()
def random_model(name: str) -> CloverForCausalLM:
    """Returns a model whose every weight is random, so that no two formulas agree by chance."""
    model = CloverForCausalLM(CONFIGS[name]).eval()
    generator = torch.Generator().manual_seed(1)
    for weight_name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight_name.endswith("A_log"):
            weight.copy_(noise - 2.0)
        elif weight_name.endswith("logit_scale"):
            weight.copy_(2.0 + noise)
        elif weight_name.endswith("linear_attn.norm.weight"):
            weight.copy_(1.0 + 0.3 * noise)
        elif weight.dim() == 1 or weight_name.endswith(("conv1d.weight", "conv_right_weight")):
            weight.copy_(0.5 * noise)
        elif weight_name.endswith("embed_tokens.weight"):
            weight.copy_(noise)
        else:
            weight.copy_(noise * weight.shape[-1] ** -0.5)
        if weight_name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
            align_queries_with_keys(weight, CONFIGS[name].delta_net.key_dim)
    return model


def align_queries_with_keys(weight: Tensor, key_dim: int) -> None:
    """Moves the query rows towards the key rows.

    After one token a head's output is (q^ . k^) v, and a norm follows: with independent rows some
    of those products are nearly zero, and the norm blows up their rounding errors.
    """
    weight[:key_dim] = weight[key_dim : 2 * key_dim] + 0.4 * weight[:key_dim]


def random_ids(tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (tokens,), generator=generator).tolist()


def assert_same_logits(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    error = (found.double() - expected).abs().max() / expected.std()
    assert error <= LOGIT_TOLERANCE, f"{error:.2e} of the logits' standard deviation"


@every_config
def test_a_commit_gives_the_slow_models_logits_and_states(name: str) -> None:
    model, slow, ids = random_model(name), SlowModel(random_model(name)), random_ids(20, 2)
    cache = model.new_cache(1)
    assert_same_logits(model.commit(cache, torch.tensor([ids]))[0], slow.commit(ids))
    for layer, history in zip(cache.layers, slow.history, strict=True):
        if isinstance(layer, DeltaNetCache):
            expected = torch.stack([history.states[head] for head in sorted(history.states)])
            error = (layer.recurrent_state[0] - expected).abs().max() / expected.abs().max()
            assert error <= STATE_TOLERANCE


@pytest.mark.parametrize(("committed", "block"), [(0, 1), (0, 6), (1, 2), (2, 5), (11, 1), (13, 7)])
@every_config
def test_a_preview_gives_the_slow_models_logits(name: str, committed: int, block: int) -> None:
    model, slow = random_model(name), SlowModel(random_model(name))
    ids, canvas, cache = random_ids(committed, 3), random_ids(block, 4), model.new_cache(1)
    if committed:
        model.commit(cache, torch.tensor([ids]))
        slow.commit(ids)
    found = model.preview(cache, torch.tensor([canvas]))[0]
    assert_same_logits(found, slow.preview(canvas))


@every_config
@torch.no_grad()
def test_two_streams_give_the_slow_models_logits(name: str) -> None:
    model, ids = random_model(name), random_ids(16, 5)
    canvas = [random_ids(5, seed) for seed in (6, 7, 8)]
    starts = [0, 5, 16]
    clean, noised = model.two_stream(
        torch.tensor([ids]), None, torch.tensor([canvas]), torch.tensor([starts])
    )
    assert_same_logits(clean[0], SlowModel(model).commit(ids))
    for slot, start in enumerate(starts):
        slow = SlowModel(model)
        if start:
            slow.commit(ids[:start])
        assert_same_logits(noised[0, slot], slow.preview(canvas[slot]))
