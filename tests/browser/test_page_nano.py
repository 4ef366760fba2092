"""The page in front of clover-nano and its parent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from clover.backends.local import LocalBackend
from clover.checkpoint.load import load_checkpoint, resolve_checkpoint
from tests.serving import serving

pytestmark = pytest.mark.slow  # two models and a race on a busy machine take a minute


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    names = ("clover-nano", "clover-nano-parent")
    backends = [
        LocalBackend(load_checkpoint(resolve_checkpoint(name)), model=name) for name in names
    ]
    with serving(*backends) as url:
        yield url


def test_nano_and_its_parent_race_to_the_same_sum(page: Page, url: str) -> None:
    page.goto(url)
    page.get_by_label("Race", exact=True).check()
    page.get_by_label("Slow motion").check()
    page.get_by_role("button", name="Add").click()
    expect(page.locator(".cell.filled").first).to_be_visible()
    expect(page.locator(".verdict")).to_contain_text("Both wrote the same.")
    for answer in page.locator(".answer").all():
        expect(answer).to_contain_text("85")
    assert float(page.locator("#tpf").inner_text()) > 1.0
    expect(page.locator("#previews")).to_have_text("1.00")


def test_nano_calls_the_tool_of_the_example(page: Page, url: str) -> None:
    page.goto(url)
    page.get_by_role("button", name="Call a tool").click()
    card = page.locator(".card")
    expect(card.get_by_role("heading")).to_have_text("send_letter")
    expect(card.locator("dd")).to_have_text(["Olga", "true"])
