"""Folder to ready model and back: strict about names and shapes, never two copies in memory."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import nn

from clover.chat import ChatTemplate
from clover.checkpoint.convert import COPIED_FILES
from clover.checkpoint.files import TensorSpec, refuse_pickle
from clover.checkpoint.names import expected_tensors
from clover.checkpoint.source import LOADABLE_DTYPES, ModelTensors, dtype_name
from clover.checkpoint.writer import DEFAULT_SHARD_BYTES, FolderWriter, tensor_bytes
from clover.config import ModelConfig, config_to_dict, read_config
from clover.errors import CheckpointError, ConfigError
from clover.model.transformer import CloverForCausalLM
from clover.tokenizer import Tokenizer

BUNDLED: Final[Mapping[str, str]] = {
    "clover-nano": "assets/nano",
    "clover-nano-parent": "assets/nano/parent",
}

_GENERATION_CONFIG: Final = "generation_config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDefaults:
    """The sampling that a model's authors recommend. None: they say nothing about it."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedCheckpoint:
    """All that answers a chat: the model, its text side and its authors' defaults."""

    folder: Path
    model: CloverForCausalLM
    tokenizer: Tokenizer
    template: ChatTemplate
    generation: GenerationDefaults

    @property
    def config(self) -> ModelConfig:
        """The model's configuration; its `eos_token_ids` include those of generation_config."""
        return self.model.config

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text."""
        return self.config.eos_token_ids


def resolve_checkpoint(name: str | Path) -> Path:
    """Returns the folder of a bundled model ("clover-nano", "clover-nano-parent") or of a path.

    Raises:
        CheckpointError: there is no such folder, or it is a pickle.
    """
    bundled = BUNDLED.get(str(name))
    package = Path(str(importlib.resources.files("clover")))
    folder = Path(name) if bundled is None else package / bundled
    refuse_pickle(folder)
    if not folder.exists():
        raise CheckpointError(
            f"{folder}: expected a checkpoint folder or one of {', '.join(BUNDLED)}, "
            "found no such folder."
        )
    return folder


def load_checkpoint(
    folder: Path,
    *,
    dtype: torch.dtype | Literal["auto"] = torch.float32,
    device: torch.device | str = "cpu",
) -> LoadedCheckpoint:
    """Returns a folder's model with its tokenizer, chat template and generation defaults.

    Raises:
        ConfigError, CheckpointError, TokenizerError, TemplateError: a part is damaged or missing.
    """
    folder = Path(folder)
    return LoadedCheckpoint(
        folder=folder,
        tokenizer=Tokenizer.load(folder),  # the cheap parts first: their errors come at once
        template=ChatTemplate.load(folder),
        generation=read_generation_defaults(folder),
        model=load_model(folder, dtype=dtype, device=device),
    )


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype | Literal["auto"] = torch.float32,
    device: torch.device | str = "cpu",
) -> CloverForCausalLM:
    """Returns the model of a Clover folder, or of a parent's in any of its layouts, to evaluate.

    Args:
        folder: Holds config.json and safetensors.
        dtype: Of all weights; "auto" takes the dtype that holds most bytes of the checkpoint.
        device: Where each tensor goes as soon as it is read.

    Raises:
        ConfigError: The configuration is not understood.
        CheckpointError: A file is damaged, or its tensors are not those of the configuration.
    """
    folder = Path(folder)
    config = read_full_config(folder)
    source = ModelTensors(folder, config)
    target = source.main_dtype if dtype == "auto" else dtype
    if target not in LOADABLE_DTYPES:
        allowed = ", ".join(map(dtype_name, LOADABLE_DTYPES))
        raise CheckpointError(f"dtype: expected one of {allowed}, found {target}.")
    with torch.device("meta"):
        model = CloverForCausalLM(config)
    for name in source.specs:
        _set_parameter(model, name, source.read(name).to(device=device, dtype=target))
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return model.eval()


def _set_parameter(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor))


def read_full_config(folder: Path) -> ModelConfig:
    """Returns a folder's configuration, with the end tokens of its generation_config.json too.

    Qwen's config.json names one end token of the two that its chats use.
    """
    config = read_config(folder)
    values = _read_generation_config(folder)
    found = values.get("eos_token_id")
    extra = found if isinstance(found, list) else [] if found is None else [found]
    if any(isinstance(item, bool) or not isinstance(item, int) for item in extra):
        raise ConfigError(
            f"{folder / _GENERATION_CONFIG}: eos_token_id: expected integers, found {found!r}."
        )
    return dataclasses.replace(
        config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *extra)))
    )


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    """Returns the sampling fields of a folder's generation_config.json, if it has one."""
    values = _read_generation_config(folder)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(GenerationDefaults):
        value = values.get(field.name)
        is_flag = field.name == "do_sample"
        if value is not None:
            if isinstance(value, bool) is not is_flag or not isinstance(value, int | float):
                raise ConfigError(
                    f"{folder / _GENERATION_CONFIG}: {field.name}: expected "
                    f"{'true or false' if is_flag else 'a number'}, found {value!r}."
                )
            found[field.name] = value
    return GenerationDefaults(**found)


def _read_generation_config(folder: Path) -> dict[str, Any]:
    path = folder / _GENERATION_CONFIG
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: expected a JSON object, found: {error}.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(content).__name__}.")
    return content


def save_model(
    model: CloverForCausalLM,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    files_from: Path | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    gather: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
) -> None:
    """Writes a model to a folder that appears whole or not at all.

    Args:
        model: Of either kind, on any device.
        folder: To write.
        dtype: Of all tensors on disk; None keeps each as it is in memory.
        files_from: A folder whose tokenizer, chat template and generation_config are copied.
        max_shard_bytes: Of tensor data in one file.
        overwrite: Replace a checkpoint that is already there.
        gather: Puts a parameter together that is split over processes.

    Raises:
        CheckpointError: `folder` is taken.
    """
    config = model.config
    parameters = dict(model.named_parameters())
    specs = [
        TensorSpec(name=name, dtype=dtype or parameters[name].dtype, shape=expected.shape)
        for name, expected in expected_tensors(config).items()
    ]
    main_dtype = dtype or model.dtype
    with FolderWriter(folder, overwrite=overwrite) as writer:
        chunks = _stream(specs, parameters, gather)
        writer.write_tensors(specs, chunks, max_shard_bytes=max_shard_bytes)
        if files_from is not None:
            writer.copy_files(files_from, COPIED_FILES)
        writer.write_json("config.json", config_to_dict(config) | {"dtype": dtype_name(main_dtype)})


def _stream(
    specs: Iterable[TensorSpec],
    parameters: Mapping[str, torch.Tensor],
    gather: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[list[memoryview]]:
    for spec in specs:
        yield [tensor_bytes(gather(parameters[spec.name].detach()).to(spec.dtype))]
