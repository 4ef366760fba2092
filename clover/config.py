"""What a model is: frozen configurations and their strict reading from `config.json`.

Every key of a `config.json` is used, or must have one value, or is ignored for a reason that the
tables below give. A key in none of them stops the reading: a silent default is a wrong model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

from clover.errors import ConfigError

LayerType = Literal["linear_attention", "full_attention"]
LAYER_TYPES: Final[tuple[LayerType, ...]] = ("linear_attention", "full_attention")


def _check_positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not value > 0:
            raise ConfigError(f"{name} is {value}; allowed: above 0.")


def _check_divides(owner: object, divisor: str, dividend: str) -> None:
    small, large = getattr(owner, divisor), getattr(owner, dividend)
    if large % small:
        raise ConfigError(f"{dividend} is {large}; allowed: multiples of {divisor}, {small}.")


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}; allowed: {low} to {high}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """Full attention with an output gate and partial rotary embedding."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float

    def __post_init__(self) -> None:
        _check_positive(self, "num_heads", "num_kv_heads", "head_dim", "rope_theta")
        _check_divides(self, "num_kv_heads", "num_heads")
        _check_range("rotary_dim", self.rotary_dim, 2, self.head_dim)
        if self.rotary_dim % 2:
            raise ConfigError(f"rotary_dim is {self.rotary_dim}; allowed: even numbers.")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaNetConfig:
    """Gated DeltaNet. Each key head serves `num_v_heads / num_k_heads` value heads."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel_size: int

    def __post_init__(self) -> None:
        _check_positive(self, "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
        _check_divides(self, "num_k_heads", "num_v_heads")
        if self.conv_kernel_size < 2:
            raise ConfigError(f"conv_kernel_size is {self.conv_kernel_size}; allowed: 2 and more.")

    @property
    def key_dim(self) -> int:
        """Width of all key heads together."""
        return self.num_k_heads * self.head_k_dim

    @property
    def value_dim(self) -> int:
        """Width of all value heads together."""
        return self.num_v_heads * self.head_v_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the short convolution: queries, keys and values side by side."""
        return 2 * self.key_dim + self.value_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseMlpConfig:
    """An ordinary SwiGLU MLP."""

    intermediate_size: int

    def __post_init__(self) -> None:
        _check_positive(self, "intermediate_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig:
    """Routed experts plus one shared expert behind a sigmoid gate."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int

    def __post_init__(self) -> None:
        _check_positive(
            self, "num_experts", "moe_intermediate_size", "shared_expert_intermediate_size"
        )
        _check_range("num_experts_per_tok", self.num_experts_per_tok, 1, self.num_experts)


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionConfig:
    """What makes a parent a Clover model."""

    block_size: int
    mask_token_id: int
    expert_coreset_size: int | None = None
    shift_logits: bool = True

    def __post_init__(self) -> None:
        _check_positive(self, "block_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """One model, of either variant. `diffusion` is None for an autoregressive parent."""

    vocab_size: int
    hidden_size: int
    layer_types: tuple[LayerType, ...]
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    attention: AttentionConfig
    delta_net: DeltaNetConfig
    mlp: DenseMlpConfig | MoeConfig
    diffusion: DiffusionConfig | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        _check_positive(
            self, "vocab_size", "hidden_size", "rms_norm_eps", "max_position_embeddings"
        )
        if not self.layer_types:
            raise ConfigError("layer_types is empty; allowed: one layer and more.")
        for index, layer_type in enumerate(self.layer_types):
            if layer_type not in LAYER_TYPES:
                raise ConfigError(
                    f"layer_types[{index}] is {layer_type!r}; allowed: {', '.join(LAYER_TYPES)}."
                )
        for token_id in self.eos_token_ids:
            _check_range("eos_token_id", token_id, 0, self.vocab_size - 1)
        if self.pad_token_id is not None:
            _check_range("pad_token_id", self.pad_token_id, 0, self.vocab_size - 1)
        if self.diffusion is not None:
            self._check_diffusion(self.diffusion)

    def _check_diffusion(self, diffusion: DiffusionConfig) -> None:
        _check_range("mask_token_id", diffusion.mask_token_id, 0, self.vocab_size - 1)
        _check_range("block_size", diffusion.block_size, 1, self.max_position_embeddings)
        if diffusion.mask_token_id in self.eos_token_ids:
            raise ConfigError(
                f"mask_token_id is {diffusion.mask_token_id}, which is also an eos_token_id; "
                "allowed: an id that no text uses."
            )
        coreset = diffusion.expert_coreset_size
        if coreset is None:
            return
        if not isinstance(self.mlp, MoeConfig):
            raise ConfigError(
                f"expert_coreset_size is {coreset}; allowed: null, a dense model has no experts."
            )
        _check_range(
            "expert_coreset_size", coreset, self.mlp.num_experts_per_tok, self.mlp.num_experts
        )

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layer_types)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """What a `model_type` promises, and the `architectures` that go with it."""

    is_moe: bool
    is_clover: bool
    architectures: tuple[str, ...]


_QWEN_MOE = _Family(
    is_moe=True,
    is_clover=False,
    architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
)
_QWEN_DENSE = _Family(
    is_moe=False,
    is_clover=False,
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
)
_CLOVER_MOE = _Family(is_moe=True, is_clover=True, architectures=("CloverMoeModelLM",))
_CLOVER_DENSE = _Family(is_moe=False, is_clover=True, architectures=("CloverModelLM",))

# The first name of each family is the one that we write.
_MODEL_TYPES: Final[Mapping[str, _Family]] = {
    "qwen3_5_moe_text": _QWEN_MOE,
    "qwen3_5_moe": _QWEN_MOE,
    "qwen3_5_text": _QWEN_DENSE,
    "qwen3_5": _QWEN_DENSE,
    "clover_moe": _CLOVER_MOE,
    "clover": _CLOVER_DENSE,
}

# Keys that may be there with these values only: another value is another architecture.
_FIXED: Final[Mapping[str, tuple[Any, ...]]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0,),
    "attn_output_gate": (True,),
    "output_gate_type": ("silu", "swish"),
    "mlp_only_layers": ([], None),
    "decoder_sparse_step": (1,),
    "norm_topk_prob": (True,),
    "mamba_ssm_dtype": ("float32",),
    "rope_scaling": (None,),
    "quantization_config": (None,),
    "is_encoder_decoder": (False,),
}

_IGNORED: Final[Mapping[str, str]] = {
    "dtype": "each tensor carries its own",
    "torch_dtype": "each tensor carries its own",
    "transformers_version": "says who wrote the file",
    "_name_or_path": "says where the file came from",
    "use_cache": "decided by the call, not by the model",
    "bos_token_id": "prompts are what the chat template renders",
    "initializer_range": "used only before the parent was trained",
    "output_router_logits": "used only while the parent was trained",
    "router_aux_loss_coef": "used only while the parent was trained",
    "mtp_num_hidden_layers": "the tensors of multi-token prediction are not used",
    "mtp_use_dedicated_embeddings": "the tensors of multi-token prediction are not used",
    "output_hidden_states": "decided by the call, not by the model",
    "output_attentions": "decided by the call, not by the model",
    "return_dict": "decided by the call, not by the model",
    "chunk_size_feed_forward": "changes memory, not results",
    "id2label": "belongs to classifiers",
    "label2id": "belongs to classifiers",
    "problem_type": "belongs to classifiers",
}

_IGNORED_WHEN_NESTED: Final[Mapping[str, str]] = {
    "vision_config": "the vision tower is not used",
    "image_token_id": "the vision tower is not used",
    "video_token_id": "the vision tower is not used",
    "vision_start_token_id": "the vision tower is not used",
    "vision_end_token_id": "the vision tower is not used",
    "language_model_only": "the vision tower is not used",
}

# With text alone the three position axes of mrope are equal, so that its sections do not matter.
_ROPE_KEYS: Final = (
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "mrope_section",
    "mrope_interleaved",
)
_MISSING: Final = object()


class _Fields:
    """A JSON object whose keys must all be read, refused or ignored before `finish`."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = dict(values)
        self._where = where

    def fail(self, key: str, expected: str, found: object) -> ConfigError:
        """Returns the error that names a key, what was expected of it and what was found."""
        shown = "nothing" if found is _MISSING else json.dumps(found, default=str)
        return ConfigError(f"{self._where}: {key}: expected {expected}, found {shown}.")

    def take(self, key: str, default: Any = None) -> Any:
        """Returns a value and marks its key as read."""
        return self._values.pop(key, default)

    def integer(self, key: str) -> int:
        """Returns an integer; JSON's booleans and fractions are not integers."""
        value = self.take(key, _MISSING)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, "an integer", value)
        return value

    def number(self, key: str) -> float:
        """Returns a finite number."""
        value = self.take(key, _MISSING)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, "a number", value)
        if not math.isfinite(value):
            raise self.fail(key, "a finite number", value)
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """Returns true or false."""
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, "true or false", value)
        return value

    def optional_integer(self, key: str) -> int | None:
        """Returns an integer, or None for null or an absent key."""
        if self._values.get(key) is None:
            self.ignore([key])
            return None
        return self.integer(key)

    def integers(self, key: str) -> tuple[int, ...]:
        """Returns the integers of a list, of one integer, or of null; each once, in order."""
        value = self.take(key)
        items = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in items):
            raise self.fail(key, "an integer or a list of integers", value)
        return tuple(dict.fromkeys(items))

    def refuse(self, fixed: Mapping[str, tuple[Any, ...]]) -> None:
        """Stops at a key whose value is another architecture than ours."""
        for key, allowed in fixed.items():
            value = self.take(key, _MISSING)
            if value is not _MISSING and not any(_equals(value, item) for item in allowed):
                raise self.fail(key, " or ".join(json.dumps(item) for item in allowed), value)

    def ignore(self, keys: Iterable[str]) -> None:
        """Marks keys as read without looking at them."""
        for key in keys:
            self._values.pop(key, None)

    def finish(self) -> None:
        """Stops at the first key that nobody has read."""
        for key, value in self._values.items():
            raise self.fail(key, "only keys that Clover understands", value)


