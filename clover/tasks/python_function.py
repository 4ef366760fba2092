"""Small Python functions from a description, judged by running tests.

A function filters a list, changes what is left and reduces it. Which filter meets which change and
which reduction is parted: some combinations are held out.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clover.chat import Message
from clover.tasks.parted import Parted, ask, attach, read_wordings
from clover.tasks.sandbox import run_sandboxed
from clover.tasks.splits import Split
from clover.tasks.task import Draft
from clover.tasks.words import OBJECTS

_PROGRAM = Path(__file__).with_name("sandboxed") / "call_function.py"
_FENCE = re.compile(r"```(?:python)?\n(.*?)\n?```", re.DOTALL)
_NUM_TESTS = 6
_LETTERS = "aeiorstln"


@dataclass(frozen=True, slots=True)
class FunctionTests:
    """Calls of the function and what they have to return, types included. A fence is allowed."""

    name: str
    inputs: Sequence[Sequence[Any]]
    expected: Sequence[Any]

    def accepts(self, reply: Message) -> bool:
        """Returns whether the reply's code passes every test.

        Raises:
            TaskError: There is no sandbox to run it in.
        """
        fenced = _FENCE.search(reply.content)
        request = {
            "source": fenced[1] if fenced else reply.content,
            "name": self.name,
            "inputs": self.inputs,
        }
        results = None if reply.tool_calls else run_sandboxed(_PROGRAM, request)
        # As JSON, because Python takes True for 1 and 1 for 1.0
        return json.dumps(results) == json.dumps(self.expected)


@dataclass(frozen=True, slots=True)
class _Part:
    """A filter or a change: in words, as code of one element `x`, and what it does.

    `{k}` is a number, or a letter in quotes where `lettered`.
    """

    words: str
    code: str
    run: Callable[[Any, Any], Any]
    lettered: bool = False


@dataclass(frozen=True, slots=True)
class _Reduction:
    words: str
    code: str  # `{each}` is a generator expression without its brackets
    run: Callable[[list[Any]], Any]


_NUMBER_FILTERS = (
    _Part("{things}", "", lambda x, k: True),
    _Part("even {things}", "x % 2 == 0", lambda x, k: x % 2 == 0),
    _Part("odd {things}", "x % 2 == 1", lambda x, k: x % 2 == 1),
    _Part("positive {things}", "x > 0", lambda x, k: x > 0),
    _Part("negative {things}", "x < 0", lambda x, k: x < 0),
    _Part("{things} above {k}", "x > {k}", lambda x, k: x > k),
    _Part("{things} below {k}", "x < {k}", lambda x, k: x < k),
    _Part("{things} divisible by {k}", "x % {k} == 0", lambda x, k: x % k == 0),
    _Part("{things} other than {k}", "x != {k}", lambda x, k: x != k),
)
_NUMBER_CHANGES = (
    _Part("", "x", lambda x, k: x),
    _Part("squared", "x * x", lambda x, k: x * x),
    _Part("doubled", "x * 2", lambda x, k: x * 2),
    _Part("times {k}", "x * {k}", lambda x, k: x * k),
    _Part("plus {k}", "x + {k}", lambda x, k: x + k),
    _Part("minus {k}", "x - {k}", lambda x, k: x - k),
)
_NUMBER_REDUCTIONS = (
    _Reduction("the list of", "[{each}]", lambda xs: xs),
    _Reduction("the sum of", "sum({each})", sum),
    _Reduction("the maximum, or 0, of", "max(({each}), default=0)", lambda xs: max(xs, default=0)),
    _Reduction("the minimum, or 0, of", "min(({each}), default=0)", lambda xs: min(xs, default=0)),
    _Reduction("the sorted list of", "sorted({each})", sorted),
    _Reduction("the number of different values of", "len(set({each}))", lambda xs: len(set(xs))),
    _Reduction("the reversed list of", "[{each}][::-1]", lambda xs: xs[::-1]),
)
_WORD_FILTERS = (
    _Part("{things}", "", lambda x, k: True),
    _Part("{things} with more than {k} letters", "len(x) > {k}", lambda x, k: len(x) > k),
    _Part("{things} with {k} letters", "len(x) == {k}", lambda x, k: len(x) == k),
    _Part("{things} with {k}", "{k} in x", lambda x, k: k in x, lettered=True),
    _Part("{things} without {k}", "{k} not in x", lambda x, k: k not in x, lettered=True),
    _Part("{things} that end in {k}", "x.endswith({k})", lambda x, k: x.endswith(k), True),
)
_WORD_CHANGES = (
    _Part("", "x", lambda x, k: x),
    _Part("in capitals", "x.upper()", lambda x, k: x.upper()),
    _Part("spelled backwards", "x[::-1]", lambda x, k: x[::-1]),
    _Part("cut to the first letter", "x[0]", lambda x, k: x[0]),
    _Part("written twice", "x * 2", lambda x, k: x * 2),
    _Part("with {k} at the end", "x + {k}", lambda x, k: x + k, lettered=True),
)
_WORD_REDUCTIONS = (
    _Reduction("the list of", "[{each}]", lambda xs: xs),
    _Reduction("the text of", '" ".join({each})', " ".join),
    _Reduction("the sorted list of", "sorted({each})", sorted),
    _Reduction("the number of different values of", "len(set({each}))", lambda xs: len(set(xs))),
    _Reduction("the reversed list of", "[{each}][::-1]", lambda xs: xs[::-1]),
)


def _combine(
    filters: Sequence[_Part], changes: Sequence[_Part], reductions: Sequence[_Reduction]
) -> Parted[tuple[int, int, int]]:
    """Returns every combination but the empty one, as indices."""
    triples = [
        (f, c, r)
        for f in range(len(filters))
        for c in range(len(changes))
        for r in range(len(reductions))
    ]
    return Parted.of(*triples[1:])


_NUMBER_SHAPES = _combine(_NUMBER_FILTERS, _NUMBER_CHANGES, _NUMBER_REDUCTIONS)
_WORD_SHAPES = _combine(_WORD_FILTERS, _WORD_CHANGES, _WORD_REDUCTIONS)

_WORDINGS = read_wordings("python_function")


def draw(rng: random.Random, split: Split) -> Draft:
    """Returns a description and its code. Held out are combinations, names and wordings."""
    inputs: list[list[Any]]
    if rng.random() < 0.6:
        f, c, r = _NUMBER_SHAPES.draw(rng, split)
        parts = _NUMBER_FILTERS[f], _NUMBER_CHANGES[c], _NUMBER_REDUCTIONS[r]
        things, inputs = "numbers", [_draw_numbers(rng) for _ in range(_NUM_TESTS)]
    else:
        f, c, r = _WORD_SHAPES.draw(rng, split)
        parts = _WORD_FILTERS[f], _WORD_CHANGES[c], _WORD_REDUCTIONS[r]
        things, inputs = "words", [OBJECTS.sample(rng, split, 5) for _ in range(_NUM_TESTS)]
    keep, change, reduce = parts
    k = _draw_constant(rng, keep)
    m = _draw_constant(rng, change)
    name = OBJECTS.draw(rng, split)
    what = f"{reduce.words} the {keep.words.format(things=things, k=_quote(k))}"
    if change.words:
        pattern = attach(_WORDINGS["each"].draw(rng, split))
        what += pattern.format(change=change.words.format(k=_quote(m)))
    each = f"{change.code.format(k=_quote(m))} for x in {things}"
    if keep.code:
        each += f" if {keep.code.format(k=_quote(k))}"
    code = f"def {name}({things}):\n    return {reduce.code.format(each=each)}"
    inputs.append([])
    expected = [reduce.run([change.run(x, m) for x in xs if keep.run(x, k)]) for xs in inputs]
    return Draft(
        key=code.split("(", 1)[1],
        request=ask(rng, _WORDINGS["ask"].draw(rng, split), call=f"{name}({things})", what=what),
        reply=Message("assistant", content=code),
        check=FunctionTests(name, [[each] for each in inputs], expected),
    )


def _draw_numbers(rng: random.Random) -> list[int]:
    return [rng.randrange(-9, 20) for _ in range(8)]


def _draw_constant(rng: random.Random, part: _Part) -> int | str:
    return rng.choice(_LETTERS) if part.lettered else rng.randrange(3, 10)


def _quote(constant: int | str) -> str:
    return json.dumps(constant)
