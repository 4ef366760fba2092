"""A drafter's folder: config.json and model.safetensors."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clover.checkpoint.files import TensorFolder, TensorSpec
from clover.checkpoint.writer import FolderWriter, tensor_bytes
from clover.errors import CheckpointError, ConfigError
from clover.eval.dflash.model import Drafter, DrafterConfig

MODEL_TYPE = "clover_dflash"


def save_drafter(
    drafter: Drafter, folder: Path, *, dtype: torch.dtype = torch.bfloat16, overwrite: bool = False
) -> None:
    """Writes a drafter to a folder that appears whole or not at all.

    Raises:
        CheckpointError: `folder` is taken.
    """
    parameters = dict(drafter.named_parameters())
    specs = [
        TensorSpec(name=name, dtype=dtype, shape=tuple(weight.shape))
        for name, weight in parameters.items()
    ]
    with FolderWriter(folder, overwrite=overwrite) as writer:
        chunks = ([tensor_bytes(parameters[spec.name].to(dtype))] for spec in specs)
        writer.write_tensors(specs, chunks)
        values = dataclasses.asdict(drafter.config)
        writer.write_json("config.json", {"model_type": MODEL_TYPE, **values})


def load_drafter(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Drafter:
    """Returns the drafter of a folder.

    Raises:
        ConfigError: config.json is not a drafter's.
        CheckpointError: Its tensors are not those of the configuration.
    """
    config, tensors = _read_config(folder / "config.json"), TensorFolder(folder)
    with torch.device("meta"):
        drafter = Drafter(config)
    shapes = {name: tuple(weight.shape) for name, weight in drafter.named_parameters()}
    found = {name: stored.spec.shape for name, stored in tensors.tensors.items()}
    if shapes != found:
        differing = sorted(dict(shapes.items() ^ found.items()))
        raise CheckpointError(
            f"{folder}: expected the tensors that config.json implies, found a difference in "
            f"{differing[:3]}; train the drafter anew"
        )
    for name in shapes:
        owner, _, leaf = name.rpartition(".")
        weight = nn.Parameter(tensors.read(name).to(device=device, dtype=dtype))
        setattr(drafter.get_submodule(owner), leaf, weight)
    return drafter.eval()


def _read_config(path: Path) -> DrafterConfig:
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        model_type = values.pop("model_type", None)
        if model_type != MODEL_TYPE:
            raise ConfigError(
                f"{path}: expected model_type {MODEL_TYPE!r}, found {model_type!r}: is this a "
                "drafter's folder?"
            )
        values["feature_layers"] = tuple(values["feature_layers"])
        return DrafterConfig(**values)
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: expected a drafter's configuration, found: {error}") from error
