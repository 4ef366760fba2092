from __future__ import annotations

import dataclasses
import functools
import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clover.chat import Message, ToolCall, parse_reply, render_reply
from clover.errors import TaskError
from clover.tasks import (
    FAMILIES,
    SPLITS,
    Task,
    check_reply,
    make_task,
    matches_reference,
    sample_tasks,
)
from clover.tasks.arithmetic import work_out
from clover.tasks.splits import Split
from clover.tasks.words import (
    CHOICES,
    CITIES,
    COLORS,
    NAMES,
    NOUNS,
    THINGS,
    is_held_out,
    synthetic_word,
)

MANY = 1000
POOLS = (NOUNS, NAMES, CITIES, THINGS, COLORS, CHOICES)

# Families whose answer is one text; those judged by what an answer does have tests of their own
ONE_ANSWER = ("arithmetic", "lookup", "sorting")
THINKING = {"arithmetic", "expression", "word_problem"}

families = st.sampled_from(FAMILIES)
splits = st.sampled_from(SPLITS)
seeds = st.integers(0, 2**48)


@functools.cache
def tasks(family: str, split: str) -> tuple[Task, ...]:
    return tuple(make_task(family, seed, split) for seed in range(MANY))


def words_of(task: Task) -> set[str]:
    text = json.dumps([task.messages[0].content, task.tools, task.reply.to_dict()])
    return {word.lower() for word in re.findall(r"[A-Za-z]+", text.replace("\\n", " "))}


def item_of(task: Task) -> str:
    """What is asked, whatever the wording: the operands, the things sorted, the call, the list."""
    request = task.messages[0].content
    if task.family == "arithmetic":
        assert task.reply.thinking is not None
        return task.reply.thinking.splitlines()[0]
    if task.family == "tool_call":
        return json.dumps(task.reply.to_dict(), sort_keys=True)
    if task.family == "sorting":
        return task.reply.content
    return request


@given(families, seeds, splits)
def test_a_task_is_a_pure_function_of_family_seed_and_split(
    family: str, seed: int, split: str
) -> None:
    assert make_task(family, seed, split) == make_task(family, seed, split)


def test_tasks_stay_the_same_from_release_to_release() -> None:
    task = make_task("arithmetic", 0, "train")
    assert task.messages == (Message("user", content="What is the difference of 262 and 24?"),)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_seeds_give_other_tasks(family: str) -> None:
    requests = {task.messages[0].content for task in tasks(family, "train")}
    assert len(requests) > 0.95 * MANY


@given(families, seeds, splits)
@settings(max_examples=300)
def test_a_rendered_reference_is_parsed_back_to_itself(family: str, seed: int, split: str) -> None:
    task = make_task(family, seed, split)
    text = render_reply(task.reply, enable_thinking=task.enable_thinking)
    parsed = parse_reply(
        text.removesuffix("<|im_end|>"), starts_in_thinking=task.enable_thinking, tools=task.tools
    )
    assert parsed == task.reply
    assert matches_reference(task, parsed)
    assert check_reply(task, parsed)


@pytest.mark.parametrize("family", FAMILIES)
def test_seen_has_no_item_of_train(family: str) -> None:
    trained = {item_of(task) for task in tasks(family, "train")}
    assert not trained & {item_of(task) for task in tasks(family, "seen")}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split", ["train", "seen"])
def test_no_held_out_word_occurs_in_train_or_seen(family: str, split: str) -> None:
    held_out = {word.lower() for pool in POOLS for word in pool.held_out}
    for task in tasks(family, split):
        assert not held_out & words_of(task)


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_tool_names_and_text_values_lie_on_the_side_of_their_split(split: str) -> None:
    held_out = split == "heldout"
    for task in tasks("tool_call", split):
        for tool in task.tools:
            assert is_held_out(tool["function"]["name"].split("_")[1]) == held_out
        for value in task.reply.tool_calls[0].arguments.values():
            if isinstance(value, str):
                assert {is_held_out(word) for word in value.split()} == {held_out}


