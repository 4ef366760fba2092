"""The page: files beside this one, served as they are, under a policy that lets nothing else in."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from fastapi import APIRouter, Request, Response

_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS: Final = {
    # No script, style or connection but from this server; no frame around the page
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",  # an updated server shows an updated page
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def _read_files() -> dict[str, Response]:
    """Returns the response for each path of the page."""
    responses = {}
    for file in files("clover.serve").joinpath("web").iterdir():
        stem, dot, suffix = file.name.rpartition(".")
        path = "/" if stem == "index" else f"/web/{file.name}"
        media_type = _TYPES[dot + suffix]
        responses[path] = Response(file.read_bytes(), media_type=media_type, headers=_HEADERS)
    return responses


_RESPONSES: Final = _read_files()
PATHS: Final = frozenset(_RESPONSES)
"""What a browser asks for before it can show a key."""


def make_router() -> APIRouter:
    """Returns the routes of the page."""
    router = APIRouter()
    for path in _RESPONSES:
        router.add_api_route(path, _send, include_in_schema=False)
    return router


async def _send(request: Request) -> Response:
    return _RESPONSES[request.url.path]
