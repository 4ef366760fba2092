"""THE table of tensor names: what the model calls a tensor, and what a checkpoint calls it.

One sentence holds for every row of the table: a tensor of ours is one or several tensors of the
checkpoint laid end to end. A fused `gate_up_proj` [E, 2I, H] is gate_0, up_0, gate_1, up_1, ...,
each [I, H] row-major, so that fusing and splitting are plain copies of bytes.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from clover.config import DeltaNetConfig, DenseMlpConfig, ModelConfig, MoeConfig

NESTED_PREFIX: Final = "model.language_model."
FLAT_PREFIX: Final = "model."

# Parts of a parent that Clover does not use.
DROPPED_PREFIXES: Final[Mapping[str, str]] = {
    "model.visual.": "the vision tower",
    "mtp.": "the multi-token prediction head",
}

CONV_RIGHT_WEIGHT: Final = "conv_right_weight"
LOGIT_SCALE: Final = "bd_softmax_logit_scale"
HISTORY_BIAS: Final = "bd_softmax_history_bias"
HISTORY_C: Final = "bd_softmax_history_c"
ADDED_TENSORS: Final = (CONV_RIGHT_WEIGHT, LOGIT_SCALE, HISTORY_BIAS, HISTORY_C)

EMBEDDING: Final = "model.embed_tokens.weight"
LM_HEAD: Final = "lm_head.weight"


class Part(StrEnum):
    """What a tensor belongs to, in the order of the model."""

    EMBEDDING = "embedding"
    DELTA_NET = "gated delta net"
    ADDED = "added by Clover"
    ATTENTION = "attention"
    ROUTER = "router"
    EXPERTS = "experts"
    SHARED_EXPERT = "shared expert"
    MLP = "mlp"
    NORMS = "norms"
    LM_HEAD = "lm_head"


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What a configuration says of one tensor. Its dtype may be any of `LOADABLE_DTYPES`."""

    shape: tuple[int, ...]
    part: Part

    @property
    def num_elements(self) -> int:
        """Number of parameters."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a checkpoint names its text tensors."""

    prefix: str = FLAT_PREFIX
    per_expert: bool = False


def expected_tensors(config: ModelConfig) -> dict[str, Expected]:
    """Returns every tensor of a model by our name, in the order of the model."""
    hidden, vocab = config.hidden_size, config.vocab_size
    tensors = {EMBEDDING: Expected(shape=(vocab, hidden), part=Part.EMBEDDING)}
    for layer, layer_type in enumerate(config.layer_types):
        prefix = f"model.layers.{layer}."
        shapes: dict[str, tuple[Part, tuple[int, ...]]] = {
            "input_layernorm.weight": (Part.NORMS, (hidden,)),
            **(_delta_net(config) if layer_type == "linear_attention" else _attention(config)),
            "post_attention_layernorm.weight": (Part.NORMS, (hidden,)),
            **_mlp(config),
        }
        for name, (part, shape) in shapes.items():
            tensors[prefix + name] = Expected(shape=shape, part=part)
    tensors["model.norm.weight"] = Expected(shape=(hidden,), part=Part.NORMS)
    if not config.tie_word_embeddings:
        tensors[LM_HEAD] = Expected(shape=(vocab, hidden), part=Part.LM_HEAD)
    return tensors


_Shapes = dict[str, tuple[Part, tuple[int, ...]]]


def _delta_net(config: ModelConfig) -> _Shapes:
    net, hidden = config.delta_net, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "in_proj_qkv.weight": (net.conv_dim, hidden),
        "in_proj_z.weight": (net.value_dim, hidden),
        "in_proj_b.weight": (net.num_v_heads, hidden),
        "in_proj_a.weight": (net.num_v_heads, hidden),
        "conv1d.weight": (net.conv_dim, 1, net.conv_kernel_size),
        "dt_bias": (net.num_v_heads,),
        "A_log": (net.num_v_heads,),
        "norm.weight": (net.head_v_dim,),
        "out_proj.weight": (hidden, net.value_dim),
    }
    parts = {name: (Part.DELTA_NET, shape) for name, shape in shapes.items()}
    if config.diffusion is not None:
        parts |= {name: (Part.ADDED, shape) for name, shape in _added(net).items()}
    return {f"linear_attn.{name}": value for name, value in parts.items()}


def _added(net: DeltaNetConfig) -> dict[str, tuple[int, ...]]:
    return {
        CONV_RIGHT_WEIGHT: (net.conv_dim, net.conv_kernel_size - 1),
        LOGIT_SCALE: (net.num_v_heads,),
        HISTORY_BIAS: (net.num_v_heads,),
        HISTORY_C: (net.num_v_heads,),
    }


