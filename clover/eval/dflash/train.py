"""Training a drafter beside its frozen parent. A run may be killed and goes on where it was saved.

A block is an anchor, any token whose successor is to be written, and the tokens behind it, which are
all to be guessed from the features of what is left of the anchor. Source: as for `model.py`.

B rows, T tokens in a row, M blocks of n tokens in a row, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from clover.diffusion.noise import counter_generator
from clover.diffusion.objective import ar_weights, weighted_cross_entropy
from clover.errors import ConfigError, TrainingError, TrainingInputError
from clover.eval.dflash.model import Drafter, check_parent, record_features
from clover.model.streams import two_stream_streams
from clover.model.transformer import CloverForCausalLM
from clover.train import parallel
from clover.train.data import DocumentSource
from clover.train.events import SaveEvent, StepEvent, SummaryEvent, TrainEvent
from clover.train.optimizer import OptimizerConfig, Optimizers
from clover.train.packing import Batch, Packer, PackerState
from clover.train.precision import training_precision
from clover.train.run_files import MetricsFile, write_run_file
from clover.train.state import SavedState, load_state, save_state
from clover.train.trainer import peak_memory_bytes, stop_on_signal

_FREE_FIELDS = frozenset({"out", "log_every", "save_every"})


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterTraining:
    """One run, complete.

    Attributes:
        num_blocks: Blocks in a row, their anchors drawn anew in every step.
        position_decay: Weights fall by e over so many positions of a block: behind a wrong token
            nothing counts. The paper has 7 for blocks of 16, 5 for 10 and 4 for 8.
        decay_fraction: Of the steps, at the end, in which the learning rate falls to 0.
        out: The run's folder.
    """

    steps: int
    out: Path
    num_rows: int = 8
    row_length: int = 384
    num_blocks: int = 16
    position_decay: float = 7.0
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(learning_rate=4e-3, weight_decay=0.05)
    )
    warmup_steps: int = 50
    decay_fraction: float = 0.3
    max_grad_norm: float = 1.0
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: int = 0
    log_every: int = 10
    save_every: int = 100

    def __post_init__(self) -> None:
        least = {"steps": 1, "num_rows": 1, "row_length": 2, "num_blocks": 1, "warmup_steps": 0}
        least |= {"log_every": 1, "save_every": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(f"{name} is {getattr(self, name)}; allowed: {low} or more")
        if self.num_blocks > self.row_length:
            raise ConfigError(
                f"num_blocks is {self.num_blocks}; allowed: up to row_length, {self.row_length}"
            )
        for name in ("position_decay", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; allowed: above 0")
        if not 0.0 <= self.decay_fraction <= 1.0:
            raise ConfigError(f"decay_fraction is {self.decay_fraction}; allowed: 0 to 1")

    def learning_rate_factor(self, step: int) -> float:
        """Returns a step's (from 0) share of the peak: up, constant, and linearly down to 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return min(1.0, (self.steps - step) / max(1.0, self.decay_fraction * self.steps))


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftBlocks:
    """What a step learns. Unused slots have weight 0 everywhere."""

    anchors: Tensor  # [B, M] index in the row, -1: unused
    targets: Tensor  # [B, M, n - 1] the tokens behind the anchor
    weights: Tensor  # [B, M, n - 1], 0 behind the document's end


def draw_blocks(
    batch: Batch, *, num_blocks: int, block_size: int, decay: float, generator: torch.Generator
) -> DraftBlocks:
    """Returns blocks at random anchors, each token before a response's token equally likely.

    Args:
        batch: Packed rows of at least `num_blocks` tokens.
        num_blocks: M; a row with fewer anchors has unused slots.
        block_size: n.
        decay: Positions over which a weight falls by e.
        generator: A CPU generator, the only source of randomness.
    """
    document_ids, input_ids = batch.document_ids, batch.input_ids
    is_anchor = ar_weights(document_ids, batch.is_response, 0.0) > 0  # [B, T]
    draws = torch.rand(is_anchor.shape, generator=generator).to(is_anchor.device)
    best = draws.masked_fill(~is_anchor, -1.0).topk(num_blocks, dim=1)
    anchors = best.indices.masked_fill(best.values < 0, -1)  # [B, M]
    offsets = torch.arange(1, block_size, device=input_ids.device)
    positions = anchors.clamp(min=0).unsqueeze(-1) + offsets  # [B, M, n - 1]
    index = positions.clamp(max=input_ids.shape[1] - 1).flatten(1)
    own = document_ids.gather(1, anchors.clamp(min=0)).unsqueeze(-1)  # [B, M, 1]
    is_inside = (positions < input_ids.shape[1]) & (
        document_ids.gather(1, index).view_as(positions) == own
    )
    is_inside &= (anchors >= 0).unsqueeze(-1)
    return DraftBlocks(
        anchors=anchors,
        targets=input_ids.gather(1, index).view_as(positions),
        weights=is_inside * torch.exp(-(offsets - 1) / decay),
    )


