"""One request under way, and what every decoder does with it between two passes.

Host-side and without the model: the plain loop and the engine lay out passes in their own ways, and
share what makes the text. B rows, n positions, V vocabulary entries.
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
from clover.diffusion.policies import Autoregressive, Exact
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
from clover.errors import PromptError, RequestError


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
    if config.diffusion is None and not isinstance(request.policy, Autoregressive):
        raise RequestError(
            f"{where}policy {request.policy} needs a diffusion model, found an "
            "autoregressive parent; ask for `autoregressive` or convert the model"
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
    output: list[int] = field(default_factory=list)  # final tokens
    canvas: list[int | None] = field(default_factory=list)  # None: open
    num_drafts: int = 0  # previews of the present block
    previews: int = 0
    commits: int = 0
    passes: int = 0
    cached_tokens: int = 0
    is_finished: bool = False

    @property
    def num_final(self) -> int:
        """Tokens before the canvas."""
        return len(self.request.prompt_ids) + len(self.output)

    def resolved_prefix(self) -> list[int]:
        """Returns the canvas up to its first open position."""
        prefix = itertools.takewhile(lambda token_id: token_id is not None, self.canvas)
        return [token_id for token_id in prefix if token_id is not None]

    def open_positions(self) -> list[bool]:
        """Returns where a token may be placed: not right of a resolved EOS, which ends the text.

        A draft has no EOS yet: whatever it holds is checked from the left.
        """
        is_draft = isinstance(self.request.policy, Exact)
        has_eos = itertools.accumulate(
            (token_id in self.eos and not is_draft for token_id in self.canvas), operator.or_
        )
        return [
            token_id is None and not is_behind
            for token_id, is_behind in zip(self.canvas, has_eos, strict=True)
        ]

    def lay_canvas(self) -> None:
        """Starts the next block: masks alone; in `exact` the pending token is its first."""
        match self.request.policy:
            case Autoregressive():
                self.canvas = []
            case Exact():
                self.canvas = [None] * (self.block_size - 1)
            case _:
                self.canvas = [None] * self.block_size
        self.num_drafts = 0

    def place(self, tokens: Sequence[int], keep: Sequence[bool]) -> CanvasUpdated:
        """Puts the predicted tokens that are to be kept on the canvas."""
        kept = tuple(itertools.compress(range(len(self.canvas)), keep))
        for position in kept:
            self.canvas[position] = tokens[position]
        canvas = mask_open(self.canvas, self.rules.config)
        return CanvasUpdated(row=self.index, canvas=tuple(canvas), kept=kept)

    def close_block(self) -> list[Event]:
        """Makes a canvas final that is full or holds the end of the text, and starts the next."""
        prefix = self.resolved_prefix()
        if len(prefix) < self.block_size and not self.find_end(prefix):
            return []
        self.pending = prefix
        self.lay_canvas()
        return self.append(prefix)

    def agreed(self, targets: Sequence[int]) -> list[int]:
        """Returns the new tokens of a verified draft, at least one.

        Args:
            targets: What the AR sampler draws at every canvas position and behind the last, with
                the noise that `autoregressive` would use there. While it repeats the draft, it has
                seen the same tokens to the left: its draws are those of `autoregressive`, token for
                token. Its first other draw is the last new token.
        """
        pairs = zip(self.canvas, targets, strict=False)
        num_agreed = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return list(targets[: num_agreed + 1])

    def append(self, tokens: Sequence[int]) -> list[Event]:
        """Makes tokens final, up to the end of the text if that is among them."""
        end = self.find_end(tokens)
        num_before = len(self.output)
        self.output.extend(tokens)
        if end:
            del self.output[end.num_tokens :]
        final = self.output[num_before : -1 if end and end.reason == "eos" else None]
        events: list[Event] = []
        if final:
            events.append(BlockCommitted(row=self.index, token_ids=tuple(final)))
        if end:
            events.append(self.finish(end))
        return events

    def find_end(self, tokens: Sequence[int]) -> End | None:
        """Returns the first end of the text in `tokens`, which follow the output, else None."""
        has_stop = bool(self.request.stop) and bool(tokens)
        produced = [*self.output, *tokens] if has_stop else []
        may_stop = has_stop and self._cut_at_stop(produced) is not None
        num_before, num_prompt = len(self.output), len(self.request.prompt_ids)
        for i, token_id in enumerate(tokens):
            count = num_before + i + 1
            if token_id in self.eos:
                return End(num_tokens=count, reason="eos", text=self._text(tokens[:i]))
            if may_stop and (text := self._cut_at_stop(produced[:count])) is not None:
                return End(num_tokens=count, reason="stop", text=text)
            if count == self.request.max_tokens:
                return End(num_tokens=count, reason="length", text=self._text(tokens[: i + 1]))
            if num_prompt + count == self.rules.context:
                return End(num_tokens=count, reason="context", text=self._text(tokens[: i + 1]))
        return None

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
        )
        return Finished(row=self.index, result=result)

    def abandon(self, reason: FinishReason) -> Finished:
        """Ends the row with what is final, for a reason that is not in its text."""
        return self.finish(End(num_tokens=len(self.output), reason=reason, text=self._text([])))

    def _cut_at_stop(self, tokens: Sequence[int]) -> str | None:
        """Returns the text before the first stop string, None if there is none."""
        text = self.rules.text(tokens) or ""
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
    row = Row(
        index=index,
        request=request,
        rules=rules,
        block_size=block_size,
        started=started,
        params=replace(request.sampling, seed=secrets.randbits(63) if seed is None else seed),
        eos=frozenset() if request.ignore_eos else rules.eos,
        pending=[request.prompt_ids[-1]],
    )
    row.lay_canvas()
    return row


def mask_open(canvas: Sequence[int | None], config: ModelConfig) -> list[int]:
    """Returns the canvas with the mask id where it is open."""
    assert config.diffusion is not None
    mask = config.diffusion.mask_token_id
    return [mask if token_id is None else token_id for token_id in canvas]


def predict_rows(
    rows: Sequence[Row],
    logits: Tensor,
    canvases: Sequence[Sequence[int | None]],
    forbidden_ids: Tensor,
) -> Prediction:
    """Returns tokens, confidence and entropy for canvases that follow the rows' final tokens.

    Args:
        rows: B of them.
        logits: [B, n, V], what predicts each position.
        canvases: What is known there; shorter than n where the rest is padding.
        forbidden_ids: int64 [F], never drawn.

    Raises:
        GenerationError: Logits are not finite.
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
    )


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
