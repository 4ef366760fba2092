"""The drafter of DFlash: a few attention layers that fill a block of masks in one pass.

What several layers of the parent leave for each committed token is fused into one context feature, and
every layer of the drafter projects keys and values of it, beside those of its own block. Embedding and
output head are the parent's. Only the mask is ours: a parent has no such token, so it is a vector of
the drafter.

Source: DFlash: Block Diffusion for Flash Speculative Decoding, arXiv 2602.06036.

Shapes: B rows, C context tokens, M blocks of n tokens (an anchor, then masks), L = M n, D hidden width,
F layers of the parent that are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clover.config import ModelConfig
from clover.errors import ConfigError
from clover.model.cache import AttentionCache
from clover.model.layers import RMSNorm, SwiGLU, apply_rotary, rotary_tables
from clover.model.transformer import CloverForCausalLM

INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """A drafter's shape and whose it is.

    Attributes:
        parent: Fingerprint of the parent that it was trained for, see `fingerprint`.
        feature_layers: Layers of the parent, from 0, whose outputs it reads.
        block_size: Tokens of a block in training: the anchor, which is known, and its draft.
    """

    parent: str
    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    feature_layers: tuple[int, ...]
    block_size: int

    def __post_init__(self) -> None:
        least = {"num_layers": 1, "intermediate_size": 1, "block_size": 2}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(f"{name} is {getattr(self, name)}; allowed: {low} or more")
        layers = self.feature_layers
        if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0:
            raise ConfigError(f"feature_layers are {layers}; allowed: ascending, at least one")


def drafter_config(
    parent: CloverForCausalLM,
    *,
    num_layers: int = 3,
    num_features: int = 3,
    block_size: int = 16,
    mlp_ratio: int = 2,
) -> DrafterConfig:
    """Returns the shape of a drafter for a parent, whose width and attention heads it shares.

    Args:
        parent: The model to draft for.
        num_layers: Of the drafter.
        num_features: Layers of the parent to read, see `spread_layers`.
        block_size: Tokens of a block, the anchor included.
        mlp_ratio: Width of the MLPs, in hidden widths.
    """
    config = parent.config
    return DrafterConfig(
        parent=fingerprint(parent),
        hidden_size=config.hidden_size,
        num_layers=num_layers,
        intermediate_size=mlp_ratio * config.hidden_size,
        num_heads=config.attention.num_heads,
        num_kv_heads=config.attention.num_kv_heads,
        head_dim=config.attention.head_dim,
        rope_theta=config.attention.rope_theta,
        rms_norm_eps=config.rms_norm_eps,
        feature_layers=spread_layers(config.num_layers, num_features),
        block_size=block_size,
    )


def spread_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """Returns up to `count` layers, evenly from the second to the third last, as in the paper."""
    first = min(1, num_layers - 1)
    last = max(first, num_layers - 3)
    steps = max(1, count - 1)
    return tuple(dict.fromkeys(first + (last - first) * i // steps for i in range(count)))


def fingerprint(parent: CloverForCausalLM) -> str:
    """Returns what tells a parent from its retrained self: 16 hex digits of its last norm's hash.

    Every training step moves that norm, and its values are the same whichever dtype, of at least the
    checkpoint's precision, they were loaded in.
    """
    weight = parent.model.norm.weight.detach().float().cpu()
    return hashlib.sha256(weight.numpy().tobytes()).hexdigest()[:16]


@contextmanager
def record_features(parent: CloverForCausalLM, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """Gives a list that receives, for every pass inside, what `layers` leave, [B, T, F D].

    Forward hooks do it: a pass that nobody records is none of their business.
    """
    features: list[Tensor] = []
    parts: list[Tensor] = []

    def record(layer: nn.Module, inputs: object, output: tuple[Tensor, object]) -> None:
        parts.append(output[0])
        if len(parts) == len(layers):
            features.append(torch.cat(parts, dim=-1))
            parts.clear()

    hooks = [parent.model.layers[index].register_forward_hook(record) for index in layers]
    try:
        yield features
    finally:
        for hook in hooks:
            hook.remove()


class DrafterCache:
    """Keys and values of the committed tokens' features, for every layer of a drafter.

    What lies behind `length` is scratch: the block of the last pass.
    """

    def __init__(self, layers: Sequence[AttentionCache]) -> None:
        self.layers = layers
        self.length = 0


class DrafterAttention(nn.Module):
    """Queries from the block; keys and values from the context and the block, by the same matrices."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        hidden, head_dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(hidden, config.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        context: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: tuple[AttentionCache, int] | None,
    ) -> Tensor:
        """Returns the layer's output [B, L, D].

        Args:
            hidden_states: [B, L, D], of the blocks.
            context: [B, C, D].
            rotary: Tables of context and blocks, [B, C + L, 1, head_dim].
            mask: bool [B, 1, L, C + L]; None: every query sees every key.
            cache: What holds the keys of earlier context, and how many; the new ones join them.
        """
        num_block = hidden_states.shape[1]
        tokens = torch.cat([context, hidden_states], dim=1)
        cos, sin = rotary
        q = self.q_norm(self.q_proj(hidden_states).unflatten(-1, (self.num_heads, -1)))
        q = apply_rotary(q, cos[:, -num_block:], sin[:, -num_block:])
        k = self.k_norm(self.k_proj(tokens).unflatten(-1, (self.num_kv_heads, -1)))
        k = apply_rotary(k, cos, sin)
        v = self.v_proj(tokens).unflatten(-1, (self.num_kv_heads, -1))
        if cache is not None:
            store, length = cache
            num_keys = length + tokens.shape[1]
            rows = torch.arange(length, num_keys, device=k.device)[None]
            k, v = store.write(k, v, rows, num_keys)
        output = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        projected: Tensor = self.o_proj(output.transpose(1, 2).flatten(2))
        return projected


