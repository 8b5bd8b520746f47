"""Owns tensors that are put together from pieces of others, read lazily.

Rows are contiguous, so they are read straight into place; columns are copied.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from convert.tensor import DTYPES, DerivedTensor, FiniteTensor, Tensor
from ddtree_jax.errors import CheckpointError

# Of a copy that is held to compare it.
_STEP_BYTES = 4 * 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class RowRange:
    """Rows start … stop-1 of a tensor."""

    tensor: Tensor
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """A tensor whose rows are those of `parts`, one after the other."""

    name: str
    parts: tuple[RowRange, ...]

    @property
    def file(self) -> Path:
        """Where its first rows come from."""
        return self.parts[0].tensor.file

    @property
    def dtype(self) -> str:
        """That of every part."""
        return self.parts[0].tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The rows of all parts, each as wide as a part's."""
        rows = sum(part.stop - part.start for part in self.parts)
        return (rows, *self.parts[0].tensor.shape[1:])

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def read_into(self, out: memoryview, start: int) -> None:
        """Fills `out` with the array's bytes from `start` on."""
        row_bytes = row_size(self.parts[0].tensor)
        at, stop = 0, start + out.nbytes
        for part in self.parts:
            end = at + (part.stop - part.start) * row_bytes
            first, last = max(start, at), min(stop, end)
            if first < last:
                offset = part.start * row_bytes + first - at
                part.tensor.read_into(out[first - start : last - start], offset)
            at = end


@dataclasses.dataclass(frozen=True, slots=True)
class Same:
    """A tensor that several files hold; every byte that is read is compared."""

    copies: tuple[Tensor, ...]

    @property
    def name(self) -> str:
        """That of the copies."""
        return self.copies[0].name

    @property
    def file(self) -> Path:
        """That of the first copy."""
        return self.copies[0].file

    @property
    def dtype(self) -> str:
        """That of the copies."""
        return self.copies[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the copies."""
        return self.copies[0].shape

    @property
    def nbytes(self) -> int:
        """Bytes of one copy."""
        return self.copies[0].nbytes

    def read_into(self, out: memoryview, start: int) -> None:
        """Fills `out` with the array's bytes from `start` on.

        Raises:
          CheckpointError: A copy differs.
        """
        first, *others = self.copies
        first.read_into(out, start)
        scratch = np.empty(min(out.nbytes, _STEP_BYTES), np.uint8)
        for other in others:
            for at in range(0, out.nbytes, _STEP_BYTES):
                want = np.frombuffer(out[at : at + _STEP_BYTES], np.uint8)
                have = scratch[: want.nbytes]
                other.read_into(memoryview(have), start + at)
                if not np.array_equal(want, have):
                    raise CheckpointError(
                        f"{other.file}: {self.name} differs from its copy in "
                        f"{first.file.name}; expected equal copies"
                    )


def same(copies: Sequence[Tensor]) -> Tensor:
    """Returns one tensor for equal ones; they are compared as it is read."""
    distinct = list({_place(tensor): tensor for tensor in copies}.values())
    return distinct[0] if len(distinct) == 1 else Same(tuple(distinct))


def _place(tensor: Tensor) -> tuple:
    """Says where a tensor's bytes are: ranks may share a file's."""
    stored = tensor.tensor if isinstance(tensor, FiniteTensor) else tensor
    return stored.file, getattr(stored, "begin", id(stored))


def row_size(tensor: Tensor) -> int:
    """Returns the bytes of one row."""
    return math.prod(tensor.shape[1:]) * DTYPES[tensor.dtype].itemsize


def read_rows(tensor: Tensor, start: int, stop: int) -> np.ndarray:
    """Returns rows start … stop-1."""
    out = np.empty((stop - start, *tensor.shape[1:]), DTYPES[tensor.dtype])
    view = memoryview(out.reshape(-1).view(np.uint8))
    tensor.read_into(view, start * row_size(tensor))
    return out


def join_columns(name: str, parts: Sequence[Tensor]) -> Tensor:
    """Returns the matrix whose columns are those of `parts`, side by side."""
    first = parts[0]
    if len(parts) == 1:
        return Rows(name, (RowRange(first, 0, first.shape[0]),))
    shape = (first.shape[0], sum(part.shape[1] for part in parts))
    rows = partial(_joined, tuple(parts))
    return DerivedTensor(name, first.file, first.dtype, shape, rows)


def take_columns(name: str, tensor: Tensor, start: int, stop: int) -> Tensor:
    """Returns the matrix of columns start … stop-1."""
    if (start, stop) == (0, tensor.shape[1]):
        return Rows(name, (RowRange(tensor, 0, tensor.shape[0]),))
    shape = (tensor.shape[0], stop - start)
    rows = partial(_taken, tensor, start, stop)
    return DerivedTensor(name, tensor.file, tensor.dtype, shape, rows)


def _joined(parts: tuple[Tensor, ...], start: int, stop: int) -> np.ndarray:
    return np.concatenate([read_rows(part, start, stop) for part in parts], axis=1)


def _taken(tensor: Tensor, first: int, last: int, start: int, stop: int) -> np.ndarray:
    return np.ascontiguousarray(read_rows(tensor, start, stop)[:, first:last])
