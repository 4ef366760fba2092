"""What both APIs do with a chat request."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from fastapi import Request

from clover.backends.base import Backend
from clover.chat import Message
from clover.errors import PromptError, RequestError
from clover.serve.errors import ApiError
from clover.serve.schemas import Decoding
from clover.serve.stream import Service


def get_service(request: Request) -> Service:
    """Returns the app's service."""
    service: Service = request.app.state.service
    return service


def find_backend(model: str, service: Service) -> Backend:
    """Returns the backend of a model.

    Raises:
        ApiError: This server does not have it.
    """
    backend = service.backends.get(model)
    if backend is None:
        served = ", ".join(map(repr, service.backends))
        raise ApiError(404, f"model is {model!r}; this server has {served}", "model")
    return backend


def read_policy(body: Decoding) -> str | None:
    """Returns the policy that `mode`, `policy` and `threshold` ask for together.

    Raises:
        RequestError: They ask for two.
    """
    if body.mode is not None:
        if body.policy is not None or body.threshold is not None:
            raise RequestError(
                f"mode is {body.mode!r} beside a policy or a threshold; leave one out"
            )
        return body.mode
    if body.threshold is None:
        return body.policy
    if body.policy not in (None, "threshold"):
        raise RequestError(f"threshold is given beside policy {body.policy!r}; leave one out")
    return f"threshold={body.threshold}"


def order_results(awaited: Sequence[str], results: Mapping[str, Message]) -> list[Message]:
    """Returns the results of calls in the order of the calls, by the ids of both.

    Raises:
        PromptError: They are not one result for each call.
    """
    if len(set(awaited)) < len(awaited) or set(results) != set(awaited):
        raise PromptError(
            f"expected one tool result for each call of the turn before, found results for "
            f"{sorted(results)} and calls {sorted(awaited)}"
        )
    return [results[call_id] for call_id in awaited]


def make_id(prefix: str) -> str:
    """Returns an id that nobody has had."""
    return f"{prefix}_{secrets.token_hex(12)}"
