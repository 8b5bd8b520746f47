"""A file that is written past the page cache holds what was written, and no more."""

import errno
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convert import sequential
from convert.sequential import SequentialFile

BLOCK = 8192
SIZES = st.lists(
    st.one_of(st.integers(0, 3 * BLOCK), st.sampled_from([BLOCK, BLOCK - 1, 4096])),
    max_size=5,
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(sequential, "BLOCK_BYTES", BLOCK)


def parts(sizes: list[int]) -> list[bytes]:
    return [bytes((i + n) % 251 for n in range(size)) for i, size in enumerate(sizes)]


def written(path, sizes: list[int]) -> bytes:
    with SequentialFile(path) as file:
        for part in parts(sizes):
            file.write(memoryview(part))
    return path.read_bytes()


@settings(max_examples=60)
@given(SIZES)
def test_content(tmp_path_factory, sizes):
    path = tmp_path_factory.getbasetemp() / "content"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequential, "BLOCK_BYTES", BLOCK)
        assert written(path, sizes) == b"".join(parts(sizes))


def test_in_place_of_another(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 50_000)
    assert written(path, [5]) == parts([5])[0]


@pytest.mark.parametrize("where", ["open", "pwrite"])
def test_file_system_without_direct_writes(monkeypatch, tmp_path, where):
    """Some say so when a file is opened, others when it is written."""
    real, refusals = getattr(os, where), []

    def refusing(*arguments):
        direct = (
            arguments[1] & os.O_DIRECT
            if where == "open"
            else sequential.fcntl.fcntl(arguments[0], sequential.fcntl.F_GETFL)
            & os.O_DIRECT
        )
        if direct:
            refusals.append(arguments)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(*arguments)

    monkeypatch.setattr(os, where, refusing)
    sizes = [100, 3 * BLOCK, 7]
    path = tmp_path / "file"
    assert written(path, sizes) == b"".join(parts(sizes))
    assert len(refusals) == 1


def test_a_pwrite_may_be_short(monkeypatch, tmp_path):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda f, data, at: real(f, data[:4096], at))
    sizes = [100, 3 * BLOCK, 7]
    assert written(tmp_path / "file", sizes) == b"".join(parts(sizes))


@pytest.mark.parametrize("call", ["pwrite", "fsync", "ftruncate"])
def test_errors_name_the_file(monkeypatch, tmp_path, call):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left on device") as info:
        written(tmp_path / "file", [5])
    assert info.value.filename == str(tmp_path / "file")
    assert len(os.listdir("/proc/self/fd")) == before


def test_error_of_the_user(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyError), SequentialFile(tmp_path / "file") as file:
        file.write(memoryview(b"abc"))
        raise KeyError
    assert len(os.listdir("/proc/self/fd")) == before
