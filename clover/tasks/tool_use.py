"""Tool use over one or more turns, in many domains.

Kinds of item: one call; several calls in one turn; a call that needs the result of an earlier one, up
to the closing sentence; a record that is not found; a request that no tool fits; a required argument
that is missing and has to be asked for.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clover.chat import Message, ToolCall
from clover.tasks.checks import Calls, Sentence
from clover.tasks.domains import Domain, Field, draw_domain
from clover.tasks.fields import CHANGES, DETAILS, FILTERS, Fact, draw_fact, say_facts
from clover.tasks.parted import attach, capitalize, read_wordings, say, uncapitalize, vary
from clover.tasks.splits import Split
from clover.tasks.task import Check, Draft
from clover.tasks.tools import (
    ACTIONS,
    CREATE,
    DELETE,
    FIND,
    ID,
    UPDATE,
    Tool,
    draw_facts,
    draw_tool,
    nouns,
    say_request,
    simple_fields,
)

NO_TOOL = "None of my tools can do that."
_CHATTER_SHARE = 0.25
_MAX_PARAMETERS = 8  # of all tools together, so that a prompt stays near 200 tokens
_MAX_CHARACTERS = 1300  # of tools, turns and request: under 400 tokens with nano's tokenizer
_NOT_FOUND = {"error": "not found"}
_CALLS = 0.85  # share of one-call items that end at the call; the others end at its report
_SAME_TOOL = 0.5
_SAME_NOUN = 0.3
_TRIES = 12

_WORDINGS = read_wordings("tool_use")


def draw(rng: random.Random, split: Split) -> Draft:
    """Returns one turn of a conversation. Held out are domains with their schemas, and wordings."""
    while True:
        (make,) = rng.choices(_KINDS, _KIND_WEIGHTS)
        draft = make(rng, split)
        turns = [turn.to_dict() for turn in draft.turns]
        if len(json.dumps([draft.tools, turns])) + len(draft.request) <= _MAX_CHARACTERS:
            return draft


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chat:
    """A request and the tools that it is about. `turns` are calls and results so far."""

    key: str
    request: str
    tools: tuple[Tool, ...]
    turns: tuple[Message, ...] = ()

    def after(self, call: ToolCall, result: Mapping[str, Any]) -> _Chat:
        """Returns the chat with one more call and its result."""
        turns = (
            Message("assistant", tool_calls=(call,)),
            Message("tool", content=json.dumps(result)),
        )
        return replace(self, turns=self.turns + turns)

    def expect_calls(self, rng: random.Random, split: Split, *calls: ToolCall) -> Draft:
        """Returns the draft whose reply makes `calls`, other tools offered beside those needed."""
        tools = _offer(rng, split, self.tools)
        check = Calls(calls, {tool.name: tool.parameters for tool in tools})
        return self._draft(rng, tools, Message("assistant", tool_calls=calls), check)

    def expect_text(self, rng: random.Random, split: Split, text: str, check: Sentence) -> Draft:
        """Returns the draft whose reply is `text`, or another one that `check` accepts."""
        tools = _offer(rng, split, self.tools)
        return self._draft(rng, tools, Message("assistant", content=text), check)

    def expect_report(self, rng: random.Random, split: Split, tool: Tool, number: int) -> Draft:
        """Returns the draft whose reply says that `tool` has done its work on record `number`."""
        text = f"{tool.action.past} {tool.domain.noun} {number}."
        return self.expect_text(rng, split, text, Sentence(mentions=(str(number),)))

    def _draft(
        self, rng: random.Random, tools: Sequence[Tool], reply: Message, check: Check
    ) -> Draft:
        return Draft(
            key=self.key,
            request=self.request,
            turns=self.turns,
            tools=tuple(tool.schema(rng) for tool in tools),
            reply=reply,
            check=check,
        )


def _one_call(rng: random.Random, split: Split) -> Draft:
    tool = _draw_any(rng, split)
    facts = draw_facts(rng, split, tool)
    call = tool.call(facts)
    request = _dress(rng, split, say_request(rng, split, tool, facts))
    chat = _Chat(key=str(call), request=request, tools=(tool,))
    if rng.random() < _CALLS:
        return chat.expect_calls(rng, split, call)
    number = call.arguments.get("id") or _draw_id(rng)
    return chat.after(call, {"id": number}).expect_report(rng, split, tool, number)


def _several_calls(rng: random.Random, split: Split) -> Draft:
    count = rng.choice((2, 2, 2, 3))
    if rng.random() < _SAME_TOOL:
        tools = [_draw_any(rng, split)] * count
    else:
        tools = list(_offer(rng, split, (), count))
    calls: list[ToolCall] = []
    request = ""
    for tool in tools:
        facts = draw_facts(rng, split, tool)
        call = tool.call(facts)
        if call in calls:  # asking twice for the same thing may well mean it once
            continue
        calls.append(call)
        said = say_request(rng, split, tool, facts)
        if request:
            pattern = attach(_WORDINGS["then"].draw(rng, split))
            said = say(rng, pattern, request=uncapitalize(said))
        request += said
    chat = _Chat(
        key=str(calls),
        request=_dress(rng, split, request),
        tools=tuple({tool.name: tool for tool in tools}.values()),
    )
    return chat.expect_calls(rng, split, *calls)


def _change_found(rng: random.Random, split: Split) -> Draft:
    """A record has to be found by a value before it can be updated or deleted."""
    domain = draw_domain(rng, split)
    find, fact = _draw_search(rng, split, domain)
    change = draw_tool(rng, domain, rng.choice((UPDATE, UPDATE, DELETE)))
    number = draw_fact(rng, split, ID)
    facts = [each for each in draw_facts(rng, split, change) if each.field is not ID]
    call = change.call([number, *facts])
    wordings = _WORDINGS["delete_found" if change.action is DELETE else "change_found"]
    request = say(
        rng,
        wordings.draw(rng, split),
        act=rng.choice(change.action.said),
        which=say_facts(rng, split, [fact], FILTERS),
        args=say_facts(rng, split, facts, CHANGES, phrased=0.0),
        **nouns(rng, domain),
    )
    chat = _Chat(
        key=f"{find.call([fact])} {call}",
        request=_dress(rng, split, capitalize(request)),
        tools=(find, change),
    )
    return _stage(rng, split, chat, find, fact, number.value, change, call)


def _create_for_found(rng: random.Random, split: Split) -> Draft:
    """A record of one domain is needed to create one of another."""
    other, domain = draw_domain(rng, split), draw_domain(rng, split)
    find, fact = _draw_search(rng, split, other)
    number = draw_fact(rng, split, Field(f"{other.noun}_id", "number"))
    create = draw_tool(rng, domain, CREATE)
    facts = draw_facts(rng, split, create)
    create = replace(
        create,
        fields=(number.field, *create.fields),
        required=(number.field.name, *create.required),
    )
    call = create.call([number, *facts])
    request = say(
        rng,
        _WORDINGS["link_found"].draw(rng, split),
        other=nouns(rng, other)["noun"],
        act=rng.choice(CREATE.said),
        which=say_facts(rng, split, [fact], FILTERS),
        args=say_facts(rng, split, facts, DETAILS),
        **nouns(rng, domain),
    )
    chat = _Chat(
        key=f"{find.call([fact])} {call}",
        request=_dress(rng, split, capitalize(request)),
        tools=(find, create),
    )
    return _stage(rng, split, chat, find, fact, number.value, create, call)


def _stage(
    rng: random.Random,
    split: Split,
    chat: _Chat,
    find: Tool,
    fact: Fact,
    number: int,
    change: Tool,
    call: ToolCall,
) -> Draft:
    """Returns one turn of a chat that finds record `number` by `fact` and then makes `call`."""
    (stage,) = rng.choices(("find", "change", "report", "nothing found"), (4, 5, 2, 1))
    search = find.call([fact])
    if stage == "find":
        return chat.expect_calls(rng, split, search)
    if stage == "nothing found":
        return _expect_nothing(rng, split, chat, find, search)
    chat = chat.after(search, {"id": number, fact.field.name: fact.value})
    if stage == "change":
        return chat.expect_calls(rng, split, call)
    number = call.arguments.get("id") or _draw_id(rng)
    return chat.after(call, {"id": number}).expect_report(rng, split, change, number)


def _answer_found(rng: random.Random, split: Split) -> Draft:
    """A record is found and one of its values is the answer."""
    domain = draw_domain(rng, split)
    find, fact = _draw_search(rng, split, domain)
    asked = rng.choice([field for field in simple_fields(domain) if field != fact.field])
    answer = draw_fact(rng, split, asked)
    request = say(
        rng,
        _WORDINGS["ask_found"].draw(rng, split),
        field=asked.spoken,
        which=say_facts(rng, split, [fact], FILTERS),
        **nouns(rng, domain),
    )
    search = find.call([fact])
    chat = _Chat(
        key=f"{search} {asked.name}",
        request=_dress(rng, split, capitalize(request)),
        tools=(find,),
    )
    (stage,) = rng.choices(("find", "answer", "nothing found"), (2, 4, 1))
    if stage == "find":
        return chat.expect_calls(rng, split, search)
    if stage == "nothing found":
        return _expect_nothing(rng, split, chat, find, search)
    values = [fact, answer, draw_fact(rng, split, ID)]
    rng.shuffle(values)
    record = {each.field.name: each.value for each in values}
    said = str(answer.value)
    check = Sentence(
        mentions=(said,), avoids=[str(each) for each in record.values() if str(each) != said]
    )
    return chat.after(search, record).expect_text(rng, split, f"{asked.spoken}: {said}", check)


def _no_tool(rng: random.Random, split: Split) -> Draft:
    tool = _draw_any(rng, split)
    facts = draw_facts(rng, split, tool)
    request = _dress(rng, split, say_request(rng, split, tool, facts))
    others = [each for each in _offer(rng, split, (tool,), 3) if each is not tool]
    # On the same noun the verb must decide, and only the call itself may change a record
    if rng.random() < _SAME_NOUN:
        action = rng.choice([each for each in ACTIONS if each not in (tool.action, FIND)])
        others[0] = draw_tool(rng, tool.domain, action)
    return Draft(
        key=f"no tool {tool.call(facts)}",
        request=request,
        tools=tuple(each.schema(rng) for each in others),
        reply=Message("assistant", content=NO_TOOL),
        check=Sentence(refuses=True),
    )


def _missing(rng: random.Random, split: Split) -> Draft:
    """A required argument is not in the request, and nothing offered could find it."""
    action = rng.choice((CREATE, CREATE, CREATE, UPDATE, DELETE))
    while True:
        tool = draw_tool(rng, draw_domain(rng, split), action)
        leaves = [field for field in tool.fields if field.kind not in ("object", "flag")]
        needed = [field for field in leaves if field.name in tool.required]
        if needed and (len(tool.fields) > 1 or action is DELETE):
            break
    missing = rng.choice(needed)
    facts = [fact for fact in draw_facts(rng, split, tool) if fact.field != missing]
    request = say_request(rng, split, tool, facts)
    chat = _Chat(
        key=f"missing {missing.name} {tool.call(facts)}",
        request=_dress(rng, split, request.replace("  ", " ").strip()),
        tools=(tool,),
    )
    check = Sentence(mentions=(missing.spoken,), asks=True)
    return chat.expect_text(rng, split, f"What is the {missing.spoken}?", check)


def _expect_nothing(
    rng: random.Random, split: Split, chat: _Chat, find: Tool, search: ToolCall
) -> Draft:
    chat = chat.after(search, _NOT_FOUND)
    text = f"There is no such {find.domain.noun}."
    return chat.expect_text(rng, split, text, Sentence(refuses=True))


def _draw_any(rng: random.Random, split: Split) -> Tool:
    return draw_tool(rng, draw_domain(rng, split), rng.choice(ACTIONS))


def _draw_search(rng: random.Random, split: Split, domain: Domain) -> tuple[Tool, Fact]:
    """Returns a tool that finds records of `domain`, and the value to search for."""
    find = draw_tool(rng, domain, FIND)
    return find, draw_fact(rng, split, rng.choice(find.fields))


def _draw_id(rng: random.Random) -> int:
    return rng.randrange(10, 10_000)


def _offer(
    rng: random.Random, split: Split, needed: Sequence[Tool], count: int = 0
) -> tuple[Tool, ...]:
    """Returns `needed` among other tools, shuffled: `count` in all, or a few if it is 0.

    No two tools do the same to the same noun, and the only domains twice are those of `needed`.
    """
    count = count or len(needed) + rng.choice((0, 1, 1, 2))
    offered = {tool.domain.noun + tool.action.past: tool for tool in needed}
    budget = _MAX_PARAMETERS - sum(len(tool.fields) for tool in needed)
    taken = {tool.domain.noun for tool in needed}
    for _ in range(_TRIES):
        if len(offered) == count:
            break
        tool = _draw_any(rng, split)
        if len(tool.fields) <= budget and tool.domain.noun not in taken:
            offered[tool.name] = tool
            taken.add(tool.domain.noun)
            budget -= len(tool.fields)
    tools = list(offered.values())
    rng.shuffle(tools)
    return tuple(tools)


def _dress(rng: random.Random, split: Split, request: str) -> str:
    """Returns a request with its full stop, and sometimes a sentence that has nothing to do with it."""
    if request[-1] not in ".?":
        request += "."
    if rng.random() >= _CHATTER_SHARE:
        return vary(rng, request)
    chatter = say(rng, _WORDINGS["chatter"].draw(rng, split))
    return rng.choice((f"{chatter} {request}", f"{request} {chatter}"))


_KINDS: tuple[Callable[[random.Random, Split], Draft], ...] = (
    _one_call,
    _several_calls,
    _change_found,
    _create_for_found,
    _answer_found,
    _no_tool,
    _missing,
)
_KIND_WEIGHTS = (6, 3, 3, 1, 2, 2, 2)
