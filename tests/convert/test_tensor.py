"""A derived tensor gives the same bytes as the array it stands for, from anywhere."""

import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convert import tensor
from convert.stream import read_pieces
from convert.tensor import DerivedTensor, read_array

ARRAY = np.arange(7 * 3 * 5, dtype=np.float32).reshape(7, 3, 5)
STEP_BYTES = 130  # two rows of 60 bytes


def derived(array: np.ndarray, dtype: str, asked: list | None = None) -> DerivedTensor:
    def rows(start: int, stop: int) -> np.ndarray:
        assert 0 <= start < stop <= max(len(array.reshape(-1)), 1)
        if asked is not None:
            asked.append(stop - start)
        return array[start:stop] if array.shape else array

    return DerivedTensor("x", Path("file"), dtype, array.shape, rows)


@given(st.integers(0, ARRAY.nbytes), st.integers(0, ARRAY.nbytes))
def test_any_range(start, stop):
    start, stop = sorted((start, stop))
    asked: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor, "_STEP_BYTES", STEP_BYTES)
        out = bytearray(stop - start)
        derived(ARRAY, "F32", asked).read_into(memoryview(out), start)
    assert bytes(out) == ARRAY.tobytes()[start:stop]
    assert all(rows <= 2 for rows in asked)


@pytest.mark.parametrize("outside", [(-1, 4), (ARRAY.nbytes - 3, 4)])
def test_range_outside(outside):
    start, size = outside
    with pytest.raises(AssertionError, match=rf"'x', {start}, {start + size}"):
        derived(ARRAY, "F32").read_into(memoryview(bytearray(size)), start)


def test_rows_that_are_not_contiguous():
    turned = ARRAY.transpose(1, 2, 0)
    found = read_array(derived(turned, "F32"))
    np.testing.assert_array_equal(found, turned)


def test_number_without_axes():
    number = np.array(1.5, ml_dtypes.bfloat16)
    found = read_array(derived(number, "BF16"))
    assert found.tobytes() == number.tobytes() and found.shape == ()


@pytest.mark.parametrize("bad", [ARRAY.astype(np.float64), ARRAY[:, :2]])
def test_rows_that_are_not_as_declared(bad):
    wrong = DerivedTensor("x", Path("f"), "F32", ARRAY.shape, lambda a, b: bad[a:b])
    with pytest.raises(AssertionError, match="x"):
        read_array(wrong)


def test_pieces(monkeypatch):
    monkeypatch.setattr("convert.stream.PIECE_BYTES", 64)
    empty = np.zeros((0, 4), np.int32)
    tensors = [derived(ARRAY, "F32"), derived(empty, "I32"), derived(ARRAY[:1], "F32")]
    pieces = []
    for piece in read_pieces(tensors):
        time.sleep(0.005)  # the next one is read meanwhile, into other memory
        pieces.append((piece.data.tobytes(), piece.last))
    assert [len(data) for data, _ in pieces] == [64] * 6 + [36, 0, 60]
    assert [i for i, (_, last) in enumerate(pieces) if last] == [6, 7, 8]
    assert b"".join(data for data, _ in pieces) == ARRAY.tobytes() + ARRAY[:1].tobytes()
