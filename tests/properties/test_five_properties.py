"""The five properties that keep commit, preview and two-stream training one and the same model.

1. The clean stream is the parent's causal forward.
2. A noised block in training gives the logits of a cached preview.
3. Committing a sequence in pieces gives the logits of the whole.
4. Nothing leaks: each logit depends on exactly what it may see.
5. A preview changes nothing.

The weights are random, the added ones too: no operator is at a value that hides a fault.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clover.config import (
    AttentionConfig,
    DeltaNetConfig,
    DenseMlpConfig,
    DiffusionConfig,
    ModelConfig,
    MoeConfig,
)
from clover.model.cache import AttentionCache, Cache, DeltaNetCache
from clover.model.transformer import CloverForCausalLM

LOGIT_TOLERANCE = 1e-4
"""Of the standard deviation of the expected logits. fp32, the same formula summed in another order:
1e-6 to 1e-5 is seen; a token too many or too few in any sum is off by 1e-2 or more."""

REGROUPED_TOLERANCE = 1e-5
"""Of the logits' standard deviation. Experts compute their tokens together: a token that moves to
another expert changes the shape of a product, and with it the last bit of its neighbours' sums."""

STATE_TOLERANCE = 1e-4
"""Of the largest entry of the state, for the same reason as the logits'."""

LOGIT_STD = 1.0
"""Of every model here, about (a test checks it): single tokens have no deviation of their own."""

VOCAB_SIZE = 256
KINDS = {"moe": None, "moe with a coreset": 3, "dense": None}
kinds = st.sampled_from(list(KINDS))
seeds = st.integers(0, 2**31)
every_kind = pytest.mark.parametrize("kind", KINDS)


def tiny_config(kind: str, *, diffusion: bool = True) -> ModelConfig:
    """Returns a config whose pass takes a millisecond: both layer types, grouped heads."""
    moe = MoeConfig(
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=8,
    )
    return ModelConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=24,
        layer_types=("linear_attention", "full_attention", "linear_attention"),
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        max_position_embeddings=512,
        attention=AttentionConfig(
            num_heads=4, num_kv_heads=2, head_dim=8, rotary_dim=4, rope_theta=100.0
        ),
        delta_net=DeltaNetConfig(
            num_k_heads=2, num_v_heads=4, head_k_dim=6, head_v_dim=5, conv_kernel_size=4
        ),
        mlp=DenseMlpConfig(intermediate_size=20) if kind == "dense" else moe,
        diffusion=DiffusionConfig(block_size=4, mask_token_id=255, expert_coreset_size=KINDS[kind])
        if diffusion
        else None,
    )


@torch.no_grad()
def randomise(model: CloverForCausalLM) -> None:
    """Draws every weight; matrices keep activations near 1, heads remember for 1 to 30 tokens."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("A_log"):
            weight.copy_(noise - 2.0)
        elif name.endswith("logit_scale"):
            weight.copy_(2.0 + noise)
        elif name.endswith("linear_attn.norm.weight"):
            weight.copy_(1.0 + 0.3 * noise)
        elif weight.dim() == 1 or name.endswith(("conv1d.weight", "conv_right_weight")):
            weight.copy_(0.5 * noise)
        elif name.endswith("embed_tokens.weight"):
            weight.copy_(noise)
        else:
            weight.copy_(noise * weight.shape[-1] ** -0.5)
        if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
            align_queries_with_keys(weight, model.config.delta_net.key_dim)


def align_queries_with_keys(weight: Tensor, key_dim: int) -> None:
    """Moves the query rows towards the key rows.

    After one token a head's output is (q^ . k^) v, and a norm follows: with independent rows some
    of those products are nearly zero, and the norm blows up their rounding errors.
    """
    weight[:key_dim] = weight[key_dim : 2 * key_dim] + 0.4 * weight[:key_dim]


@functools.cache
def random_model(kind: str) -> CloverForCausalLM:
    model = CloverForCausalLM(tiny_config(kind)).eval()
    randomise(model)
    return model


@functools.cache
def parent_model(kind: str) -> CloverForCausalLM:
    """Returns the autoregressive parent: the same weights without Clover's four tensors."""
    parent = CloverForCausalLM(tiny_config(kind, diffusion=False)).eval()
    added = ("conv_right_weight", "bd_softmax_")
    state = random_model(kind).state_dict()
    shared = {k: v for k, v in state.items() if not any(part in k for part in added)}
    assert len(state) - len(shared) == 4 * 2  # four tensors in each of two GDN layers
    parent.load_state_dict(shared, strict=True)
    return parent


