"""`benchmarks/gpu.py`: at toy size on the CPU, and its arithmetic for the 35B shape."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import Measurement, StaticPass, Workload
from clover.config import read_config
from clover.model.transformer import CloverForCausalLM

SHAPE_35B = Path(__file__).parents[1] / "data" / "clover_35b"
CPU = torch.device("cpu")
HISTORY = 40

ROUNDED_TO = 0.01
"""The published counts that the bytes are compared with have three digits."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a toy run on the CPU writes."""
    path = tmp_path_factory.mktemp("gpu") / "gpu.json"
    arguments = ["--toy", "--device", "cpu", "--repeats", "1", "--history", str(HISTORY)]
    assert gpu.main([*arguments, "--batch", "1", "2", "--tpf", "4", "--json", str(path)]) == 0
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def measured(report: dict[str, Any], name: str, coreset: int | None = None) -> dict[str, Any]:
    """Returns the measurement of a pass at batch 1."""
    [found] = [
        m
        for m in report["measurements"]
        if (m["name"], m["coreset_size"], m["batch_size"]) == (name, coreset, 1)
    ]
    return dict(found)


def test_every_pass_is_measured_at_every_batch_size(report: dict[str, Any]) -> None:
    found = [(m["name"], m["coreset_size"], m["batch_size"]) for m in report["measurements"]]
    names = ("preview", "commit_and_preview", "verify_and_preview")
    expected = {(name, c, b) for name in names for c in (None, 48, 32) for b in (1, 2)}
    assert len(found) == 20
    assert set(found) == expected | {("commit", None, 1), ("commit", None, 2)}
    assert report["skipped"] == {}
    assert all(m["seconds"] > 0 for m in report["measurements"])


def test_the_experts_of_a_pass_are_those_that_it_used(report: dict[str, Any]) -> None:
    assert measured(report, "commit")["experts_used"] == [4] * 4
    free = measured(report, "preview")
    for coreset in (48, 32):
        restricted = measured(report, "preview", coreset)
        assert max(restricted["experts_used"]) <= coreset
        assert restricted["weight_bytes"] < free["weight_bytes"]
        # The clean half of a fused pass knows no coreset.
        fused = measured(report, "commit_and_preview", coreset)
        assert sum(fused["experts_used"]) > sum(restricted["experts_used"])


def test_bytes_are_the_sum_done_by_hand(report: dict[str, Any]) -> None:
    # bf16. A GDN layer: qkv, z, b and a, conv, right taps, out, its norm, 2 + 3 vectors of 4 heads
    delta = 64 * (256 + 128 + 4 + 4) + 256 * 4 + 256 * 3 + 128 * 64 + 32 + 5 * 4
    attention = 64 * (2 * 128 + 64 + 64) + 128 * 64 + 2 * 32
    every_layer = 2 * 64 + 64 * 64 + 3 * 64 * 16 + 64  # norms, router, shared expert and its gate
    head = 256 * 64 + 64
    rest = 3 * delta + attention + 4 * every_layer + head
    expert = 3 * 64 * 16
    commit = measured(report, "commit")
    assert commit["weight_bytes"] == 2 * (rest + 4 * 4 * expert + 64)
    preview = measured(report, "preview", 32)
    used = sum(preview["experts_used"])
    assert preview["weight_bytes"] == 2 * (rest + used * expert + 32 * 64)
    # Keys and values of one layer; rings in bf16, states in fp32, which a commit also writes.
    states = 3 * (256 * 3 * 2 + 4 * 32 * 32 * 4)
    assert commit["cache_bytes"] == 2 * (HISTORY + 1) * 64 * 2 + 2 * states
    assert preview["cache_bytes"] == 2 * (HISTORY + 32) * 64 * 2 + states
    for m in report["measurements"]:
        moved = m["weight_bytes"] + m["cache_bytes"]
        assert m["bytes_per_second"] == pytest.approx(moved / m["seconds"])
        assert m["bandwidth_share"] == pytest.approx(m["bytes_per_second"] / report["bandwidth"])


