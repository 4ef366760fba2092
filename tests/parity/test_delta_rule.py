"""The chunked gated delta rule gives the outputs, states and gradients of the recurrence."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from clover.model.delta_rule import chunk_delta_rule, recurrent_delta_rule
from clover.model.layers import l2_norm

EXACT_MATHS = 1e-9
"""float64, values near 1: what is left is rounding alone, so the formulas are the same."""

FP32_TOLERANCE = 2e-5
"""fp32, values near 1, 200 tokens: some tens of roundings of 1e-7, not correlated."""

STRONG_DECAY_TOLERANCE = {-40.0: 5e-4, -1e4: 1e-2}
"""By the strongest g. A chunk works with differences of a running sum of g, and the decays of the
weak tokens are off by the distance of fp32 numbers there: 3e-5 at 400, 8e-3 at 100,000."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    rows: int
    tokens: int
    key_heads: int
    group: int
    key_dim: int
    value_dim: int


shapes = st.builds(
    Shape,
    rows=st.integers(1, 2),
    tokens=st.integers(1, 40),
    key_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    key_dim=st.integers(1, 6),
    value_dim=st.integers(1, 6),
)
seeds = st.integers(0, 2**31)
chunk_sizes = st.integers(1, 16)


def random_inputs(shape: Shape, seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Returns q, k, v, g, beta and an initial state that require gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    leading, heads = (shape.rows, shape.tokens), shape.key_heads * shape.group
    inputs = [
        l2_norm(normal(*leading, shape.key_heads, shape.key_dim)),
        l2_norm(normal(*leading, shape.key_heads, shape.key_dim)),
        normal(*leading, heads, shape.value_dim),
        -torch.exp(normal(*leading, heads) - 1.0),
        torch.sigmoid(2.0 * normal(*leading, heads)),
        normal(shape.rows, heads, shape.key_dim, shape.value_dim),
    ]
    return [x.to(dtype).requires_grad_() for x in inputs]


def with_gradients(o: Tensor, state: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Returns outputs, state and the gradient of a random function of both to every input."""
    generator = torch.Generator().manual_seed(0)
    loss = o.new_zeros(())
    for x in (o, state):
        loss = loss + (x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum()
    return [o.detach(), state.detach(), *torch.autograd.grad(loss, inputs)]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Compares outputs, state and gradients; each in units of its own largest entry, if above 1."""
    names = ["o", "state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state"]
    for name, x, y in zip(names, found, expected, strict=False):
        assert x.shape == y.shape, name
        assert torch.isfinite(x).all(), name
        error = (x - y).abs().max() / y.abs().max().clamp(min=1.0)
        assert error <= tolerance, f"{name}: {error:.2e}"


@settings(max_examples=20)
@given(shape=shapes, seed=seeds)
def test_the_recurrence_is_equation_10_of_the_paper(shape: Shape, seed: int) -> None:
    # S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T and o_t = S_t^T q_t / sqrt(K)
    q, k, v, g, beta, initial_state = (x.detach() for x in random_inputs(shape, seed))
    o, final_state = recurrent_delta_rule(q, k, v, g, beta, initial_state)
    identity = torch.eye(shape.key_dim, dtype=torch.float64)
    for row in range(shape.rows):
        for head in range(v.shape[2]):
            state, key_head = initial_state[row, head], head // shape.group
            for t in range(shape.tokens):
                key, b = k[row, t, key_head], beta[row, t, head]
                state = g[row, t, head].exp() * (identity - b * torch.outer(key, key)) @ state
                state = state + b * torch.outer(key, v[row, t, head])
                expected = state.T @ q[row, t, key_head] / shape.key_dim**0.5
                assert (o[row, t, head] - expected).abs().max() <= EXACT_MATHS
            assert (final_state[row, head] - state).abs().max() <= EXACT_MATHS


@settings(max_examples=60)
@given(shape=shapes, seed=seeds, chunk_size=chunk_sizes, from_zero=st.booleans())
def test_chunks_give_the_recurrence_and_its_gradients(
    shape: Shape, seed: int, chunk_size: int, from_zero: bool
) -> None:
    inputs = random_inputs(shape, seed)
    used = inputs[:5] if from_zero else inputs
    o, trace = chunk_delta_rule(*used, chunk_size=chunk_size)
    found = with_gradients(o, trace.final_state, used)
    expected = with_gradients(*recurrent_delta_rule(*used), used)
    assert_close(found, expected, EXACT_MATHS)


@pytest.mark.parametrize("seed", range(3))
def test_chunks_of_the_default_length_give_the_recurrence_in_fp32(seed: int) -> None:
    shape = Shape(rows=2, tokens=200, key_heads=2, group=2, key_dim=16, value_dim=12)
    inputs = random_inputs(shape, seed, torch.float32)
    o, trace = chunk_delta_rule(*inputs)
    assert o.dtype == trace.final_state.dtype == torch.float32
    expected = with_gradients(*recurrent_delta_rule(*inputs), inputs)
    assert_close(with_gradients(o, trace.final_state, inputs), expected, FP32_TOLERANCE)


def test_bf16_inputs_are_computed_in_fp32() -> None:
    shape = Shape(rows=2, tokens=90, key_heads=1, group=2, key_dim=8, value_dim=8)
    inputs = [x.detach() for x in random_inputs(shape, 0, torch.bfloat16)]
    o, trace = chunk_delta_rule(*inputs)
    expected = chunk_delta_rule(*(x.float() for x in inputs))
    assert torch.equal(o, expected[0])
    assert torch.equal(trace.final_state, expected[1].final_state)


@pytest.mark.parametrize("g_floor", STRONG_DECAY_TOLERANCE)
def test_strong_decay_gives_the_recurrence_and_no_nan(g_floor: float) -> None:
    shape = Shape(rows=2, tokens=150, key_heads=2, group=1, key_dim=8, value_dim=8)
    q, k, v, g, beta, initial_state = (x.detach() for x in random_inputs(shape, 1, torch.float32))
    # Whole rows of strong decay, and single strong tokens between weak ones.
    g = g.where(torch.arange(150)[:, None] % 7 != 3, g_floor)
    g[1] = g_floor
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta, initial_state)]
    o, trace = chunk_delta_rule(*inputs)
    found = with_gradients(o, trace.final_state, inputs)
    expected = with_gradients(*recurrent_delta_rule(*inputs), inputs)
    assert_close(found, expected, STRONG_DECAY_TOLERANCE[g_floor])


