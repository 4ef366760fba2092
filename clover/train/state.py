"""A training run on disk: the numbers, and how far it has come.

A model that one process holds whole is one safetensors file with JSON in its header, written beside
its place and then renamed. A sharded one is a folder a step in the format of
`torch.distributed.checkpoint`, into which every process writes its slices; the file that makes it
readable comes last, and only then does the older folder go. A kill at any moment leaves one whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from clover.errors import TrainingError, TrainingInputError
from clover.train import parallel

STATE_FILE = "training_state.safetensors"
SHARDED_FOLDER = "training_state"
_FORMAT = "clover-training-state-1"
_SHARDED_INDEX = ".metadata"  # torch.distributed.checkpoint writes it last
_PROGRESS_FILE = "progress.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedState:
    """Tensors of model and optimizers, and everything else as JSON values.

    `average` is the weights' moving average, empty for a run without one.
    """

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    progress: Mapping[str, Any]
    average: Mapping[str, Tensor] = field(default_factory=dict)


def save_state(folder: Path, state: SavedState) -> Path:
    """Writes the state into a folder, in place of an older one, and returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(f".{STATE_FILE}.*"):  # of a run that was killed while saving
        leftover.unlink()
    path, temporary = folder / STATE_FILE, folder / f".{STATE_FILE}.{os.getpid()}"
    tensors = {name: tensor.contiguous() for name, tensor in _join(state).items()}
    metadata = {"format": _FORMAT, "progress": json.dumps(dict(state.progress))}
    try:
        save_file(tensors, temporary, metadata=metadata)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def load_state(folder: Path) -> SavedState:
    """Reads the state of a folder.

    Raises:
        TrainingError: There is none, or it is damaged.
    """
    path = folder / STATE_FILE
    if not path.is_file():
        raise TrainingInputError(f"nothing to resume: no {STATE_FILE} in {folder}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"{path} is damaged ({error}): start the run anew") from error
    if metadata.get("format") != _FORMAT:
        raise TrainingError(f"{path}: expected format {_FORMAT}, found {metadata.get('format')}")
    return _split(tensors, json.loads(metadata["progress"]))


def save_sharded_state(folder: Path, state: SavedState) -> Path:
    """Writes the state of a sharded model, in place of an older one, and returns its folder.

    Every process must call this.
    """
    path = folder / SHARDED_FOLDER / f"step-{state.progress['step']:08d}"
    if parallel.rank() == 0:
        shutil.rmtree(path, ignore_errors=True)  # what a killed run left unfinished
        path.mkdir(parents=True)
        (path / _PROGRESS_FILE).write_text(json.dumps(dict(state.progress)))
    parallel.wait_for_all()
    save(_join(state), checkpoint_id=path)
    if parallel.rank() == 0:
        for other in path.parent.iterdir():
            if other != path:
                shutil.rmtree(other)
    return path


def load_sharded_state(folder: Path, parameters: Mapping[str, Tensor]) -> SavedState:
    """Reads the newest state of a sharded model, split as `parameters` are.

    Every process must call this. There may be more or fewer of them than when it was written.

    Raises:
        TrainingError: There is none.
    """
    path = _newest_sharded(folder)
    if path is None:
        raise TrainingError(
            f"nothing to resume: no finished state in {folder / SHARDED_FOLDER} (a run keeps the "
            "parallelism that it began with)"
        )
    tensors: dict[str, Tensor] = {}
    for key, item in FileSystemReader(path).read_metadata().state_dict_metadata.items():
        assert isinstance(item, TensorStorageMetadata), key
        parameter = parameters.get(key.partition("/")[2].partition(":")[0])
        if parameter is not None and parameter.shape == item.size:
            tensors[key] = torch.zeros_like(parameter, dtype=item.properties.dtype)
        else:  # a step counter
            tensors[key] = torch.zeros(item.size, dtype=item.properties.dtype)
    load(tensors, checkpoint_id=path)
    return _split(tensors, json.loads((path / _PROGRESS_FILE).read_text()))


def has_state(folder: Path) -> bool:
    """Whether a folder holds a run that can be resumed."""
    return (folder / STATE_FILE).is_file() or _newest_sharded(folder) is not None


def _newest_sharded(folder: Path) -> Path | None:
    """Returns the finished state of the highest step."""
    paths = (folder / SHARDED_FOLDER).glob(f"step-*/{_SHARDED_INDEX}")
    return max((path.parent for path in paths), default=None)


def _join(state: SavedState) -> dict[str, Tensor]:
    tensors = {f"model/{name}": tensor for name, tensor in state.model.items()}
    tensors |= {f"optimizer/{name}": tensor for name, tensor in state.optimizer.items()}
    return tensors | {f"average/{name}": tensor for name, tensor in state.average.items()}


def _split(tensors: Mapping[str, Tensor], progress: Mapping[str, Any]) -> SavedState:
    return SavedState(
        model=_strip(tensors, "model/"),
        optimizer=_strip(tensors, "optimizer/"),
        average=_strip(tensors, "average/"),
        progress=progress,
    )


def _strip(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
