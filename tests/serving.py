"""A server on a free port, in a thread of the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from clover.backends.base import Backend
from clover.serve.app import Server, ServerConfig, create_app

SECONDS = 120.0
"""More than any server needs to start or to stop on a busy machine."""


@contextmanager
def serving(*backends: Backend, port: int = 0, **config: Any) -> Iterator[str]:
    """Yields the address of a running server; leaving stops it as a signal would."""
    server_config = ServerConfig(**config)
    server = Server(
        create_app(backends, server_config),
        shutdown_seconds=server_config.shutdown_seconds,
        host="127.0.0.1",
        port=port,
        log_level="warning",
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        yield server.url
    finally:
        server.should_exit = True
        thread.join(SECONDS)
    assert not thread.is_alive()


def wait_until(condition: Any) -> None:
    """Returns once `condition()` holds."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
