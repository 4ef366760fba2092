"""How well a model's previews predict by teacher forcing: loss and accuracy at a given block size.

Shapes: B rows, T clean tokens, N blocks of n tokens, M = 2 N canvases, A experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from clover.diffusion.noise import counter_generator
from clover.diffusion.objective import align_canvas_logits
from clover.model.moe import record_expert_choices
from clover.model.transformer import CloverForCausalLM
from clover.train.data import Document
from clover.train.evaluation import VALIDATION_SEED
from clover.train.packing import Batch, Blocks, cut_blocks, pack_all

# A block before its first preview, and one that is half done
MASKED_SHARES: Final = (1.0, 0.5)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviewScore:
    """What previews of one kind of canvas predict, over all replies of a set of documents.

    Attributes:
        block_size: Tokens in a block.
        masked_share: 1.0: every token is a mask; 0.5: each with even chances.
        loss: Mean cross entropy at the masked tokens, in nats.
        accuracy: Share of the masked tokens that are the most likely ones.
        first_loss, first_accuracy: The same over each block's leftmost masked token. Where
            predictions are shifted and that is the block's first, it comes from the last commit.
        num_experts: Distinct experts that a block's tokens are routed to, the mean over blocks and
            layers; None for a dense model.
    """

    block_size: int
    masked_share: float
    loss: float
    accuracy: float
    first_loss: float
    first_accuracy: float
    num_experts: float | None


@torch.no_grad()
def score_previews(
    model: CloverForCausalLM,
    documents: Sequence[Document],
    *,
    block_size: int,
    num_rows: int,
    row_length: int,
) -> list[PreviewScore]:
    """Returns a score for each of `MASKED_SHARES`. Which tokens are masked is always the same.

    Args:
        model: A Clover model.
        documents: Whose replies are cut into blocks, each with the true tokens before it as history.
        block_size: Any, not only the model's own.
        num_rows: Rows in a batch.
        row_length: Tokens in a row.
    """
    sums = [_Sums() for _ in MASKED_SHARES]
    batches = pack_all(
        documents,
        num_rows=num_rows,
        row_length=row_length,
        pad_token_id=model.config.pad_token_id or 0,
    )
    for number, batch in enumerate(batches):
        blocks = cut_blocks(batch.to(model.device), block_size)
        masks = [draw_mask(blocks, share, number) for share in MASKED_SHARES]
        logits, num_experts = _preview(model, batch.to(model.device), blocks, masks)
        for part, mask, rows, counts in zip(sums, masks, logits, num_experts, strict=True):
            part.add(rows, blocks.targets, mask, counts)
    return [part.score(block_size, share) for part, share in zip(sums, MASKED_SHARES, strict=True)]


def draw_mask(blocks: Blocks, share: float, number: int) -> Tensor:
    """Returns the masked tokens of a batch, bool [B, N, n]."""
    generator = counter_generator(VALIDATION_SEED, number, f"{share} masked")
    draws = torch.rand(blocks.targets.shape, generator=generator).to(blocks.targets.device)
    return blocks.is_token & (draws < share)


def _preview(
    model: CloverForCausalLM, batch: Batch, blocks: Blocks, masks: Sequence[Tensor]
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Returns for each mask the aligned logits [B, N, n, V] and what `_num_experts` counts.

    Canvases see only themselves and clean history, so all kinds go through in one pass. Right of a
    document's end they are masks, as when decoding begins.
    """
    assert model.config.diffusion is not None
    mask_token_id = model.config.diffusion.mask_token_id
    canvases = [
        blocks.targets.masked_fill(mask | ~blocks.is_token, mask_token_id) for mask in masks
    ]
    starts = blocks.starts.repeat(1, len(masks))
    with record_expert_choices(model) as choices:
        clean_logits, canvas_logits = model.two_stream(
            batch.input_ids, batch.document_ids, torch.cat(canvases, dim=1), starts
        )
    aligned = align_canvas_logits(
        clean_logits, canvas_logits, starts, shift_logits=model.config.diffusion.shift_logits
    )
    counts = _num_experts(model, choices, batch, starts, blocks.targets.shape[-1])
    return (
        aligned.chunk(len(masks), dim=1),
        [part[blocks.starts >= 0] for part in counts.chunk(len(masks), dim=1)],
    )


def _num_experts(
    model: CloverForCausalLM,
    choices: Sequence[Tensor],
    batch: Batch,
    starts: Tensor,
    block_size: int,
) -> Tensor:
    """Returns each block's distinct experts, the mean over layers [B, M]; 0 without experts."""
    num_rows, num_clean = batch.input_ids.shape
    total = torch.zeros(starts.shape, device=starts.device)
    for indices in choices:
        canvas = indices.view(num_rows, -1, indices.shape[-1])[:, num_clean:]
        blocks = canvas.reshape(*starts.shape, block_size * indices.shape[-1])
        ordered = blocks.sort(dim=-1).values
        total += 1 + (ordered[..., 1:] != ordered[..., :-1]).sum(dim=-1)
    return total / max(1, len(choices))


class _Sums:
    """Sums over batches; every masked token counts the same, and so does every block."""

    def __init__(self) -> None:
        self._tokens: list[Tensor] = []
        self._first: list[Tensor] = []
        self._experts: list[Tensor] = []

    def add(self, logits: Tensor, targets: Tensor, masked: Tensor, num_experts: Tensor) -> None:
        """Adds a batch: logits [B, N, n, V], targets and masked [B, N, n], experts of each block."""
        found, wanted = logits[masked].float(), targets[masked]
        losses = F.cross_entropy(found, wanted, reduction="none")
        right = (found.argmax(dim=-1) == wanted).float()
        scores = torch.stack([losses, right], dim=-1)
        is_first = masked & (masked.cumsum(dim=-1) == 1)
        self._tokens.append(scores)
        self._first.append(scores[is_first[masked]])
        self._experts.append(num_experts)

    def score(self, block_size: int, masked_share: float) -> PreviewScore:
        """Returns the means."""
        loss, accuracy = torch.cat(self._tokens).mean(dim=0).tolist()
        first_loss, first_accuracy = torch.cat(self._first).mean(dim=0).tolist()
        num_experts = float(torch.cat(self._experts).mean())
        return PreviewScore(
            block_size=block_size,
            masked_share=masked_share,
            loss=loss,
            accuracy=accuracy,
            first_loss=first_loss,
            first_accuracy=first_accuracy,
            num_experts=num_experts or None,
        )
