"""Training memory and hours: hand-made sums for the 35B shape, and a real sharded model's slices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from clover.checkpoint.inspect import InspectReport, inspect_checkpoint
from clover.config import ModelConfig
from clover.model.transformer import CloverForCausalLM
from clover.train.memory import render_memory, training_hours, training_memory
from clover.train.optimizer import OptimizerConfig, OptimizerName, Optimizers

SHAPE_35B = Path(__file__).parents[1] / "data" / "clover_35b"
PARAMETERS_35B = 34_660_610_688 + 740_160


@pytest.fixture
def report() -> InspectReport:
    return inspect_checkpoint(SHAPE_35B)


def test_the_35b_model_on_8_gpus_is_the_sum_done_by_hand(report: InspectReport) -> None:
    memory = training_memory(report.config, 8)
    assert memory.master_weights == memory.gradients == PARAMETERS_35B * 4 // 8
    # Embedding and head are AdamW's, 2 x 248,320 x 2,048, and with them some million small ones
    adam = PARAMETERS_35B - memory.num_matrix_parameters
    assert 0 < adam - 2 * 248_320 * 2_048 < 40e6
    assert memory.optimizer_state == (4 * memory.num_matrix_parameters + 8 * adam) // 8
    assert memory.num_root_parameters == 2 * 248_320 * 2_048 + 2_048
    # The largest layer is an attention or a DeltaNet layer; nearly all of it is 256 experts
    experts = 256 * 3 * 512 * 2_048
    assert experts < memory.num_layer_parameters < 1.06 * experts
    assert memory.bytes_per_token == 2 * 40 * 2_048 + 16 * 248_320
    text = "\n".join(render_memory(memory))
    assert "4 B x 34,661,350,848 / 8" in text


def test_adamw_keeps_two_moments_of_everything(report: InspectReport) -> None:
    memory = training_memory(report.config, 8, "adamw")
    assert memory.optimizer_state == PARAMETERS_35B * 8 // 8


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_the_optimizer_state_is_that_of_a_real_optimizer(
    tiny_config: Callable[..., ModelConfig], name: OptimizerName
) -> None:
    model = CloverForCausalLM(tiny_config())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers = Optimizers(model, OptimizerConfig(name=name))
    optimizers.step(1.0)
    state = optimizers.state_tensors()
    counted = sum(tensor.nbytes for key, tensor in state.items() if not key.endswith(":step"))
    assert training_memory(model.config, 1, name).optimizer_state == counted


def test_hours_are_flops_over_speed(report: InspectReport) -> None:
    hours = training_hours(
        report, num_gpus=8, clean_tokens=1e9, canvas_ratio=1.0, peak_flops=1e15, mfu=0.25
    )
    assert hours == pytest.approx(8 * 2_946_429_568 * 2e9 / (8 * 1e15 * 0.25) / 3600)
