"""Gated DeltaNet and its two operators: the causal commit and the bidirectional preview.

The commit is the parent's own arithmetic. The preview reads the state at the block's start through
a history slot in the block's softmax, and writes nothing.

Shapes: B rows, T clean tokens, M blocks of n canvas tokens, C conv channels, W conv kernel,
Hk key heads, H value heads, K / V head widths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clover.config import ModelConfig
from clover.model.cache import DeltaNetCache
from clover.model.delta_rule import (
    DeltaTrace,
    TokenTrace,
    chunk_delta_rule,
    expand_heads,
    fla_delta_rule,
    has_fla,
)
from clover.model.layers import GatedRMSNorm, ParallelLinears, l2_norm
from clover.model.streams import Streams

# Where tau and b start: the announced values. The other two added parameters start at zero.
LOGIT_SCALE_START = 9.0
HISTORY_BIAS_START = 5.0


@dataclass(frozen=True, slots=True)
class DeltaNetUpdate:
    """What one pass would write to a GDN layer's cache: kept until it is known how much is accepted."""

    left: Tensor  # [B, W - 1 + T, C], the ring and then the clean pre-conv rows
    final_state: Tensor  # [B, H, K, V]
    trace: (
        DeltaTrace | TokenTrace | None
    )  # None on FLA's path, where only the whole can be committed

    def apply(self, cache: DeltaNetCache, accepted: Tensor | None, *, is_whole: bool) -> None:
        """Writes ring and state after the first `accepted` [B] clean tokens of each row.

        Args:
            cache: Of the layer.
            accepted: None: all T of every row.
            is_whole: Whether that is all that a row has, padding apart.
        """
        width = cache.conv_state.shape[-1]
        if accepted is None:
            ring = self.left[
                :, -width:
            ].clone()  # not a view, which would keep a whole prompt alive
        else:
            ring = rows_before(self.left, accepted[:, None], width)[:, 0]
        cache.conv_state = ring.transpose(1, 2)
        if accepted is None or is_whole:
            cache.recurrent_state = self.final_state
        else:
            assert self.trace is not None, "this pass was run without a trace: commit it whole"
            cache.recurrent_state = self.trace.state_at(accepted[:, None])[:, 0]


