"""A backend that is real in all but its weights: nano's tokenizer, a tiny random model, an engine."""

from __future__ import annotations

from pathlib import Path

import torch

import clover
from clover.backends.local import LocalBackend
from clover.chat import ChatTemplate
from clover.checkpoint.load import GenerationDefaults, LoadedCheckpoint
from clover.config import DiffusionConfig
from clover.engine.engine import EngineConfig
from clover.model.transformer import CloverForCausalLM
from clover.tokenizer import Tokenizer
from tests.conftest import make_tiny_config

assert clover.__file__ is not None
FOLDER = Path(clover.__file__).parent / "assets" / "nano"
MASK_ID, IM_END = 3, 2
CONTEXT = 512


def make_tiny_backend(*, context: int = CONTEXT, **limits: int) -> LocalBackend:
    """Returns a backend of the model "tiny", whose text is noise and ends by chance.

    Args:
        context: Most tokens of a prompt and its answer.
        limits: Of the engine.
    """
    tokenizer = Tokenizer.load(FOLDER)
    model = CloverForCausalLM(
        make_tiny_config(
            vocab_size=len(tokenizer) + 8,
            eos_token_ids=(IM_END,),
            max_position_embeddings=context,
            diffusion=DiffusionConfig(block_size=8, mask_token_id=MASK_ID),
        )
    )
    model.init_weights(torch.Generator().manual_seed(1))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)  # a lively text instead of one token for ever
        model.lm_head.weight.mul_(4)
    checkpoint = LoadedCheckpoint(
        folder=FOLDER,
        model=model,
        tokenizer=tokenizer,
        template=ChatTemplate.load(FOLDER),
        generation=GenerationDefaults(),
    )
    return LocalBackend(checkpoint, model="tiny", config=EngineConfig(**limits))
