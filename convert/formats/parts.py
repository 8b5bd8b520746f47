"""Owns what the formats share: the parts of a weight, and reading rows of them."""

from typing import NamedTuple

import ml_dtypes
import numpy as np

from convert.tensor import DTYPES, Tensor
from ddtree_jax.errors import CheckpointError

BF16 = np.dtype(ml_dtypes.bfloat16)


class Int4(NamedTuple):
    """A weight [out, in] as compressed-tensors stores it.

    Attributes:
      packed: int32 words [out, in / 8].
      scale: bfloat16 [out, in / 32].
      shape: The two numbers out and in; None when the source does not state them.
    """

    packed: Tensor
    scale: Tensor
    shape: Tensor | None


def read_rows(
    tensor: Tensor, start: int, stop: int, dtype: np.dtype | None = None
) -> np.ndarray:
    """Returns rows start … stop-1 of a matrix.

    Args:
      dtype: How its elements are read, when it is not a dtype that is carried.
    """
    out = np.empty((stop - start, tensor.shape[1]), dtype or DTYPES[tensor.dtype])
    view = memoryview(out.reshape(-1).view(np.uint8))
    tensor.read_into(view, start * tensor.shape[1] * out.itemsize)
    return out


def read_columns(tensor: Tensor, start: int, stop: int) -> np.ndarray:
    """Returns columns start … stop-1 of a matrix, reading no others."""
    rows, columns = tensor.shape
    if stop - start == columns:
        return read_rows(tensor, 0, rows)
    out = np.empty((rows, stop - start), DTYPES[tensor.dtype])
    for row in range(rows):
        view = memoryview(out[row].view(np.uint8))
        tensor.read_into(view, (row * columns + start) * out.itemsize)
    return out


def wrong(tensor: Tensor, expected: str) -> CheckpointError:
    """Returns the error that a tensor has another dtype or shape than `expected`."""
    return CheckpointError(
        f"{tensor.file}: {tensor.name} is {tensor.dtype} {list(tensor.shape)}; "
        f"expected {expected}"
    )
