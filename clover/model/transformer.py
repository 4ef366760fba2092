"""The whole model: one class for the autoregressive parent and for Clover, and its passes.

`forward` and `two_stream` are for training; `prefill`, `commit`, `preview`, `commit_and_preview`,
`verify`, `verify_and_preview` and `mixed_pass` run over a cache. All of them are one walk over the layers
with another layout of tokens.

Shapes: B rows, T clean tokens, M blocks of n canvas tokens, L = T + M n, D hidden width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clover.config import ModelConfig, MoeConfig
from clover.model.attention import Attention
from clover.model.cache import AttentionCache, Cache, DeltaNetCache, LayerCache
from clover.model.delta_net import DeltaNet, DeltaNetUpdate
from clover.model.layers import RMSNorm, SwiGLU, rotary_tables
from clover.model.moe import Experts, SparseMoe
from clover.model.streams import Streams, cached_streams, causal_streams, two_stream_streams

PREFILL_CHUNK_SIZE = 512


class DecoderLayer(nn.Module):
    """Token mixer (GDN or attention) and MLP (dense or MoE), each behind a norm and a residual."""

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.layer_types[layer_index] == "linear_attention":
            self.linear_attn = DeltaNet(config)
        else:
            self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if isinstance(config.mlp, MoeConfig):
            diffusion = config.diffusion
            coreset_size = None if diffusion is None else diffusion.expert_coreset_size
            self.mlp: nn.Module = SparseMoe(config.mlp, config.hidden_size, coreset_size)
        else:
            self.mlp = SwiGLU(config.hidden_size, config.mlp.intermediate_size)

    def forward(
        self,
        hidden_states: Tensor,
        streams: Streams,
        rotary: tuple[Tensor, Tensor],
        cache: LayerCache | None,
        keep_trace: bool,
    ) -> tuple[Tensor, DeltaNetUpdate | None]:
        """Returns hidden states [B, L, D] and, for a cached GDN layer, what it would write."""
        normed, update = self.input_layernorm(hidden_states), None
        if hasattr(self, "linear_attn"):
            assert cache is None or isinstance(cache, DeltaNetCache)
            mixed, update = self.linear_attn(normed, streams, cache, keep_trace=keep_trace)
        else:
            assert cache is None or isinstance(cache, AttentionCache)
            mixed = self.self_attn(normed, streams, rotary, cache)
        hidden_states = hidden_states + mixed
        normed = self.post_attention_layernorm(hidden_states)
        is_moe = isinstance(self.mlp, SparseMoe)
        return hidden_states + (self.mlp(normed, streams) if is_moe else self.mlp(normed)), update


class Decoder(nn.Module):
    """Embedding, layers and the final norm.

    With `activation_checkpointing` a training pass keeps each layer's input alone and computes the
    rest of the layer again in the backward pass: a third more arithmetic for far less memory.
    """

    activation_checkpointing = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, token_ids: Tensor, streams: Streams, cache: Cache | None, keep_trace: bool = False
    ) -> tuple[Tensor, list[DeltaNetUpdate | None]]:
        """Returns the normed hidden states [B, L, D] of all tokens, and each layer's cache update."""
        hidden_states = self.embed_tokens(token_ids)
        attention = self.config.attention
        rotary = rotary_tables(streams.position_ids, attention.rotary_dim, attention.rope_theta)
        updates = []
        for index, layer in enumerate(self.layers):
            layer_cache = None if cache is None else cache.layers[index]
            inputs = hidden_states, streams, rotary, layer_cache, keep_trace
            if self.activation_checkpointing and torch.is_grad_enabled():
                # Layers draw no random numbers, so there is no random state to keep
                hidden_states, update = checkpoint(
                    layer, *inputs, use_reentrant=False, preserve_rng_state=False
                )
            else:
                hidden_states, update = layer(*inputs)
            updates.append(update)
        return self.norm(hidden_states), updates


