"""Owns what a tensor is here: a name, a shape, a dtype and bytes that are read lazily.

Every source gives its weights as `Tensor`s under the names of the Hugging Face
checkpoint, and every target is written from them, so neither knows the other.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np

from ddtree_jax.errors import CheckpointError

# The dtypes that are carried, by safetensors' names.
DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "U8": np.dtype(np.uint8),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Of the rows that `DerivedTensor` makes at a time.
_STEP_BYTES = 8 * 2**20


class Tensor(Protocol):
    """One array of a checkpoint.

    Attributes:
      file: Where its bytes come from, for messages.
      dtype: By safetensors' name.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def file(self) -> Path: ...  # noqa: D102
    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def nbytes(self) -> int: ...  # noqa: D102

    def read_into(self, out: memoryview, start: int) -> None:
        """Fills `out` with the array's little-endian bytes, C order, from `start` on.

        Raises:
          CheckpointError: They cannot be read; the message names file and tensor.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class DerivedTensor:
    """A tensor that is computed from stored ones, some rows at a time.

    Attributes:
      rows: Gives rows start … stop-1 of the first axis, in the dtype and shape of
        this tensor. It is asked for few rows at a time, in any order.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    rows: Callable[[int, int], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def read_into(self, out: memoryview, start: int) -> None:
        """Fills `out` with the array's bytes from `start` on."""
        stop = start + out.nbytes
        assert start >= 0 and stop <= self.nbytes, (self.name, start, stop)
        row_bytes = self.nbytes // self.shape[0] if self.shape else self.nbytes
        step = max(1, _STEP_BYTES // max(row_bytes, 1))
        at = start
        while at < stop:
            first = at // row_bytes
            last = min(first + step, -(-stop // row_bytes))
            rows = self.rows(first, last)
            want = (last - first, *self.shape[1:]) if self.shape else ()
            assert rows.dtype == DTYPES[self.dtype], (self.name, rows.dtype)
            assert rows.shape == want, (self.name, rows.shape, want)
            end = min(stop, last * row_bytes)
            made = memoryview(rows.reshape(-1).view(np.uint8))
            offset = first * row_bytes
            out[at - start : end - start] = made[at - offset : end - offset]
            at = end


@dataclasses.dataclass(frozen=True, slots=True)
class FiniteTensor:
    """A tensor of which all that is read, in whole elements, must be finite."""

    tensor: Tensor

    @property
    def name(self) -> str:
        """That of the tensor; so are the others."""
        return self.tensor.name

    @property
    def file(self) -> Path:  # noqa: D102
        return self.tensor.file

    @property
    def dtype(self) -> str:  # noqa: D102
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:  # noqa: D102
        return self.tensor.shape

    @property
    def nbytes(self) -> int:  # noqa: D102
        return self.tensor.nbytes

    def read_into(self, out: memoryview, start: int) -> None:
        """Fills `out` with the array's bytes from `start` on.

        Raises:
          CheckpointError: They hold NaN or infinity.
        """
        self.tensor.read_into(out, start)
        check_finite(np.frombuffer(out, DTYPES[self.dtype]), self.tensor)


def read_array(tensor: Tensor) -> np.ndarray:
    """Returns the whole of a small tensor."""
    out = np.empty(tensor.shape, DTYPES[tensor.dtype])
    tensor.read_into(memoryview(out.reshape(-1).view(np.uint8)), 0)
    return out


def all_finite(array: np.ndarray) -> bool:
    """Says whether no exponent is all ones; bounded pieces keep temporaries small."""
    if array.dtype.kind in "iub":
        return True
    exponent = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}
    bits = np.dtype(f"u{array.dtype.itemsize}")
    mask = bits.type(exponent[array.dtype.name])
    flat = array.reshape(-1).view(bits)
    step = 2**20
    return not any(
        ((flat[i : i + step] & mask) == mask).any() for i in range(0, flat.size, step)
    )


def check_finite(values: np.ndarray, tensor: Tensor) -> None:
    """Raises CheckpointError, naming `tensor`, if a value of it is not finite."""
    if not all_finite(values):
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} holds NaN or infinity; "
            "expected finite numbers"
        )
