"""FP8 and INT4 are bit for bit what torch and compressed-tensors make of them."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from convert.formats import fp8, int4
from convert.formats.parts import Int4
from convert.tensor import DTYPES, DerivedTensor, read_array
from ddtree_jax.errors import CheckpointError

BF16 = np.dtype(ml_dtypes.bfloat16)


class Codes:
    """FP8 numbers as a tensor that is stored somewhere."""

    name, dtype, file = "w.weight", "F8_E4M3", Path("f")

    def __init__(self, codes: np.ndarray):
        self.shape, self.nbytes, self.data = codes.shape, codes.nbytes, codes.tobytes()

    def read_into(self, out: memoryview, start: int) -> None:
        out[:] = self.data[start : start + out.nbytes]


def stored(array: np.ndarray, name: str = "w.weight") -> DerivedTensor:
    def rows(start: int, stop: int) -> np.ndarray:
        return array[start:stop]

    dtype = next(n for n, d in DTYPES.items() if d == array.dtype)
    return DerivedTensor(name, Path("f"), dtype, array.shape, rows)


def in_pieces(tensor, row_bytes: int) -> bytes:
    """Reads a tensor in pieces that begin and end inside rows."""
    step = max(1, row_bytes * 3 // 2)
    out = bytearray(tensor.nbytes)
    for start in reversed(range(0, len(out), step)):
        part = memoryview(out)[start : start + step]
        tensor.read_into(part, start)
    return bytes(out)


@pytest.mark.parametrize("shape", ["576x40", "130x140", "1x1"])
@pytest.mark.parametrize("kind", ["", "_narrow"])
def test_fp8_blocks(golden, shape, kind):
    data, name = golden("formats"), f"fp8_{shape}"
    if kind:
        scale = stored(data[f"{name}_narrow_scale_bits"].view(BF16), "w.weight_scale")
    else:
        scale = stored(data[f"{name}_scale"], "w.weight_scale_inv")
    codes = data[f"{name}_codes"]
    made = fp8.dequantised(Codes(codes), scale)
    assert (made.name, made.dtype, made.shape) == ("w.weight", "BF16", codes.shape)
    expected = data[f"{name}{kind}_dequantised_bits"].tobytes()
    assert read_array(made).tobytes() == expected
    assert in_pieces(made, 2 * codes.shape[1]) == expected


CASES = [
    ("int4", "formula"),
    ("int4", "random_1x32"),
    ("int4", "random_5x96"),
    ("int4", "random_7x160"),
    ("int4", "random_64x128"),
    ("formats", "quantise_hard"),
    ("formats", "quantise_random"),
]


@pytest.mark.parametrize(("file", "case"), CASES[1:])
def test_quantised(golden, file, case):
    data = golden(file)
    weight = data[f"{case}_weight_bits"].view(BF16)
    made = int4.quantised("w", stored(weight))
    scale = read_array(made.scale)
    np.testing.assert_array_equal(scale.view(np.uint16), data[f"{case}_scale_bits"])
    np.testing.assert_array_equal(read_array(made.packed), data[f"{case}_packed"])
    assert (
        in_pieces(made.packed, weight.shape[1] // 2) == data[f"{case}_packed"].tobytes()
    )
    assert made.shape is not None
    np.testing.assert_array_equal(read_array(made.shape), weight.shape)
    names = [tensor.name for tensor in made if tensor is not None]
    assert names == ["w.weight_packed", "w.weight_scale", "w.weight_shape"]


@pytest.mark.parametrize(("file", "case"), [*CASES[:5], ("int4", "all_values")])
def test_int4_as_bfloat16(golden, file, case):
    data = golden(file)
    parts = Int4(
        stored(data[f"{case}_packed"], "w.weight_packed"),
        stored(data[f"{case}_scale_bits"].view(BF16), "w.weight_scale"),
        None,
    )
    made = int4.dequantised("w", parts)
    expected = data[f"{case}_dequantised_bits"].tobytes()
    assert read_array(made).tobytes() == expected
    assert in_pieces(made, 2 * made.shape[1]) == expected


def test_products_below_the_normal_range():
    """XLA would flush these to zero."""
    scale = np.full((1, 1), 2.0**-130).astype(BF16)
    packed = np.full((1, 4), 0x11111111 * 9 - 2**32).astype(np.int32)  # q = 1
    made = int4.dequantised("w", Int4(stored(packed), stored(scale), None))
    assert (read_array(made).astype(np.float64) == 2.0**-130).all()


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_fp8_nan(code):
    made = fp8.dequantised(
        Codes(np.array([[1, code]], np.uint8)), stored(np.ones((1, 1), np.float32))
    )
    with pytest.raises(CheckpointError, match=r"^f: w\.weight holds NaN or infinity"):
        read_array(made)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_fp8_scale_that_is_not_finite(value, dtype):
    scale = np.ones((5, 2), dtype)
    scale[4, 1] = value
    codes = np.zeros((576, 200), np.uint8)
    made = fp8.dequantised(Codes(codes), stored(scale, "w.scale"))
    with pytest.raises(CheckpointError, match=r"^f: w\.scale holds NaN or infinity"):
        read_array(made)


def test_fp8_product_that_overflows():
    made = fp8.dequantised(
        Codes(np.array([[0x7E]], np.uint8)), stored(np.full((1, 1), 3e38, np.float32))
    )
    with pytest.raises(CheckpointError, match=r"w\.weight holds NaN or infinity"):
        read_array(made)


def test_quantising_what_is_not_finite():
    weight = np.ones((2, 32), BF16)
    weight[1, 3] = np.inf
    made = int4.quantised("w", stored(weight))
    for tensor in (made.packed, made.scale):
        with pytest.raises(CheckpointError, match=r"f: w\.weight holds NaN or"):
            read_array(tensor)


def test_rounding_by_bits():
    """Ties, subnormal numbers and both signs, as a cast rounds them."""
    high = np.arange(0, 0x7F7F, 3, np.uint32)[:, None] << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    values = np.concatenate([high | low, high | low | 0x80000000]).view(np.float32)
    expected = values.astype(BF16)
    assert (int4._round_to_bfloat16(values.copy()).astype(BF16) == expected).all()
    assert (int4._widened(expected) == expected.astype(np.float32)).all()
