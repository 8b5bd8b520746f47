"""The comparator sees each kind of difference, and the traps are where they belong."""

import numpy as np
import pytest

from tests.support import poison, trees
from tests.support.compare import assert_bit_equal, assert_close
from tests.support.tolerances import TOLERANCES

WANT = np.linspace(1, 2, 1000)


def changed(index: int, value: float) -> np.ndarray:
    got = WANT.astype(np.float32)
    got[index] = value
    return got


@pytest.mark.parametrize(
    ("got", "message"),
    [
        (changed(7, np.nan), r"NaN in 1 places, expected in 0; .* \(7,\)"),
        (changed(7, np.inf), r"\+inf in 1 places"),
        (changed(7, -np.inf), "-inf in 1 places"),
        (changed(7, 1.5), r"1 of 1000 values differ; at \(7,\) 1\.5, expected 1\.007"),
        (changed(7, 1.5)[:8], r"shape \(8,\), expected \(1000,\)"),
        (changed(7, 1.5).astype(np.float16), "no tolerance for .*float16"),
    ],
)
def test_a_difference_is_named(got, message):
    with pytest.raises(AssertionError, match=message):
        assert_close("rotate", got, WANT)


def test_small_errors_of_one_direction_are_seen_by_the_cosine():
    want = np.tile([1e-9, -1e-9], 500)
    with pytest.raises(AssertionError, match="cosine distance"):
        assert_close("rotate", np.zeros(1000, np.float32), want)


def test_equal_non_finite_places_pass():
    want = np.array([np.nan, np.inf, -np.inf, 1.0])
    assert_close("rotate", want.astype(np.float32), want)
    with pytest.raises(AssertionError, match="NaN"):
        assert_close("rotate", want[[1, 0, 2, 3]].astype(np.float32), want)


def test_bit_equality_tells_signed_zeros_and_accepts_nan():
    zeros = np.zeros(2, np.float32)
    assert_bit_equal(zeros * np.float32(np.nan), zeros * np.float32(np.nan))
    with pytest.raises(AssertionError, match="2 of 2 values differ; first at"):
        assert_bit_equal(zeros, -zeros)


def test_every_tolerance_says_why():
    assert all(len(row.reason) > 20 for row in TOLERANCES.values())


def test_poison_covers_everything_but_the_committed_rows():
    table = np.array([[2, 0], [1, 3]], np.int32)
    length = np.array([5, 0], np.int32)
    committed = poison.committed_rows(table, length, num_pages=4, page_size=4)
    assert np.argwhere(committed).tolist() == [[0, 0], [2, 0], [2, 1], [2, 2], [2, 3]]
    poisoned = poison.poison_rows(np.zeros((4, 4, 1)), committed)
    assert np.isnan(poisoned).sum() == 11
    after = poison.poison_table(table, length, page_size=4)
    assert after[0].tolist() == [2, 0]
    assert not set(after[1].tolist()) & set(range(4))


def test_trees_by_literals():
    tree = trees.padded(trees.Tree(np.array([-1, 0, 1, 0, 2]), np.ones(5, bool)), 4)
    assert trees.ancestors(tree).astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 0, 1, 0],
        [1, 0, 0, 0, 1],
    ]
    assert trees.depths(tree).tolist() == [0, 1, 2, 1, 0]
    assert trees.depths(trees.chain(4)).tolist() == [0, 1, 2, 3]
    assert trees.depths(trees.star(4)).tolist() == [0, 1, 1, 1]
