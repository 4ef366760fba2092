"""One tool call: choose among one to three tools, and give each parameter the value asked for."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from clover.chat import Message, ToolCall
from clover.tasks.task import Draft
from clover.tasks.words import (
    CHOICES,
    COLORS,
    NOUNS,
    OBJECTS,
    PEOPLE,
    PLACES,
    VERBS,
    Mix,
    Pool,
    synthetic_word,
)

_SYNTHETIC_NOUNS = 0.25  # so that a tool's name is copied, not recognised
_SYNONYMS = 0.15
_SAME_NOUN = 0.2  # a distractor on the same noun: the verb must decide
_MODIFIED = 0.15
_DESCRIBED = 0.2
_REQUIRED = 0.15
_CUES = 0.7
_IN_ORDER = 0.5
_TWO_WORDS = 0.12

_MODIFIERS = Pool.of("new old max min start end target first last main next extra")


# Names of parameters, and where a name has one, the phrase that implies it.
_PEOPLE_CUES = {
    "recipient": "to {}",
    "owner": "for {}",
    "author": "by {}",
    "partner": "with {}",
    "sender": "from {}",
    "person": "for {}",
    "guest": "for {}",
    "contact": "to {}",
    "manager": "",
    "teacher": "",
    "artist": "by {}",
    "friend": "with {}",
}
_PLACE_CUES = {
    "city": "in {}",
    "place": "in {}",
    "location": "in {}",
    "destination": "to {}",
    "origin": "from {}",
    "airport": "at {}",
    "venue": "at {}",
    "town": "near {}",
    "region": "",
}
_OBJECT_CUES = {
    "title": "called {}",
    "topic": "about {}",
    "label": "named {}",
    "query": "about {}",
    "item": "with {}",
    "keyword": "about {}",
    "folder": "into {}",
    "group": "in {}",
    "brand": "",
    "tag": "",
    "category": "under {}",
    "password": "",
    "subject": "about {}",
    "flavor": "with {}",
    "channel": "",
    "text": "saying {}",
}
_NUMBER_CUES = {
    "level": "to {}",
    "count": "{} times",
    "minutes": "for {} minutes",
    "seconds": "after {} seconds",
    "hours": "for {} hours",
    "price": "for {} dollars",
    "pages": "over {} pages",
    "percent": "to {} percent",
    "people": "for {} people",
    "limit": "up to {}",
    "days": "within {} days",
    "number": "",
    "amount": "",
    "size": "",
    "width": "",
    "height": "",
    "speed": "",
    "age": "",
    "code": "",
    "year": "",
    "floor": "on floor {}",
    "seat": "on seat {}",
    "index": "",
    "rating": "",
}
_FLAGS = Pool.of(
    """urgent silent verbose private locked shared visible active bright repeat confirm secure
    backup instant hidden pinned sorted compressed"""
)
_CHOICE_NAMES = Pool.of(
    "mode style quality priority format theme position state unit shade kind method"
)

_PEOPLE_NAMES = Pool.of(_PEOPLE_CUES)
_PLACE_NAMES = Pool.of(_PLACE_CUES)
_OBJECT_NAMES = Pool.of(_OBJECT_CUES)
_NUMBER_NAMES = Pool.of(_NUMBER_CUES)
_TRUE = ("true", "on", "yes")
_FALSE = ("false", "off", "no")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parameter:
    """A parameter, the value it is given, and how a request says the two."""

    name: str
    schema: dict[str, Any]
    value: Any
    said: str  # the value in a request's words
    cue: str  # phrase with the value in place of {}, that implies the name; or empty
    bare: str = ""  # phrase for the whole argument, as `without repeat`


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tool:
    verb: str
    noun: str
    parameters: tuple[_Parameter, ...]

    @property
    def name(self) -> str:
        return f"{self.verb}_{self.noun}"


def draw(rng: random.Random, held_out: bool) -> Draft:
    """Returns a request and its call. Held out are nouns, half of the parameter names, values."""
    tools = _draw_tools(rng, held_out, count=rng.choice((1, 1, 2, 2, 2, 3)))
    chosen = rng.choice(tools)
    arguments = {parameter.name: parameter.value for parameter in chosen.parameters}
    call = ToolCall(name=chosen.name, arguments=arguments)
    return Draft(
        key=f"{chosen.name} {sorted(arguments.items())}",
        request=_request(rng, chosen, ambiguous=len({tool.noun for tool in tools}) < len(tools)),
        reply=Message("assistant", tool_calls=(call,)),
        tools=tuple(_schema(rng, tool) for tool in tools),
    )


def _draw_tools(rng: random.Random, held_out: bool, count: int) -> list[_Tool]:
    tools: dict[str, _Tool] = {}
    nouns: list[str] = []
    while len(tools) < count:
        repeat = nouns and rng.random() < _SAME_NOUN
        noun = rng.choice(nouns) if repeat else _draw_noun(rng, held_out)
        nouns.append(noun)
        tool = _Tool(
            verb=rng.choice(tuple(VERBS)),
            noun=noun,
            parameters=_draw_parameters(rng, held_out, rng.choice((1, 1, 2, 2, 3))),
        )
        tools.setdefault(tool.name, tool)
    return list(tools.values())


def _draw_noun(rng: random.Random, held_out: bool) -> str:
    if rng.random() < _SYNTHETIC_NOUNS:
        return synthetic_word(rng, held_out)
    return NOUNS.draw(rng, held_out)


def _draw_parameters(rng: random.Random, held_out: bool, count: int) -> tuple[_Parameter, ...]:
    parameters: dict[str, _Parameter] = {}
    while len(parameters) < count:
        make = rng.choices(_MAKERS, _MAKER_WEIGHTS)[0]
        parameter = make(rng, held_out)
        parameters.setdefault(parameter.name, parameter)
    return tuple(parameters.values())


def _name(rng: random.Random, names: Pool, held_out: bool) -> str:
    unseen = held_out and bool(names.held_out) and rng.random() < 0.5
    name = names.draw(rng, unseen)
    if rng.random() < _MODIFIED:
        return f"{_MODIFIERS.draw(rng, unseen and bool(_MODIFIERS.held_out))}_{name}"
    return name


def _text(names: Pool, cues: dict[str, str], values: Mix) -> _Maker:
    def make(rng: random.Random, held_out: bool) -> _Parameter:
        name = _name(rng, names, held_out)
        value = values.draw(rng, held_out)
        said = value
        if rng.random() < _TWO_WORDS:
            value = f"{value} {values.draw(rng, held_out)}"
            said = f'"{value}"'
        schema = {"type": "string"}
        return _Parameter(name=name, schema=schema, value=value, said=said, cue=cues.get(name, ""))

    return make


def _number(rng: random.Random, held_out: bool) -> _Parameter:
    name = _name(rng, _NUMBER_NAMES, held_out)
    digits = rng.choice((1, 2, 2, 3, 4))
    value = rng.randrange(10 ** (digits - 1), 10**digits)
    schema = {"type": "integer"}
    return _Parameter(
        name=name, schema=schema, value=value, said=str(value), cue=_NUMBER_CUES.get(name, "")
    )


def _flag(rng: random.Random, held_out: bool) -> _Parameter:
    name = _name(rng, _FLAGS, held_out)
    value = rng.random() < 0.5
    return _Parameter(
        name=name,
        schema={"type": "boolean"},
        value=value,
        said=rng.choice(_TRUE if value else _FALSE),
        cue="",
        bare=f"{'with' if value else 'without'} {_spoken(name)}",
    )


def _choice(rng: random.Random, held_out: bool) -> _Parameter:
    is_color = rng.random() < 0.3
    name = "color" if is_color else _name(rng, _CHOICE_NAMES, held_out)
    pool = COLORS if is_color else CHOICES
    options = rng.sample(pool.words(held_out), rng.choice((2, 2, 3)))
    value = rng.choice(options)
    schema = {"type": "string", "enum": options}
    cue = "in {}" if is_color else ""
    return _Parameter(name=name, schema=schema, value=value, said=value, cue=cue)


_Maker = Callable[[random.Random, bool], _Parameter]
_MAKERS: tuple[_Maker, ...] = (
    _text(_PEOPLE_NAMES, _PEOPLE_CUES, PEOPLE),
    _text(_PLACE_NAMES, _PLACE_CUES, PLACES),
    _text(_OBJECT_NAMES, _OBJECT_CUES, OBJECTS),
    _number,
    _flag,
    _choice,
)
_MAKER_WEIGHTS = (3, 2, 4, 5, 2, 2)


def _spoken(name: str) -> str:
    return name.replace("_", " ")


def _schema(rng: random.Random, tool: _Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if rng.random() < _DESCRIBED:
        function["description"] = f"{tool.verb} the {tool.noun}"
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {parameter.name: parameter.schema for parameter in tool.parameters},
    }
    if rng.random() < _REQUIRED:
        parameters["required"] = [parameter.name for parameter in tool.parameters]
    function["parameters"] = parameters
    return {"type": "function", "function": function}


_OPENINGS = (
    "{act} the {noun}",
    "{act} the {noun}",
    "{act} {noun}",
    "Please {act} the {noun}",
    "Please {act} {noun}",
    "Can you {act} the {noun}",
    "I want to {act} the {noun}",
    "I need to {act} a {noun}",
    "Now {act} the {noun}",
    "Could you {act} my {noun}",
)


def _request(rng: random.Random, tool: _Tool, *, ambiguous: bool) -> str:
    """Returns a user's request for `tool`. Synonyms of the verb need a noun of its own."""
    act = tool.verb
    if not ambiguous and rng.random() < _SYNONYMS:
        act = rng.choice(VERBS[tool.verb])
    opening = rng.choice(_OPENINGS).format(act=act, noun=tool.noun)
    parameters = list(tool.parameters)
    if rng.random() >= _IN_ORDER:
        rng.shuffle(parameters)
    return opening + rng.choice(_STYLES)(rng, parameters)


