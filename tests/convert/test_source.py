"""A checkpoint directory is whole as its index says, or refused in one line."""

import json

import pytest

from convert.hf_source import read_directory
from ddtree_jax.errors import CheckpointError, DDTreeError, UnsupportedFormatError
from tests.convert.support import INDEX, Raw, write_checkpoint, write_file

TENSORS = {f"t.{i}": Raw("I32", (1,), bytes([i, 0, 0, 0])) for i in range(6)}
SECOND = "model-00002-of-00003.safetensors"


@pytest.fixture
def directory(tmp_path):
    return write_checkpoint(tmp_path / "src", TENSORS, {})


def refused(directory, match: str, kind: type[DDTreeError] = CheckpointError) -> None:
    with pytest.raises(kind, match=match) as info:
        read_directory(directory)
    assert "\n" not in str(info.value)


def edit_index(directory, **changes: str | None) -> None:
    path = directory / INDEX
    index = json.loads(path.read_text())
    for name, file in changes.items():
        index["weight_map"][name.replace("_", ".")] = file
    path.write_text(json.dumps(index))


def test_whole(directory):
    stored = read_directory(directory)
    assert stored.tensors.keys() == TENSORS.keys()
    assert len(stored.files) == 3


def test_without_index(directory):
    (directory / INDEX).unlink()
    assert read_directory(directory).tensors.keys() == TENSORS.keys()


def test_missing_shard(directory):
    (directory / SECOND).unlink()
    refused(directory, f"{SECOND} is missing; {INDEX} names it")


def test_shard_that_the_index_does_not_name(directory):
    write_file(directory / "more.safetensors", {"x": TENSORS["t.0"]})
    refused(directory, "more.safetensors is not named by")


@pytest.mark.parametrize(
    "file",
    ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", "x.bin",
     "a\\b.safetensors", "a\0.safetensors", None],
)  # fmt: skip
def test_index_that_points_elsewhere(directory, file):
    edit_index(directory, t_0=file)
    refused(directory, "t.0 is said to be in .*; expected the name of a .safetensors")


def test_tensor_in_the_index_only(directory):
    edit_index(directory, t_9=SECOND)
    refused(directory, f"t.9 is not in {SECOND}")


def test_tensor_said_to_be_in_another_shard(directory):
    edit_index(directory, t_0=SECOND)
    refused(directory, f"t.0 is not in {SECOND}")


def test_tensor_in_a_file_only(directory):
    write_file(directory / SECOND, {**TENSORS, "x": TENSORS["t.0"]})
    (directory / INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(TENSORS, SECOND)})
    )
    for other in ("model-00001-of-00003", "model-00003-of-00003"):
        (directory / f"{other}.safetensors").unlink()
    refused(directory, "x is not named by")


def test_tensor_in_two_shards(directory):
    write_file(directory / SECOND, {"t.2": TENSORS["t.2"], "t.0": TENSORS["t.0"]})
    refused(directory, f"t.0 is in model-00001.* and in .*{SECOND}; expected it once")


def test_index_that_repeats_a_tensor(directory):
    path = directory / INDEX
    path.write_text(path.read_text().replace('"t.1"', '"t.0"'))
    refused(directory, "t.0 stands twice", DDTreeError)


@pytest.mark.parametrize(
    ("file", "match"),
    [
        ("model.gguf", "unsupported format GGUF"),
        ("model-rank-0-part-0.safetensors", "unsupported format SGLang sharded_state"),
        ("model-00000-common.safetensor", "unsupported format SGLang presharded"),
        ("pytorch_model.bin", "pickled weights are never read"),
    ],
)
def test_other_containers(tmp_path, file, match):
    (tmp_path / file).write_bytes(b"")
    refused(tmp_path, match, UnsupportedFormatError)


def test_nothing_there(tmp_path):
    refused(tmp_path, "has no .safetensors file")
    refused(tmp_path / "absent", "is not a directory")
