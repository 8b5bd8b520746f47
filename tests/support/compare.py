"""The one comparator: places of NaN and infinity, then values, then direction."""

import numpy as np

from tests.support.tolerances import TOLERANCES


def assert_close(operation: str, got, want) -> None:
    """Asserts that `got` is `want` within the table's row of operation and dtype.

    Args:
      operation: First half of the key in `TOLERANCES`; the dtype of `got` is
        the second.
      want: The same shape, best in float64.
    """
    got, want = np.asarray(got), np.asarray(want)
    key = (operation, str(got.dtype))
    assert key in TOLERANCES, f"no tolerance for {key}"
    assert got.shape == want.shape, f"{key}: shape {got.shape}, expected {want.shape}"
    tolerance = TOLERANCES[key]
    got, want = got.astype(np.float64), want.astype(np.float64)

    for what, places in (
        ("NaN", np.isnan),
        ("+inf", np.isposinf),
        ("-inf", np.isneginf),
    ):
        differ = np.argwhere(places(got) != places(want))
        assert not len(differ), (
            f"{key}: {what} in {places(got).sum()} places, expected in "
            f"{places(want).sum()}; first difference at {tuple(differ[0].tolist())}"
        )
    finite = np.isfinite(want)
    error = np.abs(np.where(finite, got, 0) - np.where(finite, want, 0))
    size = np.abs(np.where(finite, want, 0))
    bad = (error > tolerance.absolute) & (error > tolerance.relative * size)
    if bad.any():
        worst = np.unravel_index(np.argmax(np.where(bad, error, -1)), error.shape)
        place = tuple(map(int, worst))
        raise AssertionError(
            f"{key}: {bad.sum()} of {bad.size} values differ; at {place} "
            f"{float(got[worst])}, expected {float(want[worst])} ({tolerance.reason})"
        )
    x, y = got[finite], want[finite]
    energy = np.sum(x * x + y * y)
    distance = 1 - 2 * np.sum(x * y) / energy if energy else 0.0
    assert distance <= tolerance.cosine, (
        f"{key}: cosine distance {distance:.2e}, expected at most "
        f"{tolerance.cosine:.0e} ({tolerance.reason})"
    )


def bits(array) -> np.ndarray:
    """Returns the array's bytes as unsigned integers, so that NaN equals itself."""
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def assert_bit_equal(got, want) -> None:
    """Asserts that dtype, shape and every bit are equal."""
    got, want = np.asarray(got), np.asarray(want)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    differ = np.argwhere(bits(got) != bits(want))
    assert not len(differ), (
        f"{len(differ)} of {got.size} values differ; first at {differ[0].tolist()}"
    )
