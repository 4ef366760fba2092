"""The DFlash baseline: the parent's own text whatever is drafted, and a drafter that learns."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clover.config import ModelConfig
from clover.diffusion.generate import generate_all
from clover.diffusion.policies import Autoregressive, PromptLookup
from clover.diffusion.requests import Finished, GenerationRequest, GenerationResult
from clover.diffusion.sampling import SamplingParams
from clover.errors import CheckpointError, ConfigError, RequestError, TrainingInputError
from clover.eval.dflash.decode import DrafterDecoder
from clover.eval.dflash.files import load_drafter, save_drafter
from clover.eval.dflash.model import (
    Drafter,
    DrafterCache,
    drafter_config,
    record_features,
    spread_layers,
)
from clover.eval.dflash.train import (
    DraftBlocks,
    DrafterTraining,
    draft_logits,
    draw_blocks,
    mean_agreed,
    train_drafter,
)
from clover.model.transformer import CloverForCausalLM
from clover.train.data import Document
from clover.train.events import SummaryEvent, TrainEvent
from clover.train.optimizer import OptimizerConfig
from clover.train.packing import Batch, pack_rows
from clover.train.run_files import read_metrics

PROMPT = (5, 9, 2, 30, 7)
BLOCK_SIZE = 6

FEATURE_TOLERANCE = 1e-3
"""fp32 hidden states of about 10: step by step the recurrence sums in another order."""

LOSS_TOLERANCE = 1e-2
"""Sums over rows in another order, through Muon's iteration in bf16 of four updates."""

LOGIT_TOLERANCE = 1e-3
"""fp32 logits of about 50: attention over a cache, and packed, sums in another order."""


@pytest.fixture(scope="module")
def parent(tiny_config: Callable[..., ModelConfig]) -> CloverForCausalLM:
    return make_parent(tiny_config(diffusion=False, eos_token_ids=()))


def make_parent(config: ModelConfig) -> CloverForCausalLM:
    """A random parent whose text varies."""
    model = CloverForCausalLM(config)
    model.init_weights(torch.Generator().manual_seed(1))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)
        model.lm_head.weight.mul_(8)
    return model.eval()


def new_drafter(parent: CloverForCausalLM, seed: int = 0) -> Drafter:
    drafter = Drafter(drafter_config(parent, num_layers=2, block_size=BLOCK_SIZE))
    drafter.init_weights(torch.Generator().manual_seed(seed))
    return drafter.eval()


class Oracle(Drafter):
    """Drafts a given text by rows of the parent's head, but for the places that are to be wrong.

    What a drafter can learn does not show in a second. That right drafts are accepted and wrong ones
    cut where they err does.
    """

    def __init__(self, parent: CloverForCausalLM, text: tuple[int, ...], wrong: set[int]) -> None:
        super().__init__(drafter_config(parent, num_layers=1, block_size=BLOCK_SIZE))
        drafts = [(token + 1) % 60 if i in wrong else token for i, token in enumerate(text)]
        self.rows = parent.lm_head.weight.detach()[drafts]

    def forward(
        self,
        features: Tensor,
        anchors: Tensor,
        num_masks: int,
        position_ids: Tensor,
        *,
        mask: Tensor | None = None,
        cache: DrafterCache | None = None,
    ) -> Tensor:
        assert cache is not None
        cache.length += features.shape[1]
        places = position_ids[0, -num_masks:] - len(PROMPT)
        return 100 * self.rows[places][None, None]


def request(**changes: Any) -> GenerationRequest:
    fields: dict[str, Any] = {
        "prompt_ids": PROMPT,
        "max_tokens": 24,
        "policy": Autoregressive(),
    }
    return GenerationRequest(**(fields | changes))


def plain(parent: CloverForCausalLM, asked: GenerationRequest, **options: Any) -> GenerationResult:
    [result] = generate_all(parent, [asked], **options)
    return result


