"""The recipe's last stage, in one step that learns nothing."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from clover.checkpoint.load import load_model, resolve_checkpoint
from clover.errors import TrainingInputError
from clover.train.events import SummaryEvent
from recipes import nano


def test_distillation_starts_a_part_of_the_way_back_to_the_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped, parent_folder = map(resolve_checkpoint, ("clover-nano", "clover-nano-parent"))
    shutil.copytree(shipped, tmp_path / "adapted", ignore=shutil.ignore_patterns("parent"))
    config = nano.distillation_training(tmp_path / "clover-run")
    frozen = replace(
        config,
        steps=1,
        num_rows=1,
        canvas_length=32,
        optimizer=replace(config.optimizer, learning_rate=0.0),
    )
    monkeypatch.setattr(nano, "distillation_training", lambda out: frozen)
    monkeypatch.setattr(nano, "VALIDATION_DOCUMENTS", 1)
    summary = nano.run("distill", tmp_path, lambda event: None)
    assert isinstance(summary, SummaryEvent) and summary.is_finished
    adapted, parent, result = (
        dict(load_model(folder).named_parameters())
        for folder in (tmp_path / "adapted", parent_folder, tmp_path / "clover")
    )
    for name, found in result.items():
        expected = adapted[name]
        if name in parent:
            expected = torch.lerp(expected, parent[name], nano.PARENT_SHARE)
        torch.testing.assert_close(found, expected.bfloat16().float(), rtol=0, atol=0)


def test_distillation_needs_an_adapted_model(tmp_path: Path) -> None:
    with pytest.raises(TrainingInputError, match="run the stage `adapt` with the same OUT first"):
        nano.run("distill", tmp_path, lambda event: None)
