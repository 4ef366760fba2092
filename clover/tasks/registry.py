"""Families by name, and tasks drawn from them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

from clover.chat import Message
from clover.errors import TaskError
from clover.tasks import (
    arithmetic,
    expression,
    extraction,
    lookup,
    python_function,
    sorting,
    terminal,
    tool_call,
    tool_use,
    word_problem,
)
from clover.tasks.parted import Parted, read_wordings
from clover.tasks.splits import SPLITS, Split
from clover.tasks.task import Draft, Task, belongs_to_seen

_DRAW: dict[str, Callable[[random.Random, Split], Draft]] = {
    "tool_call": tool_call.draw,
    "arithmetic": arithmetic.draw,
    "lookup": lookup.draw,
    "sorting": sorting.draw,
    "tool_use": tool_use.draw,
    "expression": expression.draw,
    "word_problem": word_problem.draw,
    "extraction": extraction.draw,
    "python_function": python_function.draw,
    "terminal": terminal.draw,
}
# The files that the wordings of a family are read from
_WORDINGS: dict[str, tuple[str, ...]] = {
    "tool_call": ("tool_call", "fields"),
    "arithmetic": ("arithmetic",),
    "lookup": ("lookup",),
    "sorting": ("sorting",),
    "tool_use": ("tool_use", "tools", "fields"),
    "expression": ("expression",),
    "word_problem": ("word_problem",),
    "extraction": ("extraction", "fields"),
    "python_function": ("python_function",),
    "terminal": ("terminal",),
}
_THINKING = frozenset({"arithmetic", "expression", "word_problem"})

FAMILIES = tuple(_DRAW)
DEFAULT_WEIGHTS: Mapping[str, float] = {
    "tool_call": 4.0,
    "arithmetic": 2.0,
    "lookup": 2.0,
    "sorting": 2.0,
    "tool_use": 8.0,
    "expression": 2.0,
    "word_problem": 3.0,
    "extraction": 3.0,
    "python_function": 3.0,
    "terminal": 3.0,
}


def make_task(family: str, seed: int, split: str) -> Task:
    """Returns the task that `family`, `seed` and `split` name: always the same one.

    "train" and "seen" have the same schemas and never an item in common; the words and operands of
    "heldout" occur in neither.

    Raises:
        TaskError: An unknown family or split.
    """
    _check("family", family, FAMILIES)
    _check("split", split, SPLITS)
    side = SPLITS[SPLITS.index(split)]
    rng = random.Random(f"{family} {split} {seed}")
    while True:
        draft = _DRAW[family](rng, side)
        if side == "heldout" or belongs_to_seen(draft.key) == (side == "seen"):
            break
    return Task(
        family=family,
        split=split,
        messages=(Message("user", content=draft.request), *draft.turns),
        tools=draft.tools,
        enable_thinking=family in _THINKING,
        reply=draft.reply,
        check=draft.check,
    )


def sample_tasks(
    n: int,
    seed: int,
    split: str,
    families: Sequence[str] = FAMILIES,
    weights: Mapping[str, float] = DEFAULT_WEIGHTS,
) -> Iterator[Task]:
    """Yields `n` tasks, the families mixed by `weights`. Other seeds, other tasks.

    Raises:
        TaskError: An unknown family or split, or a family without a weight.
    """
    for family in families:
        _check("family", family, FAMILIES)
        _check("weighted family", family, tuple(weights))
    rng = random.Random(f"sample {split} {seed}")
    shares = list(itertools.accumulate(weights[family] for family in families))
    for _ in range(n):
        family = rng.choices(families, cum_weights=shares)[0]
        yield make_task(family, rng.getrandbits(48), split)


def wordings_of(family: str) -> dict[str, Parted[str]]:
    """Returns the lists of wordings that `family` draws from, by name."""
    return {
        name: wordings
        for file in _WORDINGS[family]
        for name, wordings in read_wordings(file).items()
        # Only there a record is searched for or changed; elsewhere values are only told
        if family == "tool_use" or name not in ("filters", "changes")
    }


def _check(what: str, found: str, known: Sequence[str]) -> None:
    if found not in known:
        raise TaskError(f"expected a {what} among {', '.join(known)}; found {found!r}")
