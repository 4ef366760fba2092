"""Calibration: the preview comes nearer to the commit, and nothing else moves."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from clover.config import ModelConfig
from clover.model.delta_net import DeltaNet
from clover.model.transformer import CloverForCausalLM
from clover.train.calibrate import FITTED, LayerFit, calibrate
from clover.train.data import Document
from clover.train.packing import Batch, pack_rows

ConfigFactory = Callable[..., ModelConfig]

BLOCK_SIZES = (2, 4, 8)
ERROR_TOLERANCE = 1e-4  # fp32: one pass over the sequence against a pass for each block


@pytest.fixture
def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    documents = [
        Document(
            prompt_ids=tuple(torch.randint(2, 60, (3 + number,), generator=generator).tolist()),
            response_ids=tuple(torch.randint(2, 60, (11,), generator=generator).tolist()),
        )
        for number in range(4)
    ]
    return pack_rows([documents[:2], documents[2:]], row_length=40, pad_token_id=0)


def _model(config: ModelConfig) -> CloverForCausalLM:
    model = CloverForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    model.init_weights(generator)
    for weight in model.parameters():  # large enough for layers to differ from the identity
        if weight.dim() > 1:
            weight.data = weight.data.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
    for name, weight in model.named_parameters():
        if name.endswith("conv_right_weight"):
            weight.data.zero_()
    return model


def _commit(layer: DeltaNet, run: Callable[[], object]) -> tuple[Tensor, Tensor]:
    """Returns the layer's input and output, each [T, D], in a pass."""
    seen: list[tuple[Tensor, Tensor]] = []
    hook = layer.register_forward_hook(
        lambda _, args, output: seen.append((args[0][0], output[0][0]))
    )
    run()
    hook.remove()
    return seen.pop()


def _preview(layer: DeltaNet, hidden_states: Tensor, run: Callable[[], object]) -> Tensor:
    """Returns the layer's output [n, D] in a pass where it reads `hidden_states` [n, D]."""
    hook = layer.register_forward_pre_hook(lambda _, args: (hidden_states[None], *args[1:]))
    output = _commit(layer, run)[1]
    hook.remove()
    return output


@torch.no_grad()
def _slow_error(model: CloverForCausalLM, batch: Batch, number: int) -> float:
    """Returns a layer's error from a cache and a preview for every block, documents apart."""
    layer = model.model.layers[number].linear_attn
    errors = []
    for size in BLOCK_SIZES:
        error = total = 0.0
        for span in batch.spans:
            tokens = batch.input_ids[span.row, span.start : span.end][None]
            hidden_states, wanted = _commit(layer, lambda tokens=tokens: model(tokens))
            for start in range(span.response_start - span.start, tokens.shape[1], size):
                index = torch.arange(start, start + size).clamp(max=tokens.shape[1] - 1)
                cache = model.new_cache(1)
                model.prefill(cache, tokens[:, :start])
                canvas = tokens[:, index]
                run = functools.partial(model.preview, cache, canvas)
                block = wanted[start : start + size]
                found = _preview(layer, hidden_states[index], run)[: len(block)]
                error += float((found - block).square().sum())
                total += float(block.square().sum())
        errors.append(error / total)
    return sum(errors) / len(errors)


def test_errors_are_those_of_cached_previews_against_the_causal_layer(
    tiny_config: ConfigFactory, batch: Batch
) -> None:
    model = _model(tiny_config())
    before = [_slow_error(model, batch, number) for number in (0, 1)]
    fits = calibrate(model, batch, block_sizes=BLOCK_SIZES, steps=3)
    assert [fit.layer for fit in fits] == [0, 1]
    for fit, expected in zip(fits, before, strict=True):
        assert fit.error_before == pytest.approx(expected, rel=ERROR_TOLERANCE)
        after = _slow_error(model, batch, fit.layer)
        assert fit.error_after == pytest.approx(after, rel=ERROR_TOLERANCE)


def test_the_error_falls_and_the_causal_path_stays_bit_for_bit(
    tiny_config: ConfigFactory, batch: Batch
) -> None:
    model = _model(tiny_config())
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    with torch.no_grad():
        logits = model(batch.input_ids, document_ids=batch.document_ids)
    told: list[LayerFit] = []
    fits = calibrate(model, batch, block_sizes=BLOCK_SIZES, on_fit=told.append)
    assert told == fits
    assert all(fit.error_after < 0.9 * fit.error_before for fit in fits)
    with torch.no_grad():
        assert torch.equal(logits, model(batch.input_ids, document_ids=batch.document_ids))
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name]) != name.endswith(FITTED), name
        assert weight.grad is None


def test_calibration_has_no_randomness(tiny_config: ConfigFactory, batch: Batch) -> None:
    fits = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        fits.append(calibrate(_model(tiny_config()), batch, block_sizes=BLOCK_SIZES, steps=2))
    assert fits[0] == fits[1]
