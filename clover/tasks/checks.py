"""Checks of a reply that need no sandbox: calls, JSON, a number, a sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clover.chat import Message, ToolCall
from clover.tasks.json_values import is_same

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_WORD = re.compile(r"[\w.:'-]*\w")
_REFUSALS = {"no", "none", "not", "nothing", "cannot", "can't", "don't", "unable", "never"}


@dataclass(frozen=True, slots=True)
class Calls:
    """Exactly these calls, in any order, each argument of the type that its schema names.

    `schemas` are the parameters of each tool by name. Text beside the calls is free.
    """

    calls: tuple[ToolCall, ...]
    schemas: Mapping[str, Mapping[str, Any]]

    def accepts(self, reply: Message) -> bool:
        """Returns whether the reply makes the calls."""
        expected = list(self.calls)
        for call in reply.tool_calls:
            match = next((each for each in expected if self._is_same_call(call, each)), None)
            if match is None:
                return False
            expected.remove(match)
        return not expected

    def _is_same_call(self, call: ToolCall, expected: ToolCall) -> bool:
        return call.name == expected.name and is_same(
            dict(call.arguments), dict(expected.arguments), self.schemas[call.name]
        )


@dataclass(frozen=True, slots=True)
class JsonValue:
    """One JSON value and no other text: `value` as the schema types it."""

    value: Any
    schema: Mapping[str, Any]

    def accepts(self, reply: Message) -> bool:
        """Returns whether the reply's text is the value."""
        try:
            found = json.loads(reply.content)
        except (ValueError, RecursionError):
            return False
        return not reply.tool_calls and is_same(found, self.value, self.schema)


@dataclass(frozen=True, slots=True)
class NumberIn:
    """A text with one number, which is `value`; a unit or words may stand around it."""

    value: int

    def accepts(self, reply: Message) -> bool:
        """Returns whether the reply's only number is the value."""
        numbers = [float(number) for number in _NUMBER.findall(reply.content)]
        return not reply.tool_calls and numbers == [self.value]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sentence:
    """A text without a call, judged by what it has to say.

    Attributes:
        mentions: Words or numbers that must occur.
        avoids: Words or numbers that must not, such as the other values of a result.
        asks: Whether it must be a question, or must not be.
        refuses: Whether it must say no, or must not; a "none" that it has to mention says nothing.
    """

    mentions: Sequence[str] = ()
    avoids: Sequence[str] = ()
    asks: bool = False
    refuses: bool = False

    def accepts(self, reply: Message) -> bool:
        """Returns whether the reply says what it has to."""
        words = _words(reply.content)
        mentioned = {word for each in self.mentions for word in _words(each)}
        return (
            not reply.tool_calls
            and bool(words)
            and all(_words(each) <= words for each in self.mentions)
            and not any(_words(each) <= words for each in self.avoids)
            and self.asks == reply.content.rstrip().endswith("?")
            and self.refuses == bool((words - mentioned) & _REFUSALS)
        )


def _words(text: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(text.replace("’", "'"))}
