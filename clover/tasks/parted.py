"""Things that training uses and things of the same kind that only held-out tasks use.

`words` parts single words by their hash. Wordings and kinds of item come in short lists, where a
share must be sure: here every fifth of a list, in the order of hashes, is held out.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from clover.tasks.splits import Split

T = TypeVar("T")

HELD_OUT_EVERY = 5
_WORDINGS = Path(__file__).with_name("wordings")
_ALTERNATIVES = re.compile(r"\[([^][]*)\]")
# Manners that say nothing: both sides of a split have them
_MANNER_SHARE = 0.1
_OPENINGS = ("Hello. ", "Hi. ", "OK, ", "So, ", "Well, ")
_CLOSINGS = (" Thanks.", " Thank you.")


@dataclass(frozen=True, slots=True)
class Parted(Generic[T]):
    """A list in two parts that share nothing."""

    train: tuple[T, ...]
    held_out: tuple[T, ...]

    @classmethod
    def of(cls, *items: T) -> Parted[T]:
        """Returns `items` parted: one in five, rounded up, is held out, chosen by its hash."""
        ranked = sorted(items, key=lambda item: hashlib.blake2b(repr(item).encode()).digest())
        count = -(-len(items) // HELD_OUT_EVERY)
        return cls(train=tuple(ranked[count:]), held_out=tuple(ranked[:count]))

    def draw(self, rng: random.Random, split: Split) -> T:
        """Returns one thing of one part."""
        return rng.choice(self.held_out if split == "heldout" else self.train)


def read_wordings(name: str) -> dict[str, Parted[str]]:
    """Returns the lists of `wordings/NAME.txt` by name, each parted.

    A list is the lines below its heading, `# name: what they say`.
    """
    lists: dict[str, list[str]] = {}
    for line in (_WORDINGS / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            wordings = lists.setdefault(line[2:].partition(":")[0], [])
        elif line:
            wordings.append(line)
    return {name: Parted.of(*wordings) for name, wordings in lists.items()}


def say(rng: random.Random, pattern: str, **slots: object) -> str:
    """Returns a sentence of `pattern`: `[a|b|]` becomes one of its alternatives, `{name}` a slot.

    A pattern with all its alternatives lies on one side of a split.
    """
    return choose(rng, pattern).format(**slots)


def ask(rng: random.Random, pattern: str, **slots: object) -> str:
    """Returns a request of `pattern`, as `say` does, in one of the manners of `vary`."""
    return vary(rng, choose(rng, pattern)).format(**slots)


def vary(rng: random.Random, request: str) -> str:
    """Returns `request`, now and then with a word before it, thanks, other case, or other stop.

    What it means stays the same, and so do its slots: nothing is put behind one, where it would seem
    to be part of the value.
    """
    if rng.random() < _MANNER_SHARE:
        opening = rng.choice(_OPENINGS)
        request = opening + (uncapitalize(request) if opening.endswith(", ") else request)
    elif rng.random() < _MANNER_SHARE and not _is_about_me(request):
        request = request[:1].swapcase() + request[1:]
    if rng.random() < _MANNER_SHARE:
        if request.endswith("."):
            request = request[:-1]
        elif request[-1].isalpha():
            request += "."
    if rng.random() < _MANNER_SHARE and request[-1] in ".?":
        request += rng.choice(_CLOSINGS)
    return request


def choose(rng: random.Random, pattern: str) -> str:
    """Returns `pattern` with one of each of its alternatives."""
    return _ALTERNATIVES.sub(lambda match: rng.choice(match[1].split("|")), pattern)


def _is_about_me(sentence: str) -> bool:
    return sentence.startswith("I ")


def capitalize(sentence: str) -> str:
    """Returns `sentence` with a capital first letter, the rest as it is."""
    return sentence[:1].upper() + sentence[1:]


def uncapitalize(sentence: str) -> str:
    """Returns `sentence` with a small first letter, unless it begins with "I"."""
    return sentence if _is_about_me(sentence) else sentence[:1].lower() + sentence[1:]


def with_article(noun: str) -> str:
    """Returns `a bus` or `an alarm`."""
    return f"{'an' if noun[0] in 'aeio' else 'a'} {noun}"


def attach(phrase: str) -> str:
    """Returns `phrase` as it follows a word: behind a space, unless it begins with punctuation."""
    return phrase if phrase[0] in ",.:;" else f" {phrase}"


def join_words(words: Iterable[str], last: str = " and ") -> str:
    """Returns `a, b and c`."""
    *head, tail = words
    return f"{', '.join(head)}{last}{tail}" if head else tail
