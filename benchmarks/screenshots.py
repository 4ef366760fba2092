"""Pictures of the page with clover-nano at work, for the documents.

    python -m benchmarks.screenshots --out docs/images

Starts `clover serve`, opens its page in Chromium and takes `page-light.png`, `page-dark.png`,
`page-phone.png` in the middle of an answer, and `race.gif`, a frame a pass. Needs Chromium (on
Debian: apt install chromium) and the packages of the extra `dev`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

WIDE = ViewportSize(width=1200, height=720)
PHONE = ViewportSize(width=360, height=720)
RACE = ViewportSize(width=1000, height=500)
SHUTTER_SECONDS = 1.0  # for which a pass stands still, in place of slow motion's 160 ms
STRETCH = f"""\
const wait = window.setTimeout;
window.setTimeout = (call, delay) => wait(call, delay === 160 ? {1000 * SHUTTER_SECONDS} : delay);
"""
IS_HALF_DONE = """\
() => document.querySelectorAll('.cell.filled').length > 5
  && document.querySelectorAll('.cell:not(.filled)').length > 3
  && document.querySelectorAll('.answer:first-child .thinking .text')[0].innerText.split('\\n').length > 2
"""
FRAME_MILLISECONDS = 160
LAST_FRAME_MILLISECONDS = 4000
MAX_SECONDS = 300.0
NUM_COLORS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("expected Chromium; on Debian: apt install chromium")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has none for root
    with serve() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        take(browser, url, out / "page-light.png", WIDE, "light")
        take(browser, url, out / "page-dark.png", WIDE, "dark")
        take(browser, url, out / "page-phone.png", PHONE, "light")
        film(browser, url, out / "race.gif")
        browser.close()


@contextmanager
def serve() -> Iterator[str]:
    """Yields the address of a server that ends with the context."""
    command = [sys.executable, "-m", "clover", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        yield json.loads(server.stderr.readline())["url"]
        server.send_signal(signal.SIGINT)
        server.communicate()


def take(
    browser: Browser,
    url: str,
    path: Path,
    viewport: ViewportSize,
    scheme: Literal["light", "dark"],
) -> None:
    """Takes a picture of an answer that is half done, where there is room for it of a race."""
    page = open_page(browser, url, viewport, scheme)
    page.get_by_label("Race", exact=True).set_checked(viewport == WIDE)
    page.get_by_label("Slow motion").check()
    page.get_by_role("button", name="Solve").click()
    wait_for(page, IS_HALF_DONE)
    time.sleep(SHUTTER_SECONDS / 4)  # tiles are settling
    page.screenshot(path=path, animations="disabled")
    page.context.close()


def film(browser: Browser, url: str, path: Path) -> None:
    """Films a race against the parent."""
    page = open_page(browser, url, RACE, "light")
    page.get_by_label("Race", exact=True).check()
    page.get_by_label("Slow motion").check()
    page.get_by_role("button", name="Add").click()
    frames: list[Image.Image] = []
    seen: list[str] = []
    deadline = time.monotonic() + MAX_SECONDS
    is_over = False
    while not is_over and time.monotonic() < deadline:
        is_over = page.locator(".verdict").is_visible()
        shown = page.locator(".answer .text, .verdict").all_text_contents()
        if shown != seen:
            seen = shown
            frames.append(Image.open(io.BytesIO(page.screenshot(animations="disabled"))))
    page.context.close()
    colored = frames[-1].quantize(NUM_COLORS, dither=Image.Dither.NONE)
    small = [
        frame.convert("RGB").quantize(palette=colored, dither=Image.Dither.NONE) for frame in frames
    ]
    durations = [FRAME_MILLISECONDS] * (len(small) - 1) + [LAST_FRAME_MILLISECONDS]
    small[0].save(
        path, save_all=True, append_images=small[1:], duration=durations, loop=0, optimize=True
    )


def open_page(
    browser: Browser, url: str, viewport: ViewportSize, scheme: Literal["light", "dark"]
) -> Page:
    page = browser.new_context(viewport=viewport, color_scheme=scheme).new_page()
    page.add_init_script(STRETCH)
    page.goto(url)
    page.locator("#model option").first.wait_for(state="attached")
    return page


def wait_for(page: Page, condition: str) -> None:
    """Returns once a function of JavaScript holds.

    Asked from outside: the page's policy keeps the browser from evaluating text by itself.
    """
    deadline = time.monotonic() + MAX_SECONDS
    while not page.evaluate(condition):
        if time.monotonic() > deadline:
            raise TimeoutError(f"expected {condition} within {MAX_SECONDS} s")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
