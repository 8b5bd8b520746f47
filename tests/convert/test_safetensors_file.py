"""A safetensors file is exactly what its header declares, or refused in one line."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from convert.safetensors_file import MAX_HEADER_BYTES, read_header
from ddtree_jax.errors import CheckpointError
from tests.convert.support import Raw, raw, write_file

SMALL = {
    "a.w": raw(np.arange(12, dtype=np.float32).reshape(3, 4)),
    "b.w": raw(np.arange(8, dtype=np.int32)),
    "c": Raw("BF16", (2,), b"\1\2\3\4"),
}


def refused(path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as info:
        read_header(path)
    assert "\n" not in str(info.value) and str(path) in str(info.value)


def test_reads_what_the_library_writes(tmp_path):
    arrays = {
        "x": np.arange(6, dtype=np.int32).reshape(2, 3),
        "y.z": np.ones(5, np.int64),
    }
    path = tmp_path / "library.safetensors"
    save_file(arrays, path, metadata={"format": "np"})
    found = {tensor.name: tensor for tensor in read_header(path)}
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        got = np.empty(array.shape, array.dtype)
        found[name].read_into(memoryview(got).cast("B"), 0)
        np.testing.assert_array_equal(got, array)


def test_reads_a_part(tmp_path):
    path = tmp_path / "x.safetensors"
    write_file(path, SMALL)
    tensor = next(t for t in read_header(path) if t.name == "a.w")
    part = bytearray(8)
    tensor.read_into(memoryview(part), 16)
    assert bytes(part) == SMALL["a.w"].data[16:24]


def test_file_that_shrinks_after_its_header_was_read(tmp_path):
    path = tmp_path / "x.safetensors"
    write_file(path, SMALL)
    last = read_header(path)[-1]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"x\.safetensors: c is truncated"):
        last.read_into(memoryview(bytearray(4)), 0)


def set_(name: str, key: str, value):
    def edit(header: dict) -> None:
        header[name][key] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (
            set_("b.w", "data_offsets", [44, 76]),
            "b.w overlaps the tensor before it by 4",
        ),
        (set_("a.w", "data_offsets", [4, 52]), "hole of 4 bytes before a.w"),
        (set_("c", "data_offsets", [84, 88]), "hole of 4 bytes before c"),
        (set_("c", "data_offsets", [84, 80]), r"c has the bad data_offsets \[84, 80\]"),
        (set_("c", "data_offsets", [-4, 0]), r"c has the bad data_offsets \[-4, 0\]"),
        (set_("a.w", "dtype", "F16"), "a.w F16.* has 48 bytes; expected 24"),
        (set_("a.w", "dtype", "Q4"), "a.w has the unknown dtype 'Q4'"),
        (set_("a.w", "shape", [3, 5]), "a.w .* has 48 bytes; expected 60"),
        (set_("a.w", "shape", [-3, -4]), r"a.w has the bad shape \[-3, -4\]"),
        (set_("a.w", "shape", [True, 12]), r"a.w has the bad shape \[True, 12\]"),
        (set_("a.w", "extra", 1), "a.w is declared without exactly"),
        (lambda h: h.pop("c"), "has 4 bytes after its last tensor"),
        (lambda h: h.update({"../x": h.pop("c")}), "tensor name '../x'"),
    ],
)
def test_bad_declarations(tmp_path, edit, match):
    path = tmp_path / "bad.safetensors"
    write_file(path, SMALL, edit=edit)
    refused(path, match)


def test_duplicate_name_in_the_header(tmp_path):
    path = tmp_path / "bad.safetensors"
    write_file(path, SMALL, text=lambda t: t.replace('"b.w"', '"a.w"'))
    refused(path, "a.w stands twice in the header")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"\0\0\0", "has 3 bytes; expected at least 8"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little"), "header of 100000001 bytes"),
        ((50).to_bytes(8, "little") + b"{}", "is truncated: 10 bytes"),
        ((2).to_bytes(8, "little") + b"[]", "the header is no JSON object"),
        ((2).to_bytes(8, "little") + b"{x", "the header is not valid JSON"),
        ((2).to_bytes(8, "little") + b"\xff\xfe", "the header is not valid JSON"),
    ],
)
def test_bad_heads(tmp_path, content, match):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    refused(path, match)


def test_truncated_data(tmp_path):
    path = tmp_path / "bad.safetensors"
    write_file(path, SMALL)
    path.write_bytes(path.read_bytes()[:-1])
    refused(path, "is truncated: .* bytes; expected")


@settings(max_examples=300)
@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=4))
def test_any_damage_gives_one_line_or_a_consistent_file(tmp_path_factory, at, junk):
    path = tmp_path_factory.mktemp("fuzz") / "f.safetensors"
    write_file(path, SMALL)
    content = bytearray(path.read_bytes())
    at %= len(content)
    content[at : at + len(junk)] = junk
    path.write_bytes(content)
    try:
        found = read_header(path)
    except CheckpointError as error:
        assert "\n" not in str(error)
    else:
        assert sum(t.nbytes for t in found) == len(content) - found[0].begin
