"""The INT4 bit layout: known words, the library's own, and the inverse."""

import dataclasses
import hashlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_jax.quant import Int4Weight, dequantise, pack, unpack
from tests.support.compare import assert_bit_equal
from tests.support.weights import GOLDEN, dequantised, random_int4

CASES = ("formula", "all_values", "random_1x32", "random_5x96", "random_7x160")
CASES += ("random_64x128",)


def sha256(words: np.ndarray) -> str:
    return hashlib.sha256(np.asarray(words, "<i4").tobytes()).hexdigest()


def test_known_words():
    """u[n, k] = (7 k + 3 n) mod 16."""
    n, k = np.arange(128)[:, None], np.arange(64)[None]
    packed = np.asarray(pack(jnp.asarray((7 * k + 3 * n) % 16 - 8, jnp.int32)))
    assert packed.dtype == np.int32
    assert packed.shape == (128, 8)
    assert packed[:2, :2].view(np.uint32).tolist() == [
        [0x1A3C5E70, 0x92B4D6F8],
        [0x4D6F81A3, 0xC5E7092B],
    ]
    assert sha256(packed).startswith("3e4d2487ad4dc16b")
    assert sha256(packed.T).startswith("17682ab2a99fcfd8")


@pytest.mark.parametrize("case", CASES)
def test_golden_words(case):
    golden = np.load(GOLDEN / "int4.npz")
    packed = jnp.asarray(golden[f"{case}_packed"])
    q = jnp.asarray(golden[f"{case}_q"].astype(np.int32))
    assert_bit_equal(pack(q), packed)
    assert_bit_equal(unpack(packed), q)


@pytest.mark.parametrize("case", CASES)
def test_golden_values(case):
    golden = np.load(GOLDEN / "int4.npz")
    weight = Int4Weight(
        jnp.asarray(golden[f"{case}_packed"]),
        jnp.asarray(golden[f"{case}_scale_bits"].view(ml_dtypes.bfloat16)),
    )
    weight.validate()
    got = np.asarray(jax.jit(dequantise)(weight))
    assert_bit_equal(got.view(np.uint16), golden[f"{case}_dequantised_bits"])


def test_lowest_nibble_is_the_lowest_input():
    for k in range(8):
        q = np.full(8, -8)
        q[k] = -7
        assert np.asarray(pack(jnp.asarray(q, jnp.int32))).view(np.uint32) == 1 << 4 * k


def test_every_word_value_survives():
    """The sign bit is a nibble's bit like any other."""
    words = np.array([0, -1, 2**31 - 1, -(2**31), 0x76543210], np.int32)
    assert_bit_equal(pack(unpack(jnp.asarray(words))), words)
    assert unpack(jnp.asarray(words[4:])).tolist() == [-8, -7, -6, -5, -4, -3, -2, -1]
    assert unpack(jnp.asarray(words[:1])).tolist() == [-8] * 8
    assert unpack(jnp.asarray(words[1:2])).tolist() == [7] * 8


@settings(max_examples=50)
@given(q=st.lists(st.integers(-8, 7), min_size=16, max_size=16))
def test_unpack_is_the_inverse_of_pack(q):
    assert unpack(pack(jnp.asarray(q, jnp.int32))).tolist() == q


def test_dequantise_is_the_rounded_product():
    weight = random_int4(np.random.default_rng(0), (3, 5, 96))
    got = np.asarray(dequantise(weight))
    assert got.dtype == ml_dtypes.bfloat16
    assert got.shape == weight.shape == (3, 5, 96)
    assert_bit_equal(got.astype(np.float64), dequantised(weight))


def test_a_scale_covers_its_32_inputs():
    weight = random_int4(np.random.default_rng(1), (2, 96))
    changed = dataclasses.replace(weight, scale=weight.scale.at[1, 1].set(jnp.nan))
    places = np.argwhere(np.isnan(np.asarray(dequantise(changed)).astype(np.float32)))
    assert places.tolist() == [[1, i] for i in range(32, 64)]


@pytest.mark.parametrize(
    ("packed", "scale", "message"),
    [
        (
            ((4, 8), jnp.uint32),
            ((4, 2), jnp.bfloat16),
            "Int4Weight expects int32 packed and bfloat16 scale, "
            "got uint32 and bfloat16",
        ),
        (
            ((4, 8), jnp.int32),
            ((4, 2), jnp.float32),
            "Int4Weight expects int32 packed and bfloat16 scale, got int32 and float32",
        ),
        (
            ((4, 8), jnp.int32),
            ((5, 2), jnp.bfloat16),
            "Int4Weight expects equal leading dimensions, "
            "got packed (4, 8) and scale (5, 2)",
        ),
        (
            ((4, 8), jnp.int32),
            ((4, 4), jnp.bfloat16),
            "Int4Weight expects 4 words per scale, got packed (4, 8) and scale (4, 4)",
        ),
    ],
)
def test_a_broken_invariant_is_named(packed, scale, message):
    weight = Int4Weight(jax.ShapeDtypeStruct(*packed), jax.ShapeDtypeStruct(*scale))
    with pytest.raises(ValueError) as error:
        weight.validate()
    assert str(error.value) == message
