"""INT4 weights in the kernels' order and back: the same bits, each where it belongs."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_jax.pallas.int4_matmul.tiles import Int4Tiles, from_tiles, to_tiles
from ddtree_jax.quant import Int4Weight
from tests.support.compare import assert_bit_equal

_to_tiles, _from_tiles = jax.jit(to_tiles), jax.jit(from_tiles)


def place_of_nibble(o: int, i: int) -> tuple[int, int]:
    """Returns the word of a tile, and the bit in it, where output o, input i is."""
    h, r = divmod(o, 8)
    c, rest = divmod(i, 16)
    j, rest = divmod(rest, 4)
    p, e = divmod(rest, 2)
    return 16 * r + 4 * c + j, 4 * (h + 2 * p + 4 * e)


def place_of_scale(o: int, g: int) -> int:
    """Returns which scale of a tile is of output o and inputs 32 g .. 32 g + 31."""
    h, r = divmod(o, 8)
    return 4 * r + 2 * g + h


def any_weight(rng: np.random.Generator, shape: tuple[int, ...]) -> Int4Weight:
    """Returns any words, and as scales any bits."""
    *lead, inputs = shape
    words = rng.integers(-(2**31), 2**31, (*lead, inputs // 8)).astype(np.int32)
    scale = rng.integers(0, 2**16, (*lead, inputs // 32)).astype(np.uint16)
    return Int4Weight(jnp.asarray(words), jnp.asarray(scale.view(ml_dtypes.bfloat16)))


def formula(weight: Int4Weight) -> tuple[np.ndarray, np.ndarray]:
    """Returns words and scales of the tiles, nibble by nibble and scale by scale."""
    *lead, out, inputs = weight.shape
    packed = np.asarray(weight.packed).view(np.uint32)
    scale = np.asarray(weight.scale)
    words = np.zeros((*lead, out // 16, inputs // 64, 128), np.uint32)
    scales = np.zeros((*lead, out // 16, inputs // 64, 32), ml_dtypes.bfloat16)
    for o, i in np.ndindex(16, 64):
        nibble = packed[..., o::16, i // 8 :: 8] >> np.uint32(4 * (i % 8)) & 15
        word, bit = place_of_nibble(o, i)
        words[..., word] |= nibble << np.uint32(bit)
    for o, g in np.ndindex(16, 2):
        scales[..., place_of_scale(o, g)] = scale[..., o::16, g::2]
    return words.view(np.int32).reshape(packed.shape), scales.reshape(scale.shape)


def assert_same(got: Int4Weight, want: Int4Weight) -> None:
    assert_bit_equal(got.packed, want.packed)
    assert_bit_equal(got.scale, want.scale)


# Each shape is compiled.
@settings(max_examples=20)
@given(
    lead=st.lists(st.integers(1, 3), max_size=2),
    rows=st.integers(1, 3),
    columns=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_tiles_are_the_formula_and_back(lead, rows, columns, seed):
    shape = (*lead, 16 * rows, 64 * columns)
    weight = any_weight(np.random.default_rng(seed), shape)
    tiles = _to_tiles(weight)
    tiles.validate()
    assert tiles.shape == weight.shape == shape
    words, scales = formula(weight)
    assert_bit_equal(tiles.words, words)
    assert_bit_equal(tiles.scales, scales)
    assert_same(_from_tiles(tiles), weight)


def test_any_words_are_the_tiles_of_a_weight():
    any_bits = any_weight(np.random.default_rng(1), (2, 48, 128))
    tiles = Int4Tiles(any_bits.packed, any_bits.scale)
    weight = _from_tiles(tiles)
    weight.validate()
    assert weight.shape == tiles.shape == (2, 48, 128)
    back = _to_tiles(weight)
    assert_bit_equal(back.words, tiles.words)
    assert_bit_equal(back.scales, tiles.scales)


def test_every_nibble_in_every_place():
    """One weight a place and value; all its other nibbles and its scales are zero."""
    places = list(np.ndindex(16, 64))
    u = np.zeros((len(places), 16, 16, 64), np.uint32)
    want = np.zeros((len(places), 16, 128), np.uint32)
    value = np.arange(16, dtype=np.uint32)
    for n, (o, i) in enumerate(places):
        u[n, :, o, i] = value
        word, bit = place_of_nibble(o, i)
        want[n, :, word] = value << np.uint32(bit)
    shifted = u.reshape(*u.shape[:-1], 8, 8) << 4 * np.arange(8, dtype=np.uint32)
    packed = np.bitwise_or.reduce(shifted, axis=-1).view(np.int32)
    scale = jnp.zeros((*packed.shape[:-1], 2), jnp.bfloat16)
    weight = Int4Weight(jnp.asarray(packed), scale)
    tiles = _to_tiles(weight)
    assert_bit_equal(tiles.words, want.view(np.int32).reshape(packed.shape))
    assert_same(_from_tiles(tiles), weight)


def test_every_scale_and_every_place_of_one():
    """All 65,536 bit patterns, NaN among them; each is in one of the 32 places."""
    tiles = 2**16 // 32
    patterns = np.random.default_rng(2).permutation(2**16).astype(np.uint16)
    scale = patterns.reshape(tiles, 16, 2)
    want = np.zeros((tiles, 32), np.uint16)
    for o, g in np.ndindex(16, 2):
        want[:, place_of_scale(o, g)] = scale[:, o, g]
    weight = Int4Weight(
        jnp.zeros((tiles, 16, 8), jnp.int32),
        jnp.asarray(scale.view(ml_dtypes.bfloat16)),
    )
    got = _to_tiles(weight)
    assert_bit_equal(
        got.scales, want.view(ml_dtypes.bfloat16).reshape(weight.scale.shape)
    )
    assert_same(_from_tiles(got), weight)


def test_a_scale_is_of_its_group_in_every_tile():
    """Group 2 c + g is place g of tile column c, whatever the number of columns."""
    columns = 5
    scale = np.arange(32 * 2 * columns, dtype=np.uint16).reshape(32, 2 * columns)
    weight = Int4Weight(
        jnp.zeros((32, 8 * columns), jnp.int32),
        jnp.asarray(scale.view(ml_dtypes.bfloat16)),
    )
    tiles = np.asarray(_to_tiles(weight).scales).view(np.uint16).reshape(2, columns, 32)
    for o, group in np.ndindex(32, 2 * columns):
        column, g = divmod(group, 2)
        found = tiles[o // 16, column, place_of_scale(o % 16, g)]
        assert found == scale[o, group], (o, group)


WRONG_SHAPES = [(8, 64), (40, 128), (2, 16, 32), (16, 96)]


@pytest.mark.parametrize("shape", WRONG_SHAPES)
def test_weights_that_do_not_fill_tiles_are_refused(shape):
    weight = any_weight(np.random.default_rng(3), shape)
    tiles = Int4Tiles(weight.packed, weight.scale)
    for refuse in (lambda: to_tiles(weight), tiles.validate):
        with pytest.raises(ValueError) as error:
            refuse()
        assert str(error.value) == (
            "the INT4 kernels expect outputs in 16s and inputs in 64s, "
            f"got a weight {shape}"
        )


@pytest.mark.parametrize(
    ("words", "scales", "message"),
    [
        (
            np.zeros((16, 8), np.uint32),
            np.zeros((16, 2), ml_dtypes.bfloat16),
            "expects int32 packed and bfloat16 scale, got uint32 and bfloat16",
        ),
        (
            np.zeros((16, 8), np.int32),
            np.zeros((16, 2), np.float32),
            "expects int32 packed and bfloat16 scale, got int32 and float32",
        ),
        (
            np.zeros((16, 8), np.int32),
            np.zeros((16, 4), ml_dtypes.bfloat16),
            "expects 4 words per scale, got packed (16, 8) and scale (16, 4)",
        ),
    ],
)
def test_arrays_that_are_no_weight_are_refused(words, scales, message):
    with pytest.raises(ValueError) as error:
        Int4Tiles(jnp.asarray(words), jnp.asarray(scales)).validate()
    assert str(error.value) == f"Int4Weight {message}"


def test_tiles_are_a_tree_of_a_weights_arrays():
    weight = any_weight(np.random.default_rng(4), (3, 16, 64))
    tiles = to_tiles(weight)
    leaves, kinds = jax.tree.leaves(tiles), jax.tree.leaves(weight)
    assert [(x.shape, x.dtype) for x in leaves] == [(x.shape, x.dtype) for x in kinds]
    second = jax.tree.map(lambda leaf: leaf[1], tiles)
    assert second.shape == (16, 64)
    assert_same(from_tiles(second), jax.tree.map(lambda leaf: leaf[1], weight))
