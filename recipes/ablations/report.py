"""The study's table, in Markdown, and its plot.

A loss varies with the seed, so it is a mean over seeds with Student's interval, and a difference to
the base is taken seed by seed: both runs of a pair saw the same tokens. An answer is right or
wrong, so an accuracy has Wilson's interval over the items; items are the same for all seeds, which
therefore add none.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Final

from clover.errors import TrainingInputError
from clover.train.answers import FamilyScore
from clover.train.intervals import Interval, t_interval, wilson_interval
from clover.train.preview_quality import PreviewScore
from recipes.ablations.results import HistorySlot, Result, SplitResult
from recipes.ablations.variants import BASE, VARIANTS

Runs = Mapping[int, Result]
"""The results of one variant by seed."""
Metric = Callable[[SplitResult], float]

MASKED_LABELS: Final = {1.0: "all masked", 0.5: "half masked"}
SIZE_TABLES: Final[Mapping[str, Callable[[PreviewScore], float]]] = {
    "Loss of all masked tokens, nats": lambda score: score.loss,
    "Accuracy of all masked tokens": lambda score: score.accuracy,
    "Loss of the first masked token, nats": lambda score: score.first_loss,
    "Accuracy of the first masked token": lambda score: score.first_accuracy,
}


def group(results: Sequence[Result]) -> dict[str, Runs]:
    """Returns the results by variant, in the order of `VARIANTS`, and by seed.

    Raises:
        TrainingInputError: There are none.
    """
    if not results:
        raise TrainingInputError("found no results: run the study first")
    runs: dict[str, dict[int, Result]] = {}
    for result in results:
        runs.setdefault(result.variant, {})[result.seed] = result
    return {name: runs[name] for name in VARIANTS if name in runs}


def render_table(results: Sequence[Result]) -> str:
    """Returns all tables."""
    runs = group(results)
    first = results[0]
    lines = [
        f"{first.tokens:,} training tokens a run. Means over seeds with 95 % intervals: `mean ± half "
        "width` by Student's t over seeds (none with one seed), `share [low, high]` by Wilson over "
        "items. Differences to the base are paired by seed.",
        "",
    ]
    for split in first.splits:
        lines += chain(_summary(runs, split), _size_tables(runs, split), _families(runs, split))
    lines += chain(_experts(runs), _slots(runs))
    return "\n".join(lines)


def _summary(runs: Mapping[str, Runs], split: str) -> Iterator[str]:
    block_size = _largest_block_size(runs)
    policies = list(_first_split(runs, split).answers)
    answers = [f"{policy}: {what}" for policy in policies for what in ("right, %", "TPF")]
    yield f"### {split}: {_num_items(runs, split)} items"
    yield ""
    yield from _header(
        "variant",
        "change",
        "seeds",
        "AR loss",
        "difference",
        f"preview loss (block of {block_size} masks)",
        "difference",
        *answers,
    )
    preview = _preview_metric(lambda score: score.loss, block_size, 1.0)
    for name, mine in runs.items():
        cells = [name, VARIANTS[name].label, ", ".join(map(str, sorted(mine)))]
        for metric in (_ar_loss, preview):
            cells.append(_mean(_values(mine, split, metric)))
            cells.append(_mean(differences(runs, name, split, metric), signed=True))
        for policy in policies:
            scores = [_total(result.splits[split].answers[policy]) for result in mine.values()]
            cells += [_share(scores), f"{_tpf(scores):.2f}"]
        yield _row(cells)
    yield ""


def _size_tables(runs: Mapping[str, Runs], split: str) -> Iterator[str]:
    sizes = [(score.block_size, score.masked_share) for score in _first_split(runs, split).previews]
    sizes.sort(key=lambda size: (-size[1], size[0]))
    columns = [f"{MASKED_LABELS[share]}, {block_size}" for block_size, share in sizes]
    for title, read in SIZE_TABLES.items():
        metrics = [_preview_metric(read, *size) for size in sizes]
        yield f"{title}, by block size ({split}):"
        yield ""
        yield from _header("variant", *columns)
        for name, mine in runs.items():
            yield _row([name, *(_mean(_values(mine, split, metric)) for metric in metrics)])
        yield ""
        yield "The difference to the base:"
        yield ""
        yield from _header("variant", *columns)
        for name in runs:
            if name != BASE:
                found = [differences(runs, name, split, metric) for metric in metrics]
                yield _row([name, *(_mean(values, signed=True) for values in found)])
        yield ""


def _families(runs: Mapping[str, Runs], split: str) -> Iterator[str]:
    for policy, scores in _first_split(runs, split).answers.items():
        families = [score.family for score in scores]
        yield f"Right answers, %, and TPF by family with {policy} ({split}):"
        yield ""
        yield from _header("variant", *families)
        for name, mine in runs.items():
            cells = [name]
            for number in range(len(families)):
                found = [result.splits[split].answers[policy][number] for result in mine.values()]
                cells.append(f"{_share(found)}, {_tpf(found):.2f}")
            yield _row(cells)
        yield ""


def _experts(runs: Mapping[str, Runs]) -> Iterator[str]:
    """Experts are counted on the first split, on blocks of masks alone."""
    split = next(iter(_any_result(runs).splits))
    scores = [score for score in _first_split(runs, split).previews if score.masked_share == 1.0]
    if any(score.num_experts is None for score in scores):
        return
    yield f"### Experts that a block of masks uses in a layer ({split})"
    yield ""
    yield from _header("variant", *(str(score.block_size) for score in scores))
    for name, mine in runs.items():
        cells = [name]
        for score in scores:
            metric = _preview_metric(lambda s: s.num_experts or 0.0, score.block_size, 1.0)
            cells.append(f"{statistics.fmean(_values(mine, split, metric)):.2f}")
        yield _row(cells)
    yield ""


def _slots(runs: Mapping[str, Runs]) -> Iterator[str]:
    yield "### What tau, b and c have become: mean over heads and seeds [least, most]"
    yield ""
    yield from _header("variant", "layer", "tau", "b", "c")
    reads: list[Callable[[HistorySlot], Sequence[float]]] = [
        lambda slot: slot.tau,
        lambda slot: slot.b,
        lambda slot: slot.c,
    ]
    for name, mine in runs.items():
        for slots in zip(*(result.history_slots for result in mine.values()), strict=True):
            cells = [name, str(slots[0].layer)]
            for read in reads:
                values = [value for slot in slots for value in read(slot)]
                low, high = min(values), max(values)
                cells.append(f"{statistics.fmean(values):.2f} [{low:.2f}, {high:.2f}]")
            yield _row(cells)
    yield ""


def differences(runs: Mapping[str, Runs], name: str, split: str, metric: Metric) -> list[float]:
    """Returns a variant's metric less the base's, for each seed that both have; the base has none."""
    base = runs.get(BASE, {})
    return [
        metric(result.splits[split]) - metric(base[seed].splits[split])
        for seed, result in sorted(runs[name].items())
        if name != BASE and seed in base
    ]


def accuracy_interval(scores: Sequence[FamilyScore]) -> Interval:
    """Returns the interval of an accuracy over the same items, answered once for each seed."""
    return wilson_interval(statistics.fmean(s.correct for s in scores), scores[0].items)


def plot(results: Sequence[Result], path: Path) -> None:
    """Draws each variant's difference in preview loss, and its accuracy over TPF."""
    from matplotlib.figure import Figure

    runs = group(results)
    split = next(iter(results[0].splits))
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    block_size = _largest_block_size(runs)
    metric = _preview_metric(lambda score: score.loss, block_size, 1.0)
    names = [name for name in runs if differences(runs, name, split, metric)]
    for height, name in enumerate(names):
        values = differences(runs, name, split, metric)
        mean, reach = statistics.fmean(values), _reach(values)
        left.errorbar(mean, -height, xerr=reach or None, fmt="o", capsize=3, color="C0")
    left.axvline(0.0, color="gray", linestyle=":")
    left.set_yticks([-height for height in range(len(names))], names)
    left.set_xlabel("preview loss less the base's, nats")
    left.set_title(f"Blocks of {block_size} masks, {split}")
    policy = list(_first_split(runs, split).answers)[-1]
    for name, mine in runs.items():
        scores = [_total(result.splits[split].answers[policy]) for result in mine.values()]
        accuracy, interval = _accuracy(scores), accuracy_interval(scores)
        reaches = [[100 * (accuracy - interval.low)], [100 * (interval.high - accuracy)]]
        right.errorbar(_tpf(scores), 100 * accuracy, yerr=reaches, fmt="o", capsize=3, label=name)
    right.set_xlabel("tokens per forward (TPF)")
    right.set_ylabel("right answers, %")
    right.set_title(f"{policy}, {split}")
    right.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def _preview_metric(
    read: Callable[[PreviewScore], float], block_size: int, masked_share: float
) -> Metric:
    """Returns what reads a number of the previews of one kind of canvas."""

    def metric(split: SplitResult) -> float:
        [score] = [
            score
            for score in split.previews
            if (score.block_size, score.masked_share) == (block_size, masked_share)
        ]
        return read(score)

    return metric