class DeltaNet(nn.Module):
    """A Gated DeltaNet layer. A model without `diffusion` has the parent's tensors alone."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape, hidden = config.delta_net, config.hidden_size
        self.shape = shape
        self.in_proj_qkv = nn.Linear(hidden, shape.conv_dim, bias=False)
        self.in_proj_z = nn.Linear(hidden, shape.value_dim, bias=False)
        self.in_proj_b = nn.Linear(hidden, shape.num_v_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, shape.num_v_heads, bias=False)
        self.projections = ParallelLinears(
            self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a
        )
        self.conv1d = nn.Conv1d(
            shape.conv_dim,
            shape.conv_dim,
            shape.conv_kernel_size,
            groups=shape.conv_dim,
            bias=False,
        )
        self.dt_bias = nn.Parameter(torch.ones(shape.num_v_heads))
        self.A_log = nn.Parameter(torch.zeros(shape.num_v_heads))
        self.norm = GatedRMSNorm(shape.head_v_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(shape.value_dim, hidden, bias=False)
        if config.diffusion is not None:
            right = torch.zeros(shape.conv_dim, shape.conv_kernel_size - 1)
            self.conv_right_weight = nn.Parameter(right)
            heads = torch.ones(shape.num_v_heads)
            self.bd_softmax_logit_scale = nn.Parameter(LOGIT_SCALE_START * heads)
            self.bd_softmax_history_bias = nn.Parameter(HISTORY_BIAS_START * heads)
            self.bd_softmax_history_c = nn.Parameter(0.0 * heads)

    def forward(
        self,
        hidden_states: Tensor,
        streams: Streams,
        cache: DeltaNetCache | None,
        *,
        keep_trace: bool = False,
    ) -> tuple[Tensor, DeltaNetUpdate | None]:
        """Returns the layer's output [B, L, D] and, with a cache, what it would write there."""
        num_clean = streams.num_clean
        mixed, z, b, a = self.projections(hidden_states)  # [B, L, .]: C, H V, H, H
        clean, canvas = mixed[:, :num_clean], mixed[:, num_clean:]
        left = self._left_context(clean, cache)
        outputs, update = [], None
        if num_clean:
            gates = b[:, :num_clean], a[:, :num_clean]
            keep_trace = keep_trace or streams.block_starts is not None
            output, update = self._commit(left, gates, streams, cache, keep_trace)
            outputs.append(output)
        if streams.num_blocks:
            canvas = canvas.unflatten(1, (streams.num_blocks, streams.block_size))
            outputs.append(self._preview(canvas, left, streams, cache, update).flatten(1, 2))
        output = torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]  # [B, L, H, V]
        z = z.unflatten(-1, (self.shape.num_v_heads, -1))
        output = self.out_proj(self.norm(output, z).flatten(2))
        return output, update if cache is not None else None

    def _left_context(self, clean: Tensor, cache: DeltaNetCache | None) -> Tensor:
        """Returns the last W-1 rows of history and then the clean pre-conv rows [B, W - 1 + T, C]."""
        if cache is None:
            return F.pad(clean, (0, 0, self.shape.conv_kernel_size - 1, 0))
        return torch.cat([cache.conv_state.transpose(1, 2).to(clean.dtype), clean], dim=1)

    def _split_heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns unit-length fp32 q and k [.., Hk, K] and v [.., H, V] from conv outputs [.., C]."""
        shape = self.shape
        qk, v = F.silu(convolved).split([2 * shape.key_dim, shape.value_dim], dim=-1)
        q, k = l2_norm(qk.unflatten(-1, (2, shape.num_k_heads, -1)).float()).unbind(-3)
        return q, k, v.unflatten(-1, (shape.num_v_heads, -1))

    def _commit(
        self,
        left: Tensor,
        gates: tuple[Tensor, Tensor],
        streams: Streams,
        cache: DeltaNetCache | None,
        keep_trace: bool,
    ) -> tuple[Tensor, DeltaNetUpdate]:
        """Returns the causal operator's output over the clean tokens [B, T, H, V] and its update.

        `gates` are the projections b and a, [B, T, H] each.
        """
        q, k, v = self._split_heads(self._causal_conv(left, streams))
        beta = gates[0].float().sigmoid()
        g = -self.A_log.float().exp() * F.softplus(gates[1].float() + self.dt_bias)
        if streams.clean_mask is not None:
            # Padding must not touch the state: it writes nothing and forgets nothing.
            beta = beta * streams.clean_mask[..., None]
            g = g * streams.clean_mask[..., None]
        state = None if cache is None else cache.recurrent_state
        if v.is_cuda and has_fla() and not keep_trace and streams.document_ids is None:
            output, final_state = fla_delta_rule(q, k, v, g, beta, state)
            return output, DeltaNetUpdate(left, final_state, None)
        with torch.autocast(v.device.type, enabled=False):
            output, trace = chunk_delta_rule(
                q, k, v, g, beta, state, document_ids=streams.document_ids
            )
        return output, DeltaNetUpdate(left, trace.final_state, trace)

    def _causal_conv(self, left: Tensor, streams: Streams) -> Tensor:
        """Returns the causal depthwise convolution of the clean rows [B, T, C], documents kept apart."""
        kernel, num_clean = self.shape.conv_kernel_size, streams.num_clean
        documents = streams.document_ids
        if num_clean == 1 and documents is None:  # one window: two operations in place of a dozen
            window = left.float() * self.conv1d.weight[:, 0].t().float()
            return window.sum(1, keepdim=True).to(left.dtype)
        taps = []
        for tap in range(kernel):
            rows = left[:, tap : tap + num_clean]
            distance = kernel - 1 - tap
            if documents is not None and distance:
                before = F.pad(documents, (distance, 0), value=-1)[:, :num_clean]
                rows = rows * (before == documents)[..., None]
            taps.append(rows)
        return _sum_taps(taps, self.conv1d.weight[:, 0])

    def _preview(
        self,
        canvas: Tensor,
        left: Tensor,
        streams: Streams,
        cache: DeltaNetCache | None,
        update: DeltaNetUpdate | None,
    ) -> Tensor:
        """Returns the preview operator's output [B, M, n, H, V] for pre-conv canvas rows [B, M, n, C]."""
        ring, state = self._history(left, streams, cache, update)
        mask = streams.canvas_mask
        if mask is not None:
            canvas = canvas * mask[:, None, :, None]  # the right taps must not read padding
        q, k, v = self._split_heads(self._canvas_conv(canvas, ring))
        num_heads = self.shape.num_v_heads
        q = expand_heads(q.flatten(0, 1), num_heads).transpose(1, 2)  # [B M, H, n, K]
        k = expand_heads(k.flatten(0, 1), num_heads).transpose(1, 2)
        v = v.flatten(0, 1).transpose(1, 2).float()
        with torch.autocast(v.device.type, enabled=False):
            output = history_slot_attention(
                q,
                k,
                v,
                state.flatten(0, 1),
                self.bd_softmax_logit_scale.float(),
                self.bd_softmax_history_bias.float(),
                self.bd_softmax_history_c.float(),
                mask,
            )
        blocks: Tensor = output.transpose(1, 2).unflatten(0, canvas.shape[:2])
        return blocks

    def _history(
        self,
        left: Tensor,
        streams: Streams,
        cache: DeltaNetCache | None,
        update: DeltaNetUpdate | None,
    ) -> tuple[Tensor, Tensor]:
        """Returns each block's ring [B, M, W - 1, C] and starting state [B, M, H, K, V]."""
        width = self.shape.conv_kernel_size - 1
        if streams.block_starts is None:
            assert cache is not None and streams.num_valid is not None
            state = cache.recurrent_state if update is None else update.final_state
            return rows_before(left, streams.num_valid[:, None], width), state.unsqueeze(1)
        assert update is not None and update.trace is not None
        assert streams.document_ids is not None and streams.block_documents is not None
        ring = rows_before(left, streams.block_starts, width)
        documents = F.pad(streams.document_ids, (width, 0), value=-1).unsqueeze(-1)
        ring_documents = rows_before(documents, streams.block_starts, width)
        ring = ring * (ring_documents == streams.block_documents[..., None, None])
        return ring, update.trace.state_at(streams.block_starts, streams.block_documents)

    def _canvas_conv(self, canvas: Tensor, ring: Tensor) -> Tensor:
        """Returns the two-sided convolution: left taps over ring and block, right taps in the block."""
        block_size = canvas.shape[2]
        weight = torch.cat([self.conv1d.weight[:, 0], self.conv_right_weight], dim=1)
        padded = F.pad(torch.cat([ring, canvas], dim=2), (0, 0, 0, self.shape.conv_kernel_size - 1))
        taps = [padded[:, :, tap : tap + block_size] for tap in range(weight.shape[1])]
        return _sum_taps(taps, weight)


