"""Canvases of the model's own decoding: what a preview meets at inference, in place of random masks.

A canvas that a decoder previews has a history, tokens that the policy was sure of, and masks elsewhere.
Here the history is either the reference text, and the tokens may contradict it, or a reply that the
model writes from its prompt to its end. The decoder is greedy, its policy `Threshold`.

B: rows, N: blocks in a row, n: tokens in a block.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from clover.diffusion.generate import (
    BlockCommitted,
    CanvasUpdated,
    Finished,
    GenerationRequest,
    generate,
)
from clover.diffusion.noise import NoisedBlocks, Predict
from clover.diffusion.policies import Threshold, keep_confident
from clover.diffusion.sampling import measure_certainty
from clover.errors import ConfigError
from clover.model.transformer import CloverForCausalLM
from clover.train.data import Document
from clover.train.packing import Batch, Blocks, pack_rows

CanvasSource = Literal["noise", "previews", "replies"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OnPolicyConfig:
    """How often a step's canvases are the model's own, and how it decodes for them.

    Attributes:
        reply_probability: Of a step on replies that the model writes to the batch's prompts, none
            longer than the reference. It has the distillation losses alone.
        canvas_probability: Of a step on reference text whose blocks the model has begun to denoise.
            Wrong tokens that it placed are to be repaired, with `edit_weight`.
        threshold: Of the decoder.
        states_per_block: Of a written reply: how many different canvases of each block are learned
            from, out of all that the decoder previewed.
        max_previews: Of reference text: a canvas has seen fewer than this many previews, each
            number equally likely. Each is a pass over all rows, without gradients.
    """

    reply_probability: float = 0.0
    canvas_probability: float = 0.0
    threshold: float = 0.9
    states_per_block: int = 1
    max_previews: int = 4

    def __post_init__(self) -> None:
        """Checks ranges."""
        for name in ("reply_probability", "canvas_probability", "threshold"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                found = getattr(self, name)
                raise ConfigError(f"on_policy.{name} must be in [0, 1], found {found}")
        for name in ("states_per_block", "max_previews"):
            if getattr(self, name) < 1:
                found = getattr(self, name)
                raise ConfigError(f"on_policy.{name} must be at least 1, found {found}")
        if self.reply_probability + self.canvas_probability > 1.0:
            raise ConfigError(
                "on_policy.reply_probability and canvas_probability must not exceed 1 together, "
                f"found {self.reply_probability} and {self.canvas_probability}"
            )

    @property
    def is_on(self) -> bool:
        """Whether any step is on-policy."""
        return self.reply_probability > 0 or self.canvas_probability > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenReplies:
    """Prompts with the model's replies to them, and canvases from which it wrote these."""

    batch: Batch
    block_starts: (
        Tensor  # [B, N] index in the row of the block's first token, -1 for an unused slot
    )
    canvas: Tensor  # [B, N, n] token ids
    masked: Tensor  # [B, N, n] bool: a mask, and inside the reply


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """A canvas that the decoder previewed while it wrote a reply, and what it then made of it."""

    offset: int  # tokens of the reply before the block
    canvas: tuple[int, ...]
    after: tuple[int, ...]


def choose_canvas_source(config: OnPolicyConfig, generator: torch.Generator) -> CanvasSource:
    """Returns where the canvases of a step come from."""
    draw = float(torch.rand((), generator=generator))
    if draw < config.reply_probability:
        return "replies"
    is_own = draw < config.reply_probability + config.canvas_probability
    return "previews" if is_own else "noise"


def draw_num_previews(
    block_starts: Tensor, max_previews: int, generators: Sequence[torch.Generator]
) -> Tensor:
    """Returns how many previews each block's canvas has seen, [B, N], below `max_previews`.

    Args:
        block_starts: [B, N], -1 for an unused slot, which gets 0.
        max_previews: At least 1.
        generators: A CPU generator for each row: the numbers do not depend on the other rows.
    """
    counts = torch.zeros(block_starts.shape, dtype=torch.long)
    for row, (starts, generator) in enumerate(zip(block_starts.cpu(), generators, strict=True)):
        is_used = starts >= 0
        num_used = int(is_used.sum())
        counts[row, is_used] = torch.randint(max_previews, (num_used,), generator=generator)
    return counts.to(block_starts.device)


def preview_blocks(
    blocks: Blocks,
    is_learned: Tensor,
    num_previews: Tensor,
    *,
    threshold: float,
    mask_token_id: int,
    eos_token_ids: Collection[int],
    predict: Predict,
) -> NoisedBlocks:
    """Returns what the decoder has made of masks after some previews, the reference as history.

    A canvas that the next preview would complete stays as it is: the decoder never previews a
    complete one. Tokens of the document that were placed wrongly count as edits.

    Args:
        blocks: Of the reference text.
        is_learned: Which positions have a target, bool [B, N, n].
        num_previews: At most so many, [B, N].
        threshold: Of the policy.
        mask_token_id: The id of a mask.
        eos_token_ids: Ids that end a text: nothing is placed right of one.
        predict: The model's preview, reserved ids at -inf.
    """
    canvas = torch.full_like(blocks.targets, mask_token_id)
    for number in range(int(num_previews.max())):
        logits = predict(canvas)
        confidence, _ = measure_certainty(logits)
        is_open = _open_positions(canvas, mask_token_id, eos_token_ids)
        kept = keep_confident(confidence, is_open, threshold)
        after = logits.argmax(dim=-1).where(kept, canvas)
        is_complete = ~_open_positions(after, mask_token_id, eos_token_ids).any(dim=-1)
        is_due = (number < num_previews) & ~is_complete  # [B, N]
        canvas = after.where(is_due.unsqueeze(-1), canvas)
    masked = (canvas == mask_token_id) & is_learned
    placed_wrongly = (canvas != mask_token_id) & (canvas != blocks.targets)
    return NoisedBlocks(
        canvas=canvas,
        masked=masked,
        edited=placed_wrongly & blocks.is_token,
        level=masked.sum(dim=-1) / is_learned.sum(dim=-1).clamp(min=1),
    )


