"""Times the passes of the 35B shape on one GPU, with random weights that are made there.

    python -m benchmarks.gpu --json gpu.json    # bf16: 70 GB of weights
    python -m benchmarks.gpu --toy              # a tiny model, on a CPU too: shows that it runs

docs/gpu.md says what is measured, and what a figure from random weights means.

Shapes: B rows, T clean tokens, n canvas tokens, L = T + n.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.convert_35b import LAYER_TYPES, MASK_TOKEN_ID, parent_config, peak_bytes
from clover.config import (
    AttentionConfig,
    DeltaNetConfig,
    DiffusionConfig,
    ModelConfig,
    MoeConfig,
)
from clover.model.cache import AttentionCache, Cache, DeltaNetCache
from clover.model.delta_rule import has_fla
from clover.model.moe import Experts, SparseMoe, record_expert_choices
from clover.model.streams import cached_streams
from clover.model.transformer import CloverForCausalLM

BLOCK_SIZE = 32
WARM_UPS = 3
# Bytes a second, from the vendors' data sheets. Another device's is measured by copying.
BANDWIDTHS = {
    "NVIDIA A100-SXM4-80GB": 2.039e12,
    "NVIDIA H100 80GB HBM3": 3.35e12,
    "NVIDIA H200": 4.8e12,
}
COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}  # far more than the caches hold
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
GB = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """A kind of pass, named after the model's method: T clean tokens, then n canvas tokens."""

    name: str
    num_clean: int
    block_size: int
    coreset_size: int | None = None

    @property
    def num_accepted(self) -> int:
        """Clean tokens that are committed: all, but half of those that are only verified."""
        return self.num_clean // 2 if self.is_verified else self.num_clean

    @property
    def is_verified(self) -> bool:
        """True if a part of the clean tokens may be committed."""
        return self.name == "verify_and_preview"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One pass at one batch size. Bytes are counted, not measured; `seconds` is a median."""

    name: str
    coreset_size: int | None
    batch_size: int
    is_graph: bool
    seconds: float
    experts_used: list[int]  # different ones, in each layer
    weight_bytes: int
    cache_bytes: int
    bytes_per_second: float  # of weights and cache together
    bandwidth_share: float
    peak_bytes: int  # allocated on the GPU during the pass; on a CPU the process's largest size


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Tokens a second of all rows together, computed from measured passes at an assumed TPF."""

    policy: str
    coreset_size: int | None
    batch_size: int
    is_graph: bool
    tpf: float
    tokens_per_second: float


@dataclass(kw_only=True, slots=True)
class Report:
    """All that `--json` writes. `skipped` says what was not measured and why."""

    shape: str
    device: str
    torch_version: str
    dtype: str
    uses_fla: bool
    num_parameters: int
    history_tokens: int
    repeats: int
    build_seconds: float
    bandwidth: float
    is_bandwidth_measured: bool
    measurements: list[Measurement] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


def shape_35b() -> ModelConfig:
    """Returns the whole 35B model's configuration, without a coreset."""
    diffusion = DiffusionConfig(block_size=BLOCK_SIZE, mask_token_id=MASK_TOKEN_ID)
    return replace(parent_config(4), layer_types=LAYER_TYPES * 10, diffusion=diffusion)


def shape_toy() -> ModelConfig:
    """Returns four layers with enough experts that a coreset of 48 or 32 restricts them."""
    return ModelConfig(
        vocab_size=256,
        hidden_size=64,
        layer_types=LAYER_TYPES,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        max_position_embeddings=4096,
        attention=AttentionConfig(
            num_heads=4, num_kv_heads=2, head_dim=32, rotary_dim=8, rope_theta=1e4
        ),
        delta_net=DeltaNetConfig(
            num_k_heads=2, num_v_heads=4, head_k_dim=32, head_v_dim=32, conv_kernel_size=4
        ),
        mlp=MoeConfig(
            num_experts=64,
            num_experts_per_tok=4,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        ),
        diffusion=DiffusionConfig(block_size=BLOCK_SIZE, mask_token_id=255),
    )


