"""`verify` finds every difference there can be, names it, and finds no other."""

import json
import os
import shutil
from collections import Counter

import numpy as np
import pytest

from tests.convert.command import refused, run
from tests.convert.support import (
    TINY,
    TINY_DRAFT,
    Raw,
    raw,
    read_checkpoint,
    renamed,
    write_checkpoint,
)

LM = "language_model.model."
SCALE = f"{LM}layers.3.mlp.experts.7.down_proj.weight_scale"


def same(capsys, *directories) -> str:
    code, out, _ = run(capsys, "verify", *directories)
    assert code == 0 and out.splitlines()[-1] == "equal" and "!" not in out, out
    return out


def different(capsys, *directories) -> list[str]:
    """Returns the lines that tell a difference."""
    code, out, _ = run(capsys, "verify", *directories)
    assert code == 1 and out.splitlines()[-1] == "different", out
    return [line for line in out.splitlines() if "! " in line]


def flipped(tensor: Raw, bit: int) -> Raw:
    data = bytearray(tensor.data)
    data[bit // 8] ^= 1 << bit % 8
    return Raw(tensor.dtype, tensor.shape, bytes(data))


@pytest.fixture
def written(tmp_path, config):
    """Writes a Hugging Face checkpoint."""
    return lambda tensors: write_checkpoint(tmp_path / "hf", tensors, config)


def test_equal(capsys, converted, tensors):
    total = sum(len(t.data) for t in tensors.values())
    out = same(capsys, converted, TINY)
    assert f"{len(tensors)} tensors, {total} bytes compared" in out
    assert "72 arrays" in out and "5 files hashed" in out
    assert f"{converted / 'draft'} not compared: only one of the two" in out
    assert f"{len(tensors)} tensors, {total} bytes" in same(capsys, TINY, converted)


@pytest.mark.parametrize("ours_first", [True, False])
def test_our_arrays_are_read_once(capsys, monkeypatch, converted, ours_first):
    """For the comparison and for the manifest's hashes together."""
    read, counted = os.preadv, Counter()

    def counting(descriptor, buffers, at):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        got = read(descriptor, buffers, at)
        counted["ours" if path.startswith(str(converted)) else "theirs"] += got
        return got

    monkeypatch.setattr(os, "preadv", counting)
    pair = (converted, TINY) if ours_first else (TINY, converted)
    same(capsys, *pair)
    manifest = json.loads((converted / "manifest.json").read_text())
    assert counted["ours"] == manifest["total_bytes"]


def test_what_is_not_compared_is_hashed(capsys, written, converted, copy, tensors):
    """Arrays of which the other checkpoint has only some tensors, or none."""
    few = {n: t for n, t in tensors.items() if "vision_tower" not in n}
    few |= {
        SCALE: raw(np.zeros((1, *tensors[SCALE].shape), tensors[SCALE].array().dtype))
    }
    (line,) = different(capsys, converted, written(few))[:1]
    assert "shape or dtype" in line
    for chunk in ("extra/vision_tower.patch_embed.proj.bias/c/0",
                  "params/moe.experts.down.scale/c/2/0/0/4"):  # fmt: skip
        data = bytearray((copy / chunk).read_bytes())
        data[0] ^= 1
        (copy / chunk).write_bytes(data)
    line = different(capsys, copy, written(few))[0]
    assert "! 2 arrays not as the manifest says: moe/experts/down/scale" in line


def test_drafters(capsys, tmp_path, converted):
    draft = read_checkpoint(TINY_DRAFT)
    out = same(capsys, converted / "draft", TINY_DRAFT)
    assert f"{len(draft)} tensors" in out
    out = same(capsys, converted, converted)
    assert f"draft: {converted / 'draft'}" in out
    other = shutil.copytree(TINY, tmp_path / "other")
    config = json.loads((TINY_DRAFT / "config.json").read_text())
    draft["norm.weight"] = flipped(draft["norm.weight"], 5)
    write_checkpoint(other / "draft", draft, config, shards=1)
    (line,) = different(capsys, converted, other)
    assert line.startswith(
        "draft: ! 1 tensors of different bytes: norm.weight (BLAKE3 "
    )


@pytest.mark.parametrize(
    "name",
    [
        SCALE,
        f"{LM}layers.0.self_attn.kv_b_proj.weight",
        f"{LM}layers.2.mlp.experts.0.gate_proj.weight_packed",
        f"{LM}layers.2.mlp.experts.0.gate_proj.weight_shape",
        "vision_tower.patch_embed.proj.weight",
        "language_model.lm_head.weight",
    ],
)
@pytest.mark.parametrize("bit", [0, -1])
def test_one_bit(capsys, written, converted, tensors, name, bit):
    bad = flipped(tensors[name], bit % (8 * len(tensors[name].data)))
    (line,) = different(capsys, written(tensors | {name: bad}), converted)
    assert line.startswith(f"! 1 tensors of different bytes: {name} (BLAKE3 ")


def test_many_differences_are_counted(capsys, written, converted, tensors):
    bad = {n: flipped(t, 9) for n, t in tensors.items() if ".1.mlp.experts.3." in n}
    (line,) = different(capsys, converted, written(tensors | bad))
    assert line.startswith("! 9 tensors of different bytes: ")
    assert line.count("BLAKE3") == 5 and line.endswith(", … 4 more")


def test_missing_extra_and_of_another_shape(capsys, written, converted, tensors):
    gone = "vision_tower.patch_embed.proj.bias"
    other = {n: t for n, t in tensors.items() if n != gone}
    other["vision_tower.more"] = raw(np.ones(3, np.float32))
    bias = tensors["mm_projector.pre_norm.bias"]
    other["mm_projector.pre_norm.bias"] = Raw("BF16", (1, *bias.shape), bias.data)
    directory = written(other)
    assert different(capsys, converted, directory) == [
        "! 1 tensors of different shape or dtype: mm_projector.pre_norm.bias "
        f"(BF16 {list(bias.shape)} and BF16 {[1, *bias.shape]})",
        f"! 1 tensors only in {converted}: {gone}",
        f"! 1 tensors only in {directory}: vision_tower.more",
    ]


@pytest.mark.parametrize(("dtype", "copies"), [("F16", 1), ("F32", 2)])
def test_another_dtype(capsys, written, converted, tensors, dtype, copies):
    name = "mm_projector.pre_norm.bias"
    other = Raw(dtype, tensors[name].shape, tensors[name].data * copies)
    (line,) = different(capsys, converted, written(tensors | {name: other}))
    assert "of different shape or dtype" in line and dtype in line


def test_weight_shape_that_only_one_has(capsys, written, converted, tensors):
    none = {n: t for n, t in tensors.items() if not n.endswith(".weight_shape")}
    (line,) = different(capsys, converted, written(none))
    assert f"! 144 tensors only in {converted}: " in line


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("model.", "lm_head."),
        ("model.language_model.", "lm_head."),
        ("language_model.", "lm_head."),
    ],
)
def test_the_prefix_is_no_difference(capsys, written, converted, tensors, text, head):
    moved = {
        f"model.{n}" if n.startswith("vision_tower") else n: t
        for n, t in renamed(tensors, text=text, head=head).items()
    }
    assert f"{len(tensors)} tensors" in same(capsys, converted, written(moved))
    moved[f"{text}norm.weight"] = flipped(tensors[f"{LM}norm.weight"], 1)
    (line,) = different(capsys, converted, written(moved))
    assert f"{LM}norm.weight" in line


