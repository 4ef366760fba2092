"""Sharded safetensors on disk, read lazily.

Tensors are read as byte ranges with plain file calls, never through a memory map, so that memory
holds at most what the caller asked for, whatever the size of the model.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from clover.errors import CheckpointError

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
CHUNK_BYTES: Final = 16 * 2**20

_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES: Final[Mapping[torch.dtype, str]] = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES: Final = 100_000_000  # the format's own limit
_PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
PARTIAL_MARK: Final = ".partial-"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """A tensor's name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Where a tensor's bytes lie: row-major, little-endian, from `offset` of `file`."""

    spec: TensorSpec
    file: Path
    offset: int


class TensorFolder:
    """The tensors of a checkpoint folder. Opening reads headers only."""

    def __init__(self, folder: Path) -> None:
        """Reads and checks the index and every shard's header.

        Raises:
            CheckpointError: no safetensors, or one that is missing, truncated or damaged, or an
                index that disagrees with its shards.
        """
        self.folder = Path(folder)
        _refuse_partial(self.folder)
        self.files = _find_shards(self.folder)
        self.tensors: dict[str, StoredTensor] = {}
        for file in self.files:
            for stored in read_header(file):
                if stored.spec.name in self.tensors:
                    other = self.tensors[stored.spec.name].file.name
                    raise CheckpointError(
                        f"{file}: tensor {stored.spec.name} is also in {other}; "
                        "expected each tensor once."
                    )
                self.tensors[stored.spec.name] = stored
        _check_index(self.folder, self.tensors)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> StoredTensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(
                f"{self.folder}: expected a tensor {name}, found none of that name."
            ) from None

    def read(self, name: str) -> torch.Tensor:
        """Returns a whole tensor in memory of its own, on the CPU, in its stored dtype."""
        stored = self[name]
        return _read_tensor(stored.file, stored.offset, stored.spec)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Returns rows `start` to `stop` of a tensor's first dimension."""
        stored = self[name]
        row_shape, dtype = stored.spec.shape[1:], stored.spec.dtype
        offset = stored.offset + start * math.prod(row_shape) * dtype.itemsize
        spec = TensorSpec(name=name, dtype=dtype, shape=(stop - start, *row_shape))
        return _read_tensor(stored.file, offset, spec)

    def chunks(self, name: str, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Yields a tensor's bytes in order, at most `chunk_bytes` at a time."""
        stored = self[name]
        remaining = stored.spec.num_bytes
        with stored.file.open("rb", buffering=0) as stream:
            stream.seek(stored.offset)
            while remaining:
                chunk = stream.read(min(chunk_bytes, remaining))
                if not chunk:
                    raise _truncated(stored.file, remaining)
                remaining -= len(chunk)
                yield chunk


def _read_tensor(file: Path, offset: int, spec: TensorSpec) -> torch.Tensor:
    flat = torch.empty(spec.num_bytes, dtype=torch.uint8)
    view = flat.numpy().data
    with file.open("rb", buffering=0) as stream:
        stream.seek(offset)
        filled = 0
        while filled < len(view):
            count = stream.readinto(view[filled:])
            if not count:
                raise _truncated(file, len(view) - filled)
            filled += count
    return flat.view(spec.dtype).reshape(spec.shape)


def _truncated(file: Path, missing: int) -> CheckpointError:
    return CheckpointError(
        f"{file}: truncated: {missing} bytes are missing at its end. Download or convert it again."
    )


def _refuse_partial(folder: Path) -> None:
    if PARTIAL_MARK in folder.name and folder.name.startswith("."):
        raise CheckpointError(
            f"{folder}: expected a finished checkpoint, found what an interrupted run left. "
            "Run the conversion again; it removes this folder."
        )


def _find_shards(folder: Path) -> list[Path]:
    """Returns the shard files of a folder, in order."""
    refuse_pickle(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a checkpoint folder, found none.")
    if (folder / INDEX_FILE).is_file():
        names = sorted(set(read_index(folder).values()))
        for name in names:
            if not (folder / name).is_file():
                raise CheckpointError(
                    f"{folder}: {INDEX_FILE} names the shard {name}, found no such file. "
                    "Download or convert it again."
                )
        return [folder / name for name in names]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    for file in sorted(folder.iterdir()):
        refuse_pickle(file)
    raise CheckpointError(f"{folder}: expected {SINGLE_FILE} or {INDEX_FILE}, found neither.")


def refuse_pickle(file: Path) -> None:
    """Stops at a file that is named like a pickle.

    Raises:
        CheckpointError: it is, with what to do.
    """
    if file.suffix in _PICKLE_SUFFIXES and file.is_file():
        raise CheckpointError(
            f"{file}: expected safetensors, found a pickle, which can run any code when it is "
            "loaded. Get the safetensors files of this model, or have its author save them."
        )


def has_weights(folder: Path) -> bool:
    """Whether a folder holds files that claim to be weights, readable or not."""
    folder = Path(folder)
    if (folder / INDEX_FILE).exists() or (folder / SINGLE_FILE).exists():
        return True
    suffixes = {".safetensors", *_PICKLE_SUFFIXES}
    return any(file.suffix in suffixes for file in folder.iterdir())


def read_index(folder: Path) -> dict[str, str]:
    """Returns the index's map from tensor name to shard file name.

    Raises:
        CheckpointError: the index is not what the format says.
    """
    path = folder / INDEX_FILE
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError("no map from tensor names to file names")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected a weight_map, found: {error!r}.") from error
    for name in weight_map.values():
        if Path(name).name != name:
            raise CheckpointError(f"{path}: expected file names of this folder, found {name!r}.")
    return dict(weight_map)


def _check_index(folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
    if not (folder / INDEX_FILE).is_file():
        return
    weight_map = read_index(folder)
    for name, shard in weight_map.items():
        found = tensors[name].file.name if name in tensors else None
        if found != shard:
            where = f"it is in {found}" if found else "found no such tensor there"
            raise CheckpointError(
                f"{folder}: {INDEX_FILE} says that tensor {name} is in {shard}; {where}."
            )
    for name, stored in tensors.items():
        if name not in weight_map:
            raise CheckpointError(
                f"{stored.file}: holds tensor {name}, which {INDEX_FILE} does not name."
            )


def read_header(file: Path) -> list[StoredTensor]:
    """Returns the tensors that a safetensors file declares, in the order of their bytes.

    Raises:
        CheckpointError: the header is damaged, or the file is shorter or longer than it says.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 0 < length <= _MAX_HEADER_BYTES:
            raise _damaged(file, f"a header of {length} bytes in a file of {size}")
        if 8 + length > size:
            raise _truncated(file, 8 + length - size)
        raw = stream.read(length)
    try:
        entries = json.loads(raw)
        entries.pop("__metadata__", None)
        stored = [_parse_entry(file, 8 + length, *item) for item in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(file, repr(error)) from error
    return _check_layout(file, sorted(stored, key=lambda item: item.offset), 8 + length, size)


def _damaged(file: Path, found: str) -> CheckpointError:
    return CheckpointError(f"{file}: expected a safetensors header, found {found}.")


def _parse_entry(file: Path, start: int, name: str, entry: Mapping[str, Any]) -> StoredTensor:
    dtype_name, shape = entry["dtype"], entry["shape"]
    begin, end = entry["data_offsets"]
    if dtype_name not in _DTYPES:
        raise CheckpointError(
            f"{file}: tensor {name}: dtype: expected one of {', '.join(_DTYPES)}, "
            f"found {dtype_name}."
        )
    if not all(isinstance(item, int) and item >= 0 for item in (*shape, begin, end)):
        raise ValueError(f"tensor {name} with shape {shape} and offsets {begin}, {end}")
    spec = TensorSpec(name=name, dtype=_DTYPES[dtype_name], shape=tuple(shape))
    if end - begin != spec.num_bytes:
        raise ValueError(f"tensor {name} of {spec.num_bytes} bytes at offsets {begin}, {end}")
    return StoredTensor(spec=spec, file=file, offset=start + begin)


def _check_layout(
    file: Path, stored: list[StoredTensor], start: int, size: int
) -> list[StoredTensor]:
    position = start
    for item in stored:
        if item.offset != position:
            raise _damaged(file, f"tensor {item.spec.name} at byte {item.offset}, not {position}")
        position += item.spec.num_bytes
    if position > size:
        raise _truncated(file, position - size)
    if position < size:
        raise _damaged(file, f"{size - position} bytes after the last tensor")
    return stored