def test_rates_follow_from_the_measured_seconds(report: dict[str, Any]) -> None:
    rates = {
        (r["policy"], r["coreset_size"], r["batch_size"]): r["tokens_per_second"]
        for r in report["rates"]
    }
    seconds = {
        (m["name"], m["coreset_size"], m["batch_size"]): m["seconds"]
        for m in report["measurements"]
    }
    assert len(rates) == 2 * (1 + 2 * 3)
    for batch in (1, 2):
        commit = seconds["commit", None, batch]
        assert rates["autoregressive", None, batch] == pytest.approx(batch / commit)
        for coreset in (None, 48, 32):
            # 32 tokens at 4 a pass are 8 passes: one commits as well, 7 only preview.
            fused = seconds["commit_and_preview", coreset, batch]
            block = fused + 7 * seconds["preview", coreset, batch]
            assert rates["threshold", coreset, batch] == pytest.approx(32 * batch / block)
            verify = seconds["verify_and_preview", coreset, batch]
            assert rates["exact", coreset, batch] == pytest.approx(4 * batch / verify)


@pytest.mark.parametrize("what", gpu.list_passes([32])[:4], ids=lambda what: what.name)
def test_what_a_graph_would_hold_is_the_models_own_pass(what: gpu.Pass) -> None:
    model = gpu.build_model(gpu.shape_toy(), torch.float32, CPU)
    own, static = (Workload(model, 2, HISTORY) for _ in range(2))
    places = [tensor for layer in static.cache.layers for tensor in layer.tensors()]
    static_pass = StaticPass(static, what)
    for _ in range(2):  # the second pass starts from the states that the first one wrote
        logits = torch.cat(own.run(what), dim=1)
        assert torch.equal(static_pass.run(), logits)
    for layer, other in zip(own.cache.layers, static.cache.layers, strict=True):
        for x, y in zip(layer.tensors(), other.tensors(), strict=True):
            assert torch.equal(x, y)
    after = [tensor for layer in static.cache.layers for tensor in layer.tensors()]
    assert all(x is y for x, y in zip(places, after, strict=True))


def test_the_shape_is_the_released_one() -> None:
    shape = replace(gpu.shape_35b(), eos_token_ids=())
    assert shape == read_config(SHAPE_35B)


def test_the_35b_shape_reads_what_its_active_parameters_weigh() -> None:
    with torch.device("meta"):
        model = CloverForCausalLM(gpu.shape_35b()).bfloat16()
    step = gpu.count_weight_bytes(model, 1, [8] * 40)
    # 2.946 B active parameters without the embedding look-up, two bytes each.
    assert step == pytest.approx(5.892e9, rel=ROUNDED_TO)
    everything = gpu.count_weight_bytes(model, 248320, [256] * 40)
    assert everything == sum(2 * weight.numel() for weight in model.parameters())


def test_a_spent_budget_measures_nothing_and_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "gpu.json"
    arguments = ["--toy", "--device", "cpu", "--budget", "0", "--history", "4", "--batch", "1"]
    assert gpu.main([*arguments, "--repeats", "1", "--json", str(path)]) == 0
    assert capsys.readouterr().out.count("not measured: ") == 10
    report = json.loads(path.read_text())
    assert report["measurements"] == [] and len(report["skipped"]) == 10


def test_the_35b_shape_is_refused_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu"])
    assert "needs a GPU" in capsys.readouterr().err


def test_passes_that_were_not_measured_give_no_rates() -> None:
    fused = Measurement(
        name="commit_and_preview",
        coreset_size=None,
        batch_size=1,
        is_graph=False,
        seconds=1.0,
        experts_used=[],
        weight_bytes=0,
        cache_bytes=0,
        bytes_per_second=0.0,
        bandwidth_share=0.0,
        peak_bytes=0,
    )
    preview = replace(fused, name="preview", is_graph=True)
    assert gpu.decoding_rates([fused, preview], [4.0]) == []
    both = gpu.decoding_rates([fused, replace(preview, is_graph=False, seconds=0.5)], [4.0])
    assert [rate.tokens_per_second for rate in both] == [pytest.approx(32 / 4.5)]
