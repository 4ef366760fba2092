"""The plain loop: prompts in, events out. Slow, obvious, the truth that faster decoders must match.

Every pass commits what is final, previews what is open and keeps what the policy says. A row never
waits for another: it commits its block in the very pass that previews its next one.

The canvas of a constrained row fills from the left, as a constraint can judge a token only where
all before it is known: forced tokens go in unasked, the first open position is drawn from what the
constraint allows, and what the policy keeps further right stays while the constraint validates it.
The rest goes back to mask.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from types import UnionType

import torch
from torch import Tensor

from clover.config import DiffusionConfig, ModelConfig
from clover.diffusion.policies import (
    Autoregressive,
    DiffusionPolicy,
    EntropyBound,
    Policy,
    PromptLookup,
    SelfVerifiedPolicy,
    Threshold,
    choose_positions,
)
from clover.diffusion.requests import (
    BlockCommitted,
    CanvasUpdated,
    Decode,
    Event,
    Finished,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    GenerationStats,
    TokenLogprobs,
)
from clover.diffusion.rows import (
    Row,
    Rules,
    check_request,
    make_rules,
    mask_open,
    predict_rows,
    resolve_block_size,
    start_row,
)
from clover.diffusion.sampling import Prediction
from clover.model.transformer import CloverForCausalLM

__all__ = [
    "BlockCommitted",
    "CanvasUpdated",
    "Decode",
    "Event",
    "FinishReason",
    "Finished",
    "GenerationRequest",
    "GenerationResult",
    "GenerationStats",
    "TokenLogprobs",
    "generate",
    "generate_all",
    "reserved_token_ids",
]


def reserved_token_ids(config: ModelConfig, num_token_ids: int) -> frozenset[int]:
    """Returns the ids that are no text: the mask, and the padded rows the tokenizer lacks.

    Args:
        config: The model's.
        num_token_ids: Length of the tokenizer, added tokens included.
    """
    mask = [] if config.diffusion is None else [config.diffusion.mask_token_id]
    return frozenset([*mask, *range(num_token_ids, config.vocab_size)])


def generate_all(
    model: CloverForCausalLM,
    requests: Sequence[GenerationRequest],
    *,
    decode: Decode | None = None,
    eos_token_ids: Iterable[int] | None = None,
    forbidden_token_ids: Iterable[int] = (),
    fused: bool = True,
    block_size: int | None = None,
) -> list[GenerationResult]:
    """Returns every result, in the order of the requests. See `generate`."""
    events = generate(
        model,
        requests,
        decode=decode,
        eos_token_ids=eos_token_ids,
        forbidden_token_ids=forbidden_token_ids,
        fused=fused,
        block_size=block_size,
    )
    results = {event.row: event.result for event in events if isinstance(event, Finished)}
    return [results[row] for row in range(len(requests))]


def generate(
    model: CloverForCausalLM,
    requests: Sequence[GenerationRequest],
    *,
    decode: Decode | None = None,
    eos_token_ids: Iterable[int] | None = None,
    forbidden_token_ids: Iterable[int] = (),
    fused: bool = True,
    block_size: int | None = None,
) -> Iterator[Event]:
    """Checks all requests, then returns their events as they happen.

    Requests whose policies share a loop share their passes: first those of `threshold` and
    `entropy_bound`, then `exact` and `relaxed`, then `prompt_lookup`, then `autoregressive`. A
    request's text does not depend on the others, and that of `exact` is that of `autoregressive`,
    up to the rounding of the logits, which varies with the shape of a pass: in bf16 a near tie may
    fall the other way. The caller may stop iterating at any time.

    Args:
        model: A Clover model; of an autoregressive parent, `autoregressive` alone can be asked.
        requests: Any number, each with its own knobs.
        decode: Ids to text; without it results have no text, and stop strings are refused.
        eos_token_ids: In place of the config's.
        forbidden_token_ids: Ids never drawn and refused in prompts: see `reserved_token_ids`. The
            mask is one of them in any case.
        fused: Whether a block's commit and the next one's first preview are one pass or two. The
            text is the same.
        block_size: Canvas width of the diffusion policies, in place of the config's.

    Raises:
        PromptError: A prompt is empty, fills the context, or holds a reserved id.
        RequestError: A knob is out of range, or the model cannot honour it.
        GenerationError: While iterating: the model's logits are not finite.
    """
    rules = make_rules(
        model.config,
        decode=decode,
        eos_token_ids=eos_token_ids,
        forbidden_token_ids=forbidden_token_ids,
    )
    size = resolve_block_size(model.config, block_size)
    for row, request in enumerate(requests):
        check_request(request, rules, f"request {row}: " if len(requests) > 1 else "")
    return _Decoder(model=model, rules=rules, fused=fused, block_size=size).run(requests)


class _Decoder:
    """The loops, and what they share. `rows` and the cache's rows correspond."""

    def __init__(
        self, *, model: CloverForCausalLM, rules: Rules, fused: bool, block_size: int
    ) -> None:
        self.model = model
        self.rules = rules
        self.forbidden_ids = torch.tensor(
            sorted(rules.forbidden), dtype=torch.int64, device=model.device
        )
        self.fused = fused
        self.block_size = block_size
        self.rows: list[Row] = []
        self.next_logits: dict[int, Tensor] = {}  # by row index: [V], of its last committed token
        self.cache = model.new_cache(0)

    def run(self, requests: Sequence[GenerationRequest]) -> Iterator[Event]:
        """Yields every event of every request."""
        started = time.perf_counter()
        loops: list[tuple[type[Policy] | UnionType, Callable[[], Iterator[Event]]]] = [
            (Threshold | EntropyBound, self._fill_blocks),
            (SelfVerifiedPolicy, self._draft_and_verify),
            (PromptLookup, self._look_up_and_verify),
            (Autoregressive, self._write_one_by_one),
        ]
        for policies, loop in loops:
            self.rows = [
                start_row(index, request, self.rules, self.block_size, started)
                for index, request in enumerate(requests)
                if isinstance(request.policy, policies)
            ]
            if self.rows:
                self._prefill()
                for row in self.rows:
                    yield from row.begin()
                yield from self._drop_ended()
                yield from loop()

    def _fill_blocks(self) -> Iterator[Event]:
        """`threshold` and `entropy_bound`."""
        while self.rows:
            prediction = self._predict_canvases((yield from self._commit_and_preview()))
            for i, row in enumerate(self.rows):
                yield self._place(row, prediction, i)
                yield from row.close_blocks()
            yield from self._drop_ended()

    def _draft_and_verify(self) -> Iterator[Event]:
        """`exact` and `relaxed`. Each pass verifies a draft and previews the block behind: the next.

        A row's block is the pending token, which is known, and its draft. A pass without a draft is
        an autoregressive step. If all of a draft is accepted, the preview saw the true text and the
        next draft is read from it; else it is lost, and the next pass drafts only what is forced.
        Behind a draft that ends the text nothing is previewed.
        """
        while self.rows:
            logits, is_seen = yield from self._verify()
            if any(is_seen):
                prediction = self._predict_canvases(logits)
            for i in itertools.compress(range(len(self.rows)), is_seen):
                update = self._place(self.rows[i], prediction, i)
                if update.kept:
                    yield update
            yield from self._drop_ended()

    def _look_up_and_verify(self) -> Iterator[Event]:
        """`prompt_lookup`. Each pass verifies a draft; the next is looked up on the host."""
        while self.rows:
            for row in self.rows:
                row.passes += 1
            blocks = [[*row.pending, *row.draft()] for row in self.rows]
            logits, transaction = self.model.verify(self.cache, *self._pad(blocks))
            transaction.commit((yield from self._accept(logits)))
            yield from self._drop_ended()

    def _write_one_by_one(self) -> Iterator[Event]:
        """`autoregressive`. What a constraint forces is committed with the token before it."""
        while self.rows:
            yield from self._commit([row.pending for row in self.rows])
            prediction = self._predict_canvases(self._next_logits())
            for row, (token_id,) in zip(self.rows, prediction.tokens.tolist(), strict=True):
                yield from row.write(token_id)
            yield from self._drop_ended()

    def _prefill(self) -> None:
        """Starts the cache with every prompt less its last token, which the first pass commits."""
        prompts = [list(row.request.prompt_ids[:-1]) for row in self.rows]
        self.cache = self.model.new_cache(len(prompts))
        if any(prompts):
            self.model.prefill(self.cache, *self._pad(prompts))

    def _commit(self, pending: Sequence[Sequence[int]]) -> Iterator[Event]:
        """Commits pending tokens of each row, or none, in a pass of its own."""
        for row, tokens in zip(self.rows, pending, strict=True):
            row.passes += bool(tokens)
        input_ids, lengths = self._pad(pending)
        yield from self._take_commit(self.model.commit(self.cache, input_ids, lengths), lengths)

    def _commit_and_preview(self) -> Generator[Event, None, Tensor]:
        """Commits what is pending and previews every canvas; returns what predicts it [B, n, V]."""
        canvas = self._canvas_ids([row.canvas for row in self.rows])
        if not self.fused and any(row.pending for row in self.rows):
            yield from self._commit([row.pending for row in self.rows])
        if any(row.pending for row in self.rows):
            input_ids, lengths = self._pad([row.pending for row in self.rows])
            commit_logits, logits = self.model.commit_and_preview(
                self.cache, input_ids, canvas, lengths
            )
            yield from self._take_commit(commit_logits, lengths)
        else:
            logits = self.model.preview(self.cache, canvas)
        for row in self.rows:
            row.previews += 1
            row.passes += 1
        if self._diffusion.shift_logits:
            return torch.cat([self._next_logits(), logits[:, :-1]], dim=1)
        return logits

    def _take_commit(self, logits: Tensor, lengths: Sequence[int]) -> Iterator[Event]:
        """Keeps the logits [B, T, V] of each row's last committed token; nothing is pending then."""
        for i, (row, length) in enumerate(zip(self.rows, lengths, strict=True)):
            if length:
                self.next_logits[row.index] = logits[i, length - 1].clone()
                row.pending = []
                row.commits += 1
                if row.scorer:
                    yield from row.score(logits[i, :length])

    def _next_logits(self) -> Tensor:
        """Returns the AR logits of the first position that is not final, [B, 1, V]."""
        return torch.stack([self.next_logits[row.index] for row in self.rows])[:, None]

    def _verify(self) -> Generator[Event, None, tuple[Tensor, list[bool]]]:
        """Commits of each draft what the AR sampler agrees with, and one token more.

        Returns the logits [B, n - 1, V] that predict what follows the last new token, and for which
        rows they are good: those that go on and whose whole draft was accepted.
        """
        blocks = [[*row.pending, *row.draft()] for row in self.rows]
        input_ids, lengths = self._pad(blocks)
        previewing = [row.needs_preview() for row in self.rows]
        canvas = self._canvas_ids([[None] * self.block_size for _ in self.rows])
        if self.fused and any(previewing):
            logits, previewed, transaction = self.model.verify_and_preview(
                self.cache, input_ids, canvas, lengths
            )
        else:
            logits, transaction = self.model.verify(self.cache, input_ids, lengths)
        for row, has_preview in zip(self.rows, previewing, strict=True):
            row.previews += has_preview
            row.passes += 1 if self.fused else 1 + has_preview
        counts = yield from self._accept(logits)
        transaction.commit(counts)
        if not any(previewing):
            return logits[:, :0], previewing
        if not self.fused:
            previewed = self.model.preview(self.cache, canvas)
        is_seen = [
            has_preview and count == length and not row.is_finished
            for row, has_preview, count, length in zip(
                self.rows, previewing, counts, lengths, strict=True
            )
        ]
        return previewed[:, :-1] if self._diffusion.shift_logits else previewed[:, 1:], is_seen

    def _accept(self, logits: Tensor) -> Generator[Event, None, list[int]]:
        """Makes final what the AR sampler repeats of every draft, and one token more.

        Args:
            logits: [B, T, V], of each row's pending token and its draft.

        Returns:
            How many of those tokens each row is to commit.
        """
        drafts = [row.draft() for row in self.rows]
        masks = [row.masks_of_draft() for row in self.rows]
        targets = self._predict(logits, drafts, masks).tokens.tolist()
        counts = []
        for row, row_logits, target in zip(self.rows, logits, targets, strict=True):
            row.commits += 1
            num_new, events = row.verify(target)
            yield from events
            if row.scorer:
                yield from row.score(row_logits[:num_new])
            counts.append(num_new)  # the pending token and what was agreed on
        return counts

    def _predict_canvases(self, logits: Tensor) -> Prediction:
        """Returns what logits [B, n, V] say about every canvas."""
        masks = [row.masks_of_next() for row in self.rows]
        return self._predict(logits, [row.canvas for row in self.rows], masks)

    def _predict(
        self,
        logits: Tensor,
        canvases: Sequence[Sequence[int | None]],
        masks: Sequence[Sequence[tuple[int, Tensor]]],
    ) -> Prediction:
        return predict_rows(self.rows, logits, canvases, masks, self.forbidden_ids)

    def _place(self, row: Row, prediction: Prediction, i: int) -> CanvasUpdated:
        """Puts what the policy keeps of the prediction's row `i` on the canvas."""
        policy = row.request.policy
        assert isinstance(policy, DiffusionPolicy)
        keep = choose_positions(
            policy,
            confidence=prediction.confidence[i],
            entropy=prediction.entropy[i],
            is_open=torch.tensor(
                row.open_positions(), dtype=torch.bool, device=prediction.confidence.device
            ),
        )
        return row.place(prediction.tokens[i].tolist(), keep.tolist(), prediction.confidence[i])

    def _drop_ended(self) -> Iterator[Event]:
        """Lets rows leave the batch whose text is written, once their last tokens are scored."""
        if any(row.awaits_scores for row in self.rows):
            yield from self._commit([row.pending if row.awaits_scores else [] for row in self.rows])
        left = [i for i, row in enumerate(self.rows) if not row.is_finished]
        if 0 < len(left) < len(self.rows):
            self.cache = self.cache.select(left)
        self.rows = [self.rows[i] for i in left]

    @property
    def _diffusion(self) -> DiffusionConfig:
        assert self.model.config.diffusion is not None
        return self.model.config.diffusion

    def _canvas_ids(self, canvases: Sequence[Sequence[int | None]]) -> Tensor:
        """Returns int64 [B, n], the mask id where open."""
        ids = [mask_open(canvas, self.model.config) for canvas in canvases]
        return torch.tensor(ids, device=self.model.device)

    def _pad(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
        """Returns int64 [B, T], right-padded, and the lengths."""
        lengths = [len(row) for row in rows]
        padded = [[*row, *[0] * (max(lengths) - len(row))] for row in rows]
        return torch.tensor(padded, device=self.model.device), lengths