def _ar_loss(split: SplitResult) -> float:
    return split.ar_loss


def _values(runs: Runs, split: str, metric: Metric) -> list[float]:
    return [metric(result.splits[split]) for result in runs.values()]


def _any_result(runs: Mapping[str, Runs]) -> Result:
    return next(result for mine in runs.values() for result in mine.values())


def _first_split(runs: Mapping[str, Runs], split: str) -> SplitResult:
    return _any_result(runs).splits[split]


def _largest_block_size(runs: Mapping[str, Runs]) -> int:
    splits = _any_result(runs).splits.values()
    return max(score.block_size for split in splits for score in split.previews)


def _num_items(runs: Mapping[str, Runs], split: str) -> int:
    scores = next(iter(_first_split(runs, split).answers.values()))
    return _total(scores).items


def _total(scores: Sequence[FamilyScore]) -> FamilyScore:
    return next(score for score in scores if score.family == "all")


def _accuracy(scores: Sequence[FamilyScore]) -> float:
    return statistics.fmean(score.accuracy for score in scores)


def _tpf(scores: Sequence[FamilyScore]) -> float:
    return sum(score.tokens for score in scores) / sum(score.passes for score in scores)


def _reach(values: Sequence[float]) -> float:
    """Returns half the width of the mean's interval, 0 where one value has none."""
    if len(values) < 2:
        return 0.0
    interval = t_interval(values)
    return (interval.high - interval.low) / 2


def _mean(values: Sequence[float], *, signed: bool = False) -> str:
    if not values:
        return ""
    mean = f"{statistics.fmean(values):{'+' if signed else ''}.4f}"
    return mean if len(values) < 2 else f"{mean} ± {_reach(values):.4f}"


def _share(scores: Sequence[FamilyScore]) -> str:
    interval = accuracy_interval(scores)
    accuracy = f"{100 * _accuracy(scores):.1f}"
    return f"{accuracy} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def _header(*names: str) -> Iterator[str]:
    yield _row(names)
    yield "|" + "---|" * len(names)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
