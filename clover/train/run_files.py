"""What a run leaves beside its weights: metrics.jsonl, an event a line, and run.json, its origin."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import clover
from clover.errors import TrainingInputError
from clover.train import parallel
from clover.train.events import EvalEvent, SaveEvent, StepEvent, SummaryEvent, TrainEvent

METRICS_FILE = "metrics.jsonl"
RUN_FILE = "run.json"

_KINDS: Mapping[type, str] = {
    StepEvent: "step",
    EvalEvent: "eval",
    SaveEvent: "save",
    SummaryEvent: "summary",
}


class MetricsFile:
    """The events of a run, appended line by line: {"event": "step", "step": 10, "time": ...}."""

    def __init__(self, folder: Path, step: int) -> None:
        """Opens the file of a run that goes on from `step`, its last saved one.

        What a killed run reported of later steps goes: they will be taken, and reported, again.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / METRICS_FILE
        kept = [row for row in read_metrics(folder) if row["step"] <= step] if step else []
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text("".join(map(_to_line, kept)), encoding="utf-8")
        temporary.replace(self._path)

    def write(self, event: TrainEvent) -> None:
        """Appends an event with the time of day, in seconds since 1970."""
        row = {"event": _KINDS[type(event)], "time": round(time.time(), 3)} | asdict(event)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_to_line(row))


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Returns the events of a run, none if it has no file. A line cut by a kill is left out.

    Raises:
        TrainingInputError: A line that is not the last is damaged.
    """
    path = folder / METRICS_FILE
    if not path.is_file():
        return []
    text, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    try:
        return [json.loads(line) for line in text.splitlines()]
    except ValueError as error:
        raise TrainingInputError(f"{path} is damaged ({error}): move it away to go on") from error


def write_run_file(
    folder: Path, *, config: Mapping[str, Any], model: Mapping[str, Any], step: int
) -> None:
    """Writes a run's configuration, and adds this start of it to the list of its starts.

    Args:
        folder: Of the run.
        config: Of the training; paths in it are written as text.
        model: The model's config.json.
        step: From which the run goes on; 0 begins a new list.
    """
    path = folder / RUN_FILE
    folder.mkdir(parents=True, exist_ok=True)
    earlier = json.loads(path.read_text())["starts"] if step and path.is_file() else []
    start = {
        "step": step,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": sys.argv,
        "git_commit": git_commit(),
        "clover": clover.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "num_processes": parallel.world_size(),
    }
    values = {"seed": config["seed"], "config": config, "model": model}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(values | {"starts": [*earlier, start]}, indent=2, default=str))
    os.replace(temporary, path)


def git_commit() -> str | None:
    """Returns the commit of the running code, "-dirty" behind it if files differ from it.

    None if the code is not tracked by a repository: installed, say, into a folder inside another.
    """
    package = Path(clover.__file__)
    is_tracked = _git(package.parent, "ls-files", "--error-unmatch", package.name) is not None
    describe = ("describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
    return _git(package.parent, *describe) if is_tracked else None


def _git(folder: Path, *arguments: str) -> str | None:
    """Returns what git prints, None if it fails or there is no git."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _to_line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, default=str) + "\n"
