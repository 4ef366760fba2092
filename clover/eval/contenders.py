"""Who answers in a benchmark: our engine under some policy, a parent with a drafter, or transformers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from clover.checkpoint.load import LoadedCheckpoint
from clover.diffusion.generate import generate_all, reserved_token_ids
from clover.diffusion.policies import Autoregressive, Policy
from clover.diffusion.requests import BlockCommitted, Finished, GenerationRequest
from clover.engine.engine import Engine, EngineConfig
from clover.engine.request import EngineRequest
from clover.eval.dflash.decode import DrafterDecoder
from clover.eval.dflash.model import Drafter
from clover.model.moe import Experts, record_expert_choices
from clover.train.trainer import peak_memory_bytes

Prompt = Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One greedy answer, and how long it took.

    Attributes:
        token_ids: Without EOS.
        is_whole: Whether EOS ended it.
        tokens: EOS included.
        passes: Forward passes that served it, prefill not counted.
        drafter_passes: Passes of a second, smaller model, which `passes` leaves out.
        first_token_seconds: From submission to the first final token.
        seconds: From submission to the end.
    """

    token_ids: tuple[int, ...]
    is_whole: bool
    tokens: int
    passes: int
    first_token_seconds: float
    seconds: float
    drafter_passes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The answers to some prompts, in their order, the time for all, and the most memory held."""

    answers: list[Answer]
    seconds: float
    peak_bytes: int

    @property
    def tokens(self) -> int:
        """Tokens of all answers, EOS included."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def tpf(self) -> float:
        """Tokens per forward pass that served a row."""
        return self.tokens / sum(answer.passes for answer in self.answers)

    @property
    def tpf_with_drafter(self) -> float | None:
        """Tokens per forward pass of either model; None without a drafter."""
        drafter_passes = sum(answer.drafter_passes for answer in self.answers)
        passes = sum(answer.passes for answer in self.answers)
        return self.tokens / (passes + drafter_passes) if drafter_passes else None

    @property
    def texts(self) -> list[tuple[int, ...]]:
        """The answers' tokens."""
        return [answer.token_ids for answer in self.answers]


class Contender(Protocol):
    """Answers prompts greedily.

    Attributes:
        name: What tables call it.
        max_concurrency: Most prompts at a time; None: any number.
        is_parents_text: Whether its texts have to be those of the parent's autoregressive decoding.
    """

    name: str
    max_concurrency: int | None
    is_parents_text: bool

    def run(self, prompts: Sequence[Prompt], *, concurrency: int, max_tokens: int) -> Run:
        """Answers all prompts, `concurrency` of them at a time."""
        ...


class EngineContender:
    """A checkpoint under a policy, in our engine.

    Args:
        name: What tables call it.
        checkpoint: A Clover model or a parent.
        policy: How it decodes.
    """

    max_concurrency: int | None = None
    is_parents_text = False  # held against the plain loop instead, which knows the policy

    def __init__(self, name: str, checkpoint: LoadedCheckpoint, policy: Policy) -> None:
        self.name = name
        self.checkpoint = checkpoint
        self.policy = policy
        self._reserved = reserved_token_ids(checkpoint.config, len(checkpoint.tokenizer))

    def run(self, prompts: Sequence[Prompt], *, concurrency: int, max_tokens: int) -> Run:
        """Answers all prompts; whenever one is done, the next is submitted. Caches no prefix."""
        engine = self.new_engine(num_slots=concurrency, prefix_cache_bytes=0)
        with _measured() as measured:
            answers = self._serve(engine, prompts, concurrency, max_tokens)
        return Run(answers=answers, seconds=measured.seconds, peak_bytes=measured.peak_bytes)

    def run_turns(
        self, prompts: Sequence[Prompt], *, max_tokens: int, prefix_cache_bytes: int
    ) -> Run:
        """Answers prompts one after the other in one engine, whose prefix cache starts empty."""
        engine = self.new_engine(num_slots=1, prefix_cache_bytes=prefix_cache_bytes)
        with _measured() as measured:
            answers = self._serve(engine, prompts, 1, max_tokens)
        return Run(answers=answers, seconds=measured.seconds, peak_bytes=measured.peak_bytes)

    def plain_texts(self, prompts: Sequence[Prompt], max_tokens: int) -> list[tuple[int, ...]]:
        """Returns what the plain loop answers: the truth for the engine."""
        results = generate_all(
            self.checkpoint.model,
            [self._request(prompt, max_tokens) for prompt in prompts],
            eos_token_ids=self.checkpoint.eos_token_ids,
            forbidden_token_ids=self._reserved,
        )
        return [result.token_ids for result in results]

    def experts_per_pass(self, prompts: Sequence[Prompt], max_tokens: int) -> float | None:
        """Returns how many different experts a decoding pass at batch 1 chooses in a layer.

        A mean over layers and the passes of each answer but its first. None: there are none, or the
        model has no experts.
        """
        modules = self.checkpoint.model.modules()
        num_layers = sum(isinstance(module, Experts) for module in modules)
        if not num_layers:
            return None
        engine = self.new_engine(num_slots=1, prefix_cache_bytes=0)
        counts: list[int] = []
        for prompt in prompts:
            engine.submit(EngineRequest(generation=self._request(prompt, max_tokens)))
            first = engine.stats.passes + 1  # it may read the end of the prompt, too
            while engine.has_work:
                with record_expert_choices(self.checkpoint.model) as choices:
                    engine.step()
                if engine.stats.passes > first:  # no step prefills then: it has one pass
                    counts += [len(choice.unique()) for choice in choices]
        return sum(counts) / len(counts) if counts else None

    def new_engine(self, *, num_slots: int, prefix_cache_bytes: int) -> Engine:
        """Returns an engine that has served nothing yet."""
        return Engine(
            self.checkpoint.model,
            EngineConfig(num_slots=num_slots, prefix_cache_bytes=prefix_cache_bytes),
            eos_token_ids=self.checkpoint.eos_token_ids,
            forbidden_token_ids=self._reserved,
        )

    def _request(self, prompt: Prompt, max_tokens: int) -> GenerationRequest:
        return GenerationRequest(prompt_ids=prompt, max_tokens=max_tokens, policy=self.policy)

    def _serve(
        self, engine: Engine, prompts: Sequence[Prompt], concurrency: int, max_tokens: int
    ) -> list[Answer]:
        answers: dict[int, Answer] = {}
        started: dict[int, float] = {}  # by request id, seconds
        first: dict[int, float] = {}
        while len(answers) < len(prompts):
            while len(started) < len(prompts) and len(started) - len(answers) < concurrency:
                now = time.perf_counter()
                generation = self._request(prompts[len(started)], max_tokens)
                started[engine.submit(EngineRequest(generation=generation))] = now
            for event in engine.step():
                now = time.perf_counter()
                if isinstance(event, BlockCommitted | Finished):
                    first.setdefault(event.row, now)
                if isinstance(event, Finished):
                    begin, result = started[event.row], event.result
                    answers[event.row] = Answer(
                        token_ids=result.token_ids,
                        is_whole=result.finish_reason == "eos",
                        tokens=result.stats.tokens,
                        passes=result.stats.passes,
                        first_token_seconds=first[event.row] - begin,
                        seconds=now - begin,
                    )
        return [answers[request_id] for request_id in started]


