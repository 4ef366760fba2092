"""Writes docs/tasks.md to standard output: `python -m clover.tasks > docs/tasks.md`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from importlib import import_module

from clover.chat import ChatTemplate, render_reply
from clover.tasks import FAMILIES, make_task, wordings_of
from clover.tasks.domains import DOMAINS

_SEED = 4
_INTRODUCTION = f"""\
# Tasks

This page is written by `python -m clover.tasks > docs/tasks.md`.

A task is a conversation to continue and a check of the reply. `make_task(family, seed, split)` is a
pure function; `check_reply(task, reply)` judges by meaning, `matches_reference(task, reply)` compares
with the reference text.

Splits: `train`; `seen`, other items of the same words and schemas; `heldout`, whose domains, wordings,
combinations and value words training never has. A word is held out by its hash (one in six), a
wording by its place in its list (one in five, rounded up), a domain by its noun ({len(DOMAINS.held_out)} of
{len(DOMAINS.train) + len(DOMAINS.held_out)}). As often as not a domain of `train` and `seen` is made up,
with invented words for noun, fields and options: schemas are to be read, not remembered. For the same
reason `train` alone makes up wordings and values: pieces of its wordings in other combinations, now and
then with a word between name and value that means nothing, and words spliced of its own
(`clover/tasks/made_up.py`). What a held-out wording says, articles and punctuation aside, is refused.

What is held out of a wording is the phrase. Its words occur in other wordings that the same family
trains on, because a model without pretraining cannot know what a word means that it has never met.
Greetings, thanks, the case of the first letter and the final stop vary on both sides of the split.

Checks of `python_function` and `terminal` run the reply in
[bubblewrap](https://github.com/containers/bubblewrap), without network and with limits on processor
time, wall time, memory, file size and processes (`clover/tasks/sandbox.py`). Without bubblewrap they
raise a `TaskError`; nothing ever runs outside.
"""


def main() -> None:
    """Writes the page."""
    sys.stdout.write(page())


def page() -> str:
    """Returns the page: every family with one example."""
    return "\n".join(
        [
            _INTRODUCTION,
            *_count_wordings(),
            *(line for family in FAMILIES for line in _describe(family)),
        ]
    )


def _count_wordings() -> Iterator[str]:
    yield "| family | lists | wordings of training | held out |"
    yield "|---|---|---|---|"
    for family in FAMILIES:
        lists = wordings_of(family).values()
        trained = sum(len(wordings.train) for wordings in lists)
        held_out = sum(len(wordings.held_out) for wordings in lists)
        yield f"| `{family}` | {len(lists)} | {trained} | {held_out} |"
    yield ""


def _describe(family: str) -> Iterator[str]:
    yield f"## {family}\n"
    yield f"{inspect.getdoc(import_module(f'clover.tasks.{family}'))}\n"
    task = make_task(family, _SEED, "train")
    prompt = ChatTemplate().render(
        task.messages, tools=task.tools, enable_thinking=task.enable_thinking
    )
    yield "Prompt:\n"
    yield f"~~~text\n{prompt.rstrip()}\n~~~\n"
    yield "Reference reply:\n"
    yield f"~~~text\n{render_reply(task.reply, enable_thinking=task.enable_thinking)}\n~~~\n"


if __name__ == "__main__":
    main()
