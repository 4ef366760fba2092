"""A benchmark's folder: results.json with every sample, results.md with medians, frontier.png."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

from clover.eval.bench import BenchConfig, BenchResults, Quality, Sample, TraceSample

JSON_FILE, TABLE_FILE, PLOT_FILE = "results.json", "results.md", "frontier.png"
_PACKAGES = ("clover", "torch", "transformers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """When, where and on what was measured."""

    date: str  # ISO 8601, UTC
    processor: str
    cpu_count: int
    num_threads: int  # of torch, within a pass
    load_average: float  # of the minute before: other work makes every figure worse
    gpu: str | None
    dtype: str
    versions: dict[str, str]
    models: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of a table: all rounds of a contender at one concurrency. Seconds; tokens/s."""

    contender: str
    workload: str
    concurrency: int
    rate: float  # median over rounds
    slowest: float
    fastest: float
    first_token: float  # median over requests
    p50: float  # latency
    p95: float
    peak_bytes: int


def look_around(dtype: torch.dtype, models: dict[str, str]) -> Surroundings:
    """Returns the surroundings of a run that begins now.

    Args:
        dtype: Of all weights.
        models: Names or folders, by role.
    """
    return Surroundings(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        processor=_processor(),
        cpu_count=os.cpu_count() or 1,
        num_threads=torch.get_num_threads(),
        load_average=os.getloadavg()[0],
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        dtype=str(dtype).removeprefix("torch."),
        versions={"python": platform.python_version(), **dict(_versions())},
        models=models,
    )


