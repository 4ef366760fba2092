"""The task families: what they promise, and what no training sees."""

from __future__ import annotations

import dataclasses
import functools
import gc
import hashlib
import json
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import clover
from clover.chat import ChatTemplate, Message, ToolCall
from clover.tasks import (
    DEFAULT_WEIGHTS,
    FAMILIES,
    Task,
    check_reply,
    make_task,
    matches_reference,
    sample_tasks,
    wordings_of,
)
from clover.tasks import domains as domains_module
from clover.tasks.__main__ import page
from clover.tasks.checks import Sentence
from clover.tasks.columns import work_out_step
from clover.tasks.domains import DOMAINS, Domain, draw_domain
from clover.tasks.fields import CHANGES, DETAILS, FILTERS
from clover.tasks.made_up import Sentences, gist, gists
from clover.tasks.parted import Parted, attach, read_wordings, vary
from clover.tasks.splits import Split
from clover.tasks.tools import ACTIONS
from clover.tasks.words import (
    CHOICES,
    CITIES,
    COLORS,
    NAMES,
    NOUNS,
    THINGS,
    Pool,
    invented_word,
    is_held_out,
)
from clover.tokenizer import Tokenizer

RUN_FAMILIES = ("python_function", "terminal")  # their checks need a sandbox
READ_FAMILIES = tuple(family for family in FAMILIES if family not in RUN_FAMILIES)
MANY = 200

# A row of training is 384 tokens; most of tool use needs 200 with its tools, all others far less.
MAX_PROMPT_TOKENS = 400
TYPICAL_PROMPT_TOKENS = 200
MIN_SHARE_OF_TYPICAL = 0.7

# Of the text of tasks: what the shipped clover-nano was trained on must not change.
PINNED = {
    "tool_call": "45c5e2f177d2cee7",
    "arithmetic": "07ae1ce1c273908e",
    "lookup": "f2db5453da11713f",
    "sorting": "1f16f9a496acf7c5",
    "tool_use": "f2e349db52068dbc",
    "expression": "460d824fb32ab0de",
    "word_problem": "06934c74aa13aed0",
    "extraction": "e6bdd3975e3b4be1",
    "python_function": "f963421de99c9295",
    "terminal": "aa7a161e80b53ec7",
}


@functools.cache
def tasks(family: str, split: str) -> tuple[Task, ...]:
    return tuple(make_task(family, seed, split) for seed in range(MANY))


def text_of(task: Task) -> str:
    """Everything that a model reads or writes."""
    return json.dumps(
        [[message.to_dict() for message in task.messages], task.tools, task.reply.to_dict()]
    )


def words_of(text: str) -> set[str]:
    # Escapes first: "\nolive" is not a word
    return {word.lower() for word in re.findall(r"[A-Za-z]+", re.sub(r"\\+[nu\"]", " ", text))}


def digest_of(family: str) -> str:
    text = "".join(
        text_of(make_task(family, seed, split))
        for split in ("train", "seen", "heldout")
        for seed in range(20)
    )
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_draws_the_same_tasks_for_ever(family: str) -> None:
    assert digest_of(family) == PINNED[family]


def test_by_default_every_family_is_drawn() -> None:
    assert {task.family for task in sample_tasks(200, 0, "train")} == set(FAMILIES)
    assert set(DEFAULT_WEIGHTS) == set(FAMILIES)


@pytest.mark.parametrize("family", READ_FAMILIES)
@pytest.mark.parametrize("split", ["train", "seen", "heldout"])
def test_every_reference_is_right(family: str, split: str) -> None:
    assert all(check_reply(task, task.reply) for task in tasks(family, split))


@pytest.mark.parametrize("family", FAMILIES)
def test_other_seeds_give_other_tasks(family: str) -> None:
    assert len({text_of(task) for task in tasks(family, "train")}) > 0.98 * MANY


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_prompts_fit_into_a_row_of_training(family: str, split: str) -> None:
    assert clover.__file__ is not None
    tokenizer = Tokenizer.load(Path(clover.__file__).parent / "assets" / "nano")
    template = ChatTemplate()
    lengths = [
        len(
            tokenizer.encode(
                template.render(
                    task.messages, tools=task.tools, enable_thinking=task.enable_thinking
                )
            )
        )
        for task in tasks(family, split)
    ]
    assert max(lengths) <= MAX_PROMPT_TOKENS
    short = sum(length < TYPICAL_PROMPT_TOKENS for length in lengths)
    assert short > MIN_SHARE_OF_TYPICAL * MANY