def build_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> CloverForCausalLM:
    """Returns a model whose weights are drawn where they stay: nothing is copied from the host."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = CloverForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    model.init_weights(torch.Generator(device).manual_seed(0))
    return model.eval().requires_grad_(False)


def list_passes(coreset_sizes: Sequence[int]) -> list[Pass]:
    """Returns the passes to measure: one token, then those with a canvas at each coreset size."""
    passes = [Pass(name="commit", num_clean=1, block_size=0)]
    for size in (None, *coreset_sizes):
        passes += [
            Pass(name=name, num_clean=num_clean, block_size=BLOCK_SIZE, coreset_size=size)
            for name, num_clean in (
                ("preview", 0),
                ("commit_and_preview", BLOCK_SIZE),
                ("verify_and_preview", BLOCK_SIZE),
            )
        ]
    return passes


class Workload:
    """A model, and a batch of rows with as many tokens of history: what all passes run on.

    Tokens are random ids, in the canvas too: a canvas of nothing but masks would send all its
    positions to nearly the same experts, which no canvas but a block's first one does.
    """

    def __init__(self, model: CloverForCausalLM, batch_size: int, history_tokens: int) -> None:
        generator = torch.Generator(model.device).manual_seed(batch_size)
        shape = batch_size, history_tokens + 2 * BLOCK_SIZE
        vocab_size = model.config.vocab_size
        ids = torch.randint(vocab_size, shape, generator=generator, device=model.device)
        sizes = [history_tokens, BLOCK_SIZE, BLOCK_SIZE]
        prompt, self.input_ids, self.canvas = ids.split(sizes, dim=1)
        self.model = model
        self.history_tokens = history_tokens
        self.cache = model.new_cache(batch_size, shape[1])
        model.prefill(self.cache, prompt)

    def run(self, what: Pass) -> tuple[Tensor, ...]:
        """Returns a pass's logits, by the model's own method; then the old length holds again.

        The recurrent states keep what was committed: that costs nothing and changes no time.
        """
        model, cache = self.model, self.cache
        clean = self.input_ids[:, : what.num_clean]
        logits: tuple[Tensor, ...]
        if what.name == "commit":
            logits = (model.commit(cache, clean),)
        elif what.name == "preview":
            logits = (model.preview(cache, self.canvas),)
        elif what.name == "commit_and_preview":
            logits = model.commit_and_preview(cache, clean, self.canvas)
        else:
            verified, previewed, transaction = model.verify_and_preview(cache, clean, self.canvas)
            transaction.commit([what.num_accepted] * cache.batch_size)
            logits = verified, previewed
        cache.lengths = [self.history_tokens] * cache.batch_size
        return logits


class StaticPass:
    """The device's share of a pass, with all its tensors in fixed places: what a CUDA graph holds.

    The layout is made beforehand, and new rings and states are copied to where the old ones lie.
    """

    def __init__(self, workload: Workload, what: Pass) -> None:
        self.model, self.cache, self.what = workload.model, workload.cache, what
        batch_size, device = self.cache.batch_size, self.model.device
        self.streams = cached_streams(
            self.cache.lengths,
            [what.num_clean] * batch_size,
            what.num_clean,
            what.block_size,
            spare_row=self.cache.capacity,
            device=device,
        )
        clean, canvas = workload.input_ids[:, : what.num_clean], workload.canvas
        self.token_ids = torch.cat([clean, canvas[:, : what.block_size]], dim=1)  # [B, L]
        self.accepted = torch.full((batch_size,), what.num_accepted, device=device)

    @torch.no_grad()
    def run(self) -> Tensor:
        """Returns the logits [B, L, V] of all tokens."""
        hidden_states, updates = self.model.model(
            self.token_ids, self.streams, self.cache, keep_trace=self.what.is_verified
        )
        for layer, update in zip(self.cache.layers, updates, strict=True):
            if isinstance(layer, DeltaNetCache) and update is not None:
                places = layer.tensors()
                update.apply(layer, self.accepted, is_whole=not self.what.is_verified)
                for place, value in zip(places, layer.tensors(), strict=True):
                    place.copy_(value)
                layer.conv_state, layer.recurrent_state = places
        logits: Tensor = self.model.lm_head(hidden_states).float()
        return logits


def capture(run: Callable[[], object]) -> Callable[[], None]:
    """Returns the replay of a CUDA graph of `run`.

    Raises:
        RuntimeError: `run` does something that a graph cannot hold, such as waiting for the device.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # libraries allocate their workspaces, kernels are compiled
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def median_seconds(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Returns the median time of `run`, after warm-ups: by events on CUDA, else by the clock."""
    for _ in range(WARM_UPS):
        run()
    return statistics.median(_seconds(run, device) for _ in range(repeats))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3


def measure_bandwidth(device: torch.device, repeats: int) -> float:
    """Returns bytes a second, read and written, of a large copy inside the device's memory."""
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), repeats, device)


