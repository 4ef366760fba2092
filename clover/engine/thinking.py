"""A budget of thinking: when it is spent, thinking is closed and the answer begins.

V vocabulary entries of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clover.diffusion.constraint import Constraint, ConstraintFactory
from clover.errors import RequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class ThinkingBudget:
    """A `ConstraintFactory` for texts that start inside thinking.

    Attributes:
        num_tokens: Most tokens before thinking is closed.
        closing: What is written then; holds `end_token_id`.
        end_token_id: Ends thinking: once it is written the budget has no effect. It is not written
            again where the budget has had it written.
        vocab_size: V.
        eos_token_ids: The tokens that end a text.
        answer: What the text has to be besides; None leaves it free.
    """

    num_tokens: int
    closing: tuple[int, ...]
    end_token_id: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    answer: ConstraintFactory | None = None

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise RequestError(f"a thinking budget is {self.num_tokens}; allowed: 1 and more")

    def start(self) -> BudgetedText:
        """Returns the constraint of a new text."""
        return BudgetedText(self, self.answer.start() if self.answer else None)


class BudgetedText:
    """One text under a thinking budget: a `Constraint`."""

    def __init__(self, budget: ThinkingBudget, answer: Constraint | None) -> None:
        """Starts behind no token."""
        self._budget = budget
        self._answer = answer
        self._tokens: list[int] = []

    def allowed(self) -> Tensor:
        """Returns the ids that may come next, bool [V]."""
        if owed := self._owed(self._tokens):
            allowed = torch.zeros(self._budget.vocab_size, dtype=torch.bool)
            allowed[owed[0]] = True
            return allowed
        if self._answer is not None:
            return self._answer.allowed()
        allowed = torch.ones(self._budget.vocab_size, dtype=torch.bool)
        if self._is_cut(self._tokens):
            allowed[self._budget.end_token_id] = False
        return allowed

    def forced(self) -> list[int]:
        """Returns tokens that come next whatever the model predicts."""
        answer = [] if self._answer is None else self._answer.forced()
        return list(self._owed(self._tokens)) or answer

    def validate(self, tokens: Sequence[int]) -> int:
        """Returns how many of `tokens`, from the left, may come next."""
        eos = self._budget.eos_token_ids
        ends = (count for count, token_id in enumerate(tokens, 1) if token_id in eos)
        num_valid = next(ends, len(tokens))
        if self._answer is not None:
            num_valid = self._answer.validate(tokens)
        for index in range(num_valid):
            before = [*self._tokens, *tokens[:index]]
            owed = self._owed(before)
            if owed and owed[0] != tokens[index]:
                return index
            if tokens[index] == self._budget.end_token_id and self._is_cut(before):
                return index
        return num_valid

    def commit(self, tokens: Sequence[int]) -> None:
        """Takes tokens as written.

        Raises:
            ConstraintError: One of them may not come where it stands.
        """
        if self._answer is not None:
            self._answer.commit(tokens)
        self._tokens += tokens

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last `num_tokens` committed tokens."""
        if self._answer is not None:
            self._answer.rollback(num_tokens)
        del self._tokens[len(self._tokens) - num_tokens :]

    def _is_cut(self, tokens: Sequence[int]) -> bool:
        """Returns whether the budget has closed thinking: a model that thinks on may not do it again."""
        budget = self._budget
        is_closed = len(tokens) >= budget.num_tokens + len(budget.closing)
        return is_closed and budget.end_token_id not in tokens[: budget.num_tokens]

    def _owed(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Returns what has to follow `tokens` before anything else may."""
        spent = len(tokens) - self._budget.num_tokens
        if spent < 0 or self._budget.end_token_id in tokens[: self._budget.num_tokens]:
            return ()
        return self._budget.closing[spent:]