def random_ids(*shape: int, seed: int) -> Tensor:
    return torch.randint(VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(seed))


def logit_error(found: Tensor, expected: Tensor) -> float:
    """Returns the largest difference, in standard deviations of the model's logits."""
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    return float((found - expected).abs().max() / LOGIT_STD) if found.numel() else 0.0


def assert_same_logits(found: Tensor, expected: Tensor) -> None:
    error = logit_error(found, expected)
    assert error <= LOGIT_TOLERANCE, f"{error:.2e} of the logits' standard deviation"


def gdn_states(cache: Cache) -> list[Tensor]:
    """Returns clones of ring and state of all GDN layers."""
    layers = [layer for layer in cache.layers if isinstance(layer, DeltaNetCache)]
    return [x.clone() for layer in layers for x in (layer.conv_state, layer.recurrent_state)]


def visible_tensors(cache: Cache) -> list[Tensor]:
    """Returns clones of all that is committed: rings, states, and each row's keys and values."""
    kv = [
        x[row, :length].clone()
        for layer in cache.layers
        if isinstance(layer, AttentionCache)
        for x in (layer.keys, layer.values)
        for row, length in enumerate(cache.lengths)
    ]
    return gdn_states(cache) + kv


def assert_same_states(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) > 0
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
        assert (x - y).abs().max() <= STATE_TOLERANCE * y.abs().max().clamp(min=1.0)


