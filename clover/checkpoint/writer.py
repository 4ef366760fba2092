"""Writing a checkpoint folder as a stream, complete or absent.

Everything is written beside the final name and renamed into place at the end.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

import torch

from clover.checkpoint.files import (
    DTYPE_NAMES,
    INDEX_FILE,
    PARTIAL_MARK,
    SINGLE_FILE,
    TensorSpec,
)
from clover.errors import CheckpointError

DEFAULT_SHARD_BYTES: Final = 4 * 2**30
_REPLACED_MARK: Final = ".replaced"


def plan_shards(specs: Iterable[TensorSpec], max_shard_bytes: int) -> list[list[TensorSpec]]:
    """Returns the tensors in order, cut into shards of at most that many bytes of data.

    A tensor larger than the limit gets a shard of its own.
    """
    shards: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        if not shards or spec.num_bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(spec)
        room -= spec.num_bytes
    return shards


def _encode_header(specs: Sequence[TensorSpec]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        entries[spec.name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.num_bytes],
        }
        offset += spec.num_bytes
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # aligned data is faster to map for other readers
    return struct.pack("<Q", len(raw)) + raw


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns a CPU view of a tensor's bytes in row-major order."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


class FolderWriter:
    """Writes a checkpoint folder that is complete or not there at all.

    Inside the `with` block everything goes to a folder beside the target, whose name loaders
    refuse. Leaving the block renames it into place; an exception, Ctrl-C included, removes it.
    What a killed run left is removed by the next writer of the same target. POSIX only.
    """

    def __init__(self, target: Path, *, overwrite: bool = False) -> None:
        """Checks the target before any work is done.

        Raises:
            CheckpointError: the target has content, and `overwrite` is false or the content is
                more than a checkpoint.
        """
        self.target = Path(os.path.abspath(target))
        if self.target.exists() and not self.target.is_dir():
            raise CheckpointError(f"{self.target}: expected a folder to write, found a file.")
        if self.target.is_dir() and any(self.target.iterdir()):
            _check_replaceable(self.target, overwrite)
        self.num_bytes = 0
        self.num_shards = 0

    def __enter__(self) -> Self:
        parent = self.target.parent
        parent.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        prefix = f".{self.target.name}{PARTIAL_MARK}"
        self.folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self.folder.chmod(0o755)  # mkdtemp's 0700 would stay with the finished folder
        self._lock = os.open(self.folder, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # released by the system however the process ends
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)

    def write_tensors(
        self,
        specs: Sequence[TensorSpec],
        chunks: Iterable[Iterable[bytes | memoryview]],
        *,
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    ) -> None:
        """Writes the tensors' bytes, as `chunks` yields them in the order of `specs`."""
        if max_shard_bytes <= 0:
            raise CheckpointError(f"max_shard_bytes is {max_shard_bytes}; allowed: above 0.")
        shards = plan_shards(specs, max_shard_bytes)
        sources = iter(chunks)
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            name = SINGLE_FILE
            if len(shards) > 1:
                name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            with self._open(name) as stream:
                stream.write(_encode_header(shard))
                for spec in shard:
                    _write_tensor(stream, spec, next(sources))
                    weight_map[spec.name] = name
        self.num_shards = len(shards)
        self.num_bytes = sum(spec.num_bytes for spec in specs)
        if len(shards) > 1:
            content = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
            self.write_json(INDEX_FILE, content)

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Writes a JSON object."""
        with self._open(name) as stream:
            stream.write((json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())

    def copy_files(self, source: Path, names: Iterable[str]) -> list[str]:
        """Copies those of the files that exist, and returns their names."""
        found = [name for name in names if (Path(source) / name).is_file()]
        for name in found:
            with self._open(name) as stream:
                stream.write((Path(source) / name).read_bytes())
        return found

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[BinaryIO]:
        with (self.folder / name).open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())  # before the rename, or a power cut could keep only the name

    def _publish(self) -> None:
        _sync_folder(self.folder)
        replaced = self._replaced_path()
        if self.target.is_dir() and any(self.target.iterdir()):
            os.rename(self.target, replaced)
        os.replace(self.folder, self.target)
        _sync_folder(self.target.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    def _replaced_path(self) -> Path:
        return self.target.parent / f".{self.target.name}{_REPLACED_MARK}"

    def _remove_leftovers(self) -> None:
        replaced = self._replaced_path()
        if replaced.is_dir() and not self.target.exists():
            os.rename(replaced, self.target)  # killed between the two renames of an overwrite
        shutil.rmtree(replaced, ignore_errors=True)
        prefix = f".{self.target.name}{PARTIAL_MARK}"
        for folder in self.target.parent.iterdir():
            if folder.name.startswith(prefix) and not _is_locked(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _check_replaceable(target: Path, overwrite: bool) -> None:
    if not overwrite:
        raise CheckpointError(
            f"{target}: expected no folder or an empty one, found files in it. "
            "Choose another folder, or ask to overwrite (--force)."
        )
    inner = next((entry for entry in sorted(target.iterdir()) if entry.is_dir()), None)
    if inner is not None or not (target / "config.json").is_file():
        found = f"the folder {inner.name} in it" if inner else "no config.json in it"
        raise CheckpointError(
            f"{target}: expected a checkpoint folder to overwrite, found {found}. "
            "Choose another folder; this one would be deleted whole."
        )


def _write_tensor(stream: BinaryIO, spec: TensorSpec, chunks: Iterable[bytes | memoryview]) -> None:
    written = 0
    for chunk in chunks:
        stream.write(chunk)
        written += len(chunk)
    if written != spec.num_bytes:
        raise CheckpointError(
            f"tensor {spec.name}: expected {spec.num_bytes} bytes to write, found {written}."
        )


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_locked(folder: Path) -> bool:
    """Whether a running process is still writing a partial folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
