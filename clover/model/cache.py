"""The cache of a batch of sequences: KV rows, conv rings and recurrent states. A transaction.

Only a commit moves `lengths`; whatever lies at or past a row's length is scratch that the next pass
may overwrite. Recurrent states and rings are replaced, never written in place, so holding an old one
costs nothing and restoring it is an assignment.

Shapes: B rows, S key capacity, L tokens of a pass, C conv channels, W conv kernel, H value heads,
K / V head widths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clover.config import ModelConfig

MIN_CAPACITY = 64


class AttentionCache:
    """Keys and values of one attention layer, [R, S + 1, heads, head_dim], R >= B; the last is spare.

    Sequences past the first B are room for those that may join.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys
        self.values = values

    def write(self, k: Tensor, v: Tensor, rows: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
        """Writes [B, L, heads, head_dim] at `rows` [B, L]; returns views of the first `num_keys` rows."""
        batch_size = k.shape[0]
        batch = torch.arange(batch_size, device=k.device)[:, None]
        self.keys[batch, rows] = k.to(self.keys.dtype)
        self.values[batch, rows] = v.to(self.values.dtype)
        return self.keys[:batch_size, :num_keys], self.values[:batch_size, :num_keys]

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns the tensors that make up this layer's cache."""
        return self.keys, self.values


class DeltaNetCache:
    """Conv ring [B, C, W - 1] and recurrent state [B, H, K, V] (fp32) of one GDN layer."""

    def __init__(self, conv_state: Tensor, recurrent_state: Tensor) -> None:
        self.conv_state = conv_state
        self.recurrent_state = recurrent_state

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns the tensors that make up this layer's cache."""
        return self.conv_state, self.recurrent_state


LayerCache = AttentionCache | DeltaNetCache


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One row's committed state, apart from any cache. `layers` holds, per layer, its two tensors."""

    length: int
    layers: tuple[tuple[Tensor, ...], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that the snapshot holds."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer)


class Cache:
    """The committed history of `batch_size` sequences.

    Attributes:
        lengths: committed tokens of each row (on the host: no pass needs to ask the device).
        layers: one `AttentionCache` or `DeltaNetCache` per layer. The recurrent state is laid out
            [B, H, K, V]: a query of width K reads it as S^T q.
        version: counts passes, so that a stale transaction is recognised.
    """

    def __init__(self, config: ModelConfig, layers: list[LayerCache], lengths: list[int]) -> None:
        self.config = config
        self.layers = layers
        self.lengths = lengths
        self.version = 0

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        batch_size: int,
        *,
        capacity: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Cache:
        """Returns an empty cache with room for `capacity` tokens a row; it grows by itself."""
        attention, delta = config.attention, config.delta_net
        kv_shape = (batch_size, capacity + 1, attention.num_kv_heads, attention.head_dim)
        conv_shape = (batch_size, delta.conv_dim, delta.conv_kernel_size - 1)
        state_shape = (batch_size, delta.num_v_heads, delta.head_k_dim, delta.head_v_dim)
        layers: list[LayerCache] = []
        for layer_type in config.layer_types:
            if layer_type == "full_attention":
                k, v = (torch.zeros(kv_shape, dtype=dtype, device=device) for _ in range(2))
                layers.append(AttentionCache(k, v))
            else:
                conv = torch.zeros(conv_shape, dtype=dtype, device=device)
                state = torch.zeros(state_shape, dtype=torch.float32, device=device)
                layers.append(DeltaNetCache(conv, state))
        return cls(config, layers, [0] * batch_size)

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    @property
    def capacity(self) -> int:
        """Tokens a row has room for before the next growth (0 without attention layers)."""
        return next((kv.keys.shape[1] - 1 for kv in self._attention_layers()), 0)

    @property
    def num_bytes(self) -> int:
        """Bytes that all tensors of the cache hold."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors())

    def reserve(self, num_tokens: int) -> None:
        """Makes room for `num_tokens` a row, at least doubling when it must grow."""
        if num_tokens <= self.capacity:
            return
        capacity = max(num_tokens, 2 * self.capacity, MIN_CAPACITY)
        used = max(self.lengths, default=0)
        for kv in self._attention_layers():
            kv.keys, kv.values = (_grown(x, capacity + 1, used) for x in (kv.keys, kv.values))

    def snapshot(self, row: int) -> Snapshot:
        """Returns a copy of one row's committed state."""
        length = self.lengths[row]
        layers = []
        for layer in self.layers:
            stop = length if isinstance(layer, AttentionCache) else None
            layers.append(tuple(tensor[row, :stop].clone() for tensor in layer.tensors()))
        return Snapshot(length, tuple(layers))

    def restore(self, row: int, snapshot: Snapshot) -> None:
        """Makes `row` what it was when the snapshot was taken (here or in another cache)."""
        self.reserve(snapshot.length)
        for layer, (first, second) in zip(self.layers, snapshot.layers, strict=True):
            if isinstance(layer, AttentionCache):
                layer.keys[row, : snapshot.length] = first
                layer.values[row, : snapshot.length] = second
            else:
                layer.conv_state = _with_row(layer.conv_state, row, first)
                layer.recurrent_state = _with_row(layer.recurrent_state, row, second)
        self.lengths[row] = snapshot.length
        self.version += 1

    def fork(self) -> Cache:
        """Returns an independent copy of the whole cache."""
        return self.select(range(self.batch_size))

    def select(self, rows: Sequence[int]) -> Cache:
        """Returns a new cache of the given rows, in that order; a row may be named more than once."""
        layers: list[LayerCache] = []
        for layer in self.layers:
            first, second = (tensor[list(rows)] for tensor in layer.tensors())
            layers.append(type(layer)(first, second))
        return Cache(self.config, layers, [self.lengths[row] for row in rows])

    def extend(self, other: Cache) -> None:
        """Appends copies of the rows of another cache."""
        start, stop = self.batch_size, self.batch_size + other.batch_size
        used = max(other.lengths, default=0)
        self.reserve(used)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            if isinstance(mine, AttentionCache):
                assert isinstance(theirs, AttentionCache)
                mine.keys, mine.values = (_with_room(x, stop) for x in mine.tensors())
                mine.keys[start:stop, :used] = theirs.keys[: stop - start, :used]
                mine.values[start:stop, :used] = theirs.values[: stop - start, :used]
            else:
                assert isinstance(theirs, DeltaNetCache)
                mine.conv_state = torch.cat([mine.conv_state, theirs.conv_state])
                mine.recurrent_state = torch.cat([mine.recurrent_state, theirs.recurrent_state])
        self.lengths = [*self.lengths, *other.lengths]
        self.version += 1

    def remove(self, row: int) -> None:
        """Drops one row; the last one takes its place. The room stays for rows that come later."""
        last = self.batch_size - 1
        kept = [last if index == row else index for index in range(last)]
        used = self.lengths[last]
        for layer in self.layers:
            if isinstance(layer, AttentionCache):
                if row != last:
                    layer.keys[row, :used] = layer.keys[last, :used]
                    layer.values[row, :used] = layer.values[last, :used]
            else:
                layer.conv_state = layer.conv_state[kept]
                layer.recurrent_state = layer.recurrent_state[kept]
        self.lengths = [self.lengths[index] for index in kept]
        self.version += 1

    def _attention_layers(self) -> Iterator[AttentionCache]:
        return (layer for layer in self.layers if isinstance(layer, AttentionCache))


def _grown(x: Tensor, num_rows: int, used: int) -> Tensor:
    """Returns `x` [B, S, ..] with `num_rows` rows, the first `used` kept."""
    grown = x.new_zeros(x.shape[0], num_rows, *x.shape[2:])
    grown[:, :used] = x[:, :used]
    return grown


def _with_room(x: Tensor, num_sequences: int) -> Tensor:
    """Returns `x` [R, ..], or when R is too small a copy with at least twice as many sequences."""
    if num_sequences <= x.shape[0]:
        return x
    grown = x.new_zeros(max(num_sequences, 2 * x.shape[0]), *x.shape[1:])
    grown[: x.shape[0]] = x
    return grown


def _with_row(x: Tensor, row: int, value: Tensor) -> Tensor:
    """Returns a copy of `x` with one row replaced: states are never written in place."""
    x = x.clone()
    x[row] = value
    return x