@pytest.fixture
def copy(converted, tmp_path):
    """A checkpoint to spoil."""
    return shutil.copytree(converted, tmp_path / "copy")


def test_rotten_byte(capsys, converted, copy):
    """Found against the manifest, even of a copy of itself."""
    chunk = copy / "params/moe.experts.down.scale/c/2/0/0/4"
    data = bytearray(chunk.read_bytes())
    data[11] ^= 64
    chunk.write_bytes(data)
    (line,) = different(capsys, copy, copy)
    assert line == (
        f"{copy}: ! 1 arrays not as the manifest says: moe/experts/down/scale "
        f"({copy}/params/moe.experts.down.scale)"
    )
    first, second = different(capsys, converted, copy)
    assert first == line and "layers.3.mlp.experts.0.down_proj.weight_scale" in second


def test_rotten_image_tensor(capsys, copy):
    chunk = copy / "extra/mm_projector.pre_norm.bias/c/0"
    data = chunk.read_bytes()
    chunk.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    line, _ = different(capsys, copy, TINY)
    assert "arrays not as the manifest says: mm_projector.pre_norm.bias" in line


def test_file_that_is_not_the_copied_one(capsys, copy):
    (copy / "tokenizer_config.json").write_text("{}")
    (line,) = different(capsys, copy, TINY)
    assert line.endswith("! 1 files not as the manifest says: tokenizer_config.json")
    (copy / "tokenizer_config.json").unlink()
    refused(capsys, "tokenizer_config.json is missing", "verify", copy, TINY)


def test_what_is_no_checkpoint(capsys, tmp_path, copy):
    refused(capsys, "is not a directory", "verify", TINY, tmp_path / "none")
    (copy / "params/norm/c/0").unlink()
    refused(capsys, "params/norm/c/0 is missing", "verify", TINY, copy)


def test_two_names_of_one_tensor(capsys, written, tensors):
    """Neither may hide behind the other."""
    name = "vision_tower.patch_embed.proj.bias"
    both = tensors | {f"model.{name}": flipped(tensors[name], 0)}
    refused(
        capsys,
        f"model.{name} and {name} are the same tensor of the published checkpoint",
        *("verify", TINY, written(both)),
    )


def test_target_and_drafter(capsys):
    lines = different(capsys, TINY, TINY_DRAFT)
    assert f"! 524 tensors only in {TINY}" in lines[0]
