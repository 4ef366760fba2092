"""One request under way, and what every decoder does with it between two passes.

On the host and without the model: the plain loop and the engine lay out passes in their own ways,
and share what makes the text. B rows, n positions, V vocabulary entries.
"""

from __future__ import annotations

import itertools
import operator
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from clover.config import ModelConfig
from clover.diffusion.constraint import Constraint
from clover.diffusion.logprobs import Scorer
from clover.diffusion.policies import (
    Autoregressive,
    CausalPolicy,
    PromptLookup,
    Relaxed,
    SelfVerifiedPolicy,
    VerifiedPolicy,
    look_up,
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
    Proposals,
    SamplingParams,
    TokenCounts,
    count_left,
    predict,
)
from clover.errors import GenerationError, PromptError, RequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What all rows of one decoder share.

    Attributes:
        config: The model's.
        decode: Ids to text; None: results have no text.
        eos: Ids that end a text.
        forbidden: Ids never drawn and refused in prompts.
    """

    config: ModelConfig
    decode: Decode | None
    eos: frozenset[int]
    forbidden: frozenset[int]

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer."""
        return self.config.max_position_embeddings

    def text(self, tokens: Sequence[int]) -> str | None:
        """Returns decoded tokens, None without `decode`."""
        return None if self.decode is None else self.decode(tokens)


def make_rules(
    config: ModelConfig,
    *,
    decode: Decode | None,
    eos_token_ids: Iterable[int] | None,
    forbidden_token_ids: Iterable[int],
) -> Rules:
    """Returns rules in which the mask is forbidden and EOS is the config's unless given."""
    mask = [] if config.diffusion is None else [config.diffusion.mask_token_id]
    return Rules(
        config=config,
        decode=decode,
        eos=frozenset(config.eos_token_ids if eos_token_ids is None else eos_token_ids),
        forbidden=frozenset([*mask, *forbidden_token_ids]),
    )


def resolve_block_size(config: ModelConfig, block_size: int | None) -> int:
    """Returns the canvas width: the one asked for, else the config's, 1 for a parent.

    Raises:
        RequestError: It is not within the context.
    """
    context = config.max_position_embeddings
    if block_size is None:
        return config.diffusion.block_size if config.diffusion else 1
    if not 1 <= block_size <= context:
        raise RequestError(f"block_size is {block_size}; allowed: 1 to {context}, the context")
    return block_size


def check_request(request: GenerationRequest, rules: Rules, where: str = "") -> None:
    """Refuses what the model cannot answer; `where` opens the message.

    Raises:
        PromptError: The prompt is empty, fills the context, or holds a reserved id.
        RequestError: The model or the decoder cannot honour a knob.
    """
    config, context, prompt = rules.config, rules.context, request.prompt_ids
    if not 0 < len(prompt) < context:
        raise PromptError(
            f"{where}expected a prompt of 1 to {context - 1} tokens (the context less one "
            f"token of answer), found {len(prompt)}"
        )
    for position, token_id in enumerate(prompt):
        if token_id in rules.forbidden or not 0 <= token_id < config.vocab_size:
            raise PromptError(
                f"{where}token id {token_id} at position {position} of the prompt is "
                "reserved or outside the vocabulary; leave it out"
            )
    for token_id in request.sampling.logit_bias:
        if token_id in rules.forbidden or token_id >= config.vocab_size:
            raise RequestError(
                f"{where}logit_bias names token id {token_id}, which is reserved or "
                f"outside the vocabulary of {config.vocab_size}"
            )
    if request.stop and rules.decode is None:
        raise RequestError(f"{where}stop strings need `decode`, found None")
    if config.diffusion is None and not isinstance(request.policy, CausalPolicy):
        raise RequestError(
            f"{where}policy {request.policy} needs a diffusion model, found an autoregressive "
            "parent; ask for `autoregressive` or `prompt_lookup`, or convert the model"
        )
    _check_constraint(request, rules, where)


