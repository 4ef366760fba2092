"""Held-in and held-out numbers while training: losses, and exact match by teacher forcing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clover.diffusion.noise import counter_generator, noise_blocks
from clover.diffusion.objective import (
    align_canvas_logits,
    ar_weights,
    weighted_cross_entropy,
)
from clover.model.transformer import CloverForCausalLM
from clover.train.data import Document
from clover.train.packing import Batch, cut_blocks, pack_all

# Validation noise is the same at every evaluation, so that its losses can be compared
VALIDATION_SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalResult:
    """What one evaluation of one validation set found.

    `exact` is the share of replies whose every token is the most likely one given the true tokens
    before it. Greedy decoding writes exactly these replies, so this is its exact match.
    `first_guess` is the share of reply tokens predicted rightly from a block that is all masks,
    averaged over positions: how far the first preview of a block can be trusted.
    """

    loss: float
    exact: float
    exact_by_family: Mapping[str, float]
    diffusion_loss: float | None = None
    first_guess: float | None = None


@torch.no_grad()
def evaluate(
    model: CloverForCausalLM,
    documents: Sequence[Document],
    *,
    num_rows: int,
    row_length: int,
    block_size: int | None,
) -> EvalResult:
    """Returns the mean response loss and exact match over documents.

    Args:
        model: Any Clover model or parent.
        documents: A fixed validation set.
        num_rows: Rows in a batch.
        row_length: Tokens in a row.
        block_size: Also evaluates the canvas, in blocks of this many tokens; None leaves it out.
    """
    batches = pack_all(
        documents,
        num_rows=num_rows,
        row_length=row_length,
        pad_token_id=model.config.pad_token_id or 0,
    )
    tally = _Tally()
    for number, batch in enumerate(batches):
        tally.add(batch.to(model.device), model, number, block_size)
    return tally.result()


class _Tally:
    """Sums over batches; weights every response token and every document the same."""

    def __init__(self) -> None:
        self._clean: list[tuple[float, float]] = []
        self._canvas: list[tuple[float, float]] = []
        self._guesses: list[tuple[float, float]] = []
        self._right: Counter[str] = Counter()
        self._total: Counter[str] = Counter()

    def add(
        self, batch: Batch, model: CloverForCausalLM, number: int, block_size: int | None
    ) -> None:
        """Adds a batch."""
        if block_size is None:
            clean_logits = model(batch.input_ids, document_ids=batch.document_ids)
        else:
            clean_logits = self._add_canvas(batch, model, number, block_size)
        weights = ar_weights(batch.document_ids, batch.is_response, 0.0)
        loss = weighted_cross_entropy(clean_logits[:, :-1], batch.input_ids[:, 1:], weights[:, :-1])
        self._clean.append((float(loss), float(weights.sum())))
        self._add_exact(batch, clean_logits)

    def _add_exact(self, batch: Batch, clean_logits: Tensor) -> None:
        right = clean_logits[:, :-1].argmax(dim=-1) == batch.input_ids[:, 1:]  # [B, T-1]
        for span in batch.spans:
            is_exact = bool(right[span.row, span.response_start - 1 : span.end - 1].all())
            self._right[span.family] += is_exact
            self._total[span.family] += 1

    def _add_canvas(
        self, batch: Batch, model: CloverForCausalLM, number: int, block_size: int
    ) -> Tensor:
        """Adds the losses of noised and of fully masked blocks; returns the clean logits."""
        assert model.config.diffusion is not None
        mask_token_id = model.config.diffusion.mask_token_id
        blocks = cut_blocks(batch, block_size)
        noised = noise_blocks(
            blocks.targets,
            blocks.is_used,
            mask_token_id=mask_token_id,
            min_level=0.0,
            generator=counter_generator(VALIDATION_SEED, number, "validation"),
        )
        all_masks = torch.full_like(noised.canvas, mask_token_id)
        # Canvases see only themselves and clean history: both kinds go through in one pass
        clean_logits, canvas_logits = model.two_stream(
            batch.input_ids,
            batch.document_ids,
            torch.cat([noised.canvas, all_masks], dim=1),
            torch.cat([blocks.starts, blocks.starts], dim=1),
        )
        noised_logits, mask_logits = (
            align_canvas_logits(
                clean_logits,
                half,
                blocks.starts,
                shift_logits=model.config.diffusion.shift_logits,
            )
            for half in canvas_logits.chunk(2, dim=1)
        )
        weights = (noised.masked & blocks.is_token).float()
        loss = weighted_cross_entropy(noised_logits, blocks.targets, weights)
        self._canvas.append((float(loss), float(weights.sum())))
        right = (mask_logits.argmax(dim=-1) == blocks.targets)[blocks.is_token].float()
        self._guesses.append((float(right.mean()), float(right.numel())))
        return clean_logits

    def result(self) -> EvalResult:
        """Returns the means."""
        return EvalResult(
            loss=_weighted_mean(self._clean),
            exact=self._right.total() / self._total.total(),
            exact_by_family={
                family: self._right[family] / self._total[family] for family in sorted(self._total)
            },
            diffusion_loss=_weighted_mean(self._canvas) if self._canvas else None,
            first_guess=_weighted_mean(self._guesses) if self._guesses else None,
        )


def _weighted_mean(values: Sequence[tuple[float, float]]) -> float:
    total = sum(weight for _, weight in values)
    return sum(value * weight for value, weight in values) / total
