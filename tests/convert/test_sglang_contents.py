"""The bytes of a presharded dump against the checksums by which it calls them."""

import hashlib
import json

import numpy as np
import pytest

from convert.sglang import contents
from tests.convert.command import run
from tests.convert.sglang_fixture import (
    BF16,
    Saved,
    config,
    hugging_face,
    presharded,
    rank_tensors,
)
from tests.convert.support import Raw, raw, read_file, write_checkpoint, write_file

COMMON = "model-00000-common.safetensor"


@pytest.fixture(scope="module")
def hf() -> dict[str, Raw]:
    return hugging_face()


@pytest.fixture
def dumped(tmp_path, hf):
    """Writes the model's dump of two ranks, under keys of a kind."""

    def write(made):
        ranks = [rank_tensors(hf, Saved(tp=2), rank) for rank in range(2)]
        dump = presharded(tmp_path / "model", ranks, made=made)
        (tmp_path / "model/config.json").write_text(json.dumps(config()))
        return dump

    return write


def rot(dump, name: str) -> str:
    """Changes the last byte of a file of a dump and returns the key of its tensor."""
    path = dump / name
    path.write_bytes(path.read_bytes()[:-1] + b"\x77")
    return list(read_file(path))[-1]


def xxh3():
    reason = "needs xxhash: pip install xxhash"
    return pytest.importorskip("xxhash", reason=reason).xxh3_128


@pytest.mark.parametrize("kind", ["SHA-1", "xxh3_128"])
def test_every_byte_is_hashed(tmp_path, capsys, hf, dumped, kind):
    dump = dumped(hashlib.sha1 if kind == "SHA-1" else xxh3())
    source = write_checkpoint(tmp_path / "hf", hf, config())
    code, out, _ = run(capsys, "verify", source, dump)
    files = sorted(dump.glob("*.safetensor"))
    total = sum(len(t.data) for path in files for t in read_file(path).values())
    count = sum(len(read_file(path)) for path in files)
    assert code == 0 and f"{count} stored tensors, {total} bytes, hashed\n" in out
    for file in files:
        good = file.read_bytes()
        key = rot(dump, file.name)
        code, out, _ = run(capsys, "verify", dump, dump)
        assert code == 1
        assert f"! 1 tensors not as their keys say: {key} ({file})" in out
        file.write_bytes(good)


def test_golden_keys(tmp_path):
    """As PyTorch and SGLang's two versions make them of this tensor."""
    tensor = raw(np.arange(600).astype(BF16).reshape(2, 300))
    path = tmp_path / COMMON
    keys = [
        "b9db0b7c8c7b835256c0b77f10059772d1bb5cd5",
        "e999b32b3aec8c1ffa10db7f3b553a1e",
    ]
    for key, what in zip(keys, ("1 stored", "0 stored"), strict=True):
        write_file(path, {key: tensor})
        line, bad = contents.check_contents([path])
        assert bad == []
        assert line.startswith(what) or "which needs the package xxhash" not in line


def test_without_the_package(capsys, monkeypatch, dumped):
    class Hash:
        def __init__(self, data):
            self.data = data

        def hexdigest(self):
            return hashlib.sha1(self.data).hexdigest()[:32]

    dump = dumped(Hash)
    monkeypatch.setattr(contents.importlib.util, "find_spec", {}.get)
    code, out, _ = run(capsys, "verify", dump, dump)
    assert code == 0
    assert "0 stored tensors, 0 bytes, hashed; " in out
    assert " not: their keys are xxh3_128, which needs the package xxhash" in out


@pytest.mark.parametrize(
    ("key", "dtype", "match"),
    [
        ("a" * 31, "BF16", "the key a{31} has 31 characters; expected 32"),
        ("a" * 40, "F4", "a{40} is F4; expected one of BF16, BOOL, F16"),
    ],
)
def test_keys_and_dtypes_that_are_none(tmp_path, key, dtype, match):
    nbytes = 4 if dtype == "F4" else 16
    write_file(tmp_path / COMMON, {key: Raw(dtype, (8,), bytes(nbytes))})
    with pytest.raises(contents.CheckpointError, match=match):
        contents.check_contents([tmp_path / COMMON])
