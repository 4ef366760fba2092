"""The engine: requests join and leave between passes, and each gets the plain loop's text.

    engine = Engine(model)
    request_id = engine.submit(EngineRequest(generation=GenerationRequest(prompt_ids=prompt)))
    for event in engine.run():
        ...

Equal means token for token, up to the rounding of the logits: that varies with the shape of a pass,
and so with what shares it. In bf16 a near tie may fall the other way.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch

from clover.diffusion.requests import Decode, Finished, GenerationResult
from clover.diffusion.rows import check_request, make_rules, resolve_block_size, start_row
from clover.engine.prefix_cache import PrefixCache
from clover.engine.request import EngineEvent, EngineRequest, Failed, GuardedConstraint, Job
from clover.engine.runner import Runner
from clover.engine.scheduler import Plan, Scheduler
from clover.errors import ConfigError
from clover.model.transformer import CloverForCausalLM

CPU_PREVIEW_TOKENS: Final = 128  # measured on clover-nano, docs/log.md


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How much an engine takes on.

    Attributes:
        num_slots: Most requests that share a pass.
        max_waiting: Most requests that wait for a slot; one more is refused.
        prefill_chunk_size: Most prompt tokens committed between two decoding passes, and how far
            apart the states lie that the prefix cache keeps of a prompt.
        prefix_cache_bytes: Most bytes of states kept for later prompts; 0 keeps none.
        preview_tokens: Most positions that rows of `exact` without a constraint preview in one
            pass, all together: many rows get shorter blocks, down to autoregressive steps. Their
            texts stay the same. None: 128 on a CPU, where every token makes a pass longer; no limit
            on a GPU.
    """

    num_slots: int = 8
    max_waiting: int = 256
    prefill_chunk_size: int = 256
    prefix_cache_bytes: int = 256 * 2**20
    preview_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("num_slots", 1),
            ("max_waiting", 0),
            ("prefill_chunk_size", 1),
            ("prefix_cache_bytes", 0),
            ("preview_tokens", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; allowed: {least} or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """What an engine has done since it was made.

    Attributes:
        passes: Forward passes of the batch, prefill not counted.
        prefill_passes: Forward passes over a chunk of one prompt.
        row_passes: Passes that served a row, summed over the requests that have ended, as are:
        previews, commits: Of their rows.
        tokens: They produced.
        cached_tokens: Of their prompts, that the prefix cache had.
        finished: How many they are; of those that failed nothing is counted.
    """

    passes: int = 0
    prefill_passes: int = 0
    row_passes: int = 0
    previews: int = 0
    commits: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    finished: int = 0

    @property
    def tpf(self) -> float:
        """Tokens per forward pass that served a row, 0 before the first."""
        return self.tokens / self.row_passes if self.row_passes else 0.0


class Engine:
    """Serves many requests with one model. Not thread-safe.

    Args:
        model: A Clover model, or a parent for `autoregressive` alone.
        config: Its limits.
        decode: Ids to text; without it results have no text, and stop strings are refused.
        eos_token_ids: In place of the model config's.
        forbidden_token_ids: Ids never drawn and refused in prompts; the mask is one in any case.
        clock: Seconds, for timeouts; any that never goes back.
    """

    def __init__(
        self,
        model: CloverForCausalLM,
        config: EngineConfig | None = None,
        *,
        decode: Decode | None = None,
        eos_token_ids: Iterable[int] | None = None,
        forbidden_token_ids: Iterable[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        model.pack_projections()
        self.model = model
        self.config = config or EngineConfig()
        self.rules = make_rules(
            model.config,
            decode=decode,
            eos_token_ids=eos_token_ids,
            forbidden_token_ids=forbidden_token_ids,
        )
        self.scheduler = Scheduler(
            num_slots=self.config.num_slots, max_waiting=self.config.max_waiting
        )
        self.runner = Runner(
            model,
            forbidden_ids=torch.tensor(
                sorted(self.rules.forbidden), dtype=torch.int64, device=model.device
            ),
            prefix_cache=PrefixCache(self.config.prefix_cache_bytes),
            prefill_chunk_size=self.config.prefill_chunk_size,
            preview_tokens=self._preview_tokens(),
        )
        self._clock = clock
        self._ids = itertools.count()
        self._ended = EngineStats()

    def submit(self, request: EngineRequest) -> int:
        """Takes a request; returns its id, which is the `row` of its events. Runs nothing.

        Raises:
            PromptError, RequestError: As the plain loop does.
            CapacityError: The engine and its queue are full.
        """
        generation = request.generation
        check_request(generation, self.rules)
        block_size = resolve_block_size(self.model.config, request.block_size)
        self.scheduler.check_room()
        row = start_row(next(self._ids), generation, self.rules, block_size, time.perf_counter())
        deadline = None if request.timeout is None else self._clock() + request.timeout
        job = Job(row=row, priority=request.priority, block_size=block_size, deadline=deadline)
        if row.constraint:
            row.constraint = job.guard = GuardedConstraint(
                row.constraint,
                vocab_size=self.model.config.vocab_size,
                forbidden=self.rules.forbidden,
            )
        self.scheduler.add(job)
        return row.index

    def cancel(self, request_id: int) -> bool:
        """Ends a request with what is final; False if it has ended already.

        Its slot is free before the next pass, and the next step says that it has finished.
        """
        job = self.scheduler.find(request_id)
        if job is not None:
            job.is_cancelled = True
        return job is not None

    def step(self) -> list[EngineEvent]:
        """Returns the events of the next pass: one preview, commit or both for every running row.

        Raises:
            GenerationError: The model's logits are not finite. The engine cannot go on.
        """
        plan = self.scheduler.schedule(self._clock())
        events = self.runner.run(plan)
        return self._emit(plan, events)

    def run(self) -> Iterator[EngineEvent]:
        """Yields events until no request is left. More may be submitted in between."""
        while self.has_work:
            yield from self.step()

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended."""
        return self.scheduler.num_jobs > 0

    @property
    def stats(self) -> EngineStats:
        """What has been done so far."""
        return replace(
            self._ended,
            passes=self.runner.num_passes,
            prefill_passes=self.runner.num_prefill_passes,
        )

    def _preview_tokens(self) -> int | None:
        """Returns the limit of the config, or what suits the device."""
        if self.config.preview_tokens is None and self.model.device.type == "cpu":
            return CPU_PREVIEW_TOKENS
        return self.config.preview_tokens

    def _emit(self, plan: Plan, events: list[EngineEvent]) -> list[EngineEvent]:
        """Adds the ends that no pass brought, and forgets whatever has ended."""
        abandoned = [job.row.abandon(reason) for job, reason in plan.ended.items()]
        events = [*abandoned, *events]
        for event in events:
            if isinstance(event, Finished | Failed):
                self.scheduler.release(event.row)
            if isinstance(event, Finished):
                self._count(event.result)
        return events

    def _count(self, result: GenerationResult) -> None:
        stats, ended = result.stats, self._ended
        self._ended = replace(
            ended,
            row_passes=ended.row_passes + stats.passes,
            previews=ended.previews + stats.previews,
            commits=ended.commits + stats.commits,
            tokens=ended.tokens + stats.tokens,
            cached_tokens=ended.cached_tokens + stats.cached_tokens,
            finished=ended.finished + 1,
        )
