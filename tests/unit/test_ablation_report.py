"""The table says of hand-made results what one would compute by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from clover.errors import TrainingInputError
from clover.train.answers import FamilyScore
from clover.train.preview_quality import PreviewScore
from recipes.ablations.report import group, plot, render_table
from recipes.ablations.results import HistorySlot, Result, SplitResult

# Of the mean of three values that are 0.1 apart: t 4.3027 times 0.1 / sqrt(3)
REACH = 0.2484


def _score(loss: float, block_size: int, masked_share: float) -> PreviewScore:
    return PreviewScore(
        block_size=block_size,
        masked_share=masked_share,
        loss=loss,
        accuracy=0.5,
        first_loss=loss / 2,
        first_accuracy=0.75,
        num_experts=3.5 if block_size == 4 else 6.25,
    )


def _result(variant: str, seed: int, loss: float, correct: int, *, c: float = 0.5) -> Result:
    def answers(tokens: int) -> list[FamilyScore]:
        count = {"items": 100, "tokens": tokens, "passes": 100}
        family = FamilyScore(family="sorting", correct=correct, **count)
        return [family, FamilyScore(family="all", correct=correct, **count)]

    split = SplitResult(
        ar_loss=loss / 10,
        ar_exact=0.9,
        previews=[
            _score(loss + 1.0 - share, size, share) for size in (4, 32) for share in (1.0, 0.5)
        ],
        answers={"exact": answers(250), "threshold 0.9": answers(600)},
    )
    slot = HistorySlot(layer=0, tau=[9.0, 8.0], b=[5.0, 5.0], c=[c, -c])
    return Result(
        variant=variant,
        seed=seed,
        tokens=1000,
        git_commit=None,
        splits={"seen": split},
        history_slots=[slot],
    )


@pytest.fixture
def results() -> list[Result]:
    base = [_result("base", seed, 1.0 + 0.1 * seed, 90) for seed in range(3)]
    # Always 0.3 above the base, whatever the seed, and without a run of seed 2
    other = [_result("no_c", seed, 1.3 + 0.1 * seed, 79 + 2 * seed, c=0.0) for seed in range(2)]
    return [*other, *base]


def _cells(table: str, heading: str, first: str) -> list[str]:
    """Returns the cells of the first row that begins with `first` below a heading."""
    lines = table[table.index(heading) :].splitlines()
    row = next(line for line in lines if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_the_summary_has_means_paired_differences_and_intervals(results: list[Result]) -> None:
    table = render_table(results)
    assert _cells(table, "### seen: 100 items", "base") == [
        "base",
        "the recipe itself",
        "0, 1, 2",
        f"0.1100 ± {REACH / 10:.4f}",
        "",
        f"1.1000 ± {REACH:.4f}",
        "",
        "90.0 [82.6, 94.5]",  # Wilson: 90 of 100
        "2.50",
        "90.0 [82.6, 94.5]",
        "6.00",
    ]
    assert _cells(table, "### seen: 100 items", "no_c") == [
        "no_c",
        "c frozen at 0",
        "0, 1",
        "0.1350 ± 0.0635",  # t 12.7062 times 0.01 / sqrt(2) / sqrt(2)
        "+0.0300 ± 0.0000",
        "1.3500 ± 0.6353",
        "+0.3000 ± 0.0000",
        "80.0 [71.1, 86.7]",  # Wilson: 80 of 100, the mean of both seeds, and not 160 of 200
        "2.50",
        "80.0 [71.1, 86.7]",
        "6.00",
    ]


def test_tables_by_block_size_keep_kinds_of_canvas_apart(results: list[Result]) -> None:
    table = render_table(results)
    header = _cells(table, "Loss of all masked tokens", "variant")
    assert header == [
        "variant",
        *(f"{kind} masked, {n}" for kind in ("all", "half") for n in (4, 32)),
    ]
    losses = _cells(table, "Loss of all masked tokens", "base")[1:]
    assert losses == [f"{mean} ± {REACH:.4f}" for mean in ("1.1000", "1.1000", "1.6000", "1.6000")]
    first = _cells(table, "Loss of the first masked token", "base")[1]
    assert first == f"0.5500 ± {REACH / 2:.4f}"
    differences = table[table.index("Loss of all masked tokens") :]
    assert _cells(differences, "The difference to the base", "no_c")[1:] == ["+0.3000 ± 0.0000"] * 4


def test_experts_and_the_history_slot_are_listed(results: list[Result]) -> None:
    table = render_table(results)
    assert _cells(table, "### Experts", "base") == ["base", "3.50", "6.25"]
    slot = ["0", "8.50 [8.00, 9.00]", "5.00 [5.00, 5.00]"]
    assert _cells(table, "### What tau", "base") == ["base", *slot, "0.00 [-0.50, 0.50]"]
    assert _cells(table, "### What tau", "no_c") == ["no_c", *slot, "0.00 [0.00, 0.00]"]


def test_one_seed_has_means_without_intervals() -> None:
    table = render_table([_result("base", 0, 1.0, 0), _result("no_c", 0, 1.5, 100)])
    assert _cells(table, "### seen", "no_c")[3:7] == ["0.1500", "+0.0500", "1.5000", "+0.5000"]
    assert _cells(table, "### seen", "base")[7] == "0.0 [0.0, 3.7]"


def test_the_order_is_that_of_the_variants_and_a_study_without_results_is_refused(
    results: list[Result],
) -> None:
    assert list(group(results)) == ["base", "no_c"]
    with pytest.raises(TrainingInputError, match="run the study first"):
        render_table([])


def test_the_plot_is_drawn(results: list[Result], tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    plot(results, path)
    assert path.read_bytes().startswith(b"\x89PNG")