def count_weight_bytes(model: CloverForCausalLM, num_tokens: int, experts: Sequence[int]) -> int:
    """Returns the bytes of weights that a pass reads, each of them once.

    Every weight but the embedding, of which one row a token is read, and the experts not used. The
    preview's own tensors always count: 1.5 MB of the 35B shape.

    Args:
        model: the model, whose head is not tied to its embedding.
        num_tokens: of all rows.
        experts: different experts used in each MoE layer.
    """
    embedding = model.model.embed_tokens.weight
    num_bytes = sum(weight.nbytes for weight in model.parameters()) - embedding.nbytes
    num_bytes += num_tokens * embedding[0].nbytes
    layers = [layer for layer in model.modules() if isinstance(layer, Experts)]
    for layer, num_used in zip(layers, experts, strict=True):
        num_experts = len(layer.gate_up_proj)
        num_bytes -= (num_experts - num_used) * sum(w[0].nbytes for w in layer.parameters())
    return num_bytes


def count_cache_bytes(cache: Cache, what: Pass) -> int:
    """Returns the bytes of keys, values, rings and states that a pass reads, and writes if it commits."""
    num_keys = cache.lengths[0] + what.num_clean + what.block_size
    num_bytes = 0
    for layer in cache.layers:
        if isinstance(layer, AttentionCache):
            num_bytes += sum(tensor[:, :num_keys].nbytes for tensor in layer.tensors())
        else:
            state_bytes = sum(tensor.nbytes for tensor in layer.tensors())
            num_bytes += state_bytes * (2 if what.num_clean else 1)
    return num_bytes


def measure(workload: Workload, what: Pass, report: Report, *, is_graph: bool) -> Measurement:
    """Returns what one pass takes, run from Python or replayed as a graph.

    Raises:
        RuntimeError: the pass cannot be captured as a graph.
    """
    model, cache = workload.model, workload.cache
    is_cuda = model.device.type == "cuda"
    for layer in model.modules():
        if isinstance(layer, SparseMoe):
            layer.coreset_size = what.coreset_size
    run: Callable[[], object] = (
        StaticPass(workload, what).run if is_graph else lambda: workload.run(what)
    )
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = median_seconds(capture(run) if is_graph else run, report.repeats, model.device)
    peak = torch.cuda.max_memory_allocated() if is_cuda else peak_bytes()
    with record_expert_choices(model) as choices:
        run()
    experts = [choice.unique().numel() for choice in choices]
    num_tokens = cache.batch_size * (what.num_clean + what.block_size)
    weight_bytes = count_weight_bytes(model, num_tokens, experts)
    cache_bytes = count_cache_bytes(cache, what)
    bytes_per_second = (weight_bytes + cache_bytes) / seconds
    return Measurement(
        name=what.name,
        coreset_size=what.coreset_size,
        batch_size=cache.batch_size,
        is_graph=is_graph,
        seconds=seconds,
        experts_used=experts,
        weight_bytes=weight_bytes,
        cache_bytes=cache_bytes,
        bytes_per_second=bytes_per_second,
        bandwidth_share=bytes_per_second / report.bandwidth,
        peak_bytes=peak,
    )