@dataclass(slots=True)
class Transaction:
    """A verified but uncommitted pass: any prefix of its tokens can still be accepted."""

    cache: Cache
    updates: list[DeltaNetUpdate | None]
    num_valid: list[int]
    version: int

    def commit(self, accepted: Sequence[int]) -> None:
        """Commits the first `accepted[row]` of each row's tokens, without another forward."""
        self._write(self.cache, accepted)
        self.cache.version += 1

    def peek(self, accepted: Sequence[int]) -> Cache:
        """Returns the history that `commit` would leave, to be read before the next pass.

        Keys and values are the cache's own, and nothing is committed.
        """
        layers = [copy(layer) for layer in self.cache.layers]
        history = Cache(self.cache.config, layers, self.cache.lengths)
        self._write(history, accepted)
        return history

    def _write(self, cache: Cache, accepted: Sequence[int]) -> None:
        _check_row_counts(accepted, self.num_valid, "accepted tokens")
        if self.version != self.cache.version:
            raise RuntimeError(
                "expected to commit right after the pass, found that the cache has moved on: "
                "commit or drop a transaction before the next pass"
            )
        _apply(cache, self.updates, accepted, is_whole=list(accepted) == self.num_valid)


class CloverForCausalLM(nn.Module):
    """A block-diffusion language model, or its autoregressive parent when `config.diffusion` is None.

    Parameters carry the names of the Hugging Face checkpoints. Raw logits are fp32 and cover the
    whole vocabulary, the mask token and padded rows too: forbidding those is the sampler's part.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.model.embed_tokens.weight.dtype

    def new_cache(self, batch_size: int, capacity: int = 0) -> Cache:
        """Returns an empty cache for `batch_size` rows; it grows by itself past `capacity` tokens."""
        return Cache.empty(
            self.config, batch_size, capacity=capacity, dtype=self.dtype, device=self.device
        )

    def pack_projections(self) -> None:
        """Makes one product of linear layers that have one input, for passes without gradients.

        Names, values and memory stay; call it once the weights are where they will be used.
        """
        for layer in self.model.layers:
            for module in layer.children():
                if isinstance(module, Attention | DeltaNet | SwiGLU | SparseMoe):
                    module.projections.pack()

    def forward(self, input_ids: Tensor, *, document_ids: Tensor | None = None) -> Tensor:
        """Returns the causal logits [B, T, V] of whole sequences, with autograd and without a cache.

        Args:
            input_ids: [B, T].
            document_ids: [B, T]; packed documents never see each other and their positions restart.
                Negative: padding.
        """
        hidden_states, _ = self.model(input_ids, causal_streams(input_ids, document_ids), None)
        return self.logits(hidden_states)

    def two_stream(
        self,
        input_ids: Tensor,
        document_ids: Tensor | None,
        canvas: Tensor,
        block_starts: Tensor,
        *,
        coreset_size: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns clean logits [B, T, V] and canvas logits [B, M, n, V] of one training pass.

        Args:
            input_ids: [B, T] clean tokens.
            document_ids: [B, T] or None, as for `forward`.
            canvas: [B, M, n] noised blocks. A block sees itself and the clean tokens of its document
                before its start.
            block_starts: [B, M], the row index of the first clean token that the block stands for;
                -1 marks an unused slot. A block may reach past its document's end.
            coreset_size: experts that a block may use; None: the configured number.
        """
        self._require_diffusion()
        streams = two_stream_streams(
            input_ids, document_ids, canvas, block_starts, coreset_size=coreset_size
        )
        token_ids = torch.cat([input_ids, canvas.flatten(1)], dim=1)
        hidden_states, _ = self.model(token_ids, streams, None)
        clean, noised = self.logits(hidden_states).tensor_split([input_ids.shape[1]], dim=1)
        return clean, noised.unflatten(1, canvas.shape[1:])

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Returns fp32 logits [.., V] of normed hidden states [.., D]."""
        logits: Tensor = self.lm_head(hidden_states)
        return logits.float()

    @torch.no_grad()
    def prefill(
        self,
        cache: Cache,
        input_ids: Tensor,
        lengths: Sequence[int] | None = None,
        *,
        chunk_size: int = PREFILL_CHUNK_SIZE,
    ) -> Tensor:
        """Commits prompts in chunks; returns the logits [B, V] after each row's last token.

        Args:
            cache: the cache to extend.
            input_ids: [B, T], right-padded.
            lengths: valid tokens of each row; None: all T. The logits of an empty row mean nothing.
            chunk_size: most tokens of a row in one pass.
        """
        remaining = _row_counts(input_ids, lengths)
        last_hidden = torch.zeros(len(remaining), self.config.hidden_size, device=self.device)
        last_hidden = last_hidden.to(self.dtype)
        for chunk in input_ids[:, : max(remaining)].split(chunk_size, dim=1):
            counts = [max(0, min(count, chunk.shape[1])) for count in remaining]
            hidden_states, updates = self._cached_pass(cache, chunk, None, counts, False)
            _apply(cache, updates, counts, is_whole=True)
            for row, count in enumerate(counts):
                if count and remaining[row] == count:
                    last_hidden[row] = hidden_states[row, count - 1]
            remaining = [left - count for left, count in zip(remaining, counts, strict=True)]
        return self.logits(last_hidden)

    @torch.no_grad()
    def commit(
        self, cache: Cache, input_ids: Tensor, lengths: Sequence[int] | None = None
    ) -> Tensor:
        """Appends final tokens to the history; returns their AR logits [B, T, V].

        Args:
            cache: the cache to extend.
            input_ids: [B, T], right-padded.
            lengths: valid tokens of each row (0 allowed); None: all T. Logits of padding mean nothing.
        """
        counts = _row_counts(input_ids, lengths)
        hidden_states, updates = self._cached_pass(cache, input_ids, None, counts, False)
        _apply(cache, updates, counts, is_whole=True)
        return self.logits(hidden_states)

    @torch.no_grad()
    def preview(self, cache: Cache, canvas: Tensor) -> Tensor:
        """Returns the canvas logits [B, n, V] of one block after the history. Changes no state."""
        self._require_diffusion()
        nothing = canvas[:, :0]
        hidden_states, _ = self._cached_pass(cache, nothing, canvas, [0] * len(canvas), False)
        return self.logits(hidden_states)

    @torch.no_grad()
    def commit_and_preview(
        self,
        cache: Cache,
        input_ids: Tensor,
        canvas: Tensor,
        lengths: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Commits a block and previews the next in ONE pass.

        Returns the commit's AR logits [B, T, V] and the canvas logits [B, n, V]; the canvas sees the
        history with the tokens that this very pass commits.
        """
        self._require_diffusion()
        counts = _row_counts(input_ids, lengths)
        hidden_states, updates = self._cached_pass(cache, input_ids, canvas, counts, False)
        _apply(cache, updates, counts, is_whole=True)
        committed, previewed = self.logits(hidden_states).tensor_split([input_ids.shape[1]], dim=1)
        return committed, previewed

    @torch.no_grad()
    def verify(
        self, cache: Cache, input_ids: Tensor, lengths: Sequence[int] | None = None
    ) -> tuple[Tensor, Transaction]:
        """Returns the AR logits [B, T, V] of tokens not yet committed, and the transaction."""
        counts = _row_counts(input_ids, lengths)
        hidden_states, updates = self._cached_pass(cache, input_ids, None, counts, True)
        return self.logits(hidden_states), Transaction(cache, updates, counts, cache.version)

    @torch.no_grad()
    def mixed_pass(
        self,
        cache: Cache,
        input_ids: Tensor,
        canvas: Tensor,
        lengths: Sequence[int],
        canvas_lengths: Sequence[int],
        *,
        keep_trace: bool = False,
    ) -> tuple[Tensor, Transaction]:
        """Runs rows that are in different phases: each has clean tokens, a canvas, both or neither.

        A canvas sees its row's history and all of its row's clean tokens, as in `commit_and_preview`.
        Nothing is committed before the transaction is.

        Args:
            cache: the cache to read, and to extend by committing the transaction.
            input_ids: [B, T] clean tokens, right-padded. T may be 0.
            canvas: [B, n], right-padded. n may be 0.
            lengths: valid clean tokens of each row.
            canvas_lengths: valid canvas tokens of each row.
            keep_trace: whether a row may accept fewer than its clean tokens.

        Returns:
            The normed hidden states [B, T + n, D], for `logits` to read where they are needed (those
            of padding mean nothing), and the transaction over the clean tokens.
        """
        if canvas.shape[1]:
            self._require_diffusion()
        counts = _row_counts(input_ids, lengths)
        sizes = _row_counts(canvas, canvas_lengths)
        hidden_states, updates = self._cached_pass(
            cache, input_ids, canvas, counts, keep_trace, sizes
        )
        return hidden_states, Transaction(cache, updates, counts, cache.version)

    @torch.no_grad()
    def verify_and_preview(
        self,
        cache: Cache,
        input_ids: Tensor,
        canvas: Tensor,
        lengths: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor, Transaction]:
        """Verifies tokens and previews the block behind them in ONE pass.

        Returns the AR logits [B, T, V], the canvas logits [B, n, V] and the transaction. The canvas
        sees all of the tokens: where fewer are committed, its logits mean nothing.
        """
        self._require_diffusion()
        counts = _row_counts(input_ids, lengths)
        hidden_states, updates = self._cached_pass(cache, input_ids, canvas, counts, True)
        verified, previewed = self.logits(hidden_states).tensor_split([input_ids.shape[1]], dim=1)
        return verified, previewed, Transaction(cache, updates, counts, cache.version)

    def _cached_pass(
        self,
        cache: Cache,
        input_ids: Tensor,
        canvas: Tensor | None,
        counts: list[int],
        keep_trace: bool,
        canvas_lengths: list[int] | None = None,
    ) -> tuple[Tensor, list[DeltaNetUpdate | None]]:
        """Runs clean tokens and at most one block over the cache, without moving its lengths."""
        block_size = 0 if canvas is None else canvas.shape[1]
        cache.version += 1
        cache.reserve(max(map(sum, zip(cache.lengths, counts, strict=True))) + block_size)
        streams = cached_streams(
            cache.lengths,
            counts,
            input_ids.shape[1],
            block_size,
            canvas_lengths=canvas_lengths,
            spare_row=cache.capacity,
            device=input_ids.device,
        )
        token_ids = input_ids if canvas is None else torch.cat([input_ids, canvas], dim=1)
        hidden_states, updates = self.model(token_ids, streams, cache, keep_trace)
        return hidden_states, updates

    def _require_diffusion(self) -> None:
        if self.config.diffusion is None:
            raise ValueError(
                "expected a Clover model for a preview, found an autoregressive parent "
                "(config.diffusion is None): convert it first"
            )

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Draws weights to start training from: N(0, 0.02), decays as in Mamba-2."""
        residual_std = 0.02 / math.sqrt(2 * self.config.num_layers)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | Experts):
                for weight in module.parameters(recurse=False):
                    weight.normal_(0.0, 0.02, generator=generator)
            if isinstance(module, DeltaNet):
                _init_delta_net(module, generator)
        for name, weight in self.named_parameters():
            if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj", "down_proj.weight")):
                weight.normal_(0.0, residual_std, generator=generator)


def _init_delta_net(layer: DeltaNet, generator: torch.Generator) -> None:
    """Draws A in [1, 16], time steps log-uniform in [0.001, 0.1]: memories of 1 to 1,000 tokens."""
    layer.A_log.uniform_(1.0, 16.0, generator=generator).log_()
    low, high = math.log(1e-3), math.log(1e-1)
    step = torch.empty_like(layer.dt_bias).uniform_(low, high, generator=generator).exp()
    layer.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
    bound = layer.shape.conv_kernel_size**-0.5
    layer.conv1d.weight.uniform_(-bound, bound, generator=generator)


def _apply(
    cache: Cache,
    updates: list[DeltaNetUpdate | None],
    accepted: Sequence[int],
    *,
    is_whole: bool,
) -> None:
    """Writes rings and states after `accepted` tokens of each row, and moves the lengths."""
    counts = None
    for layer, update in zip(cache.layers, updates, strict=True):
        if isinstance(layer, DeltaNetCache) and update is not None:
            num_tokens = update.left.shape[1] - layer.conv_state.shape[-1]
            takes_all = all(count == num_tokens for count in accepted)
            if counts is None and not takes_all:
                counts = torch.tensor(accepted, device=layer.conv_state.device)
            update.apply(layer, counts, is_whole=is_whole)
    cache.lengths = [length + count for length, count in zip(cache.lengths, accepted, strict=True)]


def _row_counts(input_ids: Tensor, lengths: Sequence[int] | None) -> list[int]:
    """Returns the valid tokens of each row as a list."""
    batch_size, num_tokens = input_ids.shape
    counts = [num_tokens] * batch_size if lengths is None else [int(count) for count in lengths]
    _check_row_counts(counts, [num_tokens] * batch_size, "tokens")
    return counts


def _check_row_counts(counts: Sequence[int], limits: Sequence[int], what: str) -> None:
    is_legal = len(counts) == len(limits)
    is_legal = is_legal and all(0 <= c <= limit for c, limit in zip(counts, limits, strict=True))
    if not is_legal:
        raise ValueError(f"expected {what} per row within {list(limits)}, found {list(counts)}")
