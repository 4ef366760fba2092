"""Decoding with a drafter: a pass of the parent verifies a draft, a pass of the drafter makes the next.

The text is that of `autoregressive`, token for token, at any temperature: `Row.verify` keeps what the
parent's own sampler draws with the noise of each position, and the draft is drawn with the same noise.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from clover.diffusion.policies import Autoregressive, Exact
from clover.diffusion.requests import Decode, Event, GenerationRequest
from clover.diffusion.rows import Row, check_request, make_rules, predict_rows, start_row
from clover.errors import RequestError
from clover.eval.dflash.model import Drafter, DrafterCache, check_parent, record_features
from clover.model.cache import Cache
from clover.model.transformer import CloverForCausalLM, Transaction


class DrafterDecoder:
    """A parent and its drafter. Answers one request at a time.

    Args:
        parent: The autoregressive model whose text it is.
        drafter: Trained for it.
        decode: Ids to text; without it results have no text, and stop strings are refused.
        eos_token_ids: In place of the parent config's.
        forbidden_token_ids: Ids never drawn and refused in prompts.
        num_draft_tokens: Most tokens of a draft; None: as many as in training.

    Attributes:
        drafter_passes: Passes of the drafter since the decoder was made; those of the parent are in
            each result's statistics.
        drafted_tokens: Tokens of all verified drafts, each up to its EOS.
        accepted_tokens: How many of these the parent's sampler drew too.

    Raises:
        ConfigError: The drafter is of another parent.
    """

    def __init__(
        self,
        parent: CloverForCausalLM,
        drafter: Drafter,
        *,
        decode: Decode | None = None,
        eos_token_ids: Iterable[int] | None = None,
        forbidden_token_ids: Iterable[int] = (),
        num_draft_tokens: int | None = None,
    ) -> None:
        check_parent(drafter.config, parent)
        longest = drafter.config.block_size - 1
        self.num_draft_tokens = longest if num_draft_tokens is None else num_draft_tokens
        if not 1 <= self.num_draft_tokens <= longest:
            raise RequestError(
                f"num_draft_tokens is {num_draft_tokens}; allowed: 1 to {longest}, the drafter's own"
            )
        self.parent, self.drafter = parent, drafter
        self.rules = make_rules(
            parent.config,
            decode=decode,
            eos_token_ids=eos_token_ids,
            forbidden_token_ids=forbidden_token_ids,
        )
        self.forbidden_ids = torch.tensor(
            sorted(self.rules.forbidden), dtype=torch.int64, device=parent.device
        )
        self.drafter_passes = self.drafted_tokens = self.accepted_tokens = 0

    def generate(self, request: GenerationRequest) -> Iterator[Event]:
        """Checks a request of `autoregressive`, then returns its events as they happen.

        Raises:
            PromptError, RequestError: As the plain loop does, and for a constraint.
            GenerationError: While iterating: the parent's logits are not finite.
        """
        check_request(request, self.rules)
        if request.constraint is not None or not isinstance(request.policy, Autoregressive):
            raise RequestError(
                f"a drafter writes the free text of Autoregressive(), found {request.policy} and "
                f"the constraint {request.constraint}; leave them out"
            )
        # To its row a draft is what a preview is to `exact`: it comes from outside
        row = start_row(
            0,
            replace(request, policy=Exact()),
            self.rules,
            self.num_draft_tokens + 1,
            time.perf_counter(),
        )
        return self._write(row)

    def _write(self, row: Row) -> Iterator[Event]:
        prompt = row.request.prompt_ids[:-1]
        capacity = len(row.request.prompt_ids) + self._limit(row)
        cache = self.parent.new_cache(1, capacity=capacity)
        context = self.drafter.new_cache(capacity)
        features = self._prefill(cache, prompt)
        yield from row.begin()
        while not row.is_finished:
            self._draft(row, features, context)
            draft = row.draft()
            logits, verified, transaction = self._verify(cache, [*row.pending, *draft])
            row.passes += 1
            row.commits += 1
            targets = predict_rows([row], logits, [draft], [[]], self.forbidden_ids).tokens
            count, events = row.verify(targets[0].tolist())
            self.drafted_tokens += len(draft)
            self.accepted_tokens += count - 1
            yield from events
            transaction.commit([count])
            features = verified[:, :count]

    def _limit(self, row: Row) -> int:
        """Returns the most tokens that the row's text can have."""
        room = self.rules.context - len(row.request.prompt_ids)
        max_tokens = row.request.max_tokens
        return room if max_tokens is None else min(room, max_tokens)

    def _prefill(self, cache: Cache, prompt: Sequence[int]) -> Tensor:
        """Commits a prompt; returns its features [1, T, F D]."""
        layers = self.drafter.config.feature_layers
        width = len(layers) * self.parent.config.hidden_size
        chunks = [torch.zeros(1, 0, width, dtype=self.parent.dtype, device=self.parent.device)]
        if prompt:
            input_ids = torch.tensor([list(prompt)], device=self.parent.device)
            with record_features(self.parent, layers) as features:
                self.parent.prefill(cache, input_ids)
            chunks += features
        return torch.cat(chunks, dim=1)

    def _verify(self, cache: Cache, tokens: Sequence[int]) -> tuple[Tensor, Tensor, Transaction]:
        """Returns the parent's logits [1, T, V], the features [1, T, F D] and the transaction."""
        input_ids = torch.tensor([tokens], device=self.parent.device)
        with record_features(self.parent, self.drafter.config.feature_layers) as features:
            logits, transaction = self.parent.verify(cache, input_ids)
        return logits, features[0], transaction

    @torch.no_grad()
    def _draft(self, row: Row, features: Tensor, context: DrafterCache) -> None:
        """Fills the row's canvas; `features` [1, C, F D] are of the tokens committed since the last.

        No longer than what can become text: one token comes with the verification. Where nothing is
        left to draft the next pass is the last, and nobody misses the features.
        """
        count = min(self.num_draft_tokens, self._limit(row) - len(row.output) - 1)
        if count < 1:
            return
        device = self.parent.device
        anchor = self.parent.model.embed_tokens(torch.tensor([row.pending], device=device))
        stop = context.length + features.shape[1] + 1 + count
        positions = torch.arange(context.length, stop, device=device)[None]
        hidden_states = self.drafter(features, anchor, count, positions, cache=context)
        logits = self.parent.logits(hidden_states[:, 0])  # [1, count, V]
        canvas = row.canvas[:count]
        tokens = predict_rows([row], logits, [canvas], [[]], self.forbidden_ids).tokens
        row.canvas[:count] = tokens[0].tolist()
        self.drafter_passes += 1