def _attention(config: ModelConfig) -> _Shapes:
    attention, hidden = config.attention, config.hidden_size
    q_dim = attention.num_heads * attention.head_dim
    kv_dim = attention.num_kv_heads * attention.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (2 * q_dim, hidden),  # each head: query rows, then its output gate's
        "k_proj.weight": (kv_dim, hidden),
        "v_proj.weight": (kv_dim, hidden),
        "o_proj.weight": (hidden, q_dim),
        "q_norm.weight": (attention.head_dim,),
        "k_norm.weight": (attention.head_dim,),
    }
    return {f"self_attn.{name}": (Part.ATTENTION, shape) for name, shape in shapes.items()}


def _mlp(config: ModelConfig) -> _Shapes:
    mlp, hidden = config.mlp, config.hidden_size
    if isinstance(mlp, DenseMlpConfig):
        return _swiglu("mlp.", Part.MLP, mlp.intermediate_size, hidden)
    experts, width = mlp.num_experts, mlp.moe_intermediate_size
    return {
        "mlp.gate.weight": (Part.ROUTER, (experts, hidden)),
        "mlp.experts.gate_up_proj": (Part.EXPERTS, (experts, 2 * width, hidden)),
        "mlp.experts.down_proj": (Part.EXPERTS, (experts, hidden, width)),
        **_swiglu(
            "mlp.shared_expert.", Part.SHARED_EXPERT, mlp.shared_expert_intermediate_size, hidden
        ),
        "mlp.shared_expert_gate.weight": (Part.SHARED_EXPERT, (1, hidden)),
    }


def _swiglu(prefix: str, part: Part, width: int, hidden: int) -> _Shapes:
    return {
        f"{prefix}gate_proj.weight": (part, (width, hidden)),
        f"{prefix}up_proj.weight": (part, (width, hidden)),
        f"{prefix}down_proj.weight": (part, (hidden, width)),
    }


def count_parameters(config: ModelConfig) -> Counter[Part]:
    """Returns the number of parameters in each part of a model."""
    counts: Counter[Part] = Counter()
    for item in expected_tensors(config).values():
        counts[item.part] += item.num_elements
    return counts


def is_dropped(name: str) -> bool:
    """Whether a checkpoint's tensor belongs to a part that Clover does not use."""
    return name.startswith(tuple(DROPPED_PREFIXES))


def find_layout(names: Iterable[str]) -> Layout:
    """Returns the layout that a checkpoint's names follow."""
    names = [name for name in names if not is_dropped(name)]
    return Layout(
        prefix=NESTED_PREFIX
        if any(name.startswith(NESTED_PREFIX) for name in names)
        else FLAT_PREFIX,
        per_expert=any(_EXPERT.search(name) for name in names),
    )


_EXPERT: Final = re.compile(r"\.mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")
_FUSED: Final[Mapping[str, tuple[str, ...]]] = {
    ".mlp.experts.gate_up_proj": ("gate_proj", "up_proj"),
    ".mlp.experts.down_proj": ("down_proj",),
}


def source_names(name: str, config: ModelConfig, layout: Layout) -> tuple[str, ...]:
    """Returns the checkpoint's tensors that make ours when laid end to end."""
    external = name
    if name.startswith(FLAT_PREFIX):
        external = layout.prefix + name.removeprefix(FLAT_PREFIX)
    fused = next((suffix for suffix in _FUSED if name.endswith(suffix)), None)
    if fused is None or not layout.per_expert or not isinstance(config.mlp, MoeConfig):
        return (external,)
    stem = external.removesuffix(fused)
    return tuple(
        f"{stem}.mlp.experts.{expert}.{projection}.weight"
        for expert in range(config.mlp.num_experts)
        for projection in _FUSED[fused]
    )


def source_shape(name: str, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """Returns the shape of each of `source_names`, given the shape of ours."""
    fused = next((suffix for suffix in _FUSED if name.endswith(suffix)), None)
    if fused is None or not layout.per_expert:
        return shape
    return (shape[1] // len(_FUSED[fused]), *shape[2:])


def target_name(source: str) -> tuple[str, int] | None:
    """Returns our tensor that a checkpoint's tensor is a slice of, and which slice.

    None for a tensor that Clover does not use. The inverse of `source_names`.
    """
    if is_dropped(source):
        return None
    name = source
    if source.startswith(NESTED_PREFIX):
        name = FLAT_PREFIX + source.removeprefix(NESTED_PREFIX)
    match = _EXPERT.search(name)
    if match is None:
        return name, 0
    expert, projection = int(match[1]), match[2]
    for suffix, projections in _FUSED.items():
        if projection in projections:
            index = expert * len(projections) + projections.index(projection)
            return name[: match.start()] + suffix, index
    raise AssertionError(f"{projection} is in no fused tensor")
