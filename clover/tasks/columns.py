"""Sums worked out digit by digit, as thoughts in which every token follows from those before it."""

from __future__ import annotations

from clover.tasks.arithmetic import work_out


def work_out_step(a: int, sign: str, b: int) -> tuple[str, int]:
    """Returns the thoughts that lead to `a sign b`, and the result, which ends the thoughts as `=N`.

    `*` takes a one-digit `b`: a line is `digit*b+carry:CW written`, from the right. `/` takes a
    one-digit `b` that divides `a`: a line is `remainder digit / b : quotient digit, remainder`, from
    the left. The others are those of the arithmetic family.
    """
    if sign == "*":
        lines, result = _multiply(a, b), a * b
    elif sign == "/":
        lines, result = _divide(a, b), a // b
    else:
        lines, result = work_out(a, b, sign).splitlines(), a + b if sign == "+" else a - b
    return "\n".join([*lines, f"={result}"]), result


def _multiply(a: int, b: int) -> list[str]:
    lines = [f"{a}*{b}"]
    carry, written = 0, ""
    for digit in reversed(str(a)):
        new_carry, low = divmod(int(digit) * b + carry, 10)
        written = f"{low}{written}"
        lines.append(f"{digit}*{b}+{carry}:{new_carry}{low} {written}")
        carry = new_carry
    return lines


def _divide(a: int, b: int) -> list[str]:
    lines = [f"{a}/{b}"]
    rest = 0
    for digit in str(a):
        quotient, new_rest = divmod(rest * 10 + int(digit), b)
        lines.append(f"{rest}{digit}/{b}:{quotient} {new_rest}")
        rest = new_rest
    return lines
