"""Reading values out of a short list of `key: value` lines."""

from __future__ import annotations

import random

from clover.chat import Message
from clover.tasks.parted import ask, join_words, read_wordings
from clover.tasks.splits import Split
from clover.tasks.task import Draft
from clover.tasks.words import COLORS, OBJECTS, PEOPLE, PLACES, Mix

_UNKNOWN = "unknown"
_MISSING = 0.08  # share of single questions whose key is not in the list

_NUMBERS = ("price", "age", "score", "code", "room", "size", "weight", "rank")
_WORD_VALUES: dict[str, Mix] = {
    "color": Mix(COLORS, synthetic=0.2),
    "city": PLACES,
    "owner": PEOPLE,
    "friend": PEOPLE,
    "gift": OBJECTS,
    "label": OBJECTS,
}
_KEYS = (PEOPLE, OBJECTS, PLACES)

_WORDINGS = read_wordings("lookup")


def draw(rng: random.Random, split: Split) -> Draft:
    """Returns a list and a question. Held out are wordings, keys and words as values."""
    count = rng.randint(4, 8)
    keys = rng.choice(_KEYS).sample(rng, split, count)
    what, values = _column(rng, split, count)
    table = dict(zip(keys, values, strict=True))
    asked = rng.sample(keys, rng.choice((1, 1, 1, 2, 2, 3)))
    if len(asked) == 1 and rng.random() < _MISSING:
        del table[asked[0]]
    lines = "\n".join(f"{key}: {value}" for key, value in table.items())
    question = ask(rng, _WORDINGS["ask"].draw(rng, split), what=what, key=join_words(asked))
    layout = _WORDINGS["layout"].draw(rng, split)
    return Draft(
        key=f"{sorted(table.items())} {asked}",
        request=layout.replace("<>", "\n").format(lines=lines, ask=question),
        reply=Message("assistant", content=_answer(table, asked)),
    )


def _column(rng: random.Random, split: Split, count: int) -> tuple[str, list[str]]:
    if rng.random() < 0.5:
        digits = rng.choice((2, 2, 3))
        numbers = [rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(count)]
        return rng.choice(_NUMBERS), [str(number) for number in numbers]
    what = rng.choice(tuple(_WORD_VALUES))
    return what, [_WORD_VALUES[what].draw(rng, split) for _ in range(count)]


def _answer(table: dict[str, str], asked: list[str]) -> str:
    return "\n".join(f"{key}: {table.get(key, _UNKNOWN)}" for key in asked)