def draft_logits(
    parent: CloverForCausalLM, drafter: Drafter, batch: Batch, blocks: DraftBlocks
) -> Tensor:
    """Returns the logits of every masked token, [B, M, n - 1, V]. Only the drafter has gradients."""
    input_ids, anchors = batch.input_ids, blocks.anchors
    with torch.no_grad(), record_features(parent, drafter.config.feature_layers) as features:
        parent(input_ids, document_ids=batch.document_ids)
    # A noised block of two-stream training sees just what a draft does: itself and all before it
    canvas = anchors.unsqueeze(-1).expand(-1, -1, drafter.config.block_size)
    streams = two_stream_streams(input_ids, batch.document_ids, canvas, anchors)
    assert streams.attention_mask is not None
    first_tokens = input_ids.gather(1, anchors.clamp(min=0))
    hidden_states = drafter(
        features[0],
        parent.model.embed_tokens(first_tokens).detach(),
        drafter.config.block_size - 1,
        streams.position_ids,
        mask=streams.attention_mask[:, :, input_ids.shape[1] :],
    )
    return parent.logits(hidden_states)


def train_drafter(
    drafter: Drafter,
    parent: CloverForCausalLM,
    config: DrafterTraining,
    source: DocumentSource,
    *,
    on_event: Callable[[TrainEvent], None],
    resume: bool = False,
) -> SummaryEvent:
    """Trains a drafter in place; returns the closing summary, which is also the last event.

    Several processes of `torchrun` share a step's rows. SIGINT and SIGTERM end the run after the
    current step, with its state saved. Beside the loss, a step's event has `agreed`: tokens that a
    draft has right before its first wrong one, by teacher forcing.

    Args:
        drafter: Weights in fp32.
        parent: Frozen here; of the same device.
        config: The run.
        source: Training documents.
        on_event: Is told of everything, in order.
        resume: Goes on from the state in `config.out`.

    Raises:
        TrainingError: The loss is not finite, or the saved state is of another run.
    """
    check_parent(drafter.config, parent)
    parent.requires_grad_(False).eval()
    run = _Run(drafter, parent, config, source, on_event)
    if resume:
        run.load()
    run.keep_record()
    with training_precision(config.precision, parent.device), stop_on_signal() as is_stopped:
        return run.loop(is_stopped)