@every_kind
def test_the_random_models_logits_have_the_deviation_that_errors_are_measured_in(kind: str) -> None:
    with torch.no_grad():
        assert 0.5 < random_model(kind)(random_ids(2, 50, seed=0)).std() < 2.0


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Packed rows with noised blocks; `documents` holds each row's (start, end) spans."""

    input_ids: Tensor
    document_ids: Tensor
    canvas: Tensor
    block_starts: Tensor
    documents: list[list[tuple[int, int]]]

    def run(self, kind: str, **changes: Tensor) -> tuple[Tensor, Tensor]:
        inputs = {
            name: changes.get(name, getattr(self, name))
            for name in ("input_ids", "document_ids", "canvas", "block_starts")
        }
        with torch.no_grad():
            return random_model(kind).two_stream(*inputs.values())

    def blocks(self) -> Iterator[tuple[int, int, tuple[int, int], int]]:
        """Yields row, slot, the document's span and the block's start, for each used slot."""
        for row, starts in enumerate(self.block_starts.tolist()):
            for slot, start in enumerate(starts):
                if start >= 0:
                    yield row, slot, self.span_of(row, start), start

    def span_of(self, row: int, start: int) -> tuple[int, int]:
        """Returns the document that a block at `start` belongs to: the one there, or the last."""
        spans = self.documents[row]
        return next((span for span in spans if span[0] <= start < span[1]), spans[-1])


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Draws rows of packed documents, padding, and blocks that start anywhere, in any order."""
    block_size = draw(st.integers(1, 8))
    document_lengths = st.lists(st.integers(1, 16), min_size=1, max_size=3)
    rows = draw(st.lists(document_lengths, min_size=1, max_size=2))
    num_tokens = max(map(sum, rows)) + draw(st.integers(0, 3))
    num_slots = draw(st.integers(1, 5))
    starts, documents = [], []
    document_ids = torch.full((len(rows), num_tokens), -1)
    for row, lengths in enumerate(rows):
        used = draw(st.lists(st.integers(0, sum(lengths)), unique=True, max_size=num_slots))
        starts.append(draw(st.permutations(used + [-1] * (num_slots - len(used)))))
        ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
        documents.append(list(zip([0, *ends], ends, strict=False)))
        for index, (start, end) in enumerate(documents[-1]):
            document_ids[row, start:end] = (4, 0, 9)[index]
    seed = draw(seeds)
    return Batch(
        input_ids=random_ids(len(rows), num_tokens, seed=seed),
        document_ids=document_ids,
        canvas=random_ids(len(rows), num_slots, block_size, seed=seed + 1),
        block_starts=torch.tensor(starts),
        documents=documents,
    )


def long_batch() -> Batch:
    """Returns rows of several chunks of the delta rule, with aligned and unaligned blocks."""
    starts = [[0, 8, 16, 63, 64, 65, 100, 130], [64, 128, 90, -1, 127, 150, 3, 64]]
    document_ids = torch.zeros(2, 150, dtype=torch.long)
    document_ids[0, 64:100], document_ids[0, 100:140], document_ids[0, 140:] = 1, 2, -1
    return Batch(
        input_ids=random_ids(2, 150, seed=1),
        document_ids=document_ids,
        canvas=random_ids(2, 8, 8, seed=2),
        block_starts=torch.tensor(starts),
        documents=[[(0, 64), (64, 100), (100, 140)], [(0, 150)]],
    )


# 1. The clean stream is the parent's causal forward.


@torch.no_grad()
def check_clean_stream(kind: str, batch: Batch) -> None:
    clean, _ = batch.run(kind)
    is_token = batch.document_ids >= 0
    plain = random_model(kind)(batch.input_ids, document_ids=batch.document_ids)
    assert_same_logits(clean[is_token], plain[is_token])
    for row, spans in enumerate(batch.documents):
        for start, end in spans:
            alone = parent_model(kind)(batch.input_ids[row : row + 1, start:end])
            assert_same_logits(clean[row : row + 1, start:end], alone)


@given(kind=kinds, batch=batches())
@settings(max_examples=20)
def test_the_clean_stream_is_the_parents_causal_forward(kind: str, batch: Batch) -> None:
    check_clean_stream(kind, batch)


@every_kind
def test_the_clean_stream_of_long_rows_is_the_parents_causal_forward(kind: str) -> None:
    check_clean_stream(kind, long_batch())


@every_kind
def test_two_streams_without_document_ids_read_each_row_as_one_document(kind: str) -> None:
    batch = long_batch()
    with torch.no_grad():
        found = random_model(kind).two_stream(
            batch.input_ids, None, batch.canvas, batch.block_starts
        )
    expected = batch.run(kind, document_ids=torch.full_like(batch.document_ids, 3))
    for x, y in zip(found, expected, strict=True):
        assert_same_logits(x, y)


# 2. A noised block in training gives the logits of a cached preview.


@torch.no_grad()
def check_canvas_stream(kind: str, batch: Batch) -> None:
    model, (_, logits) = random_model(kind), batch.run(kind)
    assert torch.isfinite(logits).all()  # unused slots too: a loss multiplies them by zero
    for row, slot, (document_start, _), start in batch.blocks():
        cache = model.new_cache(1)
        if start > document_start:
            model.commit(cache, batch.input_ids[row : row + 1, document_start:start])
        preview = model.preview(cache, batch.canvas[row : row + 1, slot])
        assert_same_logits(logits[row : row + 1, slot], preview)


@given(kind=kinds, batch=batches())
@settings(max_examples=20)
def test_a_noised_block_gives_the_logits_of_a_cached_preview(kind: str, batch: Batch) -> None:
    check_canvas_stream(kind, batch)


@every_kind
def test_a_noised_block_of_a_long_row_gives_the_logits_of_a_cached_preview(kind: str) -> None:
    check_canvas_stream(kind, long_batch())


# 3. Committing a sequence in pieces gives the logits of the whole.


@every_kind
@torch.no_grad()
def test_a_commit_at_every_split_gives_the_logits_of_the_whole(kind: str) -> None:
    model, input_ids = random_model(kind), random_ids(2, 14, seed=3)
    expected, whole_cache = model(input_ids), model.new_cache(2)
    assert_same_logits(model.commit(whole_cache, input_ids), expected)
    for split in range(1, 14):
        cache = model.new_cache(2)
        first = model.commit(cache, input_ids[:, :split])
        second = model.commit(cache, input_ids[:, split:])
        assert_same_logits(torch.cat([first, second], dim=1), expected)
        assert_same_states(gdn_states(cache), gdn_states(whole_cache))


@given(
    kind=kinds,
    seed=seeds,
    block_size=st.integers(1, 8),
    num_tokens=st.integers(1, 90),
    previews=st.booleans(),
)
@settings(max_examples=20)
@torch.no_grad()
def test_commits_of_any_block_size_give_the_logits_of_the_whole(
    kind: str, seed: int, block_size: int, num_tokens: int, previews: bool
) -> None:
    model, input_ids = random_model(kind), random_ids(2, num_tokens, seed=seed)
    cache, logits = model.new_cache(2), []
    for piece in input_ids.split(block_size, dim=1):
        if previews:  # what decoding does between two commits
            model.preview(cache, random_ids(2, block_size, seed=seed + 1))
        logits.append(model.commit(cache, piece))
    assert_same_logits(torch.cat(logits, dim=1), model(input_ids))
    assert list(cache.lengths) == [num_tokens] * 2


# 4. Nothing leaks.


def assert_unchanged(kind: str, found: Tensor, expected: Tensor) -> None:
    """Bit for bit; where experts regroup tokens, up to the last bits of their sums."""
    if kind == "dense":
        assert torch.equal(found, expected)
    else:
        assert logit_error(found, expected) <= REGROUPED_TOLERANCE


@given(kind=kinds, batch=batches(), data=st.data())
@settings(max_examples=25)
def test_changing_a_noised_block_changes_that_blocks_logits_alone(
    kind: str, batch: Batch, data: st.DataObject
) -> None:
    rows, slots, block_size = batch.canvas.shape
    row, slot, token = (data.draw(st.integers(0, n - 1)) for n in (rows, slots, block_size))
    changed = batch.canvas.clone()
    changed[row, slot, token] = (changed[row, slot, token] + 1) % VOCAB_SIZE
    clean, logits = batch.run(kind)
    clean_after, logits_after = batch.run(kind, canvas=changed)
    assert_unchanged(kind, clean_after, clean)
    others = torch.ones(rows, slots, dtype=torch.bool)
    others[row, slot] = False
    assert_unchanged(kind, logits_after[others], logits[others])
    # Both directions: every token of the block sees the changed one.
    assert (logits_after[row, slot] != logits[row, slot]).any(dim=-1).all()


@given(kind=kinds, batch=batches(), data=st.data())
@settings(max_examples=25)
def test_changing_a_clean_token_changes_later_blocks_of_its_document_alone(
    kind: str, batch: Batch, data: st.DataObject
) -> None:
    row = data.draw(st.integers(0, len(batch.documents) - 1))
    span = data.draw(st.sampled_from(batch.documents[row]))
    token = data.draw(st.integers(span[0], span[1] - 1))
    changed = batch.input_ids.clone()
    changed[row, token] = (changed[row, token] + 1) % VOCAB_SIZE
    clean, logits = batch.run(kind)
    clean_after, logits_after = batch.run(kind, input_ids=changed)

    may_change = torch.zeros_like(batch.document_ids, dtype=torch.bool)
    may_change[row, token : span[1]] = True
    assert_unchanged(kind, clean_after[~may_change], clean[~may_change])
    assert (clean_after[may_change] != clean[may_change]).any(dim=-1).all()

    may_change = torch.zeros_like(batch.block_starts, dtype=torch.bool)
    for block_row, slot, block_span, start in batch.blocks():
        may_change[block_row, slot] = block_row == row and block_span == span and start > token
    assert_unchanged(kind, logits_after[~may_change], logits[~may_change])
    assert (logits_after[may_change] != logits[may_change]).any(dim=-1).all()


@every_kind
def test_gradients_reach_exactly_what_a_logit_may_see(kind: str) -> None:
    # Every token has an id of its own, so a row of the embedding's gradient names one token.
    input_ids = torch.arange(2 * 30).view(2, 30)
    canvas = torch.arange(100, 100 + 2 * 4 * 5).view(2, 4, 5)
    batch = Batch(
        input_ids=input_ids,
        document_ids=torch.tensor([[5] * 11 + [2] * 12 + [-1] * 7, [1] * 30]),
        canvas=canvas,
        block_starts=torch.tensor([[0, 8, 11, 23], [30, -1, 8, 16]]),
        documents=[[(0, 11), (11, 23)], [(0, 30)]],
    )
    model = random_model(kind)
    clean, logits = model.two_stream(input_ids, batch.document_ids, canvas, batch.block_starts)
    direction = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))

    def tokens_seen(logit_rows: Tensor) -> set[int]:
        weight = model.get_parameter("model.embed_tokens.weight")
        (gradient,) = torch.autograd.grad((logit_rows @ direction).sum(), weight, retain_graph=True)
        assert torch.isfinite(gradient).all()
        return set(gradient.any(dim=-1).nonzero().flatten().tolist())

    for row, slot, (document_start, _), start in batch.blocks():
        history = set(input_ids[row, document_start:start].tolist())
        assert tokens_seen(logits[row, slot]) == history | set(canvas[row, slot].tolist())
        for token in range(canvas.shape[2]):
            seen = history | set(canvas[row, slot].tolist())
            assert tokens_seen(logits[row, slot, token]) == seen
    for row, spans in enumerate(batch.documents):
        for start, end in spans:
            for token in range(start, end):
                expected = set(input_ids[row, start : token + 1].tolist())
                assert tokens_seen(clean[row, token]) == expected


# 5. A preview changes nothing.


@given(
    kind=kinds,
    seed=seeds,
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    block_size=st.integers(1, 8),
    capacity=st.sampled_from([0, 5, 64]),
)
@settings(max_examples=25)
@torch.no_grad()
def test_a_preview_leaves_the_cache_bit_for_bit_as_it_was(
    kind: str, seed: int, lengths: list[int], block_size: int, capacity: int
) -> None:
    model = random_model(kind)
    cache = model.new_cache(len(lengths), capacity=capacity)
    if max(lengths):
        model.commit(cache, random_ids(len(lengths), max(lengths), seed=seed), lengths=lengths)
    before, untouched = visible_tensors(cache), cache.fork()
    canvas = random_ids(len(lengths), block_size, seed=seed + 1)
    first = model.preview(cache, canvas)
    model.preview(cache, canvas.flip(1))
    assert torch.equal(model.preview(cache, canvas), first)
    assert list(cache.lengths) == lengths
    after = visible_tensors(cache)
    assert len(before) == len(after) >= 4 + 2 * len(lengths)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    tokens = random_ids(len(lengths), 3, seed=seed + 2)
    assert torch.equal(model.commit(cache, tokens), model.commit(untouched, tokens))


# What decoding does with these operators in one pass.


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Draws per row: tokens committed before, tokens given now, how many of those are accepted."""
    rows = draw(st.integers(1, 3))
    before = draw(st.lists(st.integers(0, 10), min_size=rows, max_size=rows))
    given_now = draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows).filter(any))
    return before, given_now, [draw(st.integers(0, n)) for n in given_now]


