"""The page in a real browser, in front of servers whose answers are scripts."""

from __future__ import annotations

import json
import re
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from clover.backends.scripted import ScriptedBackend
from clover.chat import Message
from tests.browser.conftest import Watched
from tests.serving import serving, wait_until

TOOLS = json.loads((Path(__file__).parents[2] / "examples" / "tools.json").read_text())
SAID = "one two three four five six seven eight"
ANSWER = f"let me think\n</think>\n\n{SAID}"
CALL = """\
</think>

<tool_call>
<function=send_letter>
<parameter=recipient>
Olga
</parameter>
<parameter=urgent>
true
</parameter>
</function>
</tool_call>"""
PASS = 0.1
"""Seconds: a canvas stands long enough to be looked at."""
LONG = "word " * 20_000
"""With PASS, more than a test waits for."""


RECORD = """() => {
  const log = document.querySelector("#log");
  const texts = (name) => [...log.querySelectorAll(name)].map((element) => element.textContent);
  window.seen = [];
  new MutationObserver(() => seen.push([log.textContent, texts(".cell")]))
    .observe(log, { subtree: true, childList: true, attributes: true });
}"""
HALF_BLOCKS = [["↵</think>", "", " two", ""], [" four", "", " six", ""]]


def blocks(*answers: str, **fields: Any) -> ScriptedBackend:
    return ScriptedBackend(answers, **{"block_size": 4, **fields})


def ask(page: Page, text: str = "hello") -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def expect_idle(page: Page) -> None:
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()


def test_a_message_is_answered_and_the_chat_goes_on(page: Page) -> None:
    backend = blocks(ANSWER, "so\n</think>\n\nmore")
    with serving(backend) as url:
        page.goto(url)
        expect(page.get_by_role("heading", name="Watch a text")).to_be_visible()
        ask(page)
        expect(page.get_by_text(SAID)).to_be_visible()
        expect(page.get_by_role("heading", name="Watch a text")).to_be_hidden()
        expect(page.get_by_label("Message")).to_have_value("")
        ask(page, "and then?")
        expect(page.get_by_text("more", exact=True)).to_be_visible()
    assert backend.requests[0].messages == (Message("user", "hello"),)
    assert backend.requests[1].messages == (
        Message("user", "hello"),
        Message("assistant", SAID, thinking="let me think"),
        Message("user", "and then?"),
    )


def test_cells_are_seen_before_the_text_is_final(page: Page) -> None:
    with serving(blocks(f"\n</think>\n\n{SAID}", seconds_per_token=PASS)) as url:
        page.goto(url)
        page.evaluate(RECORD)
        ask(page)
        expect(page.get_by_text(SAID)).to_be_visible()
        expect(page.locator(".cell")).to_have_count(0)
        expect(page.locator("#previews")).to_have_text("2.00")
        expect(page.locator("#tpf")).to_have_text("1.50")  # 9 pieces, 3 blocks
        expect(page.locator(".cost")).to_contain_text("tokens/s")
        seen = page.evaluate("seen")
    halves = [text for text, cells in seen if cells in HALF_BLOCKS]
    assert halves
    assert all(SAID not in text for text in halves)


def test_how_sure_a_guess_is_can_be_seen(page: Page) -> None:
    with serving(blocks("\n</think>\n\n" + LONG, seconds_per_token=PASS)) as url:
        page.goto(url)
        ask(page)
        # Asked in one breath: a pass later these cells are gone
        colours = """[...document.querySelectorAll(".cell.filled")]
            .map(cell => getComputedStyle(cell).backgroundColor)"""
        wait_until(lambda: len(set(page.evaluate(colours))) > 1)
        page.keyboard.press("Escape")
        expect_idle(page)


def test_thinking_is_open_while_it_lasts_and_folded_after(page: Page) -> None:
    with serving(blocks(ANSWER, seconds_per_token=PASS)) as url:
        page.goto(url)
        ask(page)
        thinking = page.locator("details.thinking")
        expect(thinking).to_have_attribute("open", "")
        expect(page.get_by_text(SAID)).to_be_visible()
        expect(thinking).not_to_have_attribute("open", "")
        page.get_by_text("Thought").click()
        expect(page.get_by_text("let me think")).to_be_visible()


def test_a_call_is_a_card_and_its_result_goes_back(page: Page) -> None:
    backend = blocks(CALL, "\n</think>\n\nIt is on its way.")
    with serving(backend) as url:
        page.goto(url)
        page.get_by_role("button", name="Tools").click()
        page.get_by_role("button", name="Use the example").click()
        expect(page.get_by_role("button", name="Tools · 2")).to_be_visible()
        ask(page, "write to Olga")
        card = page.locator(".card")
        expect(card.get_by_role("heading")).to_have_text("send_letter")
        expect(card.locator("dd")).to_have_text(["Olga", "true"])
        ask(page, "never mind")  # the call waits for its result
        expect(page.get_by_label("Result of send_letter")).to_be_focused()
        page.keyboard.type("sent")
        page.keyboard.press("Enter")
        expect(page.get_by_text("It is on its way.")).to_be_visible()
    assert [dict(tool) for tool in backend.requests[0].tools] == TOOLS
    assert backend.requests[1].messages[-1] == Message("tool", "sent")
    assert len(backend.requests) == 2


