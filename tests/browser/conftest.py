"""One Chromium for the tests of a file, and a page that must not complain or leave its server."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

MILLISECONDS = 30_000
"""More than anything on the page takes on a busy machine."""


@pytest.fixture(scope="module")  # no longer: while it is open its event loop stands in others' way
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("expected Chromium; on Debian: apt install chromium")
    expect.set_options(timeout=MILLISECONDS)
    # Chromium has no sandbox of its own for root, who has no need to be kept from these pages
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        yield browser
        browser.close()


class Watched:
    """A page, what it asked for, and what it complained about."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.urls: list[str] = []
        self.complaints: list[str] = []
        page.on("request", self._note_request)
        page.on("console", self._note_message)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _note_request(self, request: Request) -> None:
        if not request.url.startswith("data:"):
            self.urls.append(request.url)

    def _note_message(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


@pytest.fixture
def watched(browser: Browser) -> Iterator[Watched]:
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    context.set_default_timeout(MILLISECONDS)
    yield Watched(context.new_page())
    context.close()


@pytest.fixture
def page(watched: Watched) -> Page:
    return watched.page
