from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from clover.eval.bench import BenchConfig, BenchResults, Quality, Sample, TraceSample
from clover.eval.bench_report import (
    look_around,
    percentile,
    plot_frontier,
    render,
    summarize,
    write_report,
)

CONFIG = BenchConfig(num_items=4, concurrencies=(1, 2), repeats=3, num_turns=3)


def sample(contender: str, repeat: int, seconds: float, concurrency: int = 1) -> Sample:
    return Sample(
        contender=contender,
        workload="short",
        concurrency=concurrency,
        repeat=repeat,
        seconds=seconds,
        tokens=100,
        first_token_seconds=(0.01, 0.02, 0.03, 0.5),
        latencies=(0.1, 0.2, 0.3, seconds),
        peak_bytes=2**20 * (repeat + 1),
    )


def quality(contender: str, experts: float | None) -> Quality:
    return Quality(
        contender=contender,
        workload="short",
        items=4,
        correct=3,
        same_text=2,
        tpf=2.5,
        experts_per_pass=experts,
    )


def trace(has_prefix_cache: bool, first: tuple[float, ...]) -> TraceSample:
    return TraceSample(
        contender="slow",
        has_prefix_cache=has_prefix_cache,
        repeat=0,
        first_token_seconds=first,
        latencies=first,
    )


@pytest.fixture
def results() -> BenchResults:
    return BenchResults(
        qualities=[quality("slow", 6.25), quality("fast", None)],
        samples=[
            *(sample("slow", repeat, seconds) for repeat, seconds in enumerate((2.0, 4.0, 1.0))),
            *(sample("fast", repeat, seconds) for repeat, seconds in enumerate((0.5, 1.0, 0.25))),
        ],
        traces=[trace(False, (9.0, 0.3, 0.5)), trace(True, (9.0, 0.04, 0.06))],
        is_complete=True,
    )


@pytest.mark.parametrize(("share", "value"), [(0.5, 2.0), (0.51, 3.0), (0.95, 4.0), (1.0, 4.0)])
def test_a_percentile_is_the_least_value_that_a_share_does_not_exceed(
    share: float, value: float
) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == value


def test_a_row_has_medians_over_rounds_and_percentiles_over_requests(results: BenchResults) -> None:
    slow, fast = summarize(results.samples)
    assert (slow.contender, slow.rate, slow.slowest, slow.fastest) == ("slow", 50.0, 25.0, 100.0)
    assert fast.rate == 200.0
    assert slow.first_token == pytest.approx(0.025)
    assert (slow.p50, slow.p95) == (0.2, 4.0)  # of twelve requests the 6th and the 12th
    assert slow.peak_bytes == 3 * 2**20


def test_each_concurrency_has_rows_of_its_own(results: BenchResults) -> None:
    rows = summarize([*results.samples, sample("slow", 0, 5.0, concurrency=2)])
    assert [(row.contender, row.concurrency, row.rate) for row in rows] == [
        ("slow", 1, 50.0),
        ("fast", 1, 200.0),
        ("slow", 2, 20.0),
    ]


def test_tables_show_speed_beside_accuracy(results: BenchResults) -> None:
    text = render(CONFIG, look_around(torch.float32, {"model": "m"}), results)
    assert "## short answers, concurrency 1" in text
    assert (
        "| slow | 50.0 | 25.0..100.0 | 1.00 | 2.50 | 75.0 | 50.0 | 25.0 | 200 | 4000 | 6.2 | 3 |"
        in text
    )
    assert "| fast | 200.0 | 100.0..400.0 | 4.00 |" in text
    assert "| slow | 400.0 | 50.0 | 8.00 |" in text  # turns after the first alone
    assert "Interrupted" not in text
    widths = {
        line.count("|") for line in text.splitlines() if line.startswith(("| slow | 50", "| fast"))
    }
    assert widths == {13}


def test_what_was_interrupted_says_so(results: BenchResults) -> None:
    results.is_complete = False
    assert "Interrupted" in render(CONFIG, look_around(torch.float32, {}), results)


def test_a_folder_has_every_sample_the_tables_and_the_plot(
    results: BenchResults, tmp_path: Path
) -> None:
    surroundings = look_around(torch.float32, {"model": "m"})
    paths = write_report(tmp_path / "new" / "folder", CONFIG, surroundings, results)
    assert [path.name for path in paths] == ["results.json", "results.md", "frontier.png"]
    values = json.loads(paths[0].read_text())
    assert len(values["samples"]) == 6
    assert values["rows"][1]["rate"] == 200.0
    assert values["config"]["concurrencies"] == [1, 2]
    assert {"python", "torch"} <= values["surroundings"]["versions"].keys()
    assert values["surroundings"]["processor"]
    assert paths[2].read_bytes().startswith(b"\x89PNG")


def test_nothing_is_drawn_before_anything_is_timed(tmp_path: Path) -> None:
    assert plot_frontier([], [], tmp_path / "frontier.png") is None
    assert list(tmp_path.iterdir()) == []
