"""What a run leaves beside its weights, and the curves drawn from it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import clover
from clover.errors import TrainingError
from clover.train.evaluation import EvalResult
from clover.train.events import EvalEvent, StepEvent, TrainEvent
from clover.train.plot import plot_run, read_curves
from clover.train.run_files import (
    METRICS_FILE,
    RUN_FILE,
    MetricsFile,
    git_commit,
    read_metrics,
    write_run_file,
)


def step_event(step: int) -> StepEvent:
    return StepEvent(
        step=step,
        num_steps=20,
        losses={"total": 8.0 / step},
        learning_rate=0.1,
        grad_norm=1.0,
        tokens_per_second=100.0 * step,
    )


def eval_event(step: int) -> EvalEvent:
    result = EvalResult(loss=2.0 / step, exact=0.25, exact_by_family={"echo": 0.25})
    return EvalEvent(step=step, name="heldout", result=result)


def write(folder: Path, events: list[TrainEvent], step: int = 0) -> None:
    metrics = MetricsFile(folder, step)
    for event in events:
        metrics.write(event)


def test_every_event_is_a_line(tmp_path: Path) -> None:
    write(tmp_path, [step_event(1), eval_event(1)])
    first, second = map(json.loads, (tmp_path / METRICS_FILE).read_text().splitlines())
    assert (first["event"], first["step"], first["losses"]) == ("step", 1, {"total": 8.0})
    assert (second["event"], second["name"], second["result"]["exact"]) == ("eval", "heldout", 0.25)
    assert first["time"] > 1.7e9


def test_a_resumed_run_reports_no_step_twice(tmp_path: Path) -> None:
    write(tmp_path, [step_event(step) for step in range(1, 6)])
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"event": "step", "st')  # killed in the middle of a line
    write(tmp_path, [step_event(step) for step in (4, 5, 6)], step=3)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    write(tmp_path, [step_event(1)])
    assert [row["step"] for row in read_metrics(tmp_path)] == [1], "a run from the beginning"


def test_damaged_metrics_are_named(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text("{\n{}\n")
    with pytest.raises(TrainingError, match=r"metrics.jsonl is damaged"):
        MetricsFile(tmp_path, 3)


def test_a_run_says_where_it_comes_from_at_each_start(tmp_path: Path) -> None:
    config = {"seed": 7, "out": tmp_path}
    for step in (0, 4):
        write_run_file(tmp_path, config=config, model={"hidden_size": 32}, step=step)
    found = json.loads((tmp_path / RUN_FILE).read_text())
    assert (found["seed"], found["config"]["out"]) == (7, str(tmp_path))
    assert found["model"] == {"hidden_size": 32}
    assert [start["step"] for start in found["starts"]] == [0, 4]
    for start in found["starts"]:
        assert start["command"] == sys.argv
        assert (start["clover"], start["torch"]) == (clover.__version__, torch.__version__)
        assert start["git_commit"] == git_commit()


def test_the_commit_is_that_of_the_code() -> None:
    git = ["git", "-C", str(Path(clover.__file__).parent), "rev-parse", "HEAD"]
    found = subprocess.run(git, capture_output=True, text=True)
    if found.returncode:
        assert git_commit() is None
    else:
        assert (git_commit() or "").removesuffix("-dirty") == found.stdout.strip()


def test_curves_are_what_was_reported(tmp_path: Path) -> None:
    write(tmp_path, [step_event(1), step_event(2), eval_event(2)])
    curves = read_curves(tmp_path)
    losses = {"total": ([1, 2], [8.0, 4.0]), "heldout (eval)": ([2], [1.0])}
    assert curves["loss (nats per token)"] == losses
    assert curves["exact replies"] == {"heldout": ([2], [0.25])}
    assert curves["tokens/s"] == {"all processes": ([1, 2], [100.0, 200.0])}


def test_curves_are_drawn_in_the_format_of_the_name(tmp_path: Path) -> None:
    write(tmp_path, [step_event(1), step_event(2), eval_event(2)])
    path = plot_run(tmp_path, tmp_path / "curves.svg")
    assert "<svg" in path.read_text()


def test_a_folder_without_steps_has_no_curves(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"expected a run with steps in metrics.jsonl"):
        plot_run(tmp_path)


def test_without_matplotlib_the_error_says_how_to_install_it(tmp_path: Path) -> None:
    write(tmp_path, [step_event(1)])
    script = (
        "import sys; sys.modules['matplotlib'] = None\n"  # what an absent package looks like
        "from pathlib import Path; from clover.train.plot import plot_run\n"
        "plot_run(Path(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "TrainingError" in done.stderr and "pip install 'clover[plot]'" in done.stderr
