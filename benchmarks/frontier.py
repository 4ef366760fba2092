"""Quality against speed of clover-nano: task accuracy and tokens per forward, parent and Clover.

    python -m benchmarks.frontier --out docs/results

Asks the same procedural items of the autoregressive parent and of Clover under several policies
(greedy), checks every answer, and writes `frontier.json`, `frontier.md` and `frontier.png`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import torch

from clover.checkpoint.load import LoadedCheckpoint, load_checkpoint, resolve_checkpoint
from clover.diffusion.policies import (
    Autoregressive,
    EntropyBound,
    Exact,
    Policy,
    PromptLookup,
    Relaxed,
    Threshold,
)
from clover.tasks import Task
from clover.train.answers import FamilyScore, draw_items, score_answers
from clover.train.intervals import Interval, wilson_interval

THRESHOLDS = (0.5, 0.7, 0.9, 0.99)
ENTROPY_BOUNDS = (0.05, 0.2)
TOLERANCES = (0.5, 1.0, 2.0, 3.0, 4.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row(FamilyScore):
    """One line of the table: a model under a policy, on one family of one split."""

    model: str
    policy: str
    split: str


def main() -> int:
    """Measures and writes; one progress line per policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="clover-nano")
    parser.add_argument("--parent", default="clover-nano-parent")
    parser.add_argument("--items", type=int, default=1000, help="items per split, all families")
    parser.add_argument("--splits", nargs="+", default=["seen", "heldout"])
    parser.add_argument("--thresholds", nargs="+", type=float, default=list(THRESHOLDS))
    parser.add_argument("--entropy-bounds", nargs="*", type=float, default=list(ENTROPY_BOUNDS))
    parser.add_argument("--tolerances", nargs="+", type=float, default=list(TOLERANCES))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    policies: list[Policy] = [Threshold(threshold=value) for value in options.thresholds]
    policies += [EntropyBound(bound=value) for value in options.entropy_bounds]
    policies += [Relaxed(tolerance=value) for value in options.tolerances]
    policies += [Exact(), Autoregressive()]
    job = partial(measure_split, options.parent, options.model, policies, options.items)
    # Small passes do not split well over threads: one process a split, one thread each.
    with ProcessPoolExecutor(len(options.splits), mp_context=get_context("spawn")) as pool:
        rows = [row for part in pool.map(job, options.splits) for row in part]
    options.out.mkdir(parents=True, exist_ok=True)
    records = [asdict(row) for row in rows]
    (options.out / "frontier.json").write_text(json.dumps(records, indent=1) + "\n")
    (options.out / "frontier.md").write_text(render_tables(rows))
    plot(rows, options.out / "frontier.png")
    return 0


def measure_split(
    parent_name: str, clover_name: str, policies: Sequence[Policy], count: int, split: str
) -> list[Row]:
    """Returns the rows of one split: the parent, then Clover under every policy."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    parent = load_checkpoint(resolve_checkpoint(parent_name))
    clover = load_checkpoint(resolve_checkpoint(clover_name))
    tasks = list(islice(draw_items(split), count))
    rows = measure("parent", parent, Autoregressive(), split, tasks)
    for policy in policies:
        rows += measure("clover", clover, policy, split, tasks)
    return rows


def measure(
    name: str, checkpoint: LoadedCheckpoint, policy: Policy, split: str, tasks: Sequence[Task]
) -> list[Row]:
    """Returns one row per family, and one for all."""
    scores = score_answers(checkpoint, policy, tasks)
    rows = [
        Row(model=name, policy=policy_name(policy), split=split, **asdict(score))
        for score in scores
    ]
    total = rows[-1]
    print(
        f"{split:8} {name:7} {total.policy:20} accuracy {total.accuracy:6.1%} TPF {total.tpf:5.2f}",
        flush=True,
    )
    return rows


def policy_name(policy: Policy) -> str:
    """Returns what the table calls a policy."""
    match policy:
        case Threshold(threshold=threshold):
            return f"threshold {threshold:g}"
        case EntropyBound(bound=bound):
            return f"entropy_bound {bound:g}"
        case Exact():
            return "exact"
        case Relaxed(tolerance=tolerance):
            return f"relaxed {tolerance:g}"
        case PromptLookup():
            return "prompt_lookup"
        case Autoregressive():
            return "autoregressive"


def render_tables(rows: Sequence[Row]) -> str:
    """Returns one Markdown table per split: accuracy in percent, with its 95 % interval, and TPF."""
    lines = []
    for split in dict.fromkeys(row.split for row in rows):
        part = [row for row in rows if row.split == split]
        families = list(dict.fromkeys(row.family for row in part))
        items = next(row.items for row in part if row.family == "all")
        lines += [f"### {split}: {items} items", ""]
        lines.append("| model | policy | " + " | ".join(families) + " | interval | TPF |")
        lines.append("|---|---|" + "---:|" * (len(families) + 2))
        for model, policy in dict.fromkeys((row.model, row.policy) for row in part):
            cells = {r.family: r for r in part if (r.model, r.policy) == (model, policy)}
            accuracies = " | ".join(f"{100 * cells[f].accuracy:.1f}" for f in families)
            interval = percent_interval(cells["all"])
            lines.append(
                f"| {model} | {policy} | {accuracies} | {interval.low:.1f} to {interval.high:.1f} "
                f"| {cells['all'].tpf:.2f} |"
            )
        lines.append("")
        lines += ["TPF by family:", ""]
        lines.append("| policy | " + " | ".join(families) + " |")
        lines.append("|---|" + "---:|" * len(families))
        for policy in dict.fromkeys(row.policy for row in part if row.model == "clover"):
            cells = {r.family: r for r in part if (r.model, r.policy) == ("clover", policy)}
            speeds = " | ".join(f"{cells[f].tpf:.2f}" for f in families)
            lines.append(f"| {policy} | {speeds} |")
        lines.append("")
    return "\n".join(lines)


def percent_interval(row: Row) -> Interval:
    """Returns the 95 % interval of an accuracy, in percent."""
    interval = wilson_interval(row.correct, row.items)
    return Interval(100 * interval.low, 100 * interval.high)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draws accuracy over TPF, one panel per split, the parent as a line with its interval."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    splits = list(dict.fromkeys(row.split for row in rows))
    figure, panels = plt.subplots(
        1, len(splits), figsize=(5.5 * len(splits), 4), sharey=True, squeeze=False
    )
    kinds: list[tuple[str, str, Callable[[Row], bool]]] = [
        ("threshold", "o-", lambda row: row.policy.startswith("threshold")),
        ("entropy bound", "s--", lambda row: row.policy.startswith("entropy_bound")),
        ("relaxed", "^-", lambda row: row.policy.startswith("relaxed")),
        ("exact", "*", lambda row: row.policy == "exact"),
    ]
    for panel, split in zip(panels[0], splits, strict=True):
        totals = [row for row in rows if row.split == split and row.family == "all"]
        parent = next(row for row in totals if row.model == "parent")
        interval = percent_interval(parent)
        panel.axhline(100 * parent.accuracy, color="gray", linestyle=":", label="parent, TPF 1")
        panel.axhspan(interval.low, interval.high, color="gray", alpha=0.15)
        for label, style, is_kind in kinds:
            points = [row for row in totals if row.model == "clover" and is_kind(row)]
            panel.plot(
                [row.tpf for row in points],
                [100 * row.accuracy for row in points],
                style,
                label=f"Clover, {label}",
            )
        panel.set_title(f"clover-nano, {split} items ({parent.items})")
        panel.set_xlabel("tokens per forward (TPF)")
        panel.set_ylabel("right answers, %")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
