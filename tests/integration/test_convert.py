"""Any parent folder becomes a Clover folder with the parent's numbers, wholly or not at all."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from clover.checkpoint.convert import convert, memory_in_tokens, replace_bytes
from clover.checkpoint.files import SINGLE_FILE, TensorFolder
from clover.checkpoint.inspect import inspect_checkpoint
from clover.checkpoint.load import load_model, save_model
from clover.checkpoint.names import (
    ADDED_TENSORS,
    NESTED_PREFIX,
    Layout,
    expected_tensors,
    source_names,
    source_shape,
)
from clover.config import ModelConfig, config_to_dict, read_config
from clover.errors import CheckpointError, CloverError, ConfigError
from clover.model.transformer import CloverForCausalLM
from clover.tokenizer import Tokenizer

TinyConfig = Callable[..., ModelConfig]
NANO = Path(__file__).parents[2] / "clover" / "assets" / "nano"

REFERENCE_TOLERANCE = 1e-4
"""Of the standard deviation of the logits: fp32 rounding in another order of sums."""

BF16_NORM_TOLERANCE = 0.01
"""A row rounded to bf16, 8 bits, may change its length by half a percent."""


def make_parent(config: ModelConfig, folder: Path, *, dtype: torch.dtype = torch.float32) -> None:
    """Writes a flat, fused parent with random weights."""
    generator = torch.Generator().manual_seed(0)
    model = CloverForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    save_model(model, folder, dtype=dtype)


def rename_parent(folder: Path, layout: Layout) -> None:
    """Rewrites a flat, fused parent in another layout, with vision and MTP tensors if nested."""
    config = read_config(folder)
    tensors = load_file(folder / SINGLE_FILE)
    renamed: dict[str, torch.Tensor] = {}
    for name, expected in expected_tensors(config).items():
        sources = source_names(name, config, layout)
        shape = source_shape(name, expected.shape, layout)
        pieces = tensors[name].reshape(len(sources), *shape)
        renamed |= {source: pieces[i].clone() for i, source in enumerate(sources)}
    if layout.prefix == NESTED_PREFIX:
        renamed["model.visual.patch_embed.proj.weight"] = torch.zeros(3, 3)
        renamed["mtp.layers.0.mlp.experts.0.up_proj.weight"] = torch.zeros(3, 3)
        text = config_to_dict(config)
        kind = text["model_type"].removesuffix("_text")
        content = {"model_type": kind, "text_config": text, "vision_config": {"depth": 1}}
        text["architectures"] = None
        (folder / "config.json").write_text(json.dumps(content))
    save_file(renamed, folder / SINGLE_FILE)


def logits_of(folder: Path) -> torch.Tensor:
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        logits: torch.Tensor = load_model(folder)(tokens)
    return logits


@pytest.mark.parametrize("variant", ["moe", "dense"])
@pytest.mark.parametrize("prefix", ["model.", NESTED_PREFIX])
@pytest.mark.parametrize("per_expert", [False, True])
def test_every_layout_becomes_the_same_clover_folder_with_the_parents_logits(
    tmp_path: Path, tiny_config: TinyConfig, variant: str, prefix: str, per_expert: bool
) -> None:
    parent = tmp_path / "parent"
    make_parent(tiny_config(variant, diffusion=False), parent)
    expected = logits_of(parent)
    convert(parent, tmp_path / "plain", mask_token_id=63)

    rename_parent(parent, Layout(prefix=prefix, per_expert=per_expert))
    report = convert(parent, tmp_path / "out", mask_token_id=63, max_shard_bytes=20_000)

    assert torch.equal(logits_of(parent), expected)
    assert torch.equal(logits_of(tmp_path / "out"), expected)
    assert report.num_dropped_tensors == (2 if prefix == NESTED_PREFIX else 0)
    assert report.num_shards > 1
    plain, out = TensorFolder(tmp_path / "plain"), TensorFolder(tmp_path / "out")
    assert list(out.tensors) == list(plain.tensors)
    assert all(torch.equal(out.read(name), plain.read(name)) for name in plain.tensors)


def test_the_result_has_the_released_names_and_the_choices_made(
    tmp_path: Path, tiny_config: TinyConfig
) -> None:
    make_parent(tiny_config("moe", diffusion=False), tmp_path / "parent", dtype=torch.bfloat16)
    report = convert(
        tmp_path / "parent",
        tmp_path / "out",
        block_size=16,
        mask_token_id=60,
        expert_coreset_size=3,
        shift_logits=False,
    )

    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content["architectures"] == ["CloverMoeModelLM"]
    assert content["model_type"] == "clover_moe"
    assert content["dtype"] == "bfloat16"
    chosen = ("block_size", "mask_token_id", "expert_coreset_size", "shift_logits")
    assert [content[key] for key in chosen] == [16, 60, 3, False]
    assert read_config(tmp_path / "out") == report.config
    tensors = load_file(tmp_path / "out" / SINGLE_FILE)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    inspected = inspect_checkpoint(tmp_path / "out")
    assert report.num_parameters == inspected.num_parameters
    assert report.num_added_parameters == inspected.num_added_parameters == 2 * (64 * 3 + 3 * 4)
    assert report.num_bytes == inspected.num_bytes


def test_a_parent_keeps_the_dtype_of_each_tensor(tmp_path: Path, tiny_config: TinyConfig) -> None:
    parent = tmp_path / "parent"
    make_parent(tiny_config("moe", diffusion=False), parent, dtype=torch.bfloat16)
    tensors = load_file(parent / SINGLE_FILE)
    name = "model.layers.0.linear_attn.A_log"
    tensors[name] = tensors[name].float() + 1e-4  # not a bf16 number
    save_file(tensors, parent / SINGLE_FILE)
    convert(parent, tmp_path / "out", mask_token_id=63)

    found = load_file(tmp_path / "out" / SINGLE_FILE)
    assert found[name].dtype == torch.float32
    changed = {name for name in tensors if not torch.equal(found[name], tensors[name])}
    assert changed == {"model.embed_tokens.weight"}
    differs = found["model.embed_tokens.weight"] != tensors["model.embed_tokens.weight"]
    assert differs.any(dim=1).nonzero().flatten().tolist() == [63]


def test_the_added_tensors_start_as_the_design_says(
    tmp_path: Path, tiny_config: TinyConfig
) -> None:
    parent = tmp_path / "parent"
    make_parent(tiny_config("dense", diffusion=False), parent)
    tensors = load_file(parent / SINGLE_FILE)
    # exp(A_log) softplus(0) = 1 / memory: 100, 3.1, 2.9 and 0.1 tokens
    memory = torch.tensor([100.0, 3.1, 2.9, 0.1])
    tensors["model.layers.1.linear_attn.dt_bias"] = torch.zeros(4)
    tensors["model.layers.1.linear_attn.A_log"] = -(memory * torch.tensor(2.0).log()).log()
    tensors["model.layers.0.linear_attn.A_log"] = torch.full((4,), -9.0)
    save_file(tensors, parent / SINGLE_FILE)
    report = convert(parent, tmp_path / "out", mask_token_id=63)

    found = load_file(tmp_path / "out" / SINGLE_FILE)
    layers = [
        {n: found[f"model.layers.{i}.linear_attn.{n}"] for n in ADDED_TENSORS} for i in (0, 1)
    ]
    for layer in layers:
        assert torch.equal(layer["conv_right_weight"], torch.zeros(64, 3))
        assert torch.equal(layer["bd_softmax_logit_scale"], torch.full((4,), 9.0))
        assert torch.equal(layer["bd_softmax_history_c"], torch.zeros(4))
    assert layers[0]["bd_softmax_history_bias"].tolist() == [5.0] * 4
    assert layers[1]["bd_softmax_history_bias"].tolist() == [5.0, 5.0, 0.5, 0.5]
    assert report.num_forgetful_heads == 2
    found_memory = memory_in_tokens(
        tensors["model.layers.1.linear_attn.A_log"], torch.zeros(4, dtype=torch.bfloat16)
    )
    torch.testing.assert_close(found_memory, memory)


def test_the_mask_row_is_the_mean_of_real_rows_at_their_median_length(
    tmp_path: Path, tiny_config: TinyConfig
) -> None:
    tokenizer = Tokenizer.load(NANO)
    vocab_size = len(tokenizer) + 20  # padded rows, which must not count
    parent = tmp_path / "parent"
    make_parent(tiny_config("dense", diffusion=False, vocab_size=vocab_size), parent)
    tensors = load_file(parent / SINGLE_FILE)
    rows = tensors["model.embed_tokens.weight"]
    rows[: len(tokenizer)] += 0.1
    rows[len(tokenizer) :] = 1e6
    save_file(tensors, parent / SINGLE_FILE)
    shutil.copy(NANO / "tokenizer.json", parent)
    report = convert(parent, tmp_path / "out")

    assert report.config.diffusion is not None
    mask_token_id = report.config.diffusion.mask_token_id
    assert mask_token_id == tokenizer.mask_token_id
    real = torch.cat([rows[:mask_token_id], rows[mask_token_id + 1 : len(tokenizer)]])
    expected = real.mean(0) / real.mean(0).norm() * real.norm(dim=1).median()
    found = load_file(tmp_path / "out" / SINGLE_FILE)["model.embed_tokens.weight"]
    torch.testing.assert_close(found[mask_token_id], expected)
    others = torch.arange(vocab_size) != mask_token_id
    assert torch.equal(found[others], rows[others])


def test_the_mask_row_survives_bf16(tmp_path: Path, tiny_config: TinyConfig) -> None:
    parent = tmp_path / "parent"
    make_parent(tiny_config("dense", diffusion=False), parent, dtype=torch.bfloat16)
    convert(parent, tmp_path / "out", mask_token_id=63)

    rows = load_file(tmp_path / "out" / SINGLE_FILE)["model.embed_tokens.weight"].float()
    typical = rows[:63].norm(dim=1).median().item()
    assert rows[63].norm().item() == pytest.approx(typical, rel=BF16_NORM_TOLERANCE)


def test_with_tied_embeddings_only_the_masks_own_logit_changes(
    tmp_path: Path, tiny_config: TinyConfig
) -> None:
    parent = tmp_path / "parent"
    make_parent(tiny_config("dense", diffusion=False, tie_word_embeddings=True), parent)
    convert(parent, tmp_path / "out", mask_token_id=63)
    before, after = logits_of(parent), logits_of(tmp_path / "out")

    assert torch.equal(after[..., :63], before[..., :63])
    assert not torch.equal(after[..., 63], before[..., 63])


@pytest.mark.parametrize("chunk", [1, 3, 5, 100])
@pytest.mark.parametrize("offset", [0, 4, 9])
def test_replaced_bytes_do_not_depend_on_the_chunking(chunk: int, offset: int) -> None:
    data = bytes(range(12))
    chunks = [data[start : start + chunk] for start in range(0, len(data), chunk)]

    found = b"".join(replace_bytes(chunks, offset, memoryview(b"abc")))

    assert found == data[:offset] + b"abc" + data[offset + 3 :]


def test_without_a_mask_token_the_first_padded_row_is_taken(
    tmp_path: Path, tiny_config: TinyConfig
) -> None:
    parent = tmp_path / "parent"
    num_ids = write_tokenizer_without_mask(parent)
    make_parent_beside_tokenizer(
        tiny_config("dense", diffusion=False, vocab_size=num_ids + 3), parent
    )

    report = convert(parent, tmp_path / "out")

    assert report.config.diffusion is not None
    assert report.config.diffusion.mask_token_id == num_ids
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_a_vocabulary_without_room_for_a_mask_is_refused_with_what_to_do(
    tmp_path: Path, tiny_config: TinyConfig
) -> None:
    parent = tmp_path / "parent"
    num_ids = write_tokenizer_without_mask(parent)
    make_parent_beside_tokenizer(tiny_config("dense", diffusion=False, vocab_size=num_ids), parent)

    with pytest.raises(ConfigError, match=r"rows that are all in use\. Name a special token"):
        convert(parent, tmp_path / "out")
    with pytest.raises(ConfigError, match="of ordinary text; allowed: a special token"):
        convert(parent, tmp_path / "out", mask_token_id=40)
    with pytest.raises(ConfigError, match="which is also an eos_token_id"):
        convert(parent, tmp_path / "out", mask_token_id=1)
    assert convert(parent, tmp_path / "out", mask_token_id=2).num_shards == 1  # <|im_end|>


def write_tokenizer_without_mask(folder: Path) -> int:
    """Writes a byte-level tokenizer with three special tokens; returns its number of ids."""
    from tokenizers import Tokenizer as TokenizerFile
    from tokenizers import decoders, models, pre_tokenizers

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*specials, *alphabet])}
    file = TokenizerFile(models.BPE(vocab=vocab, merges=[]))
    file.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    file.decoder = decoders.ByteLevel()
    file.add_special_tokens(specials)
    folder.mkdir()
    file.save(str(folder / "tokenizer.json"))
    return len(vocab)


def make_parent_beside_tokenizer(config: ModelConfig, folder: Path) -> None:
    tokenizer = (folder / "tokenizer.json").read_bytes()
    shutil.rmtree(folder)
    make_parent(config, folder)
    (folder / "tokenizer.json").write_bytes(tokenizer)


def test_a_parent_without_a_tokenizer_needs_the_mask_id(
    tmp_path: Path, tiny_config: TinyConfig
) -> None:
    make_parent(tiny_config("moe", diffusion=False), tmp_path / "parent")

    with pytest.raises(ConfigError, match=r"expected a tokenizer\.json .*--mask-token-id"):
        convert(tmp_path / "parent", tmp_path / "out")
    with pytest.raises(ConfigError, match="mask_token_id is 64; allowed: 0 to 63"):
        convert(tmp_path / "parent", tmp_path / "out", mask_token_id=64)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(
    tmp_path: Path, tiny_config: TinyConfig
) -> None:
    make_parent(tiny_config("moe", diffusion=False), tmp_path / "parent")
    shutil.copy(NANO / "tokenizer.json", tmp_path / "parent")

    with pytest.raises(ConfigError, match="vocab_size: expected at least the tokenizer's"):
        convert(tmp_path / "parent", tmp_path / "out")


def test_a_clover_model_is_no_parent(tmp_path: Path, tiny_config: TinyConfig) -> None:
    make_parent(tiny_config("moe"), tmp_path / "clover")

    with pytest.raises(ConfigError, match="expected an autoregressive parent, found a Clover"):
        convert(tmp_path / "clover", tmp_path / "out")


def test_the_parent_is_never_overwritten(tmp_path: Path, tiny_config: TinyConfig) -> None:
    parent = tmp_path / "around" / "parent"
    make_parent(tiny_config("moe", diffusion=False), parent)

    for out in (parent, parent.parent):
        with pytest.raises(ConfigError, match="expected a folder apart from the parent"):
            convert(parent, out, mask_token_id=63, overwrite=True)
    assert load_model(parent).config.diffusion is None


def test_text_files_come_along(tmp_path: Path, tiny_config: TinyConfig) -> None:
    parent = tmp_path / "parent"
    make_parent(tiny_config("moe", diffusion=False), parent)
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (parent / name).write_text(f"{{}} {name}")
    (parent / "README.md").write_text("the parent's own card")
    convert(parent, tmp_path / "out", mask_token_id=63)

    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{} chat_template.jinja"
    assert (tmp_path / "out" / "generation_config.json").is_file()
    assert (tmp_path / "out" / "tokenizer_config.json").is_file()
    assert not (tmp_path / "out" / "README.md").exists()


def test_progress_is_told_after_each_tensor_up_to_the_end(
    tmp_path: Path, tiny_config: TinyConfig
) -> None:
    make_parent(tiny_config("moe", diffusion=False), tmp_path / "parent")
    told: list[tuple[str, int, int]] = []
    report = convert(
        tmp_path / "parent",
        tmp_path / "out",
        mask_token_id=63,
        progress=lambda *event: told.append(event),
    )

    assert [name for name, _, _ in told] == list(expected_tensors(report.config))
    assert [done for _, done, _ in told] == sorted({done for _, done, _ in told})
    assert told[-1][1] == told[-1][2] == report.num_bytes


@pytest.mark.parametrize("kind", ["moe", "dense"])
@pytest.mark.parametrize("nested", [True, False])
def test_a_folder_saved_by_transformers_gives_its_logits_after_conversion(
    tmp_path: Path, kind: str, nested: bool
) -> None:
    tokens = torch.arange(24).reshape(2, 12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs, about optional kernels
        reference = make_transformers_model(kind, nested).eval()
        reference.save_pretrained(tmp_path / "parent")
        with torch.no_grad():
            expected = reference(input_ids=tokens).logits
    report = convert(tmp_path / "parent", tmp_path / "out", mask_token_id=63)

    difference = (logits_of(tmp_path / "out") - expected).abs().max() / expected.std()
    assert difference.item() < REFERENCE_TOLERANCE
    assert (report.num_dropped_tensors > 0) == nested


def make_transformers_model(kind: str, nested: bool) -> Any:
    import transformers

    text = {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "vocab_size": 64,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "initializer_range": 0.3,
        **(
            {
                "moe_intermediate_size": 16,
                "shared_expert_intermediate_size": 16,
                "num_experts_per_tok": 2,
                "num_experts": 4,
            }
            if kind == "moe"
            else {"intermediate_size": 48}
        ),
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
    }
    torch.manual_seed(0)
    stem = "Qwen3_5Moe" if kind == "moe" else "Qwen3_5"
    if nested:
        config = getattr(transformers, f"{stem}Config")(text_config=text, vision_config=vision)
        return getattr(transformers, f"{stem}ForConditionalGeneration")(config)
    config = getattr(transformers, f"{stem}TextConfig")(**text)
    return getattr(transformers, f"{stem}ForCausalLM")(config)


class KillAt:
    """A progress callable that ends its own process the hard way after some tensors."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, name: str, done: int, total: int) -> None:
        self.count -= 1
        if self.count == 0:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def processes() -> BaseContext:
    """Processes that start at once, because they are forked from one that has imported all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["clover.checkpoint.load"])
    return context


def start_conversion(
    processes: BaseContext, parent: Path, out: Path, **options: Any
) -> BaseProcess:
    run = partial(convert, mask_token_id=63, overwrite=True, max_shard_bytes=300_000, **options)
    process = processes.Process(target=run, args=(parent, out))  # type: ignore[attr-defined]
    process.start()
    assert isinstance(process, BaseProcess)
    return process


def loads(folder: Path) -> bool:
    try:
        load_model(folder)
    except CloverError:
        return False
    return True


def make_larger_parent(tiny_config: TinyConfig, folder: Path) -> None:
    config = tiny_config("moe", diffusion=False, layer_types=("linear_attention",) * 12)
    make_parent(config, folder)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("count", [1, 7, 100, -1])
def test_a_conversion_killed_at_a_tensor_leaves_nothing_that_loads(
    tmp_path: Path, tiny_config: TinyConfig, processes: BaseContext, count: int
) -> None:
    make_larger_parent(tiny_config, tmp_path / "parent")
    num_tensors = len(expected_tensors(read_config(tmp_path / "parent")))
    kill = KillAt(num_tensors + 12 * len(ADDED_TENSORS) if count < 0 else count)
    process = start_conversion(processes, tmp_path / "parent", tmp_path / "out", progress=kill)
    process.join()

    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    (left,) = tmp_path.glob(".out.partial-*")
    assert not loads(left)

    convert(tmp_path / "parent", tmp_path / "out", mask_token_id=63)
    assert loads(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "parent"]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_conversion_killed_at_any_moment_leaves_nothing_or_everything(
    tmp_path: Path, tiny_config: TinyConfig, processes: BaseContext
) -> None:
    make_larger_parent(tiny_config, tmp_path / "parent")
    seconds = convert(tmp_path / "parent", tmp_path / "whole", mask_token_id=63).seconds
    expected = logits_of(tmp_path / "whole")
    moments = random.Random(0)
    killed_in_time = 0
    for _ in range(12):
        process = start_conversion(processes, tmp_path / "parent", tmp_path / "out")
        process.join(timeout=moments.uniform(0.0, 2.0) * seconds)
        process.kill()
        process.join()
        killed_in_time += process.exitcode == -signal.SIGKILL
        if (tmp_path / "out").exists():  # whole, because it was renamed into place
            assert torch.equal(logits_of(tmp_path / "out"), expected)
        assert not any(loads(left) for left in tmp_path.glob(".out.partial-*"))

    assert killed_in_time > 0
    convert(tmp_path / "parent", tmp_path / "out", mask_token_id=63, overwrite=True)
    assert torch.equal(logits_of(tmp_path / "out"), expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "parent", "whole"]


@pytest.mark.parametrize("when", [1, 30])
def test_an_interrupt_cleans_up_and_a_new_run_succeeds(
    tmp_path: Path, tiny_config: TinyConfig, when: int
) -> None:
    make_larger_parent(tiny_config, tmp_path / "parent")
    seen: list[str] = []

    def interrupt(name: str, done: int, total: int) -> None:
        seen.append(name)
        if len(seen) == when:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "parent", tmp_path / "out", mask_token_id=63, progress=interrupt)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["parent"]
    convert(tmp_path / "parent", tmp_path / "out", mask_token_id=63)
    assert loads(tmp_path / "out")


def test_a_damaged_parent_is_refused_before_anything_is_written(
    tmp_path: Path, tiny_config: TinyConfig
) -> None:
    make_parent(tiny_config("moe", diffusion=False), tmp_path / "parent")
    weights = tmp_path / "parent" / SINGLE_FILE
    weights.write_bytes(weights.read_bytes()[:-4])

    with pytest.raises(CheckpointError, match="truncated: 4 bytes are missing"):
        convert(tmp_path / "parent", tmp_path / "out", mask_token_id=63)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parent"]