class DrafterContender:
    """A parent with a DFlash drafter, one prompt at a time, in a loop of its own.

    Args:
        checkpoint: The parent.
        drafter: Trained for it.
    """

    name = "parent + DFlash"
    max_concurrency: int | None = 1
    is_parents_text = True

    def __init__(self, checkpoint: LoadedCheckpoint, drafter: Drafter) -> None:
        self._decoder = DrafterDecoder(
            checkpoint.model,
            drafter,
            eos_token_ids=checkpoint.eos_token_ids,
            forbidden_token_ids=reserved_token_ids(checkpoint.config, len(checkpoint.tokenizer)),
        )

    def run(self, prompts: Sequence[Prompt], *, concurrency: int, max_tokens: int) -> Run:
        """Answers the prompts one after the other."""
        assert concurrency == 1
        with _measured() as measured:
            answers = [self._answer(prompt, max_tokens) for prompt in prompts]
        return Run(answers=answers, seconds=measured.seconds, peak_bytes=measured.peak_bytes)

    def _answer(self, prompt: Prompt, max_tokens: int) -> Answer:
        decoder, num_before = self._decoder, self._decoder.drafter_passes
        request = GenerationRequest(
            prompt_ids=prompt, max_tokens=max_tokens, policy=Autoregressive()
        )
        started = time.perf_counter()
        timed = [(time.perf_counter(), event) for event in decoder.generate(request)]
        (first, _), (ended, last) = timed[0], timed[-1]
        assert isinstance(last, Finished)
        result = last.result
        return Answer(
            token_ids=result.token_ids,
            is_whole=result.finish_reason == "eos",
            tokens=result.stats.tokens,
            passes=result.stats.passes,
            drafter_passes=decoder.drafter_passes - num_before,
            first_token_seconds=first - started,
            seconds=ended - started,
        )


class TransformersContender:
    """`generate` of transformers on a parent's folder, one prompt at a time.

    It takes no batches here: its padded rows would share one length and leave together.

    Args:
        checkpoint: The parent, whose folder transformers reads.
    """

    name = "parent, transformers"
    max_concurrency: int | None = 1
    is_parents_text = False  # its own kernels round otherwise, so a near tie may fall the other way

    def __init__(self, checkpoint: LoadedCheckpoint) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            checkpoint.folder, dtype=checkpoint.model.dtype
        )
        self._model = model.to(checkpoint.model.device).eval()
        self._eos_token_ids = checkpoint.eos_token_ids

    def run(self, prompts: Sequence[Prompt], *, concurrency: int, max_tokens: int) -> Run:
        """Answers the prompts one after the other."""
        assert concurrency == 1
        with _measured() as measured:
            answers = [self._answer(prompt, max_tokens) for prompt in prompts]
        return Run(answers=answers, seconds=measured.seconds, peak_bytes=measured.peak_bytes)

    @torch.inference_mode()
    def _answer(self, prompt: Prompt, max_tokens: int) -> Answer:
        streamer = _Stopwatch()
        started = time.perf_counter()
        input_ids = torch.tensor([list(prompt)], device=self._model.device)
        output = self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=list(self._eos_token_ids),
            pad_token_id=self._eos_token_ids[0],
            streamer=streamer,
        )
        tokens = output[0, len(prompt) :].tolist()
        is_whole = tokens[-1] in self._eos_token_ids
        return Answer(
            token_ids=tuple(tokens[:-1] if is_whole else tokens),
            is_whole=is_whole,
            tokens=len(tokens),
            passes=len(tokens),
            first_token_seconds=streamer.times[1] - started,
            seconds=time.perf_counter() - started,
        )


class _Stopwatch:
    """A streamer of `generate`, which is given the prompt first and then every token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Notes the time."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Has nothing to do."""


@dataclass(slots=True)
class _Measured:
    seconds: float = 0.0
    peak_bytes: int = 0


@contextmanager
def _measured() -> Iterator[_Measured]:
    """Gives what the body took: seconds, and on a GPU its own peak of memory.

    A CPU process knows its peak since it began, everybody's weights included.
    """
    measured = _Measured()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    yield measured
    measured.seconds = time.perf_counter() - started
    measured.peak_bytes = peak_memory_bytes()
