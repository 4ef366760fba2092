"""Reading safetensors: equal to the reference package on good files, a clear error on bad ones."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from clover.checkpoint.files import INDEX_FILE, SINGLE_FILE, TensorFolder, has_weights
from clover.errors import CheckpointError

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "c": torch.tensor(7, dtype=torch.int64),
    "d": torch.empty(0, 5, dtype=torch.float16),
    "e": torch.tensor([True, False]),
}


def write_sharded(folder: Path) -> None:
    """Two shards and their index: a and b, then c."""
    save_file({name: TENSORS[name] for name in "ab"}, folder / "model-1.safetensors")
    save_file({"c": TENSORS["c"]}, folder / "model-2.safetensors")
    shards = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    write_index(folder, shards)


def write_index(folder: Path, shards: dict[str, str]) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": shards}))


def test_tensors_of_every_dtype_and_shape_are_read_as_the_reference_package_wrote_them(
    tmp_path: Path,
) -> None:
    save_file(TENSORS, tmp_path / SINGLE_FILE)
    folder = TensorFolder(tmp_path)

    assert set(folder.tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        found = folder.read(name)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor)


def test_sharded_tensors_are_found_through_the_index(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    folder = TensorFolder(tmp_path)

    assert folder.read("c").item() == 7
    assert torch.equal(folder.read("b"), TENSORS["b"])
    assert "d" not in folder


def test_rows_and_chunks_are_parts_of_the_tensor(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / SINGLE_FILE)
    folder = TensorFolder(tmp_path)

    assert torch.equal(folder.read_rows("a", 1, 3), TENSORS["a"][1:3])
    assert folder.read_rows("a", 2, 2).shape == (0, 4)
    chunks = list(folder.chunks("a", chunk_bytes=7))
    assert max(map(len, chunks)) == 7
    assert b"".join(chunks) == TENSORS["a"].numpy().tobytes()


def test_a_tensor_that_was_read_can_be_changed_without_touching_the_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / SINGLE_FILE)
    folder = TensorFolder(tmp_path)

    folder.read("a").zero_()

    assert torch.equal(folder.read("a"), TENSORS["a"])


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / SINGLE_FILE)

    with pytest.raises(CheckpointError, match="expected a tensor z, found none"):
        TensorFolder(tmp_path).read("z")


@pytest.mark.parametrize("kept", [0, 5, 8, 40, -1])
def test_a_truncated_file_is_refused_at_opening(tmp_path: Path, kept: int) -> None:
    save_file(TENSORS, tmp_path / SINGLE_FILE)
    content = (tmp_path / SINGLE_FILE).read_bytes()
    (tmp_path / SINGLE_FILE).write_bytes(content[:kept])

    with pytest.raises(CheckpointError, match=r"truncated|safetensors header"):
        TensorFolder(tmp_path)


def test_a_file_that_shrinks_after_opening_is_refused_at_reading(tmp_path: Path) -> None:
    save_file({"a": TENSORS["a"]}, tmp_path / SINGLE_FILE)
    folder = TensorFolder(tmp_path)
    content = (tmp_path / SINGLE_FILE).read_bytes()
    (tmp_path / SINGLE_FILE).write_bytes(content[:-8])

    with pytest.raises(CheckpointError, match="truncated: 8 bytes are missing"):
        folder.read("a")
    with pytest.raises(CheckpointError, match="truncated: 8 bytes are missing"):
        list(folder.chunks("a"))


def test_bytes_after_the_last_tensor_are_refused(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / SINGLE_FILE)
    with (tmp_path / SINGLE_FILE).open("ab") as stream:
        stream.write(b"more")

    with pytest.raises(CheckpointError, match="4 bytes after the last tensor"):
        TensorFolder(tmp_path)


def raw_file(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (raw_file(b"{not json"), "safetensors header, found JSONDecodeError"),
        (raw_file(b"[1]"), "safetensors header"),
        (raw_file(b'{"a": 1}'), "safetensors header"),
        (raw_file(b'{"a": {"dtype": "F32", "shape": [2]}}'), "KeyError"),
        (struct.pack("<Q", 2**62), "a header of"),
        (
            raw_file(b'{"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}', b"x"),
            "tensor a: dtype: expected one of F64.*found F4",
        ),
        (
            raw_file(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', b"xxxx"),
            "tensor a of 8 bytes at offsets 0, 4",
        ),
        (
            raw_file(b'{"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, -1]}}'),
            r"shape \[-1\]",
        ),
        (
            raw_file(b'{"a": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}}', b"xxxx"),
            "tensor a at byte",
        ),
    ],
)
def test_a_damaged_header_is_named(tmp_path: Path, content: bytes, found: str) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(content)

    with pytest.raises(CheckpointError, match=found):
        TensorFolder(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()

    with pytest.raises(CheckpointError, match=r"names the shard model-2\.safetensors, found no"):
        TensorFolder(tmp_path)


def test_an_index_that_names_an_absent_tensor_is_refused(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    index = json.loads((tmp_path / INDEX_FILE).read_text())["weight_map"]
    write_index(tmp_path, index | {"ghost": "model-1.safetensors"})

    with pytest.raises(CheckpointError, match=r"tensor ghost is in model-1.*found no such tensor"):
        TensorFolder(tmp_path)


def test_an_index_that_names_the_wrong_shard_is_refused(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    index = json.loads((tmp_path / INDEX_FILE).read_text())["weight_map"]
    write_index(tmp_path, index | {"a": "model-2.safetensors"})

    with pytest.raises(CheckpointError, match=r"tensor a is in model-2\S+ it is in model-1"):
        TensorFolder(tmp_path)


def test_a_tensor_that_the_index_does_not_name_is_refused(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    index = json.loads((tmp_path / INDEX_FILE).read_text())["weight_map"]
    del index["b"]
    write_index(tmp_path, index)

    with pytest.raises(CheckpointError, match=r"holds tensor b, which .* does not name"):
        TensorFolder(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    save_file({"c": TENSORS["c"], "a": TENSORS["a"]}, tmp_path / "model-2.safetensors")

    with pytest.raises(CheckpointError, match=r"tensor a is also in model-1\.safetensors"):
        TensorFolder(tmp_path)


@pytest.mark.parametrize("content", ["{", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_no_index_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX_FILE).write_text(content)

    with pytest.raises(CheckpointError, match="expected a weight_map"):
        TensorFolder(tmp_path)


def test_an_index_cannot_reach_outside_its_folder(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / SINGLE_FILE)
    inner = tmp_path / "inner"
    inner.mkdir()
    write_index(inner, dict.fromkeys(TENSORS, f"../{SINGLE_FILE}"))

    with pytest.raises(CheckpointError, match="expected file names of this folder"):
        TensorFolder(inner)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "weights.ckpt"])
@pytest.mark.parametrize("point_at", ["folder", "file"])
def test_a_pickle_is_refused_with_what_to_do(tmp_path: Path, name: str, point_at: str) -> None:
    torch.save({"a": TENSORS["a"]}, tmp_path / name)
    path = tmp_path if point_at == "folder" else tmp_path / name

    with pytest.raises(CheckpointError, match=r"found a pickle.*Get the safetensors files"):
        TensorFolder(path)


def test_a_folder_without_weights_and_no_folder_at_all_are_clear_errors(tmp_path: Path) -> None:
    assert not has_weights(tmp_path)
    with pytest.raises(CheckpointError, match=f"expected {SINGLE_FILE} or {INDEX_FILE}"):
        TensorFolder(tmp_path)
    with pytest.raises(CheckpointError, match="expected a checkpoint folder, found none"):
        TensorFolder(tmp_path / "absent")


@pytest.mark.parametrize(
    "write",
    [
        write_sharded,
        lambda folder: save_file(TENSORS, folder / SINGLE_FILE),
        lambda folder: (folder / "model-00001-of-00002.safetensors").touch(),
        lambda folder: (folder / "pytorch_model.bin").touch(),
    ],
)
def test_weights_are_noticed_even_when_they_are_damaged(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    write(tmp_path)

    assert has_weights(tmp_path)
