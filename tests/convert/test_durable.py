"""Whole files past the page cache: every byte, whatever the kernel does with a call."""

import errno
import mmap
import os

import numpy as np
import pytest

from convert import durable
from convert.durable import Scratch, aligned_runs, write_file

PAGE = mmap.PAGESIZE


@pytest.fixture
def slab() -> np.ndarray:
    """Aligned: 3 × 8 rows of a page."""
    out = Scratch().array((3, 8, PAGE // 4), np.dtype(np.int32))
    out[...] = np.arange(out.size).reshape(out.shape)
    return out


def joined(runs) -> bytes:
    return b"".join(bytes(run) for run in runs)


@pytest.mark.parametrize(
    ("part", "count"),
    [
        (np.s_[:], 1),
        (np.s_[:, 2:4], 3),
        (np.s_[1:2, 2:4], 1),
        (np.s_[1:, ::2], 8),
        (np.s_[2, 7], 1),
    ],
)
def test_runs(slab, part, count):
    runs = aligned_runs(slab[part])
    assert runs is not None and len(runs) == count
    assert joined(runs) == slab[part].tobytes()


@pytest.mark.parametrize(
    "part", [np.s_[:, :, 8:], np.s_[0, 0, :8], np.s_[0, 0, 8:], np.s_[:, :, 0]]
)
def test_what_is_not_aligned(slab, part):
    assert aligned_runs(slab[part]) is None


def test_memory_that_begins_within_a_page():
    rows = Scratch().array((2 * PAGE,), np.dtype(np.uint8))
    assert aligned_runs(rows[8 : 8 + PAGE]) is None


def test_rows_that_are_not_a_page_apart():
    rows = Scratch().array((2, PAGE + 8), np.dtype(np.uint8))
    assert aligned_runs(rows[:, :PAGE]) is None


def no_direct_open(monkeypatch):
    real = os.open

    def opening(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct writes")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", opening)


def no_direct_write(monkeypatch):
    real, calls = os.pwritev, []

    def writing(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError(errno.EINVAL, "no direct writes")
        return real(*arguments)

    monkeypatch.setattr(os, "pwritev", writing)


def short_writes(monkeypatch):
    real = os.pwritev

    def writing(descriptor, parts, at):
        return real(descriptor, [parts[0][:512]], at)

    monkeypatch.setattr(os, "pwritev", writing)


def few_parts(monkeypatch):
    monkeypatch.setattr(durable, "_MAX_PARTS", 2)


def as_usual(monkeypatch):
    pass


@pytest.mark.parametrize(
    "how", [as_usual, no_direct_open, no_direct_write, short_writes, few_parts]
)
@pytest.mark.parametrize("less", [0, 1, PAGE - 1])
def test_content(monkeypatch, tmp_path, slab, how, less):
    """Less than the parts have is the file's length, and the rest is padding."""
    how(monkeypatch)
    part = slab[:, 2:4]
    (tmp_path / "x").write_bytes(b"longer" * 10_000)
    runs = aligned_runs(part)
    assert runs is not None
    write_file(tmp_path / "x", runs, part.nbytes - less)
    assert (tmp_path / "x").read_bytes() == part.tobytes()[: part.nbytes - less]


def test_a_thousand_parts_and_more(tmp_path, slab):
    runs = aligned_runs(slab[:, ::2])
    assert runs is not None
    write_file(tmp_path / "x", runs * 200, slab[:, ::2].nbytes * 200)
    assert (tmp_path / "x").read_bytes() == slab[:, ::2].tobytes() * 200


@pytest.mark.parametrize("call", ["open", "pwritev", "ftruncate"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_errors_name_the_file(monkeypatch, tmp_path, slab, call, code):
    def failing(*_):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(OSError, match=os.strerror(code)) as info:
            write_file(tmp_path / "x", aligned_runs(slab) or [], slab.nbytes)
    assert (info.value.errno, info.value.filename) == (code, str(tmp_path / "x"))
