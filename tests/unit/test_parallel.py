"""Several processes: the loss curve of one, whichever way the model lies in them."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clover.checkpoint.load import load_model, save_model
from clover.config import ModelConfig
from clover.diffusion.noise import EditConfig
from clover.diffusion.objective import ObjectiveConfig
from clover.errors import TrainingError
from clover.model.transformer import CloverForCausalLM
from clover.train import parallel
from clover.train.data import Document, DocumentSource
from clover.train.events import StepEvent
from clover.train.on_policy import OnPolicyConfig
from clover.train.optimizer import OptimizerConfig
from clover.train.packing import pack_rows
from clover.train.trainer import TrainConfig, batch_losses, train

ConfigFactory = Callable[..., ModelConfig]
TESTS = Path(__file__).parents[1]

# Sums over rows in another order, through six updates: Muon's iteration in bf16, and AdamW where a
# gradient is nearly 0, turn a last bit of fp32 into a visible part of an update
LOSS_TOLERANCE = 1e-3
WEIGHT_TOLERANCE = 1e-2
# bf16 keeps 8 bits; the loss is a mean over some hundred tokens
BF16_TOLERANCE = 2e-2


class Echo:
    """Replies that repeat their prompt, of uneven length: processes get uneven shares of tokens."""

    def document(self, index: int) -> Document:
        word = tuple(3 + (index * 7 + place * index) % 20 for place in range(2 + index % 9))
        return Document(prompt_ids=(2, *word, 2), response_ids=(*word, 1), family="echo")


def new_model(shape: ModelConfig, seed: int = 0) -> CloverForCausalLM:
    model = CloverForCausalLM(shape)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def run_config(parallelism: Any = "ddp", **changes: Any) -> TrainConfig:
    fields: dict[str, Any] = {
        "objective": "two_stream",
        "steps": 6,
        "num_rows": 3,  # two for one process, one for the other
        "row_length": 48,
        "optimizer": OptimizerConfig(learning_rate=1e-2),
        "warmup_steps": 2,
        "precision": "fp32",
        "block_sizes": (2, 4),
        "block_skip_probability": 0.5,
        "parallelism": parallelism,
        "log_every": 1,
        "save_every": 100,
    }
    return TrainConfig(**(fields | changes))


def rich_config(parallelism: Any = "ddp", *, model_share: float = 0.0) -> TrainConfig:
    """A run with what is off by default."""
    return run_config(
        parallelism,
        steps=3,
        losses=ObjectiveConfig(balance_weight=0.1, kept_weight=0.1),
        complementary_masks=True,
        edits=EditConfig(probability=0.3, model_share=model_share),
        num_token_ids=25,
        ema_decay=0.0 if parallelism == "fsdp" else 0.5,
    )


def distilled_config(parallelism: Any = "ddp") -> TrainConfig:
    """A run with a parent as teacher; where decoding is possible, on the model's own text too."""
    own = OnPolicyConfig(reply_probability=0.4, canvas_probability=0.3, threshold=0.02)
    return run_config(
        parallelism,
        steps=4,
        losses=ObjectiveConfig(
            distillation_weight=1.0, clean_distillation_weight=0.5, teacher="parent"
        ),
        on_policy=OnPolicyConfig() if parallelism == "fsdp" else own,
        num_token_ids=25,
    )


def curve(
    model: CloverForCausalLM,
    config: TrainConfig,
    source: DocumentSource | None = None,
    *,
    resume: bool = False,
    parent: CloverForCausalLM | None = None,
) -> list[StepEvent]:
    """Trains the model and returns what was reported of every step."""
    events: list[StepEvent] = []

    def on_event(event: Any) -> None:
        if isinstance(event, StepEvent):
            events.append(event)

    train(model, config, source or Echo(), on_event=on_event, resume=resume, parent=parent)
    return events


