"""Small word problems of one to three steps, with each step worked out as thoughts.

A problem is a story (who has how much, then what happens), a comparison, or a price. A sentence with
a number that does not count may stand in between.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from clover.chat import Message
from clover.tasks.checks import NumberIn
from clover.tasks.columns import work_out_step
from clover.tasks.numbers import draw_number
from clover.tasks.parted import ask, capitalize, read_wordings, say
from clover.tasks.splits import Split
from clover.tasks.task import Draft
from clover.tasks.words import PEOPLE, Pool

_DISTRACTOR_SHARE = 0.3
_THINGS = Pool.of("""
coins stamps books pens shells cups bottles stickers eggs tickets stones keys cookies oranges pears
plums balls dolls ropes nails bricks tiles spoons plates chairs hats socks shirts jars
candles letters ribbons buttons beads tulips mugs forks bulbs
""")

_WORDINGS = read_wordings("word_problem")
_EVENTS = {"+": "gain", "-": "lose", "*": "times"}

_Step = tuple[str, int]  # what is done to the result so far, and with which number


def draw(rng: random.Random, split: Split) -> Draft:
    """Returns a problem. Names, things, numbers of two digits and wordings may be held out."""
    text, start, steps = rng.choice(_SHAPES)(rng, split)
    thoughts, answer = [], start
    for sign, number in steps:
        thought, answer = work_out_step(answer, sign, number)
        thoughts.append(thought)
    return Draft(
        key=f"{start} {steps}",
        request=text,
        reply=Message("assistant", content=str(answer), thinking="\n".join(thoughts)),
        check=NumberIn(answer),
    )


def _story(rng: random.Random, split: Split) -> tuple[str, int, list[_Step]]:
    slots = _cast(rng, split)
    start = have = draw_number(rng, split, 2)
    sentences = [_tell(rng, split, "start", n=start, **slots)]
    steps: list[_Step] = []
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        sign, number = _draw_event(rng, split, have)
        steps.append((sign, number))
        have = {"+": have + number, "-": have - number, "*": have * number}[sign]
        sentences.append(_tell(rng, split, _EVENTS[sign], n=number, **slots))
    if rng.random() < _DISTRACTOR_SHARE:
        number = draw_number(rng, split, 2)
        # Not behind an event: "{n} more arrive" would then be about the others
        sentences.insert(0, _tell(rng, split, "distractor", n=number, **slots))
    divisors = [n for n in range(2, 10) if have % n == 0 and have > n]
    if divisors and rng.random() < 0.3:
        number = rng.choice(divisors)
        steps.append(("/", number))
        sentences.append(_ask(rng, split, "share", n=number, **slots))
    else:
        sentences.append(_ask(rng, split, "left", **slots))
    return " ".join(sentences), start, steps


def _draw_event(rng: random.Random, split: Split, have: int) -> _Step:
    """Returns what happens next to someone who has `have` things."""
    sign = rng.choice("++--*") if have < 200 else "-"
    if sign == "*":
        return sign, rng.randrange(2, 6)
    number = draw_number(rng, split, 2) if rng.random() < 0.7 else rng.randrange(2, 10)
    if sign == "-" and number < have:
        return sign, number
    return "+", number


def _compare(rng: random.Random, split: Split) -> tuple[str, int, list[_Step]]:
    a, b = draw_number(rng, split, 2), rng.randrange(2, 10)
    text = _ask(rng, split, "compare", a=a, b=b, **_cast(rng, split))
    return text, a, [("+", b), ("+", a)]


def _difference(rng: random.Random, split: Split) -> tuple[str, int, list[_Step]]:
    a, b = sorted((draw_number(rng, split, 2), draw_number(rng, split, 2)), reverse=True)
    text = _ask(rng, split, "difference", a=a, b=b, **_cast(rng, split))
    return text, a, [("-", b)]


def _price(rng: random.Random, split: Split) -> tuple[str, int, list[_Step]]:
    a, b = draw_number(rng, split, 2), rng.randrange(2, 10)
    text = _ask(rng, split, "price", a=a, b=b, **_cast(rng, split))
    return text, a, [("*", b)]


def _boxes(rng: random.Random, split: Split) -> tuple[str, int, list[_Step]]:
    a, b, c = draw_number(rng, split, 2), rng.randrange(2, 10), draw_number(rng, split, 2)
    text = _ask(rng, split, "boxes", a=a, b=b, c=c, **_cast(rng, split))
    return text, a, [("*", b), ("+", c)]


def _tell(rng: random.Random, split: Split, name: str, **slots: object) -> str:
    """Returns a sentence of the list `name`."""
    return capitalize(say(rng, _WORDINGS[name].draw(rng, split), **slots))


def _ask(rng: random.Random, split: Split, name: str, **slots: object) -> str:
    """Returns a question of the list `name`."""
    return ask(rng, _WORDINGS[name].draw(rng, split), **slots)


def _cast(rng: random.Random, split: Split) -> dict[str, str]:
    """Returns two people and two sorts of things for the slots of a wording."""
    p, q = PEOPLE.sample(rng, split, 2)
    things, others = rng.sample(_THINGS.words(split), 2)
    return {"p": p, "q": q, "things": things, "others": others}


_SHAPES: tuple[Callable[[random.Random, Split], tuple[str, int, list[_Step]]], ...] = (
    _story,
    _story,
    _story,
    _story,
    _compare,
    _difference,
    _price,
    _boxes,
)