def test_tools_that_are_no_list_are_refused_on_the_spot(page: Page) -> None:
    backend = blocks(ANSWER)
    with serving(backend) as url:
        page.goto(url)
        page.get_by_role("button", name="Tools").click()
        page.get_by_label("Tools that the model may call").fill('{"type": "function"')
        expect(page.locator("#tools-error")).to_contain_text("Not a JSON list")
        ask(page)
        assert not backend.requests


@pytest.mark.parametrize("how", ["button", "escape"])
def test_an_answer_can_be_stopped(page: Page, how: str) -> None:
    backend = blocks("\n</think>\n\n" + LONG, seconds_per_token=0.02)
    with serving(backend) as url:
        page.goto(url)
        ask(page)
        expect(page.locator(".answer")).to_contain_text("word word")
        if how == "button":
            page.get_by_role("button", name="Stop").click()
        else:
            page.keyboard.press("Escape")
        expect(page.get_by_text("Stopped.")).to_be_visible()
        expect(page.locator(".cell")).to_have_count(0)
        wait_until(lambda: backend.load.running == 0)
        expect_idle(page)
        expect(page.locator("#banner")).to_be_hidden()


def test_a_race_has_two_clocks_and_a_winner(page: Page) -> None:
    fast = blocks(ANSWER, model="a")
    slow = ScriptedBackend([ANSWER], model="a-parent", seconds_per_token=PASS)
    with serving(fast, slow) as url:
        page.goto(url)
        expect(page.get_by_label("Model", exact=True)).to_have_text(
            "a"
        )  # its parent is there to race against
        page.get_by_label("Race", exact=True).check()
        expect(page.get_by_label("Race against")).to_have_value("a-parent")
        ask(page)
        expect(page.locator(".verdict")).to_have_text(
            re.compile(r"^a: \d+\.\d\d× the tokens per second\. Both wrote the same\.$")
        )
        expect(page.locator(".clock")).to_have_text([re.compile(r"^\d+\.\d s · ")] * 2)
        expect(page.locator(".answer")).to_have_count(2)
    [mine], [rival] = fast.requests, slow.requests
    assert mine.messages == rival.messages
    assert (mine.policy, rival.policy) == ("balanced", None)


def test_a_model_alone_races_against_itself(page: Page) -> None:
    backend = blocks(ANSWER)
    with serving(backend) as url:
        page.goto(url)
        page.get_by_label("Race", exact=True).check()
        ask(page)
        expect(page.locator(".verdict")).to_be_visible()
    assert {request.policy for request in backend.requests} == {"balanced", "autoregressive"}


def test_the_dial_sends_its_mode(page: Page) -> None:
    with serving(blocks(ANSWER)) as url:
        page.goto(url)
        for mode in ("fast", "balanced", "exact"):
            page.get_by_label(mode, exact=True).check()
            with page.expect_request("**/v1/chat/completions") as sent:
                ask(page)
            assert json.loads(sent.value.post_data or "")["mode"] == mode
            expect_idle(page)


def test_a_refusal_is_shown_and_can_be_tried_again(page: Page) -> None:
    backend = blocks(LONG, seconds_per_token=PASS, capacity=1)
    with serving(backend) as url:
        page.goto(url)
        other = page.context.new_page()
        other.goto(url)
        ask(other)
        wait_until(lambda: backend.load.running == 1)
        ask(page)
        expect(page.get_by_role("alert")).to_contain_text("The server is busy. Try again in 1 s.")
        other.close()
        wait_until(lambda: backend.load.running == 0)
        page.get_by_role("button", name="Retry").click()
        expect(page.locator(".answer")).to_contain_text("word")
        expect(page.locator("#banner")).to_be_hidden()
        page.keyboard.press("Escape")
        expect_idle(page)
        assert len(page.locator(".question").all()) == 1


def test_what_a_bad_request_got_wrong_is_shown_and_not_sent_again(page: Page) -> None:
    backend = blocks(ANSWER)
    with serving(backend) as url:
        page.goto(url)
        page.get_by_role("button", name="Tools").click()
        page.get_by_label("Tools that the model may call").fill('[{"type": "magic"}]')
        ask(page, "bad")
        expect(page.get_by_role("alert")).to_contain_text("tools.0")
        page.get_by_role("button", name="Clear").click()
        ask(page, "good")
        expect(page.get_by_text(SAID)).to_be_visible()
    assert [message.content for message in backend.requests[0].messages] == ["good"]


