"""What a training run reports while it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clover.train.evaluation import EvalResult


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEvent:
    """Means over the steps since the last such event. `step` counts finished ones of `num_steps`."""

    step: int
    num_steps: int
    losses: Mapping[str, float]
    learning_rate: float
    grad_norm: float
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalEvent:
    """An evaluation of one validation set."""

    step: int
    name: str
    result: EvalResult


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveEvent:
    """The run's state was written."""

    step: int
    path: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class SummaryEvent:
    """The run's end, or its interruption. Tokens and seconds since it was last started."""

    step: int
    is_finished: bool
    tokens: int
    seconds: float
    tokens_per_second: float
    peak_memory_bytes: int


TrainEvent = StepEvent | EvalEvent | SaveEvent | SummaryEvent