def drafted(decoder: DrafterDecoder, asked: GenerationRequest) -> GenerationResult:
    *_, last = decoder.generate(asked)
    assert isinstance(last, Finished)
    return last.result


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_tokens": 1},
        {"max_tokens": 7},
        {"prompt_ids": (5,)},
        {"sampling": SamplingParams(temperature=1.0, seed=3)},
        {"sampling": SamplingParams(temperature=0.7, top_p=0.9, seed=4), "draw": 2},
        {"sampling": SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, seed=5)},
    ],
)
@pytest.mark.parametrize("num_draft_tokens", [None, 1, 3])
def test_the_text_is_the_parents_whatever_an_untrained_drafter_drafts(
    parent: CloverForCausalLM, changes: dict[str, Any], num_draft_tokens: int | None
) -> None:
    asked = request(**changes)
    decoder = DrafterDecoder(parent, new_drafter(parent), num_draft_tokens=num_draft_tokens)
    expected, found = plain(parent, asked), drafted(decoder, asked)
    assert found.token_ids == expected.token_ids
    assert found.finish_reason == expected.finish_reason
    assert len(found.token_ids) == asked.max_tokens


def test_a_text_ends_at_eos_and_at_a_stop_string_as_the_parents_does(
    parent: CloverForCausalLM,
) -> None:
    whole = plain(parent, request()).token_ids
    eos = whole[10]
    letters = {"decode": lambda ids: "".join(chr(ord("0") + i) for i in ids)}
    stop = (letters["decode"](whole[4:7]),)
    for drafter in (new_drafter(parent), Oracle(parent, whole, set())):
        ends = DrafterDecoder(parent, drafter, eos_token_ids=[eos])
        stops = DrafterDecoder(parent, drafter, **letters)
        for decoder, asked, options in (
            (ends, request(), {"eos_token_ids": [eos]}),
            (ends, request(ignore_eos=True), {"eos_token_ids": [eos]}),
            (stops, request(stop=stop), letters),
        ):
            expected, found = plain(parent, asked, **options), drafted(decoder, asked)
            assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
            assert found.finish_reason == expected.finish_reason


def test_passes_are_counted_for_parent_and_drafter_and_right_drafts_spare_them(
    parent: CloverForCausalLM,
) -> None:
    asked = request(max_tokens=24)
    text = plain(parent, asked).token_ids
    decoder = DrafterDecoder(parent, Oracle(parent, text, set()))
    found = drafted(decoder, asked)
    assert found.token_ids == text
    # Five drafted tokens and one more a pass
    assert (found.stats.tokens, found.stats.passes, found.stats.commits) == (24, 4, 4)
    assert found.stats.previews == 0
    assert decoder.drafter_passes == 4
    assert (decoder.accepted_tokens, decoder.drafted_tokens) == (20, 20)


@pytest.mark.parametrize("wrong", [{0}, {4}, {2, 3}, {5, 11, 17}, {1, 9, 20}])
def test_a_wrong_draft_is_cut_where_it_errs_and_the_state_goes_back(
    parent: CloverForCausalLM, wrong: set[int]
) -> None:
    asked = request(max_tokens=24)
    text = plain(parent, asked).token_ids
    decoder = DrafterDecoder(parent, Oracle(parent, text, wrong))
    found = drafted(decoder, asked)
    assert found.token_ids == text
    position = passes = accepted = drafts = 0
    while position < len(text):
        stop = min(position + BLOCK_SIZE - 1, len(text) - 1)  # of the draft
        end = min((place for place in wrong if position <= place < stop), default=stop)
        accepted, drafts, passes = accepted + end - position, drafts + (stop > position), passes + 1
        position = end + 1
    assert found.stats.passes == passes
    assert (decoder.accepted_tokens, decoder.drafter_passes) == (accepted, drafts)


class Recording(Oracle):
    """An oracle that keeps what it is given."""

    def __init__(self, parent: CloverForCausalLM, text: tuple[int, ...], wrong: set[int]) -> None:
        super().__init__(parent, text, wrong)
        self.given: list[tuple[Tensor, Tensor, Tensor]] = []

    def forward(
        self,
        features: Tensor,
        anchors: Tensor,
        num_masks: int,
        position_ids: Tensor,
        *,
        mask: Tensor | None = None,
        cache: DrafterCache | None = None,
    ) -> Tensor:
        assert cache is not None
        assert position_ids.shape == (1, features.shape[1] + 1 + num_masks)
        self.given.append((features, anchors, position_ids))
        return super().forward(features, anchors, num_masks, position_ids, mask=mask, cache=cache)