def _in_prose(rng: random.Random, parameters: list[_Parameter]) -> str:
    """` in Oslo with level 30`: cues where they are clear, names elsewhere."""
    said, used = "", set[str]()
    for parameter in parameters:
        lead = parameter.cue.split(" ")[0]
        if parameter.cue and lead not in used and rng.random() < _CUES:
            used.add(lead)
            said += " " + parameter.cue.format(parameter.said)
        elif parameter.bare:
            said += " " + parameter.bare
        else:
            said += f" with {_spoken(parameter.name)} {parameter.said}"
    return said


def _after_colon(rng: random.Random, parameters: list[_Parameter]) -> str:
    return ": " + ", ".join(f"{_spoken(each.name)} {each.said}" for each in parameters)


def _in_brackets(rng: random.Random, parameters: list[_Parameter]) -> str:
    return " (" + ", ".join(f"{_spoken(each.name)}: {each.said}" for each in parameters) + ")"


def _with_and(rng: random.Random, parameters: list[_Parameter]) -> str:
    return " with " + " and ".join(f"{_spoken(each.name)} {each.said}" for each in parameters)


def _sentences(rng: random.Random, parameters: list[_Parameter]) -> str:
    return "".join(f". The {_spoken(each.name)} is {each.said}" for each in parameters) + "."


def _use_as(rng: random.Random, parameters: list[_Parameter]) -> str:
    return ". Use " + " and ".join(f"{each.said} as {_spoken(each.name)}" for each in parameters)


def _assignments(rng: random.Random, parameters: list[_Parameter]) -> str:
    return ", " + ", ".join(f"{_spoken(each.name)} = {each.said}" for each in parameters)


_STYLES: tuple[Callable[[random.Random, list[_Parameter]], str], ...] = (
    _in_prose,
    _in_prose,
    _in_prose,
    _after_colon,
    _in_brackets,
    _with_and,
    _sentences,
    _use_as,
    _assignments,
)
