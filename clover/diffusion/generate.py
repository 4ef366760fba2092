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
import operator
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import UnionType

import torch
from torch import Tensor

from clover.config import DiffusionConfig, ModelConfig
from clover.diffusion.constraint import Constraint
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
from clover.diffusion.sampling import (
    Prediction,
    SamplingParams,
    TokenCounts,
    count_left,
    predict,
)
from clover.errors import GenerationError, PromptError, RequestError
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
    config = model.config
    diffusion = config.diffusion
    mask = [] if diffusion is None else [diffusion.mask_token_id]
    forbidden = frozenset([*mask, *forbidden_token_ids])
    eos = frozenset(config.eos_token_ids if eos_token_ids is None else eos_token_ids)
    context = config.max_position_embeddings
    if block_size is not None and not 1 <= block_size <= context:
        raise RequestError(f"block_size is {block_size}; allowed: 1 to {context}, the context")
    for row, request in enumerate(requests):
        where = f"request {row}: " if len(requests) > 1 else ""
        _check_request(where, request, config, forbidden, has_decode=decode is not None)
        _check_constraint(where, request, config, eos)
    decoder = _Decoder(
        model=model,
        decode=decode,
        eos=eos,
        forbidden=forbidden,
        fused=fused,
        block_size=block_size or (diffusion.block_size if diffusion else 1),
    )
    return decoder.run(requests)


def _check_request(
    where: str,
    request: GenerationRequest,
    config: ModelConfig,
    forbidden: frozenset[int],
    *,
    has_decode: bool,
) -> None:
    context, prompt = config.max_position_embeddings, request.prompt_ids
    if not 0 < len(prompt) < context:
        raise PromptError(
            f"{where}expected a prompt of 1 to {context - 1} tokens (the context less one "
            f"token of answer), found {len(prompt)}"
        )
    for position, token_id in enumerate(prompt):
        if token_id in forbidden or not 0 <= token_id < config.vocab_size:
            raise PromptError(
                f"{where}token id {token_id} at position {position} of the prompt is "
                "reserved or outside the vocabulary; leave it out"
            )
    for token_id in request.sampling.logit_bias:
        if token_id in forbidden or token_id >= config.vocab_size:
            raise RequestError(
                f"{where}logit_bias names token id {token_id}, which is reserved or "
                f"outside the vocabulary of {config.vocab_size}"
            )
    if request.stop and not has_decode:
        raise RequestError(f"{where}stop strings need `decode`, found None")
    if config.diffusion is None and not isinstance(request.policy, Autoregressive):
        raise RequestError(
            f"{where}policy {request.policy} needs a diffusion model, found an "
            "autoregressive parent; ask for `autoregressive` or convert the model"
        )


def _check_constraint(
    where: str, request: GenerationRequest, config: ModelConfig, eos: frozenset[int]
) -> None:
    constraint = request.constraint
    if constraint is None:
        return
    if constraint.vocab_size != config.vocab_size:
        raise RequestError(
            f"{where}the constraint is made for a vocabulary of {constraint.vocab_size}, the model "
            f"has {config.vocab_size}; compile it for this model"
        )
    if constraint.eos_token_ids != eos:
        raise RequestError(
            f"{where}the constraint ends with one of {sorted(constraint.eos_token_ids)}, this loop "
            f"with one of {sorted(eos)}; give both the same EOS"
        )