def test_parameter_names_of_train_are_never_held_out_and_heldout_has_both() -> None:
    def parts(split: str) -> set[str]:
        return {
            part
            for task in tasks("tool_call", split)
            for tool in task.tools
            for name in tool["function"]["parameters"]["properties"]
            for part in name.split("_")
        }

    assert not any(map(is_held_out, parts("train") | parts("seen")))
    assert {is_held_out(part) for part in parts("heldout")} == {True, False}


def test_held_out_operands_are_numbers_that_train_never_uses() -> None:
    def operands(split: str) -> set[str]:
        return {
            number
            for task in tasks("arithmetic", split)
            for number in re.findall(r"\d+", task.messages[0].content)
        }

    assert not operands("heldout") & (operands("train") | operands("seen"))


def test_every_pool_has_words_on_both_sides() -> None:
    for pool in POOLS:
        assert len(pool.train) > len(pool.held_out) >= 3


@given(st.randoms(use_true_random=False), splits)
def test_a_synthetic_word_lies_on_the_side_asked_for(rng: random.Random, split: Split) -> None:
    assert is_held_out(synthetic_word(rng, split)) == (split == "heldout")


def test_a_tool_request_says_every_value_of_the_call() -> None:
    for task in tasks("tool_call", "train"):
        request = task.messages[0].content
        for value in task.reply.tool_calls[0].arguments.values():
            assert isinstance(value, bool) or str(value) in request


def test_tool_schemas_are_varied() -> None:
    schemas = {json.dumps(tool) for task in tasks("tool_call", "train") for tool in task.tools}
    assert len(schemas) > 0.95 * sum(len(task.tools) for task in tasks("tool_call", "train"))


def test_a_call_satisfies_the_schema_of_an_offered_tool() -> None:
    kinds = {"string": str, "integer": int, "boolean": bool}
    for task in tasks("tool_call", "heldout"):
        (call,) = task.reply.tool_calls
        (tool,) = [t["function"] for t in task.tools if t["function"]["name"] == call.name]
        properties = tool["parameters"]["properties"]
        assert list(properties) == list(call.arguments)
        for name, schema in properties.items():
            assert type(call.arguments[name]) is kinds[schema["type"]]
            assert call.arguments[name] in schema.get("enum", [call.arguments[name]])


@given(st.integers(0, 9999), st.integers(0, 9999), st.sampled_from("+-"))
def test_the_last_column_ends_in_the_answer(a: int, b: int, sign: str) -> None:
    a, b = max(a, b), min(a, b)
    answer = a + b if sign == "+" else a - b
    *_, last = work_out(a, b, sign).splitlines()
    columns, written = last.split(" ")
    carry = columns.split(":")[1][0]
    assert int(carry + written) == answer


def test_a_carry_is_written_in_front_and_counted_in_the_next_column() -> None:
    assert work_out(95, 7, "+") == "95+07\n5+7+0:12 2\n9+0+1:10 02"
    assert work_out(102, 95, "-") == "102-095\n2-5-0:17 7\n0-9-1:10 07\n1-0-1:00 007"


def test_lookup_answers_unknown_for_a_missing_key_and_only_rarely() -> None:
    replies = [task.reply.content for task in tasks("lookup", "train")]
    unknown = [reply for reply in replies if reply.endswith(": unknown")]
    assert all("\n" not in reply for reply in unknown)
    assert 0 < len(unknown) < MANY / 10


def test_lookup_answers_are_lines_of_the_list() -> None:
    for task in tasks("lookup", "train"):
        lines = set(task.messages[0].content.splitlines())
        answers = set(task.reply.content.splitlines())
        assert answers <= lines or task.reply.content.endswith(": unknown")


def test_sorted_items_are_those_of_the_request_in_order() -> None:
    for task in tasks("sorting", "train"):
        request, items = task.messages[0].content, task.reply.content.split(", ")
        assert 3 <= len(items) <= 6
        assert all(item in request for item in items)
        down = re.search(
            r"reverse|descending|decreasing|Z to A|high to low|largest (to|first|number)",
            request,
            re.IGNORECASE,
        )
        assert items == sorted(items, reverse=down is not None)


