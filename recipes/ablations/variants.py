"""The variants: each is one change to the base recipe's setup.

What a variant needs and no release will ever use stays here. Its preview formula takes the place of
the model's own for as long as a `with` lasts; a parameter that it switches off is frozen at its
start, 0.

Shapes: X blocks of n tokens, H value heads, K / V head widths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor, nn

from clover.checkpoint.names import CONV_RIGHT_WEIGHT, HISTORY_BIAS, HISTORY_C
from clover.config import DiffusionConfig, ModelConfig, MoeConfig
from clover.diffusion.noise import EditConfig
from clover.diffusion.objective import ObjectiveConfig
from clover.errors import TrainingInputError
from clover.model import delta_net
from clover.model.delta_net import history_slot_attention
from clover.train.trainer import TrainConfig
from recipes.nano import BLOCK_SIZE, clover_training, distillation_training

BASE: Final = "base"
EDIT_PROBABILITY: Final = 0.1


class PreviewFormula(Protocol):
    """A function in the place of `history_slot_attention`."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Tensor,
        logit_scale: Tensor,
        history_bias: Tensor,
        history_c: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Returns the mix of history and block, [X, H, n, V]."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """All that one run is made of, its data and seed aside.

    Attributes:
        model: Of the parent, with the `diffusion` that it is converted to.
        training: The adaptation.
        formula: The preview operator of the GDN layers, while training and when evaluated.
        frozen: Parameters, by the last part of their names, that stay as conversion leaves them.
        is_calibrated: Whether tau, b and c are fitted before training.
    """

    model: ModelConfig
    training: TrainConfig
    formula: PreviewFormula = history_slot_attention
    frozen: tuple[str, ...] = ()
    is_calibrated: bool = False

    @property
    def diffusion(self) -> DiffusionConfig:
        """The part of the model's config that conversion adds."""
        assert self.model.diffusion is not None
        return self.model.diffusion


def base_setup(parent: ModelConfig, *, mask_token_id: int, num_token_ids: int) -> Setup:
    """Returns the setup of `recipes.nano`.

    Args:
        parent: An autoregressive model's config.
        mask_token_id: The id of a mask.
        num_token_ids: Length of the tokenizer.
    """
    diffusion = DiffusionConfig(block_size=BLOCK_SIZE, mask_token_id=mask_token_id)
    return Setup(
        model=replace(parent, diffusion=diffusion),
        training=replace(clover_training(Path()), out=None, num_token_ids=num_token_ids),
    )


def history_added(setup: Setup) -> Setup:
    """Returns the setup whose history is added outside the softmax; b and c have no part in it."""
    return replace(setup, formula=added_history_attention, frozen=(HISTORY_BIAS, HISTORY_C))


def no_history(setup: Setup) -> Setup:
    """Returns the setup whose GDN previews see of history the convolution's left taps alone."""
    return replace(setup, formula=block_attention, frozen=(HISTORY_BIAS, HISTORY_C))


def no_c(setup: Setup) -> Setup:
    """Returns the setup whose history logit does not depend on the block size."""
    return replace(setup, frozen=(HISTORY_C,))


def no_right_conv(setup: Setup) -> Setup:
    """Returns the setup whose preview convolution looks to the left alone."""
    return replace(setup, frozen=(CONV_RIGHT_WEIGHT,))


def no_coreset(setup: Setup) -> Setup:
    """Returns the setup whose previews may use every expert."""
    return _with_diffusion(setup, replace(setup.diffusion, expert_coreset_size=None))


