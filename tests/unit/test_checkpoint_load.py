"""A saved model comes back exactly; a folder that its config does not describe is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from clover.checkpoint.files import SINGLE_FILE
from clover.checkpoint.load import (
    GenerationDefaults,
    load_checkpoint,
    load_model,
    read_full_config,
    read_generation_defaults,
    resolve_checkpoint,
    save_model,
)
from clover.config import ModelConfig
from clover.errors import CheckpointError, ConfigError, TokenizerError
from clover.model.transformer import CloverForCausalLM

TinyConfig = Callable[..., ModelConfig]
NANO = Path(__file__).parents[2] / "clover" / "assets" / "nano"


def make_model(config: ModelConfig) -> CloverForCausalLM:
    model = CloverForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model


@pytest.fixture
def saved(tmp_path: Path, tiny_config: TinyConfig, seeded: torch.Generator) -> Path:
    """The folder of a small MoE Clover model in fp32."""
    save_model(make_model(tiny_config("moe")), tmp_path / "model")
    return tmp_path / "model"


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    change(tensors)
    save_file(tensors, folder / SINGLE_FILE)


@pytest.mark.parametrize("variant", ["moe", "dense"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("diffusion", [True, False])
def test_a_saved_model_comes_back_exactly(
    tmp_path: Path,
    tiny_config: TinyConfig,
    seeded: torch.Generator,
    variant: str,
    tied: bool,
    diffusion: bool,
) -> None:
    config = tiny_config(variant, tie_word_embeddings=tied, diffusion=diffusion)
    model = make_model(config)
    save_model(model, tmp_path / "out", max_shard_bytes=10_000)
    loaded = load_model(tmp_path / "out")

    assert loaded.config == config
    assert not loaded.training
    expected, found = dict(model.named_parameters()), dict(loaded.named_parameters())
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    tokens = torch.arange(10).reshape(2, 5)
    with torch.no_grad():
        assert torch.equal(loaded(tokens), model(tokens))


def test_tied_embeddings_are_one_tensor_after_loading(
    tmp_path: Path, tiny_config: TinyConfig
) -> None:
    save_model(make_model(tiny_config("moe", tie_word_embeddings=True)), tmp_path / "out")
    model = load_model(tmp_path / "out")

    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_dtype_on_disk_and_in_memory_are_chosen_apart(
    tmp_path: Path, tiny_config: TinyConfig
) -> None:
    model = make_model(tiny_config("moe"))
    save_model(model, tmp_path / "out", dtype=torch.bfloat16)

    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {t.dtype for t in load_file(tmp_path / "out" / SINGLE_FILE).values()} == {torch.bfloat16}
    assert {p.dtype for p in load_model(tmp_path / "out").parameters()} == {torch.float32}
    as_stored = load_model(tmp_path / "out", dtype="auto")
    assert {p.dtype for p in as_stored.parameters()} == {torch.bfloat16}
    assert torch.equal(as_stored.lm_head.weight, model.lm_head.weight.bfloat16())


def test_auto_takes_the_dtype_of_most_bytes_for_all(saved: Path) -> None:
    name = "model.layers.0.linear_attn.A_log"
    change_tensors(saved, lambda tensors: tensors.update({name: tensors[name].bfloat16()}))

    assert {p.dtype for p in load_model(saved, dtype="auto").parameters()} == {torch.float32}


def test_a_dtype_that_no_model_has_is_refused(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="dtype: expected one of bfloat16, float16, float32"):
        load_model(saved, dtype=torch.int8)


def test_a_loaded_model_can_be_trained(saved: Path) -> None:
    model = load_model(saved)
    model(torch.tensor([[1, 2, 3]])).sum().backward()

    assert model.lm_head.weight.grad is not None


BAD_TENSORS: list[tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = [
    (
        lambda tensors: tensors.pop("model.norm.weight"),
        r"expected a tensor model\.norm\.weight, found none",
    ),
    (
        lambda tensors: tensors.update({"model.layers.9.extra": torch.zeros(2, 3)}),
        r"model\.layers\.9\.extra: expected no such tensor.*found one of shape \[2, 3\]",
    ),
    (
        lambda tensors: tensors.update({"lm_head.weight": torch.zeros(65, 32)}),
        r"lm_head\.weight: shape: expected \[64, 32\], found \[65, 32\]",
    ),
    (
        lambda tensors: tensors.update({"lm_head.weight": torch.zeros(64, 32, dtype=torch.int8)}),
        r"lm_head\.weight: dtype: expected one of bfloat16, float16, float32, found int8",
    ),
    (
        lambda tensors: tensors.update(
            {"lm_head.weight": torch.zeros(64, 32).to(torch.float8_e4m3fn)}
        ),
        r"lm_head\.weight: dtype: .*found float8_e4m3fn\. Use the unquantized checkpoint",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD_TENSORS)
def test_a_tensor_that_is_not_the_models_is_named_with_expected_and_found(
    saved: Path, change: Callable[[dict[str, torch.Tensor]], Any], message: str
) -> None:
    change_tensors(saved, change)

    with pytest.raises(CheckpointError, match=message):
        load_model(saved)


def test_an_output_matrix_beside_tied_embeddings_is_refused(
    tmp_path: Path, tiny_config: TinyConfig
) -> None:
    save_model(make_model(tiny_config("dense")), tmp_path / "out")
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(
        json.dumps(content | {"tie_word_embeddings": True})
    )

    with pytest.raises(CheckpointError, match=r"lm_head\.weight: expected no such tensor"):
        load_model(tmp_path / "out")


def test_a_configuration_without_weights_does_not_load(saved: Path) -> None:
    (saved / SINGLE_FILE).unlink()

    with pytest.raises(CheckpointError, match="found neither"):
        load_model(saved)


def write_generation_config(folder: Path, **values: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps(values))


def test_end_tokens_of_both_files_count(saved: Path) -> None:
    write_generation_config(saved, eos_token_id=[5, 1], bos_token_id=2)

    assert read_full_config(saved).eos_token_ids == (1, 5)
    assert load_model(saved).config.eos_token_ids == (1, 5)

    write_generation_config(saved, eos_token_id=7)
    assert read_full_config(saved).eos_token_ids == (1, 7)


def test_generation_defaults_are_those_of_the_file_or_unsaid(saved: Path) -> None:
    assert read_generation_defaults(saved) == GenerationDefaults()

    write_generation_config(saved, do_sample=True, temperature=0.6, top_k=20, pad_token_id=3)

    expected = GenerationDefaults(do_sample=True, temperature=0.6, top_k=20)
    assert read_generation_defaults(saved) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": "hot"}, "temperature: expected a number, found 'hot'"),
        ({"top_k": True}, "top_k: expected a number, found True"),
        ({"do_sample": 1}, "do_sample: expected true or false, found 1"),
    ],
)
def test_a_generation_default_of_the_wrong_kind_is_named(
    saved: Path, values: dict[str, Any], message: str
) -> None:
    write_generation_config(saved, **values)

    with pytest.raises(ConfigError, match=message):
        read_generation_defaults(saved)


@pytest.mark.parametrize(("text", "message"), [("{", "JSON object"), ("[]", "found list")])
def test_a_damaged_generation_config_is_a_clear_error(saved: Path, text: str, message: str) -> None:
    (saved / "generation_config.json").write_text(text)

    with pytest.raises(ConfigError, match=message):
        load_model(saved)


def test_an_end_token_of_the_wrong_kind_or_range_is_refused(saved: Path) -> None:
    write_generation_config(saved, eos_token_id="<|im_end|>")
    with pytest.raises(ConfigError, match="eos_token_id: expected integers"):
        load_model(saved)

    write_generation_config(saved, eos_token_id=64)
    with pytest.raises(ConfigError, match="eos_token_id is 64; allowed: 0 to 63"):
        load_model(saved)


def test_a_whole_checkpoint_has_its_text_side_too(tmp_path: Path, tiny_config: TinyConfig) -> None:
    shutil.copy(NANO / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    write_generation_config(tmp_path, temperature=0.5, eos_token_id=9)
    save_model(make_model(tiny_config("moe")), tmp_path / "out", files_from=tmp_path)

    loaded = load_checkpoint(tmp_path / "out")

    assert loaded.tokenizer.decode(loaded.tokenizer.encode("clover")) == "clover"
    assert loaded.template.source == "{{ messages[0].content }}!"
    assert loaded.generation.temperature == 0.5
    assert loaded.eos_token_ids == loaded.config.eos_token_ids == (1, 9)
    assert loaded.folder == tmp_path / "out"


def test_a_checkpoint_without_a_tokenizer_loads_as_a_model_only(saved: Path) -> None:
    assert load_model(saved).config.vocab_size == 64
    with pytest.raises(TokenizerError):
        load_checkpoint(saved)


def test_bundled_models_have_names_and_other_models_have_paths(tmp_path: Path) -> None:
    assert resolve_checkpoint("clover-nano") == NANO
    assert resolve_checkpoint(str(tmp_path)) == tmp_path
    with pytest.raises(CheckpointError, match="or one of clover-nano, clover-nano-parent"):
        resolve_checkpoint("clover-giant")


def test_a_pickle_is_refused_before_anything_else_is_looked_for(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "model.pt")

    with pytest.raises(CheckpointError, match="found a pickle"):
        resolve_checkpoint(tmp_path / "model.pt")
