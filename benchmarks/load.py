"""Whether a server holds under load: many clients for minutes, and every answer is compared.

    python -m benchmarks.load --clients 64 --seconds 300 --out load.json

Starts `clover serve` (or takes `--url`), asks every request of a pool once, alone, and then lets the
clients ask them all at once, streaming and not, leaving at random and sending requests that must be
refused in between. An answer has to be what it was alone, text for text. At the end the server has to
be idle, no larger than after its warm-up, and right. Ctrl-C ends early, with what there is. The exit
code is 1 if anything was wrong. Needs the packages of the extra `dev`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import numpy as np
import openai
import psutil

from benchmarks.load_clients import Clients, Reply
from benchmarks.load_requests import (
    Agent,
    Answer,
    BadRequest,
    Item,
    draw_items,
    list_bad_requests,
)
from clover.serve.app import ServerConfig

ITEMS_PER_AGENT = 8
MIN_AGENTS = 2
BAD_SHARE = 0.1
"""Of what clients send: requests that must be refused."""
LEAVE_SHARE = 0.15
"""Of the requests that are answered: those whose client leaves early."""
WARM_UP_SHARE = 0.3
"""Of the time, in which the server may still grow."""
MAX_GROWTH_MIB = 48.0
"""Of the server after its warm-up: what its allocator may hold in reserve, and no more."""
CACHE_MIB = 32
"""The server's cache of states: little enough to be full when it is warm, and to drop states then."""
IDLE_SECONDS = 30.0
"""How soon nothing may run, and no connection be open, once all clients are gone."""
PAUSE_SECONDS = 1.0
"""After an answer that did not come: a server that is gone is asked no more often."""
PROGRESS_SECONDS = 10.0
SAMPLE_SECONDS = 0.5
NUM_SHOWN = 5
PERCENTILES = (50, 95, 99)
MIB = 2**20
# The last is what Anthropic's client lets through in the middle of a stream
API_ERRORS = (openai.APIError, anthropic.APIError, httpx2.HTTPError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A request of the pool, and the answer that it gets alone."""

    item: Item
    expected: Answer


@dataclass(kw_only=True)
class Report:
    """What a run has found.

    Attributes:
        wrong: A sentence for everything that was not as it has to be.
        refused: Requests that had to be refused, and were, by status.
        full: Requests that the server had no room for: status 429. They are sent again, save
            `gave_up` of them, whose wait went beyond the end.
        rss_mib: Of the server: at its start, the most in its warm-up, the most after it, at the end.
    """

    clients: int
    seed: int
    seconds: float = 0.0
    sent: int = 0
    compared: int = 0
    left: int = 0
    full: int = 0
    gave_up: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    refused: dict[int, int] = field(default_factory=dict)
    first_seconds: list[float] = field(default_factory=list)
    total_seconds: list[float] = field(default_factory=list)
    rss_mib: dict[str, float] = field(default_factory=dict)
    open_files: dict[str, int] = field(default_factory=dict)

    def render(self) -> str:
        """Returns the table."""
        rate = self.tokens / self.seconds if self.seconds else 0.0
        rows = [
            ("clients, seconds", f"{self.clients}, {self.seconds:.1f}"),
            ("requests", f"{self.sent}"),
            ("answers compared", f"{self.compared}"),
            ("wrong", f"{len(self.wrong)}"),
            ("clients that left early", f"{self.left}"),
            ("refused, by status", _join(f"{key}: {n}" for key, n in sorted(self.refused.items()))),
            ("429", f"{self.full}, after {self.gave_up} of which the time was over"),
            ("tokens/s", f"{rate:.0f}"),
            ("s to the first text", _percentiles(self.first_seconds)),
            ("s to the end", _percentiles(self.total_seconds)),
            ("RSS, MiB", _join(f"{key} {n:.0f}" for key, n in self.rss_mib.items())),
            ("open files", _join(f"{key} {n}" for key, n in self.open_files.items())),
        ]
        return "\n".join(f"{name:24} {value}" for name, value in rows)

    def to_dict(self) -> dict[str, Any]:
        """Returns all numbers; of the latencies their percentiles, in seconds."""
        spans = {
            name: dict(zip(map(str, PERCENTILES), _quantiles(values), strict=False))
            for name, values in (("first", self.first_seconds), ("total", self.total_seconds))
        }
        fields = asdict(self)
        del fields["first_seconds"], fields["total_seconds"]
        return fields | {"latency": spans}


def _join(parts: Iterable[str]) -> str:
    return ", ".join(parts) or "-"


def _quantiles(values: Sequence[float]) -> list[float]:
    return [float(value) for value in np.percentile(values, PERCENTILES)] if values else []


def _percentiles(values: Sequence[float]) -> str:
    named = zip(PERCENTILES, _quantiles(values), strict=False)
    return _join(f"p{percent} {value:.2f}" for percent, value in named)


async def draw_pool(clients: Clients, seed: int, num_items: int) -> list[list[Question]]:
    """Returns conversations, most of them of one request, with the answers that they get alone."""
    pool = []
    for item in draw_items(seed, num_items):
        pool.append([await _ask_alone(clients, item)])
    for number in range(max(MIN_AGENTS, num_items // ITEMS_PER_AGENT)):
        agent = Agent(number=number, api="anthropic" if number % 3 == 2 else "openai")
        turns = []
        while turn := agent.next_item():
            turns.append(await _ask_alone(clients, turn))
            agent.take(turns[-1].expected[0])
        pool.append(turns)
    return pool


async def _ask_alone(clients: Clients, item: Item) -> Question:
    try:
        reply = await clients.ask(item, is_stream=False)
    except API_ERRORS as error:
        sys.exit(f"expected a server that answers {item.name}, found: {error}")
    return Question(item=item, expected=reply.answer)


class Load:
    """The clients at work."""

    def __init__(
        self, report: Report, pool: Sequence[Sequence[Question]], bad: Sequence[BadRequest]
    ) -> None:
        """Counts into `report`."""
        self._report = report
        self._pool = pool
        self._bad = bad
        self._mean_seconds = 1.0  # of recent answers

    async def run_client(self, clients: Clients, number: int, deadline: float) -> None:
        """Asks until `deadline`, on the clock of `time.monotonic`."""
        rng = random.Random(f"{self._report.seed}/{number}")
        while time.monotonic() < deadline:
            if rng.random() < BAD_SHARE:
                await self._send_bad(clients, rng.choice(self._bad))
                continue
            for question in rng.choice(self._pool):
                is_whole = await self._ask(clients, question, rng, deadline)
                if not is_whole or time.monotonic() >= deadline:
                    break

    async def _send_bad(self, clients: Clients, bad: BadRequest) -> None:
        self._report.sent += 1
        try:
            status = await clients.send(bad)
        except httpx2.HTTPError as error:
            self._fail(f"{bad.path}, {bad.name}: expected status {bad.status}, found {error!r}")
            await asyncio.sleep(PAUSE_SECONDS)
            return
        if status == bad.status:
            refused = self._report.refused
            refused[status] = refused.get(status, 0) + 1
        else:
            self._fail(f"{bad.path}, {bad.name}: expected status {bad.status}, found {status}")

    async def _ask(
        self, clients: Clients, question: Question, rng: random.Random, deadline: float
    ) -> bool:
        """Asks, as often as there is no room, and compares; returns whether the answer was read."""
        item, report = question.item, self._report
        is_stream = rng.random() < 0.5
        # Anywhere from the queue to after the end
        patience = rng.random() * self._mean_seconds * 2 if rng.random() < LEAVE_SHARE else None
        while True:
            report.sent += 1
            try:
                async with asyncio.timeout(patience):
                    reply = await clients.ask(item, is_stream=is_stream)
            except TimeoutError:
                report.left += 1
                return False
            except (openai.RateLimitError, anthropic.RateLimitError) as error:
                report.full += 1
                wait = float(error.response.headers["retry-after"])
                left = deadline - time.monotonic()
                await asyncio.sleep(max(min(wait, left), 0.0))
                if wait > left:
                    report.gave_up += 1
                    return False
            except API_ERRORS as error:
                self._fail(f"{item.name}: expected an answer, found {error!r}")
                await asyncio.sleep(PAUSE_SECONDS)
                return False
            else:
                self._compare(question, reply, is_stream=is_stream)
                return True

    def _compare(self, question: Question, reply: Reply, *, is_stream: bool) -> None:
        report = self._report
        report.compared += 1
        report.tokens += reply.num_tokens
        report.total_seconds.append(reply.seconds)
        if reply.first_seconds is not None:
            report.first_seconds.append(reply.first_seconds)
        self._mean_seconds += (reply.seconds - self._mean_seconds) / 32
        if reply.answer != question.expected:
            how = "streamed" if is_stream else "whole"
            self._fail(
                f"{question.item.name}, {how}: expected {question.expected}, found {reply.answer}"
            )

    def _fail(self, sentence: str) -> None:
        self._report.wrong.append(sentence)


class Watch:
    """Samples the memory of a server's process; knows nothing of one elsewhere."""

    def __init__(self, process: psutil.Process | None, report: Report) -> None:
        """Reads what it holds before any client has come."""
        self._process = process
        self._report = report
        if process:
            report.rss_mib["at the start"] = self._rss()
            report.open_files["at the start"] = process.num_fds()

    async def sample(self, warm_at: float) -> None:
        """Keeps the most that is held before and after `warm_at`, until it is cancelled."""
        while self._process:
            phase = "warming up" if time.monotonic() < warm_at else "warm"
            rss = self._report.rss_mib
            rss[phase] = max(rss.get(phase, 0.0), self._rss())
            await asyncio.sleep(SAMPLE_SECONDS)

    async def check(self) -> None:
        """Reads what is held in the end, and says what is too much."""
        if not self._process:
            return
        try:
            await self._check(self._process)
        except psutil.Error as error:
            self._report.wrong.append(f"expected a server at work, found {error}")

    async def _check(self, process: psutil.Process) -> None:
        report, files = self._report, self._report.open_files
        rss = report.rss_mib
        rss["at the end"] = self._rss()
        grown = max(rss.get("warm", 0.0), rss["at the end"]) - rss["warming up"]
        if grown > MAX_GROWTH_MIB:
            report.wrong.append(
                f"expected at most {MAX_GROWTH_MIB:g} MiB more than in the warm-up, found {grown:.0f}"
            )
        if not await _comes_true(lambda: process.num_fds() <= files["at the start"]):
            report.wrong.append(
                f"expected {files['at the start']} open files, found {process.num_fds()}"
            )
        files["at the end"] = process.num_fds()

    def _rss(self) -> float:
        assert self._process is not None
        return float(self._process.memory_info().rss) / MIB


async def _comes_true(condition: Callable[[], bool]) -> bool:
    """Returns whether a condition holds within IDLE_SECONDS."""
    deadline = time.monotonic() + IDLE_SECONDS
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    return condition()


async def run(
    url: str,
    *,
    model: str,
    clients: int,
    seconds: float,
    seed: int = 0,
    num_items: int = 48,
    process: psutil.Process | None = None,
) -> Report:
    """Loads a server and returns what was found.

    Args:
        url: Where it is.
        model: Which of its models to ask.
        clients: How many ask at a time.
        seconds: For how long.
        seed: Of what is asked, and when clients leave.
        num_items: Requests of the pool, besides the agents.
        process: The server's, if it is here.
    """
    report = Report(clients=clients, seed=seed)
    watch = Watch(process, report)
    async with Clients(url, model) as alone:
        pool = await draw_pool(alone, seed, num_items)
    load = Load(report, pool, list_bad_requests(model, ServerConfig().max_request_bytes))
    started = time.monotonic()
    async with asyncio.TaskGroup() as group, Clients(url, model) as shared:
        sampling = group.create_task(watch.sample(started + WARM_UP_SHARE * seconds))
        showing = group.create_task(_show_progress(report, started))
        working = [
            asyncio.create_task(load.run_client(shared, number, started + seconds))
            for number in range(clients)
        ]
        with _on_interrupt(lambda: [task.cancel() for task in working]):
            ends = await asyncio.gather(*working, return_exceptions=True)
        report.seconds = time.monotonic() - started
        sampling.cancel()
        showing.cancel()
    for end in ends:
        if isinstance(end, Exception):
            raise end
    await _check_end(url, model, pool[0][0], report)
    await watch.check()
    return report


@contextmanager
def _on_interrupt(stop: Callable[[], object]) -> Iterator[None]:
    """Calls `stop` at Ctrl-C, in place of an exception."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def _show_progress(report: Report, started: float) -> None:
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        print(
            f"{time.monotonic() - started:6.0f} s: {report.sent} requests, {report.compared} compared, "
            f"{len(report.wrong)} wrong, {report.left} left, {report.full} times no room",
            file=sys.stderr,
            flush=True,
        )


async def _check_end(url: str, model: str, question: Question, report: Report) -> None:
    """Says what the server still does after all clients are gone, and whether it is still right."""
    try:
        async with Clients(url, model) as clients:
            deadline = time.monotonic() + IDLE_SECONDS
            while any((loads := await clients.read_load()).values()):
                if time.monotonic() > deadline:
                    report.wrong.append(f"expected a server at rest, found {loads}")
                    break
                await asyncio.sleep(0.1)
            found = (await clients.ask(question.item, is_stream=True)).answer
    except API_ERRORS as error:
        report.wrong.append(f"in the end: expected an answer, found {error!r}")
        return
    if found != question.expected:
        report.wrong.append(f"in the end: expected {question.expected}, found {found}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A server that was started here. `failures` say what went wrong with it, once it has ended."""

    url: str
    process: psutil.Process
    failures: list[str] = field(default_factory=list)


@asynccontextmanager
async def serve(model: str, *, queue: int) -> AsyncIterator[Served]:
    """Yields a server of this checkout, which ends with the context."""
    command = [sys.executable, "-m", "clover", "serve", "-m", model, "--port", "0"]
    command += ["--queue", str(queue), "--cache-mib", str(CACHE_MIB)]
    command += ["--shutdown-seconds", "0"]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for this process, which then stops the server
    ) as server:
        assert server.stderr is not None
        first = await asyncio.to_thread(server.stderr.readline)
        # Its log has to be read, or it would wait for that
        reading = asyncio.create_task(asyncio.to_thread(_drain, server.stderr))
        served = Served(url=json.loads(first)["url"], process=psutil.Process(server.pid))
        try:
            yield served
        finally:
            server.send_signal(signal.SIGINT)
            if failure := await reading:
                served.failures.append(f"expected a log of the server, found {failure}")
    if server.returncode:
        served.failures.append(f"expected a server that ends with 0, found {server.returncode}")


