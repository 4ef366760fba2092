"""Draws replies while they are written. The only file that knows what a terminal is."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from clover.chat import Message

MASK_GLYPH = "░░"
# Redraws in a second. More would not be seen, and each costs a few milliseconds of one core.
REFRESH_RATE = 25
# Below this width two replies stand under each other instead of side by side.
MIN_SIDE_BY_SIDE = 72
# Tags of the chat format, dimmed so that what is said stands out.
TAG_PATTERN = r"</?(?:think|tool_call|tool_response|tools)>|<\|im_(?:start|end)\|>|<\|endoftext\|>"
CONTROL_PATTERN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
THINKING_PATTERN = r"(?s)^.*?(?:</think>|\Z)"


@dataclass(slots=True)
class Pane:
    """What one model has written so far: committed text, then the cells of the block at work."""

    title: str
    starts_in_thinking: bool = False
    committed: str = ""
    cells: Sequence[str | None] = field(default=())  # None: still a mask
    tokens: int = 0
    passes: int = 0
    seconds: float = 0.0
    verdict: bool | None = None

    @property
    def tokens_per_second(self) -> float:
        """Speed so far, 0 before the first pass."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def tokens_per_forward(self) -> float:
        """TPF. The passes are known at the end."""
        return self.tokens / self.passes


def plain_answer(message: Message) -> str:
    """Returns what a pipe gets: the content, then each tool call as a line of JSON; no thinking."""
    calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    lines = [message.content.strip() if calls else message.content]
    lines += [json.dumps(call, ensure_ascii=False, default=dict) for call in calls]
    return "\n".join(line for line in lines if line)


def summary(pane: Pane) -> str:
    """Returns the closing line: tokens, seconds, tokens/s, and TPF as soon as it is known."""
    speed = f"{pane.tokens} tokens, {pane.seconds:.2f} s, {pane.tokens_per_second:.1f} tokens/s"
    return f"{speed}, TPF {pane.tokens_per_forward:.2f}" if pane.passes else speed


def comparison(clover: Sequence[Pane], parent: Sequence[Pane]) -> str:
    """Returns the line that sets all replies of one model against those of the other."""
    totals = [_total(panes) for panes in (clover, parent)]
    speeds = [total.tokens_per_second for total in totals]
    parts = [
        f"{total.title}: {summary(total)}{_score(panes)}"
        for total, panes in zip(totals, (clover, parent), strict=True)
    ]
    ratio = speeds[0] / speeds[1] if speeds[1] > 0 else 0.0
    return f"{parts[0]} | {parts[1]} | {ratio:.2f}x the parent's speed"


def totals(panes: Sequence[Pane]) -> str:
    """Returns the closing line of several replies of one model."""
    return summary(_total(panes)) + _score(panes)


def _total(panes: Sequence[Pane]) -> Pane:
    return Pane(
        title=panes[0].title,
        tokens=sum(pane.tokens for pane in panes),
        passes=sum(pane.passes for pane in panes),
        seconds=sum(pane.seconds for pane in panes),
    )


def _score(panes: Sequence[Pane]) -> str:
    verdicts = [pane.verdict for pane in panes if pane.verdict is not None]
    return f", {sum(verdicts)} of {len(verdicts)} right" if verdicts else ""


def render_reply(pane: Pane) -> Text:
    """Returns committed text, then the block at work: guesses dim, masks as cells."""
    text = Text(_printable(pane.committed), overflow="fold")
    if pane.starts_in_thinking:
        text.highlight_regex(THINKING_PATTERN, style="dim italic")
    text.highlight_regex(TAG_PATTERN, style="dim")
    for cell in pane.cells:
        text.append(MASK_GLYPH if cell is None else _printable(cell), style="cyan dim")
    return text


def _printable(text: str) -> str:
    """Returns a text in which control characters, which could move the cursor, are visible."""
    return CONTROL_PATTERN.sub("\N{REPLACEMENT CHARACTER}", text).expandtabs(4)


def last_lines(text: Text, *, width: int, height: int, console: Console) -> Text:
    """Returns the last `height` lines of a text wrapped to `width`: what a picture can hold."""
    lines = text.wrap(console, max(width, 1), overflow="fold")
    return Text("\n").join(lines[-max(height, 1) :])


class Screen:
    """Draws one reply, or two beside each other, while they are written."""

    def __init__(self, console: Console) -> None:
        """Draws on `console`, which must be a terminal."""
        self._console = console
        self._live: Live | None = None
        self._last_drawn = 0.0

    @contextmanager
    def drawing(self, panes: Sequence[Pane]) -> Iterator[None]:
        """Keeps a picture of the panes up to date; leaves their whole text behind at the end."""
        live = Live(console=self._console, auto_refresh=False, transient=True)
        with live:
            self._live = live
            try:
                yield
            finally:
                self._live = None
                # Here, so that an interrupted reply stays on the screen, too
                live.stop()
                self._console.print(self._picture(panes, whole=True))

    def update(self, panes: Sequence[Pane]) -> None:
        """Redraws, unless the last picture is so fresh that nobody has seen it yet."""
        now = time.perf_counter()
        if self._live is None or now - self._last_drawn < 1 / REFRESH_RATE:
            return
        self._last_drawn = now
        self._live.update(self._picture(panes, whole=False), refresh=True)

    def _picture(self, panes: Sequence[Pane], *, whole: bool) -> RenderableType:
        if len(panes) == 1:
            return self._body(panes[0], self._console.width, len(panes), whole=whole)
        if self._console.width < MIN_SIDE_BY_SIDE:
            width = self._console.width
            return Group(*(self._panel(pane, width, len(panes), whole=whole) for pane in panes))
        grid = Table.grid(expand=True)
        for _ in panes:
            grid.add_column(ratio=1)
        width = self._console.width // len(panes)
        grid.add_row(*(self._panel(pane, width, 1, whole=whole) for pane in panes))
        return grid

    def _panel(self, pane: Pane, width: int, stacked: int, *, whole: bool) -> Panel:
        mark = {None: "", True: " [green]right[/]", False: " [red]wrong[/]"}[pane.verdict]
        body = self._body(pane, width - 4, stacked, whole=whole)
        return Panel(
            body,
            title=pane.title + mark,
            subtitle=summary(pane),
            title_align="left",
            subtitle_align="left",
            border_style="dim",
        )

    def _body(self, pane: Pane, width: int, stacked: int, *, whole: bool) -> Text:
        text = render_reply(pane)
        if whole:
            return text
        height = self._console.height // stacked - 3
        return last_lines(text, width=width, height=height, console=self._console)
