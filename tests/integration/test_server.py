"""What a server withstands: too many, too large, too long, strangers, deserters, its own end."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import httpx2
import pytest

from clover.backends.base import ChatRequest, Load
from clover.backends.scripted import ScriptedBackend, ScriptedStream
from clover.errors import RequestError
from clover.serve import page
from clover.serve.app import ServerConfig, create_app
from clover.serve.stream import estimate_wait
from tests.serving import serving, wait_until

BODY: dict[str, Any] = {
    "model": "scripted",
    "messages": [{"role": "user", "content": "a secret"}],
    "chat_template_kwargs": {"enable_thinking": False},
}
CHAT = "/v1/chat/completions"
SLOW = 0.02
"""Seconds per token: a long script takes minutes, far more than a test waits."""
LONG = ["word " * 20_000]


@pytest.fixture
def plain() -> Iterator[httpx2.Client]:
    with httpx2.Client(timeout=None) as client:
        yield client


def test_a_full_server_says_when_to_come_back(plain: httpx2.Client) -> None:
    backend = ScriptedBackend(LONG, seconds_per_token=SLOW, capacity=1)
    with serving(backend, shutdown_seconds=0.0) as url:
        with plain.stream("POST", url + CHAT, json=BODY | {"stream": True}):
            refused = plain.post(url + CHAT, json=BODY)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"


def test_who_is_refused_is_told_to_wait_as_long_as_answers_take(plain: httpx2.Client) -> None:
    backend = ScriptedBackend(["word " * 5, *LONG], seconds_per_token=0.5, capacity=1)
    with serving(backend, shutdown_seconds=0.0) as url:
        plain.post(url + CHAT, json=BODY)  # 2 seconds and a little from its first word to its end
        with plain.stream("POST", url + CHAT, json=BODY | {"stream": True}):
            refused = plain.post(url + CHAT, json=BODY)
    assert refused.status_code == 429
    assert 2 < int(refused.headers["retry-after"]) <= 60


def test_the_wait_is_that_of_the_queue_shared_among_the_slots() -> None:
    cases: list[tuple[int, int, list[float], int]] = [
        (4, 7, [2.0, 4.0], 6),  # 8 answers of 3 seconds, 4 at a time
        (4, 0, [2.0], 1),
        (1, 0, [0.2], 1),
        (1, 300, [5.0], 60),
        (1, 300, [], 1),  # nothing is known yet
    ]
    for running, waiting, seconds, expected in cases:
        assert estimate_wait(Load(running=running, waiting=waiting), seconds) == expected


def test_of_several_answers_all_are_started_or_none(plain: httpx2.Client) -> None:
    backend = ScriptedBackend(LONG, capacity=2)
    with serving(backend) as url:
        assert plain.post(url + CHAT, json=BODY | {"n": 3}).status_code == 429
        assert backend.load.running == 0
        assert plain.post(url + CHAT, json=BODY | {"n": 2, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(is_stream: bool) -> None:
    backend = ScriptedBackend(LONG, seconds_per_token=SLOW)
    with serving(backend, shutdown_seconds=0.0) as url:
        with httpx2.Client(timeout=None) as client:
            body = BODY | {"stream": is_stream, "n": 2}
            if is_stream:
                with client.stream("POST", url + CHAT, json=body) as answer:
                    lines = answer.iter_lines()  # which closes the answer when it is forgotten
                    assert next(lines)
                    assert backend.load.running == 2
            else:
                with pytest.raises(httpx2.ReadTimeout):
                    client.post(url + CHAT, json=body, timeout=0.5)
        wait_until(lambda: backend.load.running == 0)
        assert (
            'finish_reason="abandoned",model="scripted"} 2.0' in httpx2.get(url + "/metrics").text
        )


def test_bodies_that_are_too_large_are_refused(plain: httpx2.Client) -> None:
    large = json.dumps(BODY | {"stop": "x" * 1000}).encode()
    head = {"content-type": "application/json"}
    with serving(ScriptedBackend(["yes"]), max_request_bytes=900) as url:
        said = plain.post(url + CHAT, content=large, headers=head)
        unsaid = plain.post(url + CHAT, content=iter([large[:500], large[500:]]), headers=head)
        for refused in (said, unsaid):
            assert refused.status_code == 413
            assert "900 bytes" in refused.json()["error"]["message"]
        assert plain.post(url + CHAT, json=BODY).status_code == 200


def test_a_connection_outlasts_the_time_that_clients_keep_an_idle_one() -> None:
    with serving(ScriptedBackend(["Hello."])) as url:
        connection = HTTPConnection(url.removeprefix("http://"))
        connection.connect()
        connection.auto_open = 0  # a closed one is an error
        for wait in (0.0, 5.5):  # httpx drops it after 5 s
            time.sleep(wait)
            connection.request("GET", "/health")
            assert connection.getresponse().read()
        connection.close()


def test_the_key_is_asked_for_everywhere_but_at_health(plain: httpx2.Client) -> None:
    with serving(ScriptedBackend(["yes"]), api_key="kéy") as url:
        assert plain.get(f"{url}/health").json() == {"status": "ok"}
        wrong: list[dict[str, bytes]] = [
            {},
            {"authorization": b"Bearer k"},
            {"x-api-key": "kéyy".encode()},
        ]
        for path in (CHAT, "/v1/messages", "/metrics", "/v1/models", "/openapi.json"):
            for head in wrong:
                refused = plain.get(url + path, headers=head)
                assert refused.status_code == 401
                assert refused.json()["error"]["type"] == "authentication_error"
        right: list[dict[str, bytes]] = [
            {"authorization": "Bearer kéy".encode()},
            {"x-api-key": "kéy".encode()},
        ]
        for head in right:
            assert plain.get(f"{url}/v1/models", headers=head).status_code == 200


def test_an_answer_that_takes_too_long_is_cut(plain: httpx2.Client) -> None:
    with serving(ScriptedBackend(LONG, seconds_per_token=SLOW), request_timeout=0.3) as url:
        [choice] = plain.post(url + CHAT, json=BODY).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith("word")


def test_a_server_that_stops_lets_answers_end() -> None:
    backend = ScriptedBackend(["one two three"], seconds_per_token=0.2)
    answers: list[httpx2.Response] = []

    def ask(url: str) -> None:
        answers.append(httpx2.post(url + CHAT, json=BODY, timeout=None))

    with serving(backend) as url:
        asking = threading.Thread(target=ask, args=[url])
        asking.start()
        wait_until(lambda: backend.load.running == 1)
    asking.join()
    assert answers[0].json()["choices"][0]["message"]["content"] == "one two three"


def test_a_server_that_has_waited_long_enough_ends_streams_with_an_error(
    plain: httpx2.Client,
) -> None:
    events: list[str] = []
    started = time.monotonic()

    def read(url: str) -> None:
        with httpx2.stream(
            "POST", url + CHAT, json=BODY | {"stream": True}, timeout=None
        ) as answer:
            events.extend(line for line in answer.iter_lines() if line)

    backend = ScriptedBackend(LONG, seconds_per_token=SLOW)
    with serving(backend, shutdown_seconds=0.2) as url:
        reading = threading.Thread(target=read, args=[url])
        reading.start()
        wait_until(lambda: backend.load.running == 1)
    reading.join()
    last = json.loads(events[-1].removeprefix("data: "))
    assert last["error"]["type"] == "overloaded_error"
    assert "shuts down" in last["error"]["message"]
    assert time.monotonic() - started < SLOW * 20_000


def test_metrics_add_up(plain: httpx2.Client) -> None:
    with serving(ScriptedBackend(["one two three"])) as url:
        for _ in range(3):
            plain.post(url + CHAT, json=BODY)
        plain.post(url + CHAT, json=BODY | {"max_tokens": 1})
        lines = plain.get(f"{url}/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    model = 'model="scripted"'
    assert values[f'clover_answers_total{{finish_reason="stop",{model}}}'] == "3.0"
    assert values[f'clover_answers_total{{finish_reason="length",{model}}}'] == "1.0"
    assert values[f"clover_prompt_tokens_total{{{model}}}"] == "8.0"
    assert values[f"clover_completion_tokens_total{{{model}}}"] == "10.0"
    assert values[f"clover_passes_total{{{model}}}"] == "10.0"
    assert values[f"clover_prefix_cache_hits_total{{{model}}}"] == "0.0"
    for gauge in ("clover_running", "clover_waiting"):
        assert values[f"{gauge}{{{model}}}"] == "0.0"
    for timed in ("time_to_first_token_seconds", "inter_token_seconds", "tokens_per_forward"):
        assert values[f"clover_{timed}_count{{{model}}}"] == "4.0"


def test_the_log_has_a_line_for_each_request_and_nothing_that_was_said(
    plain: httpx2.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, logger="clover.serve"),
        serving(ScriptedBackend(["an answer"])) as url,
    ):
        answer = plain.post(url + CHAT, json=BODY)
        plain.post(url + CHAT, json=BODY | {"colour": "secret"})
    lines = [json.loads(message) for message in caplog.messages if message.startswith("{")]
    requests = [line for line in lines if line["event"] == "request"]
    assert [line["status"] for line in requests] == [200, 400]
    assert requests[0]["id"] == answer.headers["request-id"]
    [answered] = [line for line in lines if line["event"] == "answer"]
    assert answered["completion_tokens"] == 2
    assert "secret" not in caplog.text
    assert "an answer" not in caplog.text


def test_a_request_reaches_the_model_that_it_names(plain: httpx2.Client) -> None:
    first, second = ScriptedBackend(["one"], model="a"), ScriptedBackend(["two"], model="b")
    with serving(first, second) as url:
        listed = plain.get(f"{url}/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["a", "b"]
        for model, text in (("a", "one"), ("b", "two")):
            answer = plain.post(url + CHAT, json=BODY | {"model": model}).json()
            assert answer["model"] == model
            assert answer["choices"][0]["message"]["content"] == text
        unknown = plain.post(url + CHAT, json=BODY | {"model": "c"})
        assert 'clover_completion_tokens_total{model="b"} 1.0' in plain.get(f"{url}/metrics").text
    assert unknown.status_code == 404
    assert unknown.json()["error"]["message"] == "model is 'c'; this server has 'a', 'b'"


def test_models_without_a_name_of_their_own_are_refused() -> None:
    for backends in ([], [ScriptedBackend(["one"]), ScriptedBackend(["two"])]):
        with pytest.raises(RequestError, match="a name of its own"):
            create_app(backends)


def test_a_mode_is_a_policy_and_stands_alone(plain: httpx2.Client) -> None:
    backend = ScriptedBackend(["yes"])
    with serving(backend) as url:
        for mode in ("fast", "balanced", "exact"):
            assert plain.post(url + CHAT, json=BODY | {"mode": mode}).status_code == 200
            assert backend.requests[-1].policy == mode
        for fields in ({"mode": "slow"}, {"mode": "fast", "threshold": 0.5}):
            assert plain.post(url + CHAT, json=BODY | fields).status_code == 400


def test_the_page_is_open_and_lets_in_nothing_from_elsewhere(plain: httpx2.Client) -> None:
    with serving(ScriptedBackend(["yes"]), api_key="k") as url:
        for path in page.PATHS:
            file = plain.get(url + path)
            assert file.status_code == 200
            assert "default-src 'none'" in file.headers["content-security-policy"]
        assert plain.get(f"{url}/web/app.py").status_code == 401


class BrokenBackend(ScriptedBackend):
    """Fails in a way that nobody foresaw."""

    async def chat(self, request: ChatRequest) -> ScriptedStream:
        raise ZeroDivisionError(request.messages[0].content)


def test_an_unforeseen_error_keeps_its_details_to_itself(plain: httpx2.Client) -> None:
    with serving(BrokenBackend(["never"])) as url:
        failed = plain.post(url + CHAT, json=BODY)
        assert httpx2.get(f"{url}/health").status_code == 200  # that connection is closed
    assert failed.status_code == 500
    assert failed.json()["error"]["type"] == "api_error"
    assert "secret" not in failed.text


def test_the_openapi_document_names_every_body(plain: httpx2.Client) -> None:
    with serving(ScriptedBackend(["yes"])) as url:
        document = plain.get(f"{url}/openapi.json").json()
    bodies = {"ChatCompletionRequest", "CompletionRequest", "MessagesRequest", "CountTokensRequest"}
    assert bodies <= set(document["components"]["schemas"])


def test_a_config_out_of_range_is_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"api_key": ""},
        {"max_request_bytes": 0},
        {"request_timeout": 0.0},
        {"shutdown_seconds": -1.0},
    ]
    for fields in wrong:
        with pytest.raises(RequestError, match=next(iter(fields))):
            ServerConfig(**fields)
