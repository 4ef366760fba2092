"""The log-probabilities of final tokens: one definition, whatever policy has written them.

That of a token is the autoregressive head's at the position before it, as the commit operator gives
it: of the raw logits, at temperature 1, before anything is forbidden, penalized or masked. One causal
forward over prompt and text gives the same.

k tokens, V vocabulary entries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clover.diffusion.requests import TokenLogprobs
from clover.errors import GenerationError


def score_tokens(
    tokens: Sequence[int], logits: Tensor, num_alternatives: int
) -> list[TokenLogprobs]:
    """Returns the log-probability of each token, and what was most likely in its place.

    Args:
        tokens: k ids.
        logits: [k, V] of the commit operator, each at the position before its token.
        num_alternatives: How many of the most likely tokens are named, at most V.

    Raises:
        GenerationError: Logits are NaN or infinite.
    """
    logprobs = logits.float().log_softmax(-1)
    if not logprobs.isfinite().all():  # most of a block's are read here alone
        raise GenerationError(
            "expected finite logits to read log-probabilities from, found NaN or infinity; check "
            "the weights and the dtype"
        )
    own = logprobs.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    top = logprobs.topk(min(num_alternatives, logits.shape[-1]), dim=-1)
    columns = tokens, own.tolist(), top.indices.tolist(), top.values.tolist()
    return [
        TokenLogprobs(token_id=token_id, logprob=logprob, top=tuple(zip(ids, values, strict=True)))
        for token_id, logprob, ids, values in zip(*columns, strict=True)
    ]


class Scorer:
    """Brings the tokens of one text together with the logits that predict them.

    Either may come first: what a block's commit says about the next token is known before that token
    is, and a block is final before it is committed.
    """

    def __init__(self, num_alternatives: int) -> None:
        """Starts before the first token; see `score_tokens`."""
        self.scored: list[TokenLogprobs] = []  # of the text's first tokens
        self._num_alternatives = num_alternatives
        self._logits: Tensor | None = None  # [k, V], what predicts the tokens behind those scored

    def add(self, logits: Tensor) -> None:
        """Takes the logits [k, V] behind the next k committed tokens."""
        self._logits = logits if self._logits is None else torch.cat([self._logits, logits])

    def score(self, tokens: Sequence[int]) -> None:
        """Scores what can be scored of the final tokens behind those already scored."""
        if self._logits is None:
            return
        num_known = min(len(self._logits), len(tokens))
        if num_known:
            known, rest = self._logits[:num_known], self._logits[num_known:]
            self.scored += score_tokens(tokens[:num_known], known, self._num_alternatives)
            self._logits = rest.clone()  # not a view that keeps a whole pass in memory
