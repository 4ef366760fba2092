"""The server: routes, limits, errors, and how it stops."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clover import __version__
from clover.backends.base import Backend
from clover.errors import CloverError, RequestError
from clover.serve import anthropic_api, openai_api, page
from clover.serve.document import Health, OpenAiError, correct_document, say_responses
from clover.serve.errors import ApiError, from_clover_error, from_validation, json_response
from clover.serve.stream import Service, log, logger

_OPEN_PATHS: Final = page.PATHS | {"/health"}  # a load balancer has no key, nor has a new page
_CLOSE_SECONDS: Final = 5  # for clients to read the end of a stream that was cut
# Longer than clients keep an idle connection (httpx: 5 s): the side that may send next should close
# it, or a request meets a connection that is just being closed
_KEEP_ALIVE_SECONDS: Final = 75


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """What a server takes on.

    Attributes:
        api_key: What clients have to show, as a bearer token or in `x-api-key`; None: nothing.
        max_request_bytes: Largest body.
        request_timeout: Seconds, waiting included, after which an answer is cut; None: never.
        shutdown_seconds: How long answers may go on once the server is asked to stop.
    """

    api_key: str | None = None
    max_request_bytes: int = 4 * 2**20
    request_timeout: float | None = 600.0
    shutdown_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key:
            raise RequestError("api_key is empty; give one, or none")
        if self.max_request_bytes < 1:
            raise RequestError(f"max_request_bytes is {self.max_request_bytes}; allowed: 1 or more")
        if self.request_timeout is not None and not self.request_timeout > 0:
            raise RequestError(f"request_timeout is {self.request_timeout}; allowed: above 0")
        if not self.shutdown_seconds >= 0:
            raise RequestError(f"shutdown_seconds is {self.shutdown_seconds}; allowed: 0 or more")


def create_app(backends: Sequence[Backend], config: ServerConfig | None = None) -> FastAPI:
    """Returns the server of the backends, which start and stop with it.

    Raises:
        RequestError: No backend, or two models of one name.
    """
    config = config or ServerConfig()

    @asynccontextmanager
    async def serve(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for backend in backends:
                await stack.enter_async_context(backend)
            yield

    # No pages of documentation: they would fetch their scripts from elsewhere
    app = _App(title="Clover", version=__version__, lifespan=serve, docs_url=None, redoc_url=None)
    app.state.asks_for_key = config.api_key is not None
    app.state.service = Service(backends)
    app.state.request_timeout = config.request_timeout
    app.include_router(openai_api.router)
    app.include_router(anthropic_api.router)
    app.include_router(page.make_router())
    app.add_api_route(
        "/health", _health, responses=say_responses(Health, OpenAiError, [500], is_open=True)
    )
    app.add_api_route(
        "/metrics",
        _metrics,
        response_class=Response,
        responses=say_responses(None, OpenAiError, [500]),
    )
    app.add_exception_handler(ApiError, _say_error)
    app.add_exception_handler(CloverError, _say_error)
    app.add_exception_handler(RequestValidationError, _say_error)
    app.add_exception_handler(StarletteHTTPException, _say_error)
    app.add_exception_handler(Exception, _say_failure)
    app.add_middleware(Gate, config=config)
    return app


class _App(FastAPI):
    """FastAPI, whose document says what this server really answers."""

    def openapi(self) -> dict[str, Any]:
        """Returns the document."""
        if not self.openapi_schema:
            correct_document(
                super().openapi(),
                models=list(self.state.service.backends),
                asks_for_key=self.state.asks_for_key,
            )
        return super().openapi()


async def _health() -> Response:
    return json_response({"status": "ok"})


async def _metrics(request: Request) -> Response:
    service: Service = request.app.state.service
    return Response(service.metrics.render(), media_type="text/plain; version=0.0.4")


async def _say_error(request: Request, error: Exception) -> Response:
    match error:
        case ApiError():
            told = error
        case CloverError():
            told = from_clover_error(error)
        case RequestValidationError():
            told = from_validation(error.errors())
        case StarletteHTTPException():
            told = ApiError(error.status_code, str(error.detail), headers=error.headers)
        case _:
            raise error
    return told.response(request.url.path)


async def _say_failure(request: Request, error: Exception) -> Response:
    """Answers in place of an error that nobody foresaw; it is raised again and logged."""
    told = ApiError(500, "the server has failed; its log says why")
    return told.response(request.url.path)


class Gate:
    """Stands before everything else: keys, sizes, and a line in the log for every request."""

    def __init__(self, app: ASGIApp, *, config: ServerConfig) -> None:
        """Guards `app`."""
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through, or answers it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        request_id = f"req_{secrets.token_hex(8)}"
        status = 0  # until a response has begun

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"request-id", request_id.encode())]
            await send(message)

        try:
            if refusal := self._refuse(scope["path"], Headers(scope=scope)):
                await refusal.response(scope["path"])(scope, receive, send_with_id)
            else:
                await self._app(scope, self._bounded(receive), send_with_id)
        finally:
            log(
                event="request",
                id=request_id,
                method=scope["method"],
                path=scope["path"],
                status=status,
                seconds=round(time.perf_counter() - started, 4),
            )

    def _refuse(self, path: str, headers: Headers) -> ApiError | None:
        """Returns why a request may not come in, None if it may."""
        if self._config.api_key is not None and path not in _OPEN_PATHS:
            shown = headers.get("x-api-key") or headers.get("authorization", "")
            shown = shown.removeprefix("Bearer ")
            # In a time that does not say how much of the key is right. Headers are bytes, which
            # starlette reads as Latin-1.
            if not hmac.compare_digest(shown.encode("latin-1"), self._config.api_key.encode()):
                return ApiError(401, "expected the server's API key, found another or none")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._config.max_request_bytes:
            return self._too_large()
        return None

    def _bounded(self, receive: Receive) -> Receive:
        """Returns a `receive` that stops a body without a length, or with a wrong one."""
        num_bytes = 0

        async def receive_bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._config.max_request_bytes:
                error = self._too_large()
                raise HTTPException(error.status, error.message)
            return message

        return receive_bounded

    def _too_large(self) -> ApiError:
        limit = self._config.max_request_bytes
        return ApiError(413, f"expected a body of at most {limit} bytes, found a larger one")


class Server(uvicorn.Server):
    """Asked to stop, lets answers go on for a while, then cuts them and says so."""

    def __init__(self, app: FastAPI, *, shutdown_seconds: float, **options: Any) -> None:
        """Serves `app`; `options` are uvicorn's."""
        super().__init__(
            uvicorn.Config(
                app,
                access_log=False,  # the gate has its own
                timeout_graceful_shutdown=int(shutdown_seconds) + _CLOSE_SECONDS,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                **options,
            )
        )
        self._service: Service = app.state.service
        self._shutdown_seconds = shutdown_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to listen, and logs where."""
        await super().startup(sockets)
        if self.started:
            log(event="listening", url=self.url)

    @property
    def url(self) -> str:
        """Where a server that has started listens."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes no more requests, and waits for those under way."""
        loop = asyncio.get_running_loop()
        cut = loop.call_later(self._shutdown_seconds, self._service.cut_all)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()


def run_server(backends: Sequence[Backend], config: ServerConfig, *, host: str, port: int) -> None:
    """Serves until a signal says stop. Log lines go to standard error, one JSON object each."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    server = Server(
        create_app(backends, config),
        shutdown_seconds=config.shutdown_seconds,
        host=host,
        port=port,
        log_level="warning",
    )
    with suppress(KeyboardInterrupt):  # which uvicorn raises again once it has stopped
        server.run()
