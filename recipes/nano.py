"""clover-nano from nothing: tokenizer, autoregressive parent, conversion, adaptation, distillation.

python -m recipes.nano all|tokenizer|parent|convert|calibrate|adapt|distill --out runs/nano
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal, get_args

import torch

from clover.checkpoint.convert import convert
from clover.checkpoint.load import load_model, resolve_checkpoint
from clover.config import AttentionConfig, DeltaNetConfig, ModelConfig, MoeConfig
from clover.diffusion.objective import ObjectiveConfig
from clover.errors import TrainingInputError
from clover.model.transformer import CloverForCausalLM
from clover.tasks import FAMILIES
from clover.tokenizer import Tokenizer
from clover.train import parallel
from clover.train.calibrate import calibrate
from clover.train.data import Document, DocumentEncoder, TaskSource
from clover.train.events import SummaryEvent, TrainEvent
from clover.train.optimizer import OptimizerConfig
from clover.train.packing import Packer
from clover.train.state import has_state
from clover.train.trainer import TrainConfig, train
from recipes.nano_tokenizer import train_tokenizer

Stage = Literal["all", "tokenizer", "parent", "convert", "calibrate", "adapt", "distill"]
STAGES: Final[tuple[Stage, ...]] = get_args(Stage)

# The tokenizer's home, whatever weights lie beside it
TOKENIZER: Final = "clover-nano"
VALIDATION_DOCUMENTS: Final = 256
VALIDATION_SEED: Final = 1
# Half of the largest trained: `exact` takes hardly more passes, and shorter ones (docs/log.md)
BLOCK_SIZE: Final = 16
EXPERT_CORESET_SIZE: Final = 8
# Measured in docs/log.md: the commit path gains most of what it lost, previews soon recover
PARENT_SHARE: Final = 0.25
# By documents. Families whose replies are short have few tokens to learn from, so there are more
PARENT_WEIGHTS: Final = {
    "tool_use": 8.0,
    "tool_call": 4.0,
    "arithmetic": 1.0,
    "lookup": 2.0,
    "sorting": 5.0,
    "expression": 1.5,
    "word_problem": 6.0,
    "extraction": 6.0,
    "python_function": 1.5,
    "terminal": 3.5,
}
# A preview has sums to learn anew, everything else it mostly takes over
CLOVER_WEIGHTS: Final = PARENT_WEIGHTS | {"arithmetic": 2.0, "expression": 4.0}


def parent_config(tokenizer: Tokenizer) -> ModelConfig:
    """Returns the parent's shape: the real model's in miniature, three GDN layers to an attention."""
    end, pad = tokenizer.token_id("<|im_end|>"), tokenizer.token_id("<|endoftext|>")
    assert end is not None and pad is not None, "the nano tokenizer has the chat format's tokens"
    return ModelConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=192,
        layer_types=("linear_attention", "linear_attention", "linear_attention", "full_attention")
        * 2,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        attention=AttentionConfig(
            num_heads=6, num_kv_heads=2, head_dim=32, rotary_dim=16, rope_theta=10_000.0
        ),
        delta_net=DeltaNetConfig(
            num_k_heads=3, num_v_heads=6, head_k_dim=32, head_v_dim=32, conv_kernel_size=4
        ),
        mlp=MoeConfig(
            num_experts=16,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=128,
        ),
        eos_token_ids=(end,),
        pad_token_id=pad,
    )


def parent_training(out: Path) -> TrainConfig:
    """Returns the parent's run: next-token loss over whole chats, replies above prompts."""
    return TrainConfig(
        objective="ar",
        steps=8000,
        num_rows=12,
        row_length=384,
        optimizer=OptimizerConfig(name="muon", learning_rate=4e-3, weight_decay=0.05),
        losses=ObjectiveConfig(prompt_weight=0.1),
        warmup_steps=50,
        schedule="wsd",
        decay_fraction=0.25,
        compile_layers=True,
        out=out,
        log_every=20,
        eval_every=400,
        save_every=100,
    )


