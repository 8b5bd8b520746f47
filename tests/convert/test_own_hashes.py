"""The hash of an array is that of its bytes, however it was read before."""

import hypothesis.strategies as st
import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given

from convert.chunk_files import write_chunks, write_header
from convert.durable import Scratch
from convert.own_hashes import ArrayHashes
from convert.stored import StoredArray

SHAPE, CHUNK = (2, 6, 8), (1, 2, 4)
VALUES = np.arange(96, dtype=np.int32).reshape(SHAPE)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    array = StoredArray(
        tmp_path_factory.mktemp("array") / "a", SHAPE, VALUES.dtype, CHUNK
    )
    write_header(array)
    whole = tuple(slice(0, n) for n in SHAPE)
    write_chunks(array, whole, VALUES, Scratch())
    return array.directory


READS = st.one_of(
    st.tuples(st.just(()), st.integers(0, 1), st.integers(1, 2)),
    st.tuples(st.tuples(st.integers(0, 1)), st.integers(0, 5), st.integers(1, 6)),
    st.tuples(
        st.tuples(st.integers(0, 1), st.integers(0, 5)),
        st.integers(0, 7),
        st.integers(1, 8),
    ),
)


@given(reads=st.lists(READS, max_size=12))
def test_any_reads(directory, reads):
    """In order, again, overlapping, with holes."""
    hashes = ArrayHashes()
    array = StoredArray(directory, SHAPE, VALUES.dtype, CHUNK, hashes)
    for lead, start, stop in reads:
        if start < stop:
            np.testing.assert_array_equal(
                array.read(lead, start, stop), VALUES[lead][start:stop]
            )
    missing = hashes.missing(array)
    assert sum(hashes.finish(array)) >= missing
    assert hashes.missing(array) == 0
    assert hashes.digest(array) == blake3(VALUES.tobytes()).hexdigest()


def test_what_was_read_in_order_is_not_read_again(directory):
    hashes = ArrayHashes()
    array = StoredArray(directory, SHAPE, VALUES.dtype, CHUNK, hashes)
    for layer in range(2):
        array.read((layer,), 0, 4)
        array.read((layer,), 3, 6)
    assert hashes.missing(array) == 0 and list(hashes.finish(array)) == []


def test_a_number_without_axes(tmp_path):
    hashes = ArrayHashes()
    array = StoredArray(tmp_path / "a", (), np.dtype(np.float32), (), hashes)
    write_header(array)
    write_chunks(array, (), np.array(7, np.float32), Scratch())
    assert hashes.missing(array) == 4
    assert list(hashes.finish(array)) == [4]
    assert hashes.digest(array) == blake3(np.float32(7).tobytes()).hexdigest()
