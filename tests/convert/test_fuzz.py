"""Spoilt input is refused in one line that names the file, or changes nothing.

Every example spoils one file of a small checkpoint in one place. Where the spoilt file
is a good one that says something else (two tensors swapped), the `safetensors` library
reads it too, and must agree.
"""

import json
import math
import shutil
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import safetensors

from convert.__main__ import main
from convert.detect import open_checkpoint
from convert.formats import view_as_int4
from convert.hf_source import open_hf, read_directory
from convert.tensor import DTYPES
from ddtree_jax.errors import CheckpointError
from tests.convert.fuzzing import (
    Contents,
    Spoilt,
    changed,
    check,
    contents,
    encoded,
    few,
    with_header,
    write_small,
)
from tests.convert.support import INDEX, Raw, read_config, write_checkpoint

FIRST = "model-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    image = ("vision_tower.encoder.final_layernorm.weight", "mm_projector.proj.0.bias")
    return write_small(tmp_path_factory.mktemp("fuzz"), image=image)


@pytest.fixture(scope="module")
def ours(small) -> Path:
    destination = small.parent / "ours"
    assert main(["hf", str(small), str(destination)]) == 0
    return destination


@pytest.fixture(scope="module")
def intact(small) -> Contents:
    return contents(open_hf(small))


def by_the_library(directory: Path) -> Contents:
    """Returns what the `safetensors` library makes of the files."""
    found = Contents()
    for path in sorted(directory.glob("*.safetensors")):
        for name, tensor in safetensors.deserialize(path.read_bytes()):
            assert name not in found
            data = bytes(tensor["data"])
            found[name] = (tensor["dtype"], tuple(tensor["shape"]), data)
    return found


@few(150)
@hypothesis.given(data=st.data())
def test_header(small, data):
    content = (small / FIRST).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = data.draw(changed(json.loads(content[8 : 8 + length])))
    spoilt = with_header(content, encoded(header))
    with Spoilt(small / FIRST, spoilt):
        check(lambda: contents(open_hf(small)), lambda: by_the_library(small), FIRST,
              "tensors missing", INDEX)  # fmt: skip


@few(100)
@hypothesis.given(data=st.data())
def test_two_tensors_of_a_header(small, data):
    """Overlaps, holes and copies: the places of two tensors are mixed."""
    content = (small / FIRST).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    a, b = data.draw(st.lists(st.sampled_from(sorted(header)), min_size=2, max_size=2))
    text = json.dumps(header)
    match data.draw(st.sampled_from(["place", "end", "shift", "name", "all"])):
        case "place":
            header[a]["data_offsets"] = header[b]["data_offsets"]
        case "end":
            header[a]["data_offsets"][1] = header[b]["data_offsets"][1]
        case "shift":
            by = data.draw(st.sampled_from([-8, -1, 1, 8, 1 << 40]))
            header[a]["data_offsets"] = [n + by for n in header[a]["data_offsets"]]
        case "all":
            header[a] = header[b]
        case "name":
            text = text.replace(f'"{a}"', f'"{b}"')
            header = None
    spoilt = with_header(content, encoded(header) if header else text.encode())
    with Spoilt(small / FIRST, spoilt):
        check(lambda: contents(open_hf(small)), lambda: by_the_library(small), FIRST)


@few(150)
@hypothesis.given(data=st.data())
def test_bytes_of_a_file(small, data):
    """Cut, lengthened, or some bytes of its header overwritten."""
    content = bytearray((small / FIRST).read_bytes())
    length = int.from_bytes(content[:8], "little")
    match data.draw(st.sampled_from(["cut", "longer", "length", "header", "header"])):
        case "cut":
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        case "longer":
            content += data.draw(st.binary(min_size=1, max_size=9))
        case "length":
            content[:8] = data.draw(st.binary(min_size=8, max_size=8))
        case "header":
            at = data.draw(st.integers(8, 8 + length - 1))
            some = data.draw(st.binary(min_size=1, max_size=3))
            content[at : at + len(some)] = some
    with Spoilt(small / FIRST, bytes(content)):
        check(lambda: contents(open_hf(small)), lambda: by_the_library(small), FIRST)


@few(100)
@hypothesis.given(data=st.data())
def test_index(small, intact, data):
    index = json.loads((small / INDEX).read_text())
    if data.draw(st.booleans()):
        name = data.draw(st.sampled_from(sorted(index["weight_map"])))
        paths = ["../x.safetensors", "/etc/passwd", "a/../" + FIRST, ".", "",
                 "x.safetensors", FIRST.upper(), FIRST + "\0", f"./{FIRST}", FIRST[:-1],
                 "model-00002-of-00002.safetensors", "\ud800.safetensors"]  # fmt: skip
        index["weight_map"][name] = data.draw(st.sampled_from(paths))
    else:
        index = data.draw(changed(index))
    with Spoilt(small / INDEX, encoded(index)):
        check(lambda: contents(open_hf(small)), lambda: intact, INDEX)


@few(200)
@hypothesis.given(data=st.data())
def test_config(small, intact, data):
    config = data.draw(changed(read_config(small)))
    with Spoilt(small / "config.json", encoded(config)):
        # A size that the tensors do not have is found at the tensors.
        check(lambda: contents(open_hf(small)), lambda: intact, "config.json", ".safe",
              "tensors missing")  # fmt: skip