def _equals(value: object, expected: object) -> bool:
    """Equality that tells JSON's true from 1."""
    return isinstance(value, bool) == isinstance(expected, bool) and value == expected


def read_config(folder: Path) -> ModelConfig:
    """Returns the configuration in a folder's `config.json`.

    Raises:
        ConfigError: the file is missing, is not JSON, or holds something not understood.
    """
    return parse_config(read_config_dict(folder), where=str(Path(folder) / "config.json"))


def read_config_dict(folder: Path) -> dict[str, Any]:
    """Returns a folder's `config.json` as it is written.

    Raises:
        ConfigError: the file is missing or is not a JSON object.
    """
    path = Path(folder) / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"{path}: expected a model's config.json, found no such file. "
            "Give the folder of a Hugging Face checkpoint."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: expected a JSON object, found: {error}.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(content).__name__}.")
    return content


def parse_config(content: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
    """Returns the configuration that a `config.json` object describes.

    Args:
        content: Of a Qwen3.5/3.6 parent (text part nested or flat) or of a Clover model.
        where: Named in errors.

    Raises:
        ConfigError: A key, or its value, that is not understood or out of range.
    """
    family = _read_family(content, where)
    fields = _Fields(_flatten(content, where), where)
    try:
        config = _read_model(fields, family)
    except ConfigError as error:
        raise error if where in str(error) else ConfigError(f"{where}: {error}") from None
    fields.refuse(_FIXED)
    fields.ignore(_IGNORED)
    fields.finish()
    return config


def _read_family(content: Mapping[str, Any], where: str) -> _Family:
    fields = _Fields(content, where)
    model_type = fields.take("model_type", _MISSING)
    family = _MODEL_TYPES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise fields.fail("model_type", "one of " + ", ".join(_MODEL_TYPES), model_type)
    architectures = fields.take("architectures")
    if architectures is not None and (
        not isinstance(architectures, list)
        or any(name not in family.architectures for name in architectures)
    ):
        raise fields.fail("architectures", " or ".join(family.architectures), architectures)
    return family


def _flatten(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the text model's keys, with those of the outer object where the text has none."""
    outer = {key: value for key, value in content.items() if key != "architectures"}
    model_type = outer.pop("model_type")
    if "text_config" not in outer:
        return outer
    inner = outer.pop("text_config")
    fields = _Fields({"text_config": inner}, where)
    if not isinstance(inner, dict):
        raise fields.fail("text_config", "an object", inner)
    text = {key: value for key, value in inner.items() if key != "architectures"}
    text_type = text.pop("model_type", model_type)
    if _MODEL_TYPES.get(str(text_type)) is not _MODEL_TYPES[model_type]:
        raise fields.fail("text_config.model_type", f"{model_type}_text", text_type)
    for key in _IGNORED_WHEN_NESTED:
        outer.pop(key, None)
    tied = outer.get("tie_word_embeddings")
    if text.get("tie_word_embeddings", tied) != tied and tied is not None:
        raise fields.fail(
            "text_config.tie_word_embeddings",
            f"{json.dumps(tied)} as in the outer object",
            text["tie_word_embeddings"],
        )
    return {**outer, **{key: value for key, value in text.items() if value is not None}}


def _read_model(fields: _Fields, family: _Family) -> ModelConfig:
    return ModelConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        layer_types=_read_layer_types(fields),
        rms_norm_eps=fields.number("rms_norm_eps"),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        attention=_read_attention(fields),
        delta_net=DeltaNetConfig(
            num_k_heads=fields.integer("linear_num_key_heads"),
            num_v_heads=fields.integer("linear_num_value_heads"),
            head_k_dim=fields.integer("linear_key_head_dim"),
            head_v_dim=fields.integer("linear_value_head_dim"),
            conv_kernel_size=fields.integer("linear_conv_kernel_dim"),
        ),
        mlp=_read_mlp(fields, family),
        diffusion=_read_diffusion(fields) if family.is_clover else None,
        eos_token_ids=fields.integers("eos_token_id"),
        pad_token_id=fields.optional_integer("pad_token_id"),
    )


def _read_layer_types(fields: _Fields) -> tuple[LayerType, ...]:
    num_layers = fields.integer("num_hidden_layers")
    listed = fields.take("layer_types")
    interval = fields.take("full_attention_interval")
    if listed is None:
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise fields.fail("layer_types", "a list, or a full_attention_interval", interval)
        return tuple(
            "linear_attention" if (layer + 1) % interval else "full_attention"
            for layer in range(num_layers)
        )
    if not isinstance(listed, list) or len(listed) != num_layers:
        raise fields.fail("layer_types", f"a list of num_hidden_layers = {num_layers}", listed)
    for index, layer_type in enumerate(listed):
        if layer_type not in LAYER_TYPES:
            raise fields.fail(f"layer_types[{index}]", " or ".join(LAYER_TYPES), layer_type)
    return tuple(cast("list[LayerType]", listed))


def _read_attention(fields: _Fields) -> AttentionConfig:
    head_dim = fields.integer("head_dim")
    rope = _read_rope(fields)
    factor = rope.number("partial_rotary_factor")
    return AttentionConfig(
        num_heads=fields.integer("num_attention_heads"),
        num_kv_heads=fields.integer("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=int(head_dim * factor),
        rope_theta=rope.number("rope_theta"),
    )


def _read_rope(fields: _Fields) -> _Fields:
    """Returns the rotary parameters, whether nested in `rope_parameters`, beside it, or both."""
    nested = fields.take("rope_parameters")
    if nested is not None and not isinstance(nested, dict):
        raise fields.fail("rope_parameters", "an object", nested)
    values: dict[str, Any] = dict(nested or {})
    for key in _ROPE_KEYS:
        flat = fields.take(key, _MISSING)
        if flat is not _MISSING and values.setdefault(key, flat) != flat:
            raise fields.fail(key, f"{values[key]} as in rope_parameters", flat)
    for key, value in values.items():
        if key not in _ROPE_KEYS:
            raise fields.fail(f"rope_parameters.{key}", "no such key in plain rope", value)
    rope = _Fields(values, "rope_parameters")
    rope.refuse({"rope_type": ("default",), "type": ("default",)})
    return rope


def _read_mlp(fields: _Fields, family: _Family) -> DenseMlpConfig | MoeConfig:
    if not family.is_moe:
        return DenseMlpConfig(intermediate_size=fields.integer("intermediate_size"))
    fields.ignore(["intermediate_size"])  # of dense layers, which mlp_only_layers must not list
    return MoeConfig(
        num_experts=fields.integer("num_experts"),
        num_experts_per_tok=fields.integer("num_experts_per_tok"),
        moe_intermediate_size=fields.integer("moe_intermediate_size"),
        shared_expert_intermediate_size=fields.integer("shared_expert_intermediate_size"),
    )


def _read_diffusion(fields: _Fields) -> DiffusionConfig:
    return DiffusionConfig(
        block_size=fields.integer("block_size"),
        mask_token_id=fields.integer("mask_token_id"),
        expert_coreset_size=fields.optional_integer("expert_coreset_size"),
        shift_logits=fields.boolean("shift_logits", True),
    )


def config_to_dict(config: ModelConfig) -> dict[str, Any]:
    """Returns the content of `config.json`; `parse_config` reads the same configuration back.

    A parent is written in the flat `...ForCausalLM` layout, which transformers loads.
    """
    is_moe = isinstance(config.mlp, MoeConfig)
    model_type = next(
        name
        for name, family in _MODEL_TYPES.items()
        if (family.is_moe, family.is_clover) == (is_moe, config.diffusion is not None)
    )
    return {
        "architectures": [_MODEL_TYPES[model_type].architectures[0]],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "layer_types": list(config.layer_types),
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
        "pad_token_id": config.pad_token_id,
        **_attention_to_dict(config.attention),
        **_delta_net_to_dict(config.delta_net),
        **_mlp_to_dict(config.mlp),
        **_diffusion_to_dict(config.diffusion),
    }


def _attention_to_dict(attention: AttentionConfig) -> dict[str, Any]:
    factor = attention.rotary_dim / attention.head_dim
    if int(attention.head_dim * factor) < attention.rotary_dim:  # readers truncate the product
        factor = math.nextafter(factor, 2.0)
    return {
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "attention_bias": False,
        "attn_output_gate": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": attention.rope_theta,
            "partial_rotary_factor": factor,
        },
    }


def _delta_net_to_dict(delta_net: DeltaNetConfig) -> dict[str, Any]:
    return {
        "linear_num_key_heads": delta_net.num_k_heads,
        "linear_num_value_heads": delta_net.num_v_heads,
        "linear_key_head_dim": delta_net.head_k_dim,
        "linear_value_head_dim": delta_net.head_v_dim,
        "linear_conv_kernel_dim": delta_net.conv_kernel_size,
    }


def _mlp_to_dict(mlp: DenseMlpConfig | MoeConfig) -> dict[str, Any]:
    if isinstance(mlp, DenseMlpConfig):
        return {"intermediate_size": mlp.intermediate_size}
    return {
        "num_experts": mlp.num_experts,
        "num_experts_per_tok": mlp.num_experts_per_tok,
        "moe_intermediate_size": mlp.moe_intermediate_size,
        "shared_expert_intermediate_size": mlp.shared_expert_intermediate_size,
    }


def _diffusion_to_dict(diffusion: DiffusionConfig | None) -> dict[str, Any]:
    if diffusion is None:
        return {}
    return {
        "block_size": diffusion.block_size,
        "mask_token_id": diffusion.mask_token_id,
        "expert_coreset_size": diffusion.expert_coreset_size,
        "shift_logits": diffusion.shift_logits,
    }


__all__ = [
    "LAYER_TYPES",
    "AttentionConfig",
    "ConfigError",
    "DeltaNetConfig",
    "DenseMlpConfig",
    "DiffusionConfig",
    "LayerType",
    "ModelConfig",
    "MoeConfig",
    "config_to_dict",
    "parse_config",
    "read_config",
    "read_config_dict",
]
