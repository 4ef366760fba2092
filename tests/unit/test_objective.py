"""Losses against loops that follow their definitions token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from clover.diffusion.noise import NoisedBlocks
from clover.diffusion.objective import (
    ObjectiveConfig,
    align_canvas_logits,
    ar_loss,
    ar_weights,
    confidence_loss,
    diffusion_weights,
    distillation_loss,
    load_balancing_loss,
    on_policy_loss,
    two_stream_loss,
    weighted_cross_entropy,
    weighted_divergence,
)
from clover.errors import ConfigError

B, T, N, BLOCK, V = 2, 12, 3, 4, 7
TOLERANCE = 1e-5  # fp32 sums in another order
STARTS = torch.tensor([[2, 6, -1], [1, 5, 9]])


@pytest.fixture
def clean(seeded: torch.Generator) -> Tensor:
    return torch.randn(B, T, V, generator=seeded)


@pytest.fixture
def canvas(seeded: torch.Generator) -> Tensor:
    return torch.randn(B, N, BLOCK, V, generator=seeded)


@pytest.fixture
def targets(seeded: torch.Generator) -> Tensor:
    return torch.randint(V, (B, N, BLOCK), generator=seeded)


@pytest.fixture
def masked() -> Tensor:
    masked = torch.zeros(B, N, BLOCK, dtype=torch.bool)
    masked[0, 0, 0] = masked[0, 1, 2:] = masked[1, 0, 3] = masked[1, 2, :] = True
    return masked


def _noised(
    masked: Tensor, *, edited: Tensor | None = None, level: Tensor | None = None
) -> NoisedBlocks:
    return NoisedBlocks(
        canvas=masked.long(),
        masked=masked,
        edited=torch.zeros_like(masked) if edited is None else edited,
        level=torch.ones(B, N) if level is None else level,
    )


def _cross_entropy(logits: Tensor, target: int) -> float:
    values = [math.exp(float(x)) for x in logits]
    return -math.log(values[target] / sum(values))


def test_weighted_cross_entropy_is_the_weighted_mean_over_the_whole_batch(
    canvas: Tensor, targets: Tensor, seeded: torch.Generator
) -> None:
    weights = torch.rand(B, N, BLOCK, generator=seeded)
    weights[0] = 0.0
    expected = total = 0.0
    for place in torch.cartesian_prod(torch.arange(B), torch.arange(N), torch.arange(BLOCK)):
        index = tuple(place.tolist())
        weight = float(weights[index])
        expected += weight * _cross_entropy(canvas[index], int(targets[index]))
        total += weight
    found = weighted_cross_entropy(canvas, targets, weights)
    assert abs(float(found) - expected / total) < TOLERANCE


def test_weighted_cross_entropy_of_nothing_is_zero_and_has_a_gradient(
    canvas: Tensor, targets: Tensor
) -> None:
    canvas.requires_grad_()
    loss = weighted_cross_entropy(canvas, targets, torch.zeros(B, N, BLOCK))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert canvas.grad is not None and not canvas.grad.any()


def test_ar_weights_never_cross_documents_and_favour_replies() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, -1, -1]])
    is_response = torch.tensor([[False, False, True, False, True, True, False, False]])
    weights = ar_weights(documents, is_response, 0.25)
    # Position t is weighted by what it predicts: token t + 1
    assert weights.tolist() == [[0.25, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]]


def test_ar_loss_predicts_the_next_token(clean: Tensor, seeded: torch.Generator) -> None:
    input_ids = torch.randint(V, (B, T), generator=seeded)
    weights = torch.rand(B, T, generator=seeded)
    weights[:, -1] = 0.0
    expected = total = 0.0
    for row in range(B):
        for t in range(T - 1):
            weight = float(weights[row, t])
            expected += weight * _cross_entropy(clean[row, t], int(input_ids[row, t + 1]))
            total += weight
    assert abs(float(ar_loss(clean, input_ids, weights)) - expected / total) < TOLERANCE


def test_shifted_logits_are_read_one_position_earlier(clean: Tensor, canvas: Tensor) -> None:
    aligned = align_canvas_logits(clean, canvas, STARTS, shift_logits=True)
    for row in range(B):
        for block in range(N):
            if STARTS[row, block] < 0:
                continue
            before = clean[row, STARTS[row, block] - 1]
            assert torch.equal(aligned[row, block, 0], before)
            for position in range(1, BLOCK):
                expected = canvas[row, block, position - 1]
                assert torch.equal(aligned[row, block, position], expected)


def test_unshifted_logits_are_read_in_place(clean: Tensor, canvas: Tensor) -> None:
    assert align_canvas_logits(clean, canvas, STARTS, shift_logits=False) is canvas


def test_confidence_loss_is_the_entropy_of_right_predictions_alone(
    canvas: Tensor, targets: Tensor, masked: Tensor
) -> None:
    targets[1, 2] = canvas[1, 2].argmax(dim=-1)  # four right ones
    entropies = []
    for index in map(tuple, masked.nonzero().tolist()):
        if int(canvas[index].argmax()) == int(targets[index]):
            shares = canvas[index].softmax(dim=-1).tolist()
            entropies.append(-sum(p * math.log(p) for p in shares))
    assert 4 <= len(entropies) < int(masked.sum())
    found = float(confidence_loss(canvas, targets, masked))
    assert abs(found - sum(entropies) / len(entropies)) < TOLERANCE


def test_confidence_loss_is_zero_when_nothing_is_right(canvas: Tensor, masked: Tensor) -> None:
    wrong = (canvas.argmax(dim=-1) + 1) % V
    assert float(confidence_loss(canvas, wrong, masked)) == 0.0


def test_distillation_compares_with_the_clean_token_before_and_spares_the_teacher(
    clean: Tensor, canvas: Tensor, masked: Tensor
) -> None:
    clean.requires_grad_()
    canvas.requires_grad_()
    loss = distillation_loss(canvas, clean, STARTS, masked)
    divergences = []
    for row, block, position in masked.nonzero().tolist():
        teacher = clean[row, int(STARTS[row, block]) + position - 1].softmax(-1)
        student = canvas[row, block, position].softmax(-1)
        divergences.append(float((teacher * (teacher / student).log()).sum().detach()))
    assert abs(float(loss.detach()) - sum(divergences) / len(divergences)) < TOLERANCE
    loss.backward()
    assert clean.grad is None
    assert canvas.grad is not None and bool(canvas.grad[masked].any())
    assert not canvas.grad[~masked].any()


def test_divergence_from_a_teacher_is_the_weighted_mean_over_the_whole_batch(
    clean: Tensor, seeded: torch.Generator
) -> None:
    teacher = torch.randn(B, T, V, generator=seeded, requires_grad=True)
    weights = torch.rand(B, T, generator=seeded)
    weights[0] = 0.0
    clean.requires_grad_()
    expected = 0.0
    for t in range(T):
        p, q = teacher[1, t].softmax(-1), clean[1, t].softmax(-1)
        expected += float(weights[1, t] * (p * (p / q).log()).sum().detach())
    found = weighted_divergence(clean, teacher, weights)
    assert abs(float(found.detach()) - expected / float(weights.sum())) < TOLERANCE
    found.backward()
    assert teacher.grad is None
    assert clean.grad is not None and clean.grad[1].any() and not clean.grad[0].any()
    assert float(weighted_divergence(clean, teacher, torch.zeros(B, T)).detach()) == 0.0


def test_weights_by_level_are_its_inverse_where_masked(masked: Tensor) -> None:
    level = torch.tensor([[0.5, 0.25, 1.0], [0.1, 1.0, 0.8]])
    noised = _noised(masked, level=level)
    is_token = torch.ones_like(masked)
    plain = diffusion_weights(noised, is_token, ObjectiveConfig())
    by_level = diffusion_weights(noised, is_token, ObjectiveConfig(weight_by_level=True))
    assert torch.equal(plain, masked.float())
    for row, block, position in masked.nonzero().tolist():
        expected = 1.0 / float(level[row, block])
        assert abs(float(by_level[row, block, position]) - expected) < TOLERANCE
    assert not by_level[~masked].any()


def test_positions_right_of_the_end_weigh_what_the_config_says(masked: Tensor) -> None:
    noised = _noised(masked)
    is_token = torch.ones_like(masked)
    is_token[..., -1] = False
    weights = diffusion_weights(noised, is_token, ObjectiveConfig(end_weight=0.25))
    assert torch.equal(weights[..., :-1], masked[..., :-1].float())
    assert bool(masked[..., -1].any())
    assert torch.equal(weights[..., -1], 0.25 * masked[..., -1])


def test_weights_fall_by_e_over_the_positions_of_the_config(masked: Tensor) -> None:
    noised, is_token = _noised(masked), torch.ones_like(masked)
    plain = diffusion_weights(noised, is_token, ObjectiveConfig())
    falling = diffusion_weights(noised, is_token, ObjectiveConfig(position_decay=2.0))
    for position in range(BLOCK):
        expected = plain[..., position] * math.exp(-position / 2.0)
        assert (falling[..., position] - expected).abs().max() < TOLERANCE
    assert masked[..., 1:].any()


def test_load_balance_is_counted_choice_by_choice(seeded: torch.Generator) -> None:
    layers = [torch.randn(B * T, 5, generator=seeded, requires_grad=True) for _ in range(3)]
    is_valid = torch.rand(B, T, generator=seeded) < 0.7
    expected = torch.zeros(())
    for logits in layers:
        rows = [logits[index] for index in is_valid.flatten().nonzero()[:, 0].tolist()]
        choices = [0] * 5
        for row in rows:
            for expert in row.sort(descending=True).indices[:2].tolist():
                choices[expert] += 1
        for expert in range(5):
            share = choices[expert] / (2 * len(rows))
            mean = sum((row.softmax(-1)[expert] for row in rows), torch.zeros(())) / len(rows)
            expected = expected + 5 * share * mean / 3
    found = load_balancing_loss(layers, is_valid, num_experts_per_tok=2)
    assert abs(float((found - expected).detach())) < TOLERANCE
    wanted = torch.autograd.grad(expected, layers)
    for gradient, reference in zip(torch.autograd.grad(found, layers), wanted, strict=True):
        assert (gradient - reference).abs().max() < TOLERANCE
        valid = is_valid.flatten()
        assert not gradient[~valid].any() and gradient[valid].any()


def test_load_balance_is_one_when_even_and_the_number_of_experts_when_one_has_all() -> None:
    is_valid = torch.ones(1, 4, dtype=torch.bool)
    even = 50.0 * torch.eye(4)
    assert abs(float(load_balancing_loss([even], is_valid, num_experts_per_tok=1)) - 1.0) < 1e-6
    lone = 50.0 * torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(4, 4)
    assert abs(float(load_balancing_loss([lone], is_valid, num_experts_per_tok=1)) - 4.0) < 1e-6


def test_wrong_tokens_are_repaired_and_right_ones_kept_by_weights_of_their_own(
    masked: Tensor,
) -> None:
    edited = ~masked & (torch.arange(BLOCK) % 2 == 0)
    is_token = torch.ones_like(masked)
    is_token[1, 2, 2:] = False
    noised = _noised(masked, edited=edited, level=torch.full((B, N), 0.5))
    config = ObjectiveConfig(edit_weight=0.7, kept_weight=0.2, end_weight=0.1, weight_by_level=True)
    weights = diffusion_weights(noised, is_token, config)
    for place in torch.cartesian_prod(torch.arange(B), torch.arange(N), torch.arange(BLOCK)):
        index = tuple(place.tolist())
        expected = 2.0 if masked[index] else 0.7 if edited[index] else 0.2
        if not is_token[index]:
            expected = 0.1 * (2.0 if masked[index] else 0.7 if edited[index] else 0.0)
        assert abs(float(weights[index]) - expected) < TOLERANCE
    assert edited.any() and (~masked & ~edited & is_token).any()
    without = diffusion_weights(noised, is_token, ObjectiveConfig(edit_weight=0.0))
    assert torch.equal(without > 0, masked)


def test_a_wrong_token_is_asked_for_its_target_at_its_own_position(
    clean: Tensor, canvas: Tensor, targets: Tensor
) -> None:
    edited = torch.zeros(B, N, BLOCK, dtype=torch.bool)
    edited[1, 1, 2] = edited[0, 0, 0] = True
    losses = two_stream_loss(
        clean,
        canvas,
        input_ids=torch.zeros(B, T, dtype=torch.long),
        clean_weights=torch.ones(B, T),
        block_starts=STARTS,
        targets=targets,
        is_token=torch.ones_like(edited),
        noised=_noised(torch.zeros_like(edited), edited=edited),
        config=ObjectiveConfig(edit_weight=0.5),
    )
    # Shifted: a position is read one row earlier, a block's first at the clean token before it
    first = _cross_entropy(clean[0, int(STARTS[0, 0]) - 1], int(targets[0, 0, 0]))
    inner = _cross_entropy(canvas[1, 1, 1], int(targets[1, 1, 2]))
    assert losses.diffusion is not None
    assert abs(float(losses.diffusion) - (first + inner) / 2) < TOLERANCE


@pytest.mark.parametrize("shift_logits", [True, False])
def test_two_stream_loss_is_the_weighted_sum_of_its_parts(
    clean: Tensor, canvas: Tensor, targets: Tensor, masked: Tensor, *, shift_logits: bool
) -> None:
    input_ids = torch.arange(B * T).view(B, T) % V
    clean_weights = torch.ones(B, T)
    noised = _noised(masked, level=torch.full((B, N), 0.5))
    losses = two_stream_loss(
        clean,
        canvas,
        input_ids=input_ids,
        clean_weights=clean_weights,
        block_starts=STARTS,
        targets=targets,
        is_token=torch.ones_like(masked),
        noised=noised,
        config=ObjectiveConfig(
            shift_logits=shift_logits,
            ar_weight=0.5,
            confidence_weight=0.1,
            distillation_weight=0.2,
        ),
    )
    assert losses.diffusion is not None
    assert losses.confidence is not None and losses.distillation is not None
    parts = [losses.diffusion, 0.5 * losses.ar, 0.1 * losses.confidence, 0.2 * losses.distillation]
    assert abs(float(losses.total - sum(parts))) < TOLERANCE
    aligned = align_canvas_logits(clean, canvas, STARTS, shift_logits=shift_logits)
    expected = [
        _cross_entropy(aligned[index], int(targets[index]))
        for index in map(tuple, masked.nonzero().tolist())
    ]
    assert abs(float(losses.diffusion) - sum(expected) / len(expected)) < TOLERANCE


@pytest.mark.parametrize("teacher", ["self", "parent"])
def test_the_teacher_of_the_canvas_is_the_one_that_the_config_names(
    clean: Tensor, canvas: Tensor, targets: Tensor, masked: Tensor, teacher: Any
) -> None:
    parent = clean.flip(-1)
    config = ObjectiveConfig(
        ar_weight=0.5,
        distillation_weight=0.2,
        clean_distillation_weight=0.3 if teacher == "parent" else 0.0,
        teacher=teacher,
    )
    clean_weights = torch.arange(B * T).view(B, T) % 3.0
    shared: dict[str, Tensor] = {"clean_weights": clean_weights, "block_starts": STARTS}
    labelled = two_stream_loss(
        clean,
        canvas,
        input_ids=torch.zeros(B, T, dtype=torch.long),
        targets=targets,
        is_token=torch.ones_like(masked),
        noised=_noised(masked),
        config=config,
        parent_logits=parent,
        **shared,
    )
    own = on_policy_loss(
        clean, canvas, masked=masked, config=config, parent_logits=parent, **shared
    )
    aligned = align_canvas_logits(clean, canvas, STARTS, shift_logits=True)
    rows = parent if teacher == "parent" else clean
    expected = 0.2 * distillation_loss(aligned, rows, STARTS, masked)
    if teacher == "parent":
        expected = expected + 0.3 * weighted_divergence(clean, parent, clean_weights)
    assert labelled.ar is not None and labelled.diffusion is not None
    assert own.ar is None and own.diffusion is None
    assert abs(float(own.total - expected)) < TOLERANCE
    labels = labelled.diffusion + 0.5 * labelled.ar
    assert abs(float(labelled.total - labels - expected)) < TOLERANCE


def test_parts_of_weight_zero_are_not_computed(
    clean: Tensor, canvas: Tensor, targets: Tensor, masked: Tensor
) -> None:
    losses = two_stream_loss(
        clean,
        canvas,
        input_ids=torch.zeros(B, T, dtype=torch.long),
        clean_weights=torch.ones(B, T),
        block_starts=STARTS,
        targets=targets,
        is_token=torch.ones_like(masked),
        noised=_noised(masked),
        config=ObjectiveConfig(),
    )
    assert losses.confidence is None and losses.distillation is None


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ar_weight must be at least 0, found -1\.0"):
        ObjectiveConfig(ar_weight=-1.0)


def test_a_negative_position_decay_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"position_decay must be at least 0, found -1\.0"):
        ObjectiveConfig(position_decay=-1.0)