def decoding_rates(measurements: Sequence[Measurement], tpfs: Sequence[float]) -> list[Rate]:
    """Returns the tokens a second that the measured passes give at each TPF.

    Autoregressive decoding emits one token a pass. A block of `threshold` takes n / TPF passes, the
    first of which commits the block before. Each pass of `exact` emits TPF tokens. Where a pass was
    not measured, its policies are left out.
    """
    seconds = {(m.name, m.coreset_size, m.batch_size, m.is_graph): m.seconds for m in measurements}
    rates = []
    for name, coreset_size, batch_size, is_graph in seconds:
        case = coreset_size, batch_size, is_graph
        found: list[tuple[str, float, float]] = []  # policy, TPF, seconds a token
        if name == "commit":
            found.append(("autoregressive", 1.0, seconds[name, *case]))
        elif name == "commit_and_preview" and ("preview", *case) in seconds:
            fused, preview = seconds[name, *case], seconds["preview", *case]
            for tpf in tpfs:
                block = fused + (BLOCK_SIZE / tpf - 1) * preview
                found.append(("threshold", tpf, block / BLOCK_SIZE))
        elif name == "verify_and_preview":
            found += [("exact", tpf, seconds[name, *case] / tpf) for tpf in tpfs]
        rates += [
            Rate(
                policy=policy,
                coreset_size=coreset_size,
                batch_size=batch_size,
                is_graph=is_graph,
                tpf=tpf,
                tokens_per_second=batch_size / seconds_per_token,
            )
            for policy, tpf, seconds_per_token in found
        ]
    return rates


