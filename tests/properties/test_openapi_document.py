"""A fuzzer that knows the server's own document: nothing fails, and all that is answered is in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import settings
from schemathesis import checks
from schemathesis.specs.openapi import checks as openapi

from tests.serving import serving
from tests.tiny import make_tiny_backend

CHECKS = (
    checks.not_a_server_error,
    openapi.status_code_conformance,
    openapi.content_type_conformance,
    openapi.response_schema_conformance,
    openapi.response_headers_conformance,
    openapi.negative_data_rejection,
    openapi.unsupported_method,
)


@pytest.fixture(scope="module")
def document() -> Iterator[schemathesis.BaseSchema]:
    with serving(make_tiny_backend(max_waiting=0)) as url:
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


schema = schemathesis.pytest.from_fixture("document")


@schema.parametrize()
@settings(max_examples=25)
def test_every_answer_is_in_the_document(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=CHECKS)
