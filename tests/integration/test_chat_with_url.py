"""`clover chat --url`: turns with a server elsewhere, in a pipe and in a terminal."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from clover.backends.scripted import ScriptedBackend
from clover.chat import Message, ToolCall
from tests.serving import SECONDS, serving, wait_until

REPOSITORY = Path(__file__).parents[2]
TOOLS = str(REPOSITORY / "examples" / "tools.json")
CALL = (
    "so\n</think>\n\nI book.\n\n<tool_call>\n<function=book_hotel>\n<parameter=city>\nRome\n"
    "</parameter>\n</function>\n</tool_call>"
)
SLOW = 0.02
"""Seconds per token: the long script takes minutes, far more than a test waits."""
REPORT_TORCH = (
    "import sys\nfrom clover.cli import main\n"
    "try:\n    main()\nfinally:\n    print('torch' in sys.modules)"
)


def chat(url: str, *options: str, lines: str) -> subprocess.CompletedProcess[str]:
    """Runs a chat whose last line of output says whether torch has been imported."""
    return subprocess.run(
        [sys.executable, "-c", REPORT_TORCH, "chat", "--url", url, *options],
        input=lines,
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        timeout=SECONDS,
    )


def test_turns_are_answered_and_remembered_without_torch() -> None:
    backend = ScriptedBackend(["hm\n</think>\n\none", "two", "three", "four"])
    with serving(backend, api_key="secret") as url:
        done = chat(
            url,
            *("--api-key", "secret", "--system", "be brief", "--temperature", "0.5"),
            *("--threshold", "0.8", "--max-tokens", "9"),
            lines="hello\n/thinking\nagain\n/reset\nanew\n/exit\nnever\n",
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["one", "two", "three", "False"]
    assert done.stderr.count("tokens/s, TPF 1.00") == 3
    first, second, third = backend.requests
    system = Message("system", "be brief")
    assert first.messages == (system, Message("user", "hello"))
    assert second.messages == (
        *first.messages,
        Message("assistant", "one", "hm"),
        Message("user", "again"),
    )
    assert third.messages == (system, Message("user", "anew"))
    assert [request.enable_thinking for request in backend.requests] == [True, False, False]
    assert (first.sampling.temperature, first.policy, first.max_tokens) == (0.5, "threshold=0.8", 9)


def test_calls_are_shown_and_their_results_asked_for() -> None:
    backend = ScriptedBackend([CALL, "hm\n</think>\n\nbooked"])
    with serving(backend) as url:
        done = chat(url, "--tools", TOOLS, lines="book\nroom 7\n")
    call = {"name": "book_hotel", "arguments": {"city": "Rome"}}
    assert done.stdout.splitlines() == ["I book.", json.dumps(call), "booked", "False"]
    assert backend.requests[1].messages[1:] == (
        Message("assistant", "I book.", "so", (ToolCall("book_hotel", {"city": "Rome"}),)),
        Message("tool", "room 7"),
    )


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--api-key", "wrong"), 1, "API key"),
        (("--api-key", "right", "--device", "cpu"), 2, "--device cpu"),
        (("--api-key", "right", "--policy", "exact", "--threshold", "0.5"), 2, "one policy"),
    ],
)
def test_what_is_wrong_ends_with_a_sentence(options: tuple[str, ...], code: int, said: str) -> None:
    with serving(ScriptedBackend(["yes"]), api_key="right") as url:
        command = [sys.executable, "-m", "clover", "chat", "--url", url, *options]
        done = subprocess.run(
            command, input="x\n", capture_output=True, text=True, check=False, cwd=REPOSITORY
        )
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("clover: ")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_turn_that_is_refused_does_not_end_the_chat() -> None:
    with serving(ScriptedBackend(["yes"])) as url:
        done = chat(url, "--model", "gpt", lines="hello\nhello\n")
    assert done.returncode == 0
    assert done.stderr.count("'gpt'") == done.stderr.count("clover: ") * 2 == 4


def test_a_terminal_shows_thinking_and_ctrl_c_stops_a_reply() -> None:
    backend = ScriptedBackend(["hmm\n</think>\n\n" + "word " * 20_000], seconds_per_token=SLOW)
    seen: list[str] = []
    ours, theirs = pty.openpty()

    def read() -> None:
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # Linux says so when the other side of a terminal is gone
                return
            seen.append(chunk.decode(errors="replace"))

    with serving(backend, shutdown_seconds=0.0) as url:
        process = subprocess.Popen(
            [sys.executable, "-m", "clover", "chat", "--url", url],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=REPOSITORY,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
        )
        os.close(theirs)
        reading = threading.Thread(target=read)
        reading.start()
        try:
            for _ in range(2):
                seen.clear()
                os.write(ours, b"hello\n")
                wait_until(lambda: "word word" in "".join(seen))
                process.send_signal(signal.SIGINT)
                wait_until(lambda: "stopped" in "".join(seen))
                wait_until(lambda: backend.load.running == 0)
            assert "hmm" in "".join(seen)
            os.write(ours, b"/exit\n")
            assert process.wait(SECONDS) == 0
        finally:
            process.kill()
            process.wait()
            reading.join(SECONDS)
            os.close(ours)
    assert "Traceback" not in "".join(seen)
    stopped = backend.requests[1].messages[1]
    assert stopped.content.startswith("word word")
    assert stopped.thinking is None