@given(seeds, st.data())
def test_a_changed_argument_or_name_is_refused(seed: int, data: st.DataObject) -> None:
    task = make_task("tool_call", seed, "seen")
    (call,) = task.reply.tool_calls
    key = data.draw(st.sampled_from(sorted(call.arguments)))
    arguments = dict(call.arguments)
    value = arguments.pop(key)
    wrong: list[object] = [None, str(value) + "0", [value]]
    wrong.append(int(value) if isinstance(value, bool) else {value: value})
    if isinstance(value, int):
        wrong += [str(value), float(value)]
    changed = [ToolCall(call.name, {**arguments, key: other}) for other in wrong]
    changed += [
        ToolCall(call.name, arguments),
        ToolCall(call.name, {**call.arguments, "other": 1}),
        ToolCall(call.name + "s", call.arguments),
    ]
    for one in changed:
        assert not check_reply(task, Message("assistant", tool_calls=(one,)))
    assert not check_reply(task, Message("assistant", tool_calls=(call, call)))
    assert not check_reply(task, Message("assistant"))


def test_the_order_of_arguments_is_free() -> None:
    task = next(t for t in tasks("tool_call", "seen") if len(t.reply.tool_calls[0].arguments) > 1)
    (call,) = task.reply.tool_calls
    turned = ToolCall(call.name, dict(reversed(list(call.arguments.items()))))
    assert check_reply(task, Message("assistant", tool_calls=(turned,)))


@given(st.sampled_from(ONE_ANSWER), seeds, st.data())
def test_a_changed_answer_is_refused(family: str, seed: int, data: st.DataObject) -> None:
    task = make_task(family, seed, "heldout")
    answer = task.reply.content
    place = data.draw(st.integers(0, len(answer) - 1))
    for changed in (
        answer[:place] + answer[place + 1 :],
        answer[:place] + "#" + answer[place + 1 :],
        answer + "0",
        "",
    ):
        if changed.strip() != answer:
            assert not check_reply(task, dataclasses.replace(task.reply, content=changed))


def test_thoughts_and_outer_white_space_do_not_matter() -> None:
    task = make_task("arithmetic", 1, "heldout")
    assert check_reply(task, Message("assistant", content=f" {task.reply.content}\n"))


def test_families_of_numbers_think_and_families_of_tools_have_tools() -> None:
    for task in sample_tasks(200, 3, "train"):
        assert task.enable_thinking == (task.family in THINKING)
        assert bool(task.tools) == (task.family in {"tool_call", "tool_use"})
        assert task.messages[-1].role == ("user" if len(task.messages) == 1 else "tool")
        assert len(task.messages) == 1 or task.family == "tool_use"


def test_samples_are_reproducible_and_follow_the_weights() -> None:
    weights = {"lookup": 1.0, "sorting": 3.0}
    sample = list(sample_tasks(400, 7, "seen", families=("lookup", "sorting"), weights=weights))
    assert sample == list(
        sample_tasks(400, 7, "seen", families=("lookup", "sorting"), weights=weights)
    )
    assert 50 < sum(task.family == "lookup" for task in sample) < 150


@pytest.mark.parametrize(("family", "split"), [("poetry", "train"), ("lookup", "test")])
def test_an_unknown_family_or_split_is_named(family: str, split: str) -> None:
    with pytest.raises(TaskError, match=r"poetry|test"):
        make_task(family, 0, split)
    with pytest.raises(TaskError, match=r"poetry|test"):
        next(sample_tasks(1, 0, split, families=(family,)))


def test_a_family_without_a_weight_is_named() -> None:
    with pytest.raises(TaskError, match="lookup"):
        next(sample_tasks(1, 0, "train", families=("lookup",), weights={"sorting": 1.0}))
