"""INT4 products against float64: every nibble, every scale."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ddtree_jax.pallas import int4_matmul
from ddtree_jax.pallas.int4_matmul.cases import DENSE_CASES
from ddtree_jax.quant import Int4Weight, pack
from tests.support.compare import assert_bit_equal, assert_close
from tests.support.weights import GOLDEN, dequantised, random_int4

dense = jax.jit(int4_matmul, static_argnames="implementation")


@pytest.mark.parametrize(
    "case", [c for c in DENSE_CASES if c.size == "ci"], ids=lambda c: c.name
)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
def test_dense_cases(case, dtype):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((case.tokens, case.inputs)).astype(dtype)
    weight = random_int4(rng, (case.outputs, case.inputs))
    got = dense(x, weight)
    assert got.dtype == dtype
    assert_close("int4_matmul", got, x.astype(np.float64) @ dequantised(weight).T)
    assert_bit_equal(dense(x, weight), got)
    assert_bit_equal(dense(x, weight, implementation="reference"), got)


@pytest.mark.parametrize("case", ["formula", "all_values", "random_7x160"])
def test_identity_reads_back_the_golden_weight(case):
    """x = 1 selects each input in turn, so every nibble and scale is seen exactly."""
    golden = np.load(GOLDEN / "int4.npz")
    weight = Int4Weight(
        jnp.asarray(golden[f"{case}_packed"]),
        jnp.asarray(golden[f"{case}_scale_bits"].view(ml_dtypes.bfloat16)),
    )
    identity = np.eye(weight.shape[1], dtype=ml_dtypes.bfloat16)
    got = np.asarray(dense(identity, weight)).T
    assert_bit_equal(got.view(np.uint16), golden[f"{case}_dequantised_bits"])


def test_every_nibble_in_every_place():
    """Output o holds nibble o % 16 at input o // 16 only, and zeros elsewhere."""
    q = np.zeros((16 * 64, 64), np.int32)
    q[np.arange(16 * 64), np.arange(16 * 64) // 16] = np.arange(16 * 64) % 16 - 8
    scale = np.full((16 * 64, 2), (1, 4), ml_dtypes.bfloat16)
    x = (1 + np.arange(64, dtype=np.float32))[None]
    got = dense(x, Int4Weight(pack(jnp.asarray(q)), jnp.asarray(scale)))
    o = np.arange(16 * 64)
    factor = np.where(o // 16 < 32, 1, 4)
    assert_bit_equal(got[0], ((1 + o // 16) * (o % 16 - 8) * factor).astype(np.float32))


def test_a_scale_covers_its_group_and_nothing_else():
    weight = random_int4(np.random.default_rng(2), (3, 96))
    doubled = weight.scale.at[:, 1].multiply(2)
    identity = np.eye(96, dtype=np.float32)
    want = np.array(dense(identity, weight))
    want[32:64] *= 2
    got = dense(identity, dataclasses.replace(weight, scale=doubled))
    assert_bit_equal(got, want)


@pytest.mark.parametrize("x_shape", [(2, 64), (96,), (1, 2, 96)])
def test_dense_shapes_are_named(x_shape):
    weight = random_int4(np.random.default_rng(3), (5, 96))
    with pytest.raises(ValueError) as error:
        dense(jnp.zeros(x_shape), weight)
    assert str(error.value) == (
        f"int4_matmul: x has shape {x_shape}, expected [T, inputs] for a weight "
        "[out, inputs] of shape (5, 96)"
    )


def test_dense_refuses_a_broken_weight():
    weight = random_int4(np.random.default_rng(3), (5, 96))
    broken = dataclasses.replace(weight, scale=weight.scale[:, :2])
    with pytest.raises(ValueError, match="Int4Weight expects 4 words per scale"):
        dense(jnp.zeros((1, 96)), broken)
