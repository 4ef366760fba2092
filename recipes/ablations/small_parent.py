"""A small parent for the study: many adaptations of it take the time of one of clover-nano."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from clover.checkpoint.load import resolve_checkpoint
from clover.config import ModelConfig, MoeConfig
from clover.model.transformer import CloverForCausalLM
from clover.tokenizer import Tokenizer
from clover.train import parallel
from clover.train.data import DocumentEncoder, TaskSource
from clover.train.events import SummaryEvent, TrainEvent
from clover.train.state import has_state
from clover.train.trainer import train
from recipes.ablations.study import check_families
from recipes.nano import PARENT_WEIGHTS, TOKENIZER, parent_config, parent_training, validation_set

WIDTH: Final = 96
FOLDER: Final = "parent"


def small_parent_config(tokenizer: Tokenizer) -> ModelConfig:
    """Returns half of clover-nano's parent: four layers of half the width, eight experts."""
    parent = parent_config(tokenizer)
    return replace(
        parent,
        hidden_size=WIDTH,
        layer_types=parent.layer_types[:4],
        attention=replace(parent.attention, num_heads=3, num_kv_heads=1),
        delta_net=replace(parent.delta_net, num_k_heads=2, num_v_heads=2),
        mlp=MoeConfig(
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=64,
        ),
    )


def train_small_parent(
    out: Path, families: tuple[str, ...], steps: int, on_event: Callable[[TrainEvent], None]
) -> SummaryEvent:
    """Trains it as clover-nano's parent is trained, on shorter rows; `out/parent` is the result.

    Goes on where it was cut. Layers are not compiled: that would take as long as the training.

    Raises:
        TrainingInputError: An unknown family, or none.
    """
    check_families(families)
    files = resolve_checkpoint(TOKENIZER)
    tokenizer = Tokenizer.load(files)
    encoder = DocumentEncoder(tokenizer)
    model = CloverForCausalLM(small_parent_config(tokenizer))
    model.init_weights(torch.Generator().manual_seed(0))
    run = out / f"{FOLDER}-run"
    config = replace(parent_training(run), steps=steps, row_length=256, compile_layers=False)
    summary = train(
        model,
        config,
        TaskSource(encoder, seed=config.seed, weights={f: PARENT_WEIGHTS[f] for f in families}),
        on_event=on_event,
        validation={name: validation_set(encoder, name, families) for name in ("seen", "heldout")},
        resume=has_state(run),
    )
    if summary.is_finished:
        parallel.save_whole(
            model, out / FOLDER, dtype=torch.float32, files_from=files, overwrite=True
        )
    return summary
