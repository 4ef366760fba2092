"""A folder's tensors by our names, checked against its configuration before any is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch

from clover.checkpoint.files import CHUNK_BYTES, StoredTensor, TensorFolder, TensorSpec
from clover.checkpoint.names import (
    expected_tensors,
    find_layout,
    source_names,
    source_shape,
    target_name,
)
from clover.config import ModelConfig
from clover.errors import CheckpointError

LOADABLE_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a dtype's name as `config.json` writes it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


class ModelTensors:
    """The tensors of a model, of any layout, with nothing missing, extra or misshapen.

    Attributes:
        specs: What each tensor of ours is, in the order of the model.
        dropped: Names of the checkpoint's tensors that Clover does not use.
    """

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        """Opens the folder and checks every header entry.

        Raises:
            CheckpointError: a file is damaged, or a tensor is missing, extra, or of a wrong shape
                or dtype.
        """
        self._files = TensorFolder(folder)
        self._layout = find_layout(self._files.tensors)
        self.specs: dict[str, TensorSpec] = {}
        self._sources: dict[str, tuple[StoredTensor, ...]] = {}
        for name, expected in expected_tensors(config).items():
            sources = source_names(name, config, self._layout)
            shape = source_shape(name, expected.shape, self._layout)
            stored = tuple(self._find(source, shape) for source in sources)
            dtypes = {item.spec.dtype for item in stored}
            if len(dtypes) > 1:
                found = " and ".join(sorted(map(dtype_name, dtypes)))
                raise CheckpointError(
                    f"{folder}: {sources[0]} and the other experts: expected one dtype, "
                    f"found {found}."
                )
            self._sources[name] = stored
            self.specs[name] = TensorSpec(name=name, dtype=dtypes.pop(), shape=expected.shape)
        self.dropped = tuple(name for name in self._files.tensors if target_name(name) is None)
        self._refuse_extra()

    def _find(self, source: str, shape: tuple[int, ...]) -> StoredTensor:
        stored = self._files[source]
        where = f"{stored.file}: tensor {source}"
        if stored.spec.shape != shape:
            raise CheckpointError(
                f"{where}: shape: expected {list(shape)}, found {list(stored.spec.shape)}."
            )
        if stored.spec.dtype not in LOADABLE_DTYPES:
            allowed = ", ".join(map(dtype_name, LOADABLE_DTYPES))
            raise CheckpointError(
                f"{where}: dtype: expected one of {allowed}, "
                f"found {dtype_name(stored.spec.dtype)}. Use the unquantized checkpoint."
            )
        return stored

    def _refuse_extra(self) -> None:
        used = {stored.spec.name for sources in self._sources.values() for stored in sources}
        for name, stored in self._files.tensors.items():
            if name not in used and name not in self.dropped:
                raise CheckpointError(
                    f"{stored.file}: tensor {name}: expected no such tensor for the model that "
                    f"config.json describes, found one of shape {list(stored.spec.shape)}."
                )

    @property
    def main_dtype(self) -> torch.dtype:
        """The dtype that holds most of the bytes."""
        counts: Counter[torch.dtype] = Counter()
        for spec in self.specs.values():
            counts[spec.dtype] += spec.num_bytes
        return counts.most_common(1)[0][0]

    def read(self, name: str) -> torch.Tensor:
        """Returns a tensor of ours, on the CPU, in its stored dtype."""
        sources, spec = self._sources[name], self.specs[name]
        if len(sources) == 1:
            return self._files.read(sources[0].spec.name)
        slices = torch.empty((len(sources), *sources[0].spec.shape), dtype=spec.dtype)
        for index, source in enumerate(sources):
            slices[index] = self._files.read(source.spec.name)
        return slices.reshape(spec.shape)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Returns rows of a tensor that every layout stores whole."""
        (source,) = self._sources[name]
        return self._files.read_rows(source.spec.name, start, stop)

    def chunks(self, name: str, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Yields the bytes of a tensor of ours in order, at most `chunk_bytes` at a time."""
        for source in self._sources[name]:
            yield from self._files.chunks(source.spec.name, chunk_bytes)
