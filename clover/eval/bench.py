"""Contenders side by side: first their texts have to be the right ones, then they are timed.

Every contender answers a workload before any answers it again, so that what else the machine does
hits all alike; each round begins with another one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from clover.checkpoint.load import LoadedCheckpoint
from clover.diffusion.policies import Autoregressive, Exact, PromptLookup, parse_policy
from clover.errors import BenchmarkError, RequestError
from clover.eval.contenders import Answer, Contender, EngineContender, Prompt, Run
from clover.eval.workloads import Item, draw_trace, draw_workloads
from clover.tasks import FAMILIES
from clover.train.answers import MAX_TOKENS, is_correct_text

NUM_EXPERT_ITEMS = 4  # a mean over some hundred passes, which hooks would slow down while timed
TURN_TOKENS = 48  # a call takes fewer

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchConfig:
    """What is measured, and how often.

    Attributes:
        num_items: Held-out items of each workload.
        families: They are drawn from these, in turn.
        concurrencies: Requests under way at a time.
        repeats: Rounds of every measurement.
        num_turns: Of the agent's trace; its history has to fit into the context.
        max_tokens: Most tokens of an answer.
        prefix_cache_bytes: Of the trace's runs with a prefix cache.
    """

    num_items: int = 32
    families: tuple[str, ...] = FAMILIES
    concurrencies: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    repeats: int = 3
    num_turns: int = 10
    max_tokens: int = MAX_TOKENS
    prefix_cache_bytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        # Turns after the first are what a prefix cache is for
        least = {"num_items": 1, "repeats": 1, "num_turns": 2, "max_tokens": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise RequestError(f"{name} is {getattr(self, name)}; allowed: {low} or more")
        if not self.concurrencies or min(self.concurrencies) < 1:
            raise RequestError(f"concurrencies are {self.concurrencies}; allowed: 1 or more each")


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """What does not depend on time: a contender on one workload.

    Attributes:
        correct: Items answered rightly.
        same_text: Items whose text is that of the parent's autoregressive decoding.
        tpf: Tokens per forward pass.
        experts_per_pass: Different experts that a pass at batch 1 chooses in a layer; None: unknown.
        tpf_with_drafter: Tokens per pass when those of a drafter are counted too; None: it has none.
    """

    contender: str
    workload: str
    items: int
    correct: int
    same_text: int
    tpf: float
    experts_per_pass: float | None
    tpf_with_drafter: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One timed run of one contender over a workload. Times are in seconds, of each item."""

    contender: str
    workload: str
    concurrency: int
    repeat: int
    seconds: float
    tokens: int
    first_token_seconds: tuple[float, ...]
    latencies: tuple[float, ...]
    peak_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceSample:
    """One timed run over the agent's turns, in seconds of each turn."""

    contender: str
    has_prefix_cache: bool
    repeat: int
    first_token_seconds: tuple[float, ...]
    latencies: tuple[float, ...]


@dataclass(kw_only=True, slots=True)
class BenchResults:
    """What has been measured so far."""

    qualities: list[Quality] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    traces: list[TraceSample] = field(default_factory=list)
    is_complete: bool = False


def engine_contenders(
    parent: LoadedCheckpoint, clover: LoadedCheckpoint, policies: Sequence[str]
) -> list[EngineContender]:
    """Returns the usual contenders of our engine, the parent's plain decoding first.

    Args:
        parent: Decodes autoregressively, and with `prompt_lookup`.
        clover: Decodes autoregressively, with `exact`, and with each of the policies.
        policies: As `parse_policy` reads them.
    """
    return [
        EngineContender("parent, autoregressive", parent, Autoregressive()),
        EngineContender("parent, prompt_lookup", parent, PromptLookup()),
        EngineContender("Clover, autoregressive", clover, Autoregressive()),
        EngineContender("Clover, exact", clover, Exact()),
        *(EngineContender(f"Clover, {text}", clover, parse_policy(text)) for text in policies),
    ]


