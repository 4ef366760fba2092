"""Tasks whose replies are run. Without bubblewrap only the references can be looked at."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import clover.tasks.sandbox as sandbox
from clover.chat import Message
from clover.errors import TaskError
from clover.tasks import Task, check_reply, make_task
from clover.tasks.python_function import FunctionTests
from clover.tasks.sandbox import run_sandboxed, why_unavailable
from clover.tasks.terminal import Effect

needs_sandbox = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))

FEW = 24  # each runs a process


def reply(text: str) -> Message:
    return Message("assistant", content=text)


def run_source(tmp_path: Path, source: str) -> Any:
    program = tmp_path / "program.py"
    program.write_text(source)
    return run_sandboxed(program, {"a": [1]})


@pytest.mark.parametrize("split", ["train", "seen", "heldout"])
def test_a_reference_function_passes_its_tests_in_this_process(split: str) -> None:
    for seed in range(300):
        task = make_task("python_function", seed, split)
        assert isinstance(task.check, FunctionTests)
        namespace: dict[str, Any] = {}
        exec(task.reply.content, namespace)
        function = namespace[task.check.name]
        results = [function(*arguments) for arguments in task.check.inputs]
        assert json.dumps(results) == json.dumps(task.check.expected)


def test_tests_tell_a_function_from_one_that_does_less() -> None:
    told = 0
    for seed in range(300):
        task = make_task("python_function", seed, "train")
        assert isinstance(task.check, FunctionTests)
        kept, condition, _ = task.reply.content.partition(" if ")
        if condition:
            closing = task.reply.content[len(kept) :]
            closing = closing[max(closing.rfind("]["), closing.find(")"), closing.find("]"), 0) :]
            namespace: dict[str, Any] = {}
            # Without its filter the brackets may not close: then it is no function at all
            try:
                exec(kept + closing, namespace)
            except SyntaxError:
                continue
            results = [namespace[task.check.name](*each) for each in task.check.inputs]
            told += json.dumps(results) != json.dumps(task.check.expected)
    assert told > 50


@needs_sandbox
@pytest.mark.parametrize("family", ["python_function", "terminal"])
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_reference_is_right(family: str, split: str) -> None:
    for seed in range(FEW):
        task = make_task(family, seed, split)
        assert check_reply(task, task.reply), task


@needs_sandbox
def test_a_function_is_judged_by_what_it_returns() -> None:
    check = FunctionTests("double", [[1], [2.5], ["a"]], [2, 5.0, "aa"])
    assert check.accepts(reply("def double(x):\n    return x + x"))
    assert check.accepts(reply("```python\ndouble = lambda x: print(x) or x * 2\n```"))
    assert not check.accepts(reply("def double(x):\n    return 2 * float(x)"))
    assert not check.accepts(reply("def twice(x):\n    return x + x"))
    assert not check.accepts(reply("def double(x) return"))
    assert not check.accepts(reply(""))


def effect(**changes: Any) -> Effect:
    fields: dict[str, Any] = {
        "files": {"a/b.txt": "two\none\n", "c.txt": ""},
        "folders": ["a"],
        "files_after": {"a/b.txt": "two\none\n", "c.txt": ""},
        "folders_after": ["a"],
    }
    return Effect(**(fields | changes))


@needs_sandbox
def test_a_command_is_judged_by_the_tree_that_it_leaves() -> None:
    moved = effect(files_after={"a/b.txt": "two\none\n", "a/c.txt": ""})
    for command in ("mv c.txt a/", "cp c.txt a && rm c.txt", "cd a; mv ../c.txt c.txt"):
        assert moved.accepts(reply(command))
    for command in ("cp c.txt a/", "mv c.txt a/; mkdir d", "mv c.txt a/d.txt", "true", ""):
        assert not moved.accepts(reply(command))


@needs_sandbox
def test_a_command_is_judged_by_what_it_prints_and_must_change_nothing() -> None:
    in_order = effect(output=["one", "two"])
    assert in_order.accepts(reply("sort a/b.txt"))
    assert not in_order.accepts(reply("cat a/b.txt"))
    assert not in_order.accepts(reply("sort a/b.txt; rm c.txt"))
    any_order = effect(output=["c.txt", "a/b.txt"], compare="any order")
    assert any_order.accepts(reply("find . -type f"))
    assert not any_order.accepts(reply("find . "))
    number = effect(output=["2"], compare="number")
    assert number.accepts(reply("wc -l a/b.txt"))
    assert number.accepts(reply("wc -l < a/b.txt"))
    assert not number.accepts(reply("wc -c a/b.txt"))


@needs_sandbox
def test_a_program_finds_no_network_no_files_of_ours_and_no_other_process(tmp_path: Path) -> None:
    source = f"""
import json, os, socket
def try_to(act):
    try:
        act()
    except OSError:
        return False
    return True
print(json.dumps([
    os.path.exists({str(tmp_path)!r}),
    os.path.exists("/etc/passwd"),
    try_to(lambda: socket.create_connection(("1.1.1.1", 53), timeout=1)),
    try_to(lambda: open("/usr/x", "w")),
    try_to(lambda: os.kill({__import__("os").getpid()}, 0)),
    try_to(lambda: open("here", "w")),
]))
"""
    assert run_source(tmp_path, source) == [False, False, False, False, False, True]


@needs_sandbox
@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "import time; time.sleep(600)",
        "print([0] * (1 << 28))",
        "print('0' * (1 << 24))",
        "raise ValueError",
        "print('not JSON')",
    ],
)
def test_a_program_that_breaks_a_limit_or_fails_has_no_result(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "WALL_SECONDS", 2)
    assert run_source(tmp_path, source) is None


@needs_sandbox
def test_the_processor_time_is_limited(tmp_path: Path) -> None:
    source = """
import json, resource
limits = [resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC]
print(json.dumps([resource.getrlimit(limit)[1] for limit in limits]))
"""
    assert run_source(tmp_path, source) == [
        sandbox.CPU_SECONDS,
        sandbox.MEMORY_BYTES,
        sandbox.FILE_BYTES,
        sandbox.NUM_PROCESSES,
    ]


def test_without_bubblewrap_the_check_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    why_unavailable.cache_clear()
    try:
        task: Task = make_task("terminal", 0, "train")
        with pytest.raises(TaskError, match="apt install bubblewrap"):
            check_reply(task, dataclasses.replace(task.reply))
    finally:
        why_unavailable.cache_clear()
