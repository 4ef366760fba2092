"""Which predictions of a preview are kept.

A policy is a frozen choice of knobs; the functions that apply it are pure, work on the last axis
and never see the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from clover.errors import RequestError

_MAX_DRAFT_TOKENS: Final = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Threshold:
    """Keeps every prediction whose confidence exceeds `threshold`, and the leftmost in any case."""

    threshold: float = 0.9

    def __post_init__(self) -> None:
        _check_probability("threshold", self.threshold)


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyBound:
    """Keeps the most certain predictions while what they may owe each other stays bounded.

    Source: Accelerated Sampling from Masked Diffusion Models via Entropy Bounded Unmasking,
    arXiv 2505.24857. The sum of the kept entropies less the largest bounds
    their mutual information.

    Attributes:
        bound: In nats.
    """

    bound: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.bound < float("inf"):
            raise RequestError(f"bound is {self.bound!r}; allowed: 0 or more nats, finite")


@dataclass(frozen=True, kw_only=True, slots=True)
class Exact:
    """Drafts by a preview, then keeps what the autoregressive sampler would have drawn.

    Attributes:
        threshold: A draft ends before the first prediction that is less confident. The text does not
            depend on it, the number of passes does: a draft too long is cut where it errs, and the
            preview behind it is lost.
    """

    threshold: float = 0.6

    def __post_init__(self) -> None:
        _check_probability("threshold", self.threshold)


@dataclass(frozen=True, kw_only=True, slots=True)
class Relaxed:
    """Drafts and verifies as `Exact` does, but keeps a draft token that comes close enough.

    The dial between `Exact`, which it is at tolerance 0, and trust in every draft: a pass keeps
    more of its drafts, and the text is no longer that of the autoregressive sampler.

    Attributes:
        tolerance: In nats: a draft token is kept while its score, of which the autoregressive
            sampler takes the best, is less than this below the best. Greedily that is how much less
            likely it is than the most likely token; at a temperature logits are divided by it and
            have the sampler's noise added before they are compared.
        threshold: A draft ends before the first prediction that is less confident.
    """

    tolerance: float = 1.0
    threshold: float = 0.6

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < float("inf"):
            raise RequestError(f"tolerance is {self.tolerance!r}; allowed: 0 or more nats, finite")
        _check_probability("threshold", self.threshold)


@dataclass(frozen=True, kw_only=True, slots=True)
class Autoregressive:
    """One token per pass through the commit operator: the baseline, and the parent's only way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLookup:
    """Drafts what followed the text's last words where they last stood, and verifies as `Exact` does.

    No pass is spent on a draft, so a parent can do it too.
    Source: Prompt Lookup Decoding, Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding.

    Attributes:
        num_draft_tokens: Most tokens of a draft, up to 256: who shares its passes pays for them too.
        max_ngram_size: Most tokens by which a place is recognized; the longest match counts.
    """

    num_draft_tokens: int = 10
    max_ngram_size: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.num_draft_tokens <= _MAX_DRAFT_TOKENS:
            raise RequestError(
                f"num_draft_tokens is {self.num_draft_tokens}; allowed: 1 to {_MAX_DRAFT_TOKENS}"
            )
        if self.max_ngram_size < 1:
            raise RequestError(f"max_ngram_size is {self.max_ngram_size}; allowed: 1 or more")


SelfVerifiedPolicy = Exact | Relaxed  # previews draft, a commit verifies
DiffusionPolicy = Threshold | EntropyBound | SelfVerifiedPolicy
CausalPolicy = Autoregressive | PromptLookup  # no previews: a parent can do these
VerifiedPolicy = SelfVerifiedPolicy | PromptLookup  # a draft, of which a commit keeps a prefix
Policy = DiffusionPolicy | CausalPolicy


