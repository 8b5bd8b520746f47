"""`export --to hf`: the source bit for bit, as the safetensors library reads it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.flax import load_file

from convert import hf_target
from convert.__main__ import main
from convert.hf_target import split_in_parts
from convert.safetensors_file import FileTensor
from tests.convert.command import refused, run, shell
from tests.convert.support import (
    INDEX,
    TINY,
    TINY_DRAFT,
    Raw,
    raw,
    read_checkpoint,
    read_file,
    renamed,
    write_checkpoint,
)

PART_BYTES = 700_000
LM = "language_model.model."


@pytest.fixture(scope="module")
def exported(converted, tmp_path_factory) -> Path:
    destination = tmp_path_factory.mktemp("exported") / "tiny"
    arguments = ["export", converted, destination, "--to", "hf"]
    assert main([*map(str, arguments), "--part-bytes", str(PART_BYTES)]) == 0
    return destination


def assert_same(got: dict[str, Raw], expected: dict[str, Raw]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name] == tensor, name


def test_round_trip(exported, tensors):
    assert_same(read_checkpoint(exported), tensors)
    assert_same(read_checkpoint(exported / "draft"), read_checkpoint(TINY_DRAFT))


def test_index_and_parts(exported, tensors):
    index = json.loads((exported / INDEX).read_text())
    assert index["weight_map"].keys() == tensors.keys()
    total = sum(len(t.data) for t in tensors.values())
    assert index["metadata"] == {"total_size": total}
    files = sorted(path.name for path in exported.glob("*.safetensors"))
    count = len(files)
    assert total / PART_BYTES < count < 1.5 * total / PART_BYTES
    assert files == [
        f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)
    ]
    for name in files:
        held = read_file(exported / name)
        assert sum(len(t.data) for t in held.values()) <= PART_BYTES
        assert all(index["weight_map"][tensor] == name for tensor in held)


def test_layers_are_in_order(exported):
    """A reader that loads layer by layer opens one file after the other."""
    weight_map = json.loads((exported / INDEX).read_text())["weight_map"]
    last = ""
    for layer in range(4):
        files = {
            f for n, f in weight_map.items() if n.startswith(f"{LM}layers.{layer}.")
        }
        assert min(files) >= last
        last = max(files)


def test_the_library_reads_it(exported, tensors):
    for path in sorted(exported.glob("*.safetensors")):
        with safe_open(path, framework="flax") as file:
            assert file.metadata() == {"format": "pt"}
            assert set(file.keys()) == set(read_file(path))
        for name, array in load_file(path).items():
            expected = tensors[name].array()
            assert array.dtype == expected.dtype and array.shape == expected.shape
            assert np.asarray(array).tobytes() == tensors[name].data, name


def test_tensors_are_aligned(capsys, tmp_path, tensors, config):
    """A reader may map them; whatever the lengths of those before."""
    odd = {f"vision_tower.{i}.a": Raw("U8", (i,), bytes(i)) for i in range(1, 9)}
    odd["vision_tower.b"] = Raw("BF16", (3,), bytes(6))
    odd["vision_tower.c"] = raw(np.arange(3, dtype=np.int64))
    source = write_checkpoint(tmp_path / "src", tensors | odd, config)
    assert run(capsys, "export", source, tmp_path / "dst", "--to", "hf")[0] == 0
    (path,) = (tmp_path / "dst").glob("*.safetensors")
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    assert start % 8 == 0
    for name, tensor in read_file(path).items():
        begin = header[name]["data_offsets"][0]
        assert begin % tensor.array().itemsize == 0, name


def test_data_files(exported):
    files = {path.name for path in exported.iterdir() if path.suffix != ".safetensors"}
    carried = ("config.json", "generation_config.json", "tiktoken.model")
    carried += ("tokenizer_config.json", "chat_template.jinja")
    assert files == {*carried, INDEX, "draft"}
    for name in carried:
        assert (exported / name).read_bytes() == (TINY / name).read_bytes()


def test_back_again_is_the_same_checkpoint(capsys, tmp_path, exported, converted):
    again = tmp_path / "again"
    code, _, _ = run(capsys, "hf", exported, again, "--draft", exported / "draft")
    assert code == 0
    for place in ("", "draft"):
        first, second = (
            json.loads((d / place / "manifest.json").read_text())
            for d in (converted, again)
        )
        for key in ("tensors", "extra", "files", "total_bytes", "weight_shape_dtype"):
            assert first[key] == second[key], key


def test_prefix_and_dtype_of_weight_shape_stay(capsys, tmp_path, tensors, config):
    wide = {
        n: raw(t.array().astype(np.int64)) if n.endswith(".weight_shape") else t
        for n, t in renamed(tensors, text="model.", head="lm_head.").items()
    }
    source = write_checkpoint(tmp_path / "src", wide, config)
    assert run(capsys, "hf", source, tmp_path / "ours")[0] == 0
    export = ("export", tmp_path / "ours", tmp_path / "hf", "--to", "hf")
    assert run(capsys, *export)[0] == 0
    assert_same(read_checkpoint(tmp_path / "hf"), wide)


def test_other_parts_of_the_same(capsys, tmp_path, tensors):
    export = ("export", TINY, tmp_path / "hf", "--to", "hf", "--part-bytes", "1")
    assert run(capsys, *export)[0] == 0
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == len(tensors)
    assert_same(read_checkpoint(tmp_path / "hf"), tensors)


def test_split():
    def tensor(name: str, nbytes: int) -> FileTensor:
        return FileTensor(name, Path("f"), "U8", (nbytes,), 0, nbytes)

    sizes = {"l.10.a": 3, "l.2.b": 4, "l.2.a": 7, "l.9": 10, "l.11": 7, "k": 2}
    parts = split_in_parts([tensor(n, s) for n, s in sizes.items()], 10)
    assert [[t.name for t in part] for part in parts] == [
        ["k", "l.2.a"],
        ["l.2.b"],
        ["l.9"],
        ["l.10.a", "l.11"],
    ]


@pytest.mark.parametrize("bits", [0x7F80, 0xFFC0])
def test_scale_that_is_not_finite(capsys, tmp_path, tensors, config, bits):
    name = f"{LM}layers.3.mlp.experts.0.up_proj.weight_scale"
    words = np.frombuffer(tensors[name].data, np.uint16).copy()
    words[-1] = bits
    bad = Raw("BF16", tensors[name].shape, words.tobytes())
    source = write_checkpoint(tmp_path / "src", tensors | {name: bad}, config)
    export = ("export", source, tmp_path / "dst", "--to", "hf")
    refused(capsys, f"{name} holds NaN or infinity; expected finite", *export)
    assert [p.name for p in tmp_path.iterdir()] == ["src"]


def test_image_tensors_that_are_not_finite(capsys, tmp_path, tensors, config):
    odd = tensors | {"vision_tower.x": Raw("F32", (), b"\0\0\xc0\x7f")}
    source = write_checkpoint(tmp_path / "src", odd, config)
    assert run(capsys, "export", source, tmp_path / "dst", "--to", "hf")[0] == 0
    assert_same(read_checkpoint(tmp_path / "dst"), odd)


def test_what_is_refused(capsys, tmp_path, tensors, config):
    source = shutil.copytree(TINY, tmp_path / "src")
    inside = ("export", source, source / "out", "--to", "hf")
    refused(capsys, "lies in the source", *inside)
    refused(
        capsys, f"{tmp_path} exists; expected", "export", source, tmp_path, "--to", "hf"
    )
    rest = {n: t for n, t in tensors.items() if n != f"{LM}norm.weight"}
    part = write_checkpoint(tmp_path / "part", rest, config)
    refused(
        capsys,
        f"tensors missing (1): {LM}norm.weight",
        *("export", part, tmp_path / "dst", "--to", "hf"),
    )
    assert not (tmp_path / "dst").exists()


def test_disk_that_is_full(tmp_path):
    export = ("export", TINY, tmp_path / "dst", "--to", "hf")
    done = shell(*export, limit="ulimit -f 300")
    assert done.returncode == 1, done.stderr
    assert "model-00001-of-00001.safetensors: not written: File too la" in done.stderr
    assert "Traceback" not in done.stderr and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("part_bytes", ["0", "-5", "many"])
def test_part_bytes(capsys, tmp_path, part_bytes):
    arguments = ["export", str(TINY), str(tmp_path / "dst"), "--to", "hf"]
    with pytest.raises(SystemExit) as info:
        main([*arguments, "--part-bytes", part_bytes])
    assert info.value.code == 2
    assert f"--part-bytes: {part_bytes!r}; expected a number ≥ 1" in (
        capsys.readouterr().err
    )


def test_stopped_export_goes_on(capsys, monkeypatch, tmp_path, tensors):
    """What is on disk is not written again, and the result is the same."""
    export = ("export", TINY, tmp_path / "hf", "--to", "hf")
    export += ("--part-bytes", str(PART_BYTES))
    write, written = hf_target.write_part, []

    def failing(path, *rest):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(path.name)
        write(path, *rest)

    monkeypatch.setattr(hf_target, "write_part", failing)
    code, _, err = run(capsys, *export)
    assert code == 130 and "is kept" in err and not (tmp_path / "hf").exists()
    first, written[:] = list(written), []
    monkeypatch.setattr(
        hf_target, "write_part", lambda p, *r: (written.append(p.name), write(p, *r))
    )
    assert run(capsys, *export)[0] == 0
    assert written and not set(written) & set(first)
    assert_same(read_checkpoint(tmp_path / "hf"), tensors)
