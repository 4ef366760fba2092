"""The gated delta rule: an obvious recurrence, its chunked form, and FLA's kernels on CUDA.

    u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)
    S_t = exp(g_t) S_{t-1} + k_t u_t^T
    o_t = K^-1/2 S_t^T q_t

Source: Yang et al., "Gated Delta Networks", arXiv 2412.06464, equation 10; chunked form section 3.2.

Shapes: B rows, T tokens, Hk key heads, H value heads, K / V head widths, N chunks of C tokens, M
query points. The state S is [B, H, K, V]: a query reads it as S^T q. All arithmetic is fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_SIZE = 32


def expand_heads(x: Tensor, num_heads: int) -> Tensor:
    """Returns `x` [B, T, Hk, K] with each key head repeated for its value heads, [B, T, H, K]."""
    repeats = num_heads // x.shape[2]
    if repeats == 1:
        return x
    return x.unsqueeze(3).expand(-1, -1, -1, repeats, -1).flatten(2, 3)


def recurrent_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns outputs and final state, one token at a time: the reference that the rest must equal.

    Args:
        q, k: [B, T, Hk, K], of unit length.
        v: [B, T, H, V].
        g: [B, T, H], log of the decay, <= 0.
        beta: [B, T, H], writing strength in [0, 1].
        initial_state: [B, H, K, V], zeros if None.

    Returns:
        o [B, T, H, V] and the state [B, H, K, V], both in the computation dtype (fp32 or wider).
    """
    num_heads = v.shape[2]
    dtype = torch.promote_types(v.dtype, torch.float32)
    q, k = (expand_heads(x, num_heads).to(dtype) for x in (q, k))
    v, g, beta = v.to(dtype), g.to(dtype), beta.to(dtype)
    state = v.new_zeros(v.shape[0], num_heads, k.shape[-1], v.shape[-1])
    if initial_state is not None:
        state = initial_state.to(dtype)
    outputs = []
    for t in range(v.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        predicted = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        u = beta[:, t, :, None] * (v[:, t] - predicted)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * k.shape[-1] ** -0.5)
    o = torch.stack(outputs, dim=1) if outputs else v.new_zeros(v.shape)
    return o, state


