"""Where training documents come from: task families, or a file of chats.

A source is a pure function from an index to a document, so that a counter is all it takes to resume.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from clover.chat import ChatTemplate, Message, render_reply
from clover.errors import CloverError, TrainingError
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
            raise TrainingError(
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
    """

    def __init__(self, path: Path, encoder: DocumentEncoder, *, seed: int = 0) -> None:
        """Reads the whole file.

        Raises:
            TrainingError: A line is not such a chat; the message names it.
        """
        self._documents = [
            document
            for number, line in enumerate(read_lines(path), start=1)
            if line.strip()
            for document in _encode_line(line, f"{path}, line {number}", encoder)
        ]
        if not self._documents:
            raise TrainingError(f"{path} holds no chat: expected one JSON object a line")
        self._seed = seed
        self._order = lru_cache(maxsize=2)(self._shuffle)

    def __len__(self) -> int:
        """Number of documents of one epoch."""
        return len(self._documents)

    def document(self, index: int) -> Document:
        """Returns the document of an index."""
        epoch, place = divmod(index, len(self._documents))
        return self._documents[self._order(epoch)[place]]

    def _shuffle(self, epoch: int) -> list[int]:
        order = list(range(len(self._documents)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def check_weights(weights: Mapping[str, float] | None) -> tuple[list[str], list[float]]:
    """Returns families and their weights, by default those of `clover.tasks`.

    Raises:
        TrainingError: An unknown family, a negative weight, or no positive one.
    """
    weights = weights if weights is not None else DEFAULT_WEIGHTS
    unknown = sorted(set(weights) - set(FAMILIES))
    if unknown:
        raise TrainingError(f"unknown task families {unknown}: expected some of {list(FAMILIES)}")
    if any(weight < 0 for weight in weights.values()) or not any(weights.values()):
        raise TrainingError(f"family weights must be >= 0 and not all 0, found {dict(weights)}")
    # Sorted, so that equal weights in another order draw the same families
    families = sorted(weights)
    return families, [weights[family] for family in families]


def read_lines(path: Path) -> list[str]:
    """Returns the lines of a text file.

    Raises:
        TrainingError: The file cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingError(f"cannot read training data {path}: {error}") from error


def _encode_line(line: str, where: str, encoder: DocumentEncoder) -> Iterator[Document]:
    """Yields a document for each assistant turn of a chat."""
    try:
        chat = json.loads(line)
    except json.JSONDecodeError as error:
        raise TrainingError(f"{where}: not JSON: {error}") from error
    messages, tools, enable_thinking = _check_chat(chat, where)
    try:
        turns = [Message.from_dict(message) for message in messages]
        for number, turn in enumerate(turns):
            if turn.role == "assistant":
                yield encoder.encode(
                    turns[:number], turn, tools=tools, enable_thinking=enable_thinking
                )
    except CloverError as error:
        raise TrainingError(f"{where}: {error}") from error
    if not any(turn.role == "assistant" for turn in turns):
        raise TrainingError(f"{where}: no assistant turn to learn from")


def _check_chat(chat: Any, where: str) -> tuple[list[Any], list[Any], bool]:
    """Returns messages, tools and whether to think."""
    if not isinstance(chat, dict):
        raise TrainingError(f"{where}: expected an object, found {type(chat).__name__}")
    unknown = sorted(set(chat) - {"messages", "tools", "enable_thinking"})
    if unknown:
        raise TrainingError(
            f"{where}: unknown keys {unknown}: expected messages, tools, enable_thinking"
        )
    messages, tools = chat.get("messages"), chat.get("tools") or []
    if not isinstance(messages, list) or not all(isinstance(item, dict) for item in messages):
        raise TrainingError(f"{where}: expected a list of objects at 'messages'")
    if not isinstance(tools, list) or not all(isinstance(item, dict) for item in tools):
        raise TrainingError(f"{where}: expected a list of objects at 'tools'")
    enable_thinking = chat.get("enable_thinking", True)
    if not isinstance(enable_thinking, bool):
        raise TrainingError(f"{where}: expected true or false at 'enable_thinking'")
    return messages, tools, enable_thinking
