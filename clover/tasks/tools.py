"""Tools of a domain: what they take, their schemas, and the words in which they are asked for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clover.chat import ToolCall
from clover.tasks.domains import Domain, Field
from clover.tasks.fields import (
    CHANGES,
    DETAILS,
    FILTERS,
    Fact,
    draw_fact,
    object_schema,
    say_facts,
)
from clover.tasks.made_up import Requests, Styles
from clover.tasks.parted import capitalize, read_wordings, say, with_article
from clover.tasks.splits import Split

_SYNONYMS = 0.25  # share of requests that call the noun something else than the tool does
_OPTIONAL = 0.5  # share of optional parameters that a request gives a value
_DESCRIBED = 0.1
_WORDINGS = read_wordings("tools")
REQUESTS = tuple(_WORDINGS[name] for name in ("create", "find", "update", "delete"))
ID = Field("id", "number")
_SIMPLE = frozenset({"person", "place", "thing", "number", "day", "time", "choice"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """What a tool does to a record: the verbs of its name, and those of a request."""

    verbs: tuple[str, ...]
    said: tuple[str, ...]
    past: str
    frames: Requests
    styles: Styles
    phrased: float  # share of requests that say values by phrases


CREATE = Action(
    verbs=("create", "add"),
    said=("create", "add", "make", "enter", "set up", "register"),
    past="Created",
    styles=DETAILS,
    phrased=0.6,
    frames=Requests(_WORDINGS["create"], REQUESTS),
)
FIND = Action(
    verbs=("find", "get"),
    said=("find", "look up", "search for", "show", "get"),
    past="Found",
    styles=FILTERS,
    phrased=0.6,
    frames=Requests(_WORDINGS["find"], REQUESTS),
)
UPDATE = Action(
    verbs=("update", "change"),
    said=("update", "change", "edit", "adjust"),
    past="Updated",
    styles=CHANGES,
    phrased=0.0,
    frames=Requests(_WORDINGS["update"], REQUESTS),
)
DELETE = Action(
    verbs=("delete", "cancel"),
    said=("delete", "remove", "cancel", "erase"),
    past="Deleted",
    styles=FILTERS,
    phrased=0.0,
    frames=Requests(_WORDINGS["delete"], REQUESTS),
)
ACTIONS = (CREATE, FIND, UPDATE, DELETE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A tool on one domain."""

    name: str
    domain: Domain
    action: Action
    fields: tuple[Field, ...]
    required: tuple[str, ...]

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON schema of its arguments."""
        return object_schema(self.fields, self.required)

    def call(self, facts: Sequence[Fact]) -> ToolCall:
        """Returns the call with these arguments, in the schema's order."""
        values = {fact.field.name: fact.value for fact in facts}
        return ToolCall(
            self.name, {each.name: values[each.name] for each in self.fields if each.name in values}
        )

    def schema(self, rng: random.Random) -> dict[str, Any]:
        """Returns the tool as a prompt lists it."""
        function: dict[str, Any] = {"name": self.name}
        if rng.random() < _DESCRIBED:
            function["description"] = self.name.replace("_", " ")
        return {"type": "function", "function": function | {"parameters": self.parameters}}


def draw_tool(rng: random.Random, domain: Domain, action: Action) -> Tool:
    """Returns a tool with some of the domain's fields as parameters."""
    required: list[str] = []
    if action is CREATE:
        fields = _some(rng, domain.fields, rng.choice((2, 2, 3, 3, 4)))
        if rng.random() < 0.6:
            required = [field.name for field in fields if rng.random() < 0.6]
    elif action is FIND:
        fields = _some(rng, simple_fields(domain), rng.choice((1, 2, 2)))
    else:
        changes = 0 if action is DELETE else rng.choice((1, 2))
        fields = (ID, *_some(rng, domain.fields, changes))
        required = ["id"]
    return Tool(
        name=f"{rng.choice(action.verbs)}_{domain.noun}",
        domain=domain,
        action=action,
        fields=fields,
        required=tuple(required),
    )


def simple_fields(domain: Domain) -> tuple[Field, ...]:
    """Returns the fields whose value is one word or number."""
    return tuple(field for field in domain.fields if field.kind in _SIMPLE)


def draw_facts(rng: random.Random, split: Split, tool: Tool) -> tuple[Fact, ...]:
    """Returns arguments for `tool`: all required ones, at least one, and some of the others."""
    sure = rng.choice([field for field in tool.fields if field is not ID] or [ID])
    return tuple(
        draw_fact(rng, split, field)
        for field in tool.fields
        if field is sure or field.name in tool.required or rng.random() < _OPTIONAL
    )


def say_request(rng: random.Random, split: Split, tool: Tool, facts: Sequence[Fact]) -> str:
    """Returns a request for `tool` with these arguments, without a full stop."""
    action = tool.action
    ids = [fact.said for fact in facts if fact.field is ID]
    rest = [fact for fact in facts if fact.field is not ID]
    sentence = say(
        rng,
        action.frames.draw(rng, split),
        act=rng.choice(action.said),
        id=ids[0] if ids else "",
        args=say_facts(rng, split, rest, action.styles, phrased=action.phrased),
        **nouns(rng, tool.domain),
    )
    return capitalize(sentence)


def nouns(rng: random.Random, domain: Domain) -> dict[str, str]:
    """Returns the slots `noun` and `a_noun`, which say a domain's noun or a synonym of it."""
    is_synonym = rng.random() < _SYNONYMS and domain.synonyms
    noun = rng.choice(domain.synonyms) if is_synonym else domain.noun
    return {"noun": noun, "a_noun": with_article(noun)}


def _some(rng: random.Random, fields: Sequence[Field], count: int) -> tuple[Field, ...]:
    chosen = rng.sample(range(len(fields)), min(count, len(fields)))
    return tuple(fields[index] for index in chosen)
