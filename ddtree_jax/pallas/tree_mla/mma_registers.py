"""Owns products of registers (`mma`), which every GPU from sm_80 on has.

Of a warpgroup's four warps `warps` share the rows of a product, 16 each, and
4 / `warps` its columns, 8 each. So it has multiples of 16 · `warps` rows and of
32 / `warps` columns. The interpreter has no `mma`: with `interpret`, each function is
computed by what it means.
"""

from typing import Any

from jax import lax
from jax import numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.arrays import Array


def sums_layout(warps: int) -> Any:
    """Returns how a warpgroup holds what `multiply` sums."""
    return plgpu.Layout.MMA_ACC(jnp.bfloat16, m_warps=warps)


def load_left(ref: Any, warps: int, *, interpret: bool) -> Array:
    """Returns a matrix of shared memory in bfloat16 as left operand."""
    return _load(ref, plgpu.Layout.MMA_LHS(jnp.bfloat16, m_warps=warps), interpret)


def load_right(ref: Any, warps: int, *, interpret: bool) -> Array:
    """Returns a matrix of shared memory in bfloat16 as right operand."""
    return _load(ref, plgpu.Layout.MMA_RHS(jnp.bfloat16, m_warps=warps), interpret)


def multiply(sums: Array, left: Array, right: Array, *, interpret: bool) -> Array:
    """Returns `sums` + `left` · `right`, in float32."""
    if interpret:
        return sums + lax.dot(left, right, preferred_element_type=jnp.float32)
    return plgpu.mma(sums, left, right)


def _load(ref: Any, layout: Any, interpret: bool) -> Array:
    if interpret:
        return ref[...]
    return plgpu.load(ref, layout=layout)