def test_the_page_about_tasks_is_what_its_command_writes() -> None:
    path = Path(__file__).parents[2] / "docs" / "tasks.md"
    assert path.read_text(encoding="utf-8") == page()


# What is held out.


@contextmanager
def nothing_held_out() -> Iterator[None]:
    """Empties the held-out part of every list of words, wordings, domains and combinations."""
    # Not isinstance: it asks every object for its class, and some answer with a warning
    parted: list[Any] = [
        each for each in gc.get_objects() if issubclass(type(each), (Parted, Pool))
    ]
    kept = [each.held_out for each in parted]
    for each in parted:
        object.__setattr__(each, "held_out", ())  # frozen, and there is no other way to all of them
    try:
        yield
    finally:
        for each, held_out in zip(parted, kept, strict=True):
            object.__setattr__(each, "held_out", held_out)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split", ["train", "seen"])
def test_training_would_be_the_same_if_nothing_were_held_out(family: str, split: str) -> None:
    before = tasks(family, split)
    with nothing_held_out():
        again = [make_task(family, seed, split) for seed in range(MANY)]
        with pytest.raises(IndexError):  # the held-out part is gone indeed
            DOMAINS.draw(random.Random(0), "heldout")
    assert list(before) == again


def drawn_from_lists(
    monkeypatch: pytest.MonkeyPatch, family: str, split: str
) -> set[tuple[int, str]]:
    """What `MANY` tasks take out of parted lists, each with the list that it comes from."""
    drawn = set[tuple[int, str]]()
    original = Parted.draw

    def draw(self: Parted[Any], rng: Any, split: Split) -> Any:
        item = original(self, rng, split)
        drawn.add((id(self), repr(item)))
        return item

    with monkeypatch.context() as patch:
        patch.setattr(Parted, "draw", draw)
        for seed in range(MANY):
            make_task(family, seed, split)
    return drawn


