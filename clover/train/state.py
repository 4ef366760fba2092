"""A training run on disk: one safetensors file with the numbers, JSON in its header.

One file, written beside its place and then renamed: a kill at any moment leaves the old one whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from clover.errors import TrainingError

STATE_FILE = "training_state.safetensors"
_FORMAT = "clover-training-state-1"


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
    path, temporary = folder / STATE_FILE, folder / f".{STATE_FILE}.{os.getpid()}"
    tensors = {f"model/{name}": tensor.contiguous() for name, tensor in state.model.items()}
    tensors |= {f"optimizer/{name}": value.contiguous() for name, value in state.optimizer.items()}
    tensors |= {f"average/{name}": value.contiguous() for name, value in state.average.items()}
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
        raise TrainingError(f"nothing to resume: no {STATE_FILE} in {folder}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"{path} is damaged ({error}): start the run anew") from error
    if metadata.get("format") != _FORMAT:
        raise TrainingError(f"{path}: expected format {_FORMAT}, found {metadata.get('format')}")
    return SavedState(
        model=_strip(tensors, "model/"),
        optimizer=_strip(tensors, "optimizer/"),
        average=_strip(tensors, "average/"),
        progress=json.loads(metadata["progress"]),
    )


def _strip(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
