"""The model's own canvases and replies against the decoder's, and what the parent teaches on them."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clover.config import DiffusionConfig, ModelConfig
from clover.diffusion.generate import (
    BlockCommitted,
    CanvasUpdated,
    Finished,
    GenerationRequest,
    generate,
    generate_all,
)
from clover.diffusion.objective import ObjectiveConfig
from clover.diffusion.policies import Threshold
from clover.errors import ConfigError, TrainingError
from clover.model.transformer import CloverForCausalLM
from clover.train.data import Document
from clover.train.events import StepEvent, SummaryEvent, TrainEvent
from clover.train.on_policy import (
    OnPolicyConfig,
    choose_canvas_source,
    draw_num_previews,
    write_replies,
)
from clover.train.optimizer import OptimizerConfig
from clover.train.packing import Batch, cut_blocks, pack_rows
from clover.train.state import load_state
from clover.train.trainer import TrainConfig, batch_losses, own_canvases, row_generators, train

ConfigFactory = Callable[..., ModelConfig]

MASK = 63
EOS = 45  # which the untrained model of these tests writes soon
THRESHOLD = 0.02  # an untrained model is hardly surer of a token than 1/64
TOLERANCE = 1e-4  # fp32: packed rows against single documents and the decoder's cache


class _Echo:
    """Replies that repeat their prompt, then end."""

    def document(self, index: int) -> Document:
        word = tuple(3 + (index * 7 + place * index) % 20 for place in range(4 + index % 3))
        return Document(prompt_ids=(2, *word, 2), response_ids=(*word, 3, *word, EOS))


def _model(config: ModelConfig, seed: int = 0) -> CloverForCausalLM:
    model = CloverForCausalLM(config)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def _shape(tiny_config: ConfigFactory, *, shift_logits: bool = True) -> ModelConfig:
    diffusion = DiffusionConfig(block_size=4, mask_token_id=MASK, shift_logits=shift_logits)
    return dataclasses.replace(tiny_config(eos_token_ids=(EOS,)), diffusion=diffusion)


def _parent(tiny_config: ConfigFactory, seed: int = 1) -> CloverForCausalLM:
    return _model(tiny_config(diffusion=False, eos_token_ids=(EOS,)), seed)


def _batch() -> Batch:
    documents = [_Echo().document(index) for index in range(5)]
    return pack_rows([documents[:3], documents[3:]], row_length=64, pad_token_id=0)


def _config(on_policy: OnPolicyConfig | None = None, **changes: Any) -> TrainConfig:
    fields: dict[str, Any] = {
        "objective": "two_stream",
        "steps": 6,
        "num_rows": 2,
        "row_length": 48,
        "optimizer": OptimizerConfig(learning_rate=1e-2),
        "losses": ObjectiveConfig(
            distillation_weight=1.0, clean_distillation_weight=0.5, teacher="parent"
        ),
        "warmup_steps": 2,
        "precision": "fp32",
        "block_sizes": (4,),
        "num_token_ids": 60,
        "on_policy": on_policy or OnPolicyConfig(),
        "log_every": 1,
        "save_every": 2,
    }
    return TrainConfig(**(fields | changes))


def _previewed_blocks(
    model: CloverForCausalLM, prompt: Sequence[int], max_tokens: int
) -> list[list[tuple[int, ...]]]:
    """For each block that the decoder writes, every canvas that it previews, the first all masks."""
    request = GenerationRequest(
        prompt_ids=prompt, max_tokens=max_tokens, policy=Threshold(threshold=THRESHOLD)
    )
    blocks: list[list[tuple[int, ...]]] = [[(MASK,) * 4]]
    for event in generate(model, [request], forbidden_token_ids=range(60, 63), block_size=4):
        match event:
            case CanvasUpdated(canvas=canvas):
                blocks[-1].append(canvas)
            case BlockCommitted():
                blocks[-1].pop()  # complete
                blocks.append([(MASK,) * 4])
            case Finished(result=result):
                if blocks[-1] == [(MASK,) * 4] and len(result.token_ids) > 0:
                    blocks.pop()  # none was begun
                elif len(blocks[-1]) > 1:  # one that holds the end alone has no commit
                    blocks[-1].pop()
                break
    return blocks


@pytest.mark.parametrize("shift_logits", [True, False])
def test_canvases_on_reference_text_are_those_that_the_decoder_previews(
    tiny_config: ConfigFactory, *, shift_logits: bool
) -> None:
    model = _model(_shape(tiny_config, shift_logits=shift_logits))
    config = _config(
        OnPolicyConfig(canvas_probability=1.0, threshold=THRESHOLD, max_previews=4),
        losses=ObjectiveConfig(shift_logits=shift_logits),
    )
    batch = _batch()
    blocks = cut_blocks(batch, 4)
    noised = own_canvases(model, batch, blocks, config, 3)
    counts = draw_num_previews(blocks.starts, 4, row_generators(config, 3, 2))
    lengths = set()
    for row, slot in (blocks.starts >= 0).nonzero().tolist():
        start = int(blocks.starts[row, slot])
        span = next(s for s in batch.spans if s.row == row and s.start < start < s.end)
        history = batch.input_ids[row, span.start : start].tolist()
        previewed = _previewed_blocks(model, history, max_tokens=4)[0]
        lengths.add(len(previewed))
        expected = torch.tensor(previewed[min(int(counts[row, slot]), len(previewed) - 1)])
        assert torch.equal(noised.canvas[row, slot], expected)
        is_token, targets = blocks.is_token[row, slot], blocks.targets[row, slot]
        assert torch.equal(noised.masked[row, slot], expected == MASK)
        is_wrong = (expected != MASK) & (expected != targets)
        assert torch.equal(noised.edited[row, slot], is_wrong & is_token)
        assert float(noised.level[row, slot]) == float((expected == MASK).float().mean())
    assert set(counts.flatten().tolist()) == {0, 1, 2, 3}
    assert len(lengths) > 1 and noised.edited.any()


def test_written_replies_are_the_decoders_and_canvases_those_that_it_previewed(
    tiny_config: ConfigFactory,
) -> None:
    model = _model(_shape(tiny_config))
    config = OnPolicyConfig(reply_probability=1.0, threshold=THRESHOLD, states_per_block=2)
    batch = _batch()
    generators = [torch.Generator().manual_seed(row) for row in range(2)]
    written = write_replies(
        model,
        batch,
        config,
        block_size=4,
        reserved_token_ids=range(60, 64),
        generators=generators,
    )
    seen_ends, slots = set(), [0, 0]
    for old, new in zip(batch.spans, written.batch.spans, strict=True):
        prompt = batch.input_ids[old.row, old.start : old.response_start].tolist()
        limit = old.end - old.response_start
        request = GenerationRequest(
            prompt_ids=prompt, max_tokens=limit, policy=Threshold(threshold=THRESHOLD)
        )
        result = generate_all(model, [request], forbidden_token_ids=range(60, 63), block_size=4)[0]
        seen_ends.add(result.finish_reason)
        reply = [*result.token_ids, *[EOS] * (result.finish_reason == "eos")]
        assert written.batch.input_ids[new.row, new.start : new.end].tolist() == [*prompt, *reply]
        for number, previewed in enumerate(_previewed_blocks(model, prompt, limit)):
            start, found = new.response_start + 4 * number, []
            for _ in range(min(2, len(previewed))):
                slot = slots[new.row]
                slots[new.row] += 1
                canvas = written.canvas[new.row, slot]
                assert int(written.block_starts[new.row, slot]) == start
                is_reply = torch.arange(start, start + 4) < new.end
                assert torch.equal(written.masked[new.row, slot], (canvas == MASK) & is_reply)
                assert written.masked[new.row, slot].any()
                found.append(previewed.index(tuple(canvas.tolist())))
            assert found == sorted(set(found))
    assert slots == (written.block_starts >= 0).sum(dim=1).tolist()
    assert not written.masked[written.block_starts < 0].any()
    assert seen_ends == {"eos", "length"}


def _divergence(teacher: Tensor, student: Tensor) -> float:
    p, q = teacher.double().softmax(-1), student.double().softmax(-1)
    return float((p * (p / q).log()).sum())


@pytest.mark.parametrize("shift_logits", [True, False])
def test_own_replies_are_compared_with_the_parent_position_by_position(
    tiny_config: ConfigFactory, *, shift_logits: bool
) -> None:
    model, parent = _model(_shape(tiny_config, shift_logits=shift_logits)), _parent(tiny_config)
    on_policy = OnPolicyConfig(reply_probability=1.0, threshold=THRESHOLD)
    losses = dataclasses.replace(_config().losses, shift_logits=shift_logits)
    config, batch = _config(on_policy, losses=losses), _batch()
    found = batch_losses(model, batch, config, 5, parent)
    written = write_replies(
        model,
        batch,
        on_policy,
        block_size=4,
        reserved_token_ids=range(60, 64),
        generators=row_generators(config, 5, 2),
    )
    on_canvas, on_clean = [], []
    with torch.no_grad():
        for span in written.batch.spans:
            ids = written.batch.input_ids[span.row : span.row + 1, span.start : span.end]
            # Each position for itself: the parent reads what is left of it and nothing else
            taught = [parent(ids[:, :end])[0, -1] for end in range(1, ids.shape[1])]
            own = model(ids)[0]
            on_clean += [
                _divergence(taught[at - 1], own[at - 1])
                for at in range(span.response_start - span.start, ids.shape[1])
            ]
            for slot, start in enumerate(written.block_starts[span.row].tolist()):
                if not span.response_start <= start < span.end:
                    continue
                cache = model.new_cache(1)
                first = model.prefill(cache, ids[:, : start - span.start])
                logits = model.preview(cache, written.canvas[span.row, slot].unsqueeze(0))[0]
                rows = torch.cat([first, logits[:-1]]) if shift_logits else logits
                on_canvas += [
                    _divergence(taught[start - span.start + place - 1], rows[place])
                    for place in written.masked[span.row, slot].nonzero()[:, 0].tolist()
                ]
    assert found.on_policy is not None and found.clean_distillation is not None
    assert found.ar is None and found.diffusion is None
    expected, expected_clean = (sum(x) / len(x) for x in (on_canvas, on_clean))
    assert float(found.on_policy.detach()) == pytest.approx(expected, rel=TOLERANCE)
    assert float(found.clean_distillation.detach()) == pytest.approx(expected_clean, rel=TOLERANCE)
    total = expected + 0.5 * expected_clean
    assert float(found.total.detach()) == pytest.approx(total, rel=TOLERANCE)


@pytest.mark.parametrize("source", ["noise", "previews", "replies"])
def test_the_parent_teaches_and_stays_as_it_is(tiny_config: ConfigFactory, source: str) -> None:
    model, parent = _model(_shape(tiny_config)), _parent(tiny_config)
    on_policy = OnPolicyConfig(
        reply_probability=float(source == "replies"),
        canvas_probability=float(source == "previews"),
        threshold=THRESHOLD,
    )
    config, batch = _config(on_policy), _batch()
    losses = batch_losses(model, batch, config, 1, parent)
    losses.total.backward()
    assert {name for name, p in parent.named_parameters() if p.grad is not None} == set()
    assert model.lm_head.weight.grad is not None and model.lm_head.weight.grad.any()
    # Another parent, another lesson
    other = batch_losses(model, batch, config, 1, _parent(tiny_config, seed=2))
    assert float(other.total.detach()) != float(losses.total.detach())
    part = losses.on_policy if source == "replies" else losses.distillation
    assert part is not None and losses.clean_distillation is not None
    gradient = torch.autograd.grad(
        batch_losses(model, batch, config, 1, parent).total, model.model.embed_tokens.weight
    )
    assert gradient[0].any()


def test_a_clean_stream_that_is_the_parents_own_has_nothing_to_learn(
    tiny_config: ConfigFactory,
) -> None:
    model, parent = _converted(tiny_config)
    found = batch_losses(model, _batch(), _config(), 0, parent)
    assert found.clean_distillation is not None and found.distillation is not None
    assert abs(float(found.clean_distillation.detach())) < TOLERANCE
    assert float(found.distillation.detach()) > 10 * TOLERANCE


def _converted(tiny_config: ConfigFactory) -> tuple[CloverForCausalLM, CloverForCausalLM]:
    """A Clover model with the weights of a parent, and that parent."""
    parent, model = _parent(tiny_config), _model(_shape(tiny_config), seed=2)
    model.load_state_dict(parent.state_dict(), strict=False)
    return model, parent


def _train(
    model: CloverForCausalLM,
    config: TrainConfig,
    parent: CloverForCausalLM | None,
    on_event: Callable[[TrainEvent], None] | None = None,
    *,
    resume: bool = False,
) -> list[TrainEvent]:
    events: list[TrainEvent] = []
    train(model, config, _Echo(), on_event=on_event or events.append, resume=resume, parent=parent)
    return events


# With seed 2 the steps are: previews, previews, replies | replies, noise, previews
MIXED = OnPolicyConfig(reply_probability=0.4, canvas_probability=0.3, threshold=THRESHOLD)


def test_a_run_on_its_own_text_that_is_resumed_ends_bit_for_bit_like_an_unbroken_one(
    tiny_config: ConfigFactory, tmp_path: Path
) -> None:
    config, parent = _config(MIXED, seed=2), _parent(tiny_config)
    whole = _model(_shape(tiny_config))
    events = _train(whole, config, parent)
    is_own = ["on_policy" in event.losses for event in events if isinstance(event, StepEvent)]
    assert is_own == [False, False, True, True, False, False]

    def stop(event: TrainEvent) -> None:
        if isinstance(event, StepEvent) and event.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    config = dataclasses.replace(config, out=tmp_path)
    _train(_model(_shape(tiny_config)), config, parent, stop)
    assert load_state(tmp_path).progress["step"] == 3
    resumed = _model(_shape(tiny_config), seed=5)
    summary = _train(resumed, config, parent, resume=True)[-1]
    assert isinstance(summary, SummaryEvent) and summary.is_finished
    for name, expected in whole.named_parameters():
        assert torch.equal(resumed.get_parameter(name), expected), name


def test_a_report_is_the_mean_over_the_steps_that_have_a_loss(
    tiny_config: ConfigFactory,
) -> None:
    config, parent = _config(MIXED, seed=2), _parent(tiny_config)
    each = [e.losses for e in _train(_model(_shape(tiny_config)), config, parent)[:-1]]
    once = dataclasses.replace(config, log_every=6)
    event = _train(_model(_shape(tiny_config)), once, parent)[0]
    assert isinstance(event, StepEvent)
    for name in ("total", "on_policy", "diffusion", "ar"):
        values = [losses[name] for losses in each if name in losses]
        assert len(values) < 6 or name == "total"
        assert event.losses[name] == pytest.approx(sum(values) / len(values))


def test_distillation_on_own_replies_brings_the_canvas_nearer_to_the_parent(
    tiny_config: ConfigFactory,
) -> None:
    parent = _parent(tiny_config)
    schooling = _config(
        objective="ar", steps=40, num_rows=4, losses=ObjectiveConfig(), num_token_ids=None
    )
    _train(parent, schooling, None)
    model = _model(_shape(tiny_config))
    model.load_state_dict(parent.state_dict(), strict=False)
    config = _config(
        OnPolicyConfig(reply_probability=1.0, threshold=0.7, states_per_block=2),
        steps=30,
        num_rows=4,
    )
    documents = [_Echo().document(1000 + index) for index in range(8)]
    unseen = pack_rows([documents[:4], documents[4:]], row_length=96, pad_token_id=0)
    measure = _config(losses=dataclasses.replace(config.losses, ar_weight=0.0))

    def divergence() -> float:
        with torch.no_grad():
            found = batch_losses(model, unseen, measure, 0, parent).distillation
        assert found is not None
        return float(found)

    before = divergence()
    _train(model, config, parent)
    # No label was seen; a third is far more than these steps vary with the seed
    assert divergence() < 0.67 * before


def test_steps_are_shared_out_as_the_probabilities_say() -> None:
    config = OnPolicyConfig(reply_probability=0.25, canvas_probability=0.5)
    generator = torch.Generator().manual_seed(0)
    sources = [choose_canvas_source(config, generator) for _ in range(2_000)]
    # Six standard deviations of a share of 2,000 draws
    for source, share in (("replies", 0.25), ("previews", 0.5), ("noise", 0.25)):
        assert abs(sources.count(source) / 2_000 - share) < 6 * 0.5 / 2_000**0.5
    off = OnPolicyConfig()
    assert not off.is_on
    assert {choose_canvas_source(off, generator) for _ in range(100)} == {"noise"}


def test_how_often_a_block_is_previewed_does_not_depend_on_other_rows() -> None:
    starts = torch.tensor([[3, 7, -1, -1], [2, -1, 6, 10]])

    def generators(rows: Sequence[int]) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(row) for row in rows]

    both = draw_num_previews(starts, 50, generators([0, 1]))
    alone = draw_num_previews(starts[1:, [0, 2, 3]], 50, generators([1]))
    assert torch.equal(both[1:, [0, 2, 3]], alone)
    assert not both[starts < 0].any() and len(set(both[starts >= 0].tolist())) > 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reply_probability": 1.5}, r"on_policy\.reply_probability must be in \[0, 1\]"),
        ({"threshold": -0.1}, r"on_policy\.threshold must be in \[0, 1\], found -0\.1"),
        ({"states_per_block": 0}, r"on_policy\.states_per_block must be at least 1, found 0"),
        ({"max_previews": 0}, r"on_policy\.max_previews must be at least 1, found 0"),
        (
            {"reply_probability": 0.6, "canvas_probability": 0.5},
            "must not exceed 1 together, found 0.6 and 0.5",
        ),
    ],
)
def test_knobs_outside_their_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OnPolicyConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "ar"}, "need the objective 'two_stream', found 'ar'"),
        ({"num_token_ids": None}, "num_token_ids must be set to the tokenizer's length"),
        ({"parallelism": "fsdp"}, "on_policy must be off with parallelism 'fsdp'"),
        ({"losses": ObjectiveConfig()}, "distillation_weight must be above 0"),
        ({"compile_layers": True}, "compile_layers must be off"),
    ],
)
def test_what_does_not_go_with_own_replies_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _config(OnPolicyConfig(reply_probability=0.5), **changes)


def test_a_teacher_that_cannot_teach_is_refused_before_training(
    tiny_config: ConfigFactory,
) -> None:
    model, parent = _model(_shape(tiny_config)), _parent(tiny_config)
    with pytest.raises(TrainingError, match="needs a parent, found none"):
        _train(model, _config(), None)
    with pytest.raises(TrainingError, match="makes no use of a parent, found one"):
        _train(model, _config(losses=ObjectiveConfig(distillation_weight=1.0)), parent)
    with pytest.raises(TrainingError, match="found a Clover model"):
        _train(model, _config(), _model(_shape(tiny_config)))
    wider = _model(tiny_config(diffusion=False, vocab_size=65))
    with pytest.raises(TrainingError, match="the parent's vocab_size is 65, the model's 64"):
        _train(model, _config(), wider)
    shorter = _model(tiny_config(diffusion=False, max_position_embeddings=40))
    with pytest.raises(TrainingError, match="row_length 48 is above the parent's 40"):
        _train(model, _config(), shorter)
    with pytest.raises(ConfigError, match="must be 0 unless teacher is 'parent'"):
        ObjectiveConfig(clean_distillation_weight=0.5)
