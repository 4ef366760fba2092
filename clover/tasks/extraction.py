"""Text to JSON: the values that a schema asks for, read out of a record told in sentences.

The text tells more than the schema asks for, in any order. A property that the text does not tell is
optional, and left out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from clover.chat import Message
from clover.tasks.checks import JsonValue
from clover.tasks.domains import Domain, draw_domain
from clover.tasks.fields import DETAILS, Fact, draw_fact, object_schema, say_facts
from clover.tasks.made_up import Sentences
from clover.tasks.parted import ask, capitalize, read_wordings, say
from clover.tasks.splits import Split
from clover.tasks.task import Draft
from clover.tasks.tools import nouns

_LIST_SHARE = 0.2
_SENTENCES_SHARE = 0.4

_WORDINGS = read_wordings("extraction")
_SENTENCES = Sentences(_WORDINGS["sentence"])


def draw(rng: random.Random, split: Split) -> Draft:
    """Returns a text and a schema. Held out are domains, value words and wordings."""
    domain = draw_domain(rng, split)
    count = 2 if rng.random() < _LIST_SHARE else 1
    fields = rng.sample(domain.fields, rng.choice((2, 3, 3) if count == 1 else (2, 2)))
    # Told in part, so that a list of two records stays short
    told = [field for field in domain.fields if field in fields or rng.random() < 0.6 / count]
    absent = rng.choice(fields) if rng.random() < 0.15 else None
    records, texts = [], []
    for _ in range(count):
        facts = [draw_fact(rng, split, field) for field in told if field != absent]
        texts.append(_tell(rng, split, domain, facts))
        values = {fact.field.name: fact.value for fact in facts}
        records.append({each.name: values[each.name] for each in fields if each.name in values})
    schema = object_schema(fields, [each.name for each in fields if each != absent])
    value: Any = records[0]
    if count > 1:
        value, schema = records, {"type": "array", "items": schema}
    question = ask(rng, _WORDINGS["ask"].draw(rng, split), schema=json.dumps(schema))
    layout = _WORDINGS["layout"].draw(rng, split)
    return Draft(
        key=json.dumps(value),
        request=layout.replace("<>", "\n").format(text=" ".join(texts), ask=question),
        reply=Message("assistant", content=json.dumps(value)),
        check=JsonValue(value, schema),
    )


def _tell(rng: random.Random, split: Split, domain: Domain, facts: Sequence[Fact]) -> str:
    """Returns a record in words: one sentence for all of it, or one for each value."""
    pattern = _WORDINGS["introduction"].draw(rng, split)
    if rng.random() >= _SENTENCES_SHARE:
        details = say_facts(rng, split, facts, DETAILS)
        return capitalize(say(rng, pattern, details=details, **nouns(rng, domain)))
    leaves = [leaf for fact in facts for leaf in fact.leaves()]
    rng.shuffle(leaves)
    first = capitalize(say(rng, pattern, details="", **nouns(rng, domain)))
    return " ".join([first, *(_say_sentence(rng, split, leaf) for leaf in leaves)])


def _say_sentence(rng: random.Random, split: Split, fact: Fact) -> str:
    pattern = _SENTENCES.draw(rng, split)
    return say(rng, pattern, name=fact.field.spoken, value=fact.said)