def half_coreset(setup: Setup) -> Setup:
    """Returns the setup whose blocks use half of the experts. A dense model has none to restrict."""
    mlp = setup.model.mlp
    if not isinstance(mlp, MoeConfig):
        return setup
    size = max(mlp.num_experts // 2, mlp.num_experts_per_tok)
    return _with_diffusion(setup, replace(setup.diffusion, expert_coreset_size=size))


def no_ar_loss(setup: Setup) -> Setup:
    """Returns the setup whose clean stream has no loss of its own."""
    return _with_losses(setup, replace(setup.training.losses, ar_weight=0.0))


def edits(setup: Setup) -> Setup:
    """Returns the setup in which random wrong tokens stand on the canvas and are to be repaired."""
    config = EditConfig(probability=EDIT_PROBABILITY)
    return replace(setup, training=replace(setup.training, edits=config))


def in_place(setup: Setup) -> Setup:
    """Returns the setup that reads a position's prediction at the position itself."""
    setup = _with_diffusion(setup, replace(setup.diffusion, shift_logits=False))
    return _with_losses(setup, replace(setup.training.losses, shift_logits=False))


def distillation(setup: Setup) -> Setup:
    """Returns the setup whose canvas also learns the distribution of its own clean stream."""
    return _with_losses(setup, replace(setup.training.losses, distillation_weight=1.0))


def parent_distillation(setup: Setup) -> Setup:
    """Returns the setup whose clean stream learns the frozen parent's distributions, as `distill` does."""
    losses = replace(setup.training.losses, clean_distillation_weight=1.0, teacher="parent")
    return _with_losses(setup, losses)


def complementary_masks(setup: Setup) -> Setup:
    """Returns the setup whose second canvas of a block masks what the first one shows."""
    return replace(setup, training=replace(setup.training, complementary_masks=True))


def drafts(setup: Setup) -> Setup:
    """Returns the setup that learns what `exact` needs, as `distill` does: drafts from masks alone."""
    draft = distillation_training(Path())
    losses = replace(setup.training.losses, position_decay=draft.losses.position_decay)
    training = replace(
        setup.training,
        losses=losses,
        block_skip_probability=draft.block_skip_probability,
        all_masks_probability=draft.all_masks_probability,
    )
    return replace(setup, training=training)


def calibrated(setup: Setup) -> Setup:
    """Returns the setup that fits tau, b and c before training."""
    return replace(setup, is_calibrated=True)


def _with_diffusion(setup: Setup, diffusion: DiffusionConfig) -> Setup:
    return replace(setup, model=replace(setup.model, diffusion=diffusion))


def _with_losses(setup: Setup, losses: ObjectiveConfig) -> Setup:
    return replace(setup, training=replace(setup.training, losses=losses))


@dataclass(frozen=True, slots=True)
class Variant:
    """A change, and what the table calls it."""

    change: Callable[[Setup], Setup]
    label: str


VARIANTS: Final[Mapping[str, Variant]] = {
    BASE: Variant(lambda setup: setup, "the recipe itself"),
    "history_added": Variant(history_added, "history added outside the softmax"),
    "no_history": Variant(no_history, "no history slot"),
    "no_c": Variant(no_c, "c frozen at 0"),
    "no_right_conv": Variant(no_right_conv, "right taps frozen at 0"),
    "no_coreset": Variant(no_coreset, "no coreset"),
    "half_coreset": Variant(half_coreset, "coreset of half the experts"),
    "no_ar_loss": Variant(no_ar_loss, "AR weight 0"),
    "edits": Variant(edits, f"random edits, probability {EDIT_PROBABILITY:g}"),
    "in_place": Variant(in_place, "predictions read in place"),
    "distillation": Variant(distillation, "self distillation, weight 1"),
    "parent_distillation": Variant(
        parent_distillation, "commit path distilled from the parent, weight 1"
    ),
    "complementary_masks": Variant(complementary_masks, "complementary masks"),
    "drafts": Variant(drafts, "blocks of all masks, cut and weighted as drafts"),
    "calibrated": Variant(calibrated, "tau, b, c fitted before training"),
}


def choose_setups(base: Setup, names: list[str] | None = None) -> dict[str, Setup]:
    """Returns the setup of each variant by name, by default of all that differ from the base.

    Raises:
        TrainingInputError: An unknown name, or a variant that is the base: with a recipe that has no
            coreset, `no_coreset` changes nothing.
    """
    unknown = [name for name in names or [] if name not in VARIANTS]
    if unknown:
        raise TrainingInputError(f"unknown variants {unknown}: expected some of {list(VARIANTS)}")
    setups = {name: variant.change(base) for name, variant in VARIANTS.items()}
    same = [name for name, setup in setups.items() if name != BASE and setup == base]
    for name in names or []:
        if name in same:
            raise TrainingInputError(
                f"variant {name} is the base recipe itself: run {BASE} in its place"
            )
    return {name: setups[name] for name in names or VARIANTS if name not in same}


@contextmanager
def preview_formula(formula: PreviewFormula) -> Iterator[None]:
    """Has every GDN layer of this process preview by another formula inside the `with`."""
    original = delta_net.history_slot_attention
    delta_net.history_slot_attention = formula
    try:
        yield
    finally:
        delta_net.history_slot_attention = original


def freeze(model: nn.Module, names: tuple[str, ...]) -> None:
    """Keeps parameters out of training: those whose names end in one of `names`."""
    for name, parameter in model.named_parameters():
        if name.endswith(names):
            parameter.requires_grad_(False)


def added_history_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    logit_scale: Tensor,
    history_bias: Tensor,
    history_c: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """Returns a softmax over the block alone plus the history's readout, [X, H, n, V].

        o_i = K^-1/2 ( S^T q_i + sum_j softmax_j(tau <q_i, k_j>) v_j )

    The readout has weight 1 and no gate, as the state's part of the causal operator has. b and c are
    not used. Arguments as for `history_slot_attention`.
    """
    return q @ state / math.sqrt(k.shape[-1]) + block_attention(
        q, k, v, state, logit_scale, history_bias, history_c, mask
    )


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    logit_scale: Tensor,
    history_bias: Tensor,
    history_c: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """Returns a softmax over the block alone, [X, H, n, V]: state, b and c are not used.

        o_i = K^-1/2 sum_j softmax_j(tau <q_i, k_j>) v_j

    Arguments as for `history_slot_attention`.
    """
    logits = logit_scale[:, None, None] * (q @ k.transpose(-1, -2))
    if mask is not None:  # not -inf: a row of padding alone would be NaN
        logits = logits.masked_fill(~mask[:, None, None], torch.finfo(logits.dtype).min)
    return logits.softmax(dim=-1) @ v / math.sqrt(k.shape[-1])
