"""Stored states come back bit for bit, share what they have in common, and leave the oldest first."""

from __future__ import annotations

import torch

from clover.engine.prefix_cache import PrefixCache
from clover.model.cache import Cache
from clover.model.transformer import CloverForCausalLM

TOKENS = tuple(3 + 11 * i % 47 for i in range(40))


@torch.no_grad()
def commit(model: CloverForCausalLM, tokens: tuple[int, ...], cache: Cache | None = None) -> Cache:
    cache = cache or model.new_cache(1)
    model.commit(cache, torch.tensor([tokens]))
    return cache


def same_state(first: Cache, second: Cache) -> bool:
    a, b = first.snapshot(0), second.snapshot(0)
    return a.length == b.length and all(
        torch.equal(x, y)
        for mine, theirs in zip(a.layers, b.layers, strict=True)
        for x, y in zip(mine, theirs, strict=True)
    )


def bytes_of(model: CloverForCausalLM, num_tokens: int) -> int:
    """Returns what an entry of so many tokens without an ancestor holds."""
    return commit(model, TOKENS[:num_tokens]).snapshot(0).num_bytes


def test_the_longest_stored_prefix_comes_back_bit_for_bit(lively_model: CloverForCausalLM) -> None:
    prefixes, cache = PrefixCache(2**24), lively_model.new_cache(1)
    states = {}
    for start, stop in ((0, 7), (7, 8), (8, 21)):
        commit(lively_model, TOKENS[start:stop], cache)
        prefixes.store(TOKENS[:stop], cache, 0)
        states[stop] = cache.fork()
    assert len(prefixes) == 3
    for num_tokens, expected in ((40, 21), (21, 21), (20, 8), (8, 8), (7, 7)):
        found = lively_model.new_cache(1)
        assert prefixes.restore(found, 0, TOKENS[:num_tokens]) == expected
        assert same_state(found, states[expected])
    found = lively_model.new_cache(1)
    assert prefixes.restore(found, 0, TOKENS[:6]) == 0
    assert prefixes.restore(found, 0, (9, *TOKENS[1:])) == 0
    assert found.lengths == [0]


def test_an_entry_holds_only_what_its_ancestor_lacks(lively_model: CloverForCausalLM) -> None:
    prefixes, cache = PrefixCache(2**24), commit(lively_model, TOKENS[:30])
    prefixes.store(TOKENS[:30], cache, 0)
    assert prefixes.num_bytes == bytes_of(lively_model, 30)
    kv_bytes = bytes_of(lively_model, 2) - bytes_of(lively_model, 1)  # of one token
    before = prefixes.num_bytes
    commit(lively_model, TOKENS[30:33], cache)
    prefixes.store(TOKENS[:33], cache, 0)
    assert prefixes.num_bytes - before == bytes_of(lively_model, 1) + 2 * kv_bytes
    before = prefixes.num_bytes
    prefixes.store(TOKENS[:33], cache, 0)
    assert (prefixes.num_bytes, len(prefixes)) == (before, 2)


def test_later_passes_do_not_touch_what_is_stored(lively_model: CloverForCausalLM) -> None:
    prefixes, cache = PrefixCache(2**24), commit(lively_model, TOKENS[:9])
    prefixes.store(TOKENS[:9], cache, 0)
    expected = cache.fork()
    commit(lively_model, TOKENS[9:30], cache)
    cache.remove(0)
    found = lively_model.new_cache(1)
    prefixes.restore(found, 0, TOKENS[:9])
    commit(lively_model, (5, 5, 5), found)  # nor does a pass of one that started from it
    again = lively_model.new_cache(1)
    prefixes.restore(again, 0, TOKENS[:9])
    assert same_state(again, expected)


def test_the_least_recently_used_entry_goes_first(lively_model: CloverForCausalLM) -> None:
    budget = 2 * bytes_of(lively_model, 11) + bytes_of(lively_model, 4)
    prefixes = PrefixCache(budget)
    texts = [(first, *TOKENS[:10]) for first in (5, 6, 7)]
    first, second, third = texts
    for text in (first, second):
        prefixes.store(text, commit(lively_model, text), 0)
    prefixes.restore(lively_model.new_cache(1), 0, first)  # used: now `second` is the oldest
    prefixes.store((*first, 9), commit(lively_model, (*first, 9)), 0)
    prefixes.store(third, commit(lively_model, third), 0)
    assert prefixes.num_bytes <= budget
    found = [prefixes.restore(lively_model.new_cache(1), 0, (*text, 9)) for text in texts]
    assert found == [12, 0, 11]


def test_an_entry_larger_than_the_budget_is_not_kept(lively_model: CloverForCausalLM) -> None:
    prefixes = PrefixCache(bytes_of(lively_model, 5) - 1)
    prefixes.store(TOKENS[:5], commit(lively_model, TOKENS[:5]), 0)
    assert (len(prefixes), prefixes.num_bytes) == (0, 0)
