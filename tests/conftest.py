"""Fixtures shared by several test folders. torch is imported inside them: text tests start fast."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import pytest
from hypothesis import HealthCheck, settings

from clover.config import (
    AttentionConfig,
    DeltaNetConfig,
    DenseMlpConfig,
    DiffusionConfig,
    ModelConfig,
    MoeConfig,
)

if TYPE_CHECKING:
    import torch

    from clover.model.transformer import CloverForCausalLM

Variant = Literal["moe", "dense"]

# Model passes take an uneven time, so there is no deadline; CI draws the same examples every time.
settings.register_profile(
    "default", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(scope="session", autouse=True)
def _interrupts_are_heard() -> None:
    """A shell starts background jobs with SIGINT ignored; tests of Ctrl-C need it back."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def make_tiny_config(
    variant: Variant = "moe", *, diffusion: bool = True, **changes: Any
) -> ModelConfig:
    """A model of two thirds GDN and one third attention that a pass of a millisecond can run.

    Grouped heads, partial rotary embedding and a coreset are all present. `changes` replaces
    fields of ModelConfig.
    """
    mlp = (
        MoeConfig(
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        )
        if variant == "moe"
        else DenseMlpConfig(intermediate_size=32)
    )
    fields: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "layer_types": ("linear_attention", "linear_attention", "full_attention"),
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
        "eos_token_ids": (1,),
        "attention": AttentionConfig(
            num_heads=4, num_kv_heads=2, head_dim=16, rotary_dim=4, rope_theta=10_000.0
        ),
        "delta_net": DeltaNetConfig(
            num_k_heads=2, num_v_heads=4, head_k_dim=8, head_v_dim=8, conv_kernel_size=4
        ),
        "mlp": mlp,
        "diffusion": DiffusionConfig(block_size=8, mask_token_id=63) if diffusion else None,
    }
    return ModelConfig(**(fields | changes))


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., ModelConfig]:
    """The factory `make_tiny_config`: tiny_config("moe" | "dense", diffusion=True, **changes)."""
    return make_tiny_config


@pytest.fixture
def seeded() -> Iterator[torch.Generator]:
    """torch seeded with 0 for the test, the earlier random state put back after it."""
    import torch

    state = torch.get_rng_state()
    try:
        yield torch.manual_seed(0)
    finally:
        torch.set_rng_state(state)


@pytest.fixture(scope="session")
def lively_model() -> CloverForCausalLM:
    """A tiny random model without EOS whose text varies and whose confidences differ."""
    import torch

    from clover.model.transformer import CloverForCausalLM

    model = CloverForCausalLM(make_tiny_config(eos_token_ids=()))
    model.init_weights(torch.Generator().manual_seed(1))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)  # a lively text instead of one token for ever
        model.lm_head.weight.mul_(8)
    return model
