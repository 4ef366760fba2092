"""`benchmarks/load.py`: at small size against clover-nano, and that it says what is wrong."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import load
from clover.backends.base import ChatRequest, Load
from clover.backends.scripted import ScriptedBackend, ScriptedStream
from clover.errors import GenerationError
from tests.serving import SECONDS, serving, wait_until

REPOSITORY = Path(__file__).parents[2]
SCRIPT = "I think.\n</think>\n\nHello, 11 times."
SLOW = 0.002
"""Seconds per token: so that several answers are under way at a time."""
FEW = ("--clients", "8", "--seconds", "2", "--items", "12", "--model", "scripted")


def run(*arguments: str, out: Path) -> tuple[int, dict[str, Any]]:
    """Returns the exit code of a run and what it has written."""
    code = load.main([*arguments, "--out", str(out)])
    written: dict[str, Any] = json.loads(out.read_text())
    return code, written


def run_here(backend: ScriptedBackend, out: Path) -> tuple[int, dict[str, Any]]:
    """Runs against a server in this process."""
    with serving(backend) as url:
        return run("--url", url, *FEW, out=out)


def test_clover_nano_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--clients", "12", "--seconds", "10", "--items", "12", "--queue", "0")
    code, report = run(*few, out=tmp_path / "load.json")
    told = capsys.readouterr().out
    assert (code, report["wrong"]) == (0, []), told
    assert report["compared"] > 0
    assert report["tokens"] > report["compared"]
    assert report["full"] > 0
    assert 0 < report["latency"]["total"]["50"] <= report["latency"]["total"]["99"]
    assert report["open_files"]["at the end"] <= report["open_files"]["at the start"]
    assert "wrong                    0\n" in told


@pytest.mark.slow
def test_clover_nano_holds_for_minutes_with_64_clients(tmp_path: Path) -> None:
    code, report = run(out=tmp_path / "load.json")
    assert (code, report["wrong"]) == (0, [])
    assert report["compared"] > 100
    assert report["left"] > 0
    assert report["refused"].keys() == {"400", "404", "413"}


class ConfusedBackend(ScriptedBackend):
    """Says something else while it has company."""

    def __init__(self, other: str) -> None:
        super().__init__([SCRIPT], seconds_per_token=SLOW)
        self._other = ScriptedBackend([other], seconds_per_token=SLOW)

    async def chat(self, request: ChatRequest) -> ScriptedStream:
        if self.running:
            return await self._other.chat(request)
        return await super().chat(request)


@pytest.mark.parametrize(
    "other",
    [
        "I think.\n</think>\n\nHello, 12 times.",
        "I thought.\n</think>\n\nHello, 11 times.",
        "I think.\n</think>\n\nHello, 11 times.<tool_call>\n<function=book_hotel>\n"
        "<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
    ],
)
def test_an_answer_that_is_another_than_alone_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: str
) -> None:
    code, report = run_here(ConfusedBackend(other), tmp_path / "load.json")
    assert code == 1
    differing = [sentence for sentence in report["wrong"] if "expected (Choice(" in sentence]
    assert 0 < len(differing) <= report["compared"]
    assert "WRONG: " in capsys.readouterr().out


def test_a_bad_request_that_is_answered_is_wrong_and_right_answers_are_not(tmp_path: Path) -> None:
    backend = ScriptedBackend(
        [SCRIPT], seconds_per_token=SLOW
    )  # does not check how tokens are drawn
    code, report = run_here(backend, tmp_path / "load.json")
    assert code == 1
    assert report["compared"] > 8
    assert report["refused"].keys() <= {"400", "404", "413"}
    assert report["rss_mib"] == {}  # nothing is known of a server elsewhere
    assert {sentence.rpartition(": ")[2] for sentence in report["wrong"]} == {
        "expected status 400, found 200"
    }


class FailingBackend(ScriptedBackend):
    """Breaks down once it has several answers under way."""

    is_broken = False

    async def chat(self, request: ChatRequest) -> ScriptedStream:
        self.is_broken |= len(self.running) > 2  # more than one request's, alone
        if self.is_broken:
            raise GenerationError("expected finite logits, found none")
        return await super().chat(request)


def test_a_server_that_fails_is_wrong_and_is_left_in_peace(tmp_path: Path) -> None:
    backend = FailingBackend([SCRIPT], seconds_per_token=SLOW)
    code, report = run_here(backend, tmp_path / "load.json")
    assert code == 1
    failures = [sentence for sentence in report["wrong"] if "InternalServerError" in sentence]
    assert failures[-1].startswith("in the end: ")
    assert len(failures) < 100


class BusyBackend(ScriptedBackend):
    """Never comes to rest."""

    @property
    def load(self) -> Load:
        return Load(running=1, waiting=0)


def test_a_server_that_does_not_come_to_rest_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "IDLE_SECONDS", 0.1)
    code, report = run_here(BusyBackend([SCRIPT]), tmp_path / "load.json")
    assert code == 1
    assert any("at rest, found {'clover_running': 1.0" in each for each in report["wrong"])


def test_a_process_that_grows_or_keeps_files_open_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "IDLE_SECONDS", 0.0)
    report = load.Report(clients=1, seed=0)

    async def check() -> None:
        watch = load.Watch(psutil.Process(), report)
        report.rss_mib["warming up"] = report.rss_mib["at the start"]
        await watch.check()
        assert report.wrong == []
        report.rss_mib["warming up"] -= 2 * load.MAX_GROWTH_MIB
        with (tmp_path / "open").open("w"):
            await watch.check()

    asyncio.run(check())
    grown, kept = report.wrong
    assert "MiB more than in the warm-up" in grown
    assert "open files" in kept


def test_ctrl_c_ends_with_what_there_is() -> None:
    backend = ScriptedBackend([SCRIPT], seconds_per_token=SLOW)
    with serving(backend) as url:
        command = [sys.executable, "-m", "benchmarks.load", "--url", url, *FEW]
        with subprocess.Popen(
            [*command, "--seconds", str(SECONDS)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as loading:
            wait_until(lambda: len(backend.running) > 2)  # more than one request's, alone
            loading.send_signal(signal.SIGINT)
            told, errors = loading.communicate(timeout=SECONDS)
    assert "answers compared" in told
    assert errors == ""