def run_two_processes(script: str, *arguments: str) -> None:
    """Runs a script as `torchrun` would start it, without torchrun's own process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), str(TESTS / "unit")]),
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_RUN_ID": "test",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=500)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)


# A whole run; the same, stopped by a signal to the second process alone, and resumed
WORKER = """
import dataclasses, json, os, shutil, signal, sys
from pathlib import Path
import torch
from conftest import make_tiny_config
from test_parallel import Echo, curve, distilled_config, new_model, rich_config, run_config
from clover.train import parallel

parallelism, out = sys.argv[1], Path(sys.argv[2])

class Interrupted(Echo):
    is_sent = False
    def document(self, index):
        if index >= 12 and parallel.rank() == 1 and not self.is_sent:
            self.is_sent = True
            os.kill(os.getpid(), signal.SIGTERM)
        return super().document(index)

with parallel.process_group():
    assert parallel.world_size() == 2
    config = run_config(parallelism)
    whole = new_model(make_tiny_config())
    results = {"fp32": curve(whole, config)}
    parallel.save_whole(whole, out / "saved")

    config = dataclasses.replace(config, out=out / "run")
    head = curve(new_model(make_tiny_config()), config, Interrupted())
    resumed = new_model(make_tiny_config(), seed=1)  # every weight must come from the state
    config = dataclasses.replace(config, activation_checkpointing=True, out=out / "copy")
    if parallel.rank() == 0:
        shutil.copytree(out / "run", out / "copy")
    parallel.wait_for_all()
    tail = curve(resumed, config, resume=True)
    if parallel.rank() == 0:
        assert 0 < len(head) < config.steps, "the signal came between two steps"
        assert [e.step for e in head + tail] == [1, 2, 3, 4, 5, 6]
    for name, expected in whole.named_parameters():
        found = parallel.whole_tensor(resumed.get_parameter(name))
        assert torch.equal(found, parallel.whole_tensor(expected)), name

    results["rich"] = curve(new_model(make_tiny_config()), rich_config(parallelism))
    parent = new_model(make_tiny_config(diffusion=False), seed=2)
    model = new_model(make_tiny_config())
    results["distilled"] = curve(model, distilled_config(parallelism), parent=parent)
    if parallelism == "ddp":
        model = new_model(make_tiny_config())
        results["previewed"] = curve(model, rich_config(model_share=0.5))

    if parallelism == "fsdp":
        half = new_model(make_tiny_config())
        results["bf16"] = curve(half, run_config("fsdp", precision="bf16"))
        assert {p.dtype for p in half.parameters()} == {torch.float32}
        total = sum(p.numel() for p in half.parameters())
        held = sum(p.to_local().numel() for p in half.parameters())
        assert abs(held / total - 0.5) < 0.01, "every process holds half of the model"
    if parallel.rank() == 0:
        rows = {k: [(e.losses, e.grad_norm) for e in events] for k, events in results.items()}
        (out / "results.json").write_text(json.dumps(rows))
"""


@contextmanager
def group_of_one() -> Iterator[None]:
    """This process as a group, which sharding needs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
