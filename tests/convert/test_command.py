"""`python -m convert`: what it writes, says and refuses."""

import json
import shutil

import numpy as np
import pytest
from blake3 import blake3

from convert.__main__ import main
from tests.convert.command import refused, run
from tests.convert.support import TINY, TINY_DRAFT, read_config, write_checkpoint


def test_data_files_are_carried_and_code_is_not(capsys, tmp_path, tensors, config):
    source = write_checkpoint(tmp_path / "src", tensors, config)
    for name in ("generation_config.json", "tokenizer_config.json"):
        (source / name).write_text('{"odd":   "spacing"}\n')
    (source / "tiktoken.model").write_bytes(b"\0\xff")
    (source / "modeling.py").write_text("raise SystemExit\n")
    (source / "generation_config.json").write_text('{"eos_token_id":  [1, 2]}')
    destination = tmp_path / "new" / "dst"
    code, _, err = run(capsys, "hf", source, destination)
    assert code == 0
    assert f"not carried from {source}: modeling.py" in err
    carried = ("config.json", "generation_config.json", "tokenizer_config.json")
    for name in (*carried, "tiktoken.model"):
        assert (destination / name).read_bytes() == (source / name).read_bytes()
    assert sorted(path.name for path in destination.iterdir()) == sorted(
        [*carried, "tiktoken.model", "manifest.json", "params", "extra"]
    )
    assert [p.name for p in destination.parent.iterdir()] == ["dst"]


