"""The training loop: one model, one config, one source of documents, events out.

The same run, cut anywhere and resumed, ends with the same weights bit for bit (in fp32).
"""

from __future__ import annotations

import math
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor

from clover.config import ModelConfig, MoeConfig, config_to_dict
from clover.diffusion.generate import reserved_token_ids
from clover.diffusion.noise import (
    EditConfig,
    NoisedBlocks,
    Predict,
    add_edits,
    choose_block_size,
    complement,
    counter_generator,
    draw_prefix_lengths,
    noise_blocks,
)
from clover.diffusion.objective import (
    Losses,
    ObjectiveConfig,
    align_canvas_logits,
    ar_loss,
    ar_weights,
    load_balancing_loss,
    on_policy_loss,
    two_stream_loss,
)
from clover.errors import ConfigError, TrainingError, TrainingInputError
from clover.model.moe import Experts, record_router_logits
from clover.model.transformer import CloverForCausalLM
from clover.train import parallel
from clover.train.data import Document, DocumentSource
from clover.train.evaluation import evaluate
from clover.train.events import EvalEvent, SaveEvent, StepEvent, SummaryEvent, TrainEvent
from clover.train.on_policy import (
    OnPolicyConfig,
    choose_canvas_source,
    draw_num_previews,
    preview_blocks,
    write_replies,
)
from clover.train.optimizer import OptimizerConfig, Optimizers, WeightAverage
from clover.train.packing import (
    Batch,
    Blocks,
    Packer,
    PackerState,
    cut_blocks,
    fill_slots,
    share_blocks,
)
from clover.train.parallel import Parallelism
from clover.train.precision import choose_precision, training_precision
from clover.train.run_files import MetricsFile, write_run_file
from clover.train.state import (
    SavedState,
    load_sharded_state,
    load_state,
    save_sharded_state,
    save_state,
)

Validation = Mapping[str, Sequence[Document]]

