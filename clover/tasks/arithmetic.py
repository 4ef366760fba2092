"""Column addition and subtraction of two numbers of 2 to 4 digits, with the columns as thoughts.

The first thought writes both numbers with equal width; each further line is one column from the
right: `digit+digit+carry:CW answer`, where C is the new carry (or borrow), W the digit to write,
and `answer` what stands under the line so far.
"""

from __future__ import annotations

import random

from clover.chat import Message
from clover.tasks.parted import ask, read_wordings
from clover.tasks.splits import Split
from clover.tasks.task import Draft
from clover.tasks.words import is_held_out

_WORDINGS = read_wordings("arithmetic")
_LISTS = {"+": "plus", "-": "minus"}


def draw(rng: random.Random, split: Split) -> Draft:
    """Returns a sum or a difference. Held out are wordings and operands."""
    sign = rng.choice("+-")
    a, b = _operand(rng, split), _operand(rng, split)
    if sign == "-" and a < b:
        a, b = b, a
    answer = a + b if sign == "+" else a - b
    return Draft(
        key=f"{a}{sign}{b}",
        request=ask(rng, _WORDINGS[_LISTS[sign]].draw(rng, split), a=a, b=b),
        reply=Message("assistant", content=str(answer), thinking=work_out(a, b, sign)),
    )


def work_out(a: int, b: int, sign: str) -> str:
    """Returns the thoughts that lead to `a sign b`."""
    width = max(len(str(a)), len(str(b)))
    top, bottom = f"{a:0{width}}", f"{b:0{width}}"
    lines = [f"{top}{sign}{bottom}"]
    carry, answer = 0, ""
    for x, y in zip(reversed(top), reversed(bottom), strict=True):
        if sign == "+":
            new_carry, digit = divmod(int(x) + int(y) + carry, 10)
        else:
            borrow, digit = divmod(int(x) - int(y) - carry, 10)
            new_carry = -borrow
        answer = f"{digit}{answer}"
        lines.append(f"{x}{sign}{y}{sign}{carry}:{new_carry}{digit} {answer}")
        carry = new_carry
    return "\n".join(lines)


def _operand(rng: random.Random, split: Split) -> int:
    while True:
        digits = rng.choice((2, 3, 3, 4))
        number = rng.randrange(10 ** (digits - 1), 10**digits)
        if is_held_out(str(number)) == (split == "heldout"):
            return number
