"""Owns what XLA makes of the INT4 products, in the forms that suit it best.

Weights are those of one layer, as INT4 to be dequantised or as bfloat16. Of few tokens
each gets the weights of its experts, in sums of products of numbers, into which XLA
fuses the dequantisation (products of matrices it gives transposed copies). Of many
tokens all are multiplied by all experts. `lax.ragged_dot` would do that too, but with a
copy of the tokens, masked, for each expert.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ddtree_jax.arrays import BF16, F32, I32, Array, along_last
from ddtree_jax.quant import Int4Weight, dequantise

type Weight = Int4Weight | BF16[Array, "*lead out inputs"]


class Experts[W](NamedTuple):
    """The experts of one layer, each weight `[experts, out, inputs]`."""

    gate: W
    up: W
    down: W


class Draw(NamedTuple):
    """What a router gives for one call."""

    expert_ids: I32[Array, "T k"]
    expert_weights: F32[Array, "T k"]


def by_pair(
    x: BF16[Array, "T M"], experts: Experts[Weight], draw: Draw
) -> F32[Array, "T M"]:
    """Returns the layer, as sums over each token's experts, in float32.

    Experts that are elsewhere cost as much as others.
    """
    there = (draw.expert_ids >= 0) & (draw.expert_ids < experts.gate.shape[0])
    ids, router = (jnp.where(there, values, 0) for values in draw)

    def product(a: Array, weight: Weight) -> Array:
        weights = _dense(jax.tree.map(lambda w: w[ids], weight)).astype(jnp.float32)
        return jnp.sum(a.astype(jnp.float32)[..., None, :] * weights, axis=-1)

    row = x[:, None]
    hidden = jax.nn.silu(product(row, experts.gate)) * product(row, experts.up)
    return jnp.sum(product(hidden, experts.down) * router[..., None], axis=1)


def by_expert(
    x: BF16[Array, "T M"], experts: Experts[Weight], draw: Draw
) -> F32[Array, "T M"]:
    """Returns the layer, as products of all tokens with all experts.

    The router's weight, 0 of most experts, is multiplied in between.
    """
    count = experts.gate.shape[0]
    numbers = along_last(jnp.arange(count, dtype=jnp.int32), 3)
    picked = draw.expert_ids[..., None] == numbers
    router = jnp.sum(jnp.where(picked, draw.expert_weights[..., None], 0), axis=1)
    gate, up = (
        _product("td,eid->tei", x, _dense(weight))
        for weight in (experts.gate, experts.up)
    )
    hidden = (jax.nn.silu(gate) * up * router[..., None]).astype(x.dtype)
    return _product("tei,edi->td", hidden, _dense(experts.down))


@jax.jit
def down_by_output(experts: Experts[Array]) -> Experts[Array]:
    """Returns bfloat16 experts with the first two axes of `down` swapped.

    In memory as [M, experts, inner] it is what `by_expert` needs no copy of.
    """
    return experts._replace(down=experts.down.transpose(1, 0, 2))


def by_expert_by_output(
    x: BF16[Array, "T M"], experts: Experts[Array], draw: Draw
) -> F32[Array, "T M"]:
    """Returns `by_expert` of what `down_by_output` made."""
    return by_expert(x, down_by_output(experts), draw)


def dense(x: BF16[Array, "T inputs"], weight: Weight) -> BF16[Array, "T out"]:
    """Returns `x @ w.T`."""
    return _product("ti,oi->to", x, _dense(weight)).astype(x.dtype)


def _dense(weight: Weight) -> Array:
    return dequantise(weight) if isinstance(weight, Int4Weight) else weight


def _product(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)