@pytest.mark.parametrize("family", FAMILIES)
def test_no_domain_wording_or_combination_serves_training_and_held_out_tasks(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = drawn_from_lists(monkeypatch, family, "train")
    trained |= drawn_from_lists(monkeypatch, family, "seen")
    held_out = drawn_from_lists(monkeypatch, family, "heldout")
    assert trained
    assert held_out
    assert not trained & held_out


def test_every_list_holds_out_a_fifth_and_shares_nothing() -> None:
    # Domains are parted by the rule for words, and counted in the next test
    lists = [e for e in gc.get_objects() if issubclass(type(e), Parted) and e is not DOMAINS]
    assert len(lists) > 40
    for each in lists:
        assert not set(each.train) & set(each.held_out)
        assert len(each.held_out) >= 0.2 * (len(each.train) + len(each.held_out))


def test_there_are_forty_domains_to_train_on_and_eight_that_no_training_sees() -> None:
    assert len(DOMAINS.train) >= 40
    assert len(DOMAINS.held_out) >= 8
    assert all(is_held_out(domain.noun) for domain in DOMAINS.held_out)
    assert not any(is_held_out(domain.noun) for domain in DOMAINS.train)


def test_half_of_the_domains_of_training_are_made_up_and_no_held_out_one_is() -> None:
    rng = random.Random(0)
    known = {domain.noun for domain in DOMAINS.train}
    drawn = [draw_domain(rng, "train") for _ in range(MANY)]
    made_up = [domain for domain in drawn if domain.noun not in known]
    assert 0.4 * MANY < len(made_up) < 0.6 * MANY
    for domain in made_up:
        names = [field.name for field in domain.fields]
        assert len(set(names)) == len(names)
        assert not domain.synonyms
        assert not is_held_out(domain.noun)
    assert all(draw_domain(rng, "heldout") in DOMAINS.held_out for _ in range(MANY))


def test_made_up_words_are_in_no_list_and_not_held_out() -> None:
    rng = random.Random(0)
    pools = (NOUNS, NAMES, CITIES, THINGS, COLORS, CHOICES)
    listed = {word.lower() for pool in pools for word in (*pool.train, *pool.held_out)}
    words = {invented_word(rng) for _ in range(2_000)}
    assert len(words) > 1_900
    assert not words & listed
    assert not any(map(is_held_out, words))


def test_a_held_out_domain_shares_no_schema_with_training() -> None:
    def schemas(split: str) -> set[str]:
        found = set[str]()
        for family in ("tool_call", "tool_use"):
            found |= {json.dumps(tool) for task in tasks(family, split) for tool in task.tools}
        asked = (
            re.search(r"\{.*\}", task.messages[0].content) for task in tasks("extraction", split)
        )
        return found | {match[0] for match in asked if match}

    assert not schemas("heldout") & (schemas("train") | schemas("seen"))


def names_of(domain: Domain) -> set[str]:
    return words_of(" ".join([domain.noun, *domain.synonyms]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split", ["train", "seen"])
def test_no_held_out_word_or_domain_is_named_in_train_or_seen(family: str, split: str) -> None:
    pools = (NOUNS, NAMES, CITIES, THINGS, COLORS, CHOICES)
    held_out = {word.lower() for pool in pools for word in pool.held_out}
    held_out = held_out.union(*map(names_of, DOMAINS.held_out))
    for task in tasks(family, split):
        assert not held_out & words_of(text_of(task))


def item_of(task: Task) -> str:
    """What is asked, whatever the wording around it."""
    if task.family == "extraction":
        return task.reply.content
    if task.family == "python_function":
        return task.reply.content.split("(", 1)[1]
    if task.family in ("expression", "word_problem"):
        assert task.reply.thinking is not None
        return task.reply.thinking
    return text_of(task)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_item_of_train_is_in_seen_or_heldout(family: str) -> None:
    trained = {item_of(task) for task in tasks(family, "train")}
    for split in ("seen", "heldout"):
        assert not trained & {item_of(task) for task in tasks(family, split)}


# Wordings.

ARTICLES = {"a", "an", "the"}
# Who and what a wording is about may be left out of it; the rest is what its answer depends on
CAST = {"p", "q", "things", "others", "act", "noun", "a_noun"}
MANNERS = ("Hello. ", "Hi. ", "OK, ", "So, ", "Well, ", " Thanks.", " Thank you.")


def spoken_words(wording: str) -> set[str]:
    """The words of all alternatives, slots aside."""
    return set(re.findall(r"[a-z]+", re.sub(r"\{\w+\}", " ", wording.lower())))


def alternatives(wording: str) -> Iterator[str]:
    """Every sentence that `say` can make of a wording, its slots as they are."""
    match = re.search(r"\[([^][]*\|[^][]*)\]", wording)
    if match is None:
        yield wording
    else:
        for choice in match[1].split("|"):
            yield from alternatives(wording[: match.start()] + choice + wording[match.end() :])


def without_articles(sentence: str) -> tuple[str, ...]:
    return tuple(t for t in re.findall(r"\{\w+\}|\w+|\S", sentence.lower()) if t not in ARTICLES)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_shows_every_word_of_a_held_out_wording_in_another_phrase(family: str) -> None:
    lists = wordings_of(family).values()
    trained = {word for each in lists for line in each.train for word in spoken_words(line)}
    for each in lists:
        for line in each.held_out:
            assert spoken_words(line) <= trained, line


@pytest.mark.parametrize("family", FAMILIES)
def test_no_held_out_wording_is_one_of_training_but_for_articles(family: str) -> None:
    for each in wordings_of(family).values():
        trained = {without_articles(s) for line in each.train for s in alternatives(line)}
        for line in each.held_out:
            assert not trained & {without_articles(s) for s in alternatives(line)}, line


@pytest.mark.parametrize("family", FAMILIES)
def test_all_wordings_of_a_list_tell_the_same_values(family: str) -> None:
    for name, each in wordings_of(family).items():
        told = {
            frozenset(re.findall(r"\{(\w+)\}", line)) - CAST for line in each.train + each.held_out
        }
        assert len(told) == 1, (name, told)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_wording_has_a_space_too_many_or_comes_twice(family: str) -> None:
    for each in wordings_of(family).values():
        lines = each.train + each.held_out
        assert len(set(lines)) == len(lines)
        for sentence in (s for line in lines for s in alternatives(line)):
            assert sentence == sentence.strip()
            assert not re.search(r"  | [.,;]|\(\s", sentence), sentence


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_sentence_drawn_from_a_list_is_among_the_wordings_of_its_family(
    family: str, split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = [
        each.held_out if split == "heldout" else each.train for each in wordings_of(family).values()
    ]
    known = {repr(line) for side in sides for line in side}
    drawn = {item for _, item in drawn_from_lists(monkeypatch, family, split)}
    with_slots = {item for item in drawn if item.startswith(("'", '"')) and "{" in item}
    assert with_slots
    assert with_slots <= known


def test_made_up_wordings_say_what_no_held_out_one_says() -> None:
    rng = random.Random(0)
    varied = Sentences(read_wordings("extraction")["sentence"])
    refused = gists(read_wordings("extraction")["sentence"].held_out)
    assert not {gist(varied.draw(rng, "train")) for _ in range(5 * MANY)} & refused
    for name, styles in (("details", DETAILS), ("filters", FILTERS), ("changes", CHANGES)):
        listed = read_wordings("fields")[name]
        trained = {attach(style).replace("<>", "\n") for style in listed.train}
        drawn = {styles.draw(rng, "train").example for _ in range(5 * MANY)}
        assert len(drawn - trained) > MANY / 2
        assert not set(map(gist, drawn - trained)) & gists(map(attach, listed.held_out))
    lists = read_wordings("tools")
    refused = gists(request for each in lists.values() for request in each.held_out)
    for action in ACTIONS:
        assert not gists(action.frames.draw(rng, "train") for _ in range(5 * MANY)) & refused


def test_only_training_makes_up_wordings() -> None:
    sentences = read_wordings("extraction")["sentence"]
    varied, rng = Sentences(sentences), random.Random(0)
    assert {varied.draw(rng, "seen") for _ in range(MANY)} <= set(sentences.train)
    assert {varied.draw(rng, "heldout") for _ in range(MANY)} <= set(sentences.held_out)
    drawn = [varied.draw(rng, "train") for _ in range(MANY)]
    made_up = {sentence for sentence in drawn if sentence not in sentences.train}
    assert 0.3 * MANY < len(made_up) < 0.6 * MANY
    assert all(sorted(re.findall(r"\{(\w+)\}", each)) == ["name", "value"] for each in made_up)


def test_the_gist_of_a_wording_is_its_words_and_slots() -> None:
    assert gists(["[Now|Then] {act} the {noun}, an id: {id}."]) == {
        "now {act} {noun} id {id}",
        "then {act} {noun} id {id}",
    }


@given(st.randoms(use_true_random=False))
def test_manners_leave_a_request_its_words_and_its_slots(rng: random.Random) -> None:
    for request in ("Move {f} to {d}", "I need {n} of them.", "What is in {f}?", "{f} can go"):
        varied = vary(rng, request)
        plain = functools.reduce(lambda text, manner: text.replace(manner, ""), MANNERS, varied)
        assert plain.lower().rstrip(".") == request.lower().rstrip(".")
        assert "i need" not in varied
        assert varied.endswith("}") == request.endswith("}")


def test_one_request_in_three_or_so_has_manners() -> None:
    rng = random.Random(0)
    requests = [vary(rng, "Find the lamp.") for _ in range(MANY)]
    assert 0.15 * MANY < sum(each != "Find the lamp." for each in requests) < 0.45 * MANY
    assert {
        "find the lamp.",
        "Find the lamp",
        "So, find the lamp.",
        "Find the lamp. Thanks.",
    } <= set(requests)


# Tool use.


def calls_of(split: str) -> list[Task]:
    return [task for task in tasks("tool_use", split) if task.reply.tool_calls]


def test_tool_use_has_every_kind_of_item() -> None:
    made = tasks("tool_use", "train")
    counts = {
        "several calls": sum(len(task.reply.tool_calls) > 1 for task in made),
        "after a result": sum(
            len(task.messages) == 3 and bool(task.reply.tool_calls) for task in made
        ),
        "after two results": sum(len(task.messages) == 5 for task in made),
        "no tool": sum("tools" in task.reply.content for task in made),
        "asks": sum(task.reply.content.endswith("?") for task in made),
        "nested": sum(
            '{"type": "object", "properties": {'
            in json.dumps(task.tools[0]["function"]["parameters"]["properties"])
            for task in made
        ),
    }
    assert all(count >= 0.02 * MANY for count in counts.values()), counts


def test_calls_use_offered_tools_and_give_every_required_argument() -> None:
    for task in calls_of("heldout"):
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in task.tools}
        for call in task.reply.tool_calls:
            schema = offered[call.name]
            assert set(schema.get("required", [])) <= set(call.arguments)
            assert set(call.arguments) <= set(schema["properties"])


def test_no_offered_tool_fits_where_the_reply_says_so() -> None:
    synonyms = {domain.noun: domain.synonyms for domain in DOMAINS.train}  # made-up nouns have none
    for task in tasks("tool_use", "train"):
        if task.reply.content == "None of my tools can do that.":
            assert task.check is not None
            asked = task.messages[0].content.lower()
            for tool in task.tools:
                noun = tool["function"]["name"].split("_")[1]
                names = (noun, *synonyms.get(noun, ()))
                if any(re.search(rf"\b{name}\b", asked) for name in names):
                    # The noun fits, so the verb must not: a find tool would do for any request
                    assert not tool["function"]["name"].startswith(("find_", "get_"))


def test_an_asked_for_argument_is_required_and_not_told() -> None:
    asking = [task for task in tasks("tool_use", "train") if task.reply.content.endswith("?")]
    assert asking
    for task in asking:
        missing = (
            task.reply.content.removeprefix("What is the ").removesuffix("?").replace(" ", "_")
        )
        required = [
            name
            for tool in task.tools
            for name in tool["function"]["parameters"].get("required", [])
        ]
        assert missing in required


def test_a_second_call_takes_its_id_from_the_result() -> None:
    chained = [task for task in calls_of("train") if len(task.messages) == 3]
    assert chained
    told = 0
    for task in chained:
        number = json.loads(task.messages[2].content)["id"]
        (call,) = task.reply.tool_calls
        assert number in call.arguments.values()
        told += str(number) in re.findall(r"\d+", task.messages[0].content)
    # An id of one digit may by chance be another value of the request
    assert told <= 0.1 * len(chained)


def with_call(task: Task, arguments: dict[str, Any], name: str | None = None) -> Message:
    first, *others = task.reply.tool_calls
    changed = ToolCall(name or first.name, arguments)
    return dataclasses.replace(task.reply, tool_calls=(changed, *others))


def test_a_call_with_another_value_type_name_or_number_of_arguments_is_wrong() -> None:
    for task in calls_of("seen"):
        call, *_ = task.reply.tool_calls
        arguments = dict(call.arguments)
        key = next(iter(arguments))
        value = arguments[key]
        others: list[Any] = [None, [value], f"{value}0"]
        if isinstance(value, int):
            others += [str(value), int(value) if isinstance(value, bool) else float(value)]
        for other in others:
            assert not check_reply(task, with_call(task, arguments | {key: other}))
        assert not check_reply(task, with_call(task, arguments | {"other": 1}))
        assert not check_reply(
            task, with_call(task, {k: arguments[k] for k in arguments if k != key})
        )
        assert not check_reply(task, with_call(task, arguments, name=f"{call.name}s"))
        repeated = (*task.reply.tool_calls, call)
        assert not check_reply(task, dataclasses.replace(task.reply, tool_calls=repeated))
        assert not check_reply(task, Message("assistant", content="Done."))


def test_the_order_of_calls_and_of_arguments_and_text_beside_them_are_free() -> None:
    several = [task for task in calls_of("seen") if len(task.reply.tool_calls) > 1]
    assert several
    for task in several:
        turned = tuple(
            ToolCall(call.name, dict(reversed(list(call.arguments.items()))))
            for call in reversed(task.reply.tool_calls)
        )
        reply = Message("assistant", content="Both at once.", tool_calls=turned)
        assert check_reply(task, reply)
        assert not matches_reference(task, reply)


def test_sentences_are_judged_by_what_they_say() -> None:
    made = [task for task in tasks("tool_use", "seen") if not task.reply.tool_calls]
    for task in made:
        text = task.reply.content
        assert not check_reply(task, Message("assistant"))
        assert not check_reply(task, Message("assistant", content="Sure."))
        if text.endswith("?"):
            asked = text.removeprefix("What is the ")
            assert check_reply(task, Message("assistant", content=f"Please tell me the {asked}"))
            assert not check_reply(task, Message("assistant", content="What is it?"))
        elif text.startswith("None of"):
            assert check_reply(task, Message("assistant", content="I cannot do that."))
            assert not check_reply(task, Message("assistant", content="Done, no problem?"))
        elif text.startswith(("Created", "Found", "Updated", "Deleted")):
            number = text.split()[-1]
            assert check_reply(task, Message("assistant", content=f"It is done, see {number}"))
            assert not check_reply(task, Message("assistant", content=f"Done: 1{number}"))


def test_a_value_called_none_is_not_a_refusal() -> None:
    check = Sentence(mentions=("none",), avoids=("Erik",))
    assert check.accepts(Message("assistant", content="meal: none"))
    assert not check.accepts(Message("assistant", content="I cannot say, none."))


# Arithmetic.


@given(st.integers(0, 999), st.integers(1, 9))
def test_products_and_quotients_end_in_their_result(a: int, b: int) -> None:
    assert work_out_step(a, "*", b)[0].endswith(f"={a * b}")
    thoughts, quotient = work_out_step(a * b, "/", b)
    assert quotient == a
    assert thoughts.endswith(f" 0\n={a}")


def test_columns_of_products_and_quotients_read_from_their_own_side() -> None:
    assert work_out_step(48, "*", 7)[0] == "48*7\n8*7+0:56 6\n4*7+5:33 36\n=336"
    assert work_out_step(92, "/", 4)[0] == "92/4\n09/4:2 1\n12/4:3 0\n=23"


def test_an_expression_has_the_value_that_python_gives_it() -> None:
    for task in tasks("expression", "heldout"):
        match = re.search(r"[\d(][\d+\-*/() ]*[\d)]", task.messages[0].content)
        assert match
        assert eval(match[0]) == int(task.reply.content)


def test_each_step_of_a_word_problem_starts_from_the_result_before_it() -> None:
    for task in tasks("word_problem", "train"):
        assert task.reply.thinking is not None
        results = re.findall(r"^=(\d+)$", task.reply.thinking, re.MULTILINE)
        steps = re.findall(r"^(\d+)[-+*/]\d+$", task.reply.thinking, re.MULTILINE)
        assert [int(step) for step in steps[1:]] == [int(result) for result in results[:-1]]
        assert results[-1] == task.reply.content


def test_every_number_of_a_problem_is_told() -> None:
    for task in tasks("word_problem", "train"):
        assert task.reply.thinking is not None
        first = re.findall(r"\d+", task.reply.thinking.splitlines()[0])
        told = {int(number) for number in re.findall(r"\d+", task.messages[0].content)}
        assert {int(number) for number in first} <= told


@pytest.mark.parametrize("family", ["expression", "word_problem"])
def test_a_number_is_right_in_words_and_wrong_beside_another(family: str) -> None:
    for task in tasks(family, "seen"):
        answer = task.reply.content
        assert check_reply(task, Message("assistant", content=f"There are {answer} of them."))
        assert not check_reply(task, Message("assistant", content=f"{answer} or 7"))
        assert not check_reply(task, Message("assistant", content=f"{answer}1"))
        assert not check_reply(task, Message("assistant"))


# Extraction.


def test_json_is_compared_as_values() -> None:
    for task in tasks("extraction", "seen"):
        value = json.loads(task.reply.content)
        loose = json.dumps(value, indent=2)
        assert check_reply(task, Message("assistant", content=loose))
        record = value[0] if isinstance(value, list) else value
        if record:
            key, old = next(iter(record.items()))
            record[key] = int(old) if isinstance(old, bool) else [old]
            assert not check_reply(task, Message("assistant", content=json.dumps(value)))
            del record[key]
            assert not check_reply(task, Message("assistant", content=json.dumps(value)))
        assert not check_reply(task, Message("assistant", content=f"Here: {task.reply.content}"))


def test_an_extracted_record_has_what_its_schema_requires() -> None:
    for task in tasks("extraction", "heldout"):
        match = re.search(r'\{"type".*\}', task.messages[0].content)
        assert match
        schema, value = json.loads(match[0]), json.loads(task.reply.content)
        items = value if isinstance(value, list) else [value]
        inner = schema["items"] if isinstance(value, list) else schema
        for item in items:
            assert set(inner.get("required", [])) <= set(item) <= set(inner["properties"])


def test_the_table_of_domains_is_read_as_it_is_written() -> None:
    line = "box (crate, bin): size {width number, depth number}; lid on|off at _; owner person"
    box = domains_module._parse_line(line)
    assert box.synonyms == ("crate", "bin")
    size, lid, owner = box.fields
    assert [field.name for field in size.fields] == ["width", "depth"]
    assert (lid.options, lid.phrase) == (("on", "off"), "at _")
    assert (owner.kind, owner.phrase) == ("person", "")