def cache_with(model: CloverForCausalLM, lengths: list[int], seed: int) -> Cache:
    cache = model.new_cache(len(lengths))
    if max(lengths):
        ids = random_ids(len(lengths), max(lengths), seed=seed)
        model.commit(cache, ids, lengths=lengths)
    return cache


def assert_same_future(model: CloverForCausalLM, found: Cache, expected: Cache, seed: int) -> None:
    """Checks that two caches give the same logits from here on."""
    assert list(found.lengths) == list(expected.lengths)
    assert_same_states(gdn_states(found), gdn_states(expected))
    rows = len(found.lengths)
    canvas, tokens = random_ids(rows, 4, seed=seed), random_ids(rows, 5, seed=seed + 1)
    assert_same_logits(model.preview(found, canvas), model.preview(expected, canvas))
    assert_same_logits(model.commit(found, tokens), model.commit(expected, tokens))
    assert_same_logits(model.preview(found, canvas), model.preview(expected, canvas))


def assert_same_valid_logits(found: Tensor, expected: Tensor, lengths: list[int]) -> None:
    for row, length in enumerate(lengths):
        assert_same_logits(found[row, :length], expected[row, :length])


@given(kind=kinds, seed=seeds, tokens=histories(), block_size=st.integers(1, 8))
@settings(max_examples=25)
@torch.no_grad()
def test_the_fused_pass_is_a_commit_and_then_a_preview(
    kind: str, seed: int, tokens: tuple[list[int], list[int], list[int]], block_size: int
) -> None:
    model, (before, lengths, _) = random_model(kind), tokens
    rows, fused, apart = len(before), *(cache_with(model, before, seed) for _ in range(2))
    input_ids = random_ids(rows, max(lengths), seed=seed + 1)
    canvas = random_ids(rows, block_size, seed=seed + 2)
    committed, previewed = model.commit_and_preview(fused, input_ids, canvas, lengths=lengths)
    assert_same_valid_logits(committed, model.commit(apart, input_ids, lengths=lengths), lengths)
    assert_same_logits(previewed, model.preview(apart, canvas))
    assert_same_future(model, fused, apart, seed + 3)


