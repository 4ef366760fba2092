"""Things that training uses and things of the same kind that only held-out tasks use.

`words` parts single words by their hash. Sentences, schemas and kinds of item come in short lists,
where a share must be sure: here every fifth of a list, in the order of hashes, is held out.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

HELD_OUT_EVERY = 5
_ALTERNATIVES = re.compile(r"\[([^][]*)\]")


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

    def draw(self, rng: random.Random, held_out: bool) -> T:
        """Returns one thing of one part."""
        return rng.choice(self.held_out if held_out else self.train)


def lines(text: str) -> Parted[str]:
    """Returns the non-empty lines of `text`, parted."""
    return Parted.of(*filter(None, text.splitlines()))


def say(rng: random.Random, pattern: str, **slots: object) -> str:
    """Returns a sentence of `pattern`: `[a|b|]` becomes one of its alternatives, `{name}` a slot.

    A pattern with all its alternatives lies on one side of a split.
    """
    chosen = _ALTERNATIVES.sub(lambda match: rng.choice(match[1].split("|")), pattern)
    return chosen.format(**slots)


def capitalize(sentence: str) -> str:
    """Returns `sentence` with a capital first letter, the rest as it is."""
    return sentence[:1].upper() + sentence[1:]


def join_words(words: Iterable[str], last: str = " and ") -> str:
    """Returns `a, b and c`."""
    *head, tail = words
    return f"{', '.join(head)}{last}{tail}" if head else tail