def clover_training(out: Path) -> TrainConfig:
    """Returns the adaptation: two streams, block sizes mixed so that b and c can be told apart."""
    return TrainConfig(
        objective="two_stream",
        steps=2400,
        num_rows=12,
        row_length=384,
        optimizer=OptimizerConfig(
            name="muon", learning_rate=3e-3, diffusion_lr_multiplier=5.0, weight_decay=0.05
        ),
        losses=ObjectiveConfig(shift_logits=True, ar_weight=0.5),
        warmup_steps=50,
        schedule="wsd",
        decay_fraction=0.5,
        block_sizes=(8, 16, 32, 32),
        block_skip_probability=0.25,
        canvas_length=256,
        prefix_probability=0.6,
        min_noise_level=0.1,
        out=out,
        log_every=20,
        eval_every=400,
        save_every=100,
    )


def distillation_training(out: Path) -> TrainConfig:
    """Returns the last run: previews learn to draft, and the frozen parent holds the commit path.

    A draft starts anywhere and from masks alone, and ends at its first wrong token: blocks are cut and
    weighted so. A clean stream is nearly always right, so its losses are small beside the canvas's:
    they weigh more.
    """
    adaptation = clover_training(out)
    return replace(
        adaptation,
        steps=1000,
        num_rows=8,
        optimizer=replace(adaptation.optimizer, learning_rate=1.5e-3),
        losses=replace(
            adaptation.losses,
            ar_weight=2.0,
            clean_distillation_weight=2.0,
            teacher="parent",
            position_decay=8.0,
        ),
        decay_fraction=1.0,
        block_sizes=(4, 8, 16, 16, 32),
        block_skip_probability=0.75,
        all_masks_probability=0.75,
        canvas_length=256,
        seed=2,
    )


def run(stage: Stage, out: Path, on_event: Callable[[TrainEvent], None]) -> SummaryEvent | None:
    """Runs a stage inside `out`; goes on where it was cut. Only training has a summary.

    `all` is every stage but `calibrate`, leaving out those whose folder is there. Run by itself, a
    stage takes what the package ships in place of a tokenizer or a parent that `out` does not have.
    Calibration may be left out; where it was run, adaptation starts from what it left.

    Leaves `out/tokenizer`, and `out/parent`, `out/converted`, `out/calibrated`, `out/adapted` and
    `out/clover`, each a checkpoint folder in bf16.
    """
    match stage:
        case "all":
            return _run_all(out, on_event)
        case "tokenizer":
            _on_one_process(lambda: _train_tokenizer(out / "tokenizer"))
        case "parent":
            return _train_parent(out, on_event)
        case "convert":
            _on_one_process(lambda: _convert(out))
        case "calibrate":
            _calibrate(out)
        case "adapt":
            return _adapt(out, on_event)
        case "distill":
            return _distill(out, on_event)
    return None


def _run_all(out: Path, on_event: Callable[[TrainEvent], None]) -> SummaryEvent | None:
    """Runs the stages whose results are missing, up to one that was stopped."""
    summary = None
    stages: list[tuple[Stage, str]] = [
        ("tokenizer", "tokenizer"),
        ("parent", "parent"),
        ("convert", "converted"),
        ("adapt", "adapted"),
        ("distill", "clover"),
    ]
    for stage, folder in stages:
        is_done = (out / folder).is_dir()
        parallel.wait_for_all()  # nobody looks for a folder that another one is already writing
        if not is_done:
            summary = run(stage, out, on_event)
            if summary is not None and not summary.is_finished:
                break
    return summary


def _on_one_process(work: Callable[[], None]) -> None:
    """Does work in the first process, while the others wait for it."""
    if parallel.rank() == 0:
        work()
    parallel.wait_for_all()


def _train_tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer().save(str(folder / "tokenizer.json"), pretty=False)


def _train_parent(out: Path, on_event: Callable[[TrainEvent], None]) -> SummaryEvent:
    own = out / "tokenizer"
    folder = own if own.is_dir() else resolve_checkpoint(TOKENIZER)
    tokenizer = Tokenizer.load(folder)
    model = CloverForCausalLM(parent_config(tokenizer))
    model.init_weights(torch.Generator().manual_seed(0))
    config = parent_training(out / "parent-run")
    source = TaskSource(DocumentEncoder(tokenizer), seed=config.seed, weights=PARENT_WEIGHTS)
    return _train(model, config, source, folder, out / "parent", on_event)


def _parent(out: Path) -> Path:
    """Returns the parent's folder: `out`'s own, or what the package ships."""
    own = out / "parent"
    return own if own.is_dir() else resolve_checkpoint("clover-nano-parent")


