"""Tensors put together from pieces, and the store of blocks."""

import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from convert.safetensors_file import FileTensor
from convert.sglang import pieces
from convert.sglang.cache import BlockCache
from convert.sglang.pieces import (
    RowRange,
    Rows,
    Same,
    join_columns,
    read_rows,
    same,
    take_columns,
)
from convert.tensor import DerivedTensor, FiniteTensor, read_array
from ddtree_jax.errors import CheckpointError

NOISE = np.random.default_rng(0)


@dataclasses.dataclass(frozen=True)
class Held:
    """A tensor in memory that notes what is read of it."""

    array: np.ndarray
    file: Path = Path("first.safetensors")
    name: str = "w"
    dtype: str = "I32"
    reads: list = dataclasses.field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def read_into(self, out: memoryview, start: int) -> None:
        self.reads.append((start, out.nbytes))
        data = self.array.reshape(-1).view(np.uint8)
        out[:] = memoryview(data[start : start + out.nbytes])


def words(*shape: int) -> np.ndarray:
    return NOISE.integers(0, 2**31, shape).astype(np.int32)


def test_rows_of_several_tensors():
    first, second = words(6, 5), words(4, 5)
    held = Held(first), Held(second)
    ranges = (RowRange(held[0], 2, 5), RowRange(held[1], 0, 4), RowRange(held[0], 5, 6))
    rows = Rows("v", ranges)
    want = np.concatenate([first[2:5], second, first[5:6]])
    assert (rows.name, rows.dtype, rows.shape) == ("v", "I32", (8, 5))
    assert rows.nbytes == want.nbytes
    np.testing.assert_array_equal(read_array(rows), want)
    data = want.reshape(-1).view(np.uint8)
    for start in range(0, want.nbytes, 7):
        for stop in range(start, want.nbytes + 1, 13):
            out = bytearray(stop - start)
            rows.read_into(memoryview(out), start)
            assert bytes(out) == data[start:stop].tobytes()


def test_only_the_rows_that_are_asked_for_are_read():
    held = Held(words(6, 5)), Held(words(6, 5))
    rows = Rows("v", tuple(RowRange(tensor, 1, 4) for tensor in held))
    read_rows(rows, 4, 6)
    assert held[0].reads == []
    assert held[1].reads == [(2 * 20, 2 * 20)]


def test_columns_side_by_side_and_apart():
    array = words(9, 12)
    parts = [take_columns("p", Held(array), i, i + 4) for i in (0, 4, 8)]
    assert [part.shape for part in parts] == [(9, 4)] * 3
    np.testing.assert_array_equal(read_array(parts[1]), array[:, 4:8])
    joined = join_columns("v", parts)
    assert (joined.name, joined.shape) == ("v", (9, 12))
    np.testing.assert_array_equal(read_rows(joined, 3, 7), array[3:7])


@pytest.mark.parametrize("at", [0, 99, 100, 399])
def test_every_byte_of_a_copy_is_compared(monkeypatch, at):
    monkeypatch.setattr(pieces, "_STEP_BYTES", 100)
    array = words(100)
    other = array.copy()
    other.view(np.uint8)[at] ^= 128
    both = same([Held(array), Held(array.copy()), Held(other, Path("second"))])
    with pytest.raises(
        CheckpointError, match=r"second: w differs from its copy in first.safetensors"
    ):
        read_array(both)
    # What is not read is not compared.
    out = bytearray(4)
    both.read_into(memoryview(out), 4 if at == 0 else 0)


def test_what_lies_in_one_place_is_one_copy():
    tensor = Held(words(4))
    assert same([tensor, tensor]) is tensor
    stored = [
        FileTensor("w", Path("f"), "I32", (4,), begin, 16) for begin in (8, 8, 24)
    ]
    checked = [FiniteTensor(tensor) for tensor in stored]
    assert same(checked[:2]) is checked[1]
    assert same(checked) == Same((checked[1], checked[2]))


def test_the_cache_keeps_what_was_used_last():
    reads = []

    def read(key: str) -> np.ndarray:
        reads.append(key)
        return np.zeros(10, np.uint8)

    cache = BlockCache(30)
    for key in "abcabadab":
        cache.get(key, partial(read, key))
    # d drops c, the least recently used.
    assert reads == ["a", "b", "c", "d"]
    cache.get("c", partial(read, "c"))
    assert reads[-1] == "c"
    # One block is held, however large.
    large = np.zeros(100, np.uint8)
    assert cache.get("e", partial(np.asarray, large)) is large
    assert cache.get("e", partial(read, "e")) is large


def test_a_derived_part_can_be_a_piece():
    array = words(8, 3)
    derived = DerivedTensor(
        "d", Path("f"), "I32", (8, 3), lambda start, stop: array[start:stop]
    )
    rows = Rows("v", (RowRange(derived, 6, 8), RowRange(derived, 0, 2)))
    np.testing.assert_array_equal(
        read_array(rows), np.concatenate([array[6:], array[:2]])
    )
