"""Owns the layers both models share. Per-device code: runs inside `shard_map`."""

import jax
import jax.numpy as jnp

from ddtree_jax.arrays import F32, I32, Array, Float, along_last
from ddtree_jax.mesh import TENSOR
from ddtree_jax.model.params import Mlp


def rms_norm(
    x: Float[Array, "*lead M"], weight: Float[Array, "M"], epsilon: float
) -> Float[Array, "*lead M"]:
    """Returns x / rms(x) · weight; statistics in float32, rounded before weight."""
    x32 = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    normed = (x32 * jax.lax.rsqrt(variance + epsilon)).astype(x.dtype)
    return normed * along_last(weight, x.ndim)


def contract(subscripts: str, x: Array, weight: Array) -> F32[Array, "..."]:
    """Returns the einsum of two arrays of one dtype, accumulated in float32."""

    def native(x: Array, weight: Array) -> Array:
        return jnp.einsum(subscripts, x, weight, preferred_element_type=jnp.float32)

    def widened(x: Array, weight: Array) -> Array:
        # XLA's CPU backend lacks the mixed product; products of two bfloat16 are
        # exact in float32, so this is the same function.
        return jnp.einsum(subscripts, x.astype(jnp.float32), weight.astype(jnp.float32))

    return jax.lax.platform_dependent(x, weight, cpu=widened, default=native)


def project(subscripts: str, x: Array, weight: Array) -> Array:
    """Returns `contract`, rounded to the dtype of x."""
    return contract(subscripts, x, weight).astype(x.dtype)


def swiglu_partial(x: Float[Array, "B N M"], mlp: Mlp) -> F32[Array, "B N M"]:
    """Returns this device's part of down(silu(gate x) · up x), in float32."""
    gate = project("bnm,im->bni", x, mlp.gate[...])
    up = project("bnm,im->bni", x, mlp.up[...])
    return contract("bni,mi->bnm", jax.nn.silu(gate) * up, mlp.down[...])


def all_reduce(partial: F32[Array, "B N M"], dtype) -> Float[Array, "B N M"]:
    """Returns the sum over devices; rounded first, so that fewer bytes travel."""
    return jax.lax.psum(partial.astype(dtype), TENSOR)


def embed(
    table: Float[Array, "V_local M"], tokens: I32[Array, "B N"]
) -> Float[Array, "B N M"]:
    """Returns the embedding rows; each device holds a range of the vocabulary."""
    local = tokens - jax.lax.axis_index(TENSOR) * table.shape[0]
    mine = (local >= 0) & (local < table.shape[0])
    rows = table[jnp.where(mine, local, 0)]
    return jax.lax.psum(jnp.where(mine[..., None], rows, 0), TENSOR)


def head_logits(
    head: Float[Array, "V_local M"], hidden: Float[Array, "B N M"]
) -> F32[Array, "B N V_local"]:
    """Returns the logits of this device's range of the vocabulary."""
    return contract("bnm,vm->bnv", hidden, head)
