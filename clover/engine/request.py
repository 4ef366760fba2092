"""What a caller asks of an engine, and the engine's own record of a request it has accepted."""

from __future__ import annotations

from dataclasses import dataclass

from clover.diffusion.requests import FinishReason, GenerationRequest
from clover.diffusion.rows import Row
from clover.errors import RequestError
from clover.model.cache import Cache


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


@dataclass(kw_only=True, slots=True, eq=False)
class Job:
    """A request that the engine has accepted."""

    row: Row  # its index is the request's id
    priority: int
    deadline: float | None  # seconds, of the engine's clock
    is_cancelled: bool = False
    prefill_cache: Cache | None = None  # one row, from the first prefill chunk to the last

    @property
    def id(self) -> int:
        """The request's id."""
        return self.row.index

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
