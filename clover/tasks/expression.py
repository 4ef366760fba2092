"""Arithmetic of two operations, in the order that brackets and precedence ask for."""

from __future__ import annotations

import random

from clover.chat import Message
from clover.tasks.checks import NumberIn
from clover.tasks.columns import work_out_step
from clover.tasks.numbers import draw_number
from clover.tasks.parted import ask, read_wordings
from clover.tasks.splits import Split
from clover.tasks.task import Draft

_ASK = read_wordings("expression")["ask"]


def draw(rng: random.Random, split: Split) -> Draft:
    """Returns an expression. Held-out operands of two digits are never used in training."""
    written, steps = rng.choice(_SHAPES)(rng, split)
    thoughts, answer = [], 0
    for a, sign, b in steps:
        # None stands for the result of the step before
        left, right = (answer if each is None else each for each in (a, b))
        thought, answer = work_out_step(left, sign, right)
        thoughts.append(thought)
    return Draft(
        key=written,
        request=ask(rng, _ASK.draw(rng, split), sum=written),
        reply=Message("assistant", content=str(answer), thinking="\n".join(thoughts)),
        check=NumberIn(answer),
    )


_Steps = list[tuple[int | None, str, int | None]]


def _from_the_left(rng: random.Random, split: Split) -> tuple[str, _Steps]:
    a, b = draw_number(rng, split, 2), draw_number(rng, split, 2)
    c = rng.randrange(2, min(a + b, 99))
    return f"{a} + {b} - {c}", [(a, "+", b), (None, "-", c)]


def _product_first(rng: random.Random, split: Split) -> tuple[str, _Steps]:
    a, b, c = draw_number(rng, split, 2), draw_number(rng, split, 2), rng.randrange(2, 10)
    if rng.random() < 0.5:
        return f"{a} * {c} + {b}", [(a, "*", c), (None, "+", b)]
    return f"{b} + {a} * {c}", [(a, "*", c), (b, "+", None)]


def _brackets_first(rng: random.Random, split: Split) -> tuple[str, _Steps]:
    a, b = sorted((draw_number(rng, split, 2), draw_number(rng, split, 2)), reverse=True)
    sign, c = rng.choice("+-"), rng.randrange(2, 10)
    return f"({a} {sign} {b}) * {c}", [(a, sign, b), (None, "*", c)]


def _quotient_first(rng: random.Random, split: Split) -> tuple[str, _Steps]:
    b, c = draw_number(rng, split, 2), rng.randrange(2, 10)
    a = c * rng.randrange(3, 60)
    return f"{a} / {c} + {b}", [(a, "/", c), (None, "+", b)]


_SHAPES = (_from_the_left, _product_first, _brackets_first, _quotient_first)
