"""What a running server counts and times, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from operator import attrgetter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from clover.backends.base import Backend, ChatFinished

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TPF = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)


class Metrics:
    """The numbers of one server, in a registry of their own, each by model."""

    def __init__(self, backends: Mapping[str, Backend]) -> None:
        """Declares them; the backends' loads are asked whenever they are read."""
        self.registry = registry = CollectorRegistry()
        self._finished = Counter(
            "clover_answers",
            "Answers, by how they ended.",
            ["finish_reason", "model"],
            registry=registry,
        )
        self._prompt = Counter(
            "clover_prompt_tokens", "Tokens of prompts.", ["model"], registry=registry
        )
        self._cached = Counter(
            "clover_cached_tokens",
            "Tokens of prompts that the cache had.",
            ["model"],
            registry=registry,
        )
        self._hits = Counter(
            "clover_prefix_cache_hits",
            "Prompts whose beginning the cache had.",
            ["model"],
            registry=registry,
        )
        self._completion = Counter(
            "clover_completion_tokens", "Tokens produced.", ["model"], registry=registry
        )
        self._passes = Counter(
            "clover_passes", "Forward passes, summed over answers.", ["model"], registry=registry
        )
        self._previews = Counter(
            "clover_previews",
            "Passes that previewed, summed over answers.",
            ["model"],
            registry=registry,
        )
        self._first = Histogram(
            "clover_time_to_first_token_seconds",
            "From a request to the first text of its answer.",
            ["model"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._between = Histogram(
            "clover_inter_token_seconds",
            "Mean over the tokens of an answer, from its first text to its end.",
            ["model"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._tpf = Histogram(
            "clover_tokens_per_forward",
            "TPF of an answer.",
            ["model"],
            buckets=_TPF,
            registry=registry,
        )
        running = Gauge("clover_running", "Answers in a slot.", ["model"], registry=registry)
        waiting = Gauge("clover_waiting", "Requests in the queue.", ["model"], registry=registry)
        for model, backend in backends.items():
            running.labels(model).set_function(partial(attrgetter("load.running"), backend))
            waiting.labels(model).set_function(partial(attrgetter("load.waiting"), backend))

    def render(self) -> bytes:
        """Returns all numbers in Prometheus' text format."""
        return generate_latest(self.registry)

    def time_answer(self, model: str) -> AnswerTimer:
        """Returns the timer of an answer of `model` that begins now."""
        return AnswerTimer(self, model)

    def _count(
        self, model: str, end: ChatFinished, to_first: float | None, after_first: float
    ) -> None:
        usage = end.usage
        self._finished.labels(end.finish_reason, model).inc()
        self._prompt.labels(model).inc(usage.prompt_tokens)
        self._cached.labels(model).inc(usage.cached_tokens)
        self._hits.labels(model).inc(usage.cached_tokens > 0)
        self._completion.labels(model).inc(usage.completion_tokens)
        self._passes.labels(model).inc(usage.passes)
        self._previews.labels(model).inc(usage.previews)
        if usage.passes:
            self._tpf.labels(model).observe(usage.tpf)
        if to_first is not None:
            self._first.labels(model).observe(to_first)
            self._between.labels(model).observe(after_first / max(usage.completion_tokens, 1))


class AnswerTimer:
    """Times one answer.

    Attributes:
        model: Whose it is.
    """

    def __init__(self, metrics: Metrics, model: str) -> None:
        """Starts now."""
        self.model = model
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
        self._metrics._count(self.model, end, self._first, self.writing_seconds)

    def abandon(self) -> None:
        """Counts an answer that its client has left."""
        self._metrics._finished.labels("abandoned", self.model).inc()
