"""What a running server counts and times, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from clover.backends.base import ChatFinished, Load

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TPF = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)


class Metrics:
    """The numbers of one server, in a registry of their own."""

    def __init__(self, load: Callable[[], Load]) -> None:
        """Declares them; `load` is asked whenever they are read."""
        self.registry = registry = CollectorRegistry()
        self._finished = Counter(
            "clover_answers", "Answers, by how they ended.", ["finish_reason"], registry=registry
        )
        self._prompt = Counter("clover_prompt_tokens", "Tokens of prompts.", registry=registry)
        self._cached = Counter(
            "clover_cached_tokens", "Tokens of prompts that the cache had.", registry=registry
        )
        self._hits = Counter(
            "clover_prefix_cache_hits", "Prompts whose beginning the cache had.", registry=registry
        )
        self._completion = Counter(
            "clover_completion_tokens", "Tokens produced.", registry=registry
        )
        self._passes = Counter(
            "clover_passes", "Forward passes, summed over answers.", registry=registry
        )
        self._previews = Counter(
            "clover_previews", "Passes that previewed, summed over answers.", registry=registry
        )
        self._first = Histogram(
            "clover_time_to_first_token_seconds",
            "From a request to the first text of its answer.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._between = Histogram(
            "clover_inter_token_seconds",
            "Mean over the tokens of an answer, from its first text to its end.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._tpf = Histogram(
            "clover_tokens_per_forward", "TPF of an answer.", buckets=_TPF, registry=registry
        )
        Gauge("clover_running", "Answers in a slot.", registry=registry).set_function(
            lambda: load().running
        )
        Gauge("clover_waiting", "Requests in the queue.", registry=registry).set_function(
            lambda: load().waiting
        )

    def render(self) -> bytes:
        """Returns all numbers in Prometheus' text format."""
        return generate_latest(self.registry)

    def time_answer(self) -> AnswerTimer:
        """Returns the timer of an answer that begins now."""
        return AnswerTimer(self)

    def count_abandoned(self) -> None:
        """Counts an answer that its client has left."""
        self._finished.labels("abandoned").inc()

    def _count(self, end: ChatFinished, to_first: float | None, after_first: float) -> None:
        usage = end.usage
        self._finished.labels(end.finish_reason).inc()
        self._prompt.inc(usage.prompt_tokens)
        self._cached.inc(usage.cached_tokens)
        self._hits.inc(usage.cached_tokens > 0)
        self._completion.inc(usage.completion_tokens)
        self._passes.inc(usage.passes)
        self._previews.inc(usage.previews)
        if usage.passes:
            self._tpf.observe(usage.tpf)
        if to_first is not None:
            self._first.observe(to_first)
            self._between.observe(after_first / max(usage.completion_tokens, 1))


class AnswerTimer:
    """Times one answer."""

    def __init__(self, metrics: Metrics) -> None:
        """Starts now."""
        self._metrics = metrics
        self._started = time.perf_counter()
        self._first: float | None = None

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._started

    @property
    def writing_seconds(self) -> float:
        """Since the first text; 0 before it."""
        return 0.0 if self._first is None else self.seconds - self._first

    def text(self) -> None:
        """Says that text has come."""
        if self._first is None:
            self._first = self.seconds

    def finish(self, end: ChatFinished) -> None:
        """Counts the answer."""
        self._metrics._count(end, self._first, self.writing_seconds)