@pytest.mark.parametrize("beta_value", [0.0, 1.0])
@pytest.mark.parametrize("g_value", [0.0, -0.01])
def test_writing_nothing_and_writing_all_give_the_recurrence(
    beta_value: float, g_value: float
) -> None:
    shape = Shape(rows=1, tokens=130, key_heads=1, group=2, key_dim=8, value_dim=4)
    q, k, v, g, beta, initial_state = (x.detach() for x in random_inputs(shape, 2, torch.float32))
    inputs = [q, k, v, torch.full_like(g, g_value), torch.full_like(beta, beta_value)]
    inputs = [x.requires_grad_() for x in (*inputs, initial_state)]
    o, trace = chunk_delta_rule(*inputs)
    found = with_gradients(o, trace.final_state, inputs)
    expected = with_gradients(*recurrent_delta_rule(*inputs), inputs)
    assert_close(found, expected, 10 * FP32_TOLERANCE)  # nothing decays: errors add up


def test_equal_keys_written_in_full_stay_accurate() -> None:
    # Powers of the chunk's triangular system grow like binomials here; substitution must not.
    shape = Shape(rows=1, tokens=128, key_heads=1, group=1, key_dim=8, value_dim=8)
    q, k, v, g, beta, _ = (x.detach() for x in random_inputs(shape, 3, torch.float32))
    k = k[:, :1].expand_as(k).contiguous()
    inputs = q, k, v, torch.zeros_like(g), torch.ones_like(beta)
    o, trace = chunk_delta_rule(*inputs)
    assert_close([o, trace.final_state], [*recurrent_delta_rule(*inputs)], 10 * FP32_TOLERANCE)


@settings(max_examples=25)
@given(shape=shapes, seed=seeds, chunk_size=chunk_sizes)
def test_the_trace_gives_the_recurrent_state_after_any_prefix(
    shape: Shape, seed: int, chunk_size: int
) -> None:
    q, k, v, g, beta, initial_state = (x.detach() for x in random_inputs(shape, seed))
    _, trace = chunk_delta_rule(q, k, v, g, beta, initial_state, chunk_size=chunk_size)
    counts = torch.arange(shape.tokens + 1).expand(shape.rows, -1)
    states = trace.state_at(counts)  # [B, M, H, K, V]
    assert states.shape == (shape.rows, shape.tokens + 1, *initial_state.shape[1:])
    for count in range(shape.tokens + 1):
        prefix = [x[:, :count] for x in (q, k, v, g, beta)]
        expected = recurrent_delta_rule(*prefix, initial_state)[1]
        assert (states[:, count] - expected).abs().max() <= EXACT_MATHS
    assert torch.allclose(states[:, -1], trace.final_state, atol=EXACT_MATHS)


def test_rows_may_ask_the_trace_for_different_prefixes() -> None:
    shape = Shape(rows=3, tokens=20, key_heads=1, group=2, key_dim=3, value_dim=5)
    q, k, v, g, beta, state = (x.detach() for x in random_inputs(shape, 4))
    _, trace = chunk_delta_rule(q, k, v, g, beta, state, chunk_size=8)
    counts = [[0, 20], [8, 3], [17, 16]]
    states = trace.state_at(torch.tensor(counts))
    for row, wanted in enumerate(counts):
        for point, count in enumerate(wanted):
            prefix = [x[row : row + 1, :count] for x in (q, k, v, g, beta)]
            expected = recurrent_delta_rule(*prefix, state[row : row + 1])[1]
            assert (states[row, point] - expected[0]).abs().max() <= EXACT_MATHS


