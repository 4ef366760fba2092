"""`python -m clover` is the `clover` command."""

from __future__ import annotations

from clover.cli import main

main()
