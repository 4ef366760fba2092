"""The benchmark at toy size: random weights, a few tokens, every contender."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from rich.console import Console

from clover.chat import render_reply
from clover.checkpoint.load import LoadedCheckpoint, load_checkpoint, save_model
from clover.cli import main
from clover.cli_bench import run_bench
from clover.config import DiffusionConfig, ModelConfig, MoeConfig
from clover.diffusion.policies import Autoregressive, Exact
from clover.errors import BenchmarkError, RequestError
from clover.eval.bench import Bench, BenchConfig, engine_contenders
from clover.eval.contenders import (
    DrafterContender,
    EngineContender,
    Prompt,
    Run,
    TransformersContender,
)
from clover.eval.dflash.files import save_drafter
from clover.eval.dflash.model import Drafter, drafter_config
from clover.eval.workloads import draw_trace, draw_workloads
from clover.model.transformer import CloverForCausalLM
from clover.tasks import FAMILIES
from clover.tokenizer import Tokenizer

TOKENIZER_FOLDER = Path(__file__).parents[2] / "clover" / "assets" / "nano"
CONFIG = BenchConfig(num_items=2, concurrencies=(1, 2), repeats=2, num_turns=2, max_tokens=5)
TOY = ("--items", "1", "--concurrency", "1", "--repeats", "1", "--turns", "2", "--max-tokens", "3")


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, tiny_config: Callable[..., ModelConfig]
) -> tuple[Path, Path]:
    """A parent and a Clover model with random weights whose texts vary."""
    tokenizer = Tokenizer.load(TOKENIZER_FOLDER)
    mask_token_id, end = tokenizer.mask_token_id, tokenizer.token_id("<|im_end|>")
    assert mask_token_id is not None
    assert end is not None
    parent = tiny_config(
        diffusion=False,
        vocab_size=len(tokenizer),
        eos_token_ids=(end,),
        max_position_embeddings=1024,
    )
    diffusion = DiffusionConfig(block_size=4, mask_token_id=mask_token_id)
    root = tmp_path_factory.mktemp("checkpoints")
    for name, config in {
        "parent": parent,
        "clover": dataclasses.replace(parent, diffusion=diffusion),
    }.items():
        model = CloverForCausalLM(config)
        model.init_weights(torch.Generator().manual_seed(0))
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.mul_(4)
        save_model(model, root / name, files_from=TOKENIZER_FOLDER)
    return root / "parent", root / "clover"


@pytest.fixture(scope="module")
def checkpoints(folders: tuple[Path, Path]) -> tuple[LoadedCheckpoint, LoadedCheckpoint]:
    parent, clover = map(load_checkpoint, folders)
    return parent, clover


def test_every_contender_is_measured_everywhere_and_in_turns(
    checkpoints: tuple[LoadedCheckpoint, LoadedCheckpoint],
) -> None:
    parent, clover = checkpoints
    contenders = engine_contenders(parent, clover, ["relaxed=2", "threshold=0.5"])
    names = [contender.name for contender in contenders]
    bench = Bench(CONFIG, clover, contenders)
    lines = list(bench.run())
    results = bench.results
    assert results.is_complete
    found = [(s.workload, s.concurrency, s.repeat, s.contender) for s in results.samples]
    assert found == [
        (workload, concurrency, repeat, name)
        for workload in ("short", "long")
        for concurrency in (1, 2)
        for repeat, order in ((0, names), (1, [*names[1:], names[0]]))
        for name in order
    ]
    for each in results.samples:
        assert 2 <= each.tokens <= 2 * CONFIG.max_tokens
        assert len(each.latencies) == len(each.first_token_seconds) == CONFIG.num_items
        assert all(
            0 < first <= latency <= each.seconds
            for first, latency in zip(each.first_token_seconds, each.latencies, strict=True)
        )
    mlp = parent.config.mlp
    assert isinstance(mlp, MoeConfig)
    for quality in results.qualities:
        assert quality.experts_per_pass is not None
        assert mlp.num_experts_per_tok <= quality.experts_per_pass <= mlp.num_experts
        if quality.contender.endswith("autoregressive"):
            assert quality.tpf == 1.0
            assert quality.experts_per_pass == mlp.num_experts_per_tok  # one token a pass
        if quality.contender.startswith("parent"):
            assert quality.same_text == CONFIG.num_items
    assert len(results.traces) == CONFIG.repeats * len(contenders) * 2
    first_timed = next(i for i, line in enumerate(lines) if "tokens/s" in line)
    assert sum("right texts" in line for line in lines[:first_timed]) == 2 * len(contenders)


class ForgetsTheEnd(EngineContender):
    """An engine that loses the last token of an answer."""

    def run(self, prompts: Sequence[Prompt], *, concurrency: int, max_tokens: int) -> Run:
        run = super().run(prompts, concurrency=concurrency, max_tokens=max_tokens)
        answers = [dataclasses.replace(a, token_ids=a.token_ids[:-1]) for a in run.answers]
        return dataclasses.replace(run, answers=answers)


class DraftsUnverified(EngineContender):
    """`exact` that keeps whatever it has drafted."""

    def plain_texts(self, prompts: Sequence[Prompt], max_tokens: int) -> list[tuple[int, ...]]:
        return [(*text[:-1], text[-1] ^ 1) for text in super().plain_texts(prompts, max_tokens)]


class ForgetsTheCache(EngineContender):
    """An engine that answers otherwise where a prefix is cached."""

    def run_turns(
        self, prompts: Sequence[Prompt], *, max_tokens: int, prefix_cache_bytes: int
    ) -> Run:
        count = max_tokens - 1 if prefix_cache_bytes else max_tokens
        return super().run_turns(prompts, max_tokens=count, prefix_cache_bytes=prefix_cache_bytes)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (ForgetsTheEnd, "wrong at concurrency 2: the plain loop's text"),
        (DraftsUnverified, "wrong: autoregressive text"),
        (ForgetsTheCache, "wrong: turns without a prefix cache"),
    ],
)
def test_nothing_is_timed_while_texts_differ_that_have_to_be_equal(
    checkpoints: tuple[LoadedCheckpoint, LoadedCheckpoint],
    kind: type[EngineContender],
    named: str,
) -> None:
    _, clover = checkpoints
    right = EngineContender("right", clover, Autoregressive())
    bench = Bench(CONFIG, clover, [right, kind("wrong", clover, Exact())])
    with pytest.raises(BenchmarkError, match=named):
        list(bench.run())
    assert (bench.results.samples, bench.results.traces) == ([], [])


def test_transformers_writes_the_parents_text_and_is_timed(
    checkpoints: tuple[LoadedCheckpoint, LoadedCheckpoint],
) -> None:
    parent, clover = checkpoints
    items = draw_workloads(clover, 3, FAMILIES)["short"]
    prompts = [item.prompt_ids for item in items]
    theirs = TransformersContender(parent).run(prompts, concurrency=1, max_tokens=6)
    ours = EngineContender("ours", parent, Autoregressive())
    assert theirs.texts == ours.run(prompts, concurrency=3, max_tokens=6).texts
    for answer in theirs.answers:
        assert answer.passes == answer.tokens
        assert 0 < answer.first_token_seconds < answer.seconds <= theirs.seconds


def new_drafter(parent: LoadedCheckpoint) -> Drafter:
    drafter = Drafter(drafter_config(parent.model, num_layers=1, block_size=4))
    drafter.init_weights(torch.Generator().manual_seed(0))
    return drafter.eval()


def test_a_drafter_is_timed_one_request_at_a_time_and_both_kinds_of_passes_are_told(
    checkpoints: tuple[LoadedCheckpoint, LoadedCheckpoint],
) -> None:
    parent, clover = checkpoints
    ours = [EngineContender("ours", parent, Autoregressive())]
    bench = Bench(CONFIG, clover, ours, [DrafterContender(parent, new_drafter(parent))])
    lines = list(bench.run())
    name = "parent + DFlash"
    first_timed = next(i for i, line in enumerate(lines) if "tokens/s" in line)
    assert {f"short: right texts: {name}", f"long: right texts: {name}"} <= {*lines[:first_timed]}
    found = [
        (each.workload, each.concurrency, each.repeat)
        for each in bench.results.samples
        if each.contender == name
    ]
    assert found == [(workload, 1, repeat) for workload in ("short", "long") for repeat in (0, 1)]
    for quality in bench.results.qualities:
        if quality.contender == name:
            assert quality.same_text == CONFIG.num_items
            assert quality.tpf_with_drafter is not None
            assert 0.5 <= quality.tpf_with_drafter < quality.tpf
        else:
            assert quality.tpf_with_drafter is None


class KeepsADraft(DrafterContender):
    """A drafter whose last token nobody has verified."""

    def run(self, prompts: Sequence[Prompt], *, concurrency: int, max_tokens: int) -> Run:
        run = super().run(prompts, concurrency=concurrency, max_tokens=max_tokens)
        answers = [
            dataclasses.replace(a, token_ids=(*a.token_ids[:-1], a.token_ids[-1] ^ 1))
            for a in run.answers
        ]
        return dataclasses.replace(run, answers=answers)


def test_nothing_is_timed_while_a_drafters_text_is_not_the_parents(
    checkpoints: tuple[LoadedCheckpoint, LoadedCheckpoint],
) -> None:
    parent, clover = checkpoints
    ours = [EngineContender("ours", parent, Autoregressive())]
    bench = Bench(CONFIG, clover, ours, [KeepsADraft(parent, new_drafter(parent))])
    with pytest.raises(BenchmarkError, match=r"short: parent \+ DFlash at concurrency 1"):
        list(bench.run())
    assert (bench.results.samples, bench.results.traces) == ([], [])


@pytest.mark.parametrize("is_named", [True, False])
def test_the_command_takes_the_drafter_that_is_named_or_lies_in_the_parents_folder(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    parent, clover = folders
    copied = tmp_path / "parent"
    shutil.copytree(parent, copied)
    drafter = tmp_path / "drafter" if is_named else copied / "dflash"
    save_drafter(new_drafter(load_checkpoint(parent)), drafter)
    arguments = ["--model", str(clover), "--parent", str(copied), "--no-transformers"]
    arguments += ["--drafter", str(drafter)] if is_named else []
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["clover", "bench", str(out), *arguments, *TOY])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code
    values = json.loads((out / "results.json").read_text())
    assert "parent + DFlash" in [row["contender"] for row in values["rows"]]
    assert values["surroundings"]["models"]["drafter"] == str(drafter)
    assert "with the drafter's)" in (out / "results.md").read_text()


def test_short_items_have_the_shorter_replies_and_turns_begin_with_those_before(
    checkpoints: tuple[LoadedCheckpoint, LoadedCheckpoint],
) -> None:
    _, clover = checkpoints
    lengths = {
        name: [
            len(
                clover.tokenizer.encode(
                    render_reply(item.task.reply, enable_thinking=item.task.enable_thinking)
                )
            )
            for item in items
        ]
        for name, items in draw_workloads(clover, 8, FAMILIES).items()
    }
    assert max(lengths["short"]) <= min(lengths["long"])
    assert {len(found) for found in lengths.values()} == {8}
    turns = draw_trace(clover, 10)
    assert len(turns) == 10
    for before, after in itertools.pairwise(turns):
        assert len(after) > len(before)
        assert after[: len(before)] == before


def test_the_command_writes_its_folder_and_a_line_a_step(
    folders: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parent, clover = map(str, folders)
    arguments = (
        "--model",
        clover,
        "--parent",
        parent,
        "--no-transformers",
        "--policy",
        "threshold=0.5",
    )
    monkeypatch.setattr(sys, "argv", ["clover", "bench", str(tmp_path / "out"), *arguments, *TOY])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code
    captured = capsys.readouterr()
    written = [Path(line) for line in captured.out.splitlines()]
    assert [path.name for path in written] == ["results.json", "results.md", "frontier.png"]
    values = json.loads(written[0].read_text())
    assert values["is_complete"]
    assert [row["contender"] for row in values["rows"][:5]] == [
        "parent, autoregressive",
        "parent, prompt_lookup",
        "Clover, autoregressive",
        "Clover, exact",
        "Clover, threshold=0.5",
    ]
    assert "short: right texts: Clover, exact" in captured.err
    assert "concurrency 1, round 1: Clover, exact" in captured.err


class StopsAtTheFirstRate(io.StringIO):
    """A terminal whose user presses Ctrl-C when the first speed appears."""

    is_pressed = False

    def write(self, text: str) -> int:
        if "tokens/s" in text and not self.is_pressed:
            self.is_pressed = True
            raise KeyboardInterrupt
        return super().write(text)


def test_ctrl_c_leaves_what_is_finished(folders: tuple[Path, Path], tmp_path: Path) -> None:
    parent, clover = map(str, folders)
    json_path, table_path, _ = run_bench(
        tmp_path,
        BenchConfig(num_items=1, concurrencies=(1,), repeats=1, num_turns=2, max_tokens=2),
        model=clover,
        parent=parent,
        policies=(),
        with_transformers=False,
        device=torch.device("cpu"),
        notes=Console(file=StopsAtTheFirstRate(), width=200),
    )
    values = json.loads(json_path.read_text())
    assert not values["is_complete"]
    assert [each["contender"] for each in values["samples"]] == ["parent, autoregressive"]
    assert "Interrupted" in table_path.read_text()


def test_a_parent_in_the_models_place_is_refused(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    parent, clover = map(str, folders)
    with pytest.raises(RequestError, match="expected a Clover model and its autoregressive parent"):
        run_bench(
            tmp_path,
            CONFIG,
            model=parent,
            parent=clover,
            policies=(),
            with_transformers=False,
            device=torch.device("cpu"),
            notes=Console(file=io.StringIO()),
        )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_items": 0}, "num_items is 0"),
        ({"num_turns": 1}, "num_turns is 1; allowed: 2 or more"),
        ({"concurrencies": (1, 0)}, "concurrencies are"),
        ({"concurrencies": ()}, "concurrencies are"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, object], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type]