def test_two_processes_give_the_loss_curve_of_one(
    tiny_config: ConfigFactory, tmp_path: Path, parallelism: str
) -> None:
    run_two_processes(WORKER, parallelism, str(tmp_path))
    results = json.loads((tmp_path / "results.json").read_text())
    alone = new_model(tiny_config())
    expected = curve(alone, run_config())
    for event, (losses, norm) in zip(expected, results["fp32"], strict=True):
        assert losses == pytest.approx(event.losses, rel=LOSS_TOLERANCE)
        assert norm == pytest.approx(event.grad_norm, rel=LOSS_TOLERANCE)
    shares = {"rich": 0.0} | ({"previewed": 0.5} if parallelism == "ddp" else {})
    for name, share in shares.items():
        others = curve(new_model(tiny_config()), rich_config(model_share=share))
        for event, (losses, _) in zip(others, results[name], strict=True):
            assert "balance" in losses
            assert losses == pytest.approx(event.losses, rel=LOSS_TOLERANCE)
    parent = new_model(tiny_config(diffusion=False), seed=2)
    config = dataclasses.replace(distilled_config(parallelism), parallelism="ddp")
    others = curve(new_model(tiny_config()), config, parent=parent)
    for event, (losses, _) in zip(others, results["distilled"], strict=True):
        assert "clean_distillation" in losses
        assert losses == pytest.approx(event.losses, rel=LOSS_TOLERANCE)
    if parallelism == "ddp":
        assert 0 < sum("on_policy" in event.losses for event in others) < len(others)
    if parallelism == "fsdp":
        for event, (losses, _) in zip(expected, results["bf16"], strict=True):
            assert losses == pytest.approx(event.losses, rel=BF16_TOLERANCE)

    saved = load_model(tmp_path / "saved")
    ours, theirs = (
        torch.cat([tensor.flatten() for tensor in model.state_dict().values()])
        for model in (alone, saved)
    )
    assert (ours - theirs).norm() < WEIGHT_TOLERANCE * ours.norm()

    # What two processes left unfinished, one can finish
    config = run_config(parallelism, out=tmp_path / "run")
    with group_of_one() if parallelism == "fsdp" else nullcontext():
        tail = curve(new_model(tiny_config(), seed=1), config, resume=True)
    for event, other in zip(tail, expected[-len(tail) :], strict=True):
        assert event.losses == pytest.approx(other.losses, rel=LOSS_TOLERANCE)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_sharded_model_is_read_slice_by_slice(
    tiny_config: ConfigFactory, tmp_path: Path, *, is_tied: bool
) -> None:
    model = new_model(tiny_config(tie_word_embeddings=is_tied))
    save_model(model, tmp_path / "model")
    cpu = torch.device("cpu")
    with group_of_one():
        sharded = parallel.load_sharded(tmp_path / "model", precision="fp32", device=cpu)
        assert parallel.is_sharded(sharded)
        token_ids = torch.arange(12).view(1, -1)
        assert torch.equal(sharded(token_ids), model(token_ids))
        sharded(token_ids).sum().backward()
        model(token_ids).sum().backward()
        for name, parameter in model.named_parameters():
            gradient, expected = sharded.get_parameter(name).grad, parameter.grad
            assert (gradient is None) == (expected is None), name
            if gradient is not None and expected is not None:
                assert torch.equal(parallel.whole_tensor(gradient), expected), name


def test_sharding_needs_processes(tiny_config: ConfigFactory) -> None:
    with pytest.raises(TrainingError, match="start the run with torchrun"):
        curve(new_model(tiny_config()), run_config("fsdp"))


AVERAGING = """
import torch
from clover.train import parallel
with parallel.process_group():
    rank = parallel.rank()
    used, unused = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 2))
    used.grad = torch.full((3,), float(rank))
    if rank == 0:
        unused.grad = torch.ones(2, 2)
    parallel.average_gradients([used, unused])
    assert torch.equal(used.grad, torch.full((3,), 0.5)), used.grad
    assert torch.equal(unused.grad, torch.full((2, 2), 0.5)), unused.grad
assert parallel.world_size() == 1
"""


def test_a_process_without_a_gradient_counts_as_zero() -> None:
    run_two_processes(AVERAGING)


@pytest.mark.parametrize("objective", ["ar", "two_stream"])
def test_activation_checkpointing_changes_neither_loss_nor_gradients(
    tiny_config: ConfigFactory, objective: str
) -> None:
    results = []
    for is_on in (False, True):
        model = new_model(tiny_config(diffusion=objective == "two_stream"))
        model.model.activation_checkpointing = is_on
        documents = [Echo().document(index) for index in range(4)]
        batch = pack_rows([documents[:2], documents[2:]], row_length=48, pad_token_id=0)
        saved = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal saved
            saved += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = batch_losses(model, batch, run_config(objective=objective), 0).total
        loss.backward()
        results.append((loss, saved, [parameter.grad for parameter in model.parameters()]))
    (plain, kept, gradients), (checkpointed, kept_less, same) = results
    assert torch.equal(plain, checkpointed)
    assert kept_less < kept / 3
    for gradient, other in zip(gradients, same, strict=True):
        assert gradient is other is None or torch.equal(gradient, other)
