"""The causal path gives the numbers of transformers' own Qwen3.5, dense and mixture of experts.

Every weight of the reference is drawn at random, norms and gates included, so that no value is one
at which two different formulas would agree.
"""

from __future__ import annotations

import functools
import random
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clover.checkpoint.convert import convert
from clover.checkpoint.load import load_model
from clover.config import (
    AttentionConfig,
    DeltaNetConfig,
    DenseMlpConfig,
    ModelConfig,
    MoeConfig,
    read_config,
)
from clover.model.transformer import CloverForCausalLM

LOGIT_TOLERANCE = 1e-4
"""Of the standard deviation of the reference logits. fp32 rounding, through four layers whose
sums run in another order, stays near 1e-5; a wrong formula is off by 1e-2 or more."""

GRADIENT_TOLERANCE = 1e-3
"""Of the largest entry of each gradient: backward sums are longer than forward ones."""

GRADIENT_FLOOR = 1e-2
"""Of the median, over weights, of their largest gradient entry: the least unit of error."""

BF16_CORRELATION = 0.99
"""bf16 keeps 8 bits: a few percent of noise per logit, but the same ranking."""

VOCAB_SIZE = 61
MASK_TOKEN_ID = 60
ROPE_THETA = 1000.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What differs between the reference models; names are those of their config."""

    layer_types: tuple[str, ...] = ("linear_attention",) * 3 + ("full_attention",)
    hidden_size: int = 32
    heads: tuple[int, int, int] = (4, 2, 16)
    partial_rotary_factor: float = 0.25
    key_heads: tuple[int, int] = (2, 8)
    value_heads: tuple[int, int] = (4, 8)
    kernel: int = 4
    experts: tuple[int, int] | None = (6, 2)
    mlp_size: int = 24
    shared_expert_size: int = 20
    eps: float = 1e-6
    tied: bool = False


SHAPES = {
    "moe": Shape(),
    "moe, one expert per token, tied, half rotary": Shape(
        experts=(3, 1), tied=True, heads=(3, 1, 8), partial_rotary_factor=0.5, value_heads=(6, 12)
    ),
    "moe, four experts per token, full rotary, kernel 3": Shape(
        experts=(8, 4),
        heads=(2, 2, 8),
        partial_rotary_factor=1.0,
        key_heads=(1, 16),
        value_heads=(3, 4),
        kernel=3,
        shared_expert_size=8,
    ),
    "moe, three experts per token, large epsilon": Shape(
        experts=(5, 3), eps=1e-2, key_heads=(3, 8), value_heads=(3, 8)
    ),
    "dense": Shape(experts=None),
    "dense, tied, attention first, kernel 2": Shape(
        experts=None,
        tied=True,
        kernel=2,
        layer_types=("full_attention", "linear_attention", "linear_attention"),
        heads=(4, 1, 12),
        partial_rotary_factor=0.5,
        key_heads=(1, 8),
        value_heads=(4, 16),
        hidden_size=40,
    ),
}

every_shape = pytest.mark.parametrize("name", SHAPES)


def reference_config(shape: Shape) -> Any:
    """Returns the transformers config of a shape."""
    from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig

    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": len(shape.layer_types),
        "layer_types": list(shape.layer_types),
        "num_attention_heads": shape.heads[0],
        "num_key_value_heads": shape.heads[1],
        "head_dim": shape.heads[2],
        "linear_num_key_heads": shape.key_heads[0],
        "linear_key_head_dim": shape.key_heads[1],
        "linear_num_value_heads": shape.value_heads[0],
        "linear_value_head_dim": shape.value_heads[1],
        "linear_conv_kernel_dim": shape.kernel,
        "max_position_embeddings": 512,
        "rms_norm_eps": shape.eps,
        "tie_word_embeddings": shape.tied,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": ROPE_THETA,
            "partial_rotary_factor": shape.partial_rotary_factor,
        },
        "eos_token_id": 7,
        "pad_token_id": None,
    }
    if shape.experts is None:
        return Qwen3_5TextConfig(intermediate_size=shape.mlp_size, **fields)
    return Qwen3_5MoeTextConfig(
        num_experts=shape.experts[0],
        num_experts_per_tok=shape.experts[1],
        moe_intermediate_size=shape.mlp_size,
        shared_expert_intermediate_size=shape.shared_expert_size,
        **fields,
    )


def own_config(shape: Shape) -> ModelConfig:
    """Returns our config of a shape, written by hand."""
    num_heads, num_kv_heads, head_dim = shape.heads
    return ModelConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden_size,
        layer_types=shape.layer_types,  # type: ignore[arg-type]
        rms_norm_eps=shape.eps,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=512,
        attention=AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rotary_dim=int(head_dim * shape.partial_rotary_factor),
            rope_theta=ROPE_THETA,
        ),
        delta_net=DeltaNetConfig(
            num_k_heads=shape.key_heads[0],
            num_v_heads=shape.value_heads[0],
            head_k_dim=shape.key_heads[1],
            head_v_dim=shape.value_heads[1],
            conv_kernel_size=shape.kernel,
        ),
        mlp=DenseMlpConfig(intermediate_size=shape.mlp_size)
        if shape.experts is None
        else MoeConfig(
            num_experts=shape.experts[0],
            num_experts_per_tok=shape.experts[1],
            moe_intermediate_size=shape.mlp_size,
            shared_expert_intermediate_size=shape.shared_expert_size,
        ),
        eos_token_ids=(7,),
    )


@torch.no_grad()
def randomise(module: torch.nn.Module, seed: int) -> None:
    """Moves every weight away from its initial value; matrices keep activations near 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("A_log"):
            weight.copy_(noise - 1.0)
        elif weight.dim() == 1:
            weight.add_(0.3 * noise)
        elif name.endswith("embed_tokens.weight"):
            weight.copy_(noise)
        elif name.endswith("conv1d.weight"):
            weight.copy_(0.5 * noise)
        else:
            weight.copy_(noise * weight.shape[-1] ** -0.5)
    for mixer in (m for m in module.modules() if hasattr(m, "in_proj_qkv")):
        align_queries_with_keys(mixer.in_proj_qkv.weight, mixer.key_dim)
        align_queries_with_keys(mixer.conv1d.weight, mixer.key_dim)


