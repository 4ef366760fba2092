r"""Runs the ablation study of clover-nano, and draws up its table.

    python -m recipes.ablations parent --out runs/ablations --families arithmetic,lookup
    python -m recipes.ablations run --out runs/ablations --parent runs/ablations/parent \
        --families arithmetic,lookup
    python -m recipes.ablations table --out runs/ablations > runs/ablations/table.md

Ctrl-C stops a run with its state saved; the same command goes on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from clover.errors import CloverError
from clover.train import parallel
from clover.train.events import StepEvent, SummaryEvent, TrainEvent
from recipes.ablations.report import plot, render_table
from recipes.ablations.results import read_results
from recipes.ablations.small_parent import train_small_parent
from recipes.ablations.study import Study, StudyConfig
from recipes.ablations.variants import VARIANTS

PLOT_FILE = "ablations.png"
USAGE_ERROR, INTERRUPTED = 2, 130


def main(arguments: list[str]) -> int:
    """Runs a command; returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        return _COMMANDS[options.command](options)
    except CloverError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:  # while evaluating; the training before it is saved
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    defaults = StudyConfig()
    parser = argparse.ArgumentParser(
        prog="python -m recipes.ablations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train and evaluate what is not finished")
    run.add_argument("--out", type=Path, required=True, help="the study's folder")
    run.add_argument("--variants", type=_names, help=f"some of {','.join(VARIANTS)}; default: all")
    run.add_argument("--seeds", type=_numbers, default=[0, 1, 2])
    run.add_argument("--parent", default=defaults.parent)
    run.add_argument("--steps", type=int, default=defaults.steps)
    run.add_argument("--rows", type=int, default=defaults.num_rows)
    run.add_argument("--row-length", type=int, default=defaults.row_length)
    run.add_argument("--families", type=_names, default=defaults.families, help="default: all")
    run.add_argument("--documents", type=int, default=defaults.num_documents, help="of a split")
    run.add_argument("--items", type=int, default=defaults.num_items, help="of a split")
    run.add_argument("--max-tokens", type=int, default=defaults.max_tokens, help="of an answer")
    parent = commands.add_parser("parent", help="train a small parent, for studies in less time")
    parent.add_argument("--out", type=Path, required=True, help="the parent becomes OUT/parent")
    parent.add_argument("--steps", type=int, default=1300)
    parent.add_argument("--families", type=_names, default=defaults.families, help="default: all")
    table = commands.add_parser("table", help=f"print Markdown, draw {PLOT_FILE} into the folder")
    table.add_argument("--out", type=Path, required=True, help="the study's folder")
    return parser


def _names(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _run(options: argparse.Namespace) -> int:
    config = StudyConfig(
        parent=options.parent,
        steps=options.steps,
        num_rows=options.rows,
        row_length=options.row_length,
        families=tuple(options.families),
        num_documents=options.documents,
        num_items=options.items,
        max_tokens=options.max_tokens,
    )
    is_finished = Study(options.out, config, _print_event).run(options.variants, options.seeds)
    return 0 if is_finished else INTERRUPTED


def _parent(options: argparse.Namespace) -> int:
    with parallel.process_group():
        summary = train_small_parent(
            options.out,
            tuple(options.families),
            options.steps,
            lambda event: print(event, flush=True),
        )
    return 0 if summary.is_finished else INTERRUPTED


def _table(options: argparse.Namespace) -> int:
    results = read_results(options.out)
    print(render_table(results))
    plot(results, options.out / PLOT_FILE)
    return 0


def _print_event(variant: str, seed: int, event: TrainEvent) -> None:
    if isinstance(event, StepEvent | SummaryEvent):
        print(f"{variant}, seed {seed}: {event}", flush=True)


_COMMANDS: Final[Mapping[str, Callable[[argparse.Namespace], int]]] = {
    "parent": _parent,
    "run": _run,
    "table": _table,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
