"""The chat of the command line: turn after turn with any backend, until the user leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import typer
from rich.console import Console

from clover.backends.base import (
    Backend,
    CanvasShown,
    ChatEvent,
    ChatFinished,
    ChatRequest,
    ContentDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallStarted,
)
from clover.chat import Message
from clover.cli_display import Pane, Screen, plain_answer, summary
from clover.errors import CloverError, PromptError

HELP = "/thinking switches thinking, /reset forgets the chat, /exit leaves; Ctrl-C stops a reply."


class Chat:
    """A conversation at the terminal, or one line a turn from a pipe."""

    def __init__(
        self,
        backend: Backend,
        *,
        system: str | None,
        tools: Sequence[Mapping[str, Any]],
        enable_thinking: bool,
        decoding: Mapping[str, Any],
        out: Console,
        notes: Console,
    ) -> None:
        """Prepares a chat that has not begun.

        Args:
            backend: Answers; entered and left by `run`.
            system: Text before the first turn.
            tools: What replies may call; the user gives the results.
            enable_thinking: Whether replies start as thought.
            decoding: The fields of each `ChatRequest` that say how it is decoded.
            out: Where replies go.
            notes: Where everything else goes.
        """
        self._backend = backend
        self._start: tuple[Message, ...] = (Message("system", content=system),) if system else ()
        self._messages: tuple[Message, ...] = self._start
        self._tools = tuple(tools)
        self._enable_thinking = enable_thinking
        self._decoding = decoding
        self._notes = notes
        self._is_live = out.is_terminal
        self._screen = Screen(out) if self._is_live else None

    def run(self) -> None:
        """Reads turns and answers them, until the input ends or asks to leave."""
        # The loop stands still while a line is read, which then hears Ctrl-C as usual
        with asyncio.Runner() as self._runner:
            self._runner.run(self._backend.__aenter__())
            try:
                self._read_turns()
            finally:
                self._runner.run(self._backend.__aexit__(None, None, None))

    def _read_turns(self) -> None:
        self._note(HELP)
        while True:
            try:
                line = self._read("you> ").strip()
            except EOFError:
                self._note("")
                return
            if line == "/exit":
                return
            if line.startswith("/"):
                self._obey(line)
            elif line:
                self._turn(Message("user", content=line))

    def _note(self, text: str) -> None:
        if self._is_live:
            self._say(text, style="dim")

    def _say(self, text: str, style: str | None = None) -> None:
        self._notes.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _read(self, prompt: str) -> str:
        """Returns a line; Ctrl-C empties it and asks anew."""
        while True:
            try:
                return input(prompt if self._is_live else "")
            except KeyboardInterrupt:
                self._note("")
            except UnicodeDecodeError as error:
                raise PromptError(f"expected text on standard input, found {error}") from error

    def _obey(self, command: str) -> None:
        if command == "/thinking":
            self._enable_thinking = not self._enable_thinking
            self._note(f"thinking is {'on' if self._enable_thinking else 'off'}")
        elif command == "/reset":
            self._messages = self._start
            self._note("forgotten")
        else:
            self._note(HELP)

    def _turn(self, message: Message) -> None:
        """Answers one turn, and goes on while the reply calls tools whose results are given."""
        before = self._messages
        self._messages = (*before, message)
        try:
            while calls := self._reply().tool_calls:
                results = [self._read(f"result of {call.name}> ") for call in calls]
                self._messages += tuple(Message("tool", content=text) for text in results)
        except CloverError as error:
            self._messages = before
            self._say(f"clover: {error}")
        except KeyboardInterrupt:  # before the answer has begun
            self._messages = before
            self._note("stopped")
        except EOFError:  # no results: the next read ends the chat
            return

    def _reply(self) -> Message:
        """Writes one reply; Ctrl-C keeps what there is of it, without its tool calls."""
        request = ChatRequest(
            messages=self._messages,
            tools=self._tools,
            enable_thinking=self._enable_thinking,
            wants_canvas=self._is_live,
            **self._decoding,
        )
        reply = _Reply(self._backend.model)
        with self._screen.drawing([reply.pane]) if self._screen else nullcontext():
            end = self._runner.run(self._answer(request, reply))
        message = end.message
        if end.finish_reason == "cancelled":
            self._note("stopped")
            message = Message("assistant", content=message.content)
        if not self._is_live:
            typer.echo(plain_answer(message))  # rich would expand tabs and drop control characters
        is_counted = end.usage.completion_tokens > 0  # some servers do not say it
        self._say(summary(reply.pane) if is_counted else f"{reply.pane.seconds:.2f} s", style="dim")
        self._messages += (message,)
        return message

    async def _answer(self, request: ChatRequest, reply: _Reply) -> ChatFinished:
        """Returns the end of an answer; Ctrl-C, which cancels this, brings it about."""
        stream = await self._backend.chat(request)
        try:
            async for event in stream:
                reply.take(event)
                if self._screen:
                    self._screen.update([reply.pane])
        except asyncio.CancelledError:
            stream.cancel()
            async for event in stream:
                reply.take(event)
        assert reply.end is not None
        return reply.end


class _Reply:
    """One reply while it is written: its events, as text in a pane."""

    def __init__(self, title: str) -> None:
        self.pane = Pane(title=title)
        self.end: ChatFinished | None = None
        self._is_thinking = False
        self._started = time.perf_counter()

    def take(self, event: ChatEvent) -> None:
        """Draws an event into the pane."""
        pane = self.pane
        pane.seconds = time.perf_counter() - self._started
        pane.cells = event.cells if isinstance(event, CanvasShown) else ()
        match event:
            case ThinkingDelta(text):
                self._is_thinking = pane.starts_in_thinking = True
                pane.committed += text
            case ContentDelta(text):
                self._end_thinking()
                pane.committed += text
            case ToolCallStarted(_, name):
                self._end_thinking()
                gap = "\n" if pane.committed.strip() else ""
                pane.committed += f"{gap}{name} "
            case ToolCallDelta(_, text):
                pane.committed += text
            case ChatFinished(usage=usage):
                self.end = event
                pane.tokens, pane.passes = usage.completion_tokens, usage.passes

    def _end_thinking(self) -> None:
        if self._is_thinking:
            self._is_thinking = False
            self.pane.committed += "\n</think>\n\n"