class _Run:
    """A run's moving parts, from one step to the next."""

    def __init__(
        self,
        drafter: Drafter,
        parent: CloverForCausalLM,
        config: DrafterTraining,
        source: DocumentSource,
        on_event: Callable[[TrainEvent], None],
    ) -> None:
        self.drafter, self.parent, self.config, self.source = drafter, parent, config, source
        self.on_event = on_event if parallel.rank() == 0 else lambda event: None
        self.optimizers = Optimizers(drafter, config.optimizer)
        self.step = 0
        self.data_state = PackerState()
        self.started = self.logged = time.monotonic()
        self.tokens = self.tokens_logged = 0

    def loop(self, is_stopped: Callable[[], bool]) -> SummaryEvent:
        """Steps until the end or a signal, which all processes hear of with the losses."""
        config = self.config
        packer = Packer(
            self.source,
            num_rows=config.num_rows,
            row_length=config.row_length,
            pad_token_id=self.parent.config.pad_token_id or 0,
            state=self.data_state,
        )
        rows: list[Tensor] = []
        stop = False
        while self.step < config.steps and not stop:
            batch = packer.next_batch().to(self.parent.device)
            values, norm = self._take_step(batch, wants_stop=is_stopped())
            self.data_state = packer.state
            rows.append(values[:2])
            stop = bool(values[2] > 0)
            if self.step % config.log_every == 0 or self.step == config.steps or stop:
                self._log(rows, norm)
                rows = []
            if self.step % config.save_every == 0 or self.step == config.steps or stop:
                self._save()
        seconds = max(time.monotonic() - self.started, 1e-9)
        summary = SummaryEvent(
            step=self.step,
            is_finished=self.step >= config.steps,
            tokens=self.tokens,
            seconds=seconds,
            tokens_per_second=self.tokens / seconds,
            peak_memory_bytes=peak_memory_bytes(),
        )
        self.on_event(summary)
        return summary

    def load(self) -> None:
        """Takes over drafter, optimizers and counters from the run's folder."""
        state = load_state(self.config.out)
        saved, current = state.progress["config"], _config_to_json(self.config, self.drafter)
        changed = [
            f"{name} was {saved.get(name)!r}, is {current.get(name)!r}"
            for name in sorted({*saved, *current})
            if saved.get(name) != current.get(name)
        ]
        if changed:
            raise TrainingInputError(
                f"the saved state is of another run: {'; '.join(changed)}; give the same options, "
                "or another folder"
            )
        self.drafter.load_state_dict(dict(state.model))
        device = self.parent.device
        self.optimizers.load_state_tensors(
            {name: tensor.to(device) for name, tensor in state.optimizer.items()}
        )
        self.step = state.progress["step"]
        data = state.progress["data"]
        self.data_state = PackerState(**data | {"waiting": tuple(data["waiting"])})

    def keep_record(self) -> None:
        """Writes run.json, and from now on every event to metrics.jsonl."""
        if parallel.rank() != 0:
            return
        on_event = self.on_event
        metrics = MetricsFile(self.config.out, self.step)
        write_run_file(
            self.config.out,
            config=asdict(self.config),
            model=asdict(self.drafter.config),
            step=self.step,
        )

        def record(event: TrainEvent) -> None:
            metrics.write(event)
            on_event(event)

        self.on_event = record

    def _take_step(self, batch: Batch, *, wants_stop: bool) -> tuple[Tensor, float]:
        """Updates the weights; returns [loss, agreed, whether to stop] of all rows, and the norm."""
        config, share = self.config, (parallel.rank(), parallel.world_size())
        whole = draw_blocks(
            batch,
            num_blocks=config.num_blocks,
            block_size=self.drafter.config.block_size,
            decay=config.position_decay,
            generator=counter_generator(config.seed, self.step, "anchors"),
        )
        rows = slice(share[0], None, share[1])
        blocks = DraftBlocks(
            anchors=whole.anchors[rows], targets=whole.targets[rows], weights=whole.weights[rows]
        )
        self.drafter.train()
        logits = draft_logits(self.parent, self.drafter, batch.share(*share), blocks)
        loss = weighted_cross_entropy(
            logits, blocks.targets, blocks.weights, parallel.mean_over_processes
        )
        agreed = mean_agreed(logits, blocks)
        wish = loss.new_tensor(float(wants_stop))
        values = parallel.mean_over_processes(torch.stack([loss.detach(), agreed, wish])).cpu()
        if not math.isfinite(values[0]):
            raise TrainingError(
                f"the loss of step {self.step} is {values[0]}: lower the learning rate or resume "
                "from the last saved state"
            )
        loss.backward()
        parameters = list(self.drafter.parameters())
        parallel.average_gradients(parameters)
        norm = parallel.clip_gradients(parameters, config.max_grad_norm)
        self.optimizers.step(config.learning_rate_factor(self.step))
        self.step += 1
        self.tokens += batch.num_tokens
        return values, norm

    def _log(self, rows: list[Tensor], norm: float) -> None:
        now = time.monotonic()
        loss, agreed = torch.stack(rows).mean(dim=0).tolist()
        factor = self.config.learning_rate_factor(self.step - 1)
        event = StepEvent(
            step=self.step,
            num_steps=self.config.steps,
            losses={"total": loss, "agreed": agreed},
            learning_rate=factor * self.config.optimizer.learning_rate,
            grad_norm=norm,
            tokens_per_second=(self.tokens - self.tokens_logged) / max(now - self.logged, 1e-9),
        )
        self.logged, self.tokens_logged = now, self.tokens
        self.on_event(event)

    def _save(self) -> None:
        if parallel.rank() != 0:
            return
        state = SavedState(
            model={name: weight.detach() for name, weight in self.drafter.named_parameters()},
            optimizer=self.optimizers.state_tensors(),
            progress={
                "step": self.step,
                "data": asdict(self.data_state),
                "config": _config_to_json(self.config, self.drafter),
            },
        )
        path = save_state(self.config.out, state)
        self.on_event(SaveEvent(step=self.step, path=path))


@torch.no_grad()
def mean_agreed(logits: Tensor, blocks: DraftBlocks) -> Tensor:
    """Returns how many tokens of a draft are right before the first wrong one, a mean over blocks.

    With several processes their results' mean is the mean over the blocks of all.

    Args:
        logits: [B, M, n - 1, V].
        blocks: What they predict. A document's end ends its last draft.
    """
    is_right = (logits.argmax(dim=-1) == blocks.targets) & (blocks.weights > 0)
    num_blocks = parallel.mean_over_processes((blocks.anchors >= 0).sum().float())
    return is_right.cumprod(dim=-1).sum() / num_blocks.clamp(min=1)


def _config_to_json(config: DrafterTraining, drafter: Drafter) -> Mapping[str, Any]:
    """Returns what decides what is learned, as JSON values: the run's fields and the drafter's."""
    values = {name: value for name, value in asdict(config).items() if name not in _FREE_FIELDS}
    values["optimizer"]["betas"] = list(config.optimizer.betas)
    shape = asdict(drafter.config) | {"feature_layers": list(drafter.config.feature_layers)}
    return values | {"drafter": shape}