@few(60)
@hypothesis.given(data=st.data())
def test_config_that_is_no_json(small, intact, data):
    content = bytearray((small / "config.json").read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    match data.draw(st.sampled_from(["cut", "byte", "deep"])):
        case "cut":
            del content[at:]
        case "byte":
            content[at : at + 1] = data.draw(st.binary(min_size=1, max_size=2))
        case "deep":
            content[at:at] = b"[" * 100_000
    with Spoilt(small / "config.json", bytes(content)):
        check(lambda: contents(open_hf(small)), lambda: intact, "config.json", ".safe",
              "tensors missing")  # fmt: skip


@few(200)
@hypothesis.given(data=st.data())
def test_manifest(ours, intact, data):
    path = ours / "manifest.json"
    manifest = data.draw(changed(json.loads(path.read_text())))
    want = Contents(intact)
    stated = manifest.get("weight_shape_dtype")
    if stated in ("I64", None):  # that of another checkpoint, as good as this
        for name in [name for name in want if name.endswith(".weight_shape")]:
            _, shape, data_bytes = want.pop(name)
            if stated == "I64":
                wide = np.frombuffer(data_bytes, np.int32).astype(np.int64)
                want[name] = (stated, shape, wide.tobytes())
    with Spoilt(path, encoded(manifest)):
        check(lambda: contents(open_checkpoint(ours)), lambda: want, "manifest.json",
              "zarr.json", "params", "extra")  # fmt: skip


@few(60)
@hypothesis.given(data=st.data())
def test_array_header_of_ours(ours, intact, data):
    path = data.draw(st.sampled_from(sorted(ours.rglob("zarr.json"))))
    header = data.draw(changed(json.loads(path.read_text())))
    with Spoilt(path, encoded(header)):
        check(lambda: contents(open_checkpoint(ours)), lambda: intact, "zarr.json")


SUFFIXES = (
    *("weight", "weight_packed", "weight_scale", "weight_shape", "weight_scale_inv"),
    *("qweight", "qzeros", "scales", "g_idx"),
)
SHAPES = st.lists(st.sampled_from([0, 1, 2, 4, 8, 16, 32, 64]), max_size=3).map(tuple)
BITS = {"F8_E4M3": 8, **{name: 8 * dtype.itemsize for name, dtype in DTYPES.items()}}


@few(300)
@hypothesis.given(
    parts=st.dictionaries(
        st.sampled_from(SUFFIXES), st.tuples(SHAPES, st.sampled_from(sorted(BITS)))
    ),
    base=st.sampled_from(["m.self_attn.o_proj", "m.mlp.experts.0.up_proj"]),
    quantise=st.booleans(),
    byte=st.sampled_from([0, 0x11, 0x77, 0x80]),
)
def test_parts_of_a_weight(tmp_path, parts, base, quantise, byte):
    """Whatever parts a weight has, it is refused in one line or can be read."""
    tensors = {
        f"{base}.{part}": Raw(
            dtype, shape, bytes([byte]) * (math.prod(shape) * BITS[dtype] // 8)
        )
        for part, (shape, dtype) in parts.items()
    }
    tensors["x"] = Raw("BF16", (1,), b"\0\0")
    shutil.rmtree(tmp_path / "w", ignore_errors=True)
    directory = write_checkpoint(tmp_path / "w", tensors, {}, shards=1)

    def read() -> bool:
        stored = read_directory(directory).tensors
        view = view_as_int4(stored, quantise_experts=quantise)
        for tensor in view.tensors.values():
            out = bytearray(tensor.nbytes)
            tensor.read_into(memoryview(out), 0)
        return True

    check(read, lambda: True, "model-00001-of-00001.safetensors", "quantise-experts")


@few(60)
@hypothesis.given(data=st.data())
def test_commands_never_show_a_traceback(small, ours, capsys, data):
    """`inspect` and `doctor` of a spoilt file: lines, and exit code 0 or 1."""
    directory, name = data.draw(
        st.sampled_from(
            [(small, "config.json"), (small, INDEX), (ours, "manifest.json"),
             (ours, "config.json")]
        )
    )  # fmt: skip
    value = data.draw(changed(json.loads((directory / name).read_text())))
    command = data.draw(st.sampled_from(["inspect", "doctor"]))
    with Spoilt(directory / name, encoded(value)):
        code = main([command, str(directory)])
    out, err = capsys.readouterr()
    assert code in (0, 1)
    if code == 1 and not out:
        assert len(err.splitlines()) == 1 and err.startswith("error: "), err


def forget_an_extra(manifest: dict) -> None:
    del manifest["extra"]["mm_projector.proj.0.bias"]


def no_entry(manifest: dict) -> None:
    manifest["tensors"]["embed"] = None


def odd_dtype(manifest: dict) -> None:
    manifest["tensors"]["embed"]["dtype"] = {"": ""}


def no_losses(manifest: dict) -> None:
    manifest["losses"] = None


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (forget_an_extra, r"manifest.json: total_bytes is \d+; its arrays have \d+"),
        (no_entry, "manifest.json: embed is None; expected an object"),
        (odd_dtype, "manifest.json: embed has the dtype .*expected one of bfloat16"),
        (no_losses, "manifest.json: losses is None; expected a list of lines"),
    ],
)
def test_manifests_that_fuzzing_found(ours, spoil, match):
    path = ours / "manifest.json"
    manifest = json.loads(path.read_text())
    spoil(manifest)
    with Spoilt(path, encoded(manifest)), pytest.raises(CheckpointError, match=match):
        open_checkpoint(ours)
