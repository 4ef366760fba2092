"""The cache owns a sequence's state: copies are apart, growth is invisible, the layout is fixed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from clover.config import (
    AttentionConfig,
    DeltaNetConfig,
    DenseMlpConfig,
    DiffusionConfig,
    ModelConfig,
)
from clover.model.cache import AttentionCache, Cache, DeltaNetCache, Snapshot
from clover.model.transformer import CloverForCausalLM

TOLERANCE = 1e-4
"""fp32 logits near 1, the same formula in another order of sums."""

CONFIG = ModelConfig(
    vocab_size=40,
    hidden_size=16,
    layer_types=("linear_attention", "full_attention", "linear_attention", "full_attention"),
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    max_position_embeddings=1024,
    attention=AttentionConfig(
        num_heads=4, num_kv_heads=2, head_dim=6, rotary_dim=4, rope_theta=100.0
    ),
    delta_net=DeltaNetConfig(
        num_k_heads=2, num_v_heads=4, head_k_dim=6, head_v_dim=5, conv_kernel_size=4
    ),
    mlp=DenseMlpConfig(intermediate_size=16),
    diffusion=DiffusionConfig(block_size=4, mask_token_id=39),
)
GDN_ONLY = replace(CONFIG, layer_types=("linear_attention",))


@functools.cache
@torch.no_grad()
def random_model(config: ModelConfig = CONFIG) -> CloverForCausalLM:
    model, generator = CloverForCausalLM(config).eval(), torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith(("A_log", "dt_bias")):
            weight.copy_(0.5 * noise - 1.0)
        elif weight.dim() == 1:
            weight.add_(0.3 * noise)
        else:
            weight.copy_(noise if "embed" in name else noise * weight.shape[-1] ** -0.5)
    return model


def random_ids(rows: int, tokens: int, seed: int) -> Tensor:
    return torch.randint(39, (rows, tokens), generator=torch.Generator().manual_seed(seed))


HISTORY = random_ids(3, 12, seed=0)
LENGTHS = [12, 0, 5]


def filled_cache(capacity: int = 0) -> Cache:
    """Returns a cache of three rows of different length."""
    cache = random_model().new_cache(3, capacity=capacity)
    random_model().commit(cache, HISTORY, lengths=LENGTHS)
    return cache


def future(cache: Cache) -> list[Tensor]:
    """Returns what a copy of the cache would answer next; the cache stays as it is."""
    model, copy = random_model(), cache.fork()
    canvas, tokens = random_ids(len(cache.lengths), 4, seed=1), random_ids(1, 6, seed=2)
    tokens = tokens.expand(len(cache.lengths), -1)
    return [model.preview(copy, canvas[:1].expand_as(canvas)), model.commit(copy, tokens)]


def assert_same_future(found: Cache, expected: Cache) -> None:
    assert list(found.lengths) == list(expected.lengths)
    for x, y in zip(future(found), future(expected), strict=True):
        assert (x - y).abs().max() <= TOLERANCE


def all_tensors(cache: Cache) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in layer.tensors()]


def test_a_new_cache_is_empty() -> None:
    cache = random_model().new_cache(3)
    assert list(cache.lengths) == [0, 0, 0]
    assert cache.batch_size == 3
    assert all(torch.count_nonzero(tensor) == 0 for tensor in all_tensors(cache))


def test_each_row_has_its_own_length() -> None:
    cache = filled_cache()
    assert list(cache.lengths) == LENGTHS
    random_model().commit(cache, random_ids(3, 4, seed=3), lengths=[1, 4, 0])
    assert list(cache.lengths) == [13, 4, 5]
    assert all(isinstance(length, int) for length in cache.lengths)


def test_a_row_that_commits_nothing_stays_bit_for_bit_as_it_was() -> None:
    cache = filled_cache()
    before = [cache.snapshot(row) for row in range(3)]
    random_model().commit(cache, random_ids(3, 4, seed=3), lengths=[0, 4, 0])
    for row in (0, 2):
        after = cache.snapshot(row)
        assert after.length == before[row].length
        for old, new in zip(before[row].layers, after.layers, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(old, new, strict=True))


@pytest.mark.parametrize("capacity", [0, 1, 11, 12, 63, 64, 65, 500])
def test_growth_does_not_change_an_answer(capacity: int) -> None:
    model, cache, roomy = (
        random_model(),
        filled_cache(capacity),
        filled_cache(capacity=1000),
    )
    for seed in range(12):
        tokens = random_ids(3, 17, seed=seed)
        x, y = model.commit(cache, tokens), model.commit(roomy, tokens)
        assert (x - y).abs().max() <= TOLERANCE
        assert_same_future(cache, roomy)
    assert cache.capacity >= 12 + 12 * 17


def test_capacity_at_least_doubles_when_it_grows() -> None:
    model, cache = random_model(), random_model().new_cache(1)
    capacities = []
    for token in random_ids(1, 300, seed=4).split(1, dim=1):
        model.commit(cache, token)
        assert cache.capacity >= cache.lengths[0]
        if not capacities or cache.capacity != capacities[-1]:
            capacities.append(cache.capacity)
    assert all(new >= 2 * old for old, new in itertools.pairwise(capacities))
    assert len(capacities) <= 5


def test_num_bytes_is_what_the_tensors_hold() -> None:
    cache = random_model().new_cache(3, capacity=100)
    delta, attention = CONFIG.delta_net, CONFIG.attention
    ring = delta.conv_dim * (delta.conv_kernel_size - 1) * 4
    state = delta.num_v_heads * delta.head_k_dim * delta.head_v_dim * 4
    kv_row = 2 * attention.num_kv_heads * attention.head_dim * 4
    least = 3 * 2 * (ring + state + 100 * kv_row)
    assert least <= cache.num_bytes <= least + 3 * 2 * 2 * kv_row  # a spare row or two at most
    assert cache.num_bytes == sum(x.numel() * x.element_size() for x in all_tensors(cache))
    assert random_model(GDN_ONLY).new_cache(3, capacity=100).num_bytes == 3 * (ring + state)


def test_a_snapshot_holds_its_own_row_alone() -> None:
    delta, attention = CONFIG.delta_net, CONFIG.attention
    ring = delta.conv_dim * (delta.conv_kernel_size - 1) * 4
    state = delta.num_v_heads * delta.head_k_dim * delta.head_v_dim * 4
    kv_row = 2 * attention.num_kv_heads * attention.head_dim * 4
    snapshot = filled_cache(capacity=500).snapshot(2)
    assert snapshot.length == 5
    assert snapshot.num_bytes == 2 * (ring + state + 5 * kv_row)


@pytest.mark.parametrize("row", [0, 1, 2])
def test_restore_undoes_whatever_came_after_the_snapshot(row: int) -> None:
    model, cache, untouched = random_model(), filled_cache(), filled_cache()
    snapshot = cache.snapshot(row)
    model.commit(cache, random_ids(3, 70, seed=5))  # grows, too
    others = cache.fork()
    cache.restore(row, snapshot)
    for index in range(3):
        expected = untouched if index == row else others
        assert_same_future(cache.select([index]), expected.select([index]))


def test_a_snapshot_is_not_touched_by_later_passes() -> None:
    model, cache = random_model(), filled_cache()
    snapshot = cache.snapshot(0)
    copies = [[x.clone() for x in layer] for layer in snapshot.layers]
    model.commit(cache, random_ids(3, 9, seed=5))
    model.preview(cache, random_ids(3, 4, seed=5))
    cache.restore(0, snapshot)
    model.commit(cache, random_ids(3, 9, seed=6))
    for layer, copy in zip(snapshot.layers, copies, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(layer, copy, strict=True))


def test_a_snapshot_may_be_restored_in_another_row_of_another_cache() -> None:
    snapshot, other = filled_cache().snapshot(0), random_model().new_cache(2)
    random_model().commit(other, random_ids(2, 20, seed=6), lengths=[20, 3])
    other.restore(1, snapshot)
    assert list(other.lengths) == [20, 12]
    assert_same_future(other.select([1]), filled_cache().select([0]))
    kept = random_model().new_cache(1)
    random_model().commit(kept, random_ids(2, 20, seed=6)[:1])
    assert_same_future(other.select([0]), kept)


def test_a_snapshot_longer_than_the_caches_capacity_is_restored_whole() -> None:
    model, long_cache = random_model(), random_model().new_cache(1)
    model.commit(long_cache, random_ids(1, 200, seed=7))
    short_cache = model.new_cache(2)
    model.commit(short_cache, random_ids(2, 2, seed=8))
    short_cache.restore(0, long_cache.snapshot(0))
    assert_same_future(short_cache.select([0]), long_cache)


def changes(cache: Cache) -> Iterator[Callable[[], object]]:
    """Yields everything that may change a cache."""
    yield lambda: random_model().commit(cache, random_ids(len(cache.lengths), 90, seed=9))
    yield lambda: random_model().preview(cache, random_ids(len(cache.lengths), 8, seed=9))
    yield lambda: cache.restore(0, filled_cache().snapshot(2))


@pytest.mark.parametrize("change", range(3))
@pytest.mark.parametrize("copy", [Cache.fork, lambda cache: cache.select([0, 1, 2])])
def test_a_copy_and_its_original_do_not_touch_each_other(
    copy: Callable[[Cache], Cache], change: int
) -> None:
    untouched = filled_cache()
    cache = filled_cache()
    other = copy(cache)
    list(changes(cache))[change]()
    assert_same_future(other, untouched)
    cache = filled_cache()
    other = copy(cache)
    list(changes(other))[change]()
    assert_same_future(cache, untouched)


def test_select_reorders_drops_and_repeats_rows() -> None:
    cache = filled_cache()
    selected = cache.select([2, 0, 2])
    assert list(selected.lengths) == [5, 12, 5]
    for index, row in enumerate([2, 0, 2]):
        assert_same_future(selected.select([index]), cache.select([row]))
    # Repeated rows go their own ways from here.
    tokens = random_ids(3, 4, seed=10)
    logits = random_model().commit(selected, tokens)
    for index, row in enumerate([2, 0, 2]):
        alone = random_model().commit(filled_cache().select([row]), tokens[index : index + 1])
        assert (logits[index : index + 1] - alone).abs().max() <= TOLERANCE


def test_rows_join_a_cache_and_answer_as_they_did_alone() -> None:
    cache, other = filled_cache(), random_model().new_cache(2)
    random_model().commit(other, random_ids(2, 90, seed=6), lengths=[90, 3])
    cache.extend(other)
    assert list(cache.lengths) == [*LENGTHS, 90, 3]
    for row in range(3):
        assert_same_future(cache.select([row]), filled_cache().select([row]))
    for row in range(2):
        assert_same_future(cache.select([3 + row]), other.select([row]))


@pytest.mark.parametrize("row", [0, 1, 2])
def test_the_last_row_takes_the_place_of_one_that_leaves(row: int) -> None:
    cache, expected = filled_cache(), filled_cache()
    cache.remove(row)
    left = [[2, 1], [0, 2], [0, 1]][row]
    assert list(cache.lengths) == [LENGTHS[index] for index in left]
    for index, origin in enumerate(left):
        assert_same_future(cache.select([index]), expected.select([origin]))


def test_a_row_that_joins_sees_nothing_of_the_one_that_left_its_place() -> None:
    cache, fresh = filled_cache(), random_model().new_cache(1)
    for _ in range(3):
        cache.remove(0)
    assert cache.batch_size == 0
    num_bytes = cache.num_bytes
    cache.extend(fresh)
    assert_same_future(cache, fresh)
    for _ in range(20):  # room is used again
        cache.remove(0)
        cache.extend(fresh)
    state_bytes = sum(x.nbytes for layer in fresh.layers for x in layer.tensors()[-1:])
    assert cache.num_bytes <= num_bytes + 4 * state_bytes


@torch.no_grad()
def test_the_recurrent_state_is_read_as_state_transposed_times_query() -> None:
    # After one token the state is beta k v^T: rows are key dimensions, columns value dimensions.
    model, token = random_model(GDN_ONLY), torch.tensor([[7]])
    cache = model.new_cache(1)
    model.commit(cache, token)
    layer = cache.layers[0]
    assert isinstance(layer, DeltaNetCache)
    shape = GDN_ONLY.delta_net
    weights = {name.rpartition("linear_attn.")[2]: w for name, w in model.named_parameters()}
    hidden = model.model.embed_tokens(token)[0, 0]
    scale = (hidden.pow(2).mean() + GDN_ONLY.rms_norm_eps).rsqrt()
    x = hidden * scale * (1 + model.get_parameter("model.layers.0.input_layernorm.weight"))
    mixed = weights["in_proj_qkv.weight"] @ x
    convolved = torch.nn.functional.silu(mixed * weights["conv1d.weight"][:, 0, -1])
    _, k, v = convolved.split([shape.key_dim, shape.key_dim, shape.value_dim])
    k = torch.nn.functional.normalize(k.view(2, 6), dim=-1).repeat_interleave(2, dim=0)
    beta = torch.sigmoid(weights["in_proj_b.weight"] @ x)
    v = v.view(4, 5)
    assert layer.recurrent_state.shape == (1, 4, 6, 5)  # [B, H, K, V]
    for head in range(4):
        read = layer.recurrent_state[0, head].T @ k[head]  # S^T k = beta v, for |k| = 1
        assert (read - beta[head] * v[head]).abs().max() <= TOLERANCE
    assert layer.conv_state.shape == (1, shape.conv_dim, 3)
    assert torch.count_nonzero(layer.conv_state[..., :2]) == 0
    assert (layer.conv_state[0, :, 2] - mixed).abs().max() <= TOLERANCE  # the newest row is last


def test_states_are_fp32_beside_bf16_keys_and_values() -> None:
    model = CloverForCausalLM(CONFIG).bfloat16()
    model.load_state_dict(random_model().state_dict())
    cache = model.new_cache(2)
    model.commit(cache, random_ids(2, 5, seed=11))
    for layer in cache.layers:
        if isinstance(layer, AttentionCache):
            assert layer.keys.dtype == layer.values.dtype == torch.bfloat16
        else:
            assert layer.conv_state.dtype == torch.bfloat16
            assert layer.recurrent_state.dtype == torch.float32


def test_a_transaction_commits_once() -> None:
    cache = filled_cache()
    _, transaction = random_model().verify(cache, random_ids(3, 4, seed=12))
    transaction.commit([2, 0, 4])
    with pytest.raises(RuntimeError, match="transaction"):
        transaction.commit([2, 0, 4])
    assert list(cache.lengths) == [14, 0, 9]


def test_peeking_shows_what_a_commit_would_leave_and_leaves_the_cache_alone() -> None:
    cache = filled_cache()
    before = [cache.snapshot(row) for row in range(3)]
    _, transaction = random_model().verify(cache, random_ids(3, 4, seed=12))
    history = transaction.peek([2, 0, 4])
    for row, snapshot in enumerate(before):
        assert_equal(cache.snapshot(row), snapshot)
    seen = [history.snapshot(row) for row in range(3)]
    transaction.commit([2, 0, 4])
    for row, snapshot in enumerate(seen):
        assert_equal(cache.snapshot(row), snapshot)


def assert_equal(found: Snapshot, expected: Snapshot) -> None:
    assert found.length == expected.length
    for mine, theirs in zip(found.layers, expected.layers, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("change", range(3))
def test_a_transaction_dies_with_the_next_change_of_its_cache(change: int) -> None:
    cache = filled_cache()
    _, transaction = random_model().verify(cache, random_ids(3, 4, seed=12))
    list(changes(cache))[change]()
    lengths = list(cache.lengths)
    with pytest.raises(RuntimeError, match="transaction"):
        transaction.commit([1, 1, 1])
    assert list(cache.lengths) == lengths


@pytest.mark.parametrize("accepted", [[5, 0, 0], [-1, 0, 0], [1, 1], [1, 1, 1, 1]])
def test_accepting_what_was_not_verified_is_refused(accepted: list[int]) -> None:
    cache = filled_cache()
    _, transaction = random_model().verify(cache, random_ids(3, 4, seed=12))
    with pytest.raises(ValueError, match="accepted"):
        transaction.commit(accepted)
    assert list(cache.lengths) == LENGTHS


@pytest.mark.parametrize("lengths", [[5, 0, 0], [-1, 0, 0], [1, 1]])
def test_committing_more_than_was_given_is_refused(lengths: list[int]) -> None:
    cache = filled_cache()
    with pytest.raises(ValueError, match="tokens"):
        random_model().commit(cache, random_ids(3, 4, seed=12), lengths=lengths)
    assert list(cache.lengths) == LENGTHS


def test_unwritten_memory_is_never_read() -> None:
    # In deterministic mode torch fills memory that nobody wrote with NaN.
    expected = future(filled_cache())
    torch.use_deterministic_algorithms(True)
    try:
        cache = filled_cache()
        random_model().commit(cache, random_ids(3, 4, seed=3), lengths=[0, 0, 0])
        found = future(cache)
    finally:
        torch.use_deterministic_algorithms(False)
    for x, y in zip(found, expected, strict=True):
        assert (x - y).abs().max() <= TOLERANCE