def main(arguments: Sequence[str] | None = None) -> int:
    started = time.monotonic()
    options = parse_options(arguments)
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    config = shape_toy() if options.toy else shape_35b()
    model = build_model(config, dtype, device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    report = start_report(model, options, time.monotonic() - started)
    print(describe(report))
    # Graphs come last, so that one that fails takes nothing with it.
    for is_graph in (False, True) if can_capture(model) else (False,):
        for batch_size in options.batch:
            workload = Workload(model, batch_size, options.history)
            for what in list_passes(options.coreset):
                place = pass_name(what.name, what.coreset_size, batch_size, is_graph)
                if time.monotonic() - started >= options.budget:
                    report.skipped[place] = f"the budget of {options.budget:g} seconds is spent"
                    continue
                try:
                    found = measure(workload, what, report, is_graph=is_graph)
                except RuntimeError as error:
                    if not is_graph:
                        raise
                    report.skipped[place] = str(error).partition("\n")[0]
                    continue
                report.measurements.append(found)
                print(describe_measurement(found), flush=True)
                write_report(report, options.json)
    report.rates = decoding_rates(report.measurements, options.tpf)
    print(describe_rates(report.rates))
    for place, reason in report.skipped.items():
        print(f"not measured: {place}: {reason}")
    write_report(report, options.json)
    return 0


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--toy", action="store_true", help="a tiny model instead of the 35B shape")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default_device)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="rows; default: 1 8")
    parser.add_argument(
        "--history", type=int, default=1024, help="tokens committed before a pass; default: 1024"
    )
    parser.add_argument(
        "--coreset", type=int, nargs="*", default=[48, 32], help="default: 48 32, beside none"
    )
    parser.add_argument(
        "--tpf",
        type=float,
        nargs="+",
        default=[2.0, 4.0, 6.0],
        help="tokens per pass that rates are computed for; default: 2 4 6",
    )
    parser.add_argument("--repeats", type=int, default=20, help="of each pass; default: 20")
    parser.add_argument(
        "--budget", type=float, default=480.0, help="seconds after which no pass is begun"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.toy:
        parser.error("the 35B shape needs a GPU, and none was found; a CPU runs --toy")
    if not all(1 <= tpf <= BLOCK_SIZE for tpf in options.tpf):
        parser.error(f"--tpf is {options.tpf}; allowed: 1 to {BLOCK_SIZE}")
    return options


def start_report(
    model: CloverForCausalLM, options: argparse.Namespace, build_seconds: float
) -> Report:
    """Returns the report of a run that has measured nothing yet, but for an unknown bandwidth."""
    name = platform.machine()
    if model.device.type == "cuda":
        name = torch.cuda.get_device_name(model.device)
    bandwidth = BANDWIDTHS.get(name)
    return Report(
        shape="toy" if options.toy else "35B",
        device=name,
        torch_version=torch.__version__,
        dtype=options.dtype,
        uses_fla=model.device.type == "cuda" and has_fla(),
        num_parameters=sum(weight.numel() for weight in model.parameters()),
        history_tokens=options.history,
        repeats=options.repeats,
        build_seconds=build_seconds,
        bandwidth=bandwidth or measure_bandwidth(model.device, options.repeats),
        is_bandwidth_measured=bandwidth is None,
    )


def can_capture(model: CloverForCausalLM) -> bool:
    """True if a graph can hold the model's passes: in other dtypes grouped products ask the host."""
    return model.device.type == "cuda" and model.dtype == torch.bfloat16


def write_report(report: Report, path: Path | None) -> None:
    """Writes all that is known so far, so that a run that is cut short leaves it."""
    if path is not None:
        path.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")


def pass_name(name: str, coreset_size: int | None, batch_size: int, is_graph: bool) -> str:
    """Returns one pass in words, in columns."""
    coreset = "no coreset" if coreset_size is None else f"coreset {coreset_size}"
    if name in ("commit", "autoregressive"):
        coreset = ""
    way = "graph" if is_graph else "eager"
    return f"{name:18}  {coreset:11}  batch {batch_size:<3} {way}"


def describe(report: Report) -> str:
    """Returns what runs where, and the heads of the columns."""
    source = "by copying" if report.is_bandwidth_measured else "data sheet"
    heads = (
        f"{'ms':>9} {'experts':>8} {'weights':>9} {'cache':>9} {'GB/s':>8} {'limit':>6} {'peak':>8}"
    )
    return (
        f"{report.shape} shape, {report.num_parameters / 1e9:.3f} B parameters in {report.dtype}, "
        f"{report.device}, torch {report.torch_version}, "
        f"FLA kernels: {'yes' if report.uses_fla else 'no'}\n"
        f"built in {report.build_seconds:.1f} s; {report.history_tokens} tokens of history, "
        f"medians of {report.repeats}; bandwidth limit {report.bandwidth / GB:.0f} GB/s ({source})\n"
        f"\n{'':45}{heads}"
    )


def describe_measurement(found: Measurement) -> str:
    """Returns one line of the table. Sizes are in GB, 10^9 bytes."""
    name = pass_name(found.name, found.coreset_size, found.batch_size, found.is_graph)
    return (
        f"{name:45}{1e3 * found.seconds:9.3f} {statistics.mean(found.experts_used):8.1f} "
        f"{found.weight_bytes / GB:9.4f} {found.cache_bytes / GB:9.4f} "
        f"{found.bytes_per_second / GB:8.1f} {found.bandwidth_share:6.1%} {found.peak_bytes / GB:8.2f}"
    )


def describe_rates(rates: Sequence[Rate]) -> str:
    """Returns the table of computed rates."""
    lines = [f"\n{'':45}{'TPF':>6} {'tokens/s':>10}"]
    for rate in rates:
        name = pass_name(rate.policy, rate.coreset_size, rate.batch_size, rate.is_graph)
        lines.append(f"{name:45}{rate.tpf:6.1f} {rate.tokens_per_second:10.1f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
