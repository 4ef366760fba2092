"""Where training documents come from: task families, or a file of chats.

A source is a pure function from an index to a document, so that a counter is all it takes to resume.
"""

from __future__ import annotations

import json
import mmap
import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from clover.chat import ChatTemplate, Message, render_reply
from clover.errors import CloverError, TrainingInputError
from clover.tasks import DEFAULT_WEIGHTS, FAMILIES, Task, make_task
from clover.tokenizer import Tokenizer

# Task seeds of one training run are run_seed * SEED_STRIDE + index: runs never share a task
SEED_STRIDE = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A prompt, ready for generation, and the reply that is to be learned."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    family: str = ""

    def __post_init__(self) -> None:
        """Checks that both parts exist: a reply's first token is predicted from its prompt."""
        if not self.prompt_ids or not self.response_ids:
            raise TrainingInputError(
                f"a document needs a prompt and a response, found {len(self.prompt_ids)} and "
                f"{len(self.response_ids)} tokens"
            )

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.prompt_ids) + len(self.response_ids)


class DocumentSource(Protocol):
    """An endless sequence of documents."""

    def document(self, index: int) -> Document:
        """Returns the same document whenever it is asked for the same index."""
        ...


class DocumentEncoder:
    """Chats to documents: rendered by a template, prompt and reply encoded apart.

    Apart, because generation encodes the prompt alone: a token that straddles both is never seen.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None = None) -> None:
        """Uses the built-in template by default."""
        self._tokenizer = tokenizer
        self._template = template or ChatTemplate()

    def encode(
        self,
        messages: Sequence[Message],
        reply: Message,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        enable_thinking: bool = True,
        family: str = "",
    ) -> Document:
        """Returns the document of a reply to `messages`. It ends in the turn's end token."""
        prompt = self._template.render(messages, tools=tools, enable_thinking=enable_thinking)
        response = render_reply(reply, enable_thinking=enable_thinking)
        return Document(
            prompt_ids=tuple(self._tokenizer.encode(prompt)),
            response_ids=tuple(self._tokenizer.encode(response)),
            family=family,
        )

    def encode_task(self, task: Task) -> Document:
        """Returns a task with its reference answer."""
        return self.encode(
            task.messages,
            task.reply,
            tools=task.tools,
            enable_thinking=task.enable_thinking,
            family=task.family,
        )