def _drain(lines: Iterable[str]) -> str:
    """Reads a server's log to its end; returns what is no line of a log, such as a traceback."""
    return "".join(line for line in lines if not line.startswith("{"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs, prints the table; returns 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--model", default="clover-nano", help="bundled model or folder")
    parser.add_argument("--url", help="a server that runs already; default: one is started")
    parser.add_argument("--items", type=int, default=48, help="requests of the pool")
    parser.add_argument("--queue", type=int, help="of the server; default: half the clients")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a JSON file of all numbers")
    options = parser.parse_args(arguments)
    try:
        report = asyncio.run(_run(options))
    except KeyboardInterrupt:  # while clients are at work it only stops those
        sys.exit("interrupted before or after the load: there is no report")
    for sentence in report.wrong[:NUM_SHOWN]:
        print(f"WRONG: {sentence}")
    print(report.render())
    return 1 if report.wrong else 0


async def _run(options: argparse.Namespace) -> Report:
    asked: dict[str, Any] = {
        "clients": options.clients,
        "seconds": options.seconds,
        "seed": options.seed,
        "num_items": options.items,
    }
    if options.url:
        report = await run(options.url, model=options.model, **asked)
    else:
        # With less room than clients, so that some are told to come back
        queue = options.clients // 2 if options.queue is None else options.queue
        async with serve(options.model, queue=queue) as served:
            asked |= {"model": Path(options.model).name, "process": served.process}
            report = await run(served.url, **asked)
        report.wrong += served.failures
    if options.out:
        options.out.write_text(json.dumps(report.to_dict(), indent=1) + "\n")
    return report


if __name__ == "__main__":
    sys.exit(main())
