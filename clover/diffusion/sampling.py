"""From logits to tokens: the sampling contract.

Confidence and entropy are read from the raw softmax (temperature 1) once forbidden ids and what a
constraint excludes are removed. Temperature, filters, penalties, bias and seed act on the drawn
token alone.

B rows, n positions, V vocabulary entries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from clover.errors import GenerationError, RequestError

# Below this, dividing logits by the temperature is greedy in all but name.
GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request draws its tokens. The defaults are greedy.

    Applied in this order: `logit_bias`, penalties, `temperature`, `min_p`, `top_k`, `top_p`.
    `repetition_penalty` looks at the prompt and the output, `presence_penalty` and
    `frequency_penalty` at the output alone. What counts at a position is every token already known
    to its left, whether committed or still on the canvas: with everything to the left known, this
    is the rule of an autoregressive sampler.

    Attributes:
        temperature: 0 draws the most likely token.
        top_k: Number of most likely tokens to draw from; 0 is all of them.
        top_p: Draw from the fewest most likely tokens that hold this probability together.
        min_p: Drop tokens less likely than this fraction of the most likely one.
        repetition_penalty: Divides positive logits of seen tokens and multiplies negative ones.
        presence_penalty: Subtracted once from the logit of a token that the output holds.
        frequency_penalty: Subtracted once for every time that the output holds the token.
        logit_bias: Token id to a number added to its logit.
        seed: A signed 64-bit integer; None draws a fresh one per request, and reports it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0 <= self.temperature <= 100, "0 to 100")
        _check("top_k", self.top_k, _is_int(self.top_k) and self.top_k >= 0, "an integer >= 0")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "above 0, up to 1")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "0 to 1")
        penalty = self.repetition_penalty
        _check("repetition_penalty", penalty, 0.01 <= penalty <= 100, "0.01 to 100")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(name, value, -2 <= value <= 2, "-2 to 2")
        for token_id, bias in self.logit_bias.items():
            is_valid = _is_int(token_id) and token_id >= 0 and -100 <= bias <= 100
            _check(f"logit_bias[{token_id}]", bias, is_valid, "token id >= 0, bias -100 to 100")
        is_int64 = self.seed is None or (_is_int(self.seed) and -(2**63) <= self.seed < 2**63)
        _check("seed", self.seed, is_int64, "None or a signed 64-bit integer")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always drawn."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether the drawn token depends on which tokens came before, beyond the logits."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(name: str, value: object, is_valid: bool, allowed: str) -> None:
    if not is_valid:
        raise RequestError(f"{name} is {value!r}; allowed: {allowed}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCounts:
    """What is known to the left of each position, for the penalties."""

    seen: Tensor  # bool [B, n, V]: in the prompt or the output
    output: Tensor  # float [B, n, V]: how often in the output


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposals:
    """Tokens that are drawn in place of better ones that are hardly better."""

    tokens: Tensor  # int64 [B, n]; -1: none
    tolerance: Tensor  # fp32 [B], in nats below the best; 0: only the best


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What one pass says about each position."""

    tokens: Tensor  # int64 [B, n]: drawn under the request's knobs
    confidence: Tensor  # fp32 [B, n]: largest raw probability, whatever was drawn
    entropy: Tensor  # fp32 [B, n]: of the raw distribution, in nats


def predict(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Tensor,
    *,
    forbidden_ids: Tensor,
    draws: Sequence[int] | None = None,
    counts: TokenCounts | None = None,
    allowed: Tensor | None = None,
    proposals: Proposals | None = None,
) -> Prediction:
    """Returns drawn tokens, confidence and entropy at every position of every row.

    Args:
        logits: [B, n, V] as the model gives them.
        params: One per row, seeds resolved.
        positions: int64 [B, n], absolute; they key the noise.
        forbidden_ids: int64 [F], never drawn.
        draws: Per row, which of several samples with one seed this is; 0 when absent.
        counts: Needed when a row has penalties.
        allowed: bool [B, n, V], what a constraint leaves of the vocabulary; all when absent.
        proposals: What is drawn where it is close enough to the best; see `draw_tokens`.

    Raises:
        GenerationError: A position has NaN or infinite logits, or no allowed token.
    """
    logits = remove_forbidden(logits, forbidden_ids, allowed)
    confidence, entropy = measure_certainty(logits)
    tokens = draw_tokens(logits, params, positions, draws=draws, counts=counts, proposals=proposals)
    return Prediction(tokens=tokens, confidence=confidence, entropy=entropy)