@settings(max_examples=20)
@given(shape=shapes, seed=seeds, chunk_size=chunk_sizes, data=st.data())
def test_the_state_carries_a_sequence_over_any_split(
    shape: Shape, seed: int, chunk_size: int, data: st.DataObject
) -> None:
    split = data.draw(st.integers(1, shape.tokens))
    inputs = [x.detach() for x in random_inputs(shape, seed)]
    expected = recurrent_delta_rule(*inputs)
    o, trace = chunk_delta_rule(
        *(x[:, :split] for x in inputs[:5]), inputs[5], chunk_size=chunk_size
    )
    outputs, state = [o], trace.final_state
    if split < shape.tokens:
        o, trace = chunk_delta_rule(*(x[:, split:] for x in inputs[:5]), state, chunk_size=3)
        outputs, state = [*outputs, o], trace.final_state
    assert_close([torch.cat(outputs, dim=1), state], [*expected], EXACT_MATHS)


def test_a_slot_with_beta_0_and_g_0_reads_the_state_and_writes_nothing() -> None:
    # What two-stream training stands on: noised queries among clean tokens.
    shape = Shape(rows=2, tokens=30, key_heads=2, group=2, key_dim=4, value_dim=3)
    q, k, v, g, beta, state = (x.detach() for x in random_inputs(shape, 5))
    silent = torch.zeros(30, dtype=torch.bool)
    silent[[0, 1, 2, 9, 10, 29]] = True
    g, beta = (x.masked_fill(silent[None, :, None], 0.0) for x in (g, beta))
    o, trace = chunk_delta_rule(q, k, v, g, beta, state, chunk_size=8)
    alone, final_state = recurrent_delta_rule(*(x[:, ~silent] for x in (q, k, v, g, beta)), state)
    assert (o[:, ~silent] - alone).abs().max() <= EXACT_MATHS
    assert (trace.final_state - final_state).abs().max() <= EXACT_MATHS
    for t in silent.nonzero().flatten().tolist():
        before = trace.state_at(torch.full((2, 1), t))[:, 0]
        query = q[:, t].repeat_interleave(2, dim=1)
        read = torch.einsum("bhkv,bhk->bhv", before, query) * 4**-0.5
        assert (o[:, t] - read).abs().max() <= EXACT_MATHS


document_lengths = st.lists(st.integers(1, 14), min_size=1, max_size=4)


@settings(max_examples=25)
@given(lengths=document_lengths, seed=seeds, chunk_size=chunk_sizes, padding=st.integers(0, 3))
@example(lengths=[4, 4, 4], seed=0, chunk_size=4, padding=0)
@example(lengths=[1, 1, 1, 1], seed=0, chunk_size=16, padding=1)
def test_packed_documents_are_each_document_alone(
    lengths: list[int], seed: int, chunk_size: int, padding: int
) -> None:
    tokens = sum(lengths) + padding
    shape = Shape(rows=1, tokens=tokens, key_heads=1, group=2, key_dim=3, value_dim=4)
    inputs = random_inputs(shape, seed)[:5]
    documents = packed_ids(lengths, padding)
    o, trace = chunk_delta_rule(*inputs, document_ids=documents, chunk_size=chunk_size)
    weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(0), dtype=o.dtype)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        inside = slice(start, start + length)
        pieces = [x[:, inside].detach().requires_grad_() for x in inputs]
        alone, _ = recurrent_delta_rule(*pieces)
        assert (o[:, inside] - alone).abs().max() <= EXACT_MATHS

        loss = (o[:, inside] * weights[:, inside]).sum()
        gradients = torch.autograd.grad(loss, inputs, retain_graph=True)
        expected = torch.autograd.grad((alone * weights[:, inside]).sum(), pieces)
        for found, wanted in zip(gradients, expected, strict=True):
            assert (found[:, inside] - wanted).abs().max() <= EXACT_MATHS * 10
            outside = torch.cat([found[:, :start], found[:, start + length :]], dim=1)
            assert torch.count_nonzero(outside) == 0  # exactly: not one bit leaks

        counts = torch.arange(start, start + length + 1)[None]
        states = trace.state_at(counts, torch.full_like(counts, index * 3 % 7))
        for count in range(length + 1):
            expected_state = recurrent_delta_rule(*(x[:, :count] for x in pieces))[1]
            assert (states[:, count] - expected_state).abs().max() <= EXACT_MATHS


def packed_ids(lengths: list[int], padding: int) -> Tensor:
    """Returns ids that are neither consecutive nor in order, and negative ones for padding."""
    ids = [index * 3 % 7 for index, length in enumerate(lengths) for _ in range(length)]
    return torch.tensor([ids + [-1] * padding])
