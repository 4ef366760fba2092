"""How the tokens of one forward pass are laid out: clean tokens first, then blocks of canvas tokens.

One layout serves every pass. A commit has clean tokens alone, a preview one block alone, the fused
pass both, and two-stream training a whole row of clean tokens with many noised blocks behind it.

Shapes: B rows, T clean tokens, M blocks of n canvas tokens, L = T + M n tokens in all, S keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Document ids that match no document of a batch (padding is any other negative id).
NO_DOCUMENT = -2


@dataclass(frozen=True, kw_only=True, slots=True)
class Streams:
    """The layout of one pass, the same for all layers.

    Attributes:
        num_clean: T.
        num_blocks, block_size: M and n; 0 blocks for a plain causal pass.
        position_ids: [B, L] absolute positions.
        attention_mask: [B, 1, L, S] bool, True where a token may look; None: see `is_causal`.
        is_causal: without a mask, whether attention is plainly causal or sees every key.
        clean_mask: [B, T] bool, False for right padding; None: every clean token is valid.
        canvas_mask: [B, n] bool, False for right padding; None: every canvas token is valid.
        num_valid: [B] int64, valid clean tokens of each row (cached passes only).
        document_ids: [B, T], packed training rows only.
        block_starts: [B, M], clean tokens of the row before each block (training only).
        block_documents: [B, M], the document of each block (packed training rows only).
        kv_rows: [B, L], where each token's key and value go in the cache (cached passes only).
        num_keys: S, keys that attention looks at (cached passes only).
        coreset_size: experts that a block may use in this pass; None: what the model says.
    """

    num_clean: int
    num_blocks: int
    block_size: int
    position_ids: Tensor
    attention_mask: Tensor | None
    is_causal: bool = False
    clean_mask: Tensor | None = None
    canvas_mask: Tensor | None = None
    num_valid: Tensor | None = None
    document_ids: Tensor | None = None
    block_starts: Tensor | None = None
    block_documents: Tensor | None = None
    kv_rows: Tensor | None = None
    num_keys: int = 0
    coreset_size: int | None = None


def causal_streams(input_ids: Tensor, document_ids: Tensor | None) -> Streams:
    """Returns the layout of a whole-sequence causal forward without a cache."""
    batch_size, num_tokens = input_ids.shape
    if document_ids is None:
        positions = torch.arange(num_tokens, device=input_ids.device).expand(batch_size, -1)
        mask = None
    else:
        positions = document_positions(document_ids)
        mask = _causal_mask(document_ids).unsqueeze(1)
    return Streams(
        num_clean=num_tokens,
        num_blocks=0,
        block_size=0,
        position_ids=positions,
        attention_mask=mask,
        is_causal=document_ids is None,
        document_ids=document_ids,
    )


def two_stream_streams(
    input_ids: Tensor,
    document_ids: Tensor | None,
    canvas: Tensor,
    block_starts: Tensor,
    *,
    coreset_size: int | None = None,
) -> Streams:
    """Returns the training layout: a clean row, then its noised blocks [B, M, n]."""
    num_clean, (num_blocks, block_size) = input_ids.shape[1], canvas.shape[1:]
    if document_ids is None:
        document_ids = torch.zeros_like(input_ids)
    clean_positions = document_positions(document_ids)
    block_documents = _block_documents(document_ids, block_starts)
    starts = block_starts.clamp(min=0)
    first = _block_positions(document_ids, clean_positions, starts, block_documents)  # [B, M]
    offsets = torch.arange(block_size, device=canvas.device)
    canvas_positions = (first[..., None] + offsets).flatten(1)

    index = torch.arange(num_clean, device=canvas.device)
    history = (index < starts[..., None]) & (document_ids[:, None] == block_documents[..., None])
    canvas_to_clean = history.repeat_interleave(block_size, dim=1)  # [B, M n, T]
    block_index = torch.arange(num_blocks, device=canvas.device).repeat_interleave(block_size)
    own_block = (block_index[:, None] == block_index).expand(input_ids.shape[0], -1, -1)
    clean_to_canvas = own_block.new_zeros(input_ids.shape[0], num_clean, num_blocks * block_size)
    clean_rows = torch.cat([_causal_mask(document_ids), clean_to_canvas], dim=2)
    canvas_rows = torch.cat([canvas_to_clean, own_block], dim=2)
    return Streams(
        num_clean=num_clean,
        num_blocks=num_blocks,
        block_size=block_size,
        position_ids=torch.cat([clean_positions, canvas_positions], dim=1),
        attention_mask=torch.cat([clean_rows, canvas_rows], dim=1).unsqueeze(1),
        document_ids=document_ids,
        block_starts=starts,
        block_documents=block_documents,
        coreset_size=coreset_size,
    )


def cached_streams(
    lengths: Sequence[int],
    num_valid: Sequence[int],
    num_clean: int,
    block_size: int,
    *,
    canvas_lengths: Sequence[int] | None = None,
    spare_row: int,
    device: torch.device,
) -> Streams:
    """Returns the layout of a pass over a cache: up to T clean tokens a row, then at most one block.

    Args:
        lengths: committed tokens of each row.
        num_valid: valid clean tokens of each row, the rest is right padding.
        num_clean: T.
        block_size: n, 0 for a pass without a canvas.
        canvas_lengths: valid canvas tokens of each row, the rest is right padding; None: all n.
        spare_row: the cache row that takes the keys of padding, which nobody looks at.
        device: where the tensors go.
    """
    if canvas_lengths is None:
        canvas_lengths = [block_size] * len(lengths)
    is_padded = any(count < num_clean for count in num_valid)
    is_canvas_padded = any(count < block_size for count in canvas_lengths)
    counts = torch.tensor([lengths, num_valid, canvas_lengths], device=device)
    length, valid, canvas_length = counts[..., None]  # [B, 1] each
    clean = torch.arange(num_clean, device=device)
    clean_mask = clean < valid if is_padded else None  # [B, T]
    positions = length + clean
    if clean_mask is not None:  # padding stands where the last valid token does
        positions = torch.minimum(positions, length + (valid - 1).clamp(min=0))
    rows = positions if clean_mask is None else positions.masked_fill(~clean_mask, spare_row)
    last_visible, canvas_mask = positions, None
    if block_size:
        canvas = torch.arange(block_size, device=device)
        canvas_mask = canvas < canvas_length if is_canvas_padded else None  # [B, n]
        canvas_positions = length + valid + canvas
        canvas_rows = canvas_positions
        if canvas_mask is not None:
            canvas_rows = canvas_positions.masked_fill(~canvas_mask, spare_row)
        # A row with neither history nor canvas has padding alone; it must look somewhere, or it is NaN.
        block_end = (length + valid + canvas_length - 1).clamp(min=0).expand_as(canvas_positions)
        last_visible = torch.cat([positions, block_end], dim=1)  # [B, L]
        positions = torch.cat([positions, canvas_positions], dim=1)
        rows = torch.cat([rows, canvas_rows], dim=1)
    num_keys = max(map(sum, zip(lengths, num_valid, canvas_lengths, strict=True)))
    # One length for all, and one token or one block: everybody sees every key, no mask is needed.
    is_uniform = all(len(set(x)) == 1 for x in (lengths, num_valid, canvas_lengths))
    is_full = not is_padded and not is_canvas_padded
    sees_all = is_uniform and is_full and num_clean + min(block_size, 1) == 1
    mask = None
    if not sees_all:
        mask = (torch.arange(num_keys, device=device) <= last_visible[..., None]).unsqueeze(1)
    return Streams(
        num_clean=num_clean,
        num_blocks=1 if block_size else 0,
        block_size=block_size,
        position_ids=positions,
        attention_mask=mask,
        clean_mask=clean_mask,
        canvas_mask=canvas_mask,
        num_valid=valid[:, 0],
        kv_rows=rows,
        num_keys=num_keys,
    )


def document_positions(document_ids: Tensor) -> Tensor:
    """Returns each token's position inside its own document, [B, T]."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    is_first = torch.ones_like(document_ids, dtype=torch.bool)
    is_first[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    first_index = torch.where(is_first, index, 0).cummax(dim=1).values
    return index - first_index


def _causal_mask(document_ids: Tensor) -> Tensor:
    """Returns [B, T, T] bool: not after the token, and in its document."""
    causal = torch.ones(document_ids.shape[1], document_ids.shape[1], device=document_ids.device)
    return causal.tril().bool() & (document_ids[:, :, None] == document_ids[:, None, :])


def _block_documents(document_ids: Tensor, block_starts: Tensor) -> Tensor:
    """Returns the document of each block: its first clean token's, or the one that ends before it."""
    num_clean = document_ids.shape[1]
    here = document_ids.gather(1, block_starts.clamp(0, num_clean - 1))
    before = document_ids.gather(1, (block_starts - 1).clamp(0, num_clean - 1))
    documents = torch.where((block_starts < num_clean) & (here >= 0), here, before)
    return documents.masked_fill(block_starts < 0, NO_DOCUMENT)


def _block_positions(
    document_ids: Tensor, positions: Tensor, starts: Tensor, block_documents: Tensor
) -> Tensor:
    """Returns the position of each block's first token in its document, [B, M]."""
    last = document_ids.shape[1] - 1
    here = positions.gather(1, starts.clamp(max=last))
    after_end = positions.gather(1, (starts - 1).clamp(min=0)) + 1
    is_inside = (starts <= last) & (
        document_ids.gather(1, starts.clamp(max=last)) == block_documents
    )
    return torch.where(is_inside, here, after_end)
