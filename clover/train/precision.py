"""In which precision training computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch


def emulates_bf16(device: torch.device) -> bool:
    """Returns whether a device has no bf16 products of its own.

    Emulated ones were 60 to 90 times slower than fp32 (docs/log.md).
    """
    return device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def choose_precision(
    precision: Literal["auto", "fp32", "bf16"], device: torch.device
) -> Literal["fp32", "bf16"]:
    """Returns what "auto" means on a device: bf16, but on a CPU that has to emulate it fp32."""
    if precision != "auto":
        return precision
    return "fp32" if emulates_bf16(device) else "bf16"


@contextmanager
def training_precision(precision: str, device: torch.device) -> Iterator[None]:
    """Computes matrix products in bf16 where asked for; weights and sums stay fp32.

    On a CPU this pays from a hidden width of about 192 on: below it, casts cost more than they save.
    Casts are not cached: a cached one would outlive the optimizer's step and hide what it changed.
    """
    is_bf16 = precision == "bf16"
    with torch.autocast(device.type, torch.bfloat16, enabled=is_bf16, cache_enabled=False):
        yield
