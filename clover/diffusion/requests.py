"""What a caller hands to a decoder and what comes back: requests, events, results, statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from clover.diffusion.constraint import ConstraintFactory
from clover.diffusion.policies import Exact, Policy
from clover.diffusion.sampling import SamplingParams
from clover.errors import RequestError

FinishReason = Literal["eos", "stop", "length", "context", "cancelled", "timeout"]
Decode = Callable[[Sequence[int]], str]
MAX_TOP_LOGPROBS: Final = 20  # the OpenAI API's limit


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One prompt and how to answer it.

    Attributes:
        prompt_ids: At least one token, fewer than the context holds, no reserved id.
        max_tokens: Most tokens to produce, EOS counted; None goes on to the context limit. It cuts
            the text and never changes what comes before.
        sampling: How tokens are drawn.
        policy: Which predictions are kept.
        stop: Strings that end the text; needs `decode`.
        ignore_eos: Treats EOS as an ordinary token.
        draw: Which of several samples with the same seed this is.
        constraint: What the text has to be; None leaves it free. A text that is not cut by a limit
            or a stop string is valid.
        top_logprobs: How many of the most likely tokens are named with each token's
            log-probability, 0 to 20; None wants no log-probabilities. Text does not depend on it.
            Tokens are given out once their log-probabilities are known, which in the block
            policies is with the commit of their block; that of the last one is a pass more.
        wants_confidence: Whether `CanvasUpdated` says how sure the model was. Off, nothing is copied
            from the device for it.
    """

    prompt_ids: Sequence[int]
    max_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    policy: Policy = field(default_factory=Exact)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    draw: int = 0
    constraint: ConstraintFactory | None = None
    top_logprobs: int | None = None
    wants_confidence: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}; allowed: None or 1 and more")
        if isinstance(self.stop, str) or not all(self.stop):
            raise RequestError(f"stop is {self.stop!r}; allowed: a tuple of non-empty strings")
        if not 0 <= self.draw < 2**63:
            raise RequestError(f"draw is {self.draw}; allowed: 0 to 2**63 - 1")
        if self.constraint is not None and self.ignore_eos:
            raise RequestError(
                "ignore_eos is true beside a constraint, whose text ends with EOS; leave one out"
            )
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise RequestError(
                f"top_logprobs is {self.top_logprobs}; allowed: None or 0 to {MAX_TOP_LOGPROBS}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """How likely a final token was; see `diffusion.logprobs`.

    Attributes:
        token_id: The token.
        logprob: Its log-probability, in nats.
        top: The most likely ids in its place, whether drawn or not, with their log-probabilities;
            the likeliest first. It may name ids that are never drawn.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationStats:
    """What one answer cost.

    The prompt without its last token is prefilled, and not counted. From there on `passes` counts
    every forward that served this row; one that commits a block and previews the next is one pass,
    and so is a verification, which counts as a commit. The last tokens of a text are not committed,
    as nothing follows them, unless their log-probabilities are wanted. An autoregressive answer of n
    tokens takes n passes, less one for each token that a constraint forces.

    Attributes:
        tokens: Tokens produced, EOS included.
        previews: Passes that previewed this row's canvas.
        commits: Passes that committed tokens of this row.
        passes: Forward passes that served this row.
        seconds: From the start of generation to this row's end, prefill included.
        cached_tokens: Prompt tokens that a prefix cache had; nobody committed them for this row.
    """

    tokens: int
    previews: int
    commits: int
    passes: int
    seconds: float
    cached_tokens: int = 0

    @property
    def tpf(self) -> float:
        """Tokens per forward pass: exactly 1.0 for `autoregressive` without a constraint.

        A text that its constraint forces from end to end takes no pass, and counts as one.
        """
        return self.tokens / max(self.passes, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationResult:
    """One finished answer.

    Attributes:
        token_ids: What was produced, without EOS. After a stop string it ends with the token that
            completed it.
        text: `token_ids` decoded and cut before the stop string; None without `decode`.
        finish_reason: Which end came first. `cancelled` and `timeout` come from an engine alone.
        stats: Tokens, passes, seconds.
        seed: What reproduces the answer.
        logprobs: Those of `token_ids`, one each, so that EOS has none; None: none were wanted. Where
            they were, a text that is cancelled or timed out ends with the last token that has one.
    """

    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    stats: GenerationStats
    seed: int
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CanvasUpdated:
    """A pass has filled canvas positions. For display: what is here is not final.

    Attributes:
        row: Index of the request.
        canvas: Ids that follow the final tokens, the mask id where still open.
        kept: Positions on the canvas filled by this pass.
        confidence: Largest raw probability at each of `kept`; what a constraint forced may be
            another token than the model's. Empty unless the request wants it.
    """

    row: int
    canvas: tuple[int, ...]
    kept: tuple[int, ...]
    confidence: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCommitted:
    """More tokens are final. Those of one row, joined, are the result's `token_ids`.

    So are `logprobs`, one for each token, where they are wanted.
    """

    row: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A row has ended."""

    row: int
    result: GenerationResult


Event = CanvasUpdated | BlockCommitted | Finished
