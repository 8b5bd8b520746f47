"""The shared layers against float64, on one device and split over eight."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ddtree_jax.mesh import TENSOR, make_mesh
from ddtree_jax.model.layers import (
    all_reduce,
    embed,
    head_logits,
    project,
    rms_norm,
    swiglu_partial,
)
from ddtree_jax.model.params import Mlp, partition_specs
from tests.support.compare import assert_bit_equal, assert_close
from tests.support.weights import random_parameters

EVERYWHERE = PartitionSpec()
BY_VOCABULARY = PartitionSpec(TENSOR, None)
DEVICES = pytest.mark.parametrize("devices", [1, 8])


def on_mesh(devices: int, body, in_specs, out_specs=EVERYWHERE):
    mapped = jax.shard_map(
        body,
        mesh=make_mesh(devices),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )
    return jax.jit(mapped)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_rms_norm(dtype, epsilon):
    x, weight = normal(1, 2, 3, 64).astype(dtype), normal(2, 64).astype(dtype)
    x64 = x.astype(np.float64)
    want = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + epsilon) * weight
    got = rms_norm(jnp.asarray(x), jnp.asarray(weight), epsilon)
    assert got.dtype == dtype
    assert_close("rms_norm", got, want.astype(np.float64))


def test_rms_norm_rounds_before_the_weight():
    """1.00390625 is 1 + 2⁻⁸, half a bfloat16 step: rounding first gives 1."""
    x = jnp.asarray([[1.0, 1.0078125]], jnp.bfloat16)
    weight = jnp.asarray([3.0, 3.0], jnp.bfloat16)
    x32 = np.asarray(x, np.float32)
    normed = x32 / np.sqrt((x32**2).mean())
    want = normed.astype(ml_dtypes.bfloat16) * np.asarray(weight)
    late = (normed * 3).astype(ml_dtypes.bfloat16)
    assert (want != late).any()
    assert_bit_equal(rms_norm(x, weight, 0.0), want)


def test_project_accumulates_in_float32():
    """256 + 1 + … is lost term by term in bfloat16."""
    x = jnp.ones((1, 257), jnp.bfloat16).at[0, 0].set(256)
    got = project("tm,om->to", x, jnp.ones((1, 257), jnp.bfloat16))
    assert got.dtype == jnp.bfloat16
    assert got.tolist() == [[512.0]]


def test_project():
    x, weight = normal(3, 2, 256), normal(4, 5, 256)
    got = project("bm,om->bo", jnp.asarray(x), jnp.asarray(weight))
    assert_close("project", got, x.astype(np.float64) @ weight.astype(np.float64).T)


@DEVICES
def test_swiglu(devices):
    mlp = random_parameters(Mlp(2, 64, 32), np.random.default_rng(5))
    x = normal(6, 2, 3, 64)

    def body(x, mlp):
        layer = jax.tree.map(lambda leaf: leaf[1], mlp)
        return all_reduce(swiglu_partial(x, layer), x.dtype)

    got = on_mesh(devices, body, (EVERYWHERE, partition_specs(Mlp(2, 64, 32))))(x, mlp)
    gate, up, down = (
        np.asarray(p[...][1], np.float64) for p in (mlp.gate, mlp.up, mlp.down)
    )
    g = x @ gate.T
    assert_close("swiglu", got, (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T)


@DEVICES
def test_embed_finds_every_token(devices):
    table = normal(7, 32, 8)
    tokens = np.arange(32, dtype=np.int32).reshape(2, 16)
    got = on_mesh(devices, embed, (BY_VOCABULARY, EVERYWHERE))(table, tokens)
    assert_bit_equal(got, table[tokens])


def test_embed_adds_no_other_row():
    """A table of NaN but for one row: the select must not multiply."""
    table = np.full((32, 8), np.nan, np.float32)
    table[13] = normal(8, 8)
    tokens = np.full((1, 2), 13, np.int32)
    got = on_mesh(8, embed, (BY_VOCABULARY, EVERYWHERE))(table, tokens)
    assert_bit_equal(got, table[tokens])


@DEVICES
def test_head_logits(devices):
    head, hidden = normal(9, 32, 64), normal(10, 2, 3, 64)
    by_vocabulary = PartitionSpec(None, None, TENSOR)
    run = on_mesh(devices, head_logits, (BY_VOCABULARY, EVERYWHERE), by_vocabulary)
    got = run(head, hidden)
    assert got.dtype == jnp.float32
    assert_close("head", got, hidden.astype(np.float64) @ head.astype(np.float64).T)


def test_head_logits_of_bfloat16_are_not_rounded():
    one = jnp.ones((1, 1, 257), jnp.bfloat16)
    assert head_logits(one[0], one).tolist() == [[[257.0]]]


def test_all_reduce_rounds_before_the_sum():
    """1 + 2⁻⁹ is 1 in bfloat16, so that seven of them and −7 cancel."""
    partial = np.full((8, 1, 1), 1 + 2**-9, np.float32)
    partial[3] = -7
    split = PartitionSpec(TENSOR, None, None)
    got = on_mesh(8, lambda x: all_reduce(x, jnp.bfloat16), (split,))(partial)
    assert got.dtype == jnp.bfloat16
    assert got.tolist() == [[[0.0]]]
