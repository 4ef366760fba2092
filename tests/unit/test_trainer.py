"""The loop: schedules, optimizers, resuming bit for bit, stopping, and what evaluation claims."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clover.config import DiffusionConfig, ModelConfig
from clover.diffusion.noise import EditConfig
from clover.diffusion.objective import ObjectiveConfig
from clover.errors import ConfigError, TrainingError
from clover.model.transformer import CloverForCausalLM
from clover.train.data import Document
from clover.train.evaluation import evaluate
from clover.train.events import EvalEvent, SaveEvent, StepEvent, SummaryEvent, TrainEvent
from clover.train.optimizer import (
    Muon,
    OptimizerConfig,
    Optimizers,
    WeightAverage,
    classify,
    newton_schulz,
)
from clover.train.packing import cut_blocks, pack_rows
from clover.train.precision import choose_precision, training_precision
from clover.train.state import STATE_FILE, SavedState, load_state, save_state
from clover.train.trainer import (
    TrainConfig,
    annealed_coreset_size,
    batch_losses,
    draw_canvases,
    draw_skips,
    learning_rate_factor,
    stop_on_signal,
    train,
)

ConfigFactory = Callable[..., ModelConfig]

# Newton-Schulz leaves singular values in about [0.7, 1.2]; bf16 widens that a little
SINGULAR_VALUES = (0.6, 1.3)
STEP_TOLERANCE = 1e-5  # fp32 against the same formula in another order
COMPILED_TOLERANCE = 1e-4  # fused kernels round elsewhere, and three steps add that up


class _Echo:
    """Replies that repeat their prompt, then end: quick to learn a little of."""

    def document(self, index: int) -> Document:
        word = tuple(3 + (index * 7 + place * index) % 20 for place in range(3 + index % 3))
        return Document(prompt_ids=(2, *word, 2), response_ids=(*word, 1), family="echo")


def _model(config: ModelConfig, seed: int = 0) -> CloverForCausalLM:
    model = CloverForCausalLM(config)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def _config(objective: str = "ar", **changes: Any) -> TrainConfig:
    fields: dict[str, Any] = {
        "objective": objective,
        "steps": 6,
        "num_rows": 2,
        "row_length": 32,
        "optimizer": OptimizerConfig(learning_rate=1e-2),
        "warmup_steps": 2,
        "precision": "fp32",
        "block_sizes": (2, 4),
        "block_skip_probability": 0.5,
        "log_every": 1,
        "eval_every": 3,
        "save_every": 2,
    }
    return TrainConfig(**(fields | changes))


def _run(
    model: CloverForCausalLM, config: TrainConfig, *, resume: bool = False, **options: Any
) -> list[TrainEvent]:
    events: list[TrainEvent] = []
    on_event = options.pop("on_event", events.append)
    train(model, config, _Echo(), on_event=on_event, resume=resume, **options)
    return events


def _weights(model: CloverForCausalLM) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def _stop_after(step: int) -> Callable[[TrainEvent], None]:
    def on_event(event: TrainEvent) -> None:
        if isinstance(event, StepEvent) and event.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return on_event


# What is off by default and has a state or draws numbers
EVERYTHING: dict[str, Any] = {
    "losses": ObjectiveConfig(balance_weight=0.1, kept_weight=0.1),
    "complementary_masks": True,
    "all_masks_probability": 0.3,
    "edits": EditConfig(probability=0.3, model_share=0.5),
    "num_token_ids": 25,
    "ema_decay": 0.5,
}


@pytest.mark.parametrize("objective", ["ar", "two_stream"])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_run_that_is_stopped_and_resumed_ends_bit_for_bit_like_an_unbroken_one(
    tiny_config: ConfigFactory, tmp_path: Path, objective: str, optimizer: Any
) -> None:
    shape = tiny_config(diffusion=objective == "two_stream")
    options = EVERYTHING if (objective, optimizer) == ("two_stream", "adamw") else {}
    config = _config(
        objective, optimizer=OptimizerConfig(name=optimizer, learning_rate=1e-2), **options
    )
    whole = _model(shape)
    _run(whole, config)

    config = dataclasses.replace(config, out=tmp_path)
    first = _model(shape)
    _run(first, config, on_event=_stop_after(3))
    assert load_state(tmp_path).progress["step"] == 3
    second = _model(shape, seed=1)
    summary = _run(second, config, resume=True)[-1]
    assert isinstance(summary, SummaryEvent) and summary.is_finished
    for name, expected in _weights(whole).items():
        assert torch.equal(second.get_parameter(name), expected), name


@pytest.mark.parametrize("objective", ["ar", "two_stream"])
def test_training_lowers_the_loss(tiny_config: ConfigFactory, objective: str) -> None:
    model = _model(tiny_config(diffusion=objective == "two_stream"))
    events = _run(model, _config(objective, steps=24, num_rows=4))
    losses = [event.losses["total"] for event in events if isinstance(event, StepEvent)]
    assert len(losses) == 24
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_every_parameter_of_a_clover_model_is_trained(tiny_config: ConfigFactory) -> None:
    model = _model(tiny_config())
    before = _weights(model)
    # The first step moves what has a gradient at all; conv_right_weight starts at 0 and has one
    _run(model, _config("two_stream", steps=3, num_rows=4))
    still = [n for n, tensor in before.items() if torch.equal(model.get_parameter(n), tensor)]
    assert still == []


def test_the_average_weighs_the_latest_steps_most_and_forgets_the_start() -> None:
    layer = torch.nn.Linear(1, 1, bias=False)
    values = [5.0, 1.0, 2.0, -3.0, 4.0]
    with torch.no_grad():
        layer.weight.fill_(values[0])
    average, expected = WeightAverage(layer, 0.3), values[0]
    for step, value in enumerate(values[1:], start=1):
        with torch.no_grad():
            layer.weight.fill_(value)
        average.update(step)
        decay = min(0.3, (1 + step) / (10 + step))
        expected = decay * expected + (1.0 - decay) * value
    assert float(average.tensors["weight"]) == pytest.approx(expected)
    with average.in_place():
        assert float(layer.weight.detach()) == pytest.approx(expected)
    assert float(layer.weight.detach()) == values[-1]


def test_the_average_is_what_is_evaluated_and_what_a_run_leaves(
    tiny_config: ConfigFactory, tmp_path: Path
) -> None:
    shape = tiny_config(diffusion=False)
    documents = [_Echo().document(index) for index in range(5)]
    options: dict[str, Any] = {"validation": {"seen": documents}}
    plain, averaged = _model(shape), _model(shape)
    _run(plain, _config(out=tmp_path / "plain"))
    events = _run(averaged, _config(out=tmp_path / "averaged", ema_decay=0.5), **options)
    state = load_state(tmp_path / "averaged")
    for name, weight in _weights(averaged).items():
        assert torch.equal(weight, state.average[name])
        # Averaging watches the run and does not disturb it
        assert torch.equal(state.model[name], plain.get_parameter(name))
    assert not torch.equal(averaged.lm_head.weight, plain.lm_head.weight)
    last = [event.result for event in events if isinstance(event, EvalEvent)][-1]
    result = evaluate(averaged, documents, num_rows=2, row_length=32, block_size=None)
    assert last.loss == result.loss


def test_events_tell_the_run_in_order(tiny_config: ConfigFactory, tmp_path: Path) -> None:
    model = _model(tiny_config(diffusion=False))
    documents = [_Echo().document(index) for index in range(5)]
    config = _config(out=tmp_path, steps=4, log_every=2, eval_every=3, save_every=2)
    events = _run(model, config, validation={"seen": documents})
    kinds = [(type(event).__name__, event.step) for event in events]
    assert kinds == [
        ("StepEvent", 2),
        ("SaveEvent", 2),
        ("EvalEvent", 3),
        ("StepEvent", 4),
        ("EvalEvent", 4),
        ("SaveEvent", 4),
        ("SummaryEvent", 4),
    ]
    summary = events[-1]
    assert isinstance(summary, SummaryEvent)
    assert summary.tokens > 4 * 0.8 * 64 and summary.peak_memory_bytes > 2**20
    assert abs(summary.tokens_per_second * summary.seconds - summary.tokens) < 1e-6 * summary.tokens


def test_a_signal_stops_the_run_after_its_step_with_the_state_saved(
    tiny_config: ConfigFactory, tmp_path: Path
) -> None:
    events: list[TrainEvent] = []

    def on_event(event: TrainEvent) -> None:
        events.append(event)
        _stop_after(2)(event)

    config = _config(out=tmp_path, steps=50, save_every=50)
    before = signal.getsignal(signal.SIGTERM)
    _run(_model(tiny_config(diffusion=False)), config, on_event=on_event)
    assert isinstance(events[-2], SaveEvent) and events[-2].step == 2
    summary = events[-1]
    assert isinstance(summary, SummaryEvent) and not summary.is_finished and summary.step == 2
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_signal_is_not_caught() -> None:
    with stop_on_signal() as is_stopped:
        assert not is_stopped()
        signal.raise_signal(signal.SIGINT)
        assert is_stopped()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_loss_that_is_not_finite_stops_training(tiny_config: ConfigFactory) -> None:
    model = _model(tiny_config(diffusion=False))
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(TrainingError, match="the loss of step 0 is nan"):
        _run(model, _config())


def test_a_parent_cannot_be_trained_on_two_streams(tiny_config: ConfigFactory) -> None:
    with pytest.raises(TrainingError, match="needs a Clover model"):
        _run(_model(tiny_config(diffusion=False)), _config("two_stream"))


def test_shift_must_be_what_the_model_says(tiny_config: ConfigFactory) -> None:
    config = _config("two_stream", losses=ObjectiveConfig(shift_logits=False))
    with pytest.raises(TrainingError, match=r"losses\.shift_logits is False"):
        _run(_model(tiny_config()), config)


def test_rows_longer_than_the_context_are_refused(tiny_config: ConfigFactory) -> None:
    with pytest.raises(TrainingError, match="row_length 513 is above the model's 512"):
        _run(_model(tiny_config()), _config(row_length=513))


def test_resuming_another_run_names_what_changed(
    tiny_config: ConfigFactory, tmp_path: Path
) -> None:
    shape = tiny_config(diffusion=False)
    _run(_model(shape), _config(out=tmp_path))
    with pytest.raises(TrainingError, match="seed was 0, is 5"):
        _run(_model(shape), _config(out=tmp_path, seed=5), resume=True)
    wider = tiny_config(diffusion=False, vocab_size=65)
    with pytest.raises(TrainingError, match="of another model: it differs in"):
        _run(_model(wider), _config(out=tmp_path), resume=True)
    with pytest.raises(TrainingError, match="nothing to resume"):
        _run(_model(shape), _config(out=tmp_path / "absent"), resume=True)


def test_how_often_a_run_reports_may_change_when_it_is_resumed(
    tiny_config: ConfigFactory, tmp_path: Path
) -> None:
    shape = tiny_config(diffusion=False)
    _run(_model(shape), _config(out=tmp_path), on_event=_stop_after(2))
    events = _run(_model(shape), _config(out=tmp_path, log_every=4, save_every=5), resume=True)
    assert [event.step for event in events if isinstance(event, StepEvent)] == [4, 6]


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    state = SavedState(model={"w": torch.ones(100)}, optimizer={}, progress={"step": 1})
    path = save_state(tmp_path, state)
    assert list(tmp_path.iterdir()) == [path] and path.name == STATE_FILE
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(TrainingError, match="is damaged"):
        load_state(tmp_path)


def test_a_state_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    good = SavedState(model={"w": torch.ones(4)}, optimizer={"w:m": torch.zeros(4)}, progress={})
    save_state(tmp_path, good)
    shared = torch.ones(4)
    bad = SavedState(model={"a": shared, "b": shared}, optimizer={}, progress={})
    with pytest.raises(RuntimeError, match="share memory"):
        save_state(tmp_path, bad)
    assert [path.name for path in tmp_path.iterdir()] == [STATE_FILE]
    loaded = load_state(tmp_path)
    assert torch.equal(loaded.model["w"], torch.ones(4)) and set(loaded.optimizer) == {"w:m"}


def test_learning_rate_warms_up_stays_and_decays() -> None:
    config = _config(steps=100, warmup_steps=10, schedule="wsd", decay_fraction=0.4)
    factors = [learning_rate_factor(step, config) for step in range(101)]
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factors[10:61] == [1.0] * 51
    assert factors[80] == pytest.approx(0.5)
    assert factors[100] == 0.0
    assert factors[60:] == sorted(factors[60:], reverse=True)


def test_cosine_schedule_ends_at_zero() -> None:
    config = _config(steps=110, warmup_steps=10, schedule="cosine")
    factors = [learning_rate_factor(step, config) for step in (10, 60, 110)]
    assert factors == pytest.approx([1.0, 0.5, 0.0], abs=1e-6)


@pytest.mark.parametrize("has_bf16", [False, True])
@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (3, 24, 12)])
def test_newton_schulz_makes_matrices_nearly_orthogonal(
    shape: tuple[int, ...],
    has_bf16: bool,
    seeded: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bf16)
    matrices = torch.randn(shape, generator=seeded)
    result = newton_schulz(matrices)
    values = torch.linalg.svdvals(result)
    assert result.shape == matrices.shape and result.dtype == matrices.dtype
    assert float(values.min()) > SINGULAR_VALUES[0]
    assert float(values.max()) < SINGULAR_VALUES[1]
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    cosine = (result * (left @ right)).sum((-2, -1)) / (result.norm(dim=(-2, -1)))
    assert bool((cosine / min(shape[-2:]) ** 0.5 > 0.95).all())


def test_muon_updates_experts_one_by_one(seeded: torch.Generator) -> None:
    stack = torch.nn.Parameter(torch.randn(3, 8, 12, generator=seeded))
    singles = [torch.nn.Parameter(matrix.detach().clone()) for matrix in stack]
    stack.grad = torch.randn(3, 8, 12, generator=seeded)
    for single, gradient in zip(singles, stack.grad, strict=True):
        single.grad = gradient.clone()
    for parameters in ([stack], singles):
        Muon(parameters, lr=0.1, momentum=0.9, weight_decay=0.1).step()
    assert (
        stack.detach() - torch.stack([p.detach() for p in singles])
    ).abs().max() < STEP_TOLERANCE


def test_muon_decays_weights_and_moves_by_the_rms_of_adamw(seeded: torch.Generator) -> None:
    weight = torch.nn.Parameter(torch.randn(32, 64, generator=seeded))
    before = weight.detach().clone()
    weight.grad = torch.randn(32, 64, generator=seeded)
    Muon([weight], lr=0.1, momentum=0.9, weight_decay=0.5).step()
    update = (weight.detach() - before * (1 - 0.1 * 0.5)) / 0.1
    assert 0.15 < float(update.square().mean().sqrt()) < 0.25  # 0.2 by design


def test_parameters_are_treated_by_what_they_are(tiny_config: ConfigFactory) -> None:
    kinds: dict[str, set[str]] = {"diffusion": set(), "matrix": set(), "other": set()}
    for name, parameter in _model(tiny_config()).named_parameters():
        kinds[classify(name, parameter)].add(name.split("layers.")[-1].lstrip("0123456789."))
    assert kinds["diffusion"] == {
        "linear_attn.conv_right_weight",
        "linear_attn.bd_softmax_logit_scale",
        "linear_attn.bd_softmax_history_bias",
        "linear_attn.bd_softmax_history_c",
    }
    assert kinds["matrix"] == {
        "linear_attn.in_proj_qkv.weight",
        "linear_attn.in_proj_z.weight",
        "linear_attn.out_proj.weight",
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        "self_attn.o_proj.weight",
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
        "mlp.shared_expert.gate_proj.weight",
        "mlp.shared_expert.up_proj.weight",
        "mlp.shared_expert.down_proj.weight",
    }


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_only_matrices_decay_and_added_tensors_have_their_own_rate(
    tiny_config: ConfigFactory, name: Any
) -> None:
    model = _model(tiny_config())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.zeros_like(parameter)
    before = _weights(model)
    config = OptimizerConfig(name=name, learning_rate=0.1, weight_decay=0.5)
    Optimizers(model, config).step(1.0)
    for key, parameter in model.named_parameters():
        expected = 0.95 if classify(key, parameter) == "matrix" else 1.0
        assert torch.allclose(parameter.detach(), before[key] * expected), key

    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    config = OptimizerConfig(name="adamw", learning_rate=0.01, diffusion_lr_multiplier=3.0)
    before = _weights(model)
    Optimizers(model, config).step(0.5)
    moved = {n: float((before[n] - p.detach()).mean()) for n, p in model.named_parameters()}
    assert moved["model.norm.weight"] == pytest.approx(0.005, rel=1e-3)
    name_of_added = "model.layers.0.linear_attn.bd_softmax_history_bias"
    assert moved[name_of_added] == pytest.approx(0.015, rel=1e-3)


def _greedy(model: CloverForCausalLM, document: Document) -> tuple[int, ...]:
    """The naive truth: one token after the other, as many as the reply has."""
    ids = list(document.prompt_ids)
    for _ in document.response_ids:
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return tuple(ids[len(document.prompt_ids) :])


def test_teacher_forced_exact_match_is_that_of_greedy_decoding(
    tiny_config: ConfigFactory, seeded: torch.Generator
) -> None:
    model = _model(tiny_config(diffusion=False))
    documents = []
    for index in range(8):
        document = _Echo().document(index)
        if index % 2:  # make half of the replies what the model would write
            document = dataclasses.replace(
                document, response_ids=_greedy(model, document), family="greedy"
            )
        documents.append(document)
    right = [_greedy(model, document) == document.response_ids for document in documents]
    result = evaluate(model, documents, num_rows=2, row_length=32, block_size=None)
    assert result.exact == sum(right) / 8
    assert result.exact_by_family == {"echo": sum(right[::2]) / 4, "greedy": 1.0}
    assert result.diffusion_loss is None


@pytest.mark.parametrize("shift_logits", [True, False])
def test_first_guess_is_what_a_preview_of_a_masked_block_predicts(
    tiny_config: ConfigFactory, *, shift_logits: bool
) -> None:
    diffusion = DiffusionConfig(block_size=4, mask_token_id=63, shift_logits=shift_logits)
    model = _model(dataclasses.replace(tiny_config(), diffusion=diffusion))
    document = Document(prompt_ids=(5, 6, 7), response_ids=(8, 9, 10, 11, 12, 1))
    result = evaluate(model, [document], num_rows=1, row_length=16, block_size=4)
    tokens = [*document.prompt_ids, *document.response_ids]
    right = 0
    for start in (3, 7):
        cache = model.new_cache(1)
        first = model.prefill(cache, torch.tensor([tokens[:start]]))
        logits = model.preview(cache, torch.full((1, 4), 63))[0]
        rows = torch.cat([first, logits[:-1]]) if shift_logits else logits
        for position, target in enumerate(tokens[start : start + 4]):
            right += int(rows[position].argmax()) == target
    assert result.first_guess == pytest.approx(right / 6)


def test_evaluation_does_not_depend_on_how_documents_are_packed(
    tiny_config: ConfigFactory,
) -> None:
    model = _model(tiny_config())
    documents = [_Echo().document(index) for index in range(9)]
    wide = evaluate(model, documents, num_rows=9, row_length=128, block_size=None)
    narrow = evaluate(model, documents, num_rows=1, row_length=16, block_size=None)
    assert wide.loss == pytest.approx(narrow.loss, rel=STEP_TOLERANCE)
    assert wide.exact == narrow.exact


def test_noise_of_a_step_does_not_depend_on_the_steps_before(tiny_config: ConfigFactory) -> None:
    model = _model(tiny_config())
    batch = pack_rows([[_Echo().document(i) for i in range(3)]], row_length=40, pad_token_id=0)
    config = _config("two_stream")
    first = batch_losses(model, batch, config, 4).total
    batch_losses(model, batch, config, 5)
    assert torch.equal(first, batch_losses(model, batch, config, 4).total)


def test_canvases_of_one_block_do_not_see_each_other(tiny_config: ConfigFactory) -> None:
    model = _model(tiny_config()).eval()
    batch = pack_rows([[_Echo().document(i) for i in range(3)]], row_length=40, pad_token_id=0)
    blocks = cut_blocks(batch, 4)
    canvases = [torch.full_like(blocks.targets, 7), blocks.targets]
    twice = blocks.beside(blocks)
    inputs = batch.input_ids, batch.document_ids
    clean, both = model.two_stream(*inputs, torch.cat(canvases, dim=1), twice.starts)
    for canvas, logits in zip(canvases, both.chunk(2, dim=1), strict=True):
        clean_alone, alone = model.two_stream(*inputs, canvas, blocks.starts)
        torch.testing.assert_close(clean, clean_alone)
        torch.testing.assert_close(logits, alone)


def test_each_canvas_of_a_block_is_noised_for_itself(tiny_config: ConfigFactory) -> None:
    model = _model(tiny_config())
    batch = pack_rows([[_Echo().document(i) for i in range(3)]], row_length=40, pad_token_id=0)
    losses = [
        batch_losses(model, batch, _config("two_stream", canvas_length=length), 0).total.item()
        for length in (20, 40, 60)
    ]
    assert len(set(losses)) == 3


@pytest.mark.parametrize("objective", ["ar", "two_stream"])
def test_load_balance_is_added_with_its_weight_and_moves_the_routers(
    tiny_config: ConfigFactory, objective: str
) -> None:
    model = _model(tiny_config(diffusion=objective == "two_stream"))
    batch = pack_rows([[_Echo().document(i) for i in range(3)]], row_length=40, pad_token_id=0)
    plain = batch_losses(model, batch, _config(objective), 0)
    config = _config(objective, losses=ObjectiveConfig(balance_weight=0.5))
    balanced = batch_losses(model, batch, config, 0)
    assert plain.balance is None and balanced.balance is not None
    added = 0.5 * float(balanced.balance.detach())
    assert float(balanced.total.detach()) == pytest.approx(float(plain.total.detach()) + added)
    moved = torch.autograd.grad(
        balanced.balance, model.get_parameter("model.layers.0.mlp.gate.weight")
    )
    assert moved[0].any()


def test_padding_and_unused_blocks_do_not_count_for_the_load_balance(
    tiny_config: ConfigFactory,
) -> None:
    model = _model(tiny_config())
    config = _config("two_stream", losses=ObjectiveConfig(balance_weight=1.0))
    rows = [[_Echo().document(1)]]
    values = []
    for length in (20, 60):
        batch = pack_rows(rows, row_length=length, pad_token_id=0)
        balance = batch_losses(model, batch, config, 0).balance
        assert balance is not None
        values.append(float(balance.detach()))
    assert values[0] == pytest.approx(values[1], rel=STEP_TOLERANCE)


def test_the_coreset_shrinks_from_all_experts_to_its_final_size(
    tiny_config: ConfigFactory,
) -> None:
    shape = dataclasses.replace(
        tiny_config(mlp=dataclasses.replace(tiny_config().mlp, num_experts=16)),
        diffusion=DiffusionConfig(block_size=8, mask_token_id=63, expert_coreset_size=6),
    )
    config = _config("two_stream", steps=40, coreset_anneal_fraction=0.5)
    sizes = [annealed_coreset_size(step, config, shape) for step in range(40)]
    assert sizes[:20] == [16 - step // 2 for step in range(20)]
    assert sizes[20:] == [None] * 20
    plain = _config("two_stream", steps=40)
    assert {annealed_coreset_size(step, plain, shape) for step in range(40)} == {None}


def test_a_step_is_trained_with_the_coreset_of_its_time(tiny_config: ConfigFactory) -> None:
    small = dataclasses.replace(
        tiny_config(),
        diffusion=DiffusionConfig(block_size=8, mask_token_id=63, expert_coreset_size=2),
    )
    batch = pack_rows([[_Echo().document(i) for i in range(3)]], row_length=40, pad_token_id=0)
    config = _config("two_stream", steps=10, coreset_anneal_fraction=0.5)
    for step, model in ((0, _model(tiny_config())), (5, _model(small))):
        found = batch_losses(_model(small), batch, config, step).total
        expected = batch_losses(model, batch, _config("two_stream", steps=10), step).total
        assert torch.equal(found, expected)


def test_what_a_model_cannot_do_is_refused_before_training(tiny_config: ConfigFactory) -> None:
    with pytest.raises(TrainingError, match="no expert_coreset_size to end at"):
        _run(_model(tiny_config()), _config("two_stream", coreset_anneal_fraction=0.5))
    with pytest.raises(TrainingError, match="a dense model has no routers"):
        _run(
            _model(tiny_config("dense")),
            _config("two_stream", losses=ObjectiveConfig(balance_weight=0.1)),
        )


def test_a_run_saved_before_a_field_existed_can_be_resumed(
    tiny_config: ConfigFactory, tmp_path: Path
) -> None:
    shape = tiny_config()
    config = _config("two_stream", out=tmp_path)
    _run(_model(shape), config, on_event=_stop_after(2))
    state = load_state(tmp_path)
    older = dict(state.progress["config"])
    del older["coreset_anneal_fraction"]
    older["losses"] = {k: v for k, v in older["losses"].items() if k != "balance_weight"}
    save_state(tmp_path, dataclasses.replace(state, progress=state.progress | {"config": older}))
    changed = dataclasses.replace(config, losses=ObjectiveConfig(balance_weight=0.1))
    with pytest.raises(
        TrainingError, match=r"losses was .*; give the same options, or another folder"
    ):
        _run(_model(shape), changed, resume=True)
    summary = _run(_model(shape), config, resume=True)[-1]
    assert isinstance(summary, SummaryEvent) and summary.is_finished

    del older["parallelism"]  # such a run drew its noise in another way
    save_state(tmp_path, dataclasses.replace(state, progress=state.progress | {"config": older}))
    with pytest.raises(TrainingError, match="parallelism was None, is 'ddp'"):
        _run(_model(shape), config, resume=True)


@pytest.mark.parametrize("model_share", [0.0, 1.0])
def test_edits_of_a_step_are_wrong_never_reserved_and_those_of_its_seed(
    tiny_config: ConfigFactory, model_share: float
) -> None:
    model = _model(tiny_config())
    rows = [[_Echo().document(i) for i in range(3)], [_Echo().document(3)]]
    batch = pack_rows(rows, row_length=40, pad_token_id=0)
    config = _config(
        "two_stream",
        edits=EditConfig(probability=0.5, model_share=model_share),
        canvas_length=80,
        num_token_ids=25,
    )
    blocks, noised = draw_canvases(model, batch, config, 3)
    assert noised.edited.any() and not noised.edited[~blocks.is_token].any()
    wrong = noised.canvas[noised.edited]
    assert (wrong != blocks.targets[noised.edited]).all() and (wrong < 25).all()
    assert torch.equal(noised.canvas, draw_canvases(model, batch, config, 3)[1].canvas)
    # Masks are those of a run without edits
    plain = draw_canvases(model, batch, _config("two_stream", canvas_length=80), 3)[1]
    assert torch.equal(plain.masked, noised.masked)


def test_complementary_canvases_mask_every_token_between_them(
    tiny_config: ConfigFactory,
) -> None:
    model = _model(tiny_config())
    batch = pack_rows([[_Echo().document(i) for i in range(3)]], row_length=40, pad_token_id=0)
    config = _config("two_stream", canvas_length=24, complementary_masks=True)
    blocks, noised = draw_canvases(model, batch, config, 1)
    first, second = noised.masked.chunk(2, dim=1)
    is_token = blocks.is_token.chunk(2, dim=1)[0]
    assert torch.equal(*blocks.starts.chunk(2, dim=1))
    assert bool((first | second)[is_token].all())
    assert bool(second.any(-1)[is_token.any(-1)].all())


def test_blocks_of_all_masks_are_as_frequent_as_asked(tiny_config: ConfigFactory) -> None:
    model = _model(tiny_config())
    batch = pack_rows(
        [[_Echo().document(i) for i in range(row, row + 3)] for row in range(100)],
        row_length=40,
        pad_token_id=0,
    )
    shares = []
    for probability in (0.0, 0.75, 1.0):
        config = _config("two_stream", canvas_length=24, all_masks_probability=probability)
        blocks, noised = draw_canvases(model, batch, config, 1)
        is_long = blocks.is_token.all(-1)
        shares.append(float(noised.masked[is_long].all(-1).float().mean()))
    assert shares[0] < 0.5 and shares[2] == 1.0
    expected = 0.25 * shares[0] + 0.75
    assert abs(shares[1] - expected) < 0.1


def test_skips_happen_as_often_as_asked_and_stay_below_a_block() -> None:
    generator = torch.Generator().manual_seed(0)
    assert draw_skips(50, 8, 0.0, generator) == [0] * 50
    skips = draw_skips(2_000, 8, 0.5, generator)
    assert set(skips) == set(range(8))
    # Half are drawn, an eighth of those are 0: 43.75 % above 0, six standard deviations allowed
    assert abs(sum(skip > 0 for skip in skips) / 2_000 - 0.4375) < 6 * 0.5 / 2_000**0.5


@pytest.mark.parametrize(("device", "is_fast"), [("cpu", False), ("cpu", True), ("cuda", True)])
def test_automatic_precision_is_bf16_where_it_is_not_emulated(
    device: str, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: is_fast and device == "cpu"
    )
    found = choose_precision("auto", torch.device(device))
    assert found == ("bf16" if is_fast else "fp32")
    assert choose_precision("bf16", torch.device(device)) == "bf16"
    assert choose_precision("fp32", torch.device(device)) == "fp32"


def test_bf16_lasts_only_while_training() -> None:
    left, right = torch.ones(2, 2), torch.ones(2, 2)
    with training_precision("bf16", torch.device("cpu")):
        assert (left @ right).dtype == torch.bfloat16
    with training_precision("fp32", torch.device("cpu")):
        assert (left @ right).dtype == torch.float32
    assert (left @ right).dtype == torch.float32


def test_a_weight_changed_in_place_is_seen_at_once_in_bf16() -> None:
    layer = torch.nn.Linear(2, 2, bias=False)
    x = torch.ones(1, 2)
    with training_precision("bf16", torch.device("cpu")):
        assert layer(x).detach().any()
        with torch.no_grad():
            layer.weight.zero_()
        assert not layer(x).detach().any()


def test_a_model_trains_in_bf16(tiny_config: ConfigFactory) -> None:
    model = _model(tiny_config())
    events = _run(model, _config("two_stream", precision="bf16", steps=3))
    assert isinstance(events[-1], SummaryEvent) and events[-1].is_finished
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("steps", 0, "steps must be at least 1, found 0"),
        ("canvas_length", 0, "canvas_length must be at least 4, for blocks of 4 tokens, found 0"),
        ("canvas_length", 3, "canvas_length must be at least 4, for blocks of 4 tokens, found 3"),
        ("all_masks_probability", 1.5, r"all_masks_probability must be in \[0, 1\], found 1.5"),
        ("prefix_probability", -0.5, r"prefix_probability must be in \[0, 1\], found -0.5"),
        (
            "edits",
            EditConfig(probability=0.1),
            "num_token_ids must be set to the tokenizer's length",
        ),
        ("ema_decay", 1.0, r"ema_decay must be in \[0, 1\), found 1.0"),
        ("coreset_anneal_fraction", 2.0, r"coreset_anneal_fraction must be in \[0, 1\], found 2.0"),
        ("decay_fraction", 1.5, r"decay_fraction must be in \[0, 1\], found 1.5"),
        ("block_sizes", (), "block_sizes must be positive numbers"),
        ("max_grad_norm", 0.0, "max_grad_norm must be above 0"),
    ],
)
def test_a_config_outside_its_range_is_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _config("two_stream", **{field: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallelism": "fsdp", "ema_decay": 0.5}, "ema_decay must be 0 with parallelism 'fsdp'"),
        (
            {
                "parallelism": "fsdp",
                "edits": EditConfig(probability=0.1, model_share=0.5),
                "num_token_ids": 25,
            },
            "edits.model_share must be 0 with parallelism 'fsdp'",
        ),
        (
            {"activation_checkpointing": True, "losses": ObjectiveConfig(balance_weight=0.1)},
            "losses.balance_weight must be 0 with activation_checkpointing",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _config("two_stream", **changes)


@pytest.mark.slow  # a minute of compiling
@pytest.mark.filterwarnings("default")  # torch.compile warns of itself
@pytest.mark.parametrize("objective", ["ar", "two_stream"])
def test_compiled_layers_learn_what_plain_ones_learn(
    tiny_config: ConfigFactory, objective: str
) -> None:
    config = tiny_config()
    curves = []
    for is_compiled in (False, True):
        events = _run(_model(config), _config(objective, steps=3, compile_layers=is_compiled))
        curves.append([event.losses["total"] for event in events if isinstance(event, StepEvent)])
    assert curves[1] == pytest.approx(curves[0], rel=COMPILED_TOLERANCE)
