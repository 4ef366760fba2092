"""What a task is, how its item is kept to one split, and how a reply is judged."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from clover.chat import Message

SPLITS = ("train", "seen", "heldout")
_SEEN_EVERY = 16  # one item in sixteen belongs to "seen" and is never trained on


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A conversation to continue, and the reference `reply`."""

    family: str
    split: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    enable_thinking: bool
    reply: Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """What a family draws. `key` names the item itself, without the wording around it."""

    key: str
    request: str
    reply: Message
    tools: tuple[dict[str, Any], ...] = ()


def belongs_to_seen(key: str) -> bool:
    """Returns whether the item `key` is kept out of training, to test on known schemas."""
    digest = hashlib.blake2b(b"item:" + key.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % _SEEN_EVERY == 0


def check_reply(task: Task, reply: Message) -> bool:
    """Returns whether `reply` answers `task`: same calls (names, arguments, types) and same text.

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