class TaskSource:
    """Documents of the task families, drawn by weight."""

    def __init__(
        self,
        encoder: DocumentEncoder,
        *,
        seed: int = 0,
        split: str = "train",
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """Draws families by `weights`, by default those of `clover.tasks`."""
        self._encoder = encoder
        self._seed = seed
        self._split = split
        self._families, self._weights = check_weights(weights)

    def task(self, index: int) -> Task:
        """Returns the task of an index."""
        draw = random.Random(f"{self._seed}/{index}")
        family = draw.choices(self._families, self._weights)[0]
        return make_task(family, self._seed * SEED_STRIDE + index, self._split)

    def document(self, index: int) -> Document:
        """Returns the document of an index."""
        return self._encoder.encode_task(self.task(index))


class ChatFileSource:
    """Documents of a JSONL file of chats, shuffled anew in each epoch.

    A line is {"messages": [...], "tools": [...]}, both as in the OpenAI API, and optionally
    "enable_thinking". Every assistant turn becomes a document of its own.

    The file may be larger than memory: kept is where each document lies, a few integers, and a
    document is read and tokenized when it is asked for.
    """

    def __init__(self, path: Path, encoder: DocumentEncoder, *, seed: int = 0) -> None:
        """Reads the whole file once, to find its chats and check their form.

        Raises:
            TrainingInputError: A line is not such a chat; the message names it.
        """
        self._path, self._encoder, self._seed = path, encoder, seed
        self._bytes = map_file(path)
        self._line_starts = array("Q")  # byte offsets
        self._lines, self._turns = array("L"), array("L")  # of each document
        start = 0
        while start < len(self._bytes):
            end = self._bytes.find(b"\n", start) + 1 or len(self._bytes)
            self._line_starts.append(start)
            self._add_line(len(self._line_starts) - 1)
            start = end
        if not self._lines:
            raise TrainingInputError(f"{path} holds no chat: expected one JSON object a line")
        self._order = lru_cache(maxsize=2)(self._shuffle)

    def __len__(self) -> int:
        """Number of documents of one epoch."""
        return len(self._lines)

    def document(self, index: int) -> Document:
        """Returns the document of an index.

        Raises:
            TrainingInputError: The chat cannot be rendered; the message names its line.
        """
        epoch, place = divmod(index, len(self))
        number = self._order(epoch)[place]
        line, turn = self._lines[number], self._turns[number]
        chat = _parse_chat(self._line(line), self._where(line))
        try:
            return self._encoder.encode(
                chat.messages[:turn],
                chat.messages[turn],
                tools=chat.tools,
                enable_thinking=chat.enable_thinking,
            )
        except CloverError as error:
            raise TrainingInputError(f"{self._where(line)}: {error}") from error

    def _add_line(self, line: int) -> None:
        text = self._line(line)
        if not text.strip():
            return
        chat = _parse_chat(text, self._where(line))
        turns = [i for i, message in enumerate(chat.messages) if message.role == "assistant"]
        if not turns:
            raise TrainingInputError(f"{self._where(line)}: no assistant turn to learn from")
        if turns[0] == 0:
            raise TrainingInputError(
                f"{self._where(line)}: expected at least one message before the assistant's first"
            )
        self._lines.extend([line] * len(turns))
        self._turns.extend(turns)

    def _line(self, line: int) -> bytes:
        starts = self._line_starts
        end = starts[line + 1] if line + 1 < len(starts) else self._bytes.find(b"\n", starts[line])
        return self._bytes[starts[line] : end if end >= 0 else len(self._bytes)]

    def _where(self, line: int) -> str:
        return f"{self._path}, line {line + 1}"

    def _shuffle(self, epoch: int) -> array[int]:
        order = array("L", range(len(self)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def check_weights(weights: Mapping[str, float] | None) -> tuple[list[str], list[float]]:
    """Returns families and their weights, by default those of `clover.tasks`.

    Raises:
        TrainingInputError: An unknown family, a negative weight, or no positive one.
    """
    weights = weights if weights is not None else DEFAULT_WEIGHTS
    unknown = sorted(set(weights) - set(FAMILIES))
    if unknown:
        raise TrainingInputError(
            f"unknown task families {unknown}: expected some of {list(FAMILIES)}"
        )
    if any(weight < 0 for weight in weights.values()) or not any(weights.values()):
        raise TrainingInputError(
            f"family weights must be >= 0 and not all 0, found {dict(weights)}"
        )
    # Sorted, so that equal weights in another order draw the same families
    families = sorted(weights)
    return families, [weights[family] for family in families]


def map_file(path: Path) -> mmap.mmap | bytes:
    """Returns a file's bytes, read from disk where they are looked at.

    Raises:
        TrainingInputError: The file cannot be read.
    """
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:  # an empty file cannot be mapped
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise TrainingInputError(f"cannot read training data {path}: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chat:
    messages: list[Message]
    tools: list[Any]
    enable_thinking: bool


def _parse_chat(line: bytes, where: str) -> _Chat:
    """Returns the chat of a line; `where` names the line in errors."""
    try:
        chat = json.loads(line)
    except ValueError as error:  # not JSON, or not UTF-8
        raise TrainingInputError(f"{where}: not JSON: {error}") from error
    messages, tools, enable_thinking = _check_chat(chat, where)
    try:
        parsed = [Message.from_dict(message) for message in messages]
    except CloverError as error:
        raise TrainingInputError(f"{where}: {error}") from error
    return _Chat(messages=parsed, tools=tools, enable_thinking=enable_thinking)


def _check_chat(chat: Any, where: str) -> tuple[list[Any], list[Any], bool]:
    """Returns messages, tools and whether to think."""
    if not isinstance(chat, dict):
        raise TrainingInputError(f"{where}: expected an object, found {type(chat).__name__}")
    unknown = sorted(set(chat) - {"messages", "tools", "enable_thinking"})
    if unknown:
        raise TrainingInputError(
            f"{where}: unknown keys {unknown}: expected messages, tools, enable_thinking"
        )
    messages, tools = chat.get("messages"), chat.get("tools") or []
    if not isinstance(messages, list) or not all(isinstance(item, dict) for item in messages):
        raise TrainingInputError(f"{where}: expected a list of objects at 'messages'")
    if not isinstance(tools, list) or not all(isinstance(item, dict) for item in tools):
        raise TrainingInputError(f"{where}: expected a list of objects at 'tools'")
    enable_thinking = chat.get("enable_thinking", True)
    if not isinstance(enable_thinking, bool):
        raise TrainingInputError(f"{where}: expected true or false at 'enable_thinking'")
    return messages, tools, enable_thinking