def align_queries_with_keys(weight: Tensor, key_dim: int) -> None:
    """Moves the query rows towards the key rows.

    After one token a head's output is (q^ . k^) v, and a norm follows: with independent rows some
    of those products are nearly zero, and the norm blows up their rounding errors in both models.
    """
    weight[:key_dim] = weight[key_dim : 2 * key_dim] + 0.4 * weight[:key_dim]


@functools.cache
def reference_model(name: str) -> torch.nn.Module:
    """Returns a transformers model with random weights."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM

    shape = SHAPES[name]
    kind = Qwen3_5ForCausalLM if shape.experts is None else Qwen3_5MoeForCausalLM
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own deprecations
        model = kind._from_config(
            reference_config(shape), dtype=torch.float32, attn_implementation="eager"
        )
    randomise(model, seed=list(SHAPES).index(name))
    return model.eval()


@functools.cache
def own_model(name: str, dtype: torch.dtype = torch.float32) -> CloverForCausalLM:
    """Returns our model with the reference's weights, copied name by name."""
    model = CloverForCausalLM(own_config(SHAPES[name]))
    reference, own = (dict(m.named_parameters()) for m in (reference_model(name), model))
    assert own.keys() == reference.keys()  # a tied lm_head is in neither
    with torch.no_grad():
        for weight_name, weight in own.items():
            assert weight.shape == reference[weight_name].shape
            weight.copy_(reference[weight_name])
    return model.to(dtype).eval()


