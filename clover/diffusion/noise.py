"""How a clean block becomes a noised canvas, and where training's randomness comes from.

B: rows, N: blocks in a row, n: tokens in a block, M: tokens to replace, V: vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clover.errors import ConfigError

# From a canvas [B, N, n] to logits whose row i predicts canvas position i, [B, N, n, V]
Predict = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class EditConfig:
    """Wrong tokens among the visible ones of a canvas, which the model has to repair.

    Attributes:
        probability: With which each visible token of the text is replaced. 0: none.
        model_share: Of the replaced tokens, how many the model itself draws, looking at a mask in
            their place. These are the mistakes that decoding makes; they cost one more pass a
            step. The rest is uniform over all other ids of text.
    """

    probability: float = 0.0
    model_share: float = 0.0

    def __post_init__(self) -> None:
        """Checks ranges."""
        for name in ("probability", "model_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                found = getattr(self, name)
                raise ConfigError(f"edits.{name} must be in [0, 1], found {found}")


@dataclass(frozen=True, kw_only=True, slots=True)
class NoisedBlocks:
    """Blocks in which some tokens were replaced by masks, or by wrong tokens."""

    canvas: Tensor  # [B, N, n] token ids, the model's input
    masked: Tensor  # [B, N, n] bool: a mask, and to be predicted
    edited: Tensor  # [B, N, n] bool: a wrong token, and to be repaired
    level: Tensor  # [B, N] the probability with which each token was masked

    def beside(self, other: NoisedBlocks) -> NoisedBlocks:
        """Returns both, the other's blocks to the right in each row."""
        return NoisedBlocks(
            canvas=torch.cat([self.canvas, other.canvas], dim=1),
            masked=torch.cat([self.masked, other.masked], dim=1),
            edited=torch.cat([self.edited, other.edited], dim=1),
            level=torch.cat([self.level, other.level], dim=1),
        )


def counter_generator(seed: int, step: int, purpose: str) -> torch.Generator:
    """Returns a generator that depends on its arguments alone.

    A resumed run needs to know only its step to draw the numbers that an unbroken run draws.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def choose_block_size(block_sizes: Sequence[int], generator: torch.Generator) -> int:
    """Returns one of the sizes, each equally likely.

    Sizes must vary over training: the history slot's logit is `b + c log n`, and one size alone
    cannot tell b from c.
    """
    return block_sizes[int(torch.randint(len(block_sizes), (), generator=generator))]


def draw_prefix_lengths(is_token: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Returns how many tokens at the left of each block stay visible, [B, N].

    With the given probability anything from none to all but one, else none. A decoder resolves a
    block more or less from the left. Masks strewn at random almost never look like that, and what
    still stands to their right often gives away what would have to be computed.

    Args:
        is_token: Which positions hold a token, from the block's left, bool [B, N, n].
        probability: Share of the blocks that have a prefix.
        generator: A CPU generator, the only source of randomness.
    """
    share, chance = torch.rand((2, *is_token.shape[:2]), generator=generator).to(is_token.device)
    lengths: Tensor = (share * is_token.sum(dim=-1)).long()
    return lengths.masked_fill(chance >= probability, 0)


def noise_blocks(
    targets: Tensor,
    is_token: Tensor,
    *,
    mask_token_id: int,
    min_level: float,
    generator: torch.Generator,
    prefix_lengths: Tensor | None = None,
    all_masks: Tensor | None = None,
) -> NoisedBlocks:
    """Returns blocks masked at a level drawn uniformly from (min_level, 1], one level per block.

    Every block that holds a token has at least one masked. Positions that hold no token are masks
    that nobody has to predict.

    Args:
        targets: Clean token ids, [B, N, n].
        is_token: Which positions hold a token to be learned, bool [B, N, n].
        mask_token_id: The id of a mask.
        min_level: The lowest level, in [0, 1).
        generator: A CPU generator, the only source of randomness.
        prefix_lengths: Positions at each block's left that stay visible, [B, N]; fewer than the
            block's tokens. Everything right of them is masked. None: none.
        all_masks: Blocks of which every token is masked, prefixes too, bool [B, N]. None: none.
    """
    if not 0.0 <= min_level < 1.0:
        raise ConfigError(f"min_level must be in [0, 1), found {min_level}")
    uniform = torch.rand(targets.shape, generator=generator).to(targets.device)  # [B, N, n]
    # 1 - u lies in (0, 1]: a block may be all masks, never none on purpose
    level = 1.0 - torch.rand(targets.shape[:2], generator=generator)  # [B, N]
    level = (min_level + (1.0 - min_level) * level).to(targets.device)
    can_mask = is_token
    if prefix_lengths is not None:
        level = level.where(prefix_lengths.to(level.device) == 0, 1.0)
        positions = torch.arange(targets.shape[-1], device=targets.device)
        can_mask = is_token & (positions >= prefix_lengths.unsqueeze(-1))
    if all_masks is not None:
        level = level.masked_fill(all_masks, 1.0)
        can_mask = can_mask | (is_token & all_masks.unsqueeze(-1))
    # The least of the draws is masked in any case, so that no block is wasted
    draws = uniform.masked_fill(~can_mask, torch.inf)
    is_least = draws == draws.amin(dim=-1, keepdim=True)
    masked = can_mask & ((draws < level.unsqueeze(-1)) | is_least)
    canvas = targets.masked_fill(masked | ~is_token, mask_token_id)
    edited = torch.zeros_like(masked)
    return NoisedBlocks(canvas=canvas, masked=masked, edited=edited, level=level)


