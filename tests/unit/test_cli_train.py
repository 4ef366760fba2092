"""How a training run is watched: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import io
import re

from rich.console import Console

from clover.cli_train import watch
from clover.train.evaluation import EvalResult
from clover.train.events import EvalEvent, StepEvent


def show(console: Console) -> None:
    result = EvalResult(loss=2.0, exact=0.25, exact_by_family={})
    with watch(console) as on_event:
        for step in (5, 6):
            event = StepEvent(
                step=step,
                num_steps=20,
                losses={"total": 8.0 / step},
                learning_rate=0.1,
                grad_norm=1.0,
                tokens_per_second=500.0,
            )
            on_event(event)
        on_event(EvalEvent(step=6, name="heldout", result=result))


def test_a_terminal_sees_a_bar_with_loss_speed_and_the_time_left() -> None:
    out = io.StringIO()
    show(Console(file=out, force_terminal=True, width=100, color_system=None))
    seen = out.getvalue()
    assert "step 6/20" in seen
    assert re.search(r"loss 1\.3333, 500 tokens/s, 0:\d\d:\d\d left", seen)
    assert "step 6: heldout: loss 2.0000, exact 25.0%" in seen


def test_a_pipe_gets_a_line_per_event() -> None:
    out = io.StringIO()
    show(Console(file=out, force_terminal=False, width=100))
    lines = out.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 5", "step 6", "step 6"]
    assert "500 tokens/s" in lines[0]