def history_slot_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    logit_scale: Tensor,
    history_bias: Tensor,
    history_c: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """Returns the preview operator's mix of history and block: one softmax over both.

    Args:
        q, k: [X, H, n, K], of unit length, fp32.
        v: [X, H, n, V].
        state: [X, H, K, V], the state at the block's start.
        logit_scale: [H], tau, the temperature of the in-block logits.
        history_bias, history_c: [H], b and c: the history slot's logit is b + c log n.
        mask: [X, n] bool, False for right padding, which is no part of the block and not counted
            in its n; None: no padding. Outputs of padding mean nothing.

    Returns:
        [X, H, n, V], at the scale that the pretrained norm expects.
    """
    num_blocks, num_heads, num_tokens = q.shape[:3]
    q, k, v, state = (x.flatten(0, 1) for x in (q, k, v, state))  # products of three axes
    history = torch.bmm(q, state)  # not scaled by K^-1/2: the same units as v
    scale = logit_scale.expand(num_blocks, -1).reshape(-1, 1, 1)  # [X H, 1, 1]
    block_logits = scale * torch.bmm(q, k.mT)
    if mask is None:
        history_logit = (history_bias + history_c * math.log(num_tokens)).expand(num_blocks, -1)
    else:
        hidden = ~mask.repeat_interleave(num_heads, dim=0)
        block_logits = block_logits.masked_fill(hidden[:, None], -torch.inf)
        log_size = mask.sum(-1).clamp(min=1).log()  # [X]; a row of padding alone has no size
        history_logit = history_bias + history_c * log_size[:, None]
    slot = history_logit.reshape(-1, 1, 1).expand(-1, num_tokens, -1)
    shares = torch.cat([slot, block_logits], dim=-1).softmax(dim=-1)
    mixed = torch.addcmul(torch.bmm(shares[..., 1:], v), shares[..., :1], history)
    output: Tensor = (mixed / math.sqrt(k.shape[-1])).unflatten(0, (num_blocks, num_heads))
    return output


def _sum_taps(taps: Sequence[Tensor], weight: Tensor) -> Tensor:
    """Returns the sum of the taps [.., C], each times its column of `weight` [C, taps].

    Summed in fp32, then rounded once.
    """
    columns = weight.float().unbind(1)
    output = taps[0].float() * columns[0]
    for tap, column in zip(taps[1:], columns[1:], strict=True):
        output = torch.addcmul(output, tap.float(), column)
    return output.to(taps[0].dtype)


def rows_before(left: Tensor, counts: Tensor, width: int) -> Tensor:
    """Returns the `width` rows that end after the first `counts` tokens, [B, M, width, C].

    Args:
        left: [B, width + T, C]: `width` rows of history, then T tokens.
        counts: [B, M] int64, 0 <= counts <= T.
        width: rows wanted.
    """
    index = counts[..., None] + torch.arange(width, device=left.device)  # [B, M, width]
    batch = torch.arange(left.shape[0], device=left.device)[:, None, None]
    rows: Tensor = left[batch, index]
    return rows
