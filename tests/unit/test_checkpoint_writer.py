"""Writing a folder: others can read it, it is whole or absent, foreign files stay."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from clover.checkpoint.files import INDEX_FILE, SINGLE_FILE, TensorFolder, TensorSpec
from clover.checkpoint.writer import FolderWriter, plan_shards, tensor_bytes
from clover.errors import CheckpointError

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4).t(),
    "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "c": torch.ones(20, dtype=torch.float16),
    "d": torch.tensor(3.0),
}
SPECS = [TensorSpec(name=n, dtype=t.dtype, shape=tuple(t.shape)) for n, t in TENSORS.items()]


def write(target: Path, *, overwrite: bool = False, max_shard_bytes: int = 2**20) -> None:
    with FolderWriter(target, overwrite=overwrite) as writer:
        chunks = ([tensor_bytes(tensor)] for tensor in TENSORS.values())
        writer.write_tensors(SPECS, chunks, max_shard_bytes=max_shard_bytes)
        writer.write_json("config.json", {"name": "é"})


def write_until(target: Path, error: type[BaseException], *, overwrite: bool = False) -> None:
    """Writes one file and is then interrupted."""
    with FolderWriter(target, overwrite=overwrite) as writer:
        writer.write_json("config.json", {})
        assert entries(writer.folder) == ["config.json"]
        raise error


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_one_shard_is_a_single_file_that_the_reference_package_reads(tmp_path: Path) -> None:
    write(tmp_path / "out")

    assert entries(tmp_path) == ["out"]
    assert entries(tmp_path / "out") == ["config.json", SINGLE_FILE]
    found = load_file(tmp_path / "out" / SINGLE_FILE)
    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype


def test_shards_keep_to_their_size_and_the_index_names_each_tensor(tmp_path: Path) -> None:
    write(tmp_path / "out", max_shard_bytes=50)

    shards = [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    assert entries(tmp_path / "out") == ["config.json", *shards, INDEX_FILE]
    index = json.loads((tmp_path / "out" / INDEX_FILE).read_text())
    assert index["metadata"] == {"total_size": 96}
    assert index["weight_map"] == {"a": shards[0], "b": shards[1], "c": shards[1], "d": shards[1]}
    assert torch.equal(load_file(tmp_path / "out" / shards[1])["c"], TENSORS["c"])
    assert torch.equal(TensorFolder(tmp_path / "out").read("a"), TENSORS["a"])


@given(sizes=st.lists(st.integers(0, 30), max_size=12), limit=st.integers(1, 40))
def test_a_plan_keeps_the_order_and_overfills_no_shard(sizes: list[int], limit: int) -> None:
    specs = [
        TensorSpec(name=str(index), dtype=torch.uint8, shape=(size,))
        for index, size in enumerate(sizes)
    ]
    shards = plan_shards(specs, limit)

    assert [spec for shard in shards for spec in shard] == specs
    for shard in shards:
        assert shard
        assert len(shard) == 1 or sum(spec.num_bytes for spec in shard) <= limit


def test_a_tensor_of_the_wrong_length_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match="tensor a: expected 48 bytes to write, found 3"),
        FolderWriter(tmp_path / "out") as writer,
    ):
        writer.write_tensors(SPECS[:1], [[b"xxx"]])

    assert entries(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error):
        write_until(tmp_path / "deep" / "out", error)

    assert entries(tmp_path / "deep") == []


def test_an_interrupted_overwrite_leaves_the_old_folder(tmp_path: Path) -> None:
    write(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        write_until(tmp_path / "out", KeyboardInterrupt, overwrite=True)

    assert entries(tmp_path) == ["out"]
    assert torch.equal(TensorFolder(tmp_path / "out").read("d"), TENSORS["d"])


def test_a_folder_with_files_is_replaced_only_when_asked(tmp_path: Path) -> None:
    write(tmp_path / "out", max_shard_bytes=50)
    with pytest.raises(CheckpointError, match=r"found files in it.*--force"):
        FolderWriter(tmp_path / "out")

    write(tmp_path / "out", overwrite=True)

    assert entries(tmp_path) == ["out"]
    assert entries(tmp_path / "out") == ["config.json", SINGLE_FILE]


def test_an_empty_folder_is_filled_without_asking(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write(tmp_path / "out")

    assert entries(tmp_path / "out") == ["config.json", SINGLE_FILE]


def test_a_folder_that_is_more_than_a_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"found no config\.json in it"):
        FolderWriter(tmp_path, overwrite=True)

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "thesis").mkdir()
    with pytest.raises(CheckpointError, match="found the folder thesis in it"):
        FolderWriter(tmp_path, overwrite=True)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(CheckpointError, match="expected a folder to write, found a file"):
        FolderWriter(tmp_path / "out", overwrite=True)


def test_what_a_killed_run_left_is_not_loaded_and_is_removed_by_the_next(tmp_path: Path) -> None:
    write(tmp_path / "out")
    left = tmp_path / ".out.partial-killed"
    (tmp_path / "out").rename(left)
    other = tmp_path / ".out2.partial-killed"
    other.mkdir()

    with pytest.raises(CheckpointError, match="what an interrupted run left"):
        TensorFolder(left)
    write(tmp_path / "out")

    assert entries(tmp_path) == [other.name, "out"]


def test_the_folder_of_a_run_that_still_works_is_left_alone(tmp_path: Path) -> None:
    working = tmp_path / ".out.partial-working"
    working.mkdir()
    lock = os.open(working, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    write(tmp_path / "out")
    os.close(lock)

    assert entries(tmp_path) == [working.name, "out"]


def test_a_run_killed_between_the_two_renames_of_an_overwrite_is_repaired(tmp_path: Path) -> None:
    write(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / ".out.replaced")

    with pytest.raises(KeyboardInterrupt):
        write_until(tmp_path / "out", KeyboardInterrupt, overwrite=True)

    assert entries(tmp_path) == ["out"]
    assert entries(tmp_path / "out") == ["config.json", SINGLE_FILE]


def test_only_the_files_that_exist_are_copied(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with FolderWriter(tmp_path / "out") as writer:
        copied = writer.copy_files(tmp_path, ["tokenizer.json", "chat_template.jinja"])

    assert copied == entries(tmp_path / "out") == ["tokenizer.json"]


def test_the_finished_folder_can_be_read_by_others(tmp_path: Path) -> None:
    write(tmp_path / "out")

    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755
