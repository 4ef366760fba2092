"""Counts are exact: the published ones for the 35B shape, and those of the model for any other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from clover.checkpoint.files import SINGLE_FILE
from clover.checkpoint.inspect import InspectReport, inspect_checkpoint, render_report
from clover.checkpoint.load import save_model
from clover.checkpoint.names import Part
from clover.config import ModelConfig
from clover.errors import CheckpointError, ConfigError
from clover.model.cache import DeltaNetCache
from clover.model.transformer import CloverForCausalLM

TinyConfig = Callable[..., ModelConfig]

CLOVER_35B: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "clover_35b" / "config.json").read_text()
)


def inspect_config(folder: Path, **changes: Any) -> InspectReport:
    (folder / "config.json").write_text(json.dumps(CLOVER_35B | changes))
    return inspect_checkpoint(folder)


def test_the_35b_shape_has_its_published_counts_from_the_configuration_alone(
    tmp_path: Path,
) -> None:
    report = inspect_config(tmp_path)

    assert not report.has_weights
    assert report.architecture == "CloverMoeModelLM"
    assert report.num_parameters == 34_660_610_688
    assert report.num_added_parameters == 740_160
    assert report.num_active_parameters == 3_454_988_928
    assert report.num_active_without_lookup == 2_946_429_568
    assert report.num_bytes == 2 * (34_660_610_688 + 740_160)


def test_the_35b_shape_has_its_known_cache_sizes(tmp_path: Path) -> None:
    report = inspect_config(tmp_path)

    assert report.kv_bytes_per_token == 20 * 1024
    assert report.recurrent_state_bytes == 60 * 2**20
    assert report.conv_state_bytes == 30 * 8192 * 3 * 2
    assert report.cache_bytes_per_sequence == 60 * 2**20 + 30 * 8192 * 3 * 2


def test_the_declared_dtype_sets_sizes_and_not_counts(tmp_path: Path) -> None:
    bf16, fp32 = inspect_config(tmp_path), inspect_config(tmp_path, dtype="float32")

    assert fp32.dtype == torch.float32
    assert fp32.num_bytes == 2 * bf16.num_bytes
    assert fp32.kv_bytes_per_token == 2 * bf16.kv_bytes_per_token
    assert fp32.recurrent_state_bytes == bf16.recurrent_state_bytes  # always fp32
    assert fp32.num_parameters == bf16.num_parameters


def test_tied_embeddings_are_active_because_the_output_uses_them(tmp_path: Path) -> None:
    report = inspect_config(tmp_path, tie_word_embeddings=True)

    assert report.num_parameters == 34_660_610_688 - 248320 * 2048
    assert report.num_active_without_lookup == report.num_active_parameters


def test_the_path_may_be_that_of_the_configuration(tmp_path: Path) -> None:
    inspect_config(tmp_path)

    assert inspect_checkpoint(tmp_path / "config.json").num_parameters == 34_660_610_688


@pytest.mark.parametrize("variant", ["moe", "dense"])
def test_weights_are_counted_by_part_and_dtype(
    tmp_path: Path, tiny_config: TinyConfig, variant: str
) -> None:
    config = tiny_config(variant)
    model = CloverForCausalLM(config)
    model.lm_head.to(torch.bfloat16)
    save_model(model, tmp_path / "out")
    report = inspect_checkpoint(tmp_path / "out")

    assert report.has_weights
    assert report.dtype == torch.float32
    total = sum(parameter.numel() for parameter in model.parameters())
    assert report.num_parameters + report.num_added_parameters == total
    assert report.bytes_by_part[Part.LM_HEAD] == {"bfloat16": 64 * 32 * 2}
    assert report.bytes_by_part[Part.EMBEDDING] == {"float32": 64 * 32 * 4}
    assert report.num_bytes == 4 * total - 2 * 64 * 32


def test_only_the_chosen_experts_are_active(tmp_path: Path, tiny_config: TinyConfig) -> None:
    save_model(CloverForCausalLM(tiny_config("moe")), tmp_path / "moe")
    save_model(CloverForCausalLM(tiny_config("dense")), tmp_path / "dense")
    moe, dense = inspect_checkpoint(tmp_path / "moe"), inspect_checkpoint(tmp_path / "dense")

    unused = 3 * (3 * 16 * 32) * 2  # layers x one expert x the two of four that are not chosen
    assert moe.num_active_parameters == moe.num_parameters - unused
    assert dense.num_active_parameters == dense.num_parameters


def test_the_cache_sizes_are_those_of_a_real_cache(tmp_path: Path, tiny_config: TinyConfig) -> None:
    model = CloverForCausalLM(tiny_config("moe"))
    save_model(model, tmp_path / "out")
    report = inspect_checkpoint(tmp_path / "out")

    small, large = (model.new_cache(batch_size=3, capacity=capacity) for capacity in (16, 48))
    states = [layer for layer in small.layers if isinstance(layer, DeltaNetCache)]
    assert large.num_bytes - small.num_bytes == 3 * (48 - 16) * report.kv_bytes_per_token
    fixed = sum(tensor.nbytes for layer in states for tensor in layer.tensors())
    assert fixed == 3 * report.cache_bytes_per_sequence


def test_damaged_weights_are_an_error_and_not_a_configuration_alone(
    tmp_path: Path, tiny_config: TinyConfig
) -> None:
    save_model(CloverForCausalLM(tiny_config("moe")), tmp_path / "out")
    weights = tmp_path / "out" / SINGLE_FILE
    weights.write_bytes(weights.read_bytes()[:-1])

    with pytest.raises(CheckpointError, match="truncated"):
        inspect_checkpoint(tmp_path / "out")


def test_a_folder_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        inspect_checkpoint(tmp_path / "absent")


def test_the_report_reads_as_text(tmp_path: Path) -> None:
    text = "\n".join(render_report(inspect_config(tmp_path)))

    for expected in (
        "CloverMoeModelLM (config alone, bfloat16 assumed)",
        "34,660,610,688 + 740,160 of Clover",
        "3,454,988,928 a token (2,946,429,568 without the embedding look-up)",
        "20.0 KiB a token, 61.4 MiB a sequence",
        "30 gated delta net, 10 attention",
        "64,424,509,440 bfloat16",
        "blocks of 32, mask token 248077, predictions shifted, no coreset",
    ):
        assert expected in text
