"""A study trains each variant, keeps what it scored, and goes on where it was cut."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from clover.checkpoint.load import resolve_checkpoint, save_model
from clover.config import ModelConfig
from clover.errors import TrainingInputError
from clover.model import delta_net
from clover.model.delta_net import history_slot_attention
from clover.model.transformer import CloverForCausalLM
from clover.train.events import StepEvent, TrainEvent
from clover.train.state import STATE_FILE
from recipes import nano
from recipes.ablations.__main__ import INTERRUPTED, PLOT_FILE, USAGE_ERROR, main
from recipes.ablations.results import RESULTS_FILE, Result, read_results
from recipes.ablations.small_parent import WIDTH
from recipes.ablations.study import BLOCK_SIZES, POLICIES, SPLITS, Study, StudyConfig
from recipes.ablations.variants import VARIANTS
from recipes.nano import clover_training

STEPS = 2
LOG_EVERY = clover_training(Path()).log_every
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def parent(
    tiny_config: Callable[..., ModelConfig], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A tiny parent that reads and writes with the nano tokenizer."""
    config = tiny_config(diffusion=False, vocab_size=1024, eos_token_ids=(2,), pad_token_id=0)
    model = CloverForCausalLM(config)
    model.init_weights(torch.Generator().manual_seed(0))
    folder = tmp_path_factory.mktemp("parent") / "model"
    save_model(model, folder, files_from=resolve_checkpoint("clover-nano-parent"))
    return folder


def _config(parent: Path, steps: int = STEPS) -> StudyConfig:
    return StudyConfig(
        parent=str(parent),
        steps=steps,
        num_rows=2,
        row_length=64,
        num_documents=2,
        num_items=1,
        max_tokens=8,
    )


def _run(
    folder: Path,
    parent: Path,
    variants: list[str],
    *,
    steps: int = STEPS,
    stop_at: int | None = None,
) -> tuple[bool, list[TrainEvent]]:
    """Returns whether the study is finished, and what it reported; seed 0 alone."""
    events: list[TrainEvent] = []

    def on_event(variant: str, seed: int, event: TrainEvent) -> None:
        events.append(event)
        if isinstance(event, StepEvent) and event.step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    return Study(folder, _config(parent, steps), on_event).run(variants, [0]), events


