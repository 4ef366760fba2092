"""What training minimises: pure functions from logits to losses, in nats per token.

B: rows, T: tokens in a row, N: blocks in a row, n: tokens in a block, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from clover.diffusion.noise import NoisedBlocks
from clover.errors import ConfigError

# From the weight of this process's tokens to the mean over all processes that share a batch. Divided
# by it, the mean of the processes' losses is the loss of the whole batch, however uneven their parts
WeightMean = Callable[[Tensor], Tensor]


def own_weight(weight: Tensor) -> Tensor:
    """Returns the weight itself: the mean of one process alone."""
    return weight


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig:
    """Weights of the parts of the loss. The diffusion part has weight 1.

    `distillation_weight` is that of the divergence of the canvas from `teacher`: "self" is the
    model's own clean stream, "parent" a frozen autoregressive model, both on the clean tokens.
    `clean_distillation_weight` is that of the clean stream's divergence from the parent, which keeps
    what the commit path knows.

    `balance_weight` is that of `load_balancing_loss`, for both objectives. Relative to a masked
    token, `edit_weight` is the weight of a wrong token that was put on the canvas, `kept_weight` that
    of a visible one that is right: a model that is only ever asked to repair learns to change all.

    `end_weight` is the weight of a position right of the text's end. Its target is the end token
    again: a preview that has learned nothing there guesses at random, and what it is sure of by
    chance would be placed. 0 leaves those positions masks that nobody predicts.

    `position_decay` is the number of positions over which a weight falls by e, from a block's first
    on; 0: none falls. Behind the first wrong token of a draft nothing counts.
    """

    shift_logits: bool = True
    end_weight: float = 0.1
    prompt_weight: float = 0.0
    ar_weight: float = 0.5
    confidence_weight: float = 0.0
    distillation_weight: float = 0.0
    clean_distillation_weight: float = 0.0
    teacher: Literal["self", "parent"] = "self"
    balance_weight: float = 0.0
    edit_weight: float = 1.0
    kept_weight: float = 0.0
    weight_by_level: bool = False
    position_decay: float = 0.0

    def __post_init__(self) -> None:
        """Checks ranges."""
        for name in (f.name for f in fields(self) if f.name.endswith("_weight")):
            value = getattr(self, name)
            if not value >= 0.0:
                raise ConfigError(f"{name} must be at least 0, found {value}")
        if not self.position_decay >= 0.0:
            raise ConfigError(f"position_decay must be at least 0, found {self.position_decay}")
        if self.clean_distillation_weight > 0 and self.teacher != "parent":
            raise ConfigError(
                "clean_distillation_weight must be 0 unless teacher is 'parent': a clean stream has "
                "nothing to learn from itself"
            )

    @property
    def needs_parent(self) -> bool:
        """Whether a part of the loss looks at the parent's distributions."""
        is_distilled = self.distillation_weight > 0 or self.clean_distillation_weight > 0
        return self.teacher == "parent" and is_distilled


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """The loss and its parts before weighting; parts that were not computed are None.

    `on_policy` is the distillation loss on replies that the model wrote itself: a step on these has
    no labels, so neither an AR nor a diffusion part.
    """

    total: Tensor
    ar: Tensor | None = None
    diffusion: Tensor | None = None
    confidence: Tensor | None = None
    distillation: Tensor | None = None
    clean_distillation: Tensor | None = None
    on_policy: Tensor | None = None
    balance: Tensor | None = None


def weighted_cross_entropy(
    logits: Tensor, targets: Tensor, weights: Tensor, weight_mean: WeightMean = own_weight
) -> Tensor:
    """Returns the weighted mean of the cross entropy, 0 if all weights are 0.

    The mean runs over the whole batch: a token counts the same in a full row and in a short one.

    Args:
        logits: [..., V].
        targets: Token ids, [...].
        weights: [...], at least 0. Positions of weight 0 are not computed.
        weight_mean: Sees the sum of the weights, in every process.
    """

    def losses(used: Tensor) -> Tensor:
        return F.cross_entropy(logits[used].float(), targets[used], reduction="none")

    return _weighted_mean(losses, logits, weights, weight_mean)


