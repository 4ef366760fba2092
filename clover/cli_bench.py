"""The benchmark of the command line: who takes part, lines while it runs, a folder at its end."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from clover.checkpoint.load import load_checkpoint, resolve_checkpoint
from clover.errors import RequestError
from clover.eval.bench import Bench, BenchConfig, engine_contenders
from clover.eval.bench_report import look_around, write_report
from clover.eval.contenders import Contender, DrafterContender, TransformersContender
from clover.eval.dflash.files import load_drafter

# Equal texts are what makes speeds comparable, and in bf16 a near tie may fall either way.
DTYPE = torch.float32

# Where a drafter is looked for in its parent's folder
DRAFTER_FOLDER = "dflash"


def run_bench(
    out: Path,
    config: BenchConfig,
    *,
    model: str,
    parent: str,
    policies: Sequence[str],
    with_transformers: bool | None,
    drafter: Path | None = None,
    device: torch.device,
    notes: Console,
) -> list[Path]:
    """Measures, and writes what is finished into `out`, after Ctrl-C too; returns the files.

    Args:
        out: The folder to write.
        config: What is measured.
        model: The Clover model.
        parent: Its parent.
        policies: Of Clover, beside `exact` and `autoregressive`; as on the command line.
        with_transformers: Whether its `generate` takes part; None: where it is installed.
        drafter: Folder of a DFlash drafter; None: `dflash` in the parent's folder, if it is there.
        device: Where all weights lie.
        notes: Gets a line after every step.

    Raises:
        BenchmarkError: Texts that have to be equal are not. Nothing is written.
    """
    has_transformers = importlib.util.find_spec("transformers") is not None
    if with_transformers and not has_transformers:
        raise RequestError("--transformers needs transformers, which is not installed")
    loaded_parent, clover = (
        load_checkpoint(resolve_checkpoint(name), dtype=DTYPE, device=device)
        for name in (parent, model)
    )
    if clover.config.diffusion is None or loaded_parent.config.diffusion is not None:
        raise RequestError(
            f"expected a Clover model and its autoregressive parent, found {model} and {parent}"
        )
    is_wanted = has_transformers if with_transformers is None else with_transformers
    others: list[Contender] = []
    models = {"model": model, "parent": parent}
    beside = loaded_parent.folder / DRAFTER_FOLDER
    if drafter is not None or beside.is_dir():
        models["drafter"] = str(drafter or beside)
        loaded_drafter = load_drafter(drafter or beside, dtype=DTYPE, device=device)
        others.append(DrafterContender(loaded_parent, loaded_drafter))
    if is_wanted:
        others.append(TransformersContender(loaded_parent))
    ours = engine_contenders(loaded_parent, clover, policies)
    bench = Bench(config, clover, ours, others)
    surroundings = look_around(DTYPE, models)
    started = time.perf_counter()
    try:
        for line in bench.run():
            seconds = time.perf_counter() - started
            notes.print(f"{seconds:7.1f} s  {line}", markup=False, highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        notes.print("stopped: what is finished is written", markup=False, highlight=False)
    return write_report(out, config, surroundings, bench.results)
