"""Procedural task families: a prompt, tools, a reference reply and a checker. No torch.

docs/tasks.md shows one example of each family. A task is a pure function of family, seed and split:

    train    what a model learns from
    seen     the same words and schemas, items that "train" never has
    heldout  nouns, parameter names, value words and operands that "train" never has

Whether a word is held out is decided by its hash alone (`words.is_held_out`), in every role; for
wordings, domains and combinations see `parted`. Of a wording it is the phrase that is held out, not
its words: those of `wordings/*.txt` occur in other phrases of training. To add a family, write a
module of its name with `draw(rng, split) -> Draft` and name it in `registry`.
"""

from __future__ import annotations

from clover.tasks.registry import (
    DEFAULT_WEIGHTS,
    FAMILIES,
    make_task,
    sample_tasks,
    wordings_of,
)
from clover.tasks.splits import SPLITS
from clover.tasks.task import Check, Task, check_reply, matches_reference

__all__ = [
    "DEFAULT_WEIGHTS",
    "FAMILIES",
    "SPLITS",
    "Check",
    "Task",
    "check_reply",
    "make_task",
    "matches_reference",
    "sample_tasks",
    "wordings_of",
]