def _weighted_mean(
    losses: Callable[[Tensor], Tensor], logits: Tensor, weights: Tensor, weight_mean: WeightMean
) -> Tensor:
    """Returns the weighted mean of `losses(used)` [M], the losses of positions of weight above 0."""
    used = weights > 0
    chosen = weights[used].float()  # [M]
    total = weight_mean(chosen.sum())
    if not bool(used.any()):
        return logits.sum() * 0.0
    return (losses(used) * chosen).sum() / total


def ar_weights(document_ids: Tensor, is_response: Tensor, prompt_weight: float) -> Tensor:
    """Returns the weight of each position's prediction of the NEXT token, [B, T].

    0 where the next token belongs to another document, 1 where it belongs to a response.
    """
    same = (document_ids[:, 1:] == document_ids[:, :-1]) & (document_ids[:, 1:] >= 0)
    weights = torch.where(is_response[:, 1:], 1.0, prompt_weight) * same  # [B, T-1]
    return F.pad(weights, (0, 1))


def ar_loss(
    logits: Tensor, input_ids: Tensor, weights: Tensor, weight_mean: WeightMean = own_weight
) -> Tensor:
    """Returns the next-token loss of causal logits [B, T, V], with weights from `ar_weights`."""
    return weighted_cross_entropy(logits[:, :-1], input_ids[:, 1:], weights[:, :-1], weight_mean)


def align_canvas_logits(
    clean_logits: Tensor, canvas_logits: Tensor, block_starts: Tensor, *, shift_logits: bool
) -> Tensor:
    """Returns logits whose row i predicts canvas position i, [B, N, n, V].

    Shifted: position i is read at canvas row i - 1, and a block's first position at the clean token
    before the block (whose document has at least one token of history). Otherwise: in place.
    Unused slots (`block_starts` -1) hold arbitrary rows.
    """
    if not shift_logits:
        return canvas_logits
    before = (block_starts - 1).clamp(min=0)  # [B, N]
    first = gather_rows(clean_logits, before).unsqueeze(2)  # [B, N, 1, V]
    return torch.cat([first.to(canvas_logits.dtype), canvas_logits[:, :, :-1]], dim=2)


def gather_rows(values: Tensor, index: Tensor) -> Tensor:
    """Returns values[b, index[b, ...]], [B, ..., V], of values [B, T, V]."""
    rows = torch.arange(values.shape[0], device=values.device)
    return values[rows.view(-1, *[1] * (index.dim() - 1)), index]


def confidence_loss(
    logits: Tensor, targets: Tensor, masked: Tensor, weight_mean: WeightMean = own_weight
) -> Tensor:
    """Returns the mean entropy of the masked positions that are already predicted rightly.

    Sharpens what is right and leaves what is wrong alone, so that more tokens pass a threshold.
    0 if nothing is right. Source: LLaDA2.0's confidence-aware parallel training.
    """
    chosen = logits[masked].float()  # [M, V]
    right = chosen.argmax(dim=-1) == targets[masked]
    total = weight_mean(right.sum().float())
    if not bool(right.any()):
        return logits.sum() * 0.0
    log_probs = chosen[right].log_softmax(dim=-1)
    return -(log_probs.exp() * log_probs).sum() / total


def weighted_divergence(
    logits: Tensor, teacher_logits: Tensor, weights: Tensor, weight_mean: WeightMean = own_weight
) -> Tensor:
    """Returns the weighted mean of KL(teacher || student), 0 if all weights are 0.

    Args:
        logits: The student's, [..., V].
        teacher_logits: [..., V], detached here.
        weights: [...], at least 0. Positions of weight 0 are not computed.
        weight_mean: Sees the sum of the weights, in every process.
    """

    def divergences(used: Tensor) -> Tensor:
        teacher = teacher_logits.detach()[used].float().log_softmax(dim=-1)
        student = logits[used].float().log_softmax(dim=-1)
        return F.kl_div(student, teacher, reduction="none", log_target=True).sum(dim=-1)

    return _weighted_mean(divergences, logits, weights, weight_mean)


