"""The domains that tools and records are about: a noun, its synonyms, and the fields of a record.

One line each in `domains.txt`: `noun (synonym, ...): field kind phrase; ...`. A phrase, with `_` for
the value, implies the field without naming it. Kinds are those of `fields.KINDS`, `a|b|c` for one of
several words, and `{field kind phrase, ...}` for a nested object. A domain is held out, with its
synonyms and its schemas, when its noun is held out by the rule for words.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from pathlib import Path

from clover.tasks.parted import Parted
from clover.tasks.splits import Split
from clover.tasks.words import invented_word, is_held_out

_INVENTED = 0.5  # share of training's domains that have invented nouns, names and options
_RENAMED = 0.7  # share of the fields of such a domain
_LINE = re.compile(r"(?P<noun>\w+) \((?P<synonyms>[^)]+)\): (?P<fields>.+)")
_FIELD = re.compile(r"(?P<name>\w+) (?P<kind>\{[^}]*\}|\S+) ?(?P<phrase>.*)")


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a record, or of an object inside it (then `fields` holds the inner ones)."""

    name: str
    kind: str
    phrase: str = ""  # how a sentence says the value without the name, `_` for the value
    options: tuple[str, ...] = ()
    fields: tuple[Field, ...] = ()

    @property
    def spoken(self) -> str:
        """The name as a sentence says it."""
        return self.name.replace("_", " ")


@dataclass(frozen=True, slots=True)
class Domain:
    """What a tool or a record is about."""

    noun: str
    synonyms: tuple[str, ...]  # none of a made-up noun
    fields: tuple[Field, ...]


def _parse_line(line: str) -> Domain:
    parts = _LINE.fullmatch(line)
    assert parts, f"not a domain: {line}"
    return Domain(
        noun=parts["noun"],
        synonyms=tuple(parts["synonyms"].split(", ")),
        fields=tuple(_parse_field(text) for text in parts["fields"].split("; ")),
    )


def _parse_field(text: str) -> Field:
    parts = _FIELD.fullmatch(text.strip())
    assert parts, f"not a field: {text}"
    name, kind, phrase = parts["name"], parts["kind"], parts["phrase"]
    if kind.startswith("{"):
        return Field(
            name, "object", fields=tuple(_parse_field(part) for part in kind[1:-1].split(", "))
        )
    if "|" in kind:
        return Field(name, "choice", phrase, options=tuple(kind.split("|")))
    return Field(name, kind, phrase)


def _part(domains: list[Domain]) -> Parted[Domain]:
    return Parted(
        train=tuple(domain for domain in domains if not is_held_out(domain.noun)),
        held_out=tuple(domain for domain in domains if is_held_out(domain.noun)),
    )


_TABLE = Path(__file__).with_name("domains.txt").read_text(encoding="utf-8")
DOMAINS = _part([_parse_line(line) for line in _TABLE.splitlines()])


def draw_domain(rng: random.Random, split: Split) -> Domain:
    """Returns a domain of one side; in training, as often as not, one that is made up.

    There are only so many domains to learn from, and a held-out one has words that none of them has.
    Whoever has met enough words that mean nothing reads the schema instead of remembering it.
    """
    domain = DOMAINS.draw(rng, split)
    if split == "heldout" or rng.random() >= _INVENTED:
        return domain
    taken = {field.name for field in domain.fields}
    fields = tuple(_invent(rng, field, taken) for field in domain.fields)
    return Domain(invented_word(rng), (), fields)


def _invent(rng: random.Random, field: Field, taken: set[str]) -> Field:
    """Returns the field or, more often, one of its kind that has a name of its own."""
    if rng.random() >= _RENAMED:
        return field
    while (name := invented_word(rng)) in taken:
        pass
    taken.add(name)
    inner = {each.name for each in field.fields}
    return replace(
        field,
        name=name,
        phrase="",  # a phrase says what a name means, and this one means nothing
        options=tuple(dict.fromkeys(invented_word(rng) for _ in field.options)),
        fields=tuple(_invent(rng, each, inner) for each in field.fields),
    )