class DrafterLayer(nn.Module):
    """Attention and MLP, each behind a norm and a residual. The context passes through unchanged."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DrafterAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        hidden_states: Tensor,
        context: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: tuple[AttentionCache, int] | None,
    ) -> Tensor:
        """Returns hidden states [B, L, D]; arguments as for `DrafterAttention`."""
        normed = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + self.self_attn(normed, context, rotary, mask, cache)
        update: Tensor = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + update


class Drafter(nn.Module):
    """Context features and anchors in, hidden states for the parent's output head out."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.feature_layers) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.mask_embedding = nn.Parameter(torch.zeros(hidden))
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(hidden, eps)

    def forward(
        self,
        features: Tensor,
        anchors: Tensor,
        num_masks: int,
        position_ids: Tensor,
        *,
        mask: Tensor | None = None,
        cache: DrafterCache | None = None,
    ) -> Tensor:
        """Returns the normed hidden states that predict each mask in place, [B, M, num_masks, D].

        Args:
            features: [B, C, F D], of `record_features`. With a cache those of newly committed tokens;
                the cache keeps them.
            anchors: [B, M, D], embeddings of each block's first token, which is known.
            num_masks: Tokens to draft behind each anchor, at least 1.
            position_ids: [B, C + L], absolute, of context and blocks.
            mask: bool [B, 1, L, C + L], what each block token sees; None: everything.
            cache: Of one row whose one block sees all context.
        """
        context = self.hidden_norm(self.fc(features))
        masks = self.mask_embedding.expand(*anchors.shape[:2], num_masks, -1)
        hidden_states = torch.cat([anchors.unsqueeze(2), masks.to(anchors.dtype)], dim=2)
        num_blocks = hidden_states.shape[1]
        hidden_states = hidden_states.flatten(1, 2)
        rotary = rotary_tables(position_ids, self.config.head_dim, self.config.rope_theta)
        for index, layer in enumerate(self.layers):
            stored = None if cache is None else (cache.layers[index], cache.length)
            hidden_states = layer(hidden_states, context, rotary, mask, stored)
        if cache is not None:
            cache.length += features.shape[1]
        normed: Tensor = self.norm(hidden_states).unflatten(1, (num_blocks, -1))
        return normed[:, :, 1:]

    def new_cache(self, capacity: int) -> DrafterCache:
        """Returns an empty cache of one row with room for `capacity` tokens, a block included."""
        config, like = self.config, self.mask_embedding
        shape = (1, capacity + 1, config.num_kv_heads, config.head_dim)
        return DrafterCache(
            [AttentionCache(like.new_zeros(shape), like.new_zeros(shape)) for _ in self.layers]
        )

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Draws weights to start training from: N(0, 0.02), less where a residual is written."""
        residual_std = INIT_STD / (2 * self.config.num_layers) ** 0.5
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.normal_(0.0, residual_std, generator=generator)
            elif weight.dim() > 1 or name == "mask_embedding":
                weight.normal_(0.0, INIT_STD, generator=generator)


def check_parent(config: DrafterConfig, parent: CloverForCausalLM) -> None:
    """Refuses a parent that a drafter was not trained for: it would draft, and draft badly.

    Raises:
        ConfigError: It is another one.
    """
    found = fingerprint(parent)
    if found != config.parent:
        raise ConfigError(
            f"expected the parent {config.parent} that the drafter was trained for, found {found}: "
            "train a drafter for this one"
        )
    _check_shape(config, parent.config)


def _check_shape(config: DrafterConfig, parent: ModelConfig) -> None:
    if config.hidden_size != parent.hidden_size or config.feature_layers[-1] >= parent.num_layers:
        raise ConfigError(
            f"the drafter reads layers {config.feature_layers} of width {config.hidden_size}, the "
            f"parent has {parent.num_layers} of width {parent.hidden_size}"
        )
