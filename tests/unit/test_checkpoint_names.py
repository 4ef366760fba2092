"""The table of names: equal to the model, invertible, and fusing is laying bytes end to end."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

from clover.checkpoint.names import (
    NESTED_PREFIX,
    Layout,
    Part,
    count_parameters,
    expected_tensors,
    find_layout,
    is_dropped,
    source_names,
    source_shape,
    target_name,
)
from clover.config import ModelConfig, MoeConfig
from clover.model.transformer import CloverForCausalLM

TinyConfig = Callable[..., ModelConfig]
LAYOUTS = [
    Layout(prefix=prefix, per_expert=per_expert)
    for prefix, per_expert in product(["model.", NESTED_PREFIX], [False, True])
]


@pytest.mark.parametrize("variant", ["moe", "dense"])
@pytest.mark.parametrize("diffusion", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_the_expected_tensors_are_the_parameters_of_the_model(
    tiny_config: TinyConfig, variant: str, diffusion: bool, tied: bool
) -> None:
    config = tiny_config(variant, diffusion=diffusion, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = CloverForCausalLM(config)

    found = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    assert {name: item.shape for name, item in expected_tensors(config).items()} == found


@pytest.mark.parametrize("variant", ["moe", "dense"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_source_leads_back_to_its_slice_of_our_tensor(
    tiny_config: TinyConfig, variant: str, layout: Layout
) -> None:
    config = tiny_config(variant)
    seen: set[str] = set()
    for name, expected in expected_tensors(config).items():
        sources = source_names(name, config, layout)
        assert [target_name(source) for source in sources] == [
            (name, index) for index in range(len(sources))
        ]
        rows = source_shape(name, expected.shape, layout)
        assert len(sources) * torch.Size(rows).numel() == expected.num_elements
        seen.update(sources)

    assert find_layout(seen) == Layout(
        prefix=layout.prefix, per_expert=layout.per_expert and variant == "moe"
    )


def test_experts_one_by_one_laid_end_to_end_are_the_fused_tensor(tiny_config: TinyConfig) -> None:
    config = tiny_config("moe")
    assert isinstance(config.mlp, MoeConfig)
    width, hidden = config.mlp.moe_intermediate_size, config.hidden_size
    gates = torch.randn(config.mlp.num_experts, width, hidden)
    ups = torch.randn(config.mlp.num_experts, width, hidden)
    stem = "model.layers.0.mlp.experts"
    files = {f"{stem}.{e}.gate_proj.weight": gates[e] for e in range(len(gates))}
    files |= {f"{stem}.{e}.up_proj.weight": ups[e] for e in range(len(ups))}

    sources = source_names(f"{stem}.gate_up_proj", config, Layout(per_expert=True))
    laid = torch.cat([files[source].reshape(-1) for source in sources])

    fused = torch.cat([gates, ups], dim=1)  # gate rows first
    assert torch.equal(laid.reshape(fused.shape), fused)


def test_vision_and_mtp_are_dropped_even_where_they_look_like_experts() -> None:
    for name in (
        "model.visual.blocks.0.attn.qkv.weight",
        "mtp.layers.0.mlp.experts.3.up_proj.weight",
    ):
        assert is_dropped(name)
        assert target_name(name) is None
        assert find_layout([name, "model.norm.weight"]) == Layout()
    assert not is_dropped("model.language_model.norm.weight")


def test_clover_adds_four_tensors_to_each_delta_net_layer_and_nothing_else(
    tiny_config: TinyConfig,
) -> None:
    parent = expected_tensors(tiny_config("moe", diffusion=False))
    clover = expected_tensors(tiny_config("moe"))

    added = {name: item.shape for name, item in clover.items() if name not in parent}
    assert all(clover[name] == item for name, item in parent.items())
    assert added == {
        f"model.layers.{layer}.linear_attn.{name}": shape
        for layer in (0, 1)
        for name, shape in {
            "conv_right_weight": (64, 3),
            "bd_softmax_logit_scale": (4,),
            "bd_softmax_history_bias": (4,),
            "bd_softmax_history_c": (4,),
        }.items()
    }
    assert {clover[name].part for name in added} == {Part.ADDED}


def test_parts_add_up_to_the_model(tiny_config: TinyConfig) -> None:
    config = tiny_config("moe")
    with torch.device("meta"):
        model = CloverForCausalLM(config)

    assert count_parameters(config).total() == sum(p.numel() for p in model.parameters())
