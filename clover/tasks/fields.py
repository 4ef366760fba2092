"""Values of a domain's fields: drawn, described by a JSON schema, and said in words."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from clover.tasks.domains import Field
from clover.tasks.made_up import Style, Styles
from clover.tasks.parted import Parted, attach, join_words, read_wordings
from clover.tasks.splits import Split
from clover.tasks.words import OBJECTS, PEOPLE, PLACES

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_TWO_WORDS = 0.1
_SLOT = r"\{(?:name|value)\}"
_TWO_FACTS = re.compile(
    rf"(?P<lead>[^{{]*)(?P<fact>{_SLOT}[^{{]*{_SLOT})(?P<joint>[^{{]*)(?P<again>.*\}})(?P<end>.*)",
    re.DOTALL,
)
_PHRASED = 0.6  # share of values that are said by a phrase instead of the field's name


@dataclass(frozen=True, slots=True)
class Fact:
    """A field, its JSON value, and the value in words. For an object, the inner facts."""

    field: Field
    value: Any
    said: str
    inner: tuple[Fact, ...] = ()

    def leaves(self) -> Iterator[Fact]:
        """Yields this fact, or those of an object."""
        yield from self.inner or (self,)


def draw_fact(rng: random.Random, split: Split, field: Field) -> Fact:
    """Returns `field` with a value whose words lie on one side."""
    if field.kind == "object":
        inner = tuple(draw_fact(rng, split, each) for each in field.fields)
        value = {fact.field.name: fact.value for fact in inner}
        return Fact(field, value, "", inner)
    value, said = KINDS[field.kind](rng, split, field)
    return Fact(field, value, said)


def schema_of(field: Field) -> dict[str, Any]:
    """Returns the JSON schema of a field's values."""
    if field.kind == "object":
        return object_schema(field.fields)
    if field.kind == "choice":
        return {"type": "string", "enum": list(field.options)}
    if field.kind in ("people", "things"):
        return {"type": "array", "items": {"type": "string"}}
    return {"type": _JSON_TYPES.get(field.kind, "string")}


def object_schema(fields: Sequence[Field], required: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the JSON schema of an object with these fields."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {field.name: schema_of(field) for field in fields},
    }
    return schema | ({"required": list(required)} if required else {})


def _words(source: Callable[[random.Random, Split], str]) -> _Kind:
    def draw(rng: random.Random, split: Split, field: Field) -> tuple[Any, str]:
        if rng.random() >= _TWO_WORDS:
            word = source(rng, split)
            return word, word
        words = f"{source(rng, split)} {source(rng, split)}"
        return words, f'"{words}"'

    return draw


def _several(sample: Callable[[random.Random, Split, int], list[str]]) -> _Kind:
    def draw(rng: random.Random, split: Split, field: Field) -> tuple[Any, str]:
        words = sample(rng, split, rng.choice((1, 2, 2, 3)))
        return words, join_words(words)

    return draw


def _number(rng: random.Random, split: Split, field: Field) -> tuple[Any, str]:
    digits = rng.choice((1, 2, 2, 3, 4))
    number = rng.randrange(10 ** (digits - 1), 10**digits)
    return number, str(number)


def _price(rng: random.Random, split: Split, field: Field) -> tuple[Any, str]:
    price = rng.randrange(2, 200) + rng.choice((0.25, 0.5, 0.75))
    return price, str(price)


def _flag(rng: random.Random, split: Split, field: Field) -> tuple[Any, str]:
    value = rng.random() < 0.5
    return value, rng.choice(("yes", "on", "true") if value else ("no", "off", "false"))


def _day(rng: random.Random, split: Split, field: Field) -> tuple[Any, str]:
    day = rng.choice(_DAYS)
    return day, day


def _time(rng: random.Random, split: Split, field: Field) -> tuple[Any, str]:
    time = f"{rng.randrange(24):02}:{rng.randrange(0, 60, 5):02}"
    return time, time


def _choice(rng: random.Random, split: Split, field: Field) -> tuple[Any, str]:
    option = rng.choice(field.options)
    return option, option


_Kind = Callable[[random.Random, Split, Field], tuple[Any, str]]
KINDS: dict[str, _Kind] = {
    "person": _words(PEOPLE.draw),
    "place": _words(PLACES.draw),
    "thing": _words(OBJECTS.draw),
    "people": _several(PEOPLE.sample),
    "things": _several(OBJECTS.sample),
    "number": _number,
    "price": _price,
    "flag": _flag,
    "day": _day,
    "time": _time,
    "choice": _choice,
}
_JSON_TYPES = {"number": "integer", "price": "number", "flag": "boolean"}


def _styles(wordings: Parted[str]) -> Styles:
    return Styles(
        Parted(
            train=tuple(map(_read_style, wordings.train)),
            held_out=tuple(map(_read_style, wordings.held_out)),
        )
    )


def _read_style(example: str) -> Style:
    """Returns the style in which `example` lists two facts; `<>` stands for a new line."""
    parts = _TWO_FACTS.fullmatch(attach(example).replace("<>", "\n"))
    assert parts and parts["fact"] == parts["again"], f"not two facts in one style: {example}"
    return Style(parts["lead"], parts["fact"], parts["joint"], parts["end"])


_WORDINGS = read_wordings("fields")
DETAILS = _styles(_WORDINGS["details"])
FILTERS = _styles(_WORDINGS["filters"])
CHANGES = _styles(_WORDINGS["changes"])


def say_facts(
    rng: random.Random,
    split: Split,
    facts: Sequence[Fact],
    styles: Styles,
    *,
    phrased: float = _PHRASED,
) -> str:
    """Returns the facts as they follow a noun, ` for Eva: seats 12, city Oslo` for one.

    With probability `phrased`, facts that have a phrase are said by it.
    """
    left = [leaf for fact in facts for leaf in fact.leaves()]
    rng.shuffle(left)
    said = ""
    if rng.random() < phrased:
        said, left = _say_phrases(left)
    if not left:
        return said
    style = styles.draw(rng, split)
    listed = [style.fact.format(name=fact.field.spoken, value=fact.said) for fact in left]
    return said + style.lead + style.joint.join(listed) + style.end


def _say_phrases(facts: Sequence[Fact]) -> tuple[str, list[Fact]]:
    """Returns the phrases of facts that have one, no preposition twice, and the facts left over."""
    said, left, used = "", list[Fact](), set[str]()
    for fact in facts:
        preposition = fact.field.phrase.split(" ")[0]
        if preposition and preposition not in used:
            used.add(preposition)
            said += " " + fact.field.phrase.replace("_", fact.said)
        else:
            left.append(fact)
    return said, left
