"""Owns INT4 in groups of 32: as bfloat16 where the view wants that, and made from it.

The bit layout is `ddtree_jax.quant`'s. The arithmetic is NumPy's, since XLA may flush
the smallest bfloat16 numbers to zero.
"""

import functools
from pathlib import Path

import jax
import numpy as np

from convert.formats.parts import BF16, Int4, read_rows, wrong
from convert.tensor import DerivedTensor, Tensor, check_finite, read_array
from ddtree_jax.errors import CheckpointError
from ddtree_jax.quant import GROUP_SIZE, NIBBLES_PER_WORD, pack, unpack

_LOWEST, _HIGHEST = -8, 7
# What compressed-tensors puts in place of a scale of zero: bfloat16's epsilon.
_SCALE_OF_ZEROS = np.float32(2.0**-7)

_pack = jax.jit(pack)
_unpack = jax.jit(unpack)


def dequantised(base: str, int4: Int4) -> DerivedTensor:
    """Returns the bfloat16 weight q · scale, which is its meaning.

    Args:
      base: The weight's name without its last part.

    Raises:
      CheckpointError: The parts do not fit each other.
    """
    shape = _check_parts(int4)

    @functools.cache
    def check_stated_shape() -> None:
        if int4.shape is not None:
            stated = read_array(int4.shape).tolist()
            if stated != list(shape):
                raise CheckpointError(
                    f"{int4.shape.file}: {int4.shape.name} is {stated}; expected "
                    f"{list(shape)} from {int4.packed.name}"
                )

    def rows(start: int, stop: int) -> np.ndarray:
        check_stated_shape()
        scale = read_rows(int4.scale, start, stop).astype(np.float32)
        check_finite(scale, int4.scale)
        q = np.asarray(_unpack(read_rows(int4.packed, start, stop)))
        with np.errstate(over="ignore"):
            out = (q.astype(np.float32) * np.repeat(scale, GROUP_SIZE, 1)).astype(BF16)
        check_finite(out, int4.scale)
        return out

    return DerivedTensor(f"{base}.weight", int4.packed.file, "BF16", shape, rows)


def quantised(base: str, weight: Tensor) -> Int4:
    """Returns `weight` in INT4, by compressed-tensors' symmetric rule.

    scale = bfloat16(max |w| / 7.5) of each group; q = w / scale, rounded to bfloat16
    and then to the nearest integer, ties to even, and clipped to -8 … 7.

    Raises:
      CheckpointError: The inputs of `weight` are no whole groups.
    """
    if weight.dtype != "BF16" or len(weight.shape) != 2 or weight.shape[1] % GROUP_SIZE:
        raise wrong(weight, f"a BF16 matrix, its inputs a multiple of {GROUP_SIZE}")
    outputs, inputs = weight.shape

    def read(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        values = read_rows(weight, start, stop)
        check_finite(values, weight)
        groups = values.reshape(stop - start, -1, GROUP_SIZE)
        return groups, _scales(groups)

    def scale_rows(start: int, stop: int) -> np.ndarray:
        return read(start, stop)[1].astype(BF16)

    def packed_rows(start: int, stop: int) -> np.ndarray:
        groups, scale = read(start, stop)
        quotient = _round_to_bfloat16(_widened(groups) / scale[..., None])
        q = np.clip(np.rint(quotient), _LOWEST, _HIGHEST).astype(np.int32)
        return np.asarray(_pack(q.reshape(stop - start, inputs)))

    words, groups = inputs // NIBBLES_PER_WORD, inputs // GROUP_SIZE
    name, file = f"{base}.weight", weight.file
    return Int4(
        DerivedTensor(f"{name}_packed", file, "I32", (outputs, words), packed_rows),
        DerivedTensor(f"{name}_scale", file, "BF16", (outputs, groups), scale_rows),
        stated_shape(base, file, (outputs, inputs)),
    )


def stated_shape(base: str, file: Path, shape: tuple[int, int]) -> DerivedTensor:
    """Returns the `weight_shape` of a weight [out, in], int32 as in Kimi's files."""
    values = np.array(shape, np.int32)

    def rows(start: int, stop: int) -> np.ndarray:
        return values[start:stop]

    return DerivedTensor(f"{base}.weight_shape", file, "I32", (2,), rows)


def _scales(groups: np.ndarray) -> np.ndarray:
    """Returns the scale of each group of bfloat16, as float32."""
    # Without the sign, the bits of finite numbers are in the order of the numbers.
    largest = (groups.view(np.uint16) & 0x7FFF).max(axis=-1).view(BF16)
    scale = _round_to_bfloat16(_widened(largest) / np.float32(7.5))
    return np.where(scale == 0, _SCALE_OF_ZEROS, scale)


def _widened(values: np.ndarray) -> np.ndarray:
    """Returns bfloat16 as float32; by bits, since a cast takes ten times as long."""
    return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Returns finite float32 rounded to bfloat16's precision, ties to even."""
    bits = values.view(np.uint32)
    bits += 0x7FFF + (bits >> 16 & 1)
    bits &= 0xFFFF0000
    return values


def _check_parts(int4: Int4) -> tuple[int, int]:
    """Returns the shape of the weight that the parts stand for."""
    packed, scale, stated = int4
    if packed.dtype != "I32" or len(packed.shape) != 2:
        raise wrong(packed, "an I32 matrix")
    outputs, words = packed.shape
    groups = words * NIBBLES_PER_WORD // GROUP_SIZE
    if scale.dtype != "BF16" or scale.shape != (outputs, groups):
        raise wrong(scale, f"BF16 {[outputs, groups]}")
    if stated is not None and (
        stated.dtype not in ("I32", "I64") or stated.shape != (2,)
    ):
        raise wrong(stated, "I32 or I64 [2]")
    return outputs, words * NIBBLES_PER_WORD
