"""Who takes part in the next pass: admission, priorities, cancellation, timeouts. No tensors."""

from __future__ import annotations

from dataclasses import dataclass

from clover.diffusion.requests import FinishReason
from clover.engine.request import Job
from clover.errors import CapacityError


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What one step does."""

    ended: dict[Job, FinishReason]  # leave before the pass, whatever their text
    active: tuple[Job, ...]  # hold a slot, in the order of their admission


class Scheduler:
    """The queue and the slots.

    Args:
        num_slots: Most requests that share a pass.
        max_waiting: Most requests beyond those.
    """

    def __init__(self, *, num_slots: int, max_waiting: int) -> None:
        self.num_slots = num_slots
        self.max_waiting = max_waiting
        self.waiting: dict[int, Job] = {}
        self.active: dict[int, Job] = {}

    @property
    def num_jobs(self) -> int:
        """Requests that have not ended."""
        return len(self.waiting) + len(self.active)

    def find(self, job_id: int) -> Job | None:
        """Returns a job that has not ended, None if there is none of that id."""
        return self.waiting.get(job_id) or self.active.get(job_id)

    def check_room(self) -> None:
        """Refuses one request too many.

        Raises:
            CapacityError: All slots and all places in the queue are taken.
        """
        limit = self.num_slots + self.max_waiting
        if self.num_jobs >= limit:
            raise CapacityError(
                f"expected fewer than {limit} unfinished requests ({self.num_slots} running, "
                f"{self.max_waiting} waiting), found {self.num_jobs}; try again later"
            )

    def add(self, job: Job) -> None:
        """Puts a job in the queue, for which there must be room."""
        self.waiting[job.id] = job

    def schedule(self, now: float) -> Plan:
        """Returns the plan of the next step; slots that fall free are filled at once.

        Args:
            now: Seconds, of the clock that deadlines are read from.
        """
        ended = {
            job: reason
            for job in (*self.waiting.values(), *self.active.values())
            if (reason := job.end_reason(now))
        }
        for job in ended:
            self.release(job.id)
        num_free = self.num_slots - len(self.active)
        # Stable: among equal priorities the order of arrival remains
        for job in sorted(self.waiting.values(), key=lambda job: -job.priority)[:num_free]:
            self.active[job.id] = self.waiting.pop(job.id)
        return Plan(ended=ended, active=tuple(self.active.values()))

    def release(self, job_id: int) -> None:
        """Forgets a job that has ended, if it is known."""
        self.waiting.pop(job_id, None)
        self.active.pop(job_id, None)
