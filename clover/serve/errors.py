"""What a client is told when a request fails, in the shape that its API has for it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi import Response

from clover.errors import (
    CapacityError,
    CloverError,
    ConstraintError,
    EngineClosedError,
    GenerationError,
    RemoteError,
)

_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_RETRY_SECONDS: Final = 1  # where nothing better is known: by then a pass or many have ended
_MAX_MESSAGE: Final = 1000  # characters: a message may repeat what the client sent
_MAX_PARAM: Final = 200
CLIENT_LEFT: Final = 499  # nobody reads it but the log


class ApiError(Exception):
    """An answer that is an error: its HTTP status, a sentence, and the field that is to blame.

    `retry_seconds` is when a client that was refused for want of room may come back; `headers` are sent
    as they are.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        *,
        retry_seconds: int = _RETRY_SECONDS,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _shorten(message, _MAX_MESSAGE)
        self.param = None if param is None else _shorten(param, _MAX_PARAM)
        self.retry_seconds = retry_seconds
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """The kind of error, as both APIs name it."""
        return _TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "api_error"
        )

    def body(self, path: str) -> dict[str, Any]:
        """Returns the JSON body, in the shape of the API that `path` belongs to."""
        if path.startswith("/v1/messages"):
            return {"type": "error", "error": {"type": self.type, "message": self.message}}
        error = {"message": self.message, "type": self.type, "param": self.param, "code": None}
        return {"error": error}

    def response(self, path: str) -> Response:
        """Returns the HTTP response."""
        headers = {"Retry-After": str(self.retry_seconds)} if self.status in (429, 503) else {}
        return json_response(self.body(path), status=self.status, headers=self.headers | headers)


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]} ..."


def json_response(
    body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns a body as ASCII JSON: it may hold half of a surrogate pair, which UTF-8 cannot say."""
    content = json.dumps(body)
    return Response(content, status_code=status, headers=headers, media_type="application/json")


def from_clover_error(error: CloverError) -> ApiError:
    """Returns what a client is told of an error of the backend."""
    match error:
        case CapacityError():
            status = 429
        case EngineClosedError():
            status = 503
        case RemoteError():
            status = 502
        case ConstraintError():  # the client's own
            status = 400
        case GenerationError():
            status = 500
        case _:
            status = 400
    return ApiError(status, str(error))


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Returns what a client is told of a body that is not what it should be.

    Args:
        errors: As pydantic lists them; an unknown field is the most telling.
    """
    if errors[0]["type"] == "json_invalid":
        place, reason = errors[0]["loc"][-1], errors[0]["ctx"]["error"]
        return ApiError(400, f"expected a body of JSON, found at character {place}: {reason}")
    unknown = [error for error in errors if error["type"] == "extra_forbidden"]
    error = (unknown or list(errors))[0]
    field = ".".join(str(part) for part in error["loc"] if part != "body")
    if unknown:
        message = f"{field} is not a field that this server supports; leave it out"
    else:
        told = str(error["msg"]).removeprefix("Value error, ")  # pydantic's, of a sentence of ours
        message = f"{field}: {told}" if field else told
    return ApiError(400, message, field or None)
