"""Variants: their formulas are what they say, they change one thing, and nothing of them stays."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
import torch
from torch import Tensor

from clover.config import ModelConfig
from clover.errors import TrainingInputError
from clover.model import delta_net
from clover.model.delta_net import history_slot_attention
from clover.model.transformer import CloverForCausalLM
from clover.train.data import Document
from clover.train.trainer import train
from recipes.ablations.variants import (
    BASE,
    VARIANTS,
    PreviewFormula,
    Setup,
    added_history_attention,
    base_setup,
    block_attention,
    choose_setups,
    freeze,
    preview_formula,
)

ConfigFactory = Callable[..., ModelConfig]

ROUNDING = 1e-12  # float64, sums of a few terms


class _Echo:
    """Replies that repeat their prompt, then end."""

    def document(self, index: int) -> Document:
        word = tuple(3 + (index * 7 + place * index) % 20 for place in range(3 + index % 3))
        return Document(prompt_ids=(2, *word, 2), response_ids=(*word, 1), family="echo")


def _base(tiny_config: ConfigFactory, variant: str = "moe") -> Setup:
    parent = tiny_config(variant, diffusion=False)
    return base_setup(parent, mask_token_id=63, num_token_ids=60)


def _inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    # q, k [X, H, n, K], v [X, H, n, V], state [X, H, K, V], tau, b, c [H]
    shapes = [(2, 3, 4, 5), (2, 3, 4, 5), (2, 3, 4, 6), (2, 3, 5, 6), (3,), (3,), (3,)]
    return [draw(*shape) for shape in shapes]


@pytest.mark.parametrize("adds_history", [True, False])
def test_formulas_equal_loops_over_positions(adds_history: bool) -> None:
    q, k, v, state, tau, b, c = _inputs()
    formula: PreviewFormula = added_history_attention if adds_history else block_attention
    found = formula(q, k, v, state, tau, b, c)
    for x in range(2):
        for h in range(3):
            for i in range(4):
                logits = [float(tau[h] * (q[x, h, i] @ k[x, h, j])) for j in range(4)]
                shares = [math.exp(logit) / sum(map(math.exp, logits)) for logit in logits]
                expected = torch.zeros(6, dtype=torch.float64)
                for j in range(4):
                    expected += shares[j] * v[x, h, j]
                if adds_history:
                    for row in range(5):
                        expected += q[x, h, i, row] * state[x, h, row]
                expected /= math.sqrt(5)
                assert torch.allclose(found[x, h, i], expected, rtol=0, atol=ROUNDING)


def test_a_history_logit_of_minus_infinity_leaves_the_softmax_over_the_block() -> None:
    q, k, v, state, tau, b, c = _inputs()
    found = history_slot_attention(q, k, v, state, tau, torch.full_like(b, -torch.inf), 0 * c)
    expected = block_attention(q, k, v, state, tau, b, c)
    assert torch.allclose(found, expected, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("formula", [added_history_attention, block_attention])
def test_a_formula_does_not_look_at_padding(formula: PreviewFormula) -> None:
    q, k, v, state, tau, b, c = _inputs()
    mask = torch.tensor([[True, True, True, False], [False] * 4])
    found = formula(q, k, v, state, tau, b, c, mask)
    expected = formula(*(x[:1, :, :3] for x in (q, k, v)), state[:1], tau, b, c)
    assert torch.allclose(found[:1, :, :3], expected, rtol=0, atol=ROUNDING)
    assert found.isfinite().all()


@pytest.mark.parametrize("formula", [added_history_attention, block_attention])
def test_a_formula_acts_inside_its_with_alone(
    tiny_config: ConfigFactory, formula: PreviewFormula
) -> None:
    model = CloverForCausalLM(tiny_config())
    model.init_weights(torch.Generator().manual_seed(0))
    cache = model.new_cache(1)
    committed = model.commit(cache, torch.tensor([[5, 6, 7]]))
    canvas = torch.tensor([[63, 8, 63, 9]])
    before = model.preview(cache, canvas)
    with preview_formula(formula):
        inside = model.preview(cache, canvas)
        assert torch.equal(model.commit(model.new_cache(1), torch.tensor([[5, 6, 7]])), committed)
    assert not torch.equal(inside, before)
    assert torch.equal(model.preview(cache, canvas), before)


def test_a_formula_is_put_back_after_an_error() -> None:
    def fail_inside() -> None:
        with preview_formula(block_attention):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_inside()
    assert delta_net.history_slot_attention is history_slot_attention


def test_a_frozen_parameter_stays_as_it_is_while_all_others_learn(
    tiny_config: ConfigFactory,
) -> None:
    setup = _base(tiny_config)
    config = replace(
        setup.training, steps=2, num_rows=4, row_length=32, block_sizes=(2, 4), warmup_steps=0
    )
    model = CloverForCausalLM(tiny_config())
    model.init_weights(torch.Generator().manual_seed(0))
    start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    freeze(model, ("conv_right_weight", "bd_softmax_history_c"))
    train(model, config, _Echo(), on_event=lambda event: None)
    unmoved = {n for n, weight in model.named_parameters() if torch.equal(weight, start[n])}
    layers = (0, 1)  # the tiny model's GDN layers
    assert unmoved == {
        f"model.layers.{layer}.linear_attn.{name}"
        for layer in layers
        for name in ("conv_right_weight", "bd_softmax_history_c")
    }


def test_a_variant_differs_from_the_base_in_what_it_names(tiny_config: ConfigFactory) -> None:
    base = _base(tiny_config)
    changed = {
        name: _differing(asdict(base), asdict(setup)) for name, setup in choose_setups(base).items()
    }
    assert changed == {
        "base": set(),
        "history_added": {"formula", "frozen"},  # b and c are in no formula without the slot
        "no_history": {"formula", "frozen"},
        "no_c": {"frozen"},
        "no_right_conv": {"frozen"},
        "half_coreset": {"model.diffusion.expert_coreset_size"},
        "no_ar_loss": {"training.losses.ar_weight"},
        "edits": {"training.edits.probability"},
        "in_place": {"training.losses.shift_logits", "model.diffusion.shift_logits"},
        "distillation": {"training.losses.distillation_weight"},
        "parent_distillation": {
            "training.losses.clean_distillation_weight",
            "training.losses.teacher",
        },
        "complementary_masks": {"training.complementary_masks"},
        "drafts": {
            "training.all_masks_probability",
            "training.block_skip_probability",
            "training.losses.position_decay",
        },
        "calibrated": {"is_calibrated"},
    }


def _differing(a: dict[str, object], b: dict[str, object]) -> set[str]:
    names: set[str] = set()
    for key, value in a.items():
        other = b[key]
        if isinstance(value, dict) and isinstance(other, dict):
            names |= {f"{key}.{name}" for name in _differing(value, other)}
        elif value != other:
            names.add(key)
    return names


def test_where_the_base_has_a_coreset_the_study_takes_it_away(tiny_config: ConfigFactory) -> None:
    base = VARIANTS["half_coreset"].change(_base(tiny_config))
    names = set(choose_setups(base))
    assert "no_coreset" in names and "half_coreset" not in names
    assert choose_setups(base, ["no_coreset"])["no_coreset"].diffusion.expert_coreset_size is None


def test_a_dense_model_has_no_variants_of_the_coreset(tiny_config: ConfigFactory) -> None:
    names = set(choose_setups(_base(tiny_config, "dense")))
    assert set(VARIANTS) - names == {"no_coreset", "half_coreset"}


@pytest.mark.parametrize("names", [["no_coreset"], [BASE, "slot_machine"]])
def test_unknown_variants_and_those_that_change_nothing_are_refused(
    tiny_config: ConfigFactory, names: list[str]
) -> None:
    with pytest.raises(TrainingInputError, match=names[-1]):
        choose_setups(_base(tiny_config), names)
