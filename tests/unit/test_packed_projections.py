from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from clover.config import ModelConfig
from clover.model.transformer import CloverForCausalLM

PROMPT = torch.tensor([[5, 9, 2, 30, 7]])
# A product over more columns may add up in another order: fp32 logits near 1.
TOLERANCE = 1e-5


def make_model(config: ModelConfig) -> CloverForCausalLM:
    model = CloverForCausalLM(config)
    model.init_weights(torch.Generator().manual_seed(1))
    return model


def run(model: CloverForCausalLM) -> Tensor:
    cache = model.new_cache(1)
    commit = model.commit(cache, PROMPT)
    return torch.cat([commit, model.preview(cache, torch.full((1, 8), 63))], dim=1)


def test_packed_projections_give_the_same_logits_from_as_many_products_less(
    tiny_config: Callable[..., ModelConfig],
) -> None:
    model = make_model(tiny_config())
    packed = copy.deepcopy(model)
    packed.pack_projections()
    assert (run(packed) - run(model)).abs().max() < TOLERANCE

    def count_products(model: CloverForCausalLM) -> int:
        with torch.profiler.profile() as profile:
            run(model)
        return sum(event.count for event in profile.key_averages() if event.key == "aten::linear")

    assert count_products(packed) < 0.8 * count_products(model)


def test_packing_changes_no_weight_and_no_name_and_is_saved_like_any_other(
    tiny_config: Callable[..., ModelConfig], tmp_path: Path
) -> None:
    model = make_model(tiny_config())
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.pack_projections()
    model.pack_projections()
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    assert list(saved) == sorted(before)
    assert all(torch.equal(saved[name], weight) for name, weight in before.items())


def test_weights_that_change_or_move_after_packing_count(
    tiny_config: Callable[..., ModelConfig],
) -> None:
    model = make_model(tiny_config())
    model.pack_projections()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    changed = run(model)
    fresh = make_model(tiny_config())
    fresh.load_state_dict(model.state_dict())
    assert (changed - run(fresh)).abs().max() < TOLERANCE
    assert torch.equal(run(model.bfloat16()), run(fresh.bfloat16()))


def test_gradients_flow_to_every_weight_of_a_packed_model(
    tiny_config: Callable[..., ModelConfig],
) -> None:
    model, packed = make_model(tiny_config()), make_model(tiny_config())
    packed.pack_projections()
    for each in (model, packed):
        each(PROMPT).square().sum().backward()
    for mine, theirs in zip(packed.parameters(), model.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None and theirs.grad is not None:
            assert torch.equal(mine.grad, theirs.grad)
