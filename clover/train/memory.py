"""What a training run needs, by arithmetic alone: bytes on each GPU, and hours.

Everything is computed from a configuration; nothing is measured, and each assumption has a name.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

import torch

from clover.checkpoint.inspect import InspectReport
from clover.checkpoint.names import expected_tensors
from clover.config import ModelConfig
from clover.train.optimizer import OptimizerName, classify

GIB: Final = 2**30
FP32_BYTES: Final = 4
BF16_BYTES: Final = 2
# A parameter and token: forward 2, the forward again for checkpointing 2, backward 4
FLOPS_PER_PARAMETER: Final = 8
# Beside the layer that computes, FSDP2 gathers the next one
GATHERED_LAYERS: Final = 2
# Of one token: logits in bf16 and fp32, their log-softmax and its gradient in fp32, and in bf16
LOGIT_BYTES: Final = 2 * BF16_BYTES + 3 * FP32_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingMemory:
    """Bytes on each GPU of a run with FSDP, bf16 compute and activation checkpointing.

    Weights, gradients and moments are fp32, a slice each: one moment of a matrix with Muon, two of
    all else (AdamW). Gathered weights are bf16: embedding, head and last norm all the time, and two
    layers; the gradient of one layer is bf16 and, to be summed, fp32. Tokens, clean and canvas ones,
    leave the layers' inputs and logits. What lives inside the one layer that computes, and Muon's
    temporaries (a few GiB at most: see `MAX_STACKED_ELEMENTS`), are not counted.
    """

    num_shards: int
    num_parameters: int
    optimizer: OptimizerName
    num_matrix_parameters: int
    num_layer_parameters: int
    num_root_parameters: int
    num_layers: int
    hidden_size: int
    vocab_size: int

    @property
    def master_weights(self) -> int:
        """Bytes of this GPU's weights."""
        return self._slice(FP32_BYTES * self.num_parameters)

    @property
    def gradients(self) -> int:
        """Bytes of their gradients."""
        return self.master_weights

    @property
    def optimizer_state(self) -> int:
        """Bytes of their moments."""
        matrices = self.num_matrix_parameters if self.optimizer == "muon" else 0
        return self._slice(FP32_BYTES * (matrices + 2 * (self.num_parameters - matrices)))

    @property
    def gathered_weights(self) -> int:
        """Bytes of the whole weights that a pass holds at once."""
        return BF16_BYTES * (self.num_root_parameters + GATHERED_LAYERS * self.num_layer_parameters)

    @property
    def gathered_gradients(self) -> int:
        """Bytes of one layer's whole gradient, on its way to its slices."""
        return (BF16_BYTES + FP32_BYTES) * self.num_layer_parameters

    @property
    def total(self) -> int:
        """All of it but what grows with tokens."""
        return (
            self.master_weights
            + self.gradients
            + self.optimizer_state
            + self.gathered_weights
            + self.gathered_gradients
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes that each token of the GPU's rows and canvases adds."""
        return BF16_BYTES * self.num_layers * self.hidden_size + LOGIT_BYTES * self.vocab_size

    def _slice(self, num_bytes: int) -> int:
        return -(-num_bytes // self.num_shards)


def training_memory(
    config: ModelConfig, num_shards: int, optimizer: OptimizerName = "muon"
) -> TrainingMemory:
    """Returns what training a model of this shape on `num_shards` GPUs needs on each."""
    by_layer: Counter[str] = Counter()
    num_matrix_parameters = 0
    for name, item in expected_tensors(config).items():
        is_layer = name.startswith("model.layers.")
        by_layer[name.split(".")[2] if is_layer else "root"] += item.num_elements
        if classify(name, torch.empty(item.shape, device="meta")) == "matrix":
            num_matrix_parameters += item.num_elements
    root = by_layer.pop("root")
    return TrainingMemory(
        num_shards=num_shards,
        num_parameters=root + sum(by_layer.values()),
        optimizer=optimizer,
        num_matrix_parameters=num_matrix_parameters,
        num_layer_parameters=max(by_layer.values()),
        num_root_parameters=root,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
    )


def training_hours(
    report: InspectReport,
    *,
    num_gpus: int,
    clean_tokens: float,
    canvas_ratio: float,
    peak_flops: float,
    mfu: float,
) -> float:
    """Returns the hours that a two-stream run with activation checkpointing takes.

    FLOPs are those of the active parameters without the look-up; attention's own products, linear in
    the row length, are left out: at rows of some thousand tokens they are a few percent.

    Args:
        report: Of the model.
        num_gpus: Working together.
        clean_tokens: Of the whole run.
        canvas_ratio: Canvas tokens for each clean one; 0 is plain autoregressive training.
        peak_flops: Of one GPU, dense bf16, a second.
        mfu: Share of the peak that is assumed to be reached.
    """
    tokens = clean_tokens * (1 + canvas_ratio)
    flops = FLOPS_PER_PARAMETER * report.num_active_without_lookup * tokens
    return flops / (num_gpus * peak_flops * mfu) / 3600


def render_memory(memory: TrainingMemory) -> list[str]:
    """Returns the memory as lines of text, each with its arithmetic."""
    m, n = memory, memory.num_shards
    others = m.num_parameters - m.num_matrix_parameters
    state = f"8 B x {m.num_parameters:,} / {n}"
    if m.optimizer == "muon":
        state = f"(4 B x {m.num_matrix_parameters:,} of Muon + 8 B x {others:,} of AdamW) / {n}"
    rows = [
        ("master weights", m.master_weights, f"4 B x {m.num_parameters:,} / {n}"),
        ("gradients", m.gradients, f"4 B x {m.num_parameters:,} / {n}"),
        ("optimizer", m.optimizer_state, state),
        (
            "gathered",
            m.gathered_weights,
            f"2 B x ({m.num_root_parameters:,} + {GATHERED_LAYERS} layers x "
            f"{m.num_layer_parameters:,})",
        ),
        ("layer gradient", m.gathered_gradients, f"6 B x {m.num_layer_parameters:,}"),
    ]
    lines = [f"  training    on each of {n} GPUs (fsdp, bf16, activation checkpointing)"]
    lines += [f"    {name:<16}{size / GIB:>8.2f} GiB  {sum_}" for name, size, sum_ in rows]
    lines.append(f"    {'together':<16}{m.total / GIB:>8.2f} GiB  and for each token on a GPU")
    lines.append(
        f"    {'':<16}{m.bytes_per_token / 2**20:>8.2f} MiB  2 B x {m.num_layers} layers x "
        f"{m.hidden_size:,} + {LOGIT_BYTES} B x {m.vocab_size:,} of logits"
    )
    return lines
