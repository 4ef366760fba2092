"""The plain loop: prompts in, events out. Slow, obvious, the truth that faster decoders must match.

Every pass commits what is final, previews what is open and keeps what the policy says. A row never
waits for another: it commits its block in the very pass that previews its next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import UnionType

import torch
from torch import Tensor

from clover.config import DiffusionConfig, ModelConfig
from clover.diffusion.policies import (
    Autoregressive,
    EntropyBound,
    Exact,
    Policy,
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
    `entropy_bound`, then `exact`, then `autoregressive`. A request's text does not depend on the
    others, and that of `exact` is that of `autoregressive`, up to the rounding of the logits, which
    varies with the shape of a pass: in bf16 a near tie may fall the other way. The caller may stop
    iterating at any time.

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
    """The three loops, and what they share. `rows` and the cache's rows correspond."""

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
            (Exact, self._draft_and_verify),
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
                yield from loop()

    def _fill_blocks(self) -> Iterator[Event]:
        """`threshold` and `entropy_bound`."""
        while self.rows:
            logits = self._commit_and_preview()
            prediction = self._predict(logits, [row.canvas for row in self.rows])
            for i, row in enumerate(self.rows):
                yield self._place(row, prediction, i)
                yield from row.close_block()
            self._drop_finished()

    def _draft_and_verify(self) -> Iterator[Event]:
        """`exact`. A block is the pending token, which is known, and a canvas behind it."""
        while self.rows:
            yield from self._draft()
            for row, tokens in zip(self.rows, self._verify(), strict=True):
                row.pending = tokens[-1:]
                row.lay_canvas()
                yield from row.append(tokens)
            self._drop_finished()

    def _write_one_by_one(self) -> Iterator[Event]:
        """`autoregressive`."""
        while self.rows:
            self._commit()
            prediction = self._predict(self._stack_next_logits(), [[None] for _ in self.rows])
            for row, tokens in zip(self.rows, prediction.tokens.tolist(), strict=True):
                row.pending = tokens
                yield from row.append(tokens)
            self._drop_finished()

    def _prefill(self) -> None:
        """Starts the cache with every prompt less its last token, which the first pass commits."""
        prompts = [list(row.request.prompt_ids[:-1]) for row in self.rows]
        self.cache = self.model.new_cache(len(prompts))
        if any(prompts):
            self.model.prefill(self.cache, *self._pad(prompts))

    def _commit(self) -> None:
        """Commits what is pending, in a pass of its own."""
        for row in self.rows:
            row.passes += bool(row.pending)
        input_ids, lengths = self._pad([row.pending for row in self.rows])
        self._take_commit(self.model.commit(self.cache, input_ids, lengths))

    def _commit_and_preview(self) -> Tensor:
        """Commits what is pending and previews every canvas; returns what predicts it [B, n, V]."""
        canvas = self._canvas_ids([row.canvas for row in self.rows])
        if not self.fused and any(row.pending for row in self.rows):
            self._commit()
        if any(row.pending for row in self.rows):
            input_ids, lengths = self._pad([row.pending for row in self.rows])
            commit_logits, logits = self.model.commit_and_preview(
                self.cache, input_ids, canvas, lengths
            )
            self._take_commit(commit_logits)
        else:
            logits = self.model.preview(self.cache, canvas)
        for row in self.rows:
            row.previews += 1
            row.passes += 1
        if self._diffusion.shift_logits:
            return torch.cat([self._stack_next_logits(), logits[:, :-1]], dim=1)
        return logits

    def _take_commit(self, logits: Tensor) -> None:
        """Keeps the logits [B, T, V] of each row's last pending token; nothing is pending then."""
        for i, row in enumerate(self.rows):
            if row.pending:
                self.next_logits[row.index] = logits[i, len(row.pending) - 1].clone()
                row.pending = []
                row.commits += 1

    def _stack_next_logits(self) -> Tensor:
        """Returns the AR logits of the first position that is not final, [B, 1, V]."""
        return torch.stack([self.next_logits[row.index] for row in self.rows])[:, None]

    def _draft(self) -> Iterator[CanvasUpdated]:
        """Fills every canvas by previews."""
        while any(None in row.canvas for row in self.rows):
            blocks = [[*row.pending, *row.canvas] for row in self.rows]
            logits = self.model.preview(self.cache, self._canvas_ids(blocks))
            logits = logits[:, :-1] if self._diffusion.shift_logits else logits[:, 1:]
            prediction = self._predict(logits, [row.canvas for row in self.rows])
            for i, row in enumerate(self.rows):
                if None in row.canvas:
                    row.num_drafts += 1
                    row.previews += 1
                    row.passes += 1
                    yield self._place(row, prediction, i)

    def _verify(self) -> list[list[int]]:
        """Commits what the AR sampler agrees with; returns each row's new tokens, at least one."""
        blocks = [[*row.pending, *row.canvas] for row in self.rows]
        logits, transaction = self.model.verify(self.cache, self._canvas_ids(blocks))
        targets = self._predict(logits, [[*row.canvas, None] for row in self.rows]).tokens.tolist()
        new_tokens = [row.agreed(target) for row, target in zip(self.rows, targets, strict=True)]
        for row in self.rows:
            row.commits += 1
            row.passes += 1
        transaction.commit([len(tokens) for tokens in new_tokens])  # the pending token, the agreed
        return new_tokens

    def _predict(self, logits: Tensor, canvases: Sequence[Sequence[int | None]]) -> Prediction:
        return predict_rows(self.rows, logits, canvases, self.forbidden_ids)

    def _place(self, row: Row, prediction: Prediction, i: int) -> CanvasUpdated:
        """Puts what the policy keeps of the prediction's row `i` on the canvas."""
        policy = row.request.policy
        assert not isinstance(policy, Autoregressive)
        keep = choose_positions(
            policy,
            confidence=prediction.confidence[i],
            entropy=prediction.entropy[i],
            is_open=torch.tensor(row.open_positions(), device=prediction.confidence.device),
            num_passes=row.num_drafts,
        )
        return row.place(prediction.tokens[i].tolist(), keep.tolist())

    def _drop_finished(self) -> None:
        """Lets finished rows leave the batch."""
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
