"""What a caller asks of an engine, and the engine's own record of a request it has accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from clover.diffusion.constraint import Constraint
from clover.diffusion.requests import Event, FinishReason, GenerationRequest
from clover.diffusion.rows import Row
from clover.errors import ConstraintError, GenerationError, RequestError
from clover.model.cache import Cache

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRequest:
    """A generation request and how it shares the engine with others.

    Attributes:
        generation: The prompt and how to answer it.
        block_size: Canvas width, in place of the config's.
        priority: Higher ones are admitted first; equal ones in the order of their arrival. What
            runs is never put back.
        timeout: Seconds from submission, waiting included, after which the request ends with what
            is final; None: never.
    """

    generation: GenerationRequest
    block_size: int | None = None
    priority: int = 0
    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.timeout is not None and not self.timeout > 0:
            raise RequestError(f"timeout is {self.timeout!r}; allowed: None or seconds above 0")


@dataclass(frozen=True, slots=True)
class Failed:
    """A request has ended without a result: its constraint could not go on."""

    row: int
    error: GenerationError


EngineEvent = Event | Failed


class GuardedConstraint:
    """A `Constraint` whose failure ends its own request, and not the pass that others share.

    The first error is kept. From then on everything is allowed, until the engine drops the request
    at the end of the step.
    """

    def __init__(
        self, constraint: Constraint, *, vocab_size: int, forbidden: frozenset[int]
    ) -> None:
        """Guards a constraint, also against demanding what the decoder forbids."""
        self.error: GenerationError | None = None
        self._constraint = constraint
        self._vocab_size = vocab_size
        self._forbidden = forbidden

    def allowed(self) -> Tensor:
        """Returns the ids that may come next, bool [V]."""
        everything = torch.ones(self._vocab_size, dtype=torch.bool)
        mask = self._ask(self._constraint.allowed, everything)
        if not mask.index_fill(0, torch.tensor(sorted(self._forbidden)), False).any():
            self.error = ConstraintError(
                "expected a constraint that allows a token, found none but forbidden ids; check "
                "what the grammar and the forbidden ids leave over"
            )
            return everything
        return mask

    def forced(self) -> list[int]:
        """Returns tokens that come next whatever the model predicts."""
        nothing: list[int] = []
        tokens = self._ask(self._constraint.forced, nothing)
        found = self._forbidden.intersection(tokens)
        if found:
            self.error = ConstraintError(
                f"expected a constraint that forces no forbidden id, found {sorted(found)}; allow "
                "them or change the grammar"
            )
        return [] if found else tokens

    def validate(self, tokens: Sequence[int]) -> int:
        """Returns how many of `tokens`, from the left, may come next."""
        return self._ask(lambda: self._constraint.validate(tokens), len(tokens))

    def commit(self, tokens: Sequence[int]) -> None:
        """Takes tokens as written."""
        self._ask(lambda: self._constraint.commit(tokens), None)

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last committed tokens."""
        self._ask(lambda: self._constraint.rollback(num_tokens), None)

    def _ask(self, question: Callable[[], T], answer_after_error: T) -> T:
        if self.error is None:
            try:
                return question()
            except GenerationError as error:
                self.error = error
        return answer_after_error


@dataclass(kw_only=True, slots=True, eq=False)
class Job:
    """A request that the engine has accepted."""

    row: Row  # its index is the request's id
    priority: int
    block_size: int  # asked for; a full engine may give the row a shorter one
    deadline: float | None  # seconds, of the engine's clock
    guard: GuardedConstraint | None = None  # the row's constraint
    is_cancelled: bool = False
    prefill_cache: Cache | None = None  # one row, from the first prefill chunk to the last
    last_hidden: Tensor | None = None  # [D] after the last committed token: predicts the next

    @property
    def id(self) -> int:
        """The request's id."""
        return self.row.index

    @property
    def error(self) -> GenerationError | None:
        """Why the request can have no result, None if it can."""
        return self.guard.error if self.guard else None

    @property
    def prefix(self) -> tuple[int, ...]:
        """The prompt less its last token, which the first counted pass commits."""
        return tuple(self.row.request.prompt_ids[:-1])

    def end_reason(self, now: float) -> FinishReason | None:
        """Returns why the request must end now, whatever its text; None if it may go on."""
        if self.is_cancelled:
            return "cancelled"
        is_late = self.deadline is not None and now >= self.deadline
        return "timeout" if is_late else None