def test_a_drafter_is_given_each_committed_tokens_features_once_and_at_its_position(
    parent: CloverForCausalLM,
) -> None:
    asked = request(max_tokens=40)
    text = plain(parent, asked).token_ids
    drafter = Recording(parent, text, {*range(0, 40, 3)})  # drafts of two right tokens at most
    decoder = DrafterDecoder(parent, drafter)
    assert drafted(decoder, asked).token_ids == text
    tokens = torch.tensor([[*PROMPT, *text]])
    with record_features(parent, drafter.config.feature_layers) as features, torch.no_grad():
        parent(tokens)
    length = 0
    for given, anchors, position_ids in drafter.given:
        stop = length + given.shape[1]
        torch.testing.assert_close(
            given, features[0][:, length:stop], atol=FEATURE_TOLERANCE, rtol=0
        )
        assert torch.equal(anchors, parent.model.embed_tokens(tokens[:, stop : stop + 1]))
        assert position_ids[0].tolist() == list(range(length, length + position_ids.shape[1]))
        length = stop
    assert len(drafter.given) == decoder.drafter_passes > 10


def test_what_is_not_plain_text_of_a_parent_is_refused(parent: CloverForCausalLM) -> None:
    decoder = DrafterDecoder(parent, new_drafter(parent))
    with pytest.raises(RequestError, match="found PromptLookup"):
        decoder.generate(request(policy=PromptLookup()))
    with pytest.raises(RequestError, match="num_draft_tokens is 6; allowed: 1 to 5"):
        DrafterDecoder(parent, new_drafter(parent), num_draft_tokens=BLOCK_SIZE)


def test_features_are_what_the_chosen_layers_leave_and_hooks_go(parent: CloverForCausalLM) -> None:
    input_ids = torch.tensor([PROMPT])
    with record_features(parent, (0, 2)) as features, torch.no_grad():
        parent(input_ids)
        parent(input_ids[:, :2])
    assert [tuple(part.shape) for part in features] == [(1, 5, 64), (1, 2, 64)]
    with torch.no_grad():
        parent(input_ids)
        last = parent.logits(parent.model.norm(features[0][..., 32:]))
        assert torch.equal(last, parent(input_ids))
    assert len(features) == 2
    assert spread_layers(36, 5) == (1, 9, 17, 25, 33)  # what the paper's drafter of Qwen3-8B reads
    assert spread_layers(8, 3) == (1, 3, 5)
    assert spread_layers(3, 3) == (1,)


DOCUMENTS = (
    Document(prompt_ids=(5, 9, 30, 7), response_ids=(11, 12, 13, 14, 15, 16, 17, 18, 2)),
    Document(prompt_ids=(8, 40), response_ids=(21, 22, 23)),
)


def packed() -> Batch:
    return pack_rows([DOCUMENTS, DOCUMENTS[1:]], row_length=20, pad_token_id=0)


def test_every_token_before_a_responses_token_may_be_an_anchor_and_nothing_else() -> None:
    seen: dict[int, set[int]] = {0: set(), 1: set()}
    for step in range(30):
        blocks = draw_blocks(
            packed(),
            num_blocks=4,
            block_size=BLOCK_SIZE,
            decay=2.0,
            generator=torch.Generator().manual_seed(step),
        )
        for row, anchors in enumerate(blocks.anchors.tolist()):
            used = [anchor for anchor in anchors if anchor >= 0]
            assert len(set(used)) == len(used)
            seen[row].update(used)
    assert seen[0] == {*range(3, 12), *range(14, 17)}
    assert seen[1] == {1, 2, 3}


def test_targets_end_with_their_document_and_weights_decay() -> None:
    batch = packed()
    blocks = draw_blocks(
        batch,
        num_blocks=12,
        block_size=BLOCK_SIZE,
        decay=2.0,
        generator=torch.Generator().manual_seed(0),
    )
    anchors = blocks.anchors[0].tolist()
    whole, cut = anchors.index(3), anchors.index(9)
    assert blocks.targets[0, whole].tolist() == [11, 12, 13, 14, 15]
    decay = torch.exp(-torch.arange(5) / 2.0)
    torch.testing.assert_close(blocks.weights[0, whole], decay)
    assert blocks.targets[0, cut, :3].tolist() == [17, 18, 2]
    torch.testing.assert_close(blocks.weights[0, cut], decay * torch.tensor([1, 1, 1, 0, 0]))
    assert (blocks.anchors[1] == -1).sum() == 9
    assert not blocks.weights[1][blocks.anchors[1] == -1].any()


