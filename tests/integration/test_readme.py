"""The Python of the README runs as it stands there."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def test_the_python_of_the_readme_runs_and_its_sums_are_right(
    capsys: pytest.CaptureFixture[str],
) -> None:
    section = README.read_text(encoding="utf-8").split("## From Python\n")[1].split("\n## ")[0]
    code = [line for line in section.splitlines() if line.startswith("    ")]
    exec(textwrap.dedent("\n".join(code)), {})
    printed = capsys.readouterr().out
    assert printed.count("85") >= 2  # from the plain loop and from the engine
    assert "865" in printed
    assert printed.count("eos") == 2