@given(kind=kinds, seed=seeds, tokens=histories())
@settings(max_examples=25)
@torch.no_grad()
def test_a_verified_prefix_is_a_commit_of_that_prefix(
    kind: str, seed: int, tokens: tuple[list[int], list[int], list[int]]
) -> None:
    model, (before, lengths, accepted) = random_model(kind), tokens
    verified, plain, whole = (cache_with(model, before, seed) for _ in range(3))
    input_ids = random_ids(len(before), max(lengths), seed=seed + 1)
    unread = visible_tensors(verified)
    logits, transaction = model.verify(verified, input_ids, lengths=lengths)
    assert list(verified.lengths) == before  # nothing is written until the caller says how much
    assert all(torch.equal(x, y) for x, y in zip(visible_tensors(verified), unread, strict=True))
    assert_same_valid_logits(logits, model.commit(whole, input_ids, lengths=lengths), lengths)
    transaction.commit(accepted)
    if any(accepted):
        model.commit(plain, input_ids[:, : max(accepted)], lengths=accepted)
    assert_same_future(model, verified, plain, seed + 2)


@every_kind
@torch.no_grad()
def test_a_long_verified_pass_may_commit_any_prefix(kind: str) -> None:
    model, input_ids = random_model(kind), random_ids(1, 150, seed=4)
    for accepted in (0, 1, 63, 64, 65, 128, 149, 150):
        verified, plain = (cache_with(model, [7], 5) for _ in range(2))
        _, transaction = model.verify(verified, input_ids)
        transaction.commit([accepted])
        if accepted:
            model.commit(plain, input_ids[:, :accepted])
        assert_same_future(model, verified, plain, 6)


@every_kind
@torch.no_grad()
def test_an_abandoned_verification_never_happened(kind: str) -> None:
    model = random_model(kind)
    cache, plain = (cache_with(model, [6, 3], 7) for _ in range(2))
    model.verify(cache, random_ids(2, 9, seed=8))
    assert_same_future(model, cache, plain, 9)


@every_kind
@torch.no_grad()
def test_a_row_of_a_batch_previews_as_it_does_alone(kind: str) -> None:
    model, lengths = random_model(kind), [9, 0, 4]
    cache, canvas = cache_with(model, lengths, 10), random_ids(3, 6, seed=11)
    logits, history = model.preview(cache, canvas), random_ids(3, 9, seed=10)
    for row, length in enumerate(lengths):
        alone = model.new_cache(1)
        if length:
            model.commit(alone, history[row : row + 1, :length])
        assert_same_logits(logits[row : row + 1], model.preview(alone, canvas[row : row + 1]))