@dataclass(frozen=True, slots=True)
class DeltaTrace:
    """What a chunked pass leaves behind: enough to give the state after ANY of its tokens.

    The state after p tokens is one small matmul over the chunk that holds p. That serves three
    masters: committing a prefix of a verified block, the state at the start of each noised block in
    training, and the preview half of a fused pass.
    """

    k: Tensor  # [B, H, N, C, K]
    u: Tensor  # [B, H, N, C, V]
    cumulative_g: Tensor  # [B, H, N, C]
    chunk_states: Tensor  # [B, H, N, K, V], the state before each chunk
    final_state: Tensor  # [B, H, K, V]
    documents: Tensor | None  # [B, N, C]

    def state_at(self, counts: Tensor, documents: Tensor | None = None) -> Tensor:
        """Returns the state after the first `counts` tokens of each row.

        Args:
            counts: [B, M] int64, 0 <= counts <= T.
            documents: [B, M], the document that each query point belongs to. Only its tokens count.

        Returns:
            [B, M, H, K, V].
        """
        num_chunks, chunk_size = self.k.shape[2:4]
        chunk = (counts // chunk_size).clamp(max=num_chunks - 1)  # [B, M]
        offset = counts - chunk * chunk_size  # 0..C
        batch = torch.arange(counts.shape[0], device=counts.device)[:, None]
        parts = (self.k, self.u, self.chunk_states, self.cumulative_g)
        if num_chunks == 1:  # as in decoding: views of it
            k, u, state, g = (x[:, :, 0].unsqueeze(1) for x in parts)
        else:  # advanced indices on axes 0 and 2 come first in the result
            k, u, state, g = (x[batch, :, chunk] for x in parts)  # [B, M, H, ...]
        g = g.expand(-1, counts.shape[1], -1, -1)
        g_before = F.pad(g, (1, 0)).gather(-1, offset[:, :, None, None].expand(*g.shape[:3], 1))
        written = torch.arange(chunk_size, device=counts.device) < offset[..., None]  # [B, M, C]
        carries = g_before.exp()  # [B, M, H, 1]
        if self.documents is not None:
            assert documents is not None, "a packed trace needs the documents of its query points"
            written = written & (self.documents[batch, chunk] == documents[..., None])
            carried = _last_documents(self.documents)[batch, chunk] == documents
            carries = carries * carried[:, :, None, None]
        weights = (g_before - g).masked_fill(~written[:, :, None], -torch.inf).exp()
        return carries[..., None] * state + (k * weights[..., None]).transpose(-1, -2) @ u


@dataclass(frozen=True, slots=True)
class TokenTrace:
    """What a pass over one token leaves behind: the states before it and after it."""

    before: Tensor  # [B, H, K, V]
    final_state: Tensor  # [B, H, K, V]

    def state_at(self, counts: Tensor, documents: Tensor | None = None) -> Tensor:
        """Returns the state after the first `counts` tokens, 0 or 1, as `DeltaTrace` does."""
        assert documents is None, "packed documents are computed in chunks"
        is_after = (counts > 0)[:, :, None, None, None]  # [B, M, 1, 1, 1]
        return torch.where(is_after, self.final_state.unsqueeze(1), self.before.unsqueeze(1))


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    *,
    document_ids: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, DeltaTrace | TokenTrace]:
    """Returns what `recurrent_delta_rule` returns, computed in chunks, and the trace of the pass.

    Inside a chunk the updates u solve a unit lower triangular system (the WY form); between chunks
    only the state is carried. Forward substitution is used rather than an explicit inverse: keys may
    be nearly parallel, and powers of the system then lose all their digits.

    Args:
        q, k, v, g, beta, initial_state: as for `recurrent_delta_rule`.
        document_ids: [B, T] int64. Packed documents: the state resets where the id changes,
            exactly; they start from zeros, and an id that has ended does not come back.
        chunk_size: tokens per chunk. An input of at most two is one: that costs less than two, of
            which the second is padded.
    """
    assert document_ids is None or initial_state is None, "packed documents start from zeros"
    if v.shape[1] == 1 and document_ids is None:
        return _single_token(q, k, v, g, beta, initial_state)
    num_tokens, num_heads = v.shape[1:3]
    if 0 < num_tokens <= 2 * chunk_size and document_ids is None:  # a draft to verify
        return _one_chunk(q, k, v, g, beta, initial_state)
    dtype = torch.promote_types(v.dtype, torch.float32)
    q, k = expand_heads(q, num_heads), expand_heads(k, num_heads)
    q, k, v = (_chunked(x.to(dtype), chunk_size) for x in (q, k, v))  # [B, H, N, C, .]
    # [B, H, N, C, 1]
    g, beta = (_chunked(x.to(dtype).unsqueeze(-1), chunk_size) for x in (g, beta))
    documents = None
    causal = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=v.device).tril()
    if document_ids is not None:
        padding = -num_tokens % chunk_size
        documents = F.pad(document_ids, (0, padding), value=-1).unflatten(1, (-1, chunk_size))
        causal = causal & (documents[..., :, None] == documents[..., None, :]).unsqueeze(1)

    if documents is None:
        cumulative_g = g.cumsum(-2)  # [B, H, N, C, 1]
    else:
        # A running sum over the border would let a neighbour's gates shift the rounding.
        cumulative_g = g.transpose(-1, -2).where(causal, 0.0).sum(-1, keepdim=True)
    decay = (cumulative_g - cumulative_g.transpose(-1, -2)).masked_fill(~causal, -torch.inf).exp()
    from_start = cumulative_g.exp()
    chunk_decay = from_start[..., -1:, :]
    if documents is None:
        to_end = (cumulative_g[..., -1:, :] - cumulative_g).exp()
    else:
        carried, last = _last_documents(documents), documents[..., -1:]
        from_start = from_start * (documents == carried[..., None])[:, None, ..., None]
        # Masked before exp: a difference across the border may be large and positive.
        is_last = (documents == last)[:, None, ..., None]
        to_end = (cumulative_g[..., -1:, :] - cumulative_g).masked_fill(~is_last, -torch.inf).exp()
        chunk_decay = chunk_decay * (carried == last[..., 0])[:, None, :, None, None]

    system = (beta * k) @ k.transpose(-1, -2) * decay  # its diagonal is not read
    right = torch.cat([beta * v, beta * from_start * k], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u_free, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scale = k.shape[-1] ** -0.5
    attention = scale * (q @ k.transpose(-1, -2)) * decay
    q, k_to_end = scale * from_start * q, (to_end * k).transpose(-1, -2)

    state = v.new_zeros(v.shape[0], num_heads, k.shape[-1], v.shape[-1])
    if initial_state is not None:
        state = initial_state.to(dtype)
    # Unbound once: the gradient of an index per chunk would fill a whole tensor for each of them
    chunks = zip(*(x.unbind(dim=2) for x in (u_free, w, q, k_to_end, chunk_decay)), strict=True)
    states, updates, read = [], [], []
    for u_free_c, w_c, q_c, k_to_end_c, decay_c in chunks:
        u = u_free_c - w_c @ state
        states.append(state)
        updates.append(u)
        read.append(q_c @ state)
        state = decay_c * state + k_to_end_c @ u
    u = torch.stack(updates, dim=2)
    o = torch.stack(read, dim=2) + attention @ u
    o = o.flatten(2, 3)[:, :, :num_tokens].transpose(1, 2)
    trace = DeltaTrace(
        k=k,
        u=u,
        cumulative_g=cumulative_g.squeeze(-1),
        chunk_states=torch.stack(states, dim=2),
        final_state=state,
        documents=documents,
    )
    return o, trace


def _single_token(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, TokenTrace]:
    """Returns `chunk_delta_rule` of one token, T = 1: the recurrence itself, without a system.

    The value heads of a key head share it by broadcasting: G key heads, R value heads of each.
    """
    num_heads, num_groups = v.shape[2], k.shape[2]
    heads = (num_groups, num_heads // num_groups)
    dtype = torch.promote_types(v.dtype, torch.float32)
    q, k = (x.to(dtype)[:, 0, :, None, :, None] for x in (q, k))  # [B, G, 1, K, 1]
    v = v.to(dtype)[:, 0].unflatten(1, heads)  # [B, G, R, V]
    g, beta = (x.to(dtype)[:, 0].unflatten(1, heads) for x in (g, beta))  # [B, G, R]
    if initial_state is None:
        initial_state = v.new_zeros(v.shape[0], num_heads, k.shape[-2], v.shape[-1])
    before = initial_state.to(dtype)
    decayed = before.unflatten(1, heads) * g.exp()[..., None, None]  # [B, G, R, K, V]
    u = beta.unsqueeze(-1) * (v - (decayed * k).sum(-2))
    state = torch.addcmul(decayed, k, u.unsqueeze(-2))
    output = (state * q).sum(-2) * k.shape[-2] ** -0.5
    trace = TokenTrace(before=before, final_state=state.flatten(1, 2))
    return output.flatten(1, 2).unsqueeze(1), trace


def _one_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, DeltaTrace]:
    """Returns `chunk_delta_rule` of one chunk, C = T, in products of three axes, X = B H.

    A decoding pass is bound by the number of its operations, and one of more axes is several.
    """
    batch_size, num_tokens, num_heads = v.shape[:3]
    dtype = torch.promote_types(v.dtype, torch.float32)
    q, k = expand_heads(q, num_heads), expand_heads(k, num_heads)
    q, k, v = (x.to(dtype).transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [X, C, .]
    g, beta = (x.to(dtype).transpose(1, 2).reshape(-1, num_tokens, 1) for x in (g, beta))
    if initial_state is None:
        state = v.new_zeros(len(v), k.shape[-1], v.shape[-1])
    else:
        state = initial_state.to(dtype).flatten(0, 1)
    later = torch.full((num_tokens, num_tokens), -torch.inf, dtype=dtype, device=v.device).triu(1)
    cumulative_g = g.cumsum(1)  # [X, C, 1]
    decay = (cumulative_g - cumulative_g.mT + later).exp()
    from_start = cumulative_g.exp()
    written = beta * k
    system = torch.bmm(written, k.mT) * decay  # its diagonal is not read
    right = torch.cat([beta * v, from_start * written], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u_free, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    u = torch.baddbmm(u_free, w, state, alpha=-1)
    q = q * k.shape[-1] ** -0.5
    o = torch.baddbmm(torch.bmm(from_start * q, state), torch.bmm(q, k.mT) * decay, u)
    k_to_end = (cumulative_g[:, -1:] - cumulative_g).exp() * k
    final_state = torch.baddbmm(from_start[:, -1:] * state, k_to_end.mT, u)

    def by_row(x: Tensor) -> Tensor:
        rows: Tensor = x.unflatten(0, (batch_size, num_heads))
        return rows

    trace = DeltaTrace(
        k=by_row(k).unsqueeze(2),
        u=by_row(u).unsqueeze(2),
        cumulative_g=by_row(cumulative_g).mT,
        chunk_states=by_row(state).unsqueeze(2),
        final_state=by_row(final_state),
        documents=None,
    )
    return by_row(o).transpose(1, 2), trace


def _chunked(x: Tensor, chunk_size: int) -> Tensor:
    """Returns [B, T, H, X] as [B, H, N, C, X]; padding has beta 0, g 0: it leaves the state alone."""
    padding = -x.shape[1] % chunk_size
    x = x.transpose(1, 2)
    x = F.pad(x, (0, 0, 0, padding)) if padding else x
    chunks: Tensor = x.unflatten(2, (-1, chunk_size))
    return chunks


def _last_documents(documents: Tensor) -> Tensor:
    """Returns the document of the token just before each chunk [B, N]; -2, nobody, for the first."""
    return F.pad(documents[:, :-1, -1], (1, 0), value=-2)


@cache
def has_fla() -> bool:
    """True if flash-linear-attention can be imported."""
    return find_spec("fla") is not None


def fla_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns outputs and final state by FLA's CUDA kernels (short inputs: the fused recurrence)."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    # The fused recurrence is for decoding: it has no backward.
    is_short = v.shape[1] <= CHUNK_SIZE and not torch.is_grad_enabled()
    kernel = fused_recurrent_gated_delta_rule if is_short else chunk_gated_delta_rule
    q, k = expand_heads(q, v.shape[2]), expand_heads(k, v.shape[2])
    o, state = kernel(
        q.to(v.dtype),
        k.to(v.dtype),
        v,
        g,
        beta,
        initial_state=initial_state,
        output_final_state=True,
    )
    return o, state