@dataclass(kw_only=True, slots=True)
class _Row:
    """One request under way. Its sequence is prompt | output | canvas."""

    index: int
    request: GenerationRequest
    params: SamplingParams  # the request's, the seed resolved
    eos: frozenset[int]  # empty where the request ignores EOS
    pending: list[int]  # final tokens that the cache lacks; at first the last of the prompt
    constraint: Constraint | None  # has taken the output and the resolved prefix of the canvas
    output: list[int] = field(default_factory=list)  # final tokens
    canvas: list[int | None] = field(default_factory=list)  # None: open
    next_logits: Tensor | None = None  # [V], of the last committed token
    previews: int = 0
    commits: int = 0
    passes: int = 0
    is_finished: bool = False

    @property
    def num_final(self) -> int:
        """Tokens before the canvas."""
        return len(self.request.prompt_ids) + len(self.output)

    def resolved_prefix(self) -> list[int]:
        """Returns the canvas up to its first open position."""
        prefix = itertools.takewhile(lambda token_id: token_id is not None, self.canvas)
        return [token_id for token_id in prefix if token_id is not None]

    def is_resolved(self) -> bool:
        """Returns whether nothing can be placed before more tokens are final."""
        return not any(self.open_positions())

    def draft(self) -> list[int]:
        """Returns the canvas up to its first open position or EOS: behind one nothing is needed."""
        prefix = self.resolved_prefix()
        ends = (count for count, token_id in enumerate(prefix, 1) if token_id in self.eos)
        return prefix[: next(ends, None)]

    def place_forced(self) -> list[int]:
        """Fills the canvas, from its first open position, with what the constraint forces.

        Returns the positions that were filled.
        """
        start = len(self.resolved_prefix())
        tokens = self.take_forced(len(self.canvas) - start)
        self.canvas[start : start + len(tokens)] = tokens
        return list(range(start, start + len(tokens)))

    def take_forced(self, limit: int | None = None) -> list[int]:
        """Returns the tokens that the constraint forces next, at most `limit`; it has them then."""
        tokens: list[int] = []
        while self.constraint and len(tokens) != limit and (forced := self.constraint.forced()):
            forced = forced[: None if limit is None else limit - len(tokens)]
            self.constraint.commit(forced)
            tokens += forced
        return tokens

    def open_positions(self) -> list[bool]:
        """Returns where a token may be placed: not right of a resolved EOS, which ends the text."""
        has_eos = itertools.accumulate(
            (token_id in self.eos for token_id in self.canvas), operator.or_
        )
        return [
            token_id is None and not is_behind
            for token_id, is_behind in zip(self.canvas, has_eos, strict=True)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _End:
    """Where and why a text ends."""

    num_tokens: int  # of the whole output, EOS included
    reason: FinishReason
    text: str | None  # what the caller reads


class _Decoder:
    """The three loops, and what they share. `rows` and the cache's rows correspond."""

    def __init__(
        self,
        *,
        model: CloverForCausalLM,
        decode: Decode | None,
        eos: frozenset[int],
        forbidden: frozenset[int],
        fused: bool,
        block_size: int,
    ) -> None:
        self.model = model
        self.decode = decode
        self.eos = eos
        self.forbidden = forbidden
        self.forbidden_ids = torch.tensor(sorted(forbidden), dtype=torch.int64, device=model.device)
        self.fused = fused
        self.block_size = block_size
        self.rows: list[_Row] = []
        self.cache = model.new_cache(0)
        self.started = 0.0

    def run(self, requests: Sequence[GenerationRequest]) -> Iterator[Event]:
        """Yields every event of every request."""
        self.started = time.perf_counter()
        loops: list[tuple[type[Policy] | UnionType, Callable[[], Iterator[Event]]]] = [
            (Threshold | EntropyBound, self._fill_blocks),
            (Exact, self._draft_and_verify),
            (Autoregressive, self._write_one_by_one),
        ]
        for policies, loop in loops:
            self.rows = [
                self._start_row(index, request)
                for index, request in enumerate(requests)
                if isinstance(request.policy, policies)
            ]
            if self.rows:
                self._prefill()
                yield from loop()

    def _fill_blocks(self) -> Iterator[Event]:
        """`threshold` and `entropy_bound`."""
        for row in self.rows:
            row.canvas = [None] * self.block_size
            row.place_forced()
            yield from self._close_blocks(row)
        self._drop_finished()
        while self.rows:
            logits = self._commit_and_preview()
            canvases = [row.canvas for row in self.rows]
            prediction = self._predict(logits, canvases, self._allow_next(logits))
            for i, row in enumerate(self.rows):
                yield self._place(row, prediction, i)
                yield from self._close_blocks(row)
            self._drop_finished()

    def _close_blocks(self, row: _Row) -> Iterator[Event]:
        """Makes a full canvas final and lays out the next, which may be full of forced tokens."""
        while not row.is_finished:
            prefix = row.resolved_prefix()
            if len(prefix) < self.block_size and not self._find_end(row, prefix):
                return
            row.pending, row.canvas = row.pending + prefix, [None] * self.block_size
            row.place_forced()
            yield from self._append(row, prefix)

    def _draft_and_verify(self) -> Iterator[Event]:
        """`exact`. Each pass verifies the draft and previews the block behind it: the next draft.

        A row's block is the pending token, which is known, and its draft. A pass without a draft is
        an autoregressive step. If all of a draft is accepted, the preview saw the true text and the
        next draft is read from it; else it is lost, and the next pass drafts only what is forced.
        """
        for row in self.rows:
            self._start_draft(row)
        while self.rows:
            logits, whole = yield from self._verify()
            for row in self.rows:
                self._start_draft(row)
            canvases = [row.canvas for row in self.rows]
            prediction = self._predict(logits, canvases, self._allow_next(logits))
            for i, row in enumerate(self.rows):
                if whole[i] and not row.is_finished:
                    update = self._place(row, prediction, i)
                    if update.kept:
                        yield update
            self._drop_finished()

    def _start_draft(self, row: _Row) -> None:
        """Lays out an empty canvas; what the constraint forces is a draft that cannot err."""
        row.canvas = [None] * (self.block_size - 1)
        row.place_forced()

    def _write_one_by_one(self) -> Iterator[Event]:
        """`autoregressive`. What a constraint forces is committed with the token before it."""
        for row in self.rows:
            row.canvas = [None]
            forced = row.take_forced()
            row.pending += forced
            yield from self._append(row, forced)
        self._drop_finished()
        while self.rows:
            self._commit()
            logits = self._next_logits()
            canvases = [row.canvas for row in self.rows]
            prediction = self._predict(logits, canvases, self._allow_next(logits))
            for row, tokens in zip(self.rows, prediction.tokens.tolist(), strict=True):
                if row.constraint:
                    row.constraint.commit(tokens)
                row.pending = tokens + row.take_forced()
                yield from self._append(row, row.pending)
            self._drop_finished()

    def _start_row(self, index: int, request: GenerationRequest) -> _Row:
        seed = request.sampling.seed
        return _Row(
            index=index,
            request=request,
            params=replace(request.sampling, seed=secrets.randbits(63) if seed is None else seed),
            eos=frozenset() if request.ignore_eos else self.eos,
            pending=[request.prompt_ids[-1]],
            constraint=request.constraint.start() if request.constraint else None,
        )

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
            return torch.cat([self._next_logits(), logits[:, :-1]], dim=1)
        return logits

    def _take_commit(self, logits: Tensor) -> None:
        """Keeps the logits [B, T, V] of each row's last pending token; nothing is pending then."""
        for i, row in enumerate(self.rows):
            if row.pending:
                row.next_logits = logits[i, len(row.pending) - 1].clone()
                row.pending = []
                row.commits += 1

    def _next_logits(self) -> Tensor:
        """Returns the AR logits of the first position that is not final, [B, 1, V]."""
        return torch.stack([row.next_logits for row in self.rows if row.next_logits is not None])[
            :, None
        ]

    def _verify(self) -> Generator[Event, None, tuple[Tensor, list[bool]]]:
        """Commits of each draft what the AR sampler agrees with, and one token more.

        The sampler draws at every position with the noise that `autoregressive` would use there.
        While it repeats the draft, it has seen the same tokens to the left: its draws are those of
        `autoregressive`, token for token. Its first other draw is the last new token.

        Returns the logits [B, n - 1, V] that predict what follows the last new token, and for which
        rows they are good: those whose whole draft was accepted.
        """
        drafts = [row.draft() for row in self.rows]
        blocks = [[*row.pending, *draft] for row, draft in zip(self.rows, drafts, strict=True)]
        input_ids, lengths = self._pad(blocks)
        canvas = self._canvas_ids([[None] * self.block_size for _ in self.rows])
        if self.fused:
            logits, previewed, transaction = self.model.verify_and_preview(
                self.cache, input_ids, canvas, lengths
            )
        else:
            logits, transaction = self.model.verify(self.cache, input_ids, lengths)
        longest = max(lengths)
        canvases = [[*draft, *[None] * (longest - len(draft))] for draft in drafts]
        targets = self._predict(logits, canvases, self._allow_draft(logits)).tokens.tolist()
        whole, counts = [], []
        for row, draft, target in zip(self.rows, drafts, targets, strict=True):
            pairs = zip(draft, target, strict=False)
            num_agreed = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            row.pending = target[num_agreed : num_agreed + 1]
            row.commits += 1
            row.previews += 1
            row.passes += 1 if self.fused else 2
            whole.append(num_agreed == len(draft))
            counts.append(num_agreed + 1)  # the pending token and what was agreed on
            yield from self._append(row, target[: num_agreed + 1])
            if row.constraint and not row.is_finished:
                row.constraint.commit(target[: num_agreed + 1])
        transaction.commit(counts)
        if not self.fused:
            previewed = self.model.preview(self.cache, canvas)
        return previewed[:, :-1] if self._diffusion.shift_logits else previewed[:, 1:], whole

    def _allow_next(self, logits: Tensor) -> Tensor | None:
        """Returns what constraints leave at the first open positions, bool as logits [B, n, V].

        Further right everything is allowed, and validated before it is placed. None where no row
        has a constraint.
        """
        masks = [
            (i, len(row.resolved_prefix()), row.constraint.allowed())
            for i, row in enumerate(self.rows)
            if row.constraint and not row.is_resolved()
        ]
        return self._join_masks(masks, logits)

    def _allow_draft(self, logits: Tensor) -> Tensor | None:
        """Returns what constraints leave at each position behind a valid draft, as `_allow_next`.

        The constraints go back to the end of the output.
        """
        masks: list[tuple[int, int, Tensor]] = []
        for i, row in enumerate(self.rows):
            if row.constraint:
                draft = row.resolved_prefix()
                row.constraint.rollback(len(draft))
                for position, token_id in enumerate([*draft, None]):
                    masks.append((i, position, row.constraint.allowed()))
                    if token_id is None or token_id in row.eos:
                        break
                    row.constraint.commit([token_id])
                row.constraint.rollback(position)
        return self._join_masks(masks, logits)

    def _join_masks(
        self, masks: Sequence[tuple[int, int, Tensor]], logits: Tensor
    ) -> Tensor | None:
        """Returns True as logits [B, n, V] but for the masks [V], each of a row and a position."""
        if not masks:
            return None
        allowed = torch.ones_like(logits, dtype=torch.bool)
        for i, position, mask in masks:
            allowed[i, position] = mask.to(logits.device)
        return allowed

    def _predict(
        self,
        logits: Tensor,
        canvases: Sequence[Sequence[int | None]],
        allowed: Tensor | None,
    ) -> Prediction:
        """Returns tokens, confidence and entropy for canvases that follow the final tokens."""
        offsets = torch.arange(logits.shape[1], device=logits.device)
        num_final = torch.tensor([row.num_final for row in self.rows], device=logits.device)
        return predict(
            logits,
            [row.params for row in self.rows],
            num_final[:, None] + offsets,
            forbidden_ids=self.forbidden_ids,
            draws=[row.request.draw for row in self.rows],
            counts=self._count(canvases, logits),
            allowed=allowed,
        )

    def _count(
        self, canvases: Sequence[Sequence[int | None]], logits: Tensor
    ) -> TokenCounts | None:
        """Returns the counts that penalties need, None where no row has any."""
        if not any(row.params.has_penalties for row in self.rows):
            return None
        counts = [
            count_left(row.request.prompt_ids, row.output, canvas, logits.shape[-1], logits.device)
            for row, canvas in zip(self.rows, canvases, strict=True)
        ]
        return TokenCounts(
            seen=torch.cat([count.seen for count in counts]),
            output=torch.cat([count.output for count in counts]),
        )

    def _place(self, row: _Row, prediction: Prediction, i: int) -> CanvasUpdated:
        """Puts what the policy keeps of the prediction's row `i` on the canvas."""
        policy = row.request.policy
        assert not isinstance(policy, Autoregressive)
        keep = choose_positions(
            policy,
            confidence=prediction.confidence[i],
            entropy=prediction.entropy[i],
            is_open=torch.tensor(
                row.open_positions(), dtype=torch.bool, device=prediction.confidence.device
            ),
        )
        tokens = prediction.tokens[i].tolist()
        kept = list(itertools.compress(range(len(tokens)), keep.tolist()))
        if row.constraint:
            kept = self._place_valid(row, row.constraint, tokens, kept)
        else:
            for position in kept:
                row.canvas[position] = tokens[position]
        canvas = tuple(self._canvas_ids([row.canvas])[0].tolist())
        return CanvasUpdated(row=row.index, canvas=canvas, kept=tuple(kept))

    def _place_valid(
        self, row: _Row, constraint: Constraint, tokens: Sequence[int], kept: Sequence[int]
    ) -> list[int]:
        """Puts on the canvas, from its first open position, what is kept and what is forced.

        The first open position was drawn from what is allowed. It is filled whether the policy kept
        it or not, as something has to be; only drafts of `exact` may stay empty. Returns the
        positions that were filled.
        """
        position = len(row.resolved_prefix())
        is_kept = set(kept)
        if not isinstance(row.request.policy, Exact):
            is_kept.add(position)
        placed: list[int] = []
        while position in is_kept and (not placed or constraint.validate([tokens[position]])):
            row.canvas[position] = tokens[position]
            constraint.commit([tokens[position]])
            placed += [position, *row.place_forced()]
            position = placed[-1] + 1
        return placed

    def _append(self, row: _Row, tokens: list[int]) -> Iterator[Event]:
        """Makes tokens final, up to the end of the text if that is among them."""
        end = self._find_end(row, tokens)
        num_before = len(row.output)
        if row.constraint and not self.forbidden.isdisjoint(tokens):  # forced: it was not drawn
            raise GenerationError(
                f"expected a grammar that forces no forbidden id, found "
                f"{sorted(self.forbidden.intersection(tokens))}; allow them or change the grammar"
            )
        row.output = (row.output + tokens)[: end.num_tokens if end else None]
        final = row.output[:-1] if end and end.reason == "eos" else row.output
        if len(final) > num_before:
            yield BlockCommitted(row=row.index, token_ids=tuple(final[num_before:]))
        if end:
            row.is_finished = True
            yield Finished(row=row.index, result=self._result(row, tuple(final), end))

    def _find_end(self, row: _Row, tokens: Sequence[int]) -> _End | None:
        """Returns the first end of the text in `tokens`, which follow the output, else None."""
        produced = [*row.output, *tokens]
        may_stop = self._cut_at_stop(row, produced) is not None
        max_tokens, num_prompt = row.request.max_tokens, len(row.request.prompt_ids)
        for count in range(len(row.output) + 1, len(produced) + 1):
            head = produced[:count]
            if head[-1] in row.eos:
                return _End(num_tokens=count, reason="eos", text=self._text(head[:-1]))
            if may_stop and (text := self._cut_at_stop(row, head)) is not None:
                return _End(num_tokens=count, reason="stop", text=text)
            if count == max_tokens:
                return _End(num_tokens=count, reason="length", text=self._text(head))
            if num_prompt + count == self.model.config.max_position_embeddings:
                return _End(num_tokens=count, reason="context", text=self._text(head))
        return None

    def _cut_at_stop(self, row: _Row, tokens: Sequence[int]) -> str | None:
        """Returns the text before the first stop string, None if there is none."""
        if not row.request.stop:
            return None
        text = self._text(tokens) or ""
        starts = [text.find(stop) for stop in row.request.stop if stop in text]
        return text[: min(starts)] if starts else None

    def _text(self, tokens: Sequence[int]) -> str | None:
        return None if self.decode is None else self.decode(tokens)

    def _result(self, row: _Row, token_ids: tuple[int, ...], end: _End) -> GenerationResult:
        assert row.params.seed is not None
        stats = GenerationStats(
            tokens=end.num_tokens,
            previews=row.previews,
            commits=row.commits,
            passes=row.passes,
            seconds=time.perf_counter() - self.started,
        )
        return GenerationResult(
            token_ids=token_ids,
            text=end.text,
            finish_reason=end.reason,
            stats=stats,
            seed=row.params.seed,
        )

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
        mask = self._diffusion.mask_token_id
        ids = [[mask if token_id is None else token_id for token_id in row] for row in canvases]
        return torch.tensor(ids, device=self.model.device)

    def _pad(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
        """Returns int64 [B, T], right-padded, and the lengths."""
        lengths = [len(row) for row in rows]
        padded = [[*row, *[0] * (max(lengths) - len(row))] for row in rows]
        return torch.tensor(padded, device=self.model.device), lengths
