"""config.json is read strictly: what is not understood stops, with its name."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clover.config import (
    AttentionConfig,
    DeltaNetConfig,
    DenseMlpConfig,
    DiffusionConfig,
    LayerType,
    ModelConfig,
    MoeConfig,
    config_to_dict,
    parse_config,
    read_config,
)
from clover.errors import ConfigError

# The released configuration of the 35B parent, vision shortened.
QWEN_35B: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "image_token_id": 248056,
    "language_model_only": False,
    "model_type": "qwen3_5_moe",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": 248044,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "output_gate_type": "swish",
        "output_router_logits": False,
        "pad_token_id": None,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 248320,
    },
    "tie_word_embeddings": False,
    "transformers_version": "4.57.1",
    "video_token_id": 248057,
    "vision_config": {"depth": 27, "model_type": "qwen3_5_moe"},
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}

LAYER_TYPES_35B: tuple[LayerType, ...] = (
    "linear_attention",
    "linear_attention",
    "linear_attention",
    "full_attention",
) * 10

TinyConfig = Callable[..., ModelConfig]


def flat_parent() -> dict[str, Any]:
    """The text part alone, as the ...ForCausalLM layout has it."""
    return copy.deepcopy(QWEN_35B["text_config"])


def test_the_released_35b_configuration_is_read_exactly() -> None:
    config = parse_config(QWEN_35B)

    assert config == ModelConfig(
        vocab_size=248320,
        hidden_size=2048,
        layer_types=LAYER_TYPES_35B,
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
    assert config.num_layers == 40
    assert config.delta_net.conv_dim == 8192


def test_the_nested_and_the_flat_layout_say_the_same() -> None:
    flat = flat_parent() | {"architectures": ["Qwen3_5MoeForCausalLM"]}

    assert parse_config(flat) == parse_config(QWEN_35B)


def test_layer_types_follow_from_the_attention_interval_when_they_are_not_listed() -> None:
    content = flat_parent()
    del content["layer_types"]

    assert parse_config(content) == parse_config(QWEN_35B)


def test_rope_beside_the_other_fields_reads_like_rope_parameters() -> None:
    content = flat_parent()
    del content["rope_parameters"]
    content |= {"rope_theta": 10000000, "rope_type": "default", "rope_scaling": None}

    assert parse_config(content) == parse_config(QWEN_35B)


def test_tied_embeddings_may_be_said_by_the_outer_object_alone() -> None:
    content = copy.deepcopy(QWEN_35B)
    del content["text_config"]["tie_word_embeddings"]
    content["tie_word_embeddings"] = True

    assert parse_config(content).tie_word_embeddings


def test_several_end_tokens_are_kept_in_order_and_once() -> None:
    content = flat_parent() | {"eos_token_id": [248046, 248044, 248046]}

    assert parse_config(content).eos_token_ids == (248046, 248044)


@pytest.mark.parametrize("variant", ["moe", "dense"])
@pytest.mark.parametrize("diffusion", [True, False])
def test_what_is_written_is_read_back(
    tiny_config: TinyConfig, variant: str, diffusion: bool
) -> None:
    config = tiny_config(variant, diffusion=diffusion, pad_token_id=2, eos_token_ids=(3, 1))

    content = json.loads(json.dumps(config_to_dict(config)))

    assert parse_config(content) == config
    assert config_to_dict(parse_config(content)) == content


def test_a_clover_model_has_the_released_names(tiny_config: TinyConfig) -> None:
    moe, dense = config_to_dict(tiny_config("moe")), config_to_dict(tiny_config("dense"))

    assert (moe["architectures"], moe["model_type"]) == (["CloverMoeModelLM"], "clover_moe")
    assert (dense["architectures"], dense["model_type"]) == (["CloverModelLM"], "clover")
    assert (moe["block_size"], moe["mask_token_id"], moe["shift_logits"]) == (8, 63, True)


@given(head_dim=st.integers(2, 400), data=st.data())
def test_no_rotary_width_is_lost_in_the_factor(head_dim: int, data: st.DataObject) -> None:
    rotary_dim = 2 * data.draw(st.integers(1, head_dim // 2))
    config = parse_config(QWEN_35B)
    attention = AttentionConfig(
        num_heads=2, num_kv_heads=1, head_dim=head_dim, rotary_dim=rotary_dim, rope_theta=1e4
    )
    changed = dataclasses.replace(config, attention=attention)

    assert parse_config(config_to_dict(changed)) == changed


def test_transformers_and_clover_read_each_others_files(tmp_path: Path) -> None:
    from transformers import AutoConfig, Qwen3_5MoeTextConfig

    theirs = Qwen3_5MoeTextConfig(num_hidden_layers=4, eos_token_id=[7, 9])
    theirs.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_to_dict(config)))
    again = AutoConfig.from_pretrained(tmp_path)

    assert config.layer_types == ("linear_attention",) * 3 + ("full_attention",)
    assert config.eos_token_ids == (7, 9)
    assert isinstance(again, Qwen3_5MoeTextConfig)
    for name in ("hidden_size", "layer_types", "num_experts", "rms_norm_eps", "rope_parameters"):
        assert getattr(again, name) == getattr(theirs, name)
    assert parse_config(theirs.to_dict()) == config


BAD_VALUES: list[tuple[str, Any, str]] = [
    ("hidden_act", "gelu", '"silu"'),
    ("attention_bias", True, "false"),
    ("attention_dropout", 0.1, "0"),
    ("attn_output_gate", False, "true"),
    ("output_gate_type", "sigmoid", '"silu" or "swish"'),
    ("mlp_only_layers", [3], "[]"),
    ("decoder_sparse_step", 2, "1"),
    ("norm_topk_prob", False, "true"),
    ("quantization_config", {"bits": 4}, "null"),
    ("rope_scaling", {"factor": 4.0}, "null"),
    ("sliding_window", 4096, "only keys that Clover understands"),
    ("layer_types", ["linear_attention"], "a list of num_hidden_layers = 40"),
    ("hidden_size", "2048", "an integer"),
    ("hidden_size", 2048.0, "an integer"),
    ("num_experts", True, "an integer"),
    ("vocab_size", None, "an integer"),
    ("rms_norm_eps", "small", "a number"),
    ("rms_norm_eps", float("nan"), "a finite number"),
    ("tie_word_embeddings", 1, "true or false"),
    ("eos_token_id", "<|im_end|>", "an integer or a list of integers"),
    ("rope_parameters", "default", "an object"),
    ("partial_rotary_factor", 0.5, "0.25 as in rope_parameters"),
    ("model_type", "qwen3_next", "one of qwen3_5_moe_text"),
    ("model_type", ["qwen3_5_moe_text"], "one of qwen3_5_moe_text"),
    ("architectures", ["Qwen3NextForCausalLM"], "Qwen3_5MoeForCausalLM"),
    ("architectures", [{}], "Qwen3_5MoeForCausalLM"),
    ("architectures", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForCausalLM"),
    ("block_size", 32, "only keys that Clover understands"),
]


@pytest.mark.parametrize(("key", "value", "expected"), BAD_VALUES)
def test_a_value_that_is_not_understood_is_named_with_what_was_expected_and_found(
    key: str, value: Any, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(flat_parent() | {key: value}, where="models/x/config.json")

    message = str(caught.value)
    assert message.startswith("models/x/config.json: ")
    assert key in message
    assert f"expected {expected}" in message
    assert f"found {json.dumps(value)}" in message


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "num_experts", "linear_conv_kernel_dim", "head_dim"]
)
def test_a_missing_key_is_named(key: str) -> None:
    content = flat_parent()
    del content[key]

    with pytest.raises(ConfigError, match=f"{key}: expected an integer, found nothing"):
        parse_config(content)


def test_an_unknown_layer_type_is_named_with_its_place() -> None:
    content = flat_parent()
    content["layer_types"][5] = "sliding_attention"

    with pytest.raises(ConfigError, match=r"layer_types\[5\].*sliding_attention"):
        parse_config(content)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_type": "yarn"}, 'rope_type: expected "default", found "yarn"'),
        ({"type": "linear"}, 'type: expected "default", found "linear"'),
        ({"factor": 4.0}, "rope_parameters.factor"),
        ({"rope_theta": None}, "rope_theta: expected a number, found null"),
    ],
)
def test_only_plain_rope_is_accepted(changes: dict[str, Any], named: str) -> None:
    content = flat_parent()
    content["rope_parameters"] |= changes

    with pytest.raises(ConfigError, match=named):
        parse_config(content)


def test_an_unknown_key_beside_the_text_config_is_named() -> None:
    with pytest.raises(ConfigError, match="audio_config"):
        parse_config(QWEN_35B | {"audio_config": {}})


def test_a_text_config_of_the_other_variant_is_refused() -> None:
    content = copy.deepcopy(QWEN_35B)
    content["text_config"]["model_type"] = "qwen3_5_text"

    with pytest.raises(ConfigError, match=r"text_config.model_type.*qwen3_5_moe_text"):
        parse_config(content)


def test_two_opinions_about_tied_embeddings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"text_config\.tie_word_embeddings"):
        parse_config(QWEN_35B | {"tie_word_embeddings": True})


def test_a_folder_without_a_configuration_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    for path in (tmp_path, tmp_path / "absent", tmp_path / "file"):
        with pytest.raises(ConfigError, match=r"found no such file\. Give the folder"):
            read_config(path)


@pytest.mark.parametrize("text", ["{", "[]", '"x"', "\xff"])
def test_a_configuration_that_is_not_a_json_object_is_a_clear_error(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")

    with pytest.raises(ConfigError, match="expected a JSON object"):
        read_config(tmp_path)


ATTENTION = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "rotary_dim": 4, "rope_theta": 1e4}
DELTA_NET = {
    "num_k_heads": 2,
    "num_v_heads": 4,
    "head_k_dim": 8,
    "head_v_dim": 8,
    "conv_kernel_size": 4,
}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}


@pytest.mark.parametrize(
    ("kind", "fields", "field", "value", "allowed"),
    [
        (AttentionConfig, ATTENTION, "num_heads", 0, "above 0"),
        (AttentionConfig, ATTENTION, "num_heads", 5, "multiples of num_kv_heads, 2"),
        (AttentionConfig, ATTENTION, "rotary_dim", 0, "2 to 16"),
        (AttentionConfig, ATTENTION, "rotary_dim", 18, "2 to 16"),
        (AttentionConfig, ATTENTION, "rotary_dim", 5, "even numbers"),
        (AttentionConfig, ATTENTION, "rope_theta", -1.0, "above 0"),
        (DeltaNetConfig, DELTA_NET, "num_v_heads", 3, "multiples of num_k_heads, 2"),
        (DeltaNetConfig, DELTA_NET, "head_k_dim", 0, "above 0"),
        (DeltaNetConfig, DELTA_NET, "conv_kernel_size", 1, "2 and more"),
        (DenseMlpConfig, {}, "intermediate_size", 0, "above 0"),
        (MoeConfig, MOE, "num_experts_per_tok", 5, "1 to 4"),
        (MoeConfig, MOE, "num_experts_per_tok", 0, "1 to 4"),
        (MoeConfig, MOE, "moe_intermediate_size", -1, "above 0"),
        (DiffusionConfig, {"mask_token_id": 0}, "block_size", 0, "above 0"),
    ],
)
def test_a_value_out_of_range_is_named_with_its_range(
    kind: type, fields: dict[str, Any], field: str, value: Any, allowed: str
) -> None:
    with pytest.raises(ConfigError, match=f"{field} is {value}; allowed: {allowed}"):
        kind(**(fields | {field: value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ()}, "layer_types is empty"),
        ({"layer_types": ("mamba",)}, r"layer_types\[0\] is 'mamba'"),
        ({"eos_token_ids": (64,)}, "eos_token_id is 64; allowed: 0 to 63"),
        ({"pad_token_id": -1}, "pad_token_id is -1; allowed: 0 to 63"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0; allowed: above 0"),
    ],
)
def test_fields_of_the_whole_model_are_checked(
    tiny_config: TinyConfig, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config("moe", **changes)


@pytest.mark.parametrize(
    ("variant", "diffusion", "message"),
    [
        ("moe", {"mask_token_id": 64}, "mask_token_id is 64; allowed: 0 to 63"),
        ("moe", {"mask_token_id": 1}, "mask_token_id is 1, which is also an eos_token_id"),
        ("moe", {"expert_coreset_size": 1}, "expert_coreset_size is 1; allowed: 2 to 4"),
        ("moe", {"expert_coreset_size": 5}, "expert_coreset_size is 5; allowed: 2 to 4"),
        ("dense", {"expert_coreset_size": 2}, "a dense model has no experts"),
    ],
)
def test_the_diffusion_part_must_fit_the_model(
    tiny_config: TinyConfig, variant: str, diffusion: dict[str, Any], message: str
) -> None:
    fields: dict[str, Any] = {"block_size": 8, "mask_token_id": 63} | diffusion

    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(tiny_config(variant), diffusion=DiffusionConfig(**fields))
