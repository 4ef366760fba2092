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


def draw(rng: random.Random, held_out: bool) -> Draft:
    """Returns one turn of a conversation. Held out are domains with their schemas, and wordings."""
    while True:
        (make,) = rng.choices(_KINDS, _KIND_WEIGHTS)
        draft = make(rng, held_out)
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

    def expect_calls(self, rng: random.Random, held_out: bool, *calls: ToolCall) -> Draft:
        """Returns the draft whose reply makes `calls`, other tools offered beside those needed."""
        tools = _offer(rng, held_out, self.tools)
        check = Calls(calls, {tool.name: tool.parameters for tool in tools})
        return self._draft(rng, tools, Message("assistant", tool_calls=calls), check)

    def expect_text(self, rng: random.Random, held_out: bool, text: str, check: Sentence) -> Draft:
        """Returns the draft whose reply is `text`, or another one that `check` accepts."""
        tools = _offer(rng, held_out, self.tools)
        return self._draft(rng, tools, Message("assistant", content=text), check)

    def expect_report(self, rng: random.Random, held_out: bool, tool: Tool, number: int) -> Draft:
        """Returns the draft whose reply says that `tool` has done its work on record `number`."""
        text = f"{tool.action.past} {tool.domain.noun} {number}."
        return self.expect_text(rng, held_out, text, Sentence(mentions=(str(number),)))

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


def _one_call(rng: random.Random, held_out: bool) -> Draft:
    tool = _draw_any(rng, held_out)
    facts = draw_facts(rng, held_out, tool)
    call = tool.call(facts)
    request = _dress(rng, held_out, say_request(rng, held_out, tool, facts))
    chat = _Chat(key=str(call), request=request, tools=(tool,))
    if rng.random() < _CALLS:
        return chat.expect_calls(rng, held_out, call)
    number = call.arguments.get("id") or _draw_id(rng)
    return chat.after(call, {"id": number}).expect_report(rng, held_out, tool, number)


def _several_calls(rng: random.Random, held_out: bool) -> Draft:
    count = rng.choice((2, 2, 2, 3))
    if rng.random() < _SAME_TOOL:
        tools = [_draw_any(rng, held_out)] * count
    else:
        tools = list(_offer(rng, held_out, (), count))
    calls: list[ToolCall] = []
    request = ""
    for tool in tools:
        facts = draw_facts(rng, held_out, tool)
        call = tool.call(facts)
        if call in calls:  # asking twice for the same thing may well mean it once
            continue
        calls.append(call)
        said = say_request(rng, held_out, tool, facts)
        if request:
            pattern = attach(_WORDINGS["then"].draw(rng, held_out))
            said = say(rng, pattern, request=uncapitalize(said))
        request += said
    chat = _Chat(
        key=str(calls),
        request=_dress(rng, held_out, request),
        tools=tuple({tool.name: tool for tool in tools}.values()),
    )
    return chat.expect_calls(rng, held_out, *calls)


def _change_found(rng: random.Random, held_out: bool) -> Draft:
    """A record has to be found by a value before it can be updated or deleted."""
    domain = draw_domain(rng, held_out)
    find, fact = _draw_search(rng, held_out, domain)
    change = draw_tool(rng, domain, rng.choice((UPDATE, UPDATE, DELETE)))
    number = draw_fact(rng, held_out, ID)
    facts = [each for each in draw_facts(rng, held_out, change) if each.field is not ID]
    call = change.call([number, *facts])
    wordings = _WORDINGS["delete_found" if change.action is DELETE else "change_found"]
    request = say(
        rng,
        wordings.draw(rng, held_out),
        act=rng.choice(change.action.said),
        which=say_facts(rng, held_out, [fact], FILTERS),
        args=say_facts(rng, held_out, facts, CHANGES, phrased=0.0),
        **nouns(rng, domain),
    )
    chat = _Chat(
        key=f"{find.call([fact])} {call}",
        request=_dress(rng, held_out, capitalize(request)),
        tools=(find, change),
    )
    return _stage(rng, held_out, chat, find, fact, number.value, change, call)


def _create_for_found(rng: random.Random, held_out: bool) -> Draft:
    """A record of one domain is needed to create one of another."""
    other, domain = draw_domain(rng, held_out), draw_domain(rng, held_out)
    find, fact = _draw_search(rng, held_out, other)
    number = draw_fact(rng, held_out, Field(f"{other.noun}_id", "number"))
    create = draw_tool(rng, domain, CREATE)
    facts = draw_facts(rng, held_out, create)
    create = replace(
        create,
        fields=(number.field, *create.fields),
        required=(number.field.name, *create.required),
    )
    call = create.call([number, *facts])
    request = say(
        rng,
        _WORDINGS["link_found"].draw(rng, held_out),
        other=nouns(rng, other)["noun"],
        act=rng.choice(CREATE.said),
        which=say_facts(rng, held_out, [fact], FILTERS),
        args=say_facts(rng, held_out, facts, DETAILS),
        **nouns(rng, domain),
    )
    chat = _Chat(
        key=f"{find.call([fact])} {call}",
        request=_dress(rng, held_out, capitalize(request)),
        tools=(find, create),
    )
    return _stage(rng, held_out, chat, find, fact, number.value, create, call)


