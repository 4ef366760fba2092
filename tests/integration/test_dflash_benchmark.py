"""`benchmarks/dflash.py` on a toy parent, and drafters on clover-nano's."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import dflash
from clover.checkpoint.load import LoadedCheckpoint, load_checkpoint, resolve_checkpoint, save_model
from clover.cli_bench import DRAFTER_FOLDER
from clover.config import ModelConfig
from clover.diffusion.generate import generate_all, reserved_token_ids
from clover.diffusion.policies import Autoregressive
from clover.diffusion.requests import Finished, GenerationRequest
from clover.diffusion.sampling import SamplingParams
from clover.eval.dflash.decode import DrafterDecoder
from clover.eval.dflash.files import load_drafter
from clover.eval.dflash.model import Drafter, drafter_config
from clover.eval.workloads import draw_workloads
from clover.model.transformer import CloverForCausalLM
from clover.tasks import FAMILIES
from clover.tokenizer import Tokenizer

NANO = Path(__file__).parents[2] / "clover" / "assets" / "nano"
NANO_DRAFTER = NANO / "parent" / DRAFTER_FOLDER


@pytest.fixture
def toy_parent(tiny_config: Callable[..., ModelConfig], tmp_path: Path) -> Path:
    """A parent's folder with random weights and the nano tokenizer."""
    tokenizer = Tokenizer.load(NANO)
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    config = tiny_config(
        diffusion=False,
        vocab_size=len(tokenizer),
        eos_token_ids=(end,),
        max_position_embeddings=1024,
    )
    model = CloverForCausalLM(config)
    model.init_weights(torch.Generator().manual_seed(0))
    save_model(model, tmp_path / "toy", files_from=NANO)
    return tmp_path / "toy"


def test_a_drafter_is_trained_in_two_goes_and_then_measured(
    toy_parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    train = ["train", "--parent", str(toy_parent), "--out", str(out), "--steps", "2"]
    train += ["--rows", "2", "--blocks", "4", "--block-size", "4", "--layers", "1"]
    assert dflash.main(train) == 0
    assert "step 2: total" in capsys.readouterr().out
    shutil.rmtree(out / "drafter")
    assert dflash.main(train) == 0  # nothing is left to train: it goes on from the saved state
    told = capsys.readouterr().out
    assert "finished at step 2: 0 tokens" in told
    assert "M parameters" in told
    measure = ["measure", "--parent", str(toy_parent), "--drafter", str(out / "drafter")]
    measure += ["--items", "1", "--max-tokens", "6", "--draft-tokens", "1", "3"]
    assert dflash.main(measure) == 0
    told = capsys.readouterr().out
    assert re.findall(r"^(\w+(?: of \d)?):", told, re.MULTILINE) == [
        "autoregressive",
        "drafts of 1",
        "drafts of 3",
    ]
    assert "drafted tokens accepted a verification" in told


def test_the_papers_decays_are_met() -> None:
    assert [dflash.position_decay(size) for size in (8, 16)] == [4.0, 7.0]
    assert dflash.position_decay(10) == pytest.approx(5.0, abs=0.3)
    assert dflash.position_decay(2) > 0


@pytest.fixture(scope="module")
def nano_parent() -> LoadedCheckpoint:
    return load_checkpoint(resolve_checkpoint("clover-nano-parent"))


@pytest.mark.parametrize("is_trained", [False, True] if NANO_DRAFTER.is_dir() else [False])
def test_nanos_text_is_its_parents_greedily_and_seeded(
    nano_parent: LoadedCheckpoint, is_trained: bool
) -> None:
    parent = nano_parent
    if is_trained:
        drafter = load_drafter(NANO_DRAFTER)
    else:
        drafter = Drafter(drafter_config(parent.model, block_size=8))
        drafter.init_weights(torch.Generator().manual_seed(0))
    prompts = [item.prompt_ids for item in draw_workloads(parent, 2, FAMILIES)["short"]]
    requests = [
        GenerationRequest(
            prompt_ids=prompt, max_tokens=24, policy=Autoregressive(), sampling=sampling
        )
        for prompt in prompts
        for sampling in (SamplingParams(), SamplingParams(temperature=0.8, seed=7))
    ]
    reserved = reserved_token_ids(parent.config, len(parent.tokenizer))
    decoder = DrafterDecoder(parent.model, drafter, forbidden_token_ids=reserved)
    found = []
    for request in requests:
        *_, last = decoder.generate(request)
        assert isinstance(last, Finished)
        found.append(last.result)
    expected = generate_all(parent.model, requests, forbidden_token_ids=reserved)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    if is_trained:
        passes = sum(each.stats.passes for each in found)
        assert decoder.accepted_tokens > passes  # else it does not suit the parent that ships
