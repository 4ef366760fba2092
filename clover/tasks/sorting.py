"""Sorting three to six words, whose first letters differ, or numbers of two digits."""

from __future__ import annotations

import random

from clover.chat import Message
from clover.tasks.task import Draft
from clover.tasks.words import OBJECTS, is_held_out

_COUNTS = (3, 3, 4, 4, 5, 6)

_WORDS = {
    False: (
        "Sort alphabetically: {items}",
        "Sort these words: {items}",
        "Put in alphabetical order: {items}",
        "Arrange from A to Z: {items}",
        "{items}\nSort these words from A to Z.",
        "What is the alphabetical order of {items}?",
    ),
    True: (
        "Sort in reverse alphabetical order: {items}",
        "Sort these words backwards: {items}",
        "Put in reverse order: {items}",
        "Arrange from Z to A: {items}",
        "{items}\nSort these words from Z to A.",
        "What is the reverse alphabetical order of {items}?",
    ),
}
_NUMBERS = {
    False: (
        "Sort ascending: {items}",
        "Sort these numbers: {items}",
        "Put in ascending order: {items}",
        "Arrange from smallest to largest: {items}",
        "{items}\nSort these numbers, smallest first.",
        "What is the ascending order of {items}?",
    ),
    True: (
        "Sort descending: {items}",
        "Sort these numbers backwards: {items}",
        "Put in descending order: {items}",
        "Arrange from largest to smallest: {items}",
        "{items}\nSort these numbers, largest first.",
        "What is the descending order of {items}?",
    ),
}


def draw(rng: random.Random, held_out: bool) -> Draft:
    """Returns things to sort. Held-out words are never trained on, nor are held-out number sets."""
    count, descending = rng.choice(_COUNTS), rng.random() < 0.5
    numeric = rng.random() < 0.5
    items = _numbers(rng, held_out, count) if numeric else _words(rng, held_out, count)
    form = rng.choice((_NUMBERS if numeric else _WORDS)[descending])
    ordered = sorted(items, reverse=descending)
    return Draft(
        key=f"{sorted(items)} {descending}",
        request=form.format(items=", ".join(items)),
        reply=Message("assistant", content=", ".join(ordered)),
    )


def _words(rng: random.Random, held_out: bool, count: int) -> list[str]:
    by_letter: dict[str, str] = {}
    while len(by_letter) < count:
        word = OBJECTS.draw(rng, held_out)
        by_letter.setdefault(word[0], word)
    return list(by_letter.values())


def _numbers(rng: random.Random, held_out: bool, count: int) -> list[str]:
    # All two-digit numbers are needed in training, so sets of them are held out instead.
    while True:
        numbers = [str(number) for number in rng.sample(range(10, 100), count)]
        if is_held_out(" ".join(sorted(numbers))) == held_out:
            return numbers
