"""Converts a folder with the layer shapes of the 35B model and reports peak memory and seconds.

Four layers (3 GDN, 1 attention) of random bf16, with the full embedding, expert and output
matrices, in the `...ForConditionalGeneration` layout with a few vision and MTP tensors: about 8 GiB
in and as much out, made on the spot and removed. Run from the repository:

    python -m benchmarks.convert_35b [--folder DIR] [--layers N] [--per-expert]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from clover.checkpoint.convert import convert
from clover.checkpoint.files import CHUNK_BYTES, TensorSpec
from clover.checkpoint.inspect import inspect_checkpoint
from clover.checkpoint.names import (
    EMBEDDING,
    NESTED_PREFIX,
    Layout,
    expected_tensors,
    source_names,
    source_shape,
)
from clover.checkpoint.source import ModelTensors
from clover.checkpoint.writer import FolderWriter, tensor_bytes
from clover.config import (
    AttentionConfig,
    DeltaNetConfig,
    LayerType,
    ModelConfig,
    MoeConfig,
    config_to_dict,
    read_config,
)

LAYER_TYPES: tuple[LayerType, ...] = (
    "linear_attention",
    "linear_attention",
    "linear_attention",
    "full_attention",
)
MASK_TOKEN_ID = 248077  # the first padded row of Qwen3.6's vocabulary; there is no tokenizer here
UNUSED_TENSORS = {
    "model.visual.blocks.0.attn.qkv.weight": (3456, 1152),
    "model.visual.merger.linear_fc2.weight": (2048, 4608),
    "mtp.fc.weight": (2048, 4096),
}
MEMORY_ALLOWANCE = 2 * 2**30  # the promise: this plus the largest tensor
GIB = 2**30


def parent_config(num_layers: int) -> ModelConfig:
    """Returns the 35B model's configuration with its first layers only."""
    return ModelConfig(
        vocab_size=248320,
        hidden_size=2048,
        layer_types=LAYER_TYPES[:num_layers],
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        max_position_embeddings=262144,
        attention=AttentionConfig(
            num_heads=16, num_kv_heads=2, head_dim=256, rotary_dim=64, rope_theta=1e7
        ),
        delta_net=DeltaNetConfig(
            num_k_heads=16, num_v_heads=32, head_k_dim=128, head_v_dim=128, conv_kernel_size=4
        ),
        mlp=MoeConfig(
            num_experts=256,
            num_experts_per_tok=8,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
        ),
        eos_token_ids=(248044,),
    )


def main() -> int:
    options = parse_options()
    if options.child:
        return run_child(*options.child)
    with tempfile.TemporaryDirectory(prefix="convert-35b-", dir=options.folder) as scratch:
        parent, out = Path(scratch) / "parent", Path(scratch) / "out"
        config = parent_config(options.layers)
        layout = Layout(prefix=NESTED_PREFIX, per_expert=options.per_expert)
        specs = write_parent(config, parent, layout)
        free = shutil.disk_usage(scratch).free
        if free < sum(spec.num_bytes for spec in specs) + GIB:
            print(f"{scratch}: {free / GIB:.1f} GiB are free, too few for the result")
            return 1
        command = [sys.executable, "-m", "benchmarks.convert_35b", "--child", str(parent), str(out)]
        child = subprocess.run(command, check=True, capture_output=True, text=True)
        measured = json.loads(child.stdout)
        check_result(parent, out)
    print(describe(measured, options.per_expert))
    return int(measured["peak_bytes"] > allowed_bytes())


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="where to make the files; default: the system's own")
    parser.add_argument("--layers", type=int, choices=(1, 2, 3, 4), default=4, help="default: 4")
    parser.add_argument("--per-expert", action="store_true", help="one tensor per expert")
    parser.add_argument("--child", nargs=2, metavar=("PARENT", "OUT"), help=argparse.SUPPRESS)
    return parser.parse_args()


