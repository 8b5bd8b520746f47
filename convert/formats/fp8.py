"""Owns FP8 in blocks: w = bfloat16(float32(q) · scale of its block of 128 × 128).

The last block of an axis may be partial. DeepSeek's files call the scales
`weight_scale_inv`, though they multiply; compressed-tensors' call them `weight_scale`.
"""

import ml_dtypes
import numpy as np

from convert.formats.marks import foreign
from convert.formats.parts import BF16, read_rows, wrong
from convert.tensor import DerivedTensor, Tensor, check_finite

BLOCK = 128
_CODES = np.arange(256, dtype=np.uint8)
_VALUES = _CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def dequantised(weight: Tensor, scale: Tensor) -> DerivedTensor:
    """Returns the bfloat16 weight, under the name of the FP8 one.

    Raises:
      UnsupportedFormatError: The scales are not one for each block.
      CheckpointError: The scales are of another dtype.
    """
    if len(weight.shape) != 2:
        raise wrong(weight, "a matrix")
    outputs, inputs = weight.shape
    blocks = (-(-outputs // BLOCK), -(-inputs // BLOCK))
    if scale.shape != blocks:
        kind = "FP8 with other scales than one for each block of 128 × 128"
        raise foreign(scale, kind, expected=f"{list(blocks)} for {weight.name}")
    if scale.dtype not in ("F32", "BF16"):
        raise wrong(scale, "F32 or BF16")

    def rows(start: int, stop: int) -> np.ndarray:
        first = start // BLOCK
        factors = read_rows(scale, first, -(-stop // BLOCK)).astype(np.float32)
        check_finite(factors, scale)
        factors = factors[np.arange(start, stop) // BLOCK - first]
        codes = read_rows(weight, start, stop, np.dtype(np.uint8))
        with np.errstate(over="ignore", invalid="ignore"):
            product = _VALUES[codes] * np.repeat(factors, BLOCK, axis=1)[:, :inputs]
            out = product.astype(BF16)
        check_finite(out, weight)
        return out

    return DerivedTensor(weight.name, weight.file, "BF16", weight.shape, rows)
