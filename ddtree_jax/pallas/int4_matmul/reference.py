"""Defines what the INT4 products mean: plain jnp, float32, no tiling."""

import jax
import jax.numpy as jnp

from ddtree_jax.arrays import F32, I32, Array, Float
from ddtree_jax.quant import Int4Weight, dequantise


def int4_matmul_reference(
    x: Float[Array, "T inputs"], weight: Int4Weight
) -> Float[Array, "T out"]:
    """Returns what `int4_matmul` documents, computed in float32."""
    w = dequantise(weight).astype(jnp.float32)
    return (x.astype(jnp.float32) @ w.T).astype(x.dtype)


def int4_grouped_swiglu_reference(
    x: Float[Array, "T M"],
    gate: Int4Weight,
    up: Int4Weight,
    down: Int4Weight,
    layer: I32[Array, ""],
    expert_ids: I32[Array, "T k"],
    expert_weights: F32[Array, "T k"],
) -> F32[Array, "T M"]:
    """Returns what `int4_grouped_swiglu` documents, computed in float32."""
    x32 = x.astype(jnp.float32)
    num_experts = gate.packed.shape[1]

    def expert_weight(stack: Int4Weight, expert: Array) -> F32[Array, "out inputs"]:
        packed, scale = stack.packed[layer, expert], stack.scale[layer, expert]
        return dequantise(Int4Weight(packed, scale)).astype(jnp.float32)

    def add_expert(expert, total):
        picked = expert_ids == expert

        def run(_):
            hidden = jax.nn.silu(x32 @ expert_weight(gate, expert).T)
            hidden *= x32 @ expert_weight(up, expert).T
            output = hidden @ expert_weight(down, expert).T
            weight = jnp.sum(jnp.where(picked, expert_weights, 0.0), axis=-1)
            # A select: a row that did not pick this expert may hold NaN.
            chosen = jnp.any(picked, axis=-1)[:, None]
            return total + jnp.where(chosen, weight[:, None] * output, 0.0)

        return jax.lax.cond(jnp.any(picked), run, lambda _: total, None)

    return jax.lax.fori_loop(0, num_experts, add_expert, jnp.zeros_like(x32))
