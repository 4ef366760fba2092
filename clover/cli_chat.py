"""The chat of the command line: turn after turn, until the user leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import typer
from rich.console import Console

from clover.chat import Message
from clover.cli_display import Screen, summary
from clover.cli_reply import Question, Reply, Writer, write
from clover.errors import CloverError, PromptError

HELP = "/thinking switches thinking, /reset forgets the chat, /exit leaves; Ctrl-C stops a reply."


class Chat:
    """A conversation at the terminal, or one line a turn from a pipe."""

    def __init__(
        self,
        writer: Writer,
        *,
        system: str | None,
        tools: Sequence[Mapping[str, Any]],
        enable_thinking: bool,
        out: Console,
        notes: Console,
    ) -> None:
        """Replies go to `out`, everything else to `notes`."""
        self._writer = writer
        self._start: tuple[Message, ...] = (Message("system", content=system),) if system else ()
        self._messages: tuple[Message, ...] = self._start
        self._tools = tools
        self._enable_thinking = enable_thinking
        self._notes = notes
        self._is_live = out.is_terminal
        self._screen = Screen(out) if self._is_live else None

    def run(self) -> None:
        """Reads turns and answers them, until the input ends or asks to leave."""
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
            self._notes.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

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
            self._notes.print(f"clover: {error}", markup=False, highlight=False, soft_wrap=True)
        except EOFError:  # no results: the next read ends the chat
            return

    def _reply(self) -> Message:
        """Writes one reply; Ctrl-C keeps what there is of it, without its tool calls."""
        question = Question(
            messages=self._messages, tools=self._tools, enable_thinking=self._enable_thinking
        )
        reply = Reply(self._writer, question)
        try:
            write([reply], self._screen)
            message = reply.message
        except KeyboardInterrupt:
            self._note(f"{reply.text}\nstopped")
            message = Message("assistant", content=reply.message.content)
        if not self._is_live:
            typer.echo(reply.answer)  # rich would expand tabs and drop control characters
        self._notes.print(
            summary(reply.pane), style="dim", markup=False, highlight=False, soft_wrap=True
        )
        self._messages += (message,)
        return message
