"""Replies for the command line: a loaded checkpoint, its knobs, and panes that fill up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from clover.backends.local import choose_sampling
from clover.chat import ChatTemplate, Message, parse_reply
from clover.checkpoint.load import LoadedCheckpoint
from clover.cli_display import Pane, Screen, plain_answer
from clover.diffusion.generate import (
    BlockCommitted,
    CanvasUpdated,
    Event,
    Finished,
    GenerationRequest,
    GenerationResult,
    generate,
    reserved_token_ids,
)
from clover.diffusion.policies import Autoregressive, CausalPolicy, Exact, Policy
from clover.engine.grammar import GrammarCompiler
from clover.engine.lark import AnswerFormat
from clover.errors import GenerationError, RequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class Knobs:
    """How replies are decoded. `policy` None is the model's own: a parent has only one."""

    policy: Policy | None = None
    block_size: int | None = None
    sampling: Mapping[str, float | int] = field(default_factory=dict)  # what was asked for
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    answer: AnswerFormat | None = None  # what it has to be; None leaves it free


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is to be answered: a chat, or (`raw`) text to go on from as it is."""

    messages: tuple[Message, ...] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    enable_thinking: bool = True
    raw: str | None = None
    is_right: Callable[[Message], bool] | None = None

    def render(self, template: ChatTemplate) -> str:
        """Returns the text that the model goes on from."""
        if self.raw is not None:
            return self.raw
        return template.render(
            self.messages, tools=self.tools, enable_thinking=self.enable_thinking
        )


class Writer:
    """A checkpoint that answers prompts under fixed knobs."""

    def __init__(self, checkpoint: LoadedCheckpoint, title: str, knobs: Knobs) -> None:
        """Keeps what every reply shares."""
        self.checkpoint = checkpoint
        self.title = title
        config = checkpoint.config
        self.policy = knobs.policy or (Exact() if config.diffusion else Autoregressive())
        if knobs.block_size is not None and isinstance(self.policy, CausalPolicy):
            raise RequestError(
                f"block_size is {knobs.block_size}, but the policy of {title} is autoregressive or "
                "prompt_lookup, which have no blocks; leave it out"
            )
        self.mask_token_id = config.diffusion.mask_token_id if config.diffusion else None
        self.reserved_ids = reserved_token_ids(config, len(checkpoint.tokenizer))
        self._knobs = knobs
        self._sampling = choose_sampling(knobs.sampling, checkpoint.generation)

    def events(self, prompt_ids: Sequence[int], *, starts_in_thinking: bool) -> Iterator[Event]:
        """Starts a reply. A bad prompt or knob is refused here, before the first pass."""
        knobs = self._knobs
        constraint = None
        if knobs.answer is not None:
            config = self.checkpoint.config
            compiler = GrammarCompiler(
                self.checkpoint.tokenizer,
                vocab_size=config.vocab_size,
                eos_token_ids=config.eos_token_ids,
            )
            constraint = compiler.compile(knobs.answer, starts_in_thinking=starts_in_thinking)
        request = GenerationRequest(
            prompt_ids=prompt_ids,
            max_tokens=knobs.max_tokens,
            sampling=self._sampling,
            policy=self.policy,
            stop=knobs.stop,
            constraint=constraint,
        )
        return generate(
            self.checkpoint.model,
            [request],
            decode=self.checkpoint.tokenizer.decode,
            forbidden_token_ids=self.reserved_ids,
            block_size=knobs.block_size,
        )


class Reply:
    """One reply while it is written: `step` by step into its pane.

    Only the model's own time is counted: another reply, or the drawing, may go on between steps.
    """

    def __init__(self, writer: Writer, question: Question) -> None:
        """Encodes the prompt and starts."""
        checkpoint = writer.checkpoint
        prompt = question.render(checkpoint.template)
        is_thinking = question.raw is None and prompt.rstrip().endswith("<think>")
        self.question = question
        self.result: GenerationResult | None = None
        self.pane = Pane(title=writer.title, starts_in_thinking=is_thinking)
        self._writer = writer
        self._decoder = checkpoint.tokenizer.stream()
        self._events = writer.events(
            checkpoint.tokenizer.encode(prompt), starts_in_thinking=is_thinking
        )

    @property
    def text(self) -> str:
        """What has been written so far, special tokens included."""
        return self.pane.committed

    @property
    def message(self) -> Message:
        """What has been written so far, read as an assistant's turn."""
        if self.question.raw is not None:
            return Message("assistant", content=self.text)
        return parse_reply(
            self.text,
            starts_in_thinking=self.pane.starts_in_thinking,
            tools=self.question.tools,
        )

    @property
    def is_cut(self) -> bool:
        """Whether the reply ran into a limit before its end."""
        return self.result is not None and self.result.finish_reason in ("length", "context")

    @property
    def answer(self) -> str:
        """What a pipe gets."""
        return plain_answer(self.message)

    def step(self) -> None:
        """Runs the model up to its next event."""
        started = time.perf_counter()
        event = next(self._events, None)
        self.pane.seconds += time.perf_counter() - started
        match event:
            case CanvasUpdated(canvas=canvas):
                self.pane.cells = [self._cell(token_id) for token_id in self._visible(canvas)]
            case BlockCommitted(token_ids=token_ids):
                self.pane.committed += self._decoder.push(token_ids)
                self.pane.tokens += len(token_ids)
                self.pane.cells = ()
            case Finished(result=result):
                self._finish(result)
            case None:
                raise GenerationError("expected a result, found a loop that ended without one")

    def _visible(self, canvas: Sequence[int]) -> Sequence[int]:
        """Returns the canvas up to its first end token: what lies right of it will be dropped."""
        ends = self._writer.checkpoint.config.eos_token_ids
        first_end = next((i for i, token_id in enumerate(canvas) if token_id in ends), len(canvas))
        return canvas[: first_end + 1]

    def _cell(self, token_id: int) -> str | None:
        if token_id == self._writer.mask_token_id:
            return None
        return self._writer.checkpoint.tokenizer.decode([token_id])

    def _finish(self, result: GenerationResult) -> None:
        self.result = result
        pane = self.pane
        pane.committed = result.text or ""
        pane.cells = ()
        pane.tokens, pane.passes = result.stats.tokens, result.stats.passes
        if self.question.is_right is not None:
            pane.verdict = self.question.is_right(self.message)


def write(replies: Sequence[Reply], screen: Screen | None) -> None:
    """Writes all replies to their ends.

    The one that has used the least time goes next: on the screen, each is as far as it would be
    had it run alone.
    """
    panes = [reply.pane for reply in replies]
    with screen.drawing(panes) if screen else nullcontext():
        while unfinished := [reply for reply in replies if reply.result is None]:
            min(unfinished, key=lambda reply: reply.pane.seconds).step()
            if screen:
                screen.update(panes)


def describe(reply: Reply) -> dict[str, Any]:
    """Returns a finished reply as JSON values."""
    result = reply.result
    assert result is not None
    stats = result.stats
    pane = reply.pane
    verdict = {} if pane.verdict is None else {"is_right": pane.verdict}
    return {
        "model": pane.title,
        "text": result.text,
        "message": reply.message.to_dict(),
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        **verdict,
        "tokens": stats.tokens,
        "previews": stats.previews,
        "commits": stats.commits,
        "passes": stats.passes,
        "tpf": stats.tpf,
        "seconds": pane.seconds,
        "tokens_per_second": pane.tokens_per_second,
    }
