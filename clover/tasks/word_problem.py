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
from clover.tasks.parted import Parted, lines, say
from clover.tasks.task import Draft
from clover.tasks.words import PEOPLE, Pool

_DISTRACTOR_SHARE = 0.3
_THINGS = Pool.of("""
coins stamps books pens shells cups bottles stickers eggs tickets stones keys cookies oranges pears
plums balls dolls ropes nails bricks tiles spoons plates chairs hats socks shirts boxes
candles letters ribbons buttons beads tulips mugs forks bulbs
""")

_START = lines("""\
{p} has {n} {things}.
{p} [starts|begins] with {n} {things}.
There are {n} {things} [in the bag|on the shelf] of {p}.
At first {p} owns {n} {things}.
{p} keeps {n} {things} [at home|in a drawer].
In the morning {p} [counts|has] {n} {things}.
""")
_GAIN = lines("""\
[Then |]{p} buys {n} more.
{q} gives {p} {n} more.
{p} finds {n} [more|others].
[Later |]{p} gets {n} from {q}.
{n} more [arrive|are added].
As a gift {p} receives {n}.
""")
_LOSE = lines("""\
[Then |]{p} gives {n} to {q}.
{p} loses {n}.
[Later |]{p} sells {n}.
{n} of them [break|are stolen].
{q} takes {n} away.
{p} throws {n} out.
""")
_TIMES = lines("""\
[Then|Later] {p} has {n} times as many.
The number grows {n} times as large.
{q} makes it {n} times as many.
Now there are {n} times as many.
""")
_SHARE = lines("""\
{p} shares them equally among {n} friends. How many does each get?
{n} people split them equally. How many has each?
They go into {n} equal piles. How many are in each pile?
{p} puts the same number into each of {n} bags. How many are in a bag?
""")
_LEFT = lines("""\
How many {things} does {p} have [now|in the end]?
How many {things} are there now?
What is the number of {things} [now|at the end]?
[Count|Give] the {things} that {p} has now.
How many [has {p}|are with {p}] in the end?
""")
_DISTRACTORS = lines("""\
{q} has {n} {others}.
{q} is {n} years old.
It is {n} minutes past noon.
[The house|The store] is number {n}.
{n} people walk by.
There are also {n} {others}.
""")
_COMPARE = lines("""\
{p} has {a} {things}. {q} has {b} more than {p}. How many do they have together?
{q} has {b} more {things} than {p}, who has {a}. How many have both together?
{p} owns {a} {things} and {q} owns {b} more than that. How many are there in all?
Of {things}, {p} has {a} and {q} has {b} more than {p}. What is the total?
""")
_DIFFERENCE = lines("""\
{p} has {a} {things} and {q} has {b}. How many more does {p} have?
{q} has {b} {things}, {p} has {a}. How many more has {p}?
There are {a} {things} with {p} and {b} with {q}. What is the difference?
How many more {things} has {p} with {a} than {q} with {b}?
""")
_PRICE = lines("""\
One of the {things} costs {a} dollars. What do {b} of them cost?
{p} buys {b} {things} for {a} dollars each. How much is that?
The {things} cost {a} dollars each. How much does {p} pay for {b}?
At {a} dollars each, what is the price of {b} {things}?
""")
_BOXES = lines("""\
{p} has {b} boxes with {a} {things} each and {c} loose ones. How many are there?
There are {c} loose {things} and {b} boxes of {a}. How many in all?
Each of {b} boxes holds {a} {things}. {p} also has {c} more. What is the total?
{p} packs {a} {things} into each of {b} boxes, and {c} are left. How many were there?
""")

_Step = tuple[str, int]  # what is done to the result so far, and with which number


def draw(rng: random.Random, held_out: bool) -> Draft:
    """Returns a problem. Names, things, numbers of two digits and wordings may be held out."""
    text, start, steps = rng.choice(_SHAPES)(rng, held_out)
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


def _story(rng: random.Random, held_out: bool) -> tuple[str, int, list[_Step]]:
    slots = _cast(rng, held_out)
    start = have = draw_number(rng, held_out, 2)
    sentences = [say(rng, _START.draw(rng, held_out), n=start, **slots)]
    steps: list[_Step] = []
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        sign, number, wording = _draw_event(rng, held_out, have)
        steps.append((sign, number))
        have = {"+": have + number, "-": have - number, "*": have * number}[sign]
        sentences.append(say(rng, wording.draw(rng, held_out), n=number, **slots))
    if rng.random() < _DISTRACTOR_SHARE:
        sentence = say(
            rng, _DISTRACTORS.draw(rng, held_out), n=draw_number(rng, held_out, 2), **slots
        )
        # Not behind an event: "{n} more arrive" would then be about the others
        sentences.insert(0, sentence)
    divisors = [n for n in range(2, 10) if have % n == 0 and have > n]
    if divisors and rng.random() < 0.3:
        number = rng.choice(divisors)
        steps.append(("/", number))
        sentences.append(say(rng, _SHARE.draw(rng, held_out), n=number, **slots))
    else:
        sentences.append(say(rng, _LEFT.draw(rng, held_out), **slots))
    return " ".join(sentences), start, steps


def _draw_event(rng: random.Random, held_out: bool, have: int) -> tuple[str, int, Parted[str]]:
    """Returns what happens next to someone who has `have` things."""
    sign = rng.choice("++--*") if have < 200 else "-"
    if sign == "*":
        return sign, rng.randrange(2, 6), _TIMES
    number = draw_number(rng, held_out, 2) if rng.random() < 0.7 else rng.randrange(2, 10)
    if sign == "-" and number < have:
        return sign, number, _LOSE
    return "+", number, _GAIN


def _compare(rng: random.Random, held_out: bool) -> tuple[str, int, list[_Step]]:
    a, b = draw_number(rng, held_out, 2), rng.randrange(2, 10)
    text = say(rng, _COMPARE.draw(rng, held_out), a=a, b=b, **_cast(rng, held_out))
    return text, a, [("+", b), ("+", a)]


def _difference(rng: random.Random, held_out: bool) -> tuple[str, int, list[_Step]]:
    a, b = sorted((draw_number(rng, held_out, 2), draw_number(rng, held_out, 2)), reverse=True)
    text = say(rng, _DIFFERENCE.draw(rng, held_out), a=a, b=b, **_cast(rng, held_out))
    return text, a, [("-", b)]


def _price(rng: random.Random, held_out: bool) -> tuple[str, int, list[_Step]]:
    a, b = draw_number(rng, held_out, 2), rng.randrange(2, 10)
    text = say(rng, _PRICE.draw(rng, held_out), a=a, b=b, **_cast(rng, held_out))
    return text, a, [("*", b)]


def _boxes(rng: random.Random, held_out: bool) -> tuple[str, int, list[_Step]]:
    a, b, c = draw_number(rng, held_out, 2), rng.randrange(2, 10), draw_number(rng, held_out, 2)
    text = say(rng, _BOXES.draw(rng, held_out), a=a, b=b, c=c, **_cast(rng, held_out))
    return text, a, [("*", b), ("+", c)]


def _cast(rng: random.Random, held_out: bool) -> dict[str, str]:
    """Returns two people and two sorts of things for the slots of a wording."""
    p, q = PEOPLE.sample(rng, held_out, 2)
    things, others = rng.sample(_THINGS.words(held_out), 2)
    return {"p": p, "q": q, "things": things, "others": others}


_SHAPES: tuple[Callable[[random.Random, bool], tuple[str, int, list[_Step]]], ...] = (
    _story,
    _story,
    _story,
    _story,
    _compare,
    _difference,
    _price,
    _boxes,
)
