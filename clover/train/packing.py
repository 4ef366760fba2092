"""Documents -> rows of fixed length -> blocks. Documents in one row never see each other.

B: rows, T: tokens in a row, N: blocks in a row, n: tokens in a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from clover.diffusion.noise import NoisedBlocks
from clover.errors import TrainingInputError
from clover.train.data import Document, DocumentSource

# Documents that may wait for a later batch because no row had room left: enough to fill the rows
# well, few enough that none waits long (they are placed first in the next batch).
MAX_WAITING = 16
# So many documents in a row that fit no row at all mean that the row length is wrong
MAX_SKIPPED_IN_A_ROW = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Where a document lies: tokens [start, end) of a row, its response from `response_start`."""

    row: int
    start: int
    response_start: int
    end: int
    family: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Packed rows."""

    input_ids: Tensor  # [B, T]
    document_ids: Tensor  # [B, T], counted from 0 in each row; -1 is padding
    is_response: Tensor  # [B, T] bool
    spans: tuple[Span, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of documents, padding left out."""
        return sum(span.end - span.start for span in self.spans)

    def share(self, rank: int, world_size: int) -> Batch:
        """Returns every `world_size`-th row from `rank` on: one process's part."""
        spans = (
            replace(span, row=span.row // world_size)
            for span in self.spans
            if span.row % world_size == rank
        )
        return Batch(
            input_ids=self.input_ids[rank::world_size],
            document_ids=self.document_ids[rank::world_size],
            is_response=self.is_response[rank::world_size],
            spans=tuple(spans),
        )

    def to(self, device: torch.device) -> Batch:
        """Returns the batch on a device."""
        return Batch(
            input_ids=self.input_ids.to(device),
            document_ids=self.document_ids.to(device),
            is_response=self.is_response.to(device),
            spans=self.spans,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """Responses cut into blocks. Unused slots start at -1 and hold no token.

    Right of its document's end a block repeats the document's last token, the end of the turn.
    """

    starts: Tensor  # [B, N] index in the row of the block's first token
    targets: Tensor  # [B, N, n] token ids
    is_token: Tensor  # [B, N, n] bool: False right of the document's end

    @property
    def is_used(self) -> Tensor:
        """Returns which positions belong to a used slot, the end's repetitions included."""
        return (self.starts >= 0).unsqueeze(-1).expand_as(self.targets)

    def beside(self, other: Blocks) -> Blocks:
        """Returns these slots and then the other's, row by row."""
        return Blocks(
            starts=torch.cat([self.starts, other.starts], dim=1),
            targets=torch.cat([self.targets, other.targets], dim=1),
            is_token=torch.cat([self.is_token, other.is_token], dim=1),
        )


_BlockTensors = TypeVar("_BlockTensors", Blocks, NoisedBlocks)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackerState:
    """Where in its source a packer is: enough to go on from there."""

    next_index: int = 0
    waiting: tuple[int, ...] = ()
    skipped: int = 0


def pack_rows(rows: Sequence[Sequence[Document]], *, row_length: int, pad_token_id: int) -> Batch:
    """Returns the documents of each row laid side by side, padded to `row_length`."""
    input_ids = torch.full((len(rows), row_length), pad_token_id, dtype=torch.long)
    document_ids = torch.full((len(rows), row_length), -1, dtype=torch.long)
    is_response = torch.zeros((len(rows), row_length), dtype=torch.bool)
    spans: list[Span] = []
    for row, documents in enumerate(rows):
        start = 0
        for number, document in enumerate(documents):
            end = start + len(document)
            if end > row_length:
                raise TrainingInputError(f"row {row} needs {end} tokens, it has {row_length}")
            response_start = start + len(document.prompt_ids)
            tokens = torch.tensor(document.prompt_ids + document.response_ids)
            input_ids[row, start:end] = tokens
            document_ids[row, start:end] = number
            is_response[row, response_start:end] = True
            span = Span(
                row=row,
                start=start,
                response_start=response_start,
                end=end,
                family=document.family,
            )
            spans.append(span)
            start = end
    return Batch(
        input_ids=input_ids,
        document_ids=document_ids,
        is_response=is_response,
        spans=tuple(spans),
    )


def best_fit(free: Sequence[int], length: int) -> int | None:
    """Returns the row with the least free space that still holds `length` tokens, if any."""
    rows = [row for row, space in enumerate(free) if space >= length]
    return min(rows, key=lambda row: free[row], default=None)


class Packer:
    """An endless, deterministic stream of batches whose whole state is a `PackerState`."""

    def __init__(
        self,
        source: DocumentSource,
        *,
        num_rows: int,
        row_length: int,
        pad_token_id: int,
        state: PackerState | None = None,
    ) -> None:
        """Starts at `state`, by default at the beginning of the source."""
        self._source = source
        self._num_rows = num_rows
        self._row_length = row_length
        self._pad_token_id = pad_token_id
        self.state = state or PackerState()

    def next_batch(self) -> Batch:
        """Returns a batch; `state` is then where the next one starts."""
        rows: list[list[Document]] = [[] for _ in range(self._num_rows)]
        free = [self._row_length] * self._num_rows
        waiting: list[int] = []
        candidates = list(self.state.waiting)
        next_index, skipped, in_a_row = self.state.next_index, self.state.skipped, 0
        while candidates or len(waiting) < MAX_WAITING:
            if candidates:
                index = candidates.pop(0)
            else:
                index, next_index = next_index, next_index + 1
            document = self._source.document(index)
            row = best_fit(free, len(document))
            if row is not None:
                rows[row].append(document)
                free[row] -= len(document)
            elif len(document) <= self._row_length:
                waiting.append(index)
            else:
                skipped, in_a_row = skipped + 1, in_a_row + 1
                self._check_skipped(in_a_row, document)
        self.state = PackerState(next_index=next_index, waiting=tuple(waiting), skipped=skipped)
        return pack_rows(rows, row_length=self._row_length, pad_token_id=self._pad_token_id)

    def _check_skipped(self, in_a_row: int, document: Document) -> None:
        if in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise TrainingInputError(
                f"{in_a_row} documents in one batch are longer than row_length "
                f"{self._row_length} (the last has {len(document)} tokens): make rows longer"
            )


def pack_all(
    documents: Iterable[Document], *, num_rows: int, row_length: int, pad_token_id: int
) -> list[Batch]:
    """Returns batches that hold every document, in order (first rows that have room).

    Raises:
        TrainingInputError: A document is longer than a row.
    """
    rows: list[list[Document]] = []
    free: list[int] = []
    for document in documents:
        if len(document) > row_length:
            raise TrainingInputError(
                f"a document of {len(document)} tokens does not fit into a row of {row_length}"
            )
        row = best_fit(free, len(document))
        if row is None:
            row = len(rows)
            rows.append([])
            free.append(row_length)
        rows[row].append(document)
        free[row] -= len(document)
    return [
        pack_rows(rows[i : i + num_rows], row_length=row_length, pad_token_id=pad_token_id)
        for i in range(0, len(rows), num_rows)
    ]


def fill_slots(blocks: Blocks, num_slots: int, generator: torch.Generator) -> Blocks:
    """Returns `num_slots` slots a row, its blocks dealt out to them in random order, round by round.

    Rows hold unequal numbers of blocks, a pass computes equally many for all. So a row with few
    blocks gets several canvases of each, noised apart, and none computes emptiness; of a row with
    more blocks than slots some are left out. A row without blocks has unused slots.

    Args:
        blocks: From `cut_blocks`: used slots come first.
        num_slots: Slots of a row.
        generator: A CPU generator, the only source of randomness.
    """
    is_used = blocks.starts >= 0  # [B, N]
    draws = torch.rand(is_used.shape, generator=generator).to(is_used.device)
    order = draws.masked_fill(~is_used, torch.inf).argsort(dim=1)
    rounds = torch.arange(num_slots, device=is_used.device)
    chosen = order.gather(1, rounds % is_used.sum(dim=1, keepdim=True).clamp(min=1))
    rows = torch.arange(len(chosen), device=is_used.device)[:, None]
    return Blocks(
        starts=blocks.starts[rows, chosen],
        targets=blocks.targets[rows, chosen],
        is_token=blocks.is_token[rows, chosen],
    )


def share_blocks(
    blocks: Blocks, noised: NoisedBlocks, rank: int, world_size: int
) -> tuple[Blocks, NoisedBlocks]:
    """Returns the blocks of the rows that `Batch.share` gives one process."""
    rows = slice(rank, None, world_size)
    return _take(blocks, rows), _take(noised, rows)


def _take(part: _BlockTensors, rows: slice) -> _BlockTensors:
    """Returns some rows of a dataclass of tensors [B, N, ...]."""
    return replace(part, **{item.name: getattr(part, item.name)[rows] for item in fields(part)})


def cut_blocks(batch: Batch, block_size: int, *, skips: Sequence[int] | None = None) -> Blocks:
    """Returns the responses cut into blocks of `block_size` tokens.

    A response's first block starts at the response's start; the last may reach past its end.

    Args:
        batch: Packed rows.
        block_size: Tokens in a block.
        skips: For each span, response tokens left to history before the first block. At least one
            token is always left for a block. None means none.
    """
    slots: list[list[tuple[int, int]]] = [[] for _ in range(len(batch.input_ids))]
    for number, span in enumerate(batch.spans):
        skip = skips[number] if skips is not None else 0
        first = min(span.response_start + skip, span.end - 1)
        slots[span.row] += [(start, span.end) for start in range(first, span.end, block_size)]
    num_blocks = max(map(len, slots))
    padded = [row + [(-1, -1)] * (num_blocks - len(row)) for row in slots]
    device = batch.input_ids.device
    starts, ends = torch.tensor(padded, device=device).view(-1, num_blocks, 2).unbind(-1)
    positions = starts.unsqueeze(-1) + torch.arange(block_size, device=device)  # [B, N, n]
    is_token = (positions < ends.unsqueeze(-1)) & (starts.unsqueeze(-1) >= 0)
    index = torch.minimum(positions, ends.unsqueeze(-1) - 1).clamp(min=0)
    targets = batch.input_ids.gather(1, index.flatten(1)).view_as(positions)
    return Blocks(starts=starts, targets=targets, is_token=is_token)