def _check_probability(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise RequestError(f"{name} is {value!r}; allowed: 0 to 1")


def choose_positions(
    policy: DiffusionPolicy,
    *,
    confidence: Tensor,
    entropy: Tensor,
    is_open: Tensor,
) -> Tensor:
    """Returns which open positions to fill now, bool [..., n].

    At least one where any is open, but for `exact` and `relaxed`, whose drafts may be empty.

    Args:
        policy: What decides.
        confidence: [..., n], in 0..1.
        entropy: [..., n], in nats.
        is_open: bool [..., n], positions that may be filled.
    """
    match policy:
        case Threshold(threshold=threshold):
            return keep_confident(confidence, is_open, threshold)
        case EntropyBound(bound=bound):
            return keep_low_entropy(entropy, is_open, bound)
        case Exact(threshold=threshold) | Relaxed(threshold=threshold):
            return ((confidence >= threshold) & is_open).cumprod(-1).bool()


def keep_confident(confidence: Tensor, is_open: Tensor, threshold: float) -> Tensor:
    """Returns open positions with confidence > threshold, and the leftmost open one in any case.

    One has to be kept, or decoding would stand still. The leftmost knows everything to its left, as
    in autoregressive decoding; the most confident may be a guess about how long the text will be.

    Args:
        confidence: [..., n], in 0..1.
        is_open: bool [..., n], positions that may be filled.
        threshold: In 0..1.
    """
    is_leftmost = is_open & (is_open.cumsum(-1) == 1)
    return ((confidence > threshold) & is_open) | is_leftmost


def keep_low_entropy(entropy: Tensor, is_open: Tensor, bound: float) -> Tensor:
    """Returns the k open positions of lowest entropy, k the largest with sum - max <= bound.

    Args:
        entropy: [..., n], in nats.
        is_open: bool [..., n], positions that may be filled.
        bound: In nats; 0 or more, so that k >= 1.
    """
    ranked, order = entropy.masked_fill(~is_open, torch.inf).sort(dim=-1, stable=True)
    # In ascending order the largest is the last: sum - max is the sum of those before.
    before = ranked.cumsum(-1).roll(1, -1)
    before[..., 0] = 0.0
    return torch.zeros_like(is_open).scatter(-1, order, before <= bound) & is_open


def look_up(tokens: Sequence[int], *, max_ngram_size: int, max_tokens: int) -> list[int]:
    """Returns what followed the end of `tokens` where it stood before; empty if it never did.

    Of several places the one counts where most tokens agree, up to `max_ngram_size`, and of those
    the last. What followed there and reaches the end of `tokens` goes on with its own beginning, as
    it would if the text were periodic.
    """
    best_size, best_end = 0, 0
    for end in range(len(tokens) - 1, 0, -1):
        size = 0
        while size < min(max_ngram_size, end) and tokens[end - 1 - size] == tokens[-1 - size]:
            size += 1
        if size > best_size:
            best_size, best_end = size, end
        if size == max_ngram_size:
            break
    if not best_size:
        return []
    return list(itertools.islice(itertools.cycle(tokens[best_end:]), max_tokens))


MODES: Final[Mapping[str, Policy]] = {
    "fast": Relaxed(tolerance=3.0),
    "balanced": Relaxed(tolerance=1.0),
    "exact": Exact(),
}
"""The dial for those who want no knobs, chosen from the measured frontier (docs/results.md)."""


def parse_policy(text: str) -> Policy:
    """Returns the policy that `NAME` or `NAME=VALUE` describes, `fast` and `balanced` among them.

    `threshold=0.9`, `entropy_bound=0.1` (nats), `exact=0.6` (drafts' least confidence),
    `relaxed=1.0` (tolerance in nats), `prompt_lookup=10` (most tokens of a draft),
    `autoregressive`; a value left out is the policy's default.

    Raises:
        RequestError: An unknown name, a value that is not a number, or one out of range.
    """
    name, has_value, value = text.partition("=")
    try:
        match name, bool(has_value):
            case "threshold", True:
                return Threshold(threshold=float(value))
            case "entropy_bound", True:
                return EntropyBound(bound=float(value))
            case "exact", True:
                return Exact(threshold=float(value))
            case "relaxed", True:
                return Relaxed(tolerance=float(value))
            case "prompt_lookup", True:
                return PromptLookup(num_draft_tokens=int(value))
            case "threshold", False:
                return Threshold()
            case "entropy_bound", False:
                return EntropyBound()
            case "exact", False:
                return Exact()
            case "relaxed", False:
                return Relaxed()
            case "prompt_lookup", False:
                return PromptLookup()
            case "autoregressive", False:
                return Autoregressive()
            case _ if text in MODES:
                return MODES[text]
    except RequestError:
        raise
    except ValueError:
        pass  # not a number: the sentence below says what would be
    raise RequestError(
        f"policy is {text!r}; allowed: fast, balanced, exact[=0..1], relaxed[=nats], "
        "threshold[=0..1], entropy_bound[=nats], prompt_lookup[=tokens], autoregressive"
    )
