"""A canonical checkpoint, read back, is the source bit for bit and name for name."""

import json
import shutil

import numpy as np
import pytest

from convert.checkpoint import Checkpoint
from convert.detect import open_checkpoint, open_draft
from convert.ours_source import open_ours
from convert.stream import read_pieces
from convert.tensor import read_array
from ddtree_jax.errors import CheckpointError
from tests.convert.command import run
from tests.convert.support import (
    TINY_DRAFT,
    Raw,
    raw,
    read_checkpoint,
    renamed,
    write_checkpoint,
)

LM = "language_model.model."


def content(checkpoint: Checkpoint) -> dict[str, Raw]:
    """Reads every tensor in pieces; a piece may begin within a row."""
    data = dict.fromkeys(checkpoint.tensors, b"")
    for piece in read_pieces(checkpoint.tensors.values()):
        data[piece.tensor.name] += piece.data.tobytes()
    return {
        name: Raw(t.dtype, t.shape, data[name])
        for name, t in checkpoint.tensors.items()
    }


def assert_same(got: dict[str, Raw], expected: dict[str, Raw]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name] == tensor, name


@pytest.mark.parametrize("piece_bytes", [16 * 2**20, 1000])
def test_target(monkeypatch, converted, tensors, piece_bytes):
    monkeypatch.setattr("convert.stream.PIECE_BYTES", piece_bytes)
    assert_same(content(open_checkpoint(converted)), tensors)


def test_draft(converted):
    draft = open_draft(converted)
    assert draft is not None and not draft.is_target
    assert_same(content(draft), read_checkpoint(TINY_DRAFT))
    assert open_draft(converted / "draft") is None


@pytest.fixture
def back(capsys, tmp_path, config):
    """Converts tensors and reads the result."""

    def convert(tensors: dict[str, Raw]) -> dict[str, Raw]:
        source = write_checkpoint(tmp_path / "src", tensors, config)
        code, _, err = run(capsys, "hf", source, tmp_path / "dst")
        assert code == 0, err
        return content(open_ours(tmp_path / "dst"))

    return convert


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("model.", "lm_head."),
        ("model.language_model.", "lm_head."),
        ("model.language_model.", "model.lm_head."),
        ("language_model.", "lm_head."),
    ],
)
def test_prefix_of_the_source(back, tensors, text, head):
    moved = {
        f"model.{n}" if n.startswith(("vision_tower", "mm_projector")) else n: t
        for n, t in renamed(tensors, text=text, head=head).items()
    }
    assert_same(back(moved), moved)


@pytest.mark.parametrize("dtype", [np.int64, None])
def test_weight_shape_as_it_was(back, tensors, dtype):
    def change(name: str, tensor: Raw) -> Raw | None:
        if not name.endswith(".weight_shape"):
            return tensor
        return dtype and raw(tensor.array().astype(dtype))

    changed = {n: change(n, t) for n, t in tensors.items()}
    expected = {n: t for n, t in changed.items() if t is not None}
    assert_same(back(expected), expected)


def test_image_tensors_of_any_shape(back, tensors):
    odd = {
        "vision_tower.number": Raw("F32", (), b"\0\0\xc0\x7f"),  # not a number
        "vision_tower.bytes": Raw("U8", (3, 1, 5), bytes(range(15))),
        "vision_tower.wide": raw(np.arange(6, dtype=np.int64).reshape(1, 6)),
    }
    assert_same(back(tensors | odd), tensors | odd)


def test_any_rows(converted, tensors):
    """Heads in one axis, in columns, of two arrays, and columns of split chunks."""
    view = open_checkpoint(converted).tensors
    for last in (
        "self_attn.q_b_proj.weight",
        "self_attn.o_proj.weight",
        "self_attn.kv_b_proj.weight",
        "mlp.experts.5.down_proj.weight_packed",
        "mlp.experts.5.up_proj.weight_scale",
    ):
        name = f"{LM}layers.2.{last}"
        expected = tensors[name].array()
        for start in (0, 1, 33, len(expected) - 1):
            for stop in (start + 1, min(start + 70, len(expected)), len(expected)):
                got = view[name].rows(start, stop)
                assert got.tobytes() == expected[start:stop].tobytes(), (name, start)


@pytest.fixture
def copy(converted, tmp_path):
    """A checkpoint to spoil."""
    return shutil.copytree(converted, tmp_path / "copy")


def refused(directory, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as info:
        open_ours(directory)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    "chunk",
    [
        "params/moe.experts.gate.packed/c/1/0/3/0",
        "extra/mm_projector.pre_norm.bias/c/0",
    ],
)
def test_chunks_are_looked_at_first(copy, chunk):
    whole = (copy / chunk).read_bytes()
    (copy / chunk).write_bytes(whole[:-1])
    refused(copy, f"{chunk} has {len(whole) - 1} bytes; expected {len(whole)}")
    (copy / chunk).unlink()
    refused(copy, f"{chunk} is missing; the manifest names it")


def test_chunk_that_changes_after_opening(copy):
    tensor = open_ours(copy).tensors[f"{LM}layers.2.mlp.experts.0.up_proj.weight_scale"]
    chunk = copy / "params/moe.experts.up.scale/c/1/0/0/0"
    chunk.write_bytes(chunk.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match=r"up\.scale/c/1/0/0/0 has \d+ bytes"):
        read_array(tensor)
    chunk.unlink()
    with pytest.raises(CheckpointError, match=r"up\.scale/c/1/0/0/0 is missing"):
        read_array(tensor)


def edit(path, change) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda m: m["tensors"]["moe/router"].update(source="x"),
            "moe/router has the source 'x'; expected 'language_model.model.layers.{1..",
        ),
        (lambda m: m.update(weight_shape_dtype="F32"), "weight_shape_dtype is 'F32'"),
        (lambda m: m.pop("weight_shape_dtype"), "weight_shape_dtype is missing"),
        (lambda m: m.update(extra=[]), "extra is missing; expected an object"),
        (lambda m: m.update(source="x"), "source is missing; expected an object"),
        (lambda m: m["extra"].update({"../x": {}}), "extra names '../x'"),
        (lambda m: m["files"].update({"../x": {}}), "files names '../x'; expected a"),
        (lambda m: m["files"].update({"tokenizer.json": 3}), "files names 'tokenizer"),
        (lambda m: m["files"].update({"tokenizer.json": {}}), "tokenizer.json is miss"),
        (lambda m: m.update(kind="draft"), "kind 'draft'; expected 'target'"),
        (
            lambda m: m["tensors"]["norm"].update(chunk=[0]),
            r"norm has the chunk \[0\]; expected a divisor of",
        ),
        (
            lambda m: m["tensors"]["norm"].update(chunk=[64, 2]),
            r"norm has the chunk \[64, 2\]; expected a divisor of",
        ),
    ],
)
def test_manifest_that_does_not_fit(copy, change, match):
    edit(copy / "manifest.json", change)
    refused(copy, match)
