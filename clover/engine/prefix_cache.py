"""Committed states of earlier prompts and turns, to start a prompt that begins like one of them.

A recurrent state cannot be cut: unlike keys and values it holds at one length only. So an entry is
a boundary, and has the state there, and the keys and values since the boundary before it. The
rest it shares with its ancestors.

Shapes: S tokens of one segment.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clover.model.cache import AttentionCache, Cache, Snapshot


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """The state after `length` tokens."""

    key: bytes
    length: int
    parent: Entry | None
    # Per layer: keys and values [S, heads, head_dim] since the parent, or ring and recurrent state
    layers: tuple[tuple[Tensor, ...], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of this entry alone."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer)

    def lineage(self) -> Iterator[Entry]:
        """Yields this entry, its parent, and so on."""
        entry: Entry | None = self
        while entry is not None:
            yield entry
            entry = entry.parent


class PrefixCache:
    """Entries by the digest of their tokens; the least recently used go first.

    An entry is used whenever a descendant is, and counts as used after it. So the least recently
    used one has no descendants, and dropping it leaves no segment without its beginning.

    Args:
        max_bytes: Most bytes that the entries' tensors hold together; 0 turns the cache off.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._entries)

    def restore(self, cache: Cache, row: int, token_ids: Sequence[int]) -> int:
        """Gives a cache's row the state after the longest stored prefix; returns its length.

        Ring and recurrent state are bit for bit the stored ones, and so are keys and values; those
        of an ancestor's tokens are the ancestor's, which another pass may have rounded otherwise.
        0: no stored prefix, nothing is done.
        """
        entry = self._find(token_ids)
        if entry is None:
            return 0
        self._touch(entry)
        cache.restore(row, _snapshot(entry, cache))
        return entry.length

    def store(self, token_ids: Sequence[int], cache: Cache, row: int) -> None:
        """Keeps a copy of the state of a row that has committed exactly `token_ids`."""
        assert cache.lengths[row] == len(token_ids)
        if not self.max_bytes or not token_ids:
            return
        (key,) = _digests(token_ids, [len(token_ids)])
        entry = self._entries.get(key)
        if entry is None:
            parent = self._find(token_ids)
            start = parent.length if parent else 0
            layers = tuple(
                _copy_since(start, layer, cache, row) for layer in range(len(cache.layers))
            )
            entry = Entry(key, len(token_ids), parent, layers)
            self._entries[key] = entry
            self.num_bytes += entry.num_bytes
        self._touch(entry)
        while self.num_bytes > self.max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.num_bytes -= oldest.num_bytes

    def _find(self, token_ids: Sequence[int]) -> Entry | None:
        """Returns the entry of the longest stored prefix."""
        lengths = {entry.length for entry in self._entries.values()}
        usable = sorted(length for length in lengths if length <= len(token_ids))
        for key in reversed(list(_digests(token_ids, usable))):
            if key in self._entries:
                return self._entries[key]
        return None

    def _touch(self, entry: Entry) -> None:
        for each in entry.lineage():
            self._entries.move_to_end(each.key)


def _digests(token_ids: Sequence[int], lengths: Iterable[int]) -> Iterator[bytes]:
    """Yields a digest of the first `length` tokens for each of the ascending lengths."""
    digest, start = hashlib.blake2b(digest_size=16), 0
    for length in lengths:
        digest.update(array("q", token_ids[start:length]).tobytes())
        start = length
        yield digest.digest()


def _copy_since(start: int, layer_index: int, cache: Cache, row: int) -> tuple[Tensor, ...]:
    """Returns what a row's layer holds at its length, keys and values from `start` on."""
    layer = cache.layers[layer_index]
    span = slice(start, cache.lengths[row]) if isinstance(layer, AttentionCache) else slice(None)
    return tuple(tensor[row, span].clone() for tensor in layer.tensors())


def _snapshot(entry: Entry, cache: Cache) -> Snapshot:
    """Returns an entry's state in one piece."""
    layers: list[tuple[Tensor, ...]] = []
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, AttentionCache):
            segments = [each.layers[index] for each in entry.lineage()][::-1]
            keys, values = (torch.cat(parts) for parts in zip(*segments, strict=True))
            layers.append((keys, values))
        else:
            layers.append(entry.layers[index])
    return Snapshot(entry.length, tuple(layers))
