"""Numbers that lie on one side of a split."""

from __future__ import annotations

import random

from clover.tasks.splits import Split
from clover.tasks.words import is_held_out


def draw_number(rng: random.Random, split: Split, digits: int) -> int:
    """Returns a number of two or more digits that only one side uses.

    One-digit numbers belong to both: there are too few to learn their sums from a part.
    """
    while True:
        number = rng.randrange(10 ** (digits - 1), 10**digits)
        if is_held_out(str(number)) == (split == "heldout"):
            return number