def complement(
    noised: NoisedBlocks, targets: Tensor, is_token: Tensor, *, mask_token_id: int
) -> NoisedBlocks:
    """Returns the blocks with exactly those tokens masked that `noised` shows.

    Between them the two canvases of a block train every token once. A block of which nothing is
    shown is masked as a whole again: every canvas has something to learn, and a canvas of masks is
    what decoding starts from.

    Args:
        noised: From `noise_blocks`, without edits.
        targets: Clean token ids, [B, N, n].
        is_token: Which positions hold a token to be learned, as for `noise_blocks`.
        mask_token_id: The id of a mask.
    """
    masked = is_token & ~noised.masked
    shows_nothing = ~masked.any(dim=-1)
    masked = torch.where(shows_nothing.unsqueeze(-1), noised.masked, masked)
    # At level 1 nothing was left to chance: a prefix was shown, and just that is masked now.
    # A level near 1 leaves one near 0, but no block with a masked token has less than 1/n of them
    level = torch.where(noised.level < 1.0, 1.0 - noised.level, masked.float().mean(dim=-1))
    level = level.clamp(min=1.0 / targets.shape[-1])
    return NoisedBlocks(
        canvas=targets.masked_fill(masked | ~is_token, mask_token_id),
        masked=masked,
        edited=torch.zeros_like(masked),
        level=torch.where(shows_nothing, noised.level, level),
    )


def add_edits(
    noised: NoisedBlocks,
    targets: Tensor,
    is_token: Tensor,
    config: EditConfig,
    *,
    mask_token_id: int,
    text_ids: Tensor,
    predict: Predict,
    generator: torch.Generator,
) -> NoisedBlocks:
    """Returns the blocks with some visible tokens replaced by wrong ones.

    Args:
        noised: Blocks without edits.
        targets: Clean token ids, [B, N, n].
        is_token: Which positions hold a token of the document, bool [B, N, n].
        config: How many, and who draws them.
        mask_token_id: The id of a mask.
        text_ids: The ids of text, ascending, at least two; all others are reserved.
        predict: The model's preview, reserved ids at -inf. Called once if `model_share` is above 0.
        generator: A CPU generator, the only source of randomness.
    """
    draws = torch.rand((2, *targets.shape), generator=generator).to(targets.device)
    edited = is_token & ~noised.masked & (draws[0] < config.probability)
    by_model = edited & (draws[1] < config.model_share)
    by_chance = edited & ~by_model
    wrong = draw_wrong_tokens(targets[by_chance], text_ids, generator)
    canvas = noised.canvas.masked_scatter(by_chance, wrong)
    if config.model_share > 0:
        logits = predict(noised.canvas.masked_fill(by_model, mask_token_id))
        wrong = sample_wrong_tokens(logits[by_model], targets[by_model], generator)
        canvas = canvas.masked_scatter(by_model, wrong)
    return replace(noised, canvas=canvas, edited=edited)


def draw_wrong_tokens(targets: Tensor, text_ids: Tensor, generator: torch.Generator) -> Tensor:
    """Returns an id [M] of the ascending `text_ids` for each target [M], any but the target."""
    index = torch.randint(len(text_ids) - 1, targets.shape, generator=generator).to(targets.device)
    wrong = text_ids[index]
    return torch.where(wrong < targets, wrong, text_ids[index + 1])


def sample_wrong_tokens(logits: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
    """Returns a draw [M] from the softmax of `logits` [M, V] without each row's target [M]."""
    others = logits.double().scatter(-1, targets.unsqueeze(-1), -torch.inf)
    cumulative = others.softmax(dim=-1).cumsum(dim=-1)
    uniform = torch.rand(len(targets), 1, generator=generator).to(targets.device)
    # The first id whose cumulative share exceeds the draw: it has a share of its own
    return (cumulative <= uniform * cumulative[:, -1:]).sum(dim=-1)
