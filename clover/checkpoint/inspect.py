"""What a checkpoint is, counted exactly from its headers, or from its configuration alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from clover.checkpoint.files import has_weights
from clover.checkpoint.names import Expected, Part, count_parameters, expected_tensors
from clover.checkpoint.source import LOADABLE_DTYPES, ModelTensors, dtype_name
from clover.config import ModelConfig, MoeConfig, config_to_dict, parse_config, read_config_dict

STATE_DTYPE: Final = torch.float32  # of the recurrent state, whatever the weights' dtype
_DTYPE_BY_NAME: Final = {dtype_name(dtype): dtype for dtype in LOADABLE_DTYPES}


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectReport:
    """A checkpoint in numbers. Counts are parameters, sizes are bytes.

    Attributes:
        has_weights: False: everything comes from config.json, with one dtype assumed.
        dtype: Holds most bytes; the cache is counted in it, but for the recurrent state.
        bytes_by_part: part -> dtype name -> bytes.
    """

    path: Path
    config: ModelConfig
    has_weights: bool
    dtype: torch.dtype
    num_dropped_tensors: int
    parameters_by_part: Mapping[Part, int]
    bytes_by_part: Mapping[Part, Mapping[str, int]]

    @property
    def architecture(self) -> str:
        """The name that config.json gives the model's class."""
        return str(config_to_dict(self.config)["architectures"][0])

    @property
    def num_added_parameters(self) -> int:
        """Parameters that Clover adds to its parent."""
        return self.parameters_by_part.get(Part.ADDED, 0)

    @property
    def num_parameters(self) -> int:
        """All parameters but those that Clover adds."""
        return sum(self.parameters_by_part.values()) - self.num_added_parameters

    @property
    def num_active_parameters(self) -> int:
        """Those of `num_parameters` that one token of a commit uses."""
        mlp = self.config.mlp
        if not isinstance(mlp, MoeConfig):
            return self.num_parameters
        per_expert = self.parameters_by_part[Part.EXPERTS] // mlp.num_experts
        return self.num_parameters - per_expert * (mlp.num_experts - mlp.num_experts_per_tok)

    @property
    def num_active_without_lookup(self) -> int:
        """The active ones without the input embedding, of which a token reads one row.

        Tied embeddings count, since the output reads them whole.
        """
        tied = self.config.tie_word_embeddings
        return self.num_active_parameters - (0 if tied else self.parameters_by_part[Part.EMBEDDING])

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(sum(sizes.values()) for sizes in self.bytes_by_part.values())

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that each committed token adds to the cache."""
        attention = self.config.attention
        width = 2 * attention.num_kv_heads * attention.head_dim
        return self.config.layer_types.count("full_attention") * width * self.dtype.itemsize

    @property
    def recurrent_state_bytes(self) -> int:
        """Bytes of recurrent state of one sequence, whatever its length."""
        net = self.config.delta_net
        elements = net.num_v_heads * net.head_k_dim * net.head_v_dim
        return self.config.layer_types.count("linear_attention") * elements * STATE_DTYPE.itemsize

    @property
    def conv_state_bytes(self) -> int:
        """Bytes of convolution inputs kept for one sequence, whatever its length."""
        net = self.config.delta_net
        elements = net.conv_dim * (net.conv_kernel_size - 1)
        return self.config.layer_types.count("linear_attention") * elements * self.dtype.itemsize

    @property
    def cache_bytes_per_sequence(self) -> int:
        """Bytes of cache that a sequence needs whatever its length."""
        return self.recurrent_state_bytes + self.conv_state_bytes


def inspect_checkpoint(path: Path) -> InspectReport:
    """Returns what a checkpoint folder, or its config.json, describes. Reads no weights.

    Raises:
        ConfigError: The configuration is not understood.
        CheckpointError: There are weights, and they are damaged or not those of the configuration.
    """
    path = Path(path)
    folder = path.parent if path.name == "config.json" else path
    content = read_config_dict(folder)
    config = parse_config(content, where=str(folder / "config.json"))
    expected = expected_tensors(config)
    source = ModelTensors(folder, config) if has_weights(folder) else None
    assumed = _declared_dtype(content)
    dtypes = {name: source.specs[name].dtype if source else assumed for name in expected}
    return InspectReport(
        path=path,
        config=config,
        has_weights=source is not None,
        dtype=source.main_dtype if source else assumed,
        num_dropped_tensors=len(source.dropped) if source else 0,
        parameters_by_part=count_parameters(config),
        bytes_by_part=_count_bytes(expected, dtypes),
    )


def _declared_dtype(content: Mapping[str, Any]) -> torch.dtype:
    text = content.get("text_config", {})
    for values in (content, text):
        for key in ("dtype", "torch_dtype"):
            if values.get(key) in _DTYPE_BY_NAME:
                return _DTYPE_BY_NAME[values[key]]
    return torch.bfloat16


def _count_bytes(
    expected: Mapping[str, Expected], dtypes: Mapping[str, torch.dtype]
) -> dict[Part, dict[str, int]]:
    sizes: defaultdict[Part, Counter[str]] = defaultdict(Counter)
    for name, item in expected.items():
        dtype = dtypes[name]
        sizes[item.part][dtype_name(dtype)] += item.num_elements * dtype.itemsize
    return {part: dict(sizes[part]) for part in Part if part in sizes}


def render_report(report: InspectReport) -> list[str]:
    """Returns the report as lines of text."""
    config, added = report.config, report.num_added_parameters
    num_attentions = config.layer_types.count("full_attention")
    source = "with weights"
    if not report.has_weights:
        source = f"config alone, {dtype_name(report.dtype)} assumed"
    lines = [
        f"{report.path}: {report.architecture} ({source})",
        f"  layers      {config.num_layers}: {config.num_layers - num_attentions} gated delta net, "
        f"{num_attentions} attention; hidden size {config.hidden_size:,}",
        f"  vocabulary  {config.vocab_size:,}, {'' if config.tie_word_embeddings else 'un'}tied",
        *_render_model(config),
        f"  parameters  {report.num_parameters:,}" + (f" + {added:,} of Clover" if added else ""),
        f"  active      {report.num_active_parameters:,} a token "
        f"({report.num_active_without_lookup:,} without the embedding look-up)",
        f"  cache       {_size(report.kv_bytes_per_token)} a token, "
        f"{_size(report.cache_bytes_per_sequence)} a sequence "
        f"(state {_size(report.recurrent_state_bytes)} in float32, "
        f"conv {_size(report.conv_state_bytes)})",
        f"  bytes       {report.num_bytes:,} ({_size(report.num_bytes)})",
    ]
    for part, sizes in report.bytes_by_part.items():
        each = ", ".join(f"{size:,} {name}" for name, size in sizes.items())
        lines.append(f"    {part:<16}{report.parameters_by_part[part]:>16,}  {each}")
    if report.num_dropped_tensors:
        lines.append(f"  not used    {report.num_dropped_tensors} tensors of vision and MTP")
    return lines


def _render_model(config: ModelConfig) -> list[str]:
    lines = []
    if isinstance(config.mlp, MoeConfig):
        lines.append(
            f"  experts     {config.mlp.num_experts}, {config.mlp.num_experts_per_tok} a token, "
            "and a shared one"
        )
    if config.diffusion is not None:
        coreset = config.diffusion.expert_coreset_size
        lines.append(
            f"  diffusion   blocks of {config.diffusion.block_size}, "
            f"mask token {config.diffusion.mask_token_id}, "
            f"predictions {'shifted' if config.diffusion.shift_logits else 'in place'}, "
            f"{'no coreset' if coreset is None else f'coreset of {coreset} experts'}"
        )
    return lines


def _size(num_bytes: int) -> str:
    """Returns a size in the largest binary unit that keeps it at 1 or more."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
