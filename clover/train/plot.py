"""The curves of a run. The one file of the package that imports matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clover.errors import TrainingError, TrainingInputError
from clover.train.run_files import METRICS_FILE, read_metrics

PLOT_FILE = "curves.png"

_Rows = Sequence[Mapping[str, Any]]
_Curves = dict[str, tuple[list[int], list[float]]]


def plot_run(folder: Path, path: Path | None = None) -> Path:
    """Draws losses, evaluations, gradient norm and speed over steps; returns the image's path.

    Args:
        folder: Of the run.
        path: The image, in any format that matplotlib writes; by default curves.png in the folder.

    Raises:
        TrainingError: There is no matplotlib, or (TrainingInputError) the run has reported no step.
    """
    curves = read_curves(folder)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TrainingError(
            "drawing curves needs matplotlib, which is not installed: pip install 'clover[plot]'"
        ) from error
    figure = Figure(figsize=(10, 7), layout="constrained")
    figure.suptitle(str(folder))
    for axes, (title, lines) in zip(figure.subplots(2, 2).flat, curves.items(), strict=True):
        axes.set_title(title)
        axes.set_xlabel("step")
        for name, (steps, values) in lines.items():
            marker = "o" if len(steps) == 1 else None
            axes.plot(steps, values, label=name, marker=marker)
        if lines:
            axes.legend()
    path = path or folder / PLOT_FILE
    figure.savefig(path, dpi=120)
    return path


def read_curves(folder: Path) -> dict[str, _Curves]:
    """Returns what is drawn: title -> name of the curve -> steps and values.

    Raises:
        TrainingInputError: The run has reported no step.
    """
    rows = read_metrics(folder)
    steps = [row for row in rows if row["event"] == "step"]
    evaluations = [row for row in rows if row["event"] == "eval"]
    if not steps:
        raise TrainingInputError(
            f"{folder}: expected a run with steps in {METRICS_FILE}, found none"
        )
    losses = _curves(steps, lambda row: row["losses"])
    losses |= _curves(evaluations, lambda row: {f"{row['name']} (eval)": row["result"]["loss"]})
    return {
        "loss (nats per token)": losses,
        "exact replies": _curves(evaluations, lambda row: {row["name"]: row["result"]["exact"]}),
        "gradient norm": _curves(steps, lambda row: {"before clipping": row["grad_norm"]}),
        "tokens/s": _curves(steps, lambda row: {"all processes": row["tokens_per_second"]}),
    }


def _curves(rows: _Rows, values_of: Callable[[Mapping[str, Any]], Mapping[str, float]]) -> _Curves:
    curves: _Curves = {}
    for row in rows:
        for name, value in values_of(row).items():
            steps, values = curves.setdefault(name, ([], []))
            steps.append(row["step"])
            values.append(value)
    return curves