def _check_constraint(request: GenerationRequest, rules: Rules, where: str) -> None:
    constraint = request.constraint
    if constraint is None:
        return
    if constraint.vocab_size != rules.config.vocab_size:
        raise RequestError(
            f"{where}the constraint is made for a vocabulary of {constraint.vocab_size}, the model "
            f"has {rules.config.vocab_size}; compile it for this model"
        )
    if constraint.eos_token_ids != rules.eos:
        raise RequestError(
            f"{where}the constraint ends with one of {sorted(constraint.eos_token_ids)}, this loop "
            f"with one of {sorted(rules.eos)}; give both the same EOS"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """Where and why a text ends."""

    num_tokens: int  # of the whole output, EOS included
    reason: FinishReason
    text: str | None  # what the caller reads


@dataclass(kw_only=True, slots=True)
class Row:
    """One request under way. Its sequence is prompt | output | canvas."""

    index: int  # the `row` of its events
    request: GenerationRequest
    rules: Rules
    block_size: int
    started: float  # seconds, of `time.perf_counter`
    params: SamplingParams  # the request's, the seed resolved
    eos: frozenset[int]  # empty where the request ignores EOS
    pending: list[int]  # final tokens that the cache lacks; at first the last of the prompt
    constraint: Constraint | None  # has taken the output and the resolved prefix of the canvas
    scorer: Scorer | None = None  # of a request that wants log-probabilities
    output: list[int] = field(default_factory=list)  # final tokens
    canvas: list[int | None] = field(default_factory=list)  # None: open
    previews: int = 0
    commits: int = 0
    passes: int = 0
    cached_tokens: int = 0
    end: End | None = None  # of the text, once it is written
    num_given_out: int = 0  # tokens that events have named
    is_finished: bool = False

    @property
    def num_final(self) -> int:
        """Tokens before the canvas."""
        return len(self.request.prompt_ids) + len(self.output)

    @property
    def awaits_scores(self) -> bool:
        """Whether the text is written, and the commit of `pending` has yet to score its last tokens."""
        return self.end is not None and not self.is_finished

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

    def needs_preview(self) -> bool:
        """Returns whether a next draft is to be read from a preview behind this one.

        Not where the draft, accepted whole, ends the text: if it errs, the preview is lost anyway.
        """
        draft = self.draft()
        num_new = len(draft) + 1  # the verification adds a token of its own
        num_left = self.rules.context - self.num_final
        if self.request.max_tokens is not None:
            num_left = min(num_left, self.request.max_tokens - len(self.output))
        ends = num_new >= num_left or (bool(draft) and draft[-1] in self.eos)
        return self.block_size > 1 and not ends

    def open_positions(self) -> list[bool]:
        """Returns where a token may be placed: not right of a resolved EOS, which ends the text."""
        has_eos = itertools.accumulate(
            (token_id in self.eos for token_id in self.canvas), operator.or_
        )
        return [
            token_id is None and not is_behind
            for token_id, is_behind in zip(self.canvas, has_eos, strict=True)
        ]

    def begin(self) -> list[Event]:
        """Lays out the first canvas; what a constraint forces may be final before the first pass."""
        match self.request.policy:
            case Autoregressive():
                self.canvas = [None]
                forced = self._take_forced()
                self.pending += forced
                return self._append(forced)
            case policy if isinstance(policy, VerifiedPolicy):
                self._lay_draft()
                return []
            case _:
                self._lay_canvas(self.block_size)
                return self.close_blocks()

    def close_blocks(self) -> list[Event]:
        """Makes a full canvas final and lays out the next, which may be full of forced tokens."""
        events: list[Event] = []
        while self.end is None:
            prefix = self.resolved_prefix()
            if len(prefix) < self.block_size and not self._find_end(prefix):
                break
            self.pending += prefix
            self._lay_canvas(self.block_size)
            events += self._append(prefix)
        return events

    def verify(self, targets: Sequence[int]) -> tuple[int, list[Event]]:
        """Makes final what the AR sampler repeats of the draft and its next token; lays out a canvas.

        Args:
            targets: What the AR sampler draws at each position of the draft and behind it, with the
                noise that `autoregressive` would use there. While it repeats the draft, it has seen
                the same tokens to the left: its draws are those of `autoregressive`, token for
                token, but for what `relaxed` lets pass. Its first other draw is the last new token.

        Returns:
            How many tokens are new, at least one, and the events.
        """
        pairs = zip(self.draft(), targets, strict=False)
        num_agreed = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        new_tokens = list(targets[: num_agreed + 1])
        self.pending = new_tokens[-1:]
        events = self._append(new_tokens)
        if self.constraint and self.end is None:
            self.constraint.commit(new_tokens)
        self._lay_draft()
        return len(new_tokens), events

    def write(self, token_id: int) -> list[Event]:
        """Makes the token that `autoregressive` drew final, and what is forced behind it."""
        if self.constraint:
            self.constraint.commit([token_id])
        self.pending = [token_id, *self._take_forced()]
        return self._append(self.pending)

    def score(self, logits: Tensor) -> list[Event]:
        """Scores tokens of a row that wants log-probabilities; returns the events of what has one now.

        Args:
            logits: [k, V], the AR logits behind the k tokens that are committed next.
        """
        assert self.scorer is not None
        self.scorer.add(logits)
        return self._give_out()

    def place(
        self, tokens: Sequence[int], keep: Sequence[bool], confidence: Tensor
    ) -> CanvasUpdated:
        """Puts what the policy keeps of the predicted tokens on the canvas.

        Args:
            tokens: Predicted at each position.
            keep: What the policy says of each.
            confidence: [n] or longer, read only if the request wants it.
        """
        kept = list(itertools.compress(range(len(self.canvas)), keep))
        if self.constraint:
            kept = self._place_valid(self.constraint, tokens, kept)
        else:
            for position in kept:
                self.canvas[position] = tokens[position]
        return CanvasUpdated(
            row=self.index,
            canvas=tuple(mask_open(self.canvas, self.rules.config)),
            kept=tuple(kept),
            confidence=tuple(confidence[kept].tolist()) if self.request.wants_confidence else (),
        )

    def masks_of_next(self) -> list[tuple[int, Tensor]]:
        """Returns what the constraint leaves at the first open position: its index and bool [V].

        Further right everything is allowed, and validated before it is placed.
        """
        if self.constraint is None or self.is_resolved():
            return []
        return [(len(self.resolved_prefix()), self.constraint.allowed())]

    def masks_of_draft(self) -> list[tuple[int, Tensor]]:
        """Returns what the constraint leaves at each position of the draft and behind it.

        It goes back to the end of the output.
        """
        if self.constraint is None:
            return []
        masks = []
        draft = self.resolved_prefix()
        self.constraint.rollback(len(draft))
        for position, token_id in enumerate([*draft, None]):
            masks.append((position, self.constraint.allowed()))
            if token_id is None or token_id in self.eos:
                break
            self.constraint.commit([token_id])
        self.constraint.rollback(position)
        return masks

    def finish(self, end: End) -> Finished:
        """Ends the row; its output is then the final one."""
        assert self.params.seed is not None
        self.is_finished = True
        stats = GenerationStats(
            tokens=end.num_tokens,
            previews=self.previews,
            commits=self.commits,
            passes=self.passes,
            seconds=time.perf_counter() - self.started,
            cached_tokens=self.cached_tokens,
        )
        result = GenerationResult(
            token_ids=tuple(self.output[:-1] if end.reason == "eos" else self.output),
            text=end.text,
            finish_reason=end.reason,
            stats=stats,
            seed=self.params.seed,
            logprobs=tuple(self.scorer.scored) if self.scorer else None,
        )
        return Finished(row=self.index, result=result)

    def abandon(self, reason: FinishReason) -> Finished:
        """Ends the row with what is final, for a reason that is not in its text."""
        if self.scorer:
            del self.output[len(self.scorer.scored) :]
        return self.finish(End(num_tokens=len(self.output), reason=reason, text=self._text([])))

    def _lay_canvas(self, num_positions: int) -> None:
        """Starts a canvas that is empty but for what the constraint forces."""
        self.canvas = [None] * num_positions
        self._place_forced()

    def _lay_draft(self) -> None:
        """Starts the canvas of a draft: for a preview to fill, or filled with what is looked up."""
        match self.request.policy:
            case PromptLookup() as policy:
                self._lay_canvas(policy.num_draft_tokens)
                self._place_looked_up(policy)
            case _:
                self._lay_canvas(self.block_size - 1)

    def _place_looked_up(self, policy: PromptLookup) -> None:
        """Goes on from what is forced with what followed the same words before, while it is valid."""
        prefix = self.resolved_prefix()
        start = len(prefix)
        tokens = look_up(
            [*self.request.prompt_ids, *self.output, *prefix],
            max_ngram_size=policy.max_ngram_size,
            max_tokens=len(self.canvas) - start,
        )
        if self.constraint:
            tokens = tokens[: self.constraint.validate(tokens)]
            self.constraint.commit(tokens)
        self.canvas[start : start + len(tokens)] = tokens

    def _place_forced(self) -> list[int]:
        """Fills the canvas, from its first open position, with what the constraint forces.

        Returns the positions that were filled.
        """
        start = len(self.resolved_prefix())
        tokens = self._take_forced(len(self.canvas) - start)
        self.canvas[start : start + len(tokens)] = tokens
        return list(range(start, start + len(tokens)))

    def _take_forced(self, limit: int | None = None) -> list[int]:
        """Returns the tokens that the constraint forces next, at most `limit`; it has them then."""
        tokens: list[int] = []
        while self.constraint and len(tokens) != limit and (forced := self.constraint.forced()):
            forced = forced[: None if limit is None else limit - len(tokens)]
            self.constraint.commit(forced)
            tokens += forced
        return tokens

    def _place_valid(
        self, constraint: Constraint, tokens: Sequence[int], kept: Sequence[int]
    ) -> list[int]:
        """Puts on the canvas, from its first open position, what is kept and what is forced.

        The first open position was drawn from what is allowed. It is filled whether the policy kept
        it or not, as something has to be; only drafts of `exact` and `relaxed` may stay empty. Returns the
        positions that were filled.
        """
        position = len(self.resolved_prefix())
        is_kept = set(kept)
        if not isinstance(self.request.policy, SelfVerifiedPolicy):
            is_kept.add(position)
        placed: list[int] = []
        while position in is_kept and (not placed or constraint.validate([tokens[position]])):
            self.canvas[position] = tokens[position]
            constraint.commit([tokens[position]])
            placed += [position, *self._place_forced()]
            position = placed[-1] + 1
        return placed

    def _append(self, tokens: Sequence[int]) -> list[Event]:
        """Makes tokens final, up to the end of the text if that is among them."""
        forbidden = self.rules.forbidden
        if self.constraint and not forbidden.isdisjoint(tokens):  # forced: it was not drawn
            raise GenerationError(
                f"expected a grammar that forces no forbidden id, found "
                f"{sorted(forbidden.intersection(tokens))}; allow them or change the grammar"
            )
        self.end = self._find_end(tokens)
        self.output.extend(tokens)
        if self.end:
            del self.output[self.end.num_tokens :]
        return self._give_out()

    def _give_out(self) -> list[Event]:
        """Returns the events of what is final and, where that is wanted, scored."""
        num_tokens = len(self.output) - bool(self.end and self.end.reason == "eos")
        num_ready, logprobs = num_tokens, None
        if self.scorer:
            self.scorer.score(self.output[len(self.scorer.scored) : num_tokens])
            num_ready = len(self.scorer.scored)
            logprobs = tuple(self.scorer.scored[self.num_given_out :])
        events: list[Event] = []
        if tokens := tuple(self.output[self.num_given_out : num_ready]):
            events.append(BlockCommitted(row=self.index, token_ids=tokens, logprobs=logprobs))
            self.num_given_out = num_ready
        if self.end and num_ready == num_tokens:
            events.append(self.finish(self.end))
        elif self.end:  # nothing follows the last token, which need not be committed
            self.pending = self.pending[: num_tokens - num_ready]
        return events

    def _find_end(self, tokens: Sequence[int]) -> End | None:
        """Returns the first end of the text in `tokens`, which follow the output, else None."""
        may_stop = self._cut_at_stop(tokens) is not None
        num_before, num_prompt = len(self.output), len(self.request.prompt_ids)
        for count, token_id in enumerate(tokens, 1):
            head, num_tokens = tokens[:count], num_before + count
            if token_id in self.eos:
                return End(num_tokens=num_tokens, reason="eos", text=self._text(head[:-1]))
            if may_stop and (text := self._cut_at_stop(head)) is not None:
                return End(num_tokens=num_tokens, reason="stop", text=text)
            if num_tokens == self.request.max_tokens:
                return End(num_tokens=num_tokens, reason="length", text=self._text(head))
            if num_prompt + num_tokens == self.rules.context:
                return End(num_tokens=num_tokens, reason="context", text=self._text(head))
        return None

    def _cut_at_stop(self, tokens: Sequence[int]) -> str | None:
        """Returns the text of output and tokens before the first stop string, None without one."""
        if not self.request.stop:
            return None
        text = self._text(tokens) or ""
        starts = [text.find(stop) for stop in self.request.stop if stop in text]
        return text[: min(starts)] if starts else None

    def _text(self, tokens: Sequence[int]) -> str | None:
        """Returns the text of the output and the tokens behind it."""
        return self.rules.text([*self.output, *tokens])


def start_row(
    index: int, request: GenerationRequest, rules: Rules, block_size: int, started: float
) -> Row:
    """Returns a row before its first pass, its seed drawn if the request has none."""
    seed = request.sampling.seed
    return Row(
        index=index,
        request=request,
        rules=rules,
        block_size=block_size,
        started=started,
        params=replace(request.sampling, seed=secrets.randbits(63) if seed is None else seed),
        eos=frozenset() if request.ignore_eos else rules.eos,
        pending=[request.prompt_ids[-1]],
        constraint=request.constraint.start() if request.constraint else None,
        scorer=None if request.top_logprobs is None else Scorer(request.top_logprobs),
    )


def mask_open(canvas: Sequence[int | None], config: ModelConfig) -> list[int]:
    """Returns the canvas with the mask id where it is open."""
    assert config.diffusion is not None
    mask = config.diffusion.mask_token_id
    return [mask if token_id is None else token_id for token_id in canvas]


def predict_rows(
    rows: Sequence[Row],
    logits: Tensor,
    canvases: Sequence[Sequence[int | None]],
    masks: Sequence[Sequence[tuple[int, Tensor]]],
    forbidden_ids: Tensor,
) -> Prediction:
    """Returns tokens, confidence and entropy for canvases that follow the rows' final tokens.

    Args:
        rows: B of them.
        logits: [B, n, V], what predicts each position.
        canvases: What is known there; shorter than n where the rest is padding.
        masks: Of each row, positions and what its constraint leaves there, bool [V].
        forbidden_ids: int64 [F], never drawn.

    Raises:
        GenerationError: Logits are not finite, or nothing is allowed somewhere.
    """
    offsets = torch.arange(logits.shape[1], device=logits.device)
    num_final = torch.tensor([row.num_final for row in rows], device=logits.device)
    return predict(
        logits,
        [row.params for row in rows],
        num_final[:, None] + offsets,
        forbidden_ids=forbidden_ids,
        draws=[row.request.draw for row in rows],
        counts=_count(rows, canvases, logits),
        allowed=_join_masks(masks, logits),
        proposals=_propose(rows, canvases, logits),
    )


def _propose(
    rows: Sequence[Row], canvases: Sequence[Sequence[int | None]], logits: Tensor
) -> Proposals | None:
    """Returns what `relaxed` rows have on their canvases, None where no row is `relaxed`."""
    tolerances = [
        row.request.policy.tolerance if isinstance(row.request.policy, Relaxed) else 0.0
        for row in rows
    ]
    if not any(tolerances):
        return None
    tokens = torch.full(logits.shape[:2], -1)
    for i, canvas in enumerate(canvases):
        known = [-1 if token_id is None else token_id for token_id in canvas]
        tokens[i, : len(known)] = torch.tensor(known, dtype=torch.int64)
    return Proposals(
        tokens=tokens.to(logits.device),
        tolerance=torch.tensor(tolerances, device=logits.device),
    )


def _join_masks(masks: Sequence[Sequence[tuple[int, Tensor]]], logits: Tensor) -> Tensor | None:
    """Returns True as logits [B, n, V] but for the masks; None where no row has any."""
    if not any(masks):
        return None
    allowed = torch.ones_like(logits, dtype=torch.bool)
    for i, row_masks in enumerate(masks):
        for position, mask in row_masks:
            allowed[i, position] = mask.to(logits.device)
    return allowed


def _count(
    rows: Sequence[Row], canvases: Sequence[Sequence[int | None]], logits: Tensor
) -> TokenCounts | None:
    """Returns the counts that penalties need, None where no row has any."""
    if not any(row.params.has_penalties for row in rows):
        return None
    num_positions, vocab_size = logits.shape[1:]
    counts = []
    for row, canvas in zip(rows, canvases, strict=True):
        padded = [*canvas, *[None] * (num_positions - len(canvas))]
        counts.append(
            count_left(row.request.prompt_ids, row.output, padded, vocab_size, logits.device)
        )
    return TokenCounts(
        seen=torch.cat([count.seen for count in counts]),
        output=torch.cat([count.output for count in counts]),
    )