def test_a_draft_of_packed_training_is_that_of_decoding(parent: CloverForCausalLM) -> None:
    drafter, batch = new_drafter(parent), packed()
    anchors = torch.tensor([[6, 14, 3], [2, -1, 1]])
    nothing = torch.zeros(2, 3, BLOCK_SIZE - 1)
    blocks = DraftBlocks(anchors=anchors, targets=nothing.long(), weights=nothing)
    with torch.no_grad():
        logits = draft_logits(parent, drafter, batch, blocks)
    for row, slot, start in ((0, 0, 0), (0, 1, 13), (0, 2, 0), (1, 0, 0), (1, 2, 0)):
        document = batch.input_ids[row : row + 1, start : anchors[row, slot]]
        count = document.shape[1]
        with torch.no_grad(), record_features(parent, drafter.config.feature_layers) as features:
            parent(document)
            anchor = parent.model.embed_tokens(batch.input_ids[row, anchors[row, slot]][None, None])
            cache, length = drafter.new_cache(count + BLOCK_SIZE), 0
            for part in features[0].split([count - 1, 1], dim=1):  # as two commits leave it
                stop = length + part.shape[1] + BLOCK_SIZE
                positions = torch.arange(length, stop)[None]
                hidden = drafter(part, anchor, BLOCK_SIZE - 1, positions, cache=cache)
                length += part.shape[1]
            expected = parent.logits(hidden[0, 0])
        torch.testing.assert_close(logits[row, slot], expected, atol=LOGIT_TOLERANCE, rtol=0)


def test_agreement_counts_up_to_the_first_wrong_token() -> None:
    blocks = DraftBlocks(
        anchors=torch.tensor([[4, 9, 2, -1]]),
        targets=torch.tensor([[[1, 2, 3], [1, 2, 3], [1, 2, 3], [0, 0, 0]]]),
        weights=torch.tensor([[[1.0, 1, 1], [1, 1, 1], [1, 1, 0], [0, 0, 0]]]),
    )
    drafts = torch.tensor([[[1, 2, 9], [9, 2, 3], [1, 2, 3], [0, 0, 0]]])
    logits = torch.nn.functional.one_hot(drafts, 10).float()
    assert float(mean_agreed(logits, blocks)) == pytest.approx((2 + 0 + 2) / 3)


class Counting:
    """Responses that count on from the prompt's last token."""

    def document(self, index: int) -> Document:
        first = 3 + index % 40
        return Document(prompt_ids=(50, first), response_ids=(*range(first + 1, first + 9), 2))


def training(out: Path, **changes: Any) -> DrafterTraining:
    return DrafterTraining(
        **{
            "steps": 60,
            "out": out,
            "num_rows": 4,
            "row_length": 48,
            "num_blocks": 12,
            "optimizer": OptimizerConfig(learning_rate=1e-2),
            "warmup_steps": 5,
            "save_every": 7,
            **changes,
        }
    )


def run(
    drafter: Drafter, parent: CloverForCausalLM, config: DrafterTraining, resume: bool = False
) -> tuple[SummaryEvent, list[TrainEvent]]:
    events: list[TrainEvent] = []
    summary = train_drafter(
        drafter, parent, config, Counting(), on_event=events.append, resume=resume
    )
    return summary, events


def test_a_drafter_learns_what_its_parents_documents_say(
    parent: CloverForCausalLM, tmp_path: Path
) -> None:
    before = {name: weight.clone() for name, weight in parent.named_parameters()}
    summary, _ = run(new_drafter(parent), parent, training(tmp_path))
    assert summary.is_finished
    steps = [row["losses"] for row in read_metrics(tmp_path) if row["event"] == "step"]
    assert steps[0]["agreed"] < 0.5
    assert steps[-1]["agreed"] > 2.0
    assert steps[-1]["total"] < 0.5 * steps[0]["total"]
    assert all(torch.equal(weight, before[name]) for name, weight in parent.named_parameters())
    assert json.loads((tmp_path / "run.json").read_text())["model"]["num_layers"] == 2