def _open_positions(canvas: Tensor, mask_token_id: int, eos_token_ids: Collection[int]) -> Tensor:
    """Returns where a token may be placed: a mask, and not right of an EOS, bool [B, N, n]."""
    ends = torch.isin(canvas, torch.tensor(list(eos_token_ids), device=canvas.device))
    return (canvas == mask_token_id) & (ends.cumsum(dim=-1) == 0)


def write_replies(
    model: CloverForCausalLM,
    batch: Batch,
    config: OnPolicyConfig,
    *,
    block_size: int,
    reserved_token_ids: Collection[int],
    generators: Sequence[torch.Generator],
) -> WrittenReplies:
    """Returns the batch's prompts with the model's own replies, and canvases of its decoding.

    A reply has at most as many tokens as the reference, so that rows hold what they held. One that
    is cut there has no end: what the teacher says of its tokens is true all the same.

    Args:
        model: A Clover model; it decodes as at inference, with the coreset that its config says.
        batch: Reference text. Only prompts and lengths are used.
        config: Threshold, and canvases of a block.
        block_size: Tokens in a block.
        reserved_token_ids: Ids that are no text.
        generators: A CPU generator for each row, to draw canvases: they do not depend on other rows.
    """
    assert model.config.diffusion is not None
    mask_token_id = model.config.diffusion.mask_token_id
    prompts = [
        tuple(batch.input_ids[span.row, span.start : span.response_start].tolist())
        for span in batch.spans
    ]
    requests = [
        GenerationRequest(
            prompt_ids=prompt,
            max_tokens=span.end - span.response_start,
            policy=Threshold(threshold=config.threshold),
        )
        for prompt, span in zip(prompts, batch.spans, strict=True)
    ]
    replies, states = _decode(model, requests, block_size, mask_token_id, reserved_token_ids)
    rows: list[list[Document]] = [[] for _ in generators]
    for span, prompt, reply in zip(batch.spans, prompts, replies, strict=True):
        rows[span.row].append(
            Document(prompt_ids=prompt, response_ids=tuple(reply), family=span.family)
        )
    written = pack_rows(
        rows,
        row_length=batch.input_ids.shape[1],
        pad_token_id=model.config.pad_token_id or 0,
    )
    slots: list[list[tuple[int, int, tuple[int, ...]]]] = [[] for _ in generators]
    for span, trajectory in zip(written.spans, states, strict=True):
        for state in _draw_states(trajectory, config.states_per_block, generators[span.row]):
            start = span.response_start + state.offset
            slots[span.row].append((start, span.end, state.canvas))
    return _lay_canvases(written, slots, block_size, mask_token_id, batch.input_ids.device)


def _decode(
    model: CloverForCausalLM,
    requests: Sequence[GenerationRequest],
    block_size: int,
    mask_token_id: int,
    reserved_token_ids: Collection[int],
) -> tuple[list[list[int]], list[list[_State]]]:
    """Returns each request's reply, its end token included, and every canvas that was previewed."""
    replies: list[list[int]] = [[] for _ in requests]
    states: list[list[_State]] = [[] for _ in requests]
    events = generate(
        model, requests, forbidden_token_ids=reserved_token_ids, block_size=block_size
    )
    for event in events:
        reply, trajectory = replies[event.row], states[event.row]
        match event:
            case CanvasUpdated(canvas=after, kept=kept):
                before = (mask_token_id if i in kept else after[i] for i in range(block_size))
                state = _State(offset=len(reply), canvas=tuple(before), after=after)
                trajectory.append(state)
            case BlockCommitted(token_ids=token_ids):
                reply.extend(token_ids)
            case Finished(result=result) if result.finish_reason == "eos":
                # Events leave the end token out; it is where the last canvas goes on
                last = trajectory[-1]
                reply.append(last.after[len(reply) - last.offset])
    return replies, states


def _draw_states(
    trajectory: Sequence[_State], count: int, generator: torch.Generator
) -> list[_State]:
    """Returns at most `count` states of each block of a reply, all equally likely, in order."""
    drawn = []
    for _, group in groupby(trajectory, key=lambda state: state.offset):
        states = list(group)
        chosen = torch.randperm(len(states), generator=generator)[:count]
        drawn += [states[index] for index in sorted(chosen.tolist())]
    return drawn


def _lay_canvases(
    batch: Batch,
    slots: Sequence[Sequence[tuple[int, int, tuple[int, ...]]]],
    block_size: int,
    mask_token_id: int,
    device: torch.device,
) -> WrittenReplies:
    """Returns the canvases of each row, given as (block's start, reply's end, ids), side by side."""
    # Rows without a single block still go through the model
    num_slots = max(1, *map(len, slots))
    unused = (-1, -1, (mask_token_id,) * block_size)
    padded = [[*row, *[unused] * (num_slots - len(row))] for row in slots]
    starts, ends = (
        torch.tensor([[slot[part] for slot in row] for row in padded], device=device)
        for part in (0, 1)
    )
    canvas = torch.tensor([[slot[2] for slot in row] for row in padded], device=device)
    positions = starts.unsqueeze(-1) + torch.arange(block_size, device=device)  # [B, N, n]
    return WrittenReplies(
        batch=batch.to(device),
        block_starts=starts,
        canvas=canvas,
        masked=(canvas == mask_token_id) & (positions < ends.unsqueeze(-1)),
    )
