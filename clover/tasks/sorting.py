"""Sorting three to six words, whose first letters differ, or numbers of two digits."""

from __future__ import annotations

import random

from clover.chat import Message
from clover.tasks.parted import ask, read_wordings
from clover.tasks.splits import Split
from clover.tasks.task import Draft
from clover.tasks.words import OBJECTS, is_held_out

_COUNTS = (3, 3, 4, 4, 5, 6)

_WORDINGS = read_wordings("sorting")


def draw(rng: random.Random, split: Split) -> Draft:
    """Returns things to sort. Held out are wordings, words and sets of numbers."""
    count, descending = rng.choice(_COUNTS), rng.random() < 0.5
    numeric = rng.random() < 0.5
    items = _numbers(rng, split, count) if numeric else _words(rng, split, count)
    wordings = _WORDINGS[("numbers" if numeric else "words") + ("_reversed" if descending else "")]
    pattern = wordings.draw(rng, split).replace("<>", "\n")
    ordered = sorted(items, reverse=descending)
    return Draft(
        key=f"{sorted(items)} {descending}",
        request=ask(rng, pattern, items=", ".join(items)),
        reply=Message("assistant", content=", ".join(ordered)),
    )


def _words(rng: random.Random, split: Split, count: int) -> list[str]:
    by_letter: dict[str, str] = {}
    while len(by_letter) < count:
        word = OBJECTS.draw(rng, split)
        by_letter.setdefault(word[0], word)
    return list(by_letter.values())


def _numbers(rng: random.Random, split: Split, count: int) -> list[str]:
    # All two-digit numbers are needed in training, so sets of them are held out instead.
    while True:
        numbers = [str(number) for number in rng.sample(range(10, 100), count)]
        if is_held_out(" ".join(sorted(numbers))) == (split == "heldout"):
            return numbers