def remove_forbidden(
    logits: Tensor, forbidden_ids: Tensor, allowed: Tensor | None = None
) -> Tensor:
    """Returns fp32 logits [B, n, V] with forbidden ids, and those not allowed, at -inf.

    Raises:
        GenerationError: A position has NaN or infinite logits, or no allowed token.
    """
    logits = logits.float().index_fill(-1, forbidden_ids, -torch.inf)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    broken = ~logits.amax(-1).isfinite()  # amax carries a NaN through
    if broken.any():
        row, position = broken.nonzero()[0].tolist()
        raise GenerationError(
            f"expected finite logits with at least one allowed token, found NaN, infinity or none "
            f"allowed in batch row {row}, position {position}; check the weights and the dtype, or "
            "what the grammar and the forbidden ids leave over"
        )
    return logits


def measure_certainty(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the largest probability [B, n] and the entropy in nats [B, n], temperature 1."""
    probs = logits.softmax(-1)
    return probs.amax(-1), torch.special.entr(probs).sum(-1)


def draw_tokens(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Tensor,
    *,
    draws: Sequence[int] | None = None,
    counts: TokenCounts | None = None,
    proposals: Proposals | None = None,
) -> Tensor:
    """Returns int64 [B, n]: one token per position, each row under its own knobs.

    The Gumbel-max trick: argmax(logits / T + noise) is a draw from softmax(logits / T). The noise
    depends on nothing but (seed, position, draw, token id), so two decoders that meet the same
    logits at the same position draw the same token.

    A proposed token is drawn where its score, of which the argmax is taken, is less than the
    tolerance below the best.
    """
    scores = adjust_logits(logits, params, counts)
    if all(p.is_greedy for p in params):
        return _take_best(scores, proposals)
    is_greedy = _per_row([p.is_greedy for p in params], logits)  # [B, 1, 1]
    temperature = _per_row([1.0 if p.is_greedy else p.temperature for p in params], logits)
    # The maximum goes first, so that a small temperature cannot overflow.
    scaled = filter_logits((scores - scores.amax(-1, keepdim=True)) / temperature, params)
    seeds = torch.tensor([p.seed or 0 for p in params], device=logits.device)
    draw_ids = torch.tensor(draws or [0] * len(params), device=logits.device)
    noise = gumbel_noise(seeds[:, None], positions, draw_ids[:, None], logits.shape[-1])
    return _take_best(scaled + noise.masked_fill(is_greedy, 0.0), proposals)


def _take_best(scores: Tensor, proposals: Proposals | None) -> Tensor:
    """Returns the argmax [B, n] of scores [B, n, V], or what is proposed and close enough to it."""
    best, drawn = scores.max(-1)
    if proposals is None:
        return drawn
    proposed = scores.gather(-1, proposals.tokens.clamp(min=0)[..., None])[..., 0]
    is_close = (proposals.tokens >= 0) & (best - proposed < proposals.tolerance[:, None])
    return torch.where(is_close, proposals.tokens, drawn)


def adjust_logits(
    logits: Tensor, params: Sequence[SamplingParams], counts: TokenCounts | None
) -> Tensor:
    """Returns logits [B, n, V] after logit bias and penalties."""
    if any(p.logit_bias for p in params):
        bias = logits.new_zeros(len(params), 1, logits.shape[-1])
        for row, row_params in enumerate(params):
            for token_id, value in row_params.logit_bias.items():
                bias[row, 0, token_id] = value
        logits = logits + bias
    if not any(p.has_penalties for p in params):
        return logits
    if counts is None:
        raise ValueError("penalties need the counts of the tokens to the left")
    repetition = _per_row([p.repetition_penalty for p in params], logits)
    penalized = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(counts.seen, penalized, logits)
    presence = _per_row([p.presence_penalty for p in params], logits)
    frequency = _per_row([p.frequency_penalty for p in params], logits)
    logits = logits - presence * (counts.output > 0) - frequency * counts.output
    return logits.clamp(max=torch.finfo(logits.dtype).max)  # a penalty below 1 could overflow


def filter_logits(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Returns logits [B, n, V] with what min-p, top-k and top-p remove at -inf."""
    if any(p.min_p > 0 for p in params):
        floor = _per_row([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params], logits)
        is_unlikely = logits < logits.amax(-1, keepdim=True) + floor
        logits = logits.masked_fill(is_unlikely, -torch.inf)
    if all(p.top_k == 0 and p.top_p == 1.0 for p in params):
        return logits
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    vocab_size = logits.shape[-1]
    is_dropped = rank >= _per_row([min(p.top_k, vocab_size) or vocab_size for p in params], logits)
    probs = ranked.masked_fill(is_dropped, -torch.inf).softmax(-1)
    # 2.0 instead of 1.0: the sum of all that comes before may round up to 1.
    limit = _per_row([p.top_p if p.top_p < 1.0 else 2.0 for p in params], logits)
    is_dropped = (is_dropped | (probs.cumsum(-1) - probs >= limit)) & (rank > 0)
    return logits.masked_fill(
        torch.zeros_like(is_dropped).scatter(-1, order, is_dropped), -torch.inf
    )


def _per_row(values: Sequence[float], like: Tensor) -> Tensor:
    """Returns [B, 1, 1]."""
    return torch.tensor(values, device=like.device).view(-1, 1, 1)


def count_left(
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    canvas: Sequence[int | None],
    vocab_size: int,
    device: torch.device | None = None,
) -> TokenCounts:
    """Returns the counts [1, n, V] to the left of each canvas position of one row.

    Args:
        prompt_ids: The prompt.
        output_ids: Everything between the prompt and the canvas.
        canvas: n ids; None where the token is not known yet.
        vocab_size: V.
        device: Where the counts are needed.
    """
    prompt = _count(prompt_ids, vocab_size, device)
    inside = torch.zeros(len(canvas), vocab_size, device=device)
    for position, token_id in enumerate(canvas):
        if token_id is not None:
            inside[position + 1 :, token_id] += 1
    output = (_count(output_ids, vocab_size, device) + inside)[None]
    return TokenCounts(seen=(output > 0) | (prompt > 0), output=output)


def _count(ids: Sequence[int], vocab_size: int, device: torch.device | None) -> Tensor:
    """Returns how often each id occurs, fp32 [V]."""
    index = torch.tensor(ids, dtype=torch.int64, device=device)
    return torch.bincount(index, minlength=vocab_size).float()


def gumbel_noise(seeds: Tensor, positions: Tensor, draws: Tensor, vocab_size: int) -> Tensor:
    """Returns standard Gumbel noise, fp64 [..., V], a pure function of its arguments.

    Args:
        seeds: int64 [...], broadcast with `positions` and `draws`.
        positions: int64 [...].
        draws: int64 [...].
        vocab_size: V.
    """
    key = _mix(_mix(_mix(seeds + _GAMMA) + positions * _GAMMA) + draws * _GAMMA)
    token_ids = torch.arange(1, vocab_size + 1, device=seeds.device)
    bits = _mix(key.unsqueeze(-1) + token_ids * _GAMMA)
    # 52 random bits and a half: never 0 nor 1, both logarithms finite.
    uniform = (_shift_right(bits, 12).double() + 0.5) * 2.0**-52
    return -(-uniform.log()).log()


# splitmix64 (Steele, Lea, Flood 2014), its constants as signed integers: torch's int64 products
# wrap around on every device.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - 2**64
_MULTIPLIER_2 = 0x94D049BB133111EB - 2**64


def _mix(state: Tensor) -> Tensor:
    """Returns splitmix64's output function of each int64."""
    state = (state ^ _shift_right(state, 30)) * _MULTIPLIER_1
    state = (state ^ _shift_right(state, 27)) * _MULTIPLIER_2
    return state ^ _shift_right(state, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Returns the logical shift; torch's own repeats the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