def distillation_loss(
    aligned_logits: Tensor,
    teacher_logits: Tensor,
    block_starts: Tensor,
    masked: Tensor,
    weight_mean: WeightMean = own_weight,
) -> Tensor:
    """Returns the mean KL(teacher || canvas) over masked positions, 0 if nothing is masked.

    The teacher, causal logits [B, T, V] over the clean tokens, has read everything left of a
    position; some of that is still masked for the canvas. What minimises this direction is the mean
    of the teacher's distributions over what the masks may hide: a probability on which a threshold
    can rely. The reverse direction would have the canvas choose one possibility and be sure of it.
    """
    offsets = torch.arange(masked.shape[-1], device=masked.device)
    index = (block_starts.unsqueeze(-1) + offsets - 1).clamp(0, teacher_logits.shape[1] - 1)
    teacher = gather_rows(teacher_logits, index)  # [B, N, n, V]
    return weighted_divergence(aligned_logits, teacher, masked.float(), weight_mean)


def load_balancing_loss(
    router_logits: Sequence[Tensor],
    is_valid: Tensor,
    *,
    num_experts_per_tok: int,
    weight_mean: WeightMean = own_weight,
) -> Tensor:
    """Returns how unevenly the experts are used: E sum_e f_e P_e, the mean over layers.

    f_e is the share of the routers' choices that fall on expert e, P_e its mean probability; the
    gradient flows through P. It is 1 where the load is even. Choices are counted as they are
    before a coreset restricts them: a coreset is meant to be uneven within a block.
    Source: Fedus et al., "Switch Transformers", arXiv 2101.03961, equations 4 to 6.

    Args:
        router_logits: Of each MoE layer, [X, E], all B L tokens in one row.
        is_valid: Tokens that count, bool [B, L]; at least one in all processes together.
        num_experts_per_tok: Choices of a token.
        weight_mean: Sees the number of tokens and of each expert's choices, in every process.
    """
    num_tokens = weight_mean(is_valid.sum().float())
    sums, counts = [], []
    for logits in router_logits:
        probabilities = logits[is_valid.flatten()].float().softmax(dim=-1)  # [M, E]
        chosen = probabilities.topk(num_experts_per_tok, dim=-1).indices.flatten()
        sums.append(probabilities.sum(dim=0))
        counts.append(chosen.bincount(minlength=probabilities.shape[-1]).float())
    load = weight_mean(torch.stack(counts)) / (num_tokens * num_experts_per_tok)  # [layers, E]
    means = torch.stack(sums) / num_tokens
    return load.shape[-1] * (load * means).sum(dim=-1).mean()


def diffusion_weights(noised: NoisedBlocks, is_token: Tensor, config: ObjectiveConfig) -> Tensor:
    """Returns the weight of each canvas position's loss, [B, N, n].

    For a mask 1, or one over the block's level if `weight_by_level`; `edit_weight` for a wrong token,
    `kept_weight` for a right one. Right of the document's end all is times `end_weight`, and what is
    right there has none. Over a block's positions weights fall by `position_decay`.
    """
    masked = noised.masked.float()
    if config.weight_by_level:
        masked = masked / noised.level.unsqueeze(-1)
    kept = is_token & ~noised.masked & ~noised.edited
    weights = masked + config.edit_weight * noised.edited + config.kept_weight * kept
    weights = weights * torch.where(is_token, 1.0, config.end_weight)
    if config.position_decay > 0:
        positions = torch.arange(weights.shape[-1], device=weights.device)
        weights = weights * torch.exp(-positions / config.position_decay)
    return weights


