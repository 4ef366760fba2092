"""A DFlash drafter for a parent: trains it on the parent's own documents, and measures its drafts.

    python -m benchmarks.dflash train --parent clover-nano-parent --out runs/dflash --steps 2000
    python -m benchmarks.dflash measure --parent clover-nano-parent --drafter runs/dflash/drafter

`train` goes on where it was cut and leaves the drafter in `OUT/drafter`, in bf16. `torchrun` starts it on
several processes. `measure` answers held-out items greedily, checks that every text is the parent's
autoregressive one, and prints a line for each length of draft. `clover bench --drafter` compares speeds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from clover.checkpoint.load import LoadedCheckpoint, load_checkpoint, resolve_checkpoint
from clover.cli_train import describe
from clover.diffusion.generate import generate_all, reserved_token_ids
from clover.diffusion.policies import Autoregressive
from clover.diffusion.requests import Finished, GenerationRequest, GenerationResult
from clover.errors import BenchmarkError
from clover.eval.dflash.decode import DrafterDecoder
from clover.eval.dflash.files import load_drafter, save_drafter
from clover.eval.dflash.model import Drafter, drafter_config
from clover.eval.dflash.train import DrafterTraining, train_drafter
from clover.eval.workloads import Item, draw_workloads
from clover.tasks import FAMILIES
from clover.train import parallel
from clover.train.answers import MAX_TOKENS
from clover.train.data import DocumentEncoder, TaskSource
from clover.train.state import has_state
from recipes import nano


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains or measures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dflash", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("train")
    command.add_argument("--parent", default="clover-nano-parent")
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--steps", type=int, required=True)
    command.add_argument("--rows", type=int, default=8)
    command.add_argument("--blocks", type=int, default=16, help="a row")
    command.add_argument("--block-size", type=int, default=16)
    command.add_argument("--layers", type=int, default=3)
    command.add_argument("--features", type=int, default=3, help="layers of the parent to read")
    command.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    command.add_argument("--save-every", type=int, default=100)
    command = commands.add_parser("measure")
    command.add_argument("--parent", default="clover-nano-parent")
    command.add_argument("--drafter", type=Path, required=True)
    command.add_argument("--items", type=int, default=16, help="with short, and with long answers")
    command.add_argument("--draft-tokens", type=int, nargs="+", help="default: as in training")
    command.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    options = parser.parse_args(arguments)
    return train(options) if options.command == "train" else measure(options)


def train(options: argparse.Namespace) -> int:
    folder = resolve_checkpoint(options.parent)
    with parallel.process_group():
        parent = load_checkpoint(folder)
        drafter = Drafter(
            drafter_config(
                parent.model,
                num_layers=options.layers,
                num_features=options.features,
                block_size=options.block_size,
            )
        )
        drafter.init_weights(torch.Generator().manual_seed(0))
        config = DrafterTraining(
            steps=options.steps,
            out=options.out,
            num_rows=options.rows,
            row_length=nano.parent_training(options.out).row_length,
            num_blocks=options.blocks,
            position_decay=position_decay(options.block_size),
            precision=options.precision,
            save_every=options.save_every,
        )
        encoder = DocumentEncoder(parent.tokenizer)
        source = TaskSource(encoder, seed=config.seed, weights=nano.PARENT_WEIGHTS)
        summary = train_drafter(
            drafter,
            parent.model,
            config,
            source,
            on_event=lambda event: print(describe(event), flush=True),
            resume=has_state(options.out),
        )
        if summary.is_finished and parallel.rank() == 0:
            save_drafter(drafter, options.out / "drafter", overwrite=True)
            num_parameters = sum(weight.numel() for weight in drafter.parameters())
            print(f"{options.out / 'drafter'}: {num_parameters / 1e6:.2f} M parameters")
    return 0


def position_decay(block_size: int) -> float:
    """Returns the paper's decay for a block size: 7 at 16, 5 at 10, 4 at 8; between them linear."""
    return max(1.0, 4.0 + (block_size - 8) * 3 / 8)


def measure(options: argparse.Namespace) -> int:
    parent = load_checkpoint(resolve_checkpoint(options.parent))
    drafter = load_drafter(options.drafter)
    workloads = draw_workloads(parent, options.items, FAMILIES)
    items = [item for part in workloads.values() for item in part]
    started = time.perf_counter()
    expected = [answer_plainly(parent, item, options.max_tokens) for item in items]
    report("autoregressive", expected, time.perf_counter() - started)
    for count in options.draft_tokens or [drafter.config.block_size - 1]:
        decoder = DrafterDecoder(
            parent.model,
            drafter,
            eos_token_ids=parent.eos_token_ids,
            forbidden_token_ids=reserved_token_ids(parent.config, len(parent.tokenizer)),
            num_draft_tokens=count,
        )
        started = time.perf_counter()
        found = [answer(decoder, item, options.max_tokens) for item in items]
        seconds = time.perf_counter() - started
        differing = sum(a.token_ids != b.token_ids for a, b in zip(expected, found, strict=True))
        if differing:
            raise BenchmarkError(
                f"expected the parent's text in all {len(items)} answers, found another in {differing}"
            )
        passes = sum(result.stats.passes for result in found)
        report(f"drafts of {count}", found, seconds)
        print(
            f"    {decoder.accepted_tokens / passes:.2f} of {decoder.drafted_tokens / passes:.2f} "
            f"drafted tokens accepted a verification, {decoder.drafter_passes} passes of the drafter"
        )
    return 0


def answer_plainly(parent: LoadedCheckpoint, item: Item, max_tokens: int) -> GenerationResult:
    [result] = generate_all(
        parent.model,
        [request_of(item, max_tokens)],
        eos_token_ids=parent.eos_token_ids,
        forbidden_token_ids=reserved_token_ids(parent.config, len(parent.tokenizer)),
    )
    return result


def answer(decoder: DrafterDecoder, item: Item, max_tokens: int) -> GenerationResult:
    *_, last = decoder.generate(request_of(item, max_tokens))
    assert isinstance(last, Finished)
    return last.result


def request_of(item: Item, max_tokens: int) -> GenerationRequest:
    return GenerationRequest(
        prompt_ids=item.prompt_ids, max_tokens=max_tokens, policy=Autoregressive()
    )


def report(name: str, results: Sequence[GenerationResult], seconds: float) -> None:
    tokens = sum(result.stats.tokens for result in results)
    passes = sum(result.stats.passes for result in results)
    print(
        f"{name}: {tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s, "
        f"{passes} passes of the parent, {tokens / passes:.2f} tokens each",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
