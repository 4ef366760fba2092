"""Full attention of the parent: grouped heads, q/k norm, partial RoPE, an output gate.

A canvas token attends to its whole history and its whole block; a clean token is causal. Both come
from the pass's mask alone.

Shapes: B rows, L tokens of the pass, D hidden width, S keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clover.config import ModelConfig
from clover.model.cache import AttentionCache
from clover.model.layers import ParallelLinears, RMSNorm, apply_rotary
from clover.model.streams import Streams


class Attention(nn.Module):
    """Gated softmax attention. `q_proj` holds, per head, the query rows and then the gate rows."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        attention, hidden = config.attention, config.hidden_size
        self.num_heads, self.num_kv_heads = attention.num_heads, attention.num_kv_heads
        self.head_dim = attention.head_dim
        self.q_proj = nn.Linear(hidden, 2 * self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, hidden, bias=False)
        self.projections = ParallelLinears(self.q_proj, self.k_proj, self.v_proj)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        streams: Streams,
        rotary: tuple[Tensor, Tensor],
        cache: AttentionCache | None,
    ) -> Tensor:
        """Returns the layer's output [B, L, D]; with a cache, writes this pass's keys and values there."""
        batch_size, num_tokens, _ = hidden_states.shape
        q, k, v = self.projections(hidden_states)
        q, gate = q.unflatten(-1, (self.num_heads, -1)).chunk(2, dim=-1)
        k = k.unflatten(-1, (self.num_kv_heads, -1))
        v = v.unflatten(-1, (self.num_kv_heads, -1))
        q = apply_rotary(self.q_norm(q), *rotary)
        k = apply_rotary(self.k_norm(k), *rotary)
        if cache is not None:
            assert streams.kv_rows is not None
            k, v = cache.write(k, v, streams.kv_rows, streams.num_keys)
        output = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2).to(q.dtype),
            v.transpose(1, 2).to(q.dtype),
            attn_mask=streams.attention_mask,
            is_causal=streams.is_causal,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        output = output.transpose(1, 2) * torch.sigmoid(gate)
        projected: Tensor = self.o_proj(output.reshape(batch_size, num_tokens, -1))
        return projected
