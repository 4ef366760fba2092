"""Training runs for the command line: what is trained on what, and a line for every event."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from clover.checkpoint.load import load_checkpoint, resolve_checkpoint, save_model
from clover.diffusion.objective import ObjectiveConfig
from clover.errors import RequestError
from clover.train.data import ChatFileSource, DocumentEncoder
from clover.train.optimizer import OptimizerConfig
from clover.train.state import STATE_FILE
from clover.train.trainer import (
    EvalEvent,
    SaveEvent,
    StepEvent,
    SummaryEvent,
    TrainConfig,
    TrainEvent,
    train,
)

MODEL_FOLDER = "model"


def train_on_chats(
    model: str,
    data: Path,
    out: Path,
    *,
    objective: str | None,
    learning_rate: float,
    device: torch.device,
    notes: Console,
    **fields: Any,
) -> SummaryEvent:
    """Trains a checkpoint on a file of chats, or goes on with the run that `out` holds.

    The trained model is in `out/model` at the end. `fields` are those of TrainConfig.
    """
    checkpoint = load_checkpoint(resolve_checkpoint(model), device=device)
    diffusion = checkpoint.config.diffusion
    config = TrainConfig(
        objective=_choose_objective(objective, is_clover=diffusion is not None),
        optimizer=OptimizerConfig(learning_rate=learning_rate),
        losses=ObjectiveConfig(shift_logits=diffusion.shift_logits if diffusion else True),
        out=out,
        **fields,
    )
    encoder = DocumentEncoder(checkpoint.tokenizer, checkpoint.template)
    summary = train(
        checkpoint.model,
        config,
        ChatFileSource(data, encoder, seed=config.seed),
        on_event=_printer(notes),
        resume=(out / STATE_FILE).is_file(),
    )
    if summary.is_finished:
        save_model(
            checkpoint.model,
            out / MODEL_FOLDER,
            dtype=torch.bfloat16,
            files_from=checkpoint.folder,
            overwrite=True,
        )
    return summary


def run_recipe(name: str, out: Path, notes: Console) -> None:
    """Runs one stage of a recipe inside `out`, or goes on with it."""
    from recipes import nano

    stages = {f"nano.{stage}": stage for stage in nano.STAGES}
    if name not in stages:
        raise RequestError(f"recipe is {name!r}; allowed: {', '.join(stages)}")
    nano.run(stages[name], out, _printer(notes))


def _printer(notes: Console) -> Callable[[TrainEvent], None]:
    """Returns what prints a line per event; a long line is left to the terminal to wrap."""
    return lambda event: notes.print(describe(event), markup=False, highlight=False, soft_wrap=True)


def _choose_objective(asked: str | None, *, is_clover: bool) -> Literal["ar", "two_stream"]:
    match asked:
        case "ar" | "two_stream":
            return asked
        case None:
            return "two_stream" if is_clover else "ar"
    raise RequestError(f"objective is {asked!r}; allowed: ar, two_stream")


def describe(event: TrainEvent) -> str:
    """Returns the line that tells of an event."""
    match event:
        case StepEvent(losses=losses):
            parts = " ".join(f"{name} {value:.4f}" for name, value in losses.items())
            return (
                f"step {event.step}: {parts}, gradient {event.grad_norm:.2f}, "
                f"rate {event.learning_rate:.2e}, {event.tokens_per_second:.0f} tokens/s"
            )
        case EvalEvent(result=result):
            return (
                f"step {event.step}: {event.name}: loss {result.loss:.4f}, exact {result.exact:.1%}"
            )
        case SaveEvent():
            return f"step {event.step}: saved {event.path}"
        case SummaryEvent():
            return summary_line(event)


def summary_line(event: SummaryEvent) -> str:
    """Returns a run's closing line."""
    state = "finished" if event.is_finished else "stopped, its state saved"
    return (
        f"{state} at step {event.step}: {event.tokens} tokens, {event.seconds:.1f} s, "
        f"{event.tokens_per_second:.0f} tokens/s, "
        f"peak memory {event.peak_memory_bytes / 2**20:.0f} MiB"
    )