def write_report(
    folder: Path, config: BenchConfig, surroundings: Surroundings, results: BenchResults
) -> list[Path]:
    """Writes what has been measured; returns the files. Without matplotlib there is no plot."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = summarize(results.samples)
    values = {
        "surroundings": asdict(surroundings),
        "config": asdict(config),
        "rows": [asdict(row) for row in rows],
        **asdict(results),
    }
    json_path, table_path = folder / JSON_FILE, folder / TABLE_FILE
    json_path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    table_path.write_text(render(config, surroundings, results), encoding="utf-8")
    plot_path = plot_frontier(rows, results.qualities, folder / PLOT_FILE)
    return [json_path, table_path, *([plot_path] if plot_path else [])]


def summarize(samples: Iterable[Sample]) -> list[Row]:
    """Returns a row for each contender, workload and concurrency, in the order of the samples."""
    groups: dict[tuple[str, str, int], list[Sample]] = {}
    for sample in samples:
        key = (sample.contender, sample.workload, sample.concurrency)
        groups.setdefault(key, []).append(sample)
    rows = []
    for (contender, workload, concurrency), group in groups.items():
        rates = [sample.tokens / sample.seconds for sample in group]
        latencies = [seconds for sample in group for seconds in sample.latencies]
        first = [seconds for sample in group for seconds in sample.first_token_seconds]
        rows.append(
            Row(
                contender=contender,
                workload=workload,
                concurrency=concurrency,
                rate=statistics.median(rates),
                slowest=min(rates),
                fastest=max(rates),
                first_token=statistics.median(first),
                p50=percentile(latencies, 0.5),
                p95=percentile(latencies, 0.95),
                peak_bytes=max(sample.peak_bytes for sample in group),
            )
        )
    return rows


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the least value that at least `share` of all do not exceed (nearest rank)."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def render(config: BenchConfig, surroundings: Surroundings, results: BenchResults) -> str:
    """Returns the tables as Markdown."""
    lines = [f"# clover bench, {surroundings.date}", "", *_describe(surroundings), ""]
    lines.append(
        f"{config.num_items} held-out items a workload ({', '.join(config.families)}), greedy, at most "
        f"{config.max_tokens} tokens; medians of {config.repeats} rounds, slowest and fastest beside "
        "them. Texts of the engine are those of the plain loop, and of `exact` and `prompt_lookup` those "
        "of `autoregressive`."
    )
    if not results.is_complete:
        lines += ["", "**Interrupted: this is what was finished.**"]
    rows = summarize(results.samples)
    qualities = {(each.contender, each.workload): each for each in results.qualities}
    for workload, concurrency in dict.fromkeys((row.workload, row.concurrency) for row in rows):
        part = [row for row in rows if (row.workload, row.concurrency) == (workload, concurrency)]
        lines += [
            "",
            f"## {workload} answers, concurrency {concurrency}",
            "",
            *_table(part, qualities),
        ]
    if results.traces:
        lines += ["", f"## {config.num_turns} turns of an agent", "", *_trace_table(results.traces)]
    return "\n".join(lines) + "\n"


def plot_frontier(rows: Sequence[Row], qualities: Sequence[Quality], path: Path) -> Path | None:
    """Draws accuracy over tokens/s at the least concurrency, a panel per workload.

    Returns the path; None if nothing is timed yet or there is no matplotlib.
    """
    if not rows:
        return None
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    right = {(each.contender, each.workload): 100 * each.correct / each.items for each in qualities}
    concurrency = min(row.concurrency for row in rows)
    workloads = list(dict.fromkeys(row.workload for row in rows))
    figure = Figure(figsize=(6 * len(workloads), 4.5), layout="constrained")
    panels = figure.subplots(1, len(workloads), sharey=True, squeeze=False)[0]
    for panel, workload in zip(panels, workloads, strict=True):
        for row in rows:
            if (row.workload, row.concurrency) == (workload, concurrency):
                spread = [[row.rate - row.slowest], [row.fastest - row.rate]]
                accuracy = right[row.contender, workload]
                panel.errorbar(row.rate, accuracy, xerr=spread, fmt="o", label=row.contender)
        panel.set_title(f"{workload} answers, concurrency {concurrency}")
        panel.set_xlabel("tokens/s (median; bars: slowest and fastest round)")
        panel.set_ylabel("right answers, %")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    return path


def _describe(surroundings: Surroundings) -> list[str]:
    device = surroundings.gpu or "CPU"
    models = ", ".join(f"{role}: {name}" for role, name in surroundings.models.items())
    versions = ", ".join(f"{name} {version}" for name, version in surroundings.versions.items())
    return [
        f"- {device}, {surroundings.dtype}; {surroundings.processor}, {surroundings.cpu_count} CPUs, "
        f"{surroundings.num_threads} threads, load average {surroundings.load_average:.2f} before",
        f"- {models}",
        f"- {versions}",
    ]


def _table(rows: Sequence[Row], qualities: dict[tuple[str, str], Quality]) -> list[str]:
    """Returns the lines of one workload at one concurrency."""
    lines = [
        "| contender | tokens/s | slowest..fastest | against the first | TPF | right, % | parent's text, % "
        "| first token, ms | p50, ms | p95, ms | experts a pass | peak memory, MiB |",
        "|---|" + "---:|" * 11,
    ]
    for row in rows:
        quality = qualities[row.contender, row.workload]
        experts = quality.experts_per_pass
        cells = [
            row.contender,
            f"{row.rate:.1f}",
            f"{row.slowest:.1f}..{row.fastest:.1f}",
            f"{row.rate / rows[0].rate:.2f}",
            _tpf(quality),
            f"{100 * quality.correct / quality.items:.1f}",
            f"{100 * quality.same_text / quality.items:.1f}",
            f"{1e3 * row.first_token:.1f}",
            f"{1e3 * row.p50:.0f}",
            f"{1e3 * row.p95:.0f}",
            "" if experts is None else f"{experts:.1f}",
            f"{row.peak_bytes / 2**20:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _tpf(quality: Quality) -> str:
    if quality.tpf_with_drafter is None:
        return f"{quality.tpf:.2f}"
    return f"{quality.tpf:.2f} ({quality.tpf_with_drafter:.2f} with the drafter's)"


def _trace_table(traces: Sequence[TraceSample]) -> list[str]:
    """Returns the lines on turns after the first: of those a prefix cache knows the beginning."""
    lines = [
        "| contender | first token without a prefix cache, ms | with it, ms | times shorter |",
        "|---|---:|---:|---:|",
    ]
    for contender in dict.fromkeys(trace.contender for trace in traces):
        without, with_cache = (
            statistics.median(
                seconds
                for trace in traces
                if (trace.contender, trace.has_prefix_cache) == (contender, has_cache)
                for seconds in trace.first_token_seconds[1:]
            )
            for has_cache in (False, True)
        )
        lines.append(
            f"| {contender} | {1e3 * without:.1f} | {1e3 * with_cache:.1f} "
            f"| {without / with_cache:.2f} |"
        )
    return lines


def _processor() -> str:
    """Returns the processor's name; on Linux the kernel has a better one than Python."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions() -> Iterable[tuple[str, str]]:
    """Yields names and versions of the packages that are installed."""
    for name in _PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
