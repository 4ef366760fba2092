"""One tool call: choose among one to three tools, and give each parameter the value asked for."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from clover.chat import Message, ToolCall
from clover.tasks.domains import Field
from clover.tasks.fields import DETAILS, Fact, draw_fact, object_schema, say_facts
from clover.tasks.made_up import Requests
from clover.tasks.parted import capitalize, read_wordings, say, vary, with_article
from clover.tasks.splits import Split
from clover.tasks.task import Draft
from clover.tasks.tools import REQUESTS
from clover.tasks.words import (
    CHOICES,
    COLORS,
    INVENTED_VALUES,
    NOUNS,
    VERBS,
    Pool,
    invented_word,
    synthetic_word,
)

_SYNTHETIC_NOUNS = 0.25  # so that a tool's name is copied, not recognised
_SYNONYMS = 0.15
_SAME_NOUN = 0.2  # a distractor on the same noun: the verb must decide
_MODIFIED = 0.15
_DESCRIBED = 0.2
_REQUIRED = 0.15
_PHRASED = 0.35
_COLOR = 0.3
_UNSEEN_NAMES = 0.5  # share of a held-out tool's parameters whose names training never has

_WORDINGS = read_wordings("tool_call")
_REQUESTS = Requests(_WORDINGS["request"], (*REQUESTS, _WORDINGS["request"]))
_MODIFIERS = Pool.of("new old max min start end target first last main next extra")
_KINDS = {"person": 3, "place": 2, "thing": 4, "number": 5, "flag": 2, "choice": 2}  # how often

# Names of parameters by kind, and where a name has one, the phrase that implies it, `_` for the value
_PHRASES = {
    "person": {
        "recipient": "to _",
        "owner": "for _",
        "author": "by _",
        "partner": "with _",
        "sender": "from _",
        "person": "for _",
        "guest": "for _",
        "contact": "to _",
        "manager": "",
        "teacher": "",
        "artist": "by _",
        "friend": "with _",
    },
    "place": {
        "city": "in _",
        "place": "in _",
        "location": "in _",
        "destination": "to _",
        "origin": "from _",
        "airport": "at _",
        "venue": "at _",
        "town": "near _",
        "region": "",
    },
    "thing": {
        "title": "called _",
        "topic": "about _",
        "label": "named _",
        "query": "about _",
        "item": "with _",
        "keyword": "about _",
        "folder": "into _",
        "group": "in _",
        "brand": "",
        "tag": "",
        "category": "under _",
        "password": "",
        "subject": "about _",
        "flavor": "with _",
        "channel": "",
        "text": "saying _",
    },
    "number": {
        "level": "to _",
        "count": "_ times",
        "minutes": "for _ minutes",
        "seconds": "after _ seconds",
        "hours": "for _ hours",
        "price": "for _ dollars",
        "pages": "over _ pages",
        "percent": "to _ percent",
        "people": "for _ people",
        "limit": "up to _",
        "days": "within _ days",
        "number": "",
        "amount": "",
        "size": "",
        "width": "",
        "height": "",
        "speed": "",
        "age": "",
        "code": "",
        "year": "",
        "floor": "on floor _",
        "seat": "on seat _",
        "index": "",
        "rating": "",
    },
}
_NAMES = {kind: Pool.of(phrases) for kind, phrases in _PHRASES.items()} | {
    "flag": Pool.of(
        """urgent silent verbose private locked shared visible active bright repeat confirm secure
        backup instant hidden pinned sorted compressed"""
    ),
    "choice": Pool.of(
        "mode style quality priority format theme position state unit shade kind method"
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tool:
    verb: str
    noun: str
    facts: tuple[Fact, ...]  # its parameters, with the values of a call

    @property
    def name(self) -> str:
        return f"{self.verb}_{self.noun}"


def draw(rng: random.Random, split: Split) -> Draft:
    """Returns a request and its call.

    Held out are wordings, nouns, half of the parameter names, values.
    """
    tools = _draw_tools(rng, split, count=rng.choice((1, 1, 2, 2, 2, 3)))
    chosen = rng.choice(tools)
    arguments = {fact.field.name: fact.value for fact in chosen.facts}
    call = ToolCall(name=chosen.name, arguments=arguments)
    ambiguous = len({tool.noun for tool in tools}) < len(tools)
    return Draft(
        key=f"{chosen.name} {sorted(arguments.items())}",
        request=_request(rng, split, chosen, ambiguous=ambiguous),
        reply=Message("assistant", tool_calls=(call,)),
        tools=tuple(_schema(rng, tool) for tool in tools),
    )


def _draw_tools(rng: random.Random, split: Split, count: int) -> list[_Tool]:
    tools: dict[str, _Tool] = {}
    nouns: list[str] = []
    while len(tools) < count:
        repeat = nouns and rng.random() < _SAME_NOUN
        noun = rng.choice(nouns) if repeat else _draw_noun(rng, split)
        nouns.append(noun)
        tool = _Tool(
            verb=rng.choice(tuple(VERBS)),
            noun=noun,
            facts=_draw_facts(rng, split, rng.choice((1, 1, 2, 2, 3))),
        )
        tools.setdefault(tool.name, tool)
    return list(tools.values())


def _draw_noun(rng: random.Random, split: Split) -> str:
    if rng.random() < _SYNTHETIC_NOUNS:
        return synthetic_word(rng, split)
    if split == "train" and rng.random() < INVENTED_VALUES:
        return invented_word(rng)
    return NOUNS.draw(rng, split)


def _draw_facts(rng: random.Random, split: Split, count: int) -> tuple[Fact, ...]:
    facts: dict[str, Fact] = {}
    while len(facts) < count:
        (kind,) = rng.choices(tuple(_KINDS), tuple(_KINDS.values()))
        fact = draw_fact(rng, split, _draw_field(rng, split, kind))
        if kind == "flag":
            phrase = f"{'with' if fact.value else 'without'} {fact.field.spoken}"
            fact = replace(fact, field=replace(fact.field, phrase=phrase))
        facts.setdefault(fact.field.name, fact)
    return tuple(facts.values())


def _draw_field(rng: random.Random, split: Split, kind: str) -> Field:
    is_color = kind == "choice" and rng.random() < _COLOR
    name = "color" if is_color else _draw_name(rng, _NAMES[kind], split)
    if kind != "choice":
        return Field(name, kind, phrase=_PHRASES.get(kind, {}).get(name, ""))
    options = rng.sample((COLORS if is_color else CHOICES).words(split), rng.choice((2, 2, 3)))
    return Field(name, kind, phrase="in _" if is_color else "", options=tuple(options))


def _draw_name(rng: random.Random, names: Pool, split: Split) -> str:
    side: Split = split
    if split == "heldout" and not (names.held_out and rng.random() < _UNSEEN_NAMES):
        side = "seen"
    if split == "train" and rng.random() < INVENTED_VALUES:
        return invented_word(rng)
    name = names.draw(rng, side)
    if rng.random() < _MODIFIED:
        return f"{_MODIFIERS.draw(rng, side)}_{name}"
    return name


def _schema(rng: random.Random, tool: _Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if rng.random() < _DESCRIBED:
        function["description"] = f"{tool.verb} the {tool.noun}"
    fields = [fact.field for fact in tool.facts]
    required = [field.name for field in fields] if rng.random() < _REQUIRED else []
    parameters = object_schema(fields, required)
    return {"type": "function", "function": function | {"parameters": parameters}}


def _request(rng: random.Random, split: Split, tool: _Tool, *, ambiguous: bool) -> str:
    """Returns a user's request for `tool`. Synonyms of the verb need a noun of its own."""
    act = tool.verb
    if not ambiguous and rng.random() < _SYNONYMS:
        act = rng.choice(VERBS[tool.verb])
    request = say(
        rng,
        _REQUESTS.draw(rng, split),
        act=act,
        noun=tool.noun,
        a_noun=with_article(tool.noun),
        args="{args}",
    )
    args = say_facts(rng, split, tool.facts, DETAILS, phrased=_PHRASED)
    # The arguments come last: no stop or thanks may stand behind a value
    return vary(rng, capitalize(request)).format(args=args)
