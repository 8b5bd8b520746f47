"""Owns the router and the mixture of experts. Per-device code: experts' inner width
is split, the router is replicated.
"""

import jax
import jax.numpy as jnp

from ddtree_jax.arrays import F32, I32, Array, Bool, Float
from ddtree_jax.config import ModelConfig
from ddtree_jax.model.layers import swiglu_partial
from ddtree_jax.model.params import Experts, Mlp
from ddtree_jax.pallas import int4_grouped_swiglu


def route(
    x: Float[Array, "T M"],
    router: Float[Array, "E M"],
    bias: F32[Array, "E"],
    c: ModelConfig,
) -> tuple[I32[Array, "T k"], F32[Array, "T k"]]:
    """Returns each token's experts and their weights (DeepSeek-V3's noaux_tc).

    The bias takes part in the choice only; weights come from the unbiased
    scores. Everything is float32: rounding can flip the last expert.
    """
    logits = jnp.einsum("tm,em->te", x.astype(jnp.float32), router.astype(jnp.float32))
    scores = jax.nn.sigmoid(logits)
    _, expert_ids = jax.lax.top_k(scores + bias[None], c.num_experts_per_tok)
    chosen = jnp.take_along_axis(scores, expert_ids, axis=-1)
    total = jnp.sum(chosen, axis=-1, keepdims=True) + 1e-20
    return expert_ids, chosen / total * c.routed_scaling_factor


def moe_partial(
    h: Float[Array, "B N M"],
    used: Bool[Array, "B N"],
    c: ModelConfig,
    *,
    router: Float[Array, "E M"],
    router_bias: F32[Array, "E"],
    experts: Experts,
    shared: Mlp,
    layer: I32[Array, ""],
) -> F32[Array, "B N M"]:
    """Returns this device's part of one layer's experts, the shared one included.

    Args:
      used: False for padding nodes, which must not cause experts to be read.
      experts: The stacks of all layers.
      layer: Index into those stacks.
    """
    tokens = h.reshape(-1, h.shape[-1])
    expert_ids, weights = route(tokens, router, router_bias, c)
    expert_ids = jnp.where(used.reshape(-1, 1), expert_ids, c.n_routed_experts)
    routed = int4_grouped_swiglu(
        tokens,
        experts.gate.weight,
        experts.up.weight,
        experts.down.weight,
        layer,
        expert_ids,
        weights,
    )
    return routed.reshape(h.shape) + swiglu_partial(h, shared)