def _convert(out: Path) -> None:
    convert(
        _parent(out),
        out / "converted",
        block_size=BLOCK_SIZE,
        expert_coreset_size=EXPERT_CORESET_SIZE,
        overwrite=True,
    )


def _calibrate(out: Path) -> None:
    """Fits the added numbers of each layer on documents of the training stream."""
    folder = _result_of("convert", out / "converted")
    model, tokenizer = load_model(folder), Tokenizer.load(folder)
    source = TaskSource(DocumentEncoder(tokenizer), weights=CLOVER_WEIGHTS)
    config = clover_training(out)
    batch = Packer(
        source,
        num_rows=config.num_rows,
        row_length=config.row_length,
        pad_token_id=model.config.pad_token_id or 0,
    ).next_batch()
    calibrate(model, batch, on_fit=lambda fit: print(fit, flush=True))
    parallel.save_whole(
        model, out / "calibrated", dtype=torch.bfloat16, files_from=folder, overwrite=True
    )


def _result_of(stage: Stage, folder: Path) -> Path:
    """Returns the folder that a stage leaves."""
    if not folder.is_dir():
        raise TrainingInputError(
            f"found no {folder}: run the stage `{stage}` with the same OUT first"
        )
    return folder


def _adapt(out: Path, on_event: Callable[[TrainEvent], None]) -> SummaryEvent:
    calibrated = out / "calibrated"
    converted = out / "converted"
    folder = calibrated if calibrated.is_dir() else _result_of("convert", converted)
    model, tokenizer = load_model(folder), Tokenizer.load(folder)
    config = clover_training(out / "adapted-run")
    source = TaskSource(DocumentEncoder(tokenizer), seed=config.seed, weights=CLOVER_WEIGHTS)
    return _train(model, config, source, folder, out / "adapted", on_event)


def _distill(out: Path, on_event: Callable[[TrainEvent], None]) -> SummaryEvent:
    folder = _result_of("adapt", out / "adapted")
    model, tokenizer = load_model(folder), Tokenizer.load(folder)
    parent = load_model(_parent(out))
    _move_towards(model, parent)
    config = distillation_training(out / "clover-run")
    source = TaskSource(DocumentEncoder(tokenizer), seed=config.seed, weights=CLOVER_WEIGHTS)
    return _train(model, config, source, folder, out / "clover", on_event, parent=parent)


@torch.no_grad()
def _move_towards(model: CloverForCausalLM, parent: CloverForCausalLM) -> None:
    """Takes PARENT_SHARE of what adaptation changed back, in place.

    Source: the straight line between weights of Wortsman et al., "Robust fine-tuning of zero-shot
    models", arXiv 2109.01903.
    """
    inherited = dict(parent.named_parameters())
    for name, parameter in model.named_parameters():
        if name in inherited:
            parameter.lerp_(inherited[name], PARENT_SHARE)


def _train(
    model: CloverForCausalLM,
    config: TrainConfig,
    source: TaskSource,
    files_from: Path,
    result: Path,
    on_event: Callable[[TrainEvent], None],
    parent: CloverForCausalLM | None = None,
) -> SummaryEvent:
    """Trains on the task families and writes the finished model."""
    encoder = DocumentEncoder(Tokenizer.load(files_from))
    assert config.out is not None
    summary = train(
        model,
        config,
        source,
        on_event=on_event,
        validation={name: validation_set(encoder, name) for name in ("seen", "heldout")},
        resume=has_state(config.out),
        parent=parent,
    )
    if summary.is_finished:
        parallel.save_whole(
            model, result, dtype=torch.bfloat16, files_from=files_from, overwrite=True
        )
    return summary


def validation_set(
    encoder: DocumentEncoder, split: str, families: Sequence[str] = FAMILIES
) -> list[Document]:
    """Returns the documents on which training is evaluated; always the same ones."""
    weights = dict.fromkeys(families, 1.0)
    source = TaskSource(encoder, seed=VALIDATION_SEED, split=split, weights=weights)
    return [source.document(index) for index in range(VALIDATION_DOCUMENTS)]


def main(arguments: list[str]) -> int:
    """Runs a stage and prints an event a line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.nano", description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--out", type=Path, default=Path("runs/nano"))
    options = parser.parse_args(arguments)
    with parallel.process_group():
        run(options.stage, options.out, lambda event: print(event, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
