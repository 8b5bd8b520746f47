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
from ddtree_jax.model.params import DenseLayers, Experts, KimiK2, MlaAttention
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


class _Layers(NamedTuple):
    """What every layer of one forward pass shares; its methods are scan bodies.

    Attributes:
      feature_row: Where each layer's output goes in `_Carry.features`.
      experts: The stacks of all layers: a slice of them would be a copy.
    """

    c: ModelConfig
    nodes: Nodes
    used: Bool[Array, "B N"]
    cache: LatentCache
    feature_row: I32[Array, "layers"]
    experts: Experts

    def dense(self, carry: _Carry, xs: tuple[DenseLayers, Array]):
        """Runs one dense layer; returns its new rows beside the carry."""
        p, layer = xs
        x, tail = self._attend(carry.x, p.attention, layer)
        h = rms_norm(x, p.post_norm[...], self.c.rms_norm_eps)
        x += all_reduce(swiglu_partial(h, p.mlp), x.dtype)
        return self._finish(carry, x, layer), tail

    def moe(self, carry: _Carry, xs):
        """Runs one mixture-of-experts layer; `xs` holds all but the experts."""
        attention, post_norm, router, router_bias, shared, index = xs
        layer = index + self.c.first_k_dense_replace
        x, tail = self._attend(carry.x, attention, layer)
        partial = moe_partial(
            rms_norm(x, post_norm[...], self.c.rms_norm_eps),
            self.used,
            self.c,
            router=router[...],
            router_bias=router_bias[...],
            experts=self.experts,
            shared=shared,
            layer=index,
        )
        x += all_reduce(partial, x.dtype)
        return self._finish(carry, x, layer), tail

    def _attend(self, x: Array, attention: MlaAttention, layer: Array):
        partial, tail = mla_partial(x, attention, self.c, self.nodes, self.cache, layer)
        return x + all_reduce(partial, x.dtype), tail

    def _finish(self, carry: _Carry, x: Array, layer: Array) -> _Carry:
        features = jax.lax.dynamic_update_index_in_dim(
            carry.features, x, self.feature_row[layer], axis=0
        )
        return _Carry(x, features)


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
      feature_layers: 0-based layers whose outputs are wanted, each once.
    """
    frequencies = yarn_inv_freq(c.rope, c.qk_rope_head_dim)
    cos, sin = cos_sin(positions, frequencies, c.rope.amplitude)
    layers = _Layers(
        c,
        Nodes(cos, sin, ancestor_bits, page_table, context_len),
        used,
        cache,
        _feature_rows(feature_layers, c.num_hidden_layers),
        model.moe.experts,
    )
    x = embed(model.embed[...], tokens)
    carry = _Carry(x, jnp.zeros((len(feature_layers) + 1, *x.shape), x.dtype))
    index = jnp.arange(c.num_hidden_layers, dtype=jnp.int32)
    dense, moe = model.dense, model.moe
    carry, dense_tail = jax.lax.scan(
        layers.dense, carry, (dense, index[: c.first_k_dense_replace])
    )
    per_layer = (
        moe.attention,
        moe.post_norm,
        moe.router,
        moe.router_bias,
        moe.shared,
        index[: c.num_moe_layers],
    )
    carry, moe_tail = jax.lax.scan(layers.moe, carry, per_layer)
    tail = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), dense_tail, moe_tail)
    return Output(
        hidden=rms_norm(carry.x, model.norm[...], c.rms_norm_eps),
        features=jnp.moveaxis(carry.features[:-1], 0, 2),
        tail=LatentCache(*tail),
    )


def _feature_rows(
    feature_layers: tuple[int, ...], num_layers: int
) -> I32[Array, "layers"]:
    """Returns each layer's row of the features; the scratch row if it is none."""
    rows = [len(feature_layers)] * num_layers
    for row, layer in enumerate(feature_layers):
        rows[layer] = row
    return jnp.asarray(rows, jnp.int32)