class Stops(Exception):  # noqa: N818
    """A run that dies."""


def test_a_run_that_dies_and_is_resumed_ends_bit_for_bit_like_an_unbroken_one(
    parent: CloverForCausalLM, tmp_path: Path
) -> None:
    unbroken = new_drafter(parent)
    run(unbroken, parent, training(tmp_path / "unbroken", steps=20, log_every=1))

    def die(event: TrainEvent) -> None:
        if getattr(event, "step", 0) == 10:
            raise Stops

    config = training(tmp_path / "broken", steps=20, log_every=1)
    with pytest.raises(Stops):
        train_drafter(new_drafter(parent), parent, config, Counting(), on_event=die)
    resumed = new_drafter(parent, seed=9)  # whatever it starts from
    run(resumed, parent, config, resume=True)
    for mine, theirs in zip(resumed.parameters(), unbroken.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    steps = [row["step"] for row in read_metrics(config.out) if row["event"] == "step"]
    assert steps == list(range(1, 21))
    with pytest.raises(TrainingInputError, match="num_blocks was 12, is 6"):
        run(resumed, parent, replace(config, num_blocks=6), resume=True)


WORKER = """
import json, sys
from pathlib import Path
from conftest import make_tiny_config
from test_dflash import make_parent, new_drafter, run, training
from clover.train import parallel

with parallel.process_group():
    assert parallel.world_size() == 2
    parent = make_parent(make_tiny_config(diffusion=False, eos_token_ids=()))
    run(new_drafter(parent), parent, training(Path(sys.argv[1]), steps=4, log_every=1))
"""


def test_two_processes_take_the_steps_of_one(parent: CloverForCausalLM, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    tests = Path(__file__).parents[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (tests.parent, tests, tests / "unit"))),
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_RUN_ID": "test",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path / "two")],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=500) for process in processes] == [0, 0]
    run(new_drafter(parent), parent, training(tmp_path / "one", steps=4, log_every=1))
    two, one = (
        [row for row in read_metrics(tmp_path / name) if row["event"] == "step"]
        for name in ("two", "one")
    )
    assert len(two) == len(one) == 4
    for mine, expected in zip(two, one, strict=True):
        assert mine["losses"] == pytest.approx(expected["losses"], rel=LOSS_TOLERANCE)
        assert mine["grad_norm"] == pytest.approx(expected["grad_norm"], rel=LOSS_TOLERANCE)


def test_a_drafter_comes_back_from_its_folder_and_knows_its_parent(
    parent: CloverForCausalLM, tiny_config: Callable[..., ModelConfig], tmp_path: Path
) -> None:
    drafter, folder = new_drafter(parent), tmp_path / "drafter"
    save_drafter(drafter, folder)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    loaded = load_drafter(folder)
    assert loaded.config == drafter.config
    for mine, saved in zip(loaded.parameters(), drafter.parameters(), strict=True):
        assert torch.equal(mine, saved.bfloat16().float())
    DrafterDecoder(parent, loaded)
    other = CloverForCausalLM(tiny_config(diffusion=False))
    other.model.norm.weight.data.fill_(0.5)
    with pytest.raises(ConfigError, match="train a drafter for this one"):
        DrafterDecoder(other, loaded)


def test_a_folder_that_is_no_drafters_is_refused(parent: CloverForCausalLM, tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    save_drafter(new_drafter(parent), folder)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    for changes, error, named in (
        ({"model_type": "qwen3"}, ConfigError, "is this a drafter's folder"),
        ({"num_layers": 0}, ConfigError, "num_layers is 0"),
        ({"num_layers": 3}, CheckpointError, "layers.2"),
        ({"surprise": 1}, ConfigError, "surprise"),
        ({"feature_layers": []}, ConfigError, "feature_layers are"),
    ):
        path.write_text(json.dumps(values | changes))
        with pytest.raises(error, match=named):
            load_drafter(folder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"num_blocks": 49}, "num_blocks is 49; allowed: up to row_length, 48"),
        ({"position_decay": 0.0}, "position_decay is 0.0"),
        ({"decay_fraction": 1.5}, "decay_fraction is 1.5"),
    ],
)
def test_training_out_of_range_is_refused(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=named):
        training(tmp_path, **changes)
