"""How a clean block becomes a noised canvas, and where training's randomness comes from.

B: rows, N: blocks in a row, n: tokens in a block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clover.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class NoisedBlocks:
    """Blocks in which some tokens were replaced by masks."""

    canvas: Tensor  # [B, N, n] token ids, the model's input
    masked: Tensor  # [B, N, n] bool: replaced, and to be predicted
    level: Tensor  # [B, N] the probability with which each token was masked


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
    block more or less from the left, and masks strewn at random almost never look like that.

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
            block's tokens. None: none.
    """
    if not 0.0 <= min_level < 1.0:
        raise ConfigError(f"min_level must be in [0, 1), found {min_level}")
    uniform = torch.rand(targets.shape, generator=generator).to(targets.device)  # [B, N, n]
    # 1 - u lies in (0, 1]: a block may be all masks, never none on purpose
    level = 1.0 - torch.rand(targets.shape[:2], generator=generator)  # [B, N]
    level = (min_level + (1.0 - min_level) * level).to(targets.device)
    can_mask = is_token
    if prefix_lengths is not None:
        positions = torch.arange(targets.shape[-1], device=targets.device)
        can_mask = is_token & (positions >= prefix_lengths.unsqueeze(-1))
    # The least of the draws is masked in any case, so that no block is wasted
    draws = uniform.masked_fill(~can_mask, torch.inf)
    is_least = draws == draws.amin(dim=-1, keepdim=True)
    masked = can_mask & ((draws < level.unsqueeze(-1)) | is_least)
    canvas = targets.masked_fill(masked | ~is_token, mask_token_id)
    return NoisedBlocks(canvas=canvas, masked=masked, level=level)
