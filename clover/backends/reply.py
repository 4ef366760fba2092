"""Generated text, as it arrives, to chat events. No tensors."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from clover.backends.base import (
    ChatDeltaEvent,
    ContentDelta,
    ScoredToken,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallStarted,
)
from clover.chat import ChatDelta, ChatParser, Message, ToolCall


class ReplyReader:
    """Reads the text of one answer: stop strings first, then the chat format.

    Text that a stop string could still take back is held back. A tool call is given out once it is
    whole, as one that turns out malformed is content.
    """

    def __init__(
        self,
        *,
        starts_in_thinking: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        stop: Sequence[str] = (),
        is_raw: bool = False,
    ) -> None:
        """Starts an answer.

        Args:
            starts_in_thinking: Whether the prompt ends inside `<think>`.
            tools: Those that may be called.
            stop: Strings that end the text.
            is_raw: The text is content as it is, whatever tags it holds.

        Raises:
            PromptError: A tool has no name, or its parameters are not a JSON schema.
        """
        self.text = ""  # all of it, a stop string included
        self.content_tokens: list[ScoredToken] = []  # those that wrote the content so far
        self._tokens: deque[ScoredToken] = deque()  # later ones
        self._parser = ChatParser(starts_in_thinking=starts_in_thinking, tools=tools)
        self._stop = tuple(stop)
        self._num_read = 0  # characters of the text that have been parsed
        self._num_calls = 0
        self._is_raw = is_raw

    @property
    def message(self) -> Message:
        """The assistant message so far."""
        if self._is_raw:
            return Message("assistant", self.text[: self._num_read])
        return self._parser.message

    @property
    def held(self) -> str:
        """The text that no event has given out yet: what a call, a tag or a stop string began."""
        return ("" if self._is_raw else self._parser.held) + self.text[self._num_read :]

    def push(self, text: str, tokens: Sequence[ScoredToken] = ()) -> list[ChatDeltaEvent]:
        """Returns what became certain with the next piece of text.

        Args:
            text: Goes on where the last piece ended.
            tokens: That wrote it, where log-probabilities are wanted.
        """
        self.text += text
        self._tokens += tokens
        return self._read_up_to(_certain_length(self.text, self._num_read, self._stop))

    def finish(self, length: int) -> list[ChatDeltaEvent]:
        """Returns what was held back.

        Args:
            length: Characters of the text that count: all, or those before a stop string.
        """
        events = self._read_up_to(length)
        if not self._is_raw:
            events += self._convert(self._parser.finish())
        return events

    def _read_up_to(self, end: int) -> list[ChatDeltaEvent]:
        start, self._num_read = self._num_read, max(end, self._num_read)
        text = self.text[start:end]
        if self._is_raw:
            return [self._add_tokens(text, (start, end))] if text else []
        return self._convert(self._parser.push(text))

    def _convert(self, deltas: Sequence[ChatDelta]) -> list[ChatDeltaEvent]:
        events: list[ChatDeltaEvent] = []
        for delta in deltas:
            match delta.kind:
                case "thinking":
                    events.append(ThinkingDelta(delta.text))
                case "content":
                    assert delta.span is not None
                    events.append(self._add_tokens(delta.text, delta.span))
                case "call":
                    assert delta.call is not None
                    arguments = write_arguments(delta.call)
                    events.append(ToolCallStarted(self._num_calls, delta.call.name))
                    events.append(ToolCallDelta(self._num_calls, arguments))
                    self._num_calls += 1
        return events

    def _add_tokens(self, text: str, span: tuple[int, int]) -> ContentDelta:
        """Returns the content that stands at `span` of the text, and its tokens."""
        start, end = span
        tokens = []
        while self._tokens and self._tokens[0].span[0] < end:
            token = self._tokens.popleft()
            if token.span[1] > start:
                tokens.append(token)
        self.content_tokens += tokens
        return ContentDelta(text, tuple(tokens))


def write_arguments(call: ToolCall) -> str:
    """Returns a call's arguments as JSON text."""
    return json.dumps(dict(call.arguments), ensure_ascii=False)


def find_stop(text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """Returns where the first stop string begins, and which it is; None without one."""
    found = [(text.find(string), -len(string), string) for string in stop if string in text]
    if not found:
        return None
    start, _, string = min(found)
    return start, string


def _certain_length(text: str, start: int, stop: Sequence[str]) -> int:
    """Returns how many characters no stop string, whole or begun, can take back.

    The first `start` are known to be certain.
    """
    found = find_stop(text[start:], stop)
    if found:
        return start + found[0]
    longest = max(map(len, stop), default=1) - 1  # of a stop string that has only begun
    for at in range(max(start, len(text) - longest), len(text)):
        if any(string.startswith(text[at:]) for string in stop):
            return at
    return len(text)
