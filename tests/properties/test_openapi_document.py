"""A fuzzer that knows the server's own document: nothing fails, and all that is answered is in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from clover.backends.scripted import ScriptedBackend
from clover.serve.app import ServerConfig, create_app
from tests.serving import serving
from tests.tiny import make_tiny_backend

# All but one: that a body in the document's terms is accepted. Prompts may be too long, and fields
# may exclude each other, which no document says.
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "allow_header_conformance",
    "negative_data_rejection",
    "unsupported_method",
)
NUM_EXAMPLES = int(os.environ.get("CLOVER_FUZZ_EXAMPLES", "10"))
"""Of each kind and route, beside a case for each bound of each field; more by hand."""
ANSWER_SECONDS = 0.05
"""Answers end here at the latest: what is not bounded goes on to the end of the context."""


def fuzz(url: str, folder: Path) -> str:
    """Returns the report of a run against the server, which ends with exit code 0."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"]
    options = ["--checks", ",".join(CHECKS), "--max-examples", str(NUM_EXAMPLES), "--no-color"]
    seed = ["--generation-deterministic"] if os.environ.get("CI") else []
    run = subprocess.run(
        [*command, *options, *seed], cwd=folder, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_every_answer_is_in_the_document(tmp_path: Path) -> None:
    backend = make_tiny_backend(num_slots=4, max_waiting=2)  # some are too many: `n` goes up to 64
    with serving(backend, request_timeout=ANSWER_SECONDS) as url:
        report = fuzz(url, tmp_path)
    assert "Tested: 7" in report


def test_the_document_has_every_error_of_a_route() -> None:
    document = create_app([ScriptedBackend(["yes"])], ServerConfig(api_key="key")).openapi()
    statuses = {
        path: {status for operation in operations.values() for status in operation["responses"]}
        for path, operations in document["paths"].items()
    }
    prompt = {"200", "400", "401", "404", "413", "500"}
    answer = prompt | {"429", "502", "503"}
    assert statuses == {
        "/v1/chat/completions": answer,
        "/v1/completions": answer,
        "/v1/messages": answer,
        "/v1/messages/count_tokens": prompt,
        "/v1/models": {"200", "401", "500"},
        "/metrics": {"200", "401", "500"},
        "/health": {"200", "500"},
    }