class Bench:
    """One benchmark: `run` it, and read `results` at any time.

    Args:
        config: What is measured.
        checkpoint: Whose template, tokenizer and checkers all contenders share.
        contenders: Of our engine; the first decodes the parent autoregressively, and so does one of
            every model before those whose drafts are verified.
        others: Those that are not of our engine, if any of them at a concurrency of 1 alone.
    """

    def __init__(
        self,
        config: BenchConfig,
        checkpoint: LoadedCheckpoint,
        contenders: Sequence[EngineContender],
        others: Sequence[Contender] = (),
    ) -> None:
        self.config = config
        self.results = BenchResults()
        self._checkpoint = checkpoint
        self._ours = contenders
        self._others = others
        self._all: list[Contender] = [*contenders, *others]
        self._workloads = draw_workloads(checkpoint, config.num_items, config.families)
        self._trace = draw_trace(checkpoint, config.num_turns)
        self._texts: dict[tuple[str, str], list[tuple[int, ...]]] = {}  # by contender, workload

    def run(self) -> Iterator[str]:
        """Yields a line after every step, and fills `results`.

        Raises:
            BenchmarkError: Texts that have to be equal are not. There are no samples then, unless a
                timed run is the first to differ.
        """
        for workload, items in self._workloads.items():
            yield from self._check_plain(workload, items)
        for ours in self._ours:
            self._check_trace(ours)
            yield f"same turns with and without prefix cache: {ours.name}"
        for workload, items in self._workloads.items():
            for contender in self._all:
                quality = self._measure_quality(contender, workload, items)
                self.results.qualities.append(quality)
                yield (
                    f"{workload}: {contender.name}: {quality.correct} of {quality.items} right, "
                    f"TPF {quality.tpf:.2f}"
                )
        yield from self._time_workloads()
        yield from self._time_traces()
        self.results.is_complete = True

    def _check_plain(self, workload: str, items: Sequence[Item]) -> Iterator[str]:
        """The engine writes what the plain loop does; a verified draft, the autoregressive text."""
        prompts = [item.prompt_ids for item in items]
        autoregressive: dict[int, list[tuple[int, ...]]] = {}  # by model
        for contender in self._ours:
            texts = contender.plain_texts(prompts, self.config.max_tokens)
            self._texts[contender.name, workload] = texts
            model = id(contender.checkpoint)
            if isinstance(contender.policy, Autoregressive):
                autoregressive[model] = texts
            if isinstance(contender.policy, Exact | PromptLookup):
                _require_equal(
                    autoregressive[model],
                    texts,
                    f"{workload}: {contender.name}: autoregressive text",
                )
            self._run(contender, workload, prompts, max(self.config.concurrencies))
            yield f"{workload}: right texts: {contender.name}"
        for other in self._others:
            if other.is_parents_text:
                # The plain loop's text of the parent: every run is held against it from now on
                self._texts[other.name, workload] = self._texts[self._ours[0].name, workload]
                self._run(other, workload, prompts, 1)
                yield f"{workload}: right texts: {other.name}"

    def _check_trace(self, contender: EngineContender) -> None:
        with_cache, without = (self._run_trace(contender, has_cache) for has_cache in (True, False))
        _require_equal(
            without.texts, with_cache.texts, f"{contender.name}: turns without a prefix cache"
        )

    def _measure_quality(
        self, contender: Contender, workload: str, items: Sequence[Item]
    ) -> Quality:
        prompts = [item.prompt_ids for item in items]
        run = self._run(contender, workload, prompts, 1)
        parent_texts = self._texts[self._ours[0].name, workload]
        experts = None
        if isinstance(contender, EngineContender):
            experts = contender.experts_per_pass(prompts[:NUM_EXPERT_ITEMS], self.config.max_tokens)
        return Quality(
            contender=contender.name,
            workload=workload,
            items=len(items),
            correct=sum(map(self._is_right, items, run.answers)),
            same_text=sum(map(tuple.__eq__, run.texts, parent_texts)),
            tpf=run.tpf,
            tpf_with_drafter=run.tpf_with_drafter,
            experts_per_pass=experts,
        )

    def _time_workloads(self) -> Iterator[str]:
        levels = itertools.product(self._workloads.items(), self.config.concurrencies)
        for (workload, items), concurrency in levels:
            prompts = [item.prompt_ids for item in items]
            able = [
                each for each in self._all if concurrency <= (each.max_concurrency or concurrency)
            ]
            for repeat, contender in _rounds(able, self.config.repeats):
                run = self._run(contender, workload, prompts, concurrency)
                self.results.samples.append(
                    Sample(
                        contender=contender.name,
                        workload=workload,
                        concurrency=concurrency,
                        repeat=repeat,
                        seconds=run.seconds,
                        tokens=run.tokens,
                        first_token_seconds=_first_token_seconds(run),
                        latencies=_latencies(run),
                        peak_bytes=run.peak_bytes,
                    )
                )
                yield (
                    f"{workload}, concurrency {concurrency}, round {repeat + 1}: {contender.name}: "
                    f"{run.tokens / run.seconds:.1f} tokens/s"
                )

    def _time_traces(self) -> Iterator[str]:
        for repeat, contender in _rounds(self._ours, self.config.repeats):
            for has_cache in (False, True):
                run = self._run_trace(contender, has_cache)
                self.results.traces.append(
                    TraceSample(
                        contender=contender.name,
                        has_prefix_cache=has_cache,
                        repeat=repeat,
                        first_token_seconds=_first_token_seconds(run),
                        latencies=_latencies(run),
                    )
                )
            yield f"turns, round {repeat + 1}: {contender.name}"

    def _run(
        self, contender: Contender, workload: str, prompts: Sequence[Prompt], concurrency: int
    ) -> Run:
        """Returns a run whose texts, if it is our engine's, are those of the plain loop."""
        max_tokens = self.config.max_tokens
        run = contender.run(prompts, concurrency=concurrency, max_tokens=max_tokens)
        expected = self._texts.get((contender.name, workload))
        if expected is not None:
            where = f"{workload}: {contender.name} at concurrency {concurrency}"
            _require_equal(expected, run.texts, f"{where}: the plain loop's text")
        return run

    def _run_trace(self, contender: EngineContender, has_cache: bool) -> Run:
        return contender.run_turns(
            self._trace,
            max_tokens=min(TURN_TOKENS, self.config.max_tokens),
            prefix_cache_bytes=self.config.prefix_cache_bytes if has_cache else 0,
        )

    def _is_right(self, item: Item, answer: Answer) -> bool:
        return answer.is_whole and is_correct_text(self._checkpoint, item.task, answer.token_ids)


def _rounds(contenders: Sequence[T], repeats: int) -> Iterator[tuple[int, T]]:
    """Yields round and contender; each round starts one contender later."""
    for repeat in range(repeats):
        start = repeat % len(contenders)
        for contender in (*contenders[start:], *contenders[:start]):
            yield repeat, contender


def _require_equal(
    expected: Sequence[tuple[int, ...]], found: Sequence[tuple[int, ...]], what: str
) -> None:
    differing = [
        i for i, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1]
    ]
    if differing:
        raise BenchmarkError(
            f"{what}: expected in all {len(expected)} answers, found another in {len(differing)}, "
            f"first in number {differing[0]}; no speed is reported until they are equal"
        )


def _first_token_seconds(run: Run) -> tuple[float, ...]:
    return tuple(answer.first_token_seconds for answer in run.answers)


def _latencies(run: Run) -> tuple[float, ...]:
    return tuple(answer.seconds for answer in run.answers)