def test_a_page_whose_server_is_gone_says_so_and_finds_it_again(page: Page) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ExitStack() as first:
        url = first.enter_context(serving(blocks("\n</think>\n\nyes"), port=port))
        page.goto(url)
        ask(page)
        expect(page.get_by_text("yes", exact=True)).to_be_visible()
    ask(page, "still there?")
    expect(page.get_by_role("alert")).to_contain_text("Waiting for it to come back")
    with serving(blocks("\n</think>\n\nagain"), port=port):
        expect(page.get_by_role("alert")).to_contain_text("The server is back.")
        page.get_by_role("button", name="Retry").click()
        expect(page.get_by_text("again", exact=True)).to_be_visible()


def test_a_key_is_asked_for_once(page: Page) -> None:
    with serving(blocks(ANSWER), api_key="right") as url:
        page.goto(url)
        page.get_by_label("API key").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_text("That key was not accepted.")).to_be_visible()
        page.get_by_label("API key").fill("right")
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog")).to_be_hidden()
        page.reload()
        expect(page.get_by_label("Model", exact=True)).to_have_text("scripted")
        ask(page)
        expect(page.get_by_text(SAID)).to_be_visible()


def test_everything_can_be_done_by_keyboard(page: Page) -> None:
    backend = blocks(ANSWER)
    with serving(backend) as url:
        page.goto(url)
        expect(page.get_by_label("Message")).to_be_focused()
        page.keyboard.type("two")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("lines")
        page.keyboard.press("Tab")
        expect(page.get_by_role("button", name="Send", exact=True)).to_be_focused()
        page.keyboard.press("Tab")
        page.keyboard.press("Space")
        expect(page.get_by_label("Thinking")).not_to_be_checked()
        page.locator("input[value=balanced]").focus()
        page.keyboard.press("ArrowLeft")
        expect(page.locator("input[value=fast]")).to_be_checked()
        outline = "span => getComputedStyle(span).outlineStyle"
        assert page.locator("input[value=fast] + span").evaluate(outline) == "solid"
        page.get_by_label("Message").focus()
        page.keyboard.press("Enter")
        expect(page.locator(".answer .text").last).to_contain_text("let me think")
    [request] = backend.requests
    assert request.messages[0].content == "two\nlines"
    assert not request.enable_thinking
    assert request.policy == "fast"


def test_nothing_leaves_the_server_and_nothing_is_complained_about(watched: Watched) -> None:
    page = watched.page
    with serving(
        blocks(ANSWER, '<img src="https://example.com/x"><script>alert(1)</script>')
    ) as url:
        page.goto(url)
        ask(page)
        expect(page.get_by_text(SAID)).to_be_visible()
        page.get_by_label("Race", exact=True).check()
        page.get_by_label("Thinking").uncheck()
        ask(page)
        expect(page.locator(".answer").get_by_text("<script>alert(1)</script>")).to_be_visible()
        expect_idle(page)
        assert watched.urls
        assert all(asked.startswith(url) for asked in watched.urls)
        assert watched.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(browser: Browser, scheme: Any) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 700}, color_scheme=scheme)
    page = context.new_page()
    width = "document.documentElement.scrollWidth"
    with serving(blocks("\n</think>\n\n" + "unbreakable" * 20)) as url:
        page.goto(url)
        expect(page.get_by_label("Model", exact=True)).to_have_text("scripted")
        assert page.evaluate(width) == 360
        page.get_by_label("Race", exact=True).check()
        page.get_by_role("button", name="Tools").click()
        ask(page)
        expect(page.locator(".verdict")).to_be_visible()
        assert page.evaluate(width) == 360
        assert page.locator("main").evaluate("main => main.scrollWidth - main.clientWidth") == 0
        colours = page.evaluate(
            "['color', 'backgroundColor'].map(name => getComputedStyle(document.body)[name])"
        )
    context.close()
    text, paper = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
    assert (text < paper) == (scheme == "light")


def test_those_who_want_no_motion_get_none(browser: Browser) -> None:
    context = browser.new_context(reduced_motion="reduce")
    page = context.new_page()
    with serving(blocks(LONG, seconds_per_token=PASS)) as url:
        page.goto(url)
        ask(page)
        expect(page.locator(".cell").first).to_have_css("animation-name", "none")
        page.keyboard.press("Escape")
        expect_idle(page)
    context.close()


def test_slow_motion_shows_every_pass_and_can_be_hurried(page: Page) -> None:
    with serving(blocks("\n</think>\n\n" + "word " * 2000)) as url:
        page.goto(url)
        page.get_by_label("Slow motion").check()
        ask(page)
        expect(page.locator(".cell.filled").first).to_be_visible()
        page.keyboard.press("Escape")
        expect_idle(page)
        expect(page.locator(".cell")).to_have_count(0)