def test_manifest(converted, tensors):
    manifest = json.loads((converted / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"], manifest["kind"]) == (
        "ddtree_jax-checkpoint",
        2,
        "target",
    )
    assert manifest["source"]["directory"] == "tiny_k26"
    names = [
        f"language_model.model.layers.{i}.mlp.experts.{e}.down_proj.weight_scale"
        for i in (1, 2, 3)
        for e in range(16)
    ]
    data = b"".join(tensors[name].data for name in names)
    entry = manifest["tensors"]["moe/experts/down/scale"]
    assert entry == {
        "shape": [3, 16, 128, 8],
        "dtype": "bfloat16",
        "chunk": [1, 16, 128, 1],
        "blake3": blake3(data).hexdigest(),
        "source": "language_model.model.layers.{1..3}.mlp.experts.{0..15}."
        "down_proj.weight_scale",
    }
    config = (converted / "config.json").read_bytes()
    assert manifest["files"]["config.json"] == {
        "bytes": len(config),
        "blake3": blake3(config).hexdigest(),
    }
    kept = [t for n, t in tensors.items() if not n.endswith("weight_shape")]
    assert manifest["total_bytes"] == sum(len(t.data) for t in kept)
    assert manifest["weight_shape_dtype"] == "I32"
    draft = json.loads((converted / "draft" / "manifest.json").read_text())
    assert draft["kind"] == "draft" and len(draft["tensors"]) == 14


def test_inspect(capsys, converted, tensors):
    total = sum(len(t.data) for t in tensors.values())
    shapes = 8 * sum(n.endswith(".weight_shape") for n in tensors)
    code, out, _ = run(capsys, "inspect", TINY)
    assert code == 0
    assert out.splitlines() == [
        "Hugging Face safetensors, target, 4 layers, 16 experts, INT4 pack-quantized",
        f"524 tensors in 3 files, {total} bytes, complete",
        "233 BF16, 3 F32, 288 I32",
        "35 tensors of the image path",
    ]
    code, out, _ = run(capsys, "inspect", TINY_DRAFT)
    assert code == 0 and "DFlash drafter, 2 layers, block of 8" in out
    code, out, _ = run(capsys, "inspect", converted)
    lines = out.splitlines()
    assert code == 0 and lines[:5] == [
        "ddtree_jax-checkpoint, target, 4 layers, 16 experts, INT4 pack-quantized",
        "version 2, made from Hugging Face safetensors 'tiny_k26'",
        f"37 arrays, 35 extra tensors, {total - shapes} bytes",
        "files: config.json, generation_config.json, tiktoken.model, "
        "tokenizer_config.json, chat_template.jinja",
        f"524 tensors in 72 arrays, {total} bytes, complete",
    ]
    drafts = [line for line in lines if line.startswith("draft: ")]
    assert drafts == lines[7:]
    assert (
        drafts[0]
        == "draft: ddtree_jax-checkpoint, DFlash drafter, 2 layers, block of 8"
    )
    assert drafts[2] == "draft: 14 arrays, 0 extra tensors, 886400 bytes"


def test_inspect_says_what_was_lost(capsys, converted, tmp_path):
    copy = shutil.copytree(converted, tmp_path / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    assert manifest["losses"] == []
    manifest["losses"] = ["two bits of it"]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    code, out, _ = run(capsys, "inspect", copy)
    assert code == 0 and "not bit for bit: two bits of it\n" in out
    code, _, err = run(capsys, "export", copy, tmp_path / "hf", "--to", "hf")
    assert code == 0 and "not bit for bit: two bits of it" in err


def test_inspect_refuses_what_is_not_whole(capsys, tmp_path, converted):
    refused(capsys, "is not a directory", "inspect", tmp_path / "absent")
    source = shutil.copytree(TINY, tmp_path / "src")
    (source / "model-00002-of-000003.safetensors").unlink()
    refused(capsys, "000003.safetensors is missing", "inspect", source)
    copy = shutil.copytree(converted, tmp_path / "copy")
    (copy / "draft/params/norm/c/0").unlink()
    refused(capsys, "draft/params/norm/c/0 is missing", "inspect", copy)


def test_usage(capsys):
    for arguments in ([], ["hf"], ["hf", "a"], ["other"], ["hf", "a", "b", "--x"]):
        with pytest.raises(SystemExit) as info:
            main(arguments)
        assert info.value.code == 2
    with pytest.raises(SystemExit) as info:
        main(["hf", "--help"])
    assert info.value.code == 0
    assert "bytes" in capsys.readouterr().out


def test_destination_that_exists(capsys, tmp_path):
    for destination in (tmp_path, tmp_path / "file", tmp_path / "link"):
        if destination.name == "file":
            destination.write_text("kept")
        if destination.name == "link":
            destination.symlink_to("nowhere")
        refused(capsys, f"{destination} exists; expected", "hf", TINY, destination)
    assert (tmp_path / "file").read_text() == "kept"


def test_destination_inside_the_source(capsys, tmp_path):
    source = shutil.copytree(TINY, tmp_path / "src")
    for destination in (source, source / "out", source / "a" / "b"):
        refused(capsys, "lies in the source", "hf", source, destination)
    link = tmp_path / "link"
    link.symlink_to(source)
    refused(capsys, "lies in the source", "hf", source, link / "out")


def test_draft_that_does_not_fit(capsys, tmp_path):
    out = tmp_path / "dst"
    refused(capsys, "--draft expects a drafter", "hf", TINY, out, "--draft", TINY)
    refused(
        capsys,
        "--draft goes with a target",
        "hf",
        TINY_DRAFT,
        out,
        "--draft",
        TINY_DRAFT,
    )
    draft = shutil.copytree(TINY_DRAFT, tmp_path / "draft")
    config = read_config(draft) | {"vocab_size": 1024}
    (draft / "config.json").write_text(json.dumps(config))
    refused(
        capsys,
        "the drafter's vocab_size is 1024; expected the target's, ",
        *("hf", TINY, out, "--draft", draft),
    )
    assert not out.exists()


def test_bad_tensor_leaves_nothing(capsys, tmp_path, tensors, config):
    name = "language_model.model.layers.3.mlp.experts.0.up_proj.weight_scale"
    words = np.frombuffer(tensors[name].data, np.uint16).copy()
    words[3] = 0x7F80
    bad = type(tensors[name])("BF16", tensors[name].shape, words.tobytes())
    source = write_checkpoint(tmp_path / "src", tensors | {name: bad}, config)
    refused(capsys, f"{name} holds NaN or infinity", "hf", source, tmp_path / "dst")
    assert [p.name for p in tmp_path.iterdir()] == ["src"]


def test_config_without_rope_keys(capsys, tmp_path, tensors, config):
    del config["text_config"]["rope_scaling"]
    source = write_checkpoint(tmp_path / "src", tensors, config)
    refused(
        capsys,
        f"{source}/config.json: text_config: rope_scaling (or rope_parameters) is",
        *("hf", source, tmp_path / "dst"),
    )