@pytest.fixture(scope="module")
def base_result(parent: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("base")
    assert _run(folder, parent, ["base"])[0]
    [result] = read_results(folder)
    return result


def test_a_result_has_every_score(base_result: Result) -> None:
    assert base_result.tokens == STEPS * 2 * 64
    assert tuple(base_result.splits) == SPLITS
    for split in base_result.splits.values():
        kinds = [(score.block_size, score.masked_share) for score in split.previews]
        assert kinds == [(size, share) for size in BLOCK_SIZES for share in (1.0, 0.5)]
        assert list(split.answers) == list(POLICIES)
        for scores in split.answers.values():
            assert [score.family for score in scores][-1] == "all"
            assert scores[-1].items == 1 and scores[-1].passes >= 1
    assert [slot.layer for slot in base_result.history_slots] == [0, 1]
    assert all(c != 0.0 for slot in base_result.history_slots for c in slot.c)


@pytest.mark.parametrize("name", sorted(set(VARIANTS) - {"base", "no_coreset"}))
def test_each_variant_is_trained_and_leaves_nothing_behind(
    parent: Path, base_result: Result, tmp_path: Path, name: str
) -> None:
    assert _run(tmp_path, parent, [name])[0]
    assert delta_net.history_slot_attention is history_slot_attention
    [result] = read_results(tmp_path)
    assert (result.variant, result.tokens) == (name, base_result.tokens)
    # Every change reaches the weights or what is read of them
    assert result.splits["seen"].previews != base_result.splits["seen"].previews
    for slot in result.history_slots:
        if name in ("no_c", "history_added", "no_history"):
            assert set(slot.c) == {0.0}
        if name in ("history_added", "no_history"):
            assert set(slot.b) <= {5.0, 0.5}
    if name == "half_coreset":
        used = {score.num_experts for score in result.splits["seen"].previews}
        assert used == {2.0}  # two of four experts, and two a token


def test_a_study_that_is_stopped_goes_on_and_finds_what_an_unbroken_one_does(
    parent: Path, tmp_path: Path
) -> None:
    unbroken, stopped = tmp_path / "unbroken", tmp_path / "stopped"
    steps = LOG_EVERY + 1
    assert _run(unbroken, parent, ["calibrated"], steps=steps)[0]
    assert not _run(stopped, parent, ["calibrated"], steps=steps, stop_at=LOG_EVERY)[0]
    assert read_results(stopped) == []
    is_finished, events = _run(stopped, parent, ["calibrated"], steps=steps)
    assert is_finished
    assert [event.step for event in events if isinstance(event, StepEvent)] == [steps]
    [expected], [result] = read_results(unbroken), read_results(stopped)
    assert asdict(result) == asdict(expected)
    assert not list(tmp_path.rglob(STATE_FILE))


def test_finished_runs_are_skipped_and_a_line_that_was_cut_is_run_again(
    parent: Path, base_result: Result, tmp_path: Path
) -> None:
    _run(tmp_path, parent, ["base"])
    path = tmp_path / RESULTS_FILE
    whole = path.read_bytes()
    is_finished, events = _run(tmp_path, parent, ["base"])
    assert is_finished and events == []
    assert path.read_bytes() == whole

    path.write_bytes(whole + whole[: len(whole) // 2])  # of another run, say
    assert len(read_results(tmp_path)) == 1
    path.write_bytes(whole[: len(whole) // 2])
    _run(tmp_path, parent, ["base"])
    [result] = read_results(tmp_path)
    assert asdict(result) == asdict(base_result)


def test_a_folder_belongs_to_one_study(parent: Path, tmp_path: Path) -> None:
    config = _config(parent)
    Study(tmp_path, config, lambda variant, seed, event: None)
    other = StudyConfig(**asdict(config) | {"num_items": 7})
    with pytest.raises(TrainingInputError, match="num_items was 1, is 7"):
        Study(tmp_path, other, lambda variant, seed, event: None)


def test_the_command_line_runs_a_study_and_draws_up_its_table(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--steps", "2", "--rows", "2", "--row-length", "64", "--documents", "2"]
    options += [
        "--items",
        "1",
        "--max-tokens",
        "8",
        "--parent",
        str(parent),
        "--out",
        str(tmp_path),
    ]
    assert main(["run", "--variants", "base,no_c", "--seeds", "3", *options]) == 0
    assert [(r.variant, r.seed) for r in read_results(tmp_path)] == [("base", 3), ("no_c", 3)]
    assert main(["run", "--variants", "no_d", *options]) == USAGE_ERROR
    assert "no_d" in capsys.readouterr().err
    assert main(["table", "--out", str(tmp_path)]) == 0
    assert "| no_c | c frozen at 0 | 3 |" in capsys.readouterr().out
    assert (tmp_path / PLOT_FILE).read_bytes().startswith(b"\x89PNG")


def test_the_command_line_trains_a_small_parent_that_a_study_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nano, "VALIDATION_DOCUMENTS", 2)
    options = ["parent", "--out", str(tmp_path), "--steps", "1"]
    assert main([*options, "--families", "arithmetic,juggling"]) == USAGE_ERROR
    assert "found juggling" in capsys.readouterr().err
    assert main([*options, "--families", "arithmetic"]) == 0
    study = Study(tmp_path, _config(tmp_path / "parent"), lambda variant, seed, event: None)
    assert study.base.model.hidden_size == WIDTH


def test_a_study_that_a_signal_stops_says_so_with_its_exit_code(
    parent: Path, tmp_path: Path
) -> None:
    options = ["--steps", "100000", "--rows", "2", "--row-length", "64", "--parent", str(parent)]
    options += ["--variants", "base", "--seeds", "0", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "recipes.ablations", "run", *options]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("base, seed 0: StepEvent")
        process.terminate()
        process.communicate()  # reads what else it says, and waits
    assert process.returncode == INTERRUPTED
    assert (tmp_path / "runs" / "base-0" / STATE_FILE).is_file()
    assert read_results(tmp_path) == []
