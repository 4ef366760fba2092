"""What a task is, how its item is kept to one split, and how a reply is judged."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Protocol

from clover.chat import Message

_SEEN_EVERY = 16  # one item in sixteen belongs to "seen" and is never trained on


class Check(Protocol):
    """Decides by meaning whether a reply is right."""

    def accepts(self, reply: Message) -> bool:
        """Returns whether `reply` is right.

        Raises:
            TaskError: The check has to run a program and there is no sandbox for it.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A conversation to continue, and the reference `reply`. Without a `check` only that is right."""

    family: str
    split: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    enable_thinking: bool
    reply: Message
    check: Check | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """What a family draws. `key` names the item itself, without the wording around it.

    `turns` are the messages between the request and the reply: earlier calls and their results. All
    drafts of one conversation share a key, so that a split never holds a part of it alone.
    """

    key: str
    request: str
    reply: Message
    turns: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    check: Check | None = None


def belongs_to_seen(key: str) -> bool:
    """Returns whether the item `key` is kept out of training, to test on known schemas."""
    digest = hashlib.blake2b(b"item:" + key.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % _SEEN_EVERY == 0


def check_reply(task: Task, reply: Message) -> bool:
    """Returns whether `reply` answers `task`, by the task's own check.

    Raises:
        TaskError: The check has to run a program and there is no sandbox for it.
    """
    return matches_reference(task, reply) if task.check is None else task.check.accepts(reply)


def matches_reference(task: Task, reply: Message) -> bool:
    """Returns whether `reply` is the reference: same calls (names, arguments, types), same text.

    The wording of thoughts is free; of text, only the white space around it.
    """
    return _calls(reply) == _calls(task.reply) and reply.content.strip() == (
        task.reply.content.strip()
    )


def _calls(message: Message) -> list[str]:
    # As JSON, because Python takes True for 1 and 1 for 1.0.
    return [
        json.dumps([call.name, dict(call.arguments)], sort_keys=True) for call in message.tool_calls
    ]