# Fields that may change when a run is resumed: they do not change what is learned
_FREE_FIELDS = frozenset(
    {"out", "log_every", "eval_every", "save_every", "activation_checkpointing"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """One training run, complete.

    With `ema_decay` above 0, evaluated and finished weights are the moving average of the steps'
    weights, see `WeightAverage`.

    Two-stream only: `block_sizes`, one of them drawn each step; `block_skip_probability`, see
    `draw_skips`; `canvas_length`, canvas tokens beside each row, None for as many as the row has, see
    `fill_slots`; `complementary_masks`, whether canvases come in pairs, the second of which masks
    what the first shows, see `complement`; `all_masks_probability`, of a block that is all masks, which
    is what a draft is made from; `prefix_probability`, of the others, see `draw_prefix_lengths`;
    `min_noise_level`, of the masked share; `edits`, wrong tokens to be repaired; `on_policy`,
    canvases of the model's own decoding; `coreset_anneal_fraction`, see `annealed_coreset_size`.

    `num_token_ids` is the tokenizer's length. Where the model's vocabulary goes on, rows are padding
    and never drawn; it is needed by what draws tokens.

    `precision` is that of matrix products, see `clover.train.precision`; weights are fp32 in any case.

    Scale: `parallelism`, see `clover.train.parallel`; `activation_checkpointing`, see `Decoder`;
    `compile_layers`, by torch.compile. A sharded model has no average and no edits or canvases that
    it draws itself; checkpointing excludes `losses.balance_weight`.
    """

    objective: Literal["ar", "two_stream"]
    steps: int
    num_rows: int = 8
    row_length: int = 512
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    losses: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    warmup_steps: int = 100
    schedule: Literal["cosine", "wsd"] = "wsd"
    decay_fraction: float = 0.3
    max_grad_norm: float = 1.0
    ema_decay: float = 0.0
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    seed: int = 0
    block_sizes: tuple[int, ...] = (8, 16, 32)
    block_skip_probability: float = 0.0
    canvas_length: int | None = None
    complementary_masks: bool = False
    all_masks_probability: float = 0.0
    prefix_probability: float = 0.0
    min_noise_level: float = 0.0
    edits: EditConfig = field(default_factory=EditConfig)
    on_policy: OnPolicyConfig = field(default_factory=OnPolicyConfig)
    coreset_anneal_fraction: float = 0.0
    num_token_ids: int | None = None
    parallelism: Parallelism = "ddp"
    activation_checkpointing: bool = False
    compile_layers: bool = False
    out: Path | None = None
    log_every: int = 10
    eval_every: int = 500
    save_every: int = 500

    def __post_init__(self) -> None:
        """Checks ranges."""
        least = {"steps": 1, "num_rows": 1, "row_length": 2, "warmup_steps": 0}
        least |= {"log_every": 1, "eval_every": 1, "save_every": 1}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                found = getattr(self, name)
                raise ConfigError(f"{name} must be at least {minimum}, found {found}")
        shares = ("decay_fraction", "block_skip_probability", "coreset_anneal_fraction")
        for name in (*shares, "all_masks_probability", "prefix_probability"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} must be in [0, 1], found {getattr(self, name)}")
        if not self.block_sizes or min(self.block_sizes) < 1:
            raise ConfigError(f"block_sizes must be positive numbers, found {self.block_sizes}")
        if not 0.0 <= self.ema_decay < 1.0:
            raise ConfigError(f"ema_decay must be in [0, 1), found {self.ema_decay}")
        if self.objective == "two_stream":
            canvas_length = self.canvas_tokens
            largest = max(self.block_sizes)
            shortest = largest * (2 if self.complementary_masks else 1)
            if canvas_length < shortest:
                raise ConfigError(
                    f"canvas_length must be at least {shortest}, for blocks of {largest} tokens, found "
                    f"{canvas_length}"
                )
        if self.edits.probability > 0 and self.num_token_ids is None:
            raise ConfigError(
                "edits draw tokens: num_token_ids must be set to the tokenizer's length"
            )
        self._check_distillation()
        is_sharded = self.parallelism == "fsdp"
        if is_sharded and self.ema_decay > 0:
            raise ConfigError(
                "ema_decay must be 0 with parallelism 'fsdp': it averages whole models"
            )
        if is_sharded and self.edits.probability > 0 and self.edits.model_share > 0:
            raise ConfigError(
                "edits.model_share must be 0 with parallelism 'fsdp': a preview needs a whole model"
            )
        if self.activation_checkpointing and self.losses.balance_weight > 0:
            raise ConfigError(
                "losses.balance_weight must be 0 with activation_checkpointing: routers that run "
                "twice would be counted twice"
            )
        if not self.max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm must be above 0, found {self.max_grad_norm}")

    def _check_distillation(self) -> None:
        """Checks what a teacher and own canvases need."""
        if self.objective == "ar" and (self.on_policy.is_on or self.losses.needs_parent):
            raise ConfigError(
                "on_policy and a teacher 'parent' need the objective 'two_stream', found 'ar'"
            )
        if self.on_policy.is_on and self.num_token_ids is None:
            raise ConfigError(
                "on_policy places tokens: num_token_ids must be set to the tokenizer's length"
            )
        if self.on_policy.is_on and self.parallelism == "fsdp":
            raise ConfigError(
                "on_policy must be off with parallelism 'fsdp': decoding needs a whole model"
            )
        if self.on_policy.reply_probability > 0 and self.losses.distillation_weight == 0:
            raise ConfigError(
                "losses.distillation_weight must be above 0 with on_policy.reply_probability: the "
                "model's own replies have no other loss"
            )
        if self.on_policy.reply_probability > 0 and self.compile_layers:
            raise ConfigError(
                "compile_layers must be off with on_policy.reply_probability: passes that decode "
                "have ever new shapes, each of which would be compiled"
            )

    @property
    def canvas_tokens(self) -> int:
        """Canvas tokens beside each row."""
        return self.row_length if self.canvas_length is None else self.canvas_length


def learning_rate_factor(step: int, config: TrainConfig) -> float:
    """Returns the learning rate of a step (from 0) as a share of its peak.

    Linear warm-up; then a half cosine to 0, or (wsd) constant and at last linear to 0.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "cosine":
        done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
        return 0.5 * (1.0 + float(torch.cos(torch.tensor(torch.pi * done))))
    decay_steps = max(1.0, config.decay_fraction * config.steps)
    return min(1.0, (config.steps - step) / decay_steps)


def annealed_coreset_size(step: int, config: TrainConfig, model: ModelConfig) -> int | None:
    """Returns how many experts a block may use at a step (from 0); None: what the model says.

    Falls linearly from all experts to the model's `expert_coreset_size`, which holds after the
    first `coreset_anneal_fraction` of the steps: the parent's routers spread a block over many
    experts, and get time to agree on few.
    """
    anneal_steps = config.coreset_anneal_fraction * config.steps
    if step >= anneal_steps:
        return None
    assert isinstance(model.mlp, MoeConfig) and model.diffusion is not None
    final_size = model.diffusion.expert_coreset_size
    assert final_size is not None, "_check_model refuses a model without a coreset"
    num_experts = model.mlp.num_experts
    return num_experts - int((num_experts - final_size) * step / anneal_steps)


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Gives a function that tells whether SIGINT or SIGTERM has arrived; a second one kills.

    Does nothing outside the main thread, where signals cannot be caught.
    """
    caught: list[int] = []
    previous: dict[int, Any] = {}

    def catch(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        restore()

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[int(number)] = signal.signal(number, catch)
    except ValueError:  # not the main thread
        previous.clear()
    try:
        yield lambda: bool(caught)
    finally:
        restore()


def train(
    model: CloverForCausalLM,
    config: TrainConfig,
    source: DocumentSource,
    *,
    on_event: Callable[[TrainEvent], None],
    validation: Validation | None = None,
    resume: bool = False,
    parent: CloverForCausalLM | None = None,
) -> SummaryEvent:
    """Trains the model in place and returns the closing summary (which is also the last event).

    SIGINT and SIGTERM end the run after the current step, with its state saved.

    Args:
        model: Weights in fp32. A parent for the "ar" objective, a Clover model for "two_stream".
        config: The run.
        source: Training documents.
        on_event: Is told of everything, in order.
        validation: Sets of documents by name, evaluated every `eval_every` steps and at the end.
        resume: Goes on from the state in `config.out`.
        parent: Teaches, where the losses ask for it, and stays as it is; fp32. To be the same when a
            run is resumed: the state does not hold it.

    Raises:
        TrainingError: A loss is not finite, model or parent do not suit the objective, or the saved
            state is of another run.
    """
    run = _Run(model, config, source, on_event, validation or {}, parent)
    if resume:
        run.load()
    run.keep_record()
    # A sharded model computes in bf16 by its own policy
    precision = "fp32" if parallel.is_sharded(model) else run.precision
    with training_precision(precision, model.device), stop_on_signal() as is_stopped:
        return run.loop(is_stopped)


def compile_layers(model: CloverForCausalLM) -> None:
    """Has torch.compile fuse each layer's element-wise work, in place. Takes minutes the first time."""
    for module in model.modules():
        if isinstance(module, Experts):  # how many tokens an expert gets differs in every pass
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
    for layer in model.model.layers:
        layer.compile()


class _Run:
    """A run's moving parts, from one step to the next."""

    def __init__(
        self,
        model: CloverForCausalLM,
        config: TrainConfig,
        source: DocumentSource,
        on_event: Callable[[TrainEvent], None],
        validation: Validation,
        parent: CloverForCausalLM | None,
    ) -> None:
        _check_model(model, config)
        _check_parent(parent, model, config)
        self.precision = choose_precision(config.precision, model.device)
        if config.parallelism == "fsdp":
            parallel.shard_model(model, self.precision)
            if parent is not None:
                parallel.shard_model(parent, self.precision)
        model.model.activation_checkpointing = config.activation_checkpointing
        if config.compile_layers:
            compile_layers(model)
        self.model, self.config, self.source, self.parent = model, config, source, parent
        self.on_event = on_event if parallel.rank() == 0 else lambda event: None
        self.validation = validation
        self.optimizers = Optimizers(model, config.optimizer)
        self.average = WeightAverage(model, config.ema_decay) if config.ema_decay > 0 else None
        self.step = 0
        self.saved_at: int | None = None
        self.data_state = PackerState()
        self.meter = _Meter()

    def loop(self, is_stopped: Callable[[], bool]) -> SummaryEvent:
        """Steps until the end or a signal."""
        config, packer, stop = self.config, self._packer(), False
        # Several processes agree on stopping with the next gradients; one may stop at once
        is_alone = parallel.world_size() == 1
        while self.step < config.steps and not stop and not (is_alone and is_stopped()):
            batch = packer.next_batch().to(self.model.device)
            stop = self._take_step(batch, wants_stop=is_stopped())
            self.data_state = packer.state
            if self.step % config.log_every == 0 or self.step == config.steps:
                self.on_event(self.meter.flush(self.step, config.steps))
            is_last = self.step == config.steps
            # The pass through a sharded model needs every process
            is_here = parallel.rank() == 0 or parallel.is_sharded(self.model)
            if is_here and (self.step % config.eval_every == 0 or is_last):
                self._evaluate()
            if self.step % config.save_every == 0:
                self._save()
        if self.saved_at != self.step:
            self._save()
        if self.average is not None:
            self.average.copy_to_model()
        summary = self.meter.summary(self.step, is_finished=self.step >= config.steps)
        self.on_event(summary)
        return summary

    def load(self) -> None:
        """Takes over model, optimizers and counters from `config.out`."""
        if self.config.out is None:
            raise TrainingInputError("cannot resume a run that has no out folder")
        if parallel.is_sharded(self.model):
            parameters = dict(self.model.named_parameters())
            state = load_sharded_state(self.config.out, parameters)
        else:
            state = load_state(self.config.out)
        progress = state.progress
        _check_same_run(progress["config"], self.config)
        _load_parameters(self.model, state.model)
        device = self.model.device
        self.optimizers.load_state_tensors(
            {name: tensor.to(device) for name, tensor in state.optimizer.items()}
        )
        if self.average is not None:
            self.average.load(state.average)
        self.step = self.saved_at = progress["step"]
        data = progress["data"]
        self.data_state = PackerState(**data | {"waiting": tuple(data["waiting"])})

    def keep_record(self) -> None:
        """Writes run.json, and from now on every event to metrics.jsonl, if the run has a folder."""
        folder, on_event = self.config.out, self.on_event
        if folder is None or parallel.rank() != 0:
            return
        metrics = MetricsFile(folder, self.step)
        write_run_file(
            folder,
            config=asdict(self.config),
            model=config_to_dict(self.model.config),
            step=self.step,
        )

        def record(event: TrainEvent) -> None:
            metrics.write(event)
            on_event(event)

        self.on_event = record

    def _packer(self) -> Packer:
        return Packer(
            self.source,
            num_rows=self.config.num_rows,
            row_length=self.config.row_length,
            pad_token_id=self.model.config.pad_token_id or 0,
            state=self.data_state,
        )

    def _take_step(self, batch: Batch, *, wants_stop: bool) -> bool:
        """Updates the weights; returns whether any process wants to stop."""
        self.model.train()
        factor = learning_rate_factor(self.step, self.config)
        losses = batch_losses(self.model, batch, self.config, self.step, self.parent)
        values, stop = self._agree(losses, wants_stop=wants_stop)
        losses.total.backward()
        parameters = list(self.model.parameters())
        if not parallel.is_sharded(self.model):
            parallel.average_gradients(parameters)
        norm = parallel.clip_gradients(parameters, self.config.max_grad_norm)
        self.optimizers.step(factor)
        self.step += 1
        if self.average is not None:
            self.average.update(self.step)
        rate = factor * self.config.optimizer.learning_rate
        self.meter.add(values, norm, rate, batch.num_tokens)
        return stop

    def _agree(self, losses: Losses, *, wants_stop: bool) -> tuple[dict[str, float], bool]:
        """Returns the losses of the whole batch, and whether any process wants to stop.

        Both travel together, so that all processes stop, or fail, at the same step.
        """
        parts = {item.name: getattr(losses, item.name) for item in fields(losses)}
        parts = {name: value.detach() for name, value in parts.items() if value is not None}
        wish = losses.total.new_tensor(float(wants_stop))
        means = parallel.mean_over_processes(torch.stack([*parts.values(), wish])).tolist()
        values = dict(zip(parts, means, strict=False))
        if not math.isfinite(values["total"]):
            raise TrainingError(
                f"the loss of step {self.step} is {values['total']}: lower the "
                "learning rate or resume from the last saved state"
            )
        return values, means[-1] > 0

    def _evaluate(self) -> None:
        started = time.monotonic()
        self.model.eval()
        is_two_stream = self.config.objective == "two_stream"
        for name, documents in self.validation.items():
            with nullcontext() if self.average is None else self.average.in_place():
                result = evaluate(
                    self.model,
                    documents,
                    num_rows=self.config.num_rows,
                    row_length=self.config.row_length,
                    block_size=max(self.config.block_sizes) if is_two_stream else None,
                )
            self.on_event(EvalEvent(step=self.step, name=name, result=result))
        self.meter.pause(time.monotonic() - started)

    def _save(self) -> None:
        """Writes the state, if there is a place for it."""
        is_sharded = parallel.is_sharded(self.model)
        if self.config.out is None or not (is_sharded or parallel.rank() == 0):
            return
        progress = {
            "step": self.step,
            "data": asdict(self.data_state),
            "config": config_to_json(self.config),
        }
        state = SavedState(
            model={name: p.detach() for name, p in self.model.named_parameters()},
            optimizer=self.optimizers.state_tensors(),
            progress=progress,
            average={} if self.average is None else self.average.tensors,
        )
        path = (save_sharded_state if is_sharded else save_state)(self.config.out, state)
        self.saved_at = self.step
        self.on_event(SaveEvent(step=self.step, path=path))


def batch_losses(
    model: CloverForCausalLM,
    batch: Batch,
    config: TrainConfig,
    step: int,
    parent: CloverForCausalLM | None = None,
) -> Losses:
    """Returns the losses of this process's share of a batch; their mean is that of the whole batch.

    Noise is drawn for all rows, whoever takes them, as `draw_canvases` says.
    """
    share = parallel.rank(), parallel.world_size()
    whole, batch = batch, batch.share(*share)
    if config.objective == "ar":
        return _ar_losses(model, batch, config)
    source = choose_canvas_source(
        config.on_policy, counter_generator(config.seed, step, "canvas source")
    )
    if source == "replies":
        return _reply_losses(model, batch, config, step, parent)
    blocks, noised = share_blocks(*draw_canvases(model, whole, config, step), *share)
    if source == "previews":
        noised = own_canvases(model, batch, blocks, config, step)
    with record_router_logits(model, enabled=config.losses.balance_weight > 0) as router_logits:
        clean_logits, canvas_logits = model.two_stream(
            batch.input_ids,
            batch.document_ids,
            noised.canvas,
            blocks.starts,
            coreset_size=annealed_coreset_size(step, config, model.config),
        )
    losses = two_stream_loss(
        clean_logits,
        canvas_logits,
        input_ids=batch.input_ids,
        clean_weights=_clean_weights(batch, config),
        block_starts=blocks.starts,
        targets=blocks.targets,
        is_token=blocks.is_token,
        noised=noised,
        config=config.losses,
        parent_logits=_parent_logits(parent, batch),
        weight_mean=parallel.mean_over_processes,
    )
    is_valid = torch.cat([batch.document_ids >= 0, blocks.is_used.flatten(1)], dim=1)
    return _add_balance(losses, router_logits, is_valid, model.config, config)


def _ar_losses(model: CloverForCausalLM, batch: Batch, config: TrainConfig) -> Losses:
    with record_router_logits(model, enabled=config.losses.balance_weight > 0) as router_logits:
        logits = model(batch.input_ids, document_ids=batch.document_ids)
    loss = ar_loss(
        logits, batch.input_ids, _clean_weights(batch, config), parallel.mean_over_processes
    )
    losses = Losses(total=loss, ar=loss)
    return _add_balance(losses, router_logits, batch.document_ids >= 0, model.config, config)


def _reply_losses(
    model: CloverForCausalLM,
    batch: Batch,
    config: TrainConfig,
    step: int,
    parent: CloverForCausalLM | None,
) -> Losses:
    """Returns the losses of a step on replies that the model writes to the batch's prompts."""
    assert config.num_token_ids is not None
    written = write_replies(
        model,
        batch,
        config.on_policy,
        block_size=_step_block_size(config, step),
        reserved_token_ids=reserved_token_ids(model.config, config.num_token_ids),
        generators=row_generators(config, step, len(batch.input_ids)),
    )
    batch, starts = written.batch, written.block_starts
    with record_router_logits(model, enabled=config.losses.balance_weight > 0) as router_logits:
        clean_logits, canvas_logits = model.two_stream(
            batch.input_ids,
            batch.document_ids,
            written.canvas,
            starts,
            coreset_size=annealed_coreset_size(step, config, model.config),
        )
    losses = on_policy_loss(
        clean_logits,
        canvas_logits,
        clean_weights=_clean_weights(batch, config),
        block_starts=starts,
        masked=written.masked,
        config=config.losses,
        parent_logits=_parent_logits(parent, batch),
        weight_mean=parallel.mean_over_processes,
    )
    is_used = (starts >= 0).repeat_interleave(written.canvas.shape[-1], dim=1)
    is_valid = torch.cat([batch.document_ids >= 0, is_used], dim=1)
    return _add_balance(losses, router_logits, is_valid, model.config, config)


@torch.no_grad()
def _parent_logits(parent: CloverForCausalLM | None, batch: Batch) -> Tensor | None:
    """Returns the parent's causal logits over a batch, [B, T, V], if there is a parent."""
    return None if parent is None else parent(batch.input_ids, document_ids=batch.document_ids)


def _clean_weights(batch: Batch, config: TrainConfig) -> Tensor:
    return ar_weights(batch.document_ids, batch.is_response, config.losses.prompt_weight)


def own_canvases(
    model: CloverForCausalLM, batch: Batch, blocks: Blocks, config: TrainConfig, step: int
) -> NoisedBlocks:
    """Returns the canvases that the model makes of masks in this process's blocks."""
    assert model.config.diffusion is not None
    on_policy = config.on_policy
    generators = row_generators(config, step, len(batch.input_ids))
    return preview_blocks(
        blocks,
        _learned_positions(blocks, config),
        draw_num_previews(blocks.starts, on_policy.max_previews, generators),
        threshold=on_policy.threshold,
        mask_token_id=model.config.diffusion.mask_token_id,
        eos_token_ids=model.config.eos_token_ids,
        predict=_previewer(model, batch, blocks, config, step)[1],
    )


def row_generators(config: TrainConfig, step: int, num_rows: int) -> list[torch.Generator]:
    """Returns a generator for each row of this process's share, the same whoever takes the row."""
    first, stride = parallel.rank(), parallel.world_size()
    return [
        counter_generator(config.seed, step, f"own canvases of row {first + stride * row}")
        for row in range(num_rows)
    ]


def _step_block_size(config: TrainConfig, step: int) -> int:
    return choose_block_size(config.block_sizes, counter_generator(config.seed, step, "block size"))


def _learned_positions(blocks: Blocks, config: TrainConfig) -> Tensor:
    """Returns which canvas positions have a target, bool [B, N, n]."""
    return blocks.is_used if config.losses.end_weight > 0 else blocks.is_token


def draw_canvases(
    model: CloverForCausalLM, batch: Batch, config: TrainConfig, step: int
) -> tuple[Blocks, NoisedBlocks]:
    """Returns the blocks of a step and their canvases, those of all processes.

    They depend on the seed and the step alone, tokens that the model draws also on its weights.
    """
    assert model.config.diffusion is not None
    mask_token_id = model.config.diffusion.mask_token_id
    block_size = _step_block_size(config, step)
    generator = counter_generator(config.seed, step, "noise")
    skips = draw_skips(len(batch.spans), block_size, config.block_skip_probability, generator)
    blocks = cut_blocks(batch, block_size, skips=skips)
    num_slots = config.canvas_tokens // block_size
    if config.complementary_masks:
        num_slots //= 2
    blocks = fill_slots(blocks, num_slots, generator)
    is_learned = _learned_positions(blocks, config)
    noised = noise_blocks(
        blocks.targets,
        is_learned,
        mask_token_id=mask_token_id,
        min_level=config.min_noise_level,
        generator=generator,
        prefix_lengths=draw_prefix_lengths(blocks.is_token, config.prefix_probability, generator),
        all_masks=_draw_all_masks(blocks, config, step),
    )
    if config.complementary_masks:
        other = complement(noised, blocks.targets, is_learned, mask_token_id=mask_token_id)
        blocks, noised = blocks.beside(blocks), noised.beside(other)
    if config.edits.probability > 0:
        text_ids, predict = _previewer(model, batch, blocks, config, step)
        noised = add_edits(
            noised,
            blocks.targets,
            blocks.is_token,
            config.edits,
            mask_token_id=mask_token_id,
            text_ids=text_ids,
            predict=predict,
            generator=counter_generator(config.seed, step, "edits"),
        )
    return blocks, noised


def _draw_all_masks(blocks: Blocks, config: TrainConfig, step: int) -> Tensor:
    """Returns which blocks are all masks, bool [B, N]."""
    generator = counter_generator(config.seed, step, "all masks")
    draws = torch.rand(blocks.starts.shape, generator=generator).to(blocks.starts.device)
    return draws < config.all_masks_probability


def _previewer(
    model: CloverForCausalLM, batch: Batch, blocks: Blocks, config: TrainConfig, step: int
) -> tuple[Tensor, Predict]:
    """Returns the ids of text, ascending, and what predicts canvas positions from among them."""
    assert config.num_token_ids is not None
    is_text = torch.ones(model.config.vocab_size, dtype=torch.bool, device=model.device)
    is_text[list(reserved_token_ids(model.config, config.num_token_ids))] = False

    @torch.no_grad()
    def predict(canvas: Tensor) -> Tensor:
        clean_logits, canvas_logits = model.two_stream(
            batch.input_ids,
            batch.document_ids,
            canvas,
            blocks.starts,
            coreset_size=annealed_coreset_size(step, config, model.config),
        )
        aligned = align_canvas_logits(
            clean_logits, canvas_logits, blocks.starts, shift_logits=config.losses.shift_logits
        )
        return aligned.masked_fill(~is_text, -torch.inf)

    return is_text.nonzero()[:, 0], predict


def _add_balance(
    losses: Losses,
    router_logits: Sequence[Tensor],
    is_valid: Tensor,
    model: ModelConfig,
    config: TrainConfig,
) -> Losses:
    """Returns the losses with the load-balancing part, if the routers were recorded for it."""
    if not router_logits:
        return losses
    assert isinstance(model.mlp, MoeConfig)
    balance = load_balancing_loss(
        router_logits,
        is_valid,
        num_experts_per_tok=model.mlp.num_experts_per_tok,
        weight_mean=parallel.mean_over_processes,
    )
    total = losses.total + config.losses.balance_weight * balance
    return replace(losses, total=total, balance=balance)


def draw_skips(
    count: int, block_size: int, probability: float, generator: torch.Generator
) -> list[int]:
    """Returns how many response tokens each document leaves to history before its first block.

    0, or with the given probability anything below the block size. In exact decoding a block may
    start anywhere in a reply, not only at multiples of the block size.
    """
    skips = torch.randint(block_size, (count,), generator=generator)
    is_skipped = torch.rand(count, generator=generator) < probability
    return (skips * is_skipped).tolist()


def config_to_json(config: TrainConfig) -> dict[str, Any]:
    """Returns the fields that decide what is learned, as JSON values."""
    values = {name: value for name, value in asdict(config).items() if name not in _FREE_FIELDS}
    values["block_sizes"] = list(config.block_sizes)
    values["optimizer"]["betas"] = list(config.optimizer.betas)
    return values


def _check_model(model: CloverForCausalLM, config: TrainConfig) -> None:
    limit = model.config.max_position_embeddings
    if config.row_length > limit:
        raise TrainingInputError(f"row_length {config.row_length} is above the model's {limit}")
    if config.losses.balance_weight > 0 and not isinstance(model.config.mlp, MoeConfig):
        raise TrainingInputError(
            "losses.balance_weight is above 0, but a dense model has no routers"
        )
    if config.objective == "ar":
        return
    diffusion = model.config.diffusion
    if diffusion is None:
        raise TrainingInputError(
            "the two_stream objective needs a Clover model: convert the parent"
        )
    if diffusion.shift_logits != config.losses.shift_logits:
        raise TrainingInputError(
            f"losses.shift_logits is {config.losses.shift_logits}, the model's config says "
            f"{diffusion.shift_logits}: they must agree"
        )
    if config.coreset_anneal_fraction > 0 and diffusion.expert_coreset_size is None:
        raise TrainingInputError(
            "coreset_anneal_fraction is above 0, but the model has no expert_coreset_size to end at"
        )


def _check_parent(
    parent: CloverForCausalLM | None, model: CloverForCausalLM, config: TrainConfig
) -> None:
    if (parent is not None) != config.losses.needs_parent:
        needs = "needs a parent" if config.losses.needs_parent else "makes no use of a parent"
        found = "none" if parent is None else "one"
        raise TrainingInputError(
            f"a run with losses.teacher {config.losses.teacher!r} and these weights {needs}, found "
            f"{found}"
        )
    if parent is None:
        return
    if parent.config.diffusion is not None:
        raise TrainingInputError(
            "expected an autoregressive parent as teacher, found a Clover model"
        )
    if parent.config.vocab_size != model.config.vocab_size:
        raise TrainingInputError(
            f"the parent's vocab_size is {parent.config.vocab_size}, the model's "
            f"{model.config.vocab_size}: distributions over other words cannot be compared"
        )
    if config.row_length > parent.config.max_position_embeddings:
        raise TrainingInputError(
            f"row_length {config.row_length} is above the parent's "
            f"{parent.config.max_position_embeddings}"
        )


@torch.no_grad()
def _load_parameters(model: CloverForCausalLM, saved: Mapping[str, Tensor]) -> None:
    """Copies saved parameters into the model. A tied weight was saved once."""
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    saved_shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    if shapes != saved_shapes:
        differing = sorted(dict(shapes.items() ^ saved_shapes.items()))
        raise TrainingInputError(
            f"the saved state is of another model: it differs in {differing[:3]}"
        )
    for name, tensor in saved.items():
        parameters[name].copy_(tensor)


def _check_same_run(saved: Mapping[str, Any], config: TrainConfig) -> None:
    """Compares a run with a saved one; a field that the older one did not know had its default."""
    defaults = config_to_json(TrainConfig(objective=config.objective, steps=config.steps))
    del defaults["parallelism"]  # a run older than this field drew its noise in another way
    saved, current = _with_defaults(saved, defaults), config_to_json(config)
    changed = [
        f"{name} was {saved.get(name)!r}, is {current.get(name)!r}"
        for name in sorted(set(saved) | set(current))
        if saved.get(name) != current.get(name)
    ]
    if changed:
        raise TrainingInputError(
            f"the saved state is of another run: {'; '.join(changed)}; give the same options, or "
            "another folder"
        )


def _with_defaults(saved: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    filled = {
        name: _with_defaults(saved.get(name, {}), value)
        if isinstance(value, dict)
        else saved.get(name, value)
        for name, value in defaults.items()
    }
    return {**saved, **filled}


class _Meter:
    """Running means and totals."""

    def __init__(self) -> None:
        self._started = self._flushed = time.monotonic()
        self._paused = 0.0
        self._tokens = 0
        self._tokens_total = 0
        self._rows: list[dict[str, float]] = []
        self._learning_rate = 0.0
        self._norms: list[float] = []

    def add(
        self, losses: Mapping[str, float], norm: float, learning_rate: float, tokens: int
    ) -> None:
        """Adds a step."""
        self._rows.append(dict(losses))
        self._norms.append(norm)
        self._learning_rate = learning_rate
        self._tokens += tokens
        self._tokens_total += tokens

    def pause(self, seconds: float) -> None:
        """Leaves seconds out of the next speed."""
        self._paused += seconds

    def flush(self, step: int, num_steps: int) -> StepEvent:
        """Returns the means since the last flush."""
        now = time.monotonic()
        seconds = max(now - self._flushed - self._paused, 1e-9)
        event = StepEvent(
            step=step,
            num_steps=num_steps,
            losses=_means(self._rows),
            learning_rate=self._learning_rate,
            grad_norm=sum(self._norms) / len(self._norms),
            tokens_per_second=self._tokens / seconds,
        )
        self._flushed, self._paused, self._tokens = now, 0.0, 0
        self._rows, self._norms = [], []
        return event

    def summary(self, step: int, *, is_finished: bool) -> SummaryEvent:
        """Returns the totals."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        return SummaryEvent(
            step=step,
            is_finished=is_finished,
            tokens=self._tokens_total,
            seconds=seconds,
            tokens_per_second=self._tokens_total / seconds,
            peak_memory_bytes=peak_memory_bytes(),
        )


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean of each name over the rows that have it: not every step has every loss."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in columns.items()}


def peak_memory_bytes() -> int:
    """Returns the most memory that this process has held; on a GPU, that torch has allocated."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