def _stage(
    rng: random.Random,
    held_out: bool,
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
        return chat.expect_calls(rng, held_out, search)
    if stage == "nothing found":
        return _expect_nothing(rng, held_out, chat, find, search)
    chat = chat.after(search, {"id": number, fact.field.name: fact.value})
    if stage == "change":
        return chat.expect_calls(rng, held_out, call)
    number = call.arguments.get("id") or _draw_id(rng)
    return chat.after(call, {"id": number}).expect_report(rng, held_out, change, number)


def _answer_found(rng: random.Random, held_out: bool) -> Draft:
    """A record is found and one of its values is the answer."""
    domain = draw_domain(rng, held_out)
    find, fact = _draw_search(rng, held_out, domain)
    asked = rng.choice([field for field in simple_fields(domain) if field != fact.field])
    answer = draw_fact(rng, held_out, asked)
    request = say(
        rng,
        _WORDINGS["ask_found"].draw(rng, held_out),
        field=asked.spoken,
        which=say_facts(rng, held_out, [fact], FILTERS),
        **nouns(rng, domain),
    )
    search = find.call([fact])
    chat = _Chat(
        key=f"{search} {asked.name}",
        request=_dress(rng, held_out, capitalize(request)),
        tools=(find,),
    )
    (stage,) = rng.choices(("find", "answer", "nothing found"), (2, 4, 1))
    if stage == "find":
        return chat.expect_calls(rng, held_out, search)
    if stage == "nothing found":
        return _expect_nothing(rng, held_out, chat, find, search)
    values = [fact, answer, draw_fact(rng, held_out, ID)]
    rng.shuffle(values)
    record = {each.field.name: each.value for each in values}
    said = str(answer.value)
    check = Sentence(
        mentions=(said,), avoids=[str(each) for each in record.values() if str(each) != said]
    )
    return chat.after(search, record).expect_text(rng, held_out, f"{asked.spoken}: {said}", check)


def _no_tool(rng: random.Random, held_out: bool) -> Draft:
    tool = _draw_any(rng, held_out)
    facts = draw_facts(rng, held_out, tool)
    request = _dress(rng, held_out, say_request(rng, held_out, tool, facts))
    others = [each for each in _offer(rng, held_out, (tool,), 3) if each is not tool]
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


def _missing(rng: random.Random, held_out: bool) -> Draft:
    """A required argument is not in the request, and nothing offered could find it."""
    action = rng.choice((CREATE, CREATE, CREATE, UPDATE, DELETE))
    while True:
        tool = draw_tool(rng, draw_domain(rng, held_out), action)
        leaves = [field for field in tool.fields if field.kind not in ("object", "flag")]
        needed = [field for field in leaves if field.name in tool.required]
        if needed and (len(tool.fields) > 1 or action is DELETE):
            break
    missing = rng.choice(needed)
    facts = [fact for fact in draw_facts(rng, held_out, tool) if fact.field != missing]
    request = say_request(rng, held_out, tool, facts)
    chat = _Chat(
        key=f"missing {missing.name} {tool.call(facts)}",
        request=_dress(rng, held_out, request.replace("  ", " ").strip()),
        tools=(tool,),
    )
    check = Sentence(mentions=(missing.spoken,), asks=True)
    return chat.expect_text(rng, held_out, f"What is the {missing.spoken}?", check)


def _expect_nothing(
    rng: random.Random, held_out: bool, chat: _Chat, find: Tool, search: ToolCall
) -> Draft:
    chat = chat.after(search, _NOT_FOUND)
    text = f"There is no such {find.domain.noun}."
    return chat.expect_text(rng, held_out, text, Sentence(refuses=True))


def _draw_any(rng: random.Random, held_out: bool) -> Tool:
    return draw_tool(rng, draw_domain(rng, held_out), rng.choice(ACTIONS))


def _draw_search(rng: random.Random, held_out: bool, domain: Domain) -> tuple[Tool, Fact]:
    """Returns a tool that finds records of `domain`, and the value to search for."""
    find = draw_tool(rng, domain, FIND)
    return find, draw_fact(rng, held_out, rng.choice(find.fields))


def _draw_id(rng: random.Random) -> int:
    return rng.randrange(10, 10_000)


def _offer(
    rng: random.Random, held_out: bool, needed: Sequence[Tool], count: int = 0
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
        tool = _draw_any(rng, held_out)
        if len(tool.fields) <= budget and tool.domain.noun not in taken:
            offered[tool.name] = tool
            taken.add(tool.domain.noun)
            budget -= len(tool.fields)
    tools = list(offered.values())
    rng.shuffle(tools)
    return tuple(tools)


def _dress(rng: random.Random, held_out: bool, request: str) -> str:
    """Returns a request with its full stop, and sometimes a sentence that has nothing to do with it."""
    if request[-1] not in ".?":
        request += "."
    if rng.random() >= _CHATTER_SHARE:
        return vary(rng, request)
    chatter = say(rng, _WORDINGS["chatter"].draw(rng, held_out))
    return rng.choice((f"{chatter} {request}", f"{request} {chatter}"))


_KINDS: tuple[Callable[[random.Random, bool], Draft], ...] = (
    _one_call,
    _several_calls,
    _change_found,
    _create_for_found,
    _answer_found,
    _no_tool,
    _missing,
)
_KIND_WEIGHTS = (6, 3, 3, 1, 2, 2, 2)
