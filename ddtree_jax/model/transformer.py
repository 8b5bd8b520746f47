"""Owns the target's forward pass: tree nodes or a prefill chunk, one code path.

Per-device code: `forward` runs inside `shard_map` over the axis of `mesh.TENSOR`,
with parameters split as `params.py` says. Two all-reduces a layer, and no other
collective in the layer loop.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ddtree_jax.arrays import I32, U32, Array, Bool, Float
from ddtree_jax.config import ModelConfig
from ddtree_jax.model.attention import Nodes, mla_partial
from ddtree_jax.model.cache import LatentCache
from ddtree_jax.model.layers import all_reduce, embed, rms_norm, swiglu_partial
from ddtree_jax.model.moe import moe_partial
from ddtree_jax.model.params import DenseLayers, KimiK2
from ddtree_jax.model.rope import cos_sin, yarn_inv_freq


class Output(NamedTuple):
    """What a forward pass yields.

    Attributes:
      hidden: After the final norm, ready for the head.
      features: Residual stream after each feature layer, before any norm.
      tail: Every layer's new rows, for the commit.
    """

    hidden: Float[Array, "B N M"]
    features: Float[Array, "B N F M"]
    tail: LatentCache


class _Carry(NamedTuple):
    """The residual stream, and the features seen so far plus one scratch row."""

    x: Float[Array, "B N M"]
    features: Float[Array, "F1 B N M"]


def forward(
    model: KimiK2,
    c: ModelConfig,
    *,
    tokens: I32[Array, "B N"],
    positions: I32[Array, "B N"],
    ancestor_bits: U32[Array, "B N W"],
    used: Bool[Array, "B N"],
    cache: LatentCache,
    page_table: I32[Array, "B P"],
    context_len: I32[Array, "B"],
    feature_layers: tuple[int, ...],
) -> Output:
    """Returns hidden states, features and new rows of N nodes a request.

    The nodes see the committed tokens in the pages and their own ancestors.
    Nothing is written; `cache.commit_rows` moves accepted rows into the pages.

    Args:
      tokens: Node tokens; any id for padding nodes.
      positions: `context_len` + depth of each node.
      used: False for padding nodes; they must cost no expert weights.
      feature_layers: 0-based layers whose outputs are wanted.
    """
    cos, sin = cos_sin(
        positions, yarn_inv_freq(c.rope, c.qk_rope_head_dim), c.rope.amplitude
    )
    nodes = Nodes(cos, sin, ancestor_bits, page_table, context_len)
    x = embed(model.embed[...], tokens)
    carry = _Carry(x, jnp.zeros((len(feature_layers) + 1, *x.shape), x.dtype))
    # Layers that are no feature write to the scratch row at the end.
    slots = [len(feature_layers)] * c.num_hidden_layers
    for slot, layer in enumerate(feature_layers):
        slots[layer] = slot
    slots = jnp.asarray(slots, jnp.int32)

    def finish_layer(carry: _Carry, x: Array, layer: Array) -> _Carry:
        features = jax.lax.dynamic_update_index_in_dim(
            carry.features, x, slots[layer], axis=0
        )
        return _Carry(x, features)

    def attend(x, attention, layer):
        partial, tail = mla_partial(x, attention, c, nodes, cache, layer)
        return x + all_reduce(partial, x.dtype), tail

    def dense_layer(carry: _Carry, xs: tuple[DenseLayers, Array]):
        p, layer = xs
        x, tail = attend(carry.x, p.attention, layer)
        h = rms_norm(x, p.post_norm[...], c.rms_norm_eps)
        x += all_reduce(swiglu_partial(h, p.mlp), x.dtype)
        return finish_layer(carry, x, layer), tail

    def moe_layer(carry: _Carry, xs):
        attention, post_norm, router, router_bias, shared, index = xs
        layer = index + c.first_k_dense_replace
        x, tail = attend(carry.x, attention, layer)
        h = rms_norm(x, post_norm[...], c.rms_norm_eps)
        partial = moe_partial(
            h,
            used,
            c,
            router=router[...],
            router_bias=router_bias[...],
            # The stacks as a whole: a slice of them would be a copy.
            experts=model.moe.experts,
            shared=shared,
            layer=index,
        )
        x += all_reduce(partial, x.dtype)
        return finish_layer(carry, x, layer), tail

    moe = model.moe
    carry, dense_tail = jax.lax.scan(
        dense_layer,
        carry,
        (model.dense, jnp.arange(c.first_k_dense_replace, dtype=jnp.int32)),
    )
    carry, moe_tail = jax.lax.scan(
        moe_layer,
        carry,
        (
            moe.attention,
            moe.post_norm,
            moe.router,
            moe.router_bias,
            moe.shared,
            jnp.arange(c.num_moe_layers, dtype=jnp.int32),
        ),
    )
    tail = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), dense_tail, moe_tail)
    return Output(
        hidden=rms_norm(carry.x, model.norm[...], c.rms_norm_eps),
        features=jnp.moveaxis(carry.features[:-1], 0, 2),
        tail=LatentCache(*tail),
    )
