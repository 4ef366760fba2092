"""Training runs for the command line: what is trained on what, and how a run is watched."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from clover.chat import ChatTemplate
from clover.checkpoint.load import load_model, read_full_config, resolve_checkpoint
from clover.diffusion.objective import ObjectiveConfig
from clover.errors import RequestError
from clover.tokenizer import Tokenizer
from clover.train import parallel
from clover.train.data import ChatFileSource, DocumentEncoder
from clover.train.events import EvalEvent, SaveEvent, StepEvent, SummaryEvent, TrainEvent
from clover.train.optimizer import OptimizerConfig
from clover.train.precision import choose_precision
from clover.train.state import has_state
from clover.train.trainer import TrainConfig, train

MODEL_FOLDER = "model"


def train_on_chats(
    model: str,
    data: Path,
    out: Path,
    *,
    objective: str | None,
    parallelism: str,
    learning_rate: float,
    device: torch.device,
    notes: Console,
    **fields: Any,
) -> SummaryEvent:
    """Trains a checkpoint on a file of chats, or goes on with the run that `out` holds.

    The trained model is in `out/model` at the end. `fields` are those of TrainConfig.
    """
    folder = resolve_checkpoint(model)
    diffusion = read_full_config(folder).diffusion
    config = TrainConfig(
        objective=_choose_objective(objective, is_clover=diffusion is not None),
        parallelism=_choose_parallelism(parallelism),
        optimizer=OptimizerConfig(learning_rate=learning_rate),
        losses=ObjectiveConfig(shift_logits=diffusion.shift_logits if diffusion else True),
        out=out,
        **fields,
    )
    encoder = DocumentEncoder(Tokenizer.load(folder), ChatTemplate.load(folder))
    with parallel.process_group(), watch(notes) as on_event:
        source = ChatFileSource(data, encoder, seed=config.seed)
        if config.parallelism == "fsdp":
            precision = choose_precision(config.precision, device)
            weights = parallel.load_sharded(folder, precision=precision, device=device)
        else:
            weights = load_model(folder, device=device)
        summary = train(weights, config, source, on_event=on_event, resume=has_state(out))
        if summary.is_finished:
            parallel.save_whole(
                weights,
                out / MODEL_FOLDER,
                dtype=torch.bfloat16,
                files_from=folder,
                overwrite=True,
            )
    return summary


def run_recipe(name: str, out: Path, notes: Console) -> None:
    """Runs one stage of a recipe inside `out`, or goes on with it."""
    from recipes import nano

    stages = {f"nano.{stage}": stage for stage in nano.STAGES}
    if name not in stages:
        raise RequestError(f"recipe is {name!r}; allowed: {', '.join(stages)}")
    with parallel.process_group(), watch(notes) as on_event:
        nano.run(stages[name], out, on_event)


@contextmanager
def watch(notes: Console) -> Iterator[Callable[[TrainEvent], None]]:
    """Gives what shows events: a bar of the steps in a terminal, elsewhere a line per event."""

    def tell(event: TrainEvent) -> None:
        notes.print(describe(event), markup=False, highlight=False, soft_wrap=True)

    if not notes.is_terminal:
        yield tell
        return
    columns = (
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=notes, transient=True) as bar:
        yield _Bar(bar, tell)


class _Bar:
    """A progress bar that starts where the run does; the rest is told above it."""

    def __init__(self, bar: Progress, tell: Callable[[TrainEvent], None]) -> None:
        self._bar, self._tell = bar, tell
        self._task = TaskID(0)
        self._first: tuple[int, float] | None = None  # step and time of the first event

    def __call__(self, event: TrainEvent) -> None:
        """Shows an event."""
        if not isinstance(event, StepEvent):
            self._tell(event)
            return
        status = f"loss {event.losses['total']:.4f}, {event.tokens_per_second:.0f} tokens/s"
        if self._first is None:  # the steps of an earlier start must not count as speed
            self._first = event.step, time.monotonic()
            self._task = self._bar.add_task(status, total=event.num_steps)
        elif event.step > self._first[0]:
            # Over the whole run: evaluations and saves belong to the time that is left, too
            pace = (time.monotonic() - self._first[1]) / (event.step - self._first[0])
            left = timedelta(seconds=round(pace * (event.num_steps - event.step)))
            status += f", {left} left"
        self._bar.update(self._task, description=status, completed=event.step)


def _choose_parallelism(asked: str) -> parallel.Parallelism:
    match asked:
        case "ddp" | "fsdp":
            return asked
    raise RequestError(f"parallelism is {asked!r}; allowed: ddp, fsdp")


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
