"""What finished runs scored: one JSON line each in `results.jsonl`."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from clover.train.answers import FamilyScore
from clover.train.preview_quality import PreviewScore

RESULTS_FILE: Final = "results.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class HistorySlot:
    """The learned numbers of one GDN layer, a value head each."""

    layer: int
    tau: Sequence[float]
    b: Sequence[float]
    c: Sequence[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitResult:
    """Scores on one split of the tasks.

    Attributes:
        ar_loss: Next-token loss of the clean stream over replies, nats per token.
        ar_exact: Share of the documents whose every reply token is the most likely one.
        previews: By block size and share of masks.
        answers: By policy, one score per family and one for "all".
    """

    ar_loss: float
    ar_exact: float
    previews: Sequence[PreviewScore]
    answers: Mapping[str, Sequence[FamilyScore]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One finished run. `tokens` were trained on, of the clean stream, padding counted."""

    variant: str
    seed: int
    tokens: int
    git_commit: str | None
    splits: Mapping[str, SplitResult]
    history_slots: Sequence[HistorySlot]


def append_result(folder: Path, result: Result) -> None:
    """Adds a line. Several processes may do so; a line that a killed one left cut is taken away."""
    line = json.dumps(asdict(result)).encode() + b"\n"
    with (folder / RESULTS_FILE).open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def read_results(folder: Path) -> list[Result]:
    """Returns all results, none if there is no file yet. A line that was cut is left out."""
    path = folder / RESULTS_FILE
    if not path.is_file():
        return []
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [_parse(json.loads(line)) for line in whole.splitlines()]


def _parse(values: dict[str, Any]) -> Result:
    splits = {name: _parse_split(split) for name, split in values.pop("splits").items()}
    slots = [HistorySlot(**slot) for slot in values.pop("history_slots")]
    return Result(splits=splits, history_slots=slots, **values)


def _parse_split(values: dict[str, Any]) -> SplitResult:
    previews = [PreviewScore(**score) for score in values.pop("previews")]
    answers = {
        policy: [FamilyScore(**score) for score in scores]
        for policy, scores in values.pop("answers").items()
    }
    return SplitResult(previews=previews, answers=answers, **values)