def two_stream_loss(
    clean_logits: Tensor,
    canvas_logits: Tensor,
    *,
    input_ids: Tensor,
    clean_weights: Tensor,
    block_starts: Tensor,
    targets: Tensor,
    is_token: Tensor,
    noised: NoisedBlocks,
    config: ObjectiveConfig,
    parent_logits: Tensor | None = None,
    weight_mean: WeightMean = own_weight,
) -> Losses:
    """Returns the canvas's loss, masks and edits in one mean, plus the weighted other parts.

    Args:
        clean_logits: [B, T, V].
        canvas_logits: [B, N, n, V], as the model gives them.
        input_ids: [B, T].
        clean_weights: From `ar_weights`, [B, T].
        block_starts: [B, N], -1 for an unused slot.
        targets: Clean tokens of the blocks, [B, N, n].
        is_token: False right of the document's end, [B, N, n].
        noised: What became of them.
        config: Weights.
        parent_logits: The parent's causal logits over `input_ids`, [B, T, V]; where it teaches.
        weight_mean: For a batch that several processes share.
    """
    aligned = align_canvas_logits(
        clean_logits, canvas_logits, block_starts, shift_logits=config.shift_logits
    )
    weights = diffusion_weights(noised, is_token, config)
    masked = noised.masked & is_token
    diffusion = weighted_cross_entropy(aligned, targets, weights, weight_mean)
    ar = ar_loss(clean_logits, input_ids, clean_weights, weight_mean)
    total = diffusion + config.ar_weight * ar
    confidence = distillation = clean_distillation = None
    if config.confidence_weight > 0:
        confidence = confidence_loss(aligned, targets, masked, weight_mean)
        total = total + config.confidence_weight * confidence
    if config.distillation_weight > 0:
        teacher = _teacher_logits(clean_logits, parent_logits, config)
        distillation = distillation_loss(aligned, teacher, block_starts, masked, weight_mean)
        total = total + config.distillation_weight * distillation
    if config.clean_distillation_weight > 0:
        teacher = _teacher_logits(clean_logits, parent_logits, config)
        clean_distillation = weighted_divergence(clean_logits, teacher, clean_weights, weight_mean)
        total = total + config.clean_distillation_weight * clean_distillation
    return Losses(
        total=total,
        ar=ar,
        diffusion=diffusion,
        confidence=confidence,
        distillation=distillation,
        clean_distillation=clean_distillation,
    )


def on_policy_loss(
    clean_logits: Tensor,
    canvas_logits: Tensor,
    *,
    clean_weights: Tensor,
    block_starts: Tensor,
    masked: Tensor,
    config: ObjectiveConfig,
    parent_logits: Tensor | None = None,
    weight_mean: WeightMean = own_weight,
) -> Losses:
    """Returns the distillation losses of a step on replies that the model wrote itself.

    Nobody knows whether such a reply is right, so its tokens are never targets: the teacher's
    distributions after them are.
    Source: Agarwal et al., "On-Policy Distillation of Language Models", arXiv 2306.13649, with the
    forward divergence.

    Args:
        clean_logits: [B, T, V].
        canvas_logits: [B, N, n, V], as the model gives them.
        clean_weights: From `ar_weights`, [B, T].
        block_starts: [B, N], -1 for an unused slot.
        masked: Positions of the reply that a canvas masks, bool [B, N, n].
        config: Weights.
        parent_logits: As for `two_stream_loss`.
        weight_mean: For a batch that several processes share.
    """
    aligned = align_canvas_logits(
        clean_logits, canvas_logits, block_starts, shift_logits=config.shift_logits
    )
    teacher = _teacher_logits(clean_logits, parent_logits, config)
    on_policy = distillation_loss(aligned, teacher, block_starts, masked, weight_mean)
    total = config.distillation_weight * on_policy
    clean_distillation = None
    if config.clean_distillation_weight > 0:
        clean_distillation = weighted_divergence(clean_logits, teacher, clean_weights, weight_mean)
        total = total + config.clean_distillation_weight * clean_distillation
    return Losses(total=total, on_policy=on_policy, clean_distillation=clean_distillation)


def _teacher_logits(
    clean_logits: Tensor, parent_logits: Tensor | None, config: ObjectiveConfig
) -> Tensor:
    if config.teacher == "self":
        return clean_logits
    assert parent_logits is not None, "a run without the parent that it needs does not start"
    return parent_logits
