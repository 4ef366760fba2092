"""Clover: block-diffusion language models, from a checkpoint to generated text."""

from __future__ import annotations

__version__ = "0.1.0"
