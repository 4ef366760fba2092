"""The splits of the tasks."""

from __future__ import annotations

from typing import Literal, get_args

# "seen" draws from the same lists as "train", items of its own; only "train" makes up wordings.
Split = Literal["train", "seen", "heldout"]
SPLITS: tuple[Split, ...] = get_args(Split)