def write_parent(config: ModelConfig, folder: Path, layout: Layout) -> list[TensorSpec]:
    """Writes the parent as a stream, and returns its tensors."""
    shapes: dict[str, tuple[int, ...]] = dict(UNUSED_TENSORS)
    for name, expected in expected_tensors(config).items():
        shape = source_shape(name, expected.shape, layout)
        shapes |= dict.fromkeys(source_names(name, config, layout), shape)
    specs = [
        TensorSpec(name=name, dtype=torch.bfloat16, shape=shape) for name, shape in shapes.items()
    ]
    text = config_to_dict(config) | {"architectures": None, "dtype": "bfloat16"}
    with FolderWriter(folder) as writer:
        writer.write_tensors(specs, random_chunks(specs))
        writer.write_json(
            "config.json",
            {
                "architectures": ["Qwen3_5MoeForConditionalGeneration"],
                "model_type": "qwen3_5_moe",
                "text_config": text,
                "vision_config": {},
            },
        )
    return specs


def random_chunks(specs: Sequence[TensorSpec]) -> Iterator[Iterator[memoryview]]:
    """Yields normal bf16 numbers: slices of one pool from random places, since drawing is slow."""
    generator = torch.Generator().manual_seed(0)
    pool = tensor_bytes((0.02 * torch.randn(2 * CHUNK_BYTES, generator=generator)).bfloat16())
    places = random.Random(0)
    for spec in specs:
        yield _slices(spec.num_bytes, pool, places)


def _slices(num_bytes: int, pool: memoryview, places: random.Random) -> Iterator[memoryview]:
    while num_bytes:
        size = min(num_bytes, CHUNK_BYTES)
        start = 2 * places.randrange((len(pool) - size) // 2)
        yield pool[start : start + size]
        num_bytes -= size


def run_child(parent: str, out: str) -> int:
    """Converts in a process of its own, whose peak memory is nobody else's."""
    before = peak_bytes()
    started = time.perf_counter()
    report = convert(Path(parent), Path(out), mask_token_id=MASK_TOKEN_ID)
    measured = {
        "seconds": time.perf_counter() - started,
        "import_bytes": before,
        "peak_bytes": peak_bytes(),
        "num_bytes": report.num_bytes,
        "num_shards": report.num_shards,
    }
    print(json.dumps(measured))
    return 0


def peak_bytes() -> int:
    """Returns the process's largest resident set. Linux; getrusage would count the parent's too."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("expected VmHWM in /proc/self/status, found none")


def check_result(parent: Path, out: Path) -> None:
    """Stops unless the result has the right counts and, but for the mask's row, the same bytes."""
    config = read_config(out)
    num_delta_nets = config.layer_types.count("linear_attention")
    added = inspect_checkpoint(out).num_added_parameters
    assert added == num_delta_nets * (8192 * 3 + 3 * 32), added
    source, result = ModelTensors(parent, read_config(parent)), ModelTensors(out, config)
    assert len(source.dropped) == len(UNUSED_TENSORS)
    for name in source.specs:
        if name != EMBEDDING:
            assert digest(source, name) == digest(result, name), name
    rows = [tensors.read_rows(EMBEDDING, 248000, 248320) for tensors in (source, result)]
    changed = (rows[0] != rows[1]).any(dim=1).nonzero().flatten() + 248000
    assert changed.tolist() == [MASK_TOKEN_ID], changed.tolist()


def digest(tensors: ModelTensors, name: str) -> str:
    total = hashlib.blake2b()
    for chunk in tensors.chunks(name):
        total.update(chunk)
    return total.hexdigest()


def allowed_bytes() -> int:
    """Returns the promised limit: a constant plus the largest tensor, in bf16."""
    tensors = expected_tensors(parent_config(1)).values()
    return MEMORY_ALLOWANCE + 2 * max(expected.num_elements for expected in tensors)


def describe(measured: dict[str, Any], per_expert: bool) -> str:
    size, seconds = measured["num_bytes"], measured["seconds"]
    return (
        f"converted {size / GIB:.2f} GiB ({'one tensor per expert' if per_expert else 'fused'}) "
        f"in {seconds:.1f} s, {size / GIB / seconds:.2f} GiB/s, {measured['num_shards']} shards; "
        f"peak memory {measured['peak_bytes'] / 2**20:.0f} MiB "
        f"({measured['import_bytes'] / 2**20:.0f} MiB of it before the start), "
        f"allowed {allowed_bytes() / 2**20:.0f} MiB; "
        f"{platform.machine()}, {torch.get_num_threads()} threads"
    )


if __name__ == "__main__":
    sys.exit(main())