@torch.no_grad()
def reference_logits(name: str, input_ids: Tensor) -> Tensor:
    """Returns the reference's logits of whole rows, without a cache."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logits = reference_model(name)(input_ids=input_ids, use_cache=False).logits
    assert isinstance(logits, Tensor)
    return logits.float()


def random_ids(rows: int, tokens: int, seed: int) -> Tensor:
    return torch.randint(VOCAB_SIZE, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def assert_same_logits(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert found.dtype == torch.float32
    error = (found - expected).abs().max() / expected.std()
    assert error <= LOGIT_TOLERANCE, f"{error:.2e} of the logits' standard deviation"


@every_shape
@torch.no_grad()
def test_one_batch_gives_the_reference_logits(name: str) -> None:
    input_ids = random_ids(3, 150, seed=1)  # several chunks of the delta rule
    assert_same_logits(own_model(name)(input_ids), reference_logits(name, input_ids))


@every_shape
def test_one_token_gives_the_reference_logits(name: str) -> None:
    input_ids = random_ids(2, 1, seed=2)
    assert_same_logits(own_model(name)(input_ids).detach(), reference_logits(name, input_ids))


@pytest.mark.parametrize("seed", range(4))
@every_shape
@torch.no_grad()
def test_chunks_of_random_length_give_the_reference_logits(name: str, seed: int) -> None:
    input_ids = random_ids(2, 110, seed=seed)
    splits = sorted(random.Random(seed).sample(range(1, 110), k=5))
    cache = own_model(name).new_cache(2)
    logits = [
        own_model(name).commit(cache, input_ids[:, start:end])
        for start, end in zip([0, *splits], [*splits, 110], strict=True)
    ]
    assert_same_logits(torch.cat(logits, dim=1), reference_logits(name, input_ids))
    assert list(cache.lengths) == [110, 110]


@every_shape
@torch.no_grad()
def test_token_by_token_gives_the_reference_logits(name: str) -> None:
    input_ids = random_ids(2, 24, seed=3)
    cache = own_model(name).new_cache(2)
    logits = [own_model(name).commit(cache, token) for token in input_ids.split(1, dim=1)]
    assert_same_logits(torch.cat(logits, dim=1), reference_logits(name, input_ids))


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 4096])
@every_shape
@torch.no_grad()
def test_prefill_gives_the_logits_of_each_rows_last_token(name: str, chunk_size: int) -> None:
    input_ids, lengths = random_ids(3, 40, seed=4), [40, 1, 23]
    cache = own_model(name).new_cache(3)
    last_logits = own_model(name).prefill(
        cache, input_ids, torch.tensor(lengths), chunk_size=chunk_size
    )
    expected = [
        reference_logits(name, input_ids[row : row + 1, :length])[0, -1]
        for row, length in enumerate(lengths)
    ]
    assert_same_logits(last_logits, torch.stack(expected))
    assert list(cache.lengths) == lengths


@every_shape
@torch.no_grad()
def test_rows_of_different_length_give_the_logits_of_each_row_alone(name: str) -> None:
    model, pieces = own_model(name), ([5, 0, 70, 2], [1, 3, 0, 9], [0, 12, 4, 1])
    totals = [sum(row) for row in zip(*pieces, strict=True)]
    input_ids = random_ids(4, max(totals), seed=5)
    cache, found, done = model.new_cache(4), [[] for _ in totals], [0] * 4
    for lengths in pieces:
        # Padding holds real token ids, so that a row which reads it gives another answer.
        padded = random_ids(4, max(lengths), seed=6)
        for row, length in enumerate(lengths):
            padded[row, :length] = input_ids[row, done[row] : done[row] + length]
        logits = model.commit(cache, padded, lengths=lengths)
        for row, length in enumerate(lengths):
            found[row].append(logits[row, :length])
            done[row] += length
    assert list(cache.lengths) == totals
    for row, total in enumerate(totals):
        expected = reference_logits(name, input_ids[row : row + 1, :total])
        assert_same_logits(torch.cat(found[row])[None], expected)


@every_shape
@torch.no_grad()
def test_packed_documents_give_the_logits_of_each_document_alone(name: str) -> None:
    input_ids, lengths = random_ids(1, 90, seed=7), [2, 70, 1, 14]
    document_ids = torch.full((1, 90), -1)
    expected, start = [], 0
    for document_id, length in zip([8, 3, 0, 5], lengths, strict=True):
        document_ids[0, start : start + length] = document_id
        expected.append(reference_logits(name, input_ids[:, start : start + length]))
        start += length
    logits = own_model(name)(input_ids, document_ids=document_ids)
    assert_same_logits(logits[:, :start], torch.cat(expected, dim=1))


@every_shape
@torch.no_grad()
def test_bf16_gives_finite_logits_that_follow_the_reference(name: str) -> None:
    model, input_ids = own_model(name, torch.bfloat16), random_ids(2, 80, seed=8)
    cache = model.new_cache(2)
    committed = [model.commit(cache, piece) for piece in input_ids.split(33, dim=1)]
    expected = reference_logits(name, input_ids).flatten()
    for logits in (model(input_ids), torch.cat(committed, dim=1)):
        assert logits.dtype == torch.float32
        assert torch.isfinite(logits).all()
        correlation = torch.corrcoef(torch.stack([logits.flatten(), expected]))[0, 1]
        assert correlation > BF16_CORRELATION


@every_shape
def test_gradients_are_those_of_the_reference(name: str) -> None:
    input_ids, models = random_ids(2, 70, seed=9), (own_model(name), reference_model(name))
    direction = torch.randn(2, 70, VOCAB_SIZE, generator=torch.Generator().manual_seed(9))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = models[0](input_ids), models[1](input_ids=input_ids, use_cache=False).logits
    gradients = []
    for model, logits in zip(models, outputs, strict=True):
        weights = dict(model.named_parameters())
        found = torch.autograd.grad((logits.float() * direction).sum(), list(weights.values()))
        gradients.append(dict(zip(weights, found, strict=True)))
    assert gradients[0].keys() == gradients[1].keys()
    typical = torch.stack([expected.abs().max() for expected in gradients[1].values()]).median()
    for weight_name, expected in gradients[1].items():
        # The router of a single expert per token has no gradient but rounding.
        scale = expected.abs().max().clamp(min=GRADIENT_FLOOR * typical)
        error = (gradients[0][weight_name] - expected).abs().max() / scale
        assert error <= GRADIENT_TOLERANCE, f"{weight_name}: {error:.2e}"


@every_shape
def test_the_config_that_transformers_writes_is_read_as_the_one_written_by_hand(
    name: str, tmp_path: Path
) -> None:
    reference_model(name).config.save_pretrained(tmp_path)
    assert read_config(tmp_path) == own_config(SHAPES[name])


@every_shape
@torch.no_grad()
def test_a_converted_folder_gives_the_reference_logits(name: str, tmp_path: Path) -> None:
    parent_folder, folder = tmp_path / "parent", tmp_path / "clover"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference_model(name).save_pretrained(parent_folder)
    convert(parent_folder, folder, block_size=8, mask_token_id=MASK_TOKEN_ID)
    # The mask's row is made by the conversion: it is not in the text, and not compared if tied.
    input_ids = random_ids(2, 80, seed=10) % MASK_TOKEN_ID
    expected = reference_logits(name, input_ids)[..., :MASK_TOKEN_ID]
    for model in (load_model(folder), load_model(parent_folder)):
        cache = model.new_cache(2)
        chunks = [model.commit(cache, piece) for piece in input_ids.split(27, dim=1)]
        cache = model.new_cache(2)
        tokens = [model.commit(cache, token) for token in input_ids[:, :12].split(1, dim=1)]
        assert_same_logits(model(input_ids)[..., :MASK_TOKEN_ID], expected)
        assert_same_logits(torch.cat(chunks, dim=1)[..., :MASK_TOKEN_ID], expected)
        error = (torch.cat(tokens, dim=1)[..., :MASK_TOKEN_ID] - expected[:, :12]).abs().max()
        assert error <= LOGIT_TOLERANCE * expected.std()
    assert load_model(folder).config.diffusion is not None
    assert load_model(parent_folder).config == own_config(SHAPES[name])
