"""Trains clover-nano's tokenizer: `python -m recipes.nano_tokenizer OUT`. Always the same bytes.

Byte-level BPE over pieces that make copying easy for a small model: a word is the same tokens
wherever it stands, because spaces and punctuation never join it, and digits stand alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from clover.chat import ChatTemplate, render_reply
from clover.tasks import sample_tasks

VOCAB_SIZE = 1024
NUM_TASKS = 20_000
SEED = 20

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|mask|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "</tools>",
)

_SCHEMA_WORDS = (
    "type|function|name|description|parameters|object|properties|required|enum"
    "|string|integer|number|boolean|array|items"
)
# The fixed parts of a JSON schema may become single tokens: they say nothing and are long.
_SCHEMA = rf'"?(?:[{{}}\[\]:, ]*"(?:{_SCHEMA_WORDS})"(?=[:,}}\]]))+[{{}}\[\]:, ]*"?\n*'
_PIECES = rf"{_SCHEMA}|\p{{L}}+|\p{{N}}|[^\p{{L}}\p{{N}}]+?(?={_SCHEMA})|[^\p{{L}}\p{{N}}]+"


def train_tokenizer(vocab_size: int = VOCAB_SIZE, num_tasks: int = NUM_TASKS) -> Tokenizer:
    """Returns the tokenizer trained on the chats of `num_tasks` training tasks."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_chats(num_tasks), trainer)
    return tokenizer


def _chats(num_tasks: int) -> Iterator[str]:
    """Yields training text between special tokens, which are never part of a piece."""
    template = ChatTemplate()
    for task in sample_tasks(num_tasks, SEED, "train"):
        prompt = template.render(
            task.messages, tools=task.tools, enable_thinking=task.enable_thinking
        )
        text = prompt + render_reply(task.reply, enable_thinking=task.enable_thinking)
        for token in SPECIAL_TOKENS:
            text = text.replace(token, "\0")
        yield from filter(None, text.split("\0"))


def main() -> None:
    """Writes `OUT/tokenizer.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder for tokenizer.json")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    train_tokenizer().save(str(out / "tokenizer.json"), pretty=False)


if __name__ == "__main__":
    main()
