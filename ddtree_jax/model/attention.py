"""Owns the MLA projections in absorbed form. Per-device code: heads are split."""

from typing import NamedTuple

import jax.numpy as jnp

from ddtree_jax.arrays import F32, I32, U32, Array, Float
from ddtree_jax.config import ModelConfig
from ddtree_jax.model.cache import LatentCache
from ddtree_jax.model.layers import contract, project, rms_norm
from ddtree_jax.model.params import MlaAttention
from ddtree_jax.model.rope import rotate_interleaved
from ddtree_jax.pallas import tree_mla_attention


class Nodes(NamedTuple):
    """What a forward pass needs to know of its rows, equal for every layer.

    Attributes:
      cos: Of each node's position, for the rope width.
      sin: Likewise.
      ancestor_bits: Which tail rows each node sees.
      page_table: Pages of each request, counted within one layer.
      context_len: Committed tokens of each request.
    """

    cos: F32[Array, "B N half"]
    sin: F32[Array, "B N half"]
    ancestor_bits: U32[Array, "B N W"]
    page_table: I32[Array, "B P"]
    context_len: I32[Array, "B"]


class Tail(NamedTuple):
    """One layer's new rows, as they would be committed."""

    latent: Float[Array, "B N L"]
    rope: Float[Array, "B N R"]


def mla_partial(
    x: Float[Array, "B N M"],
    p: MlaAttention,
    c: ModelConfig,
    nodes: Nodes,
    cache: LatentCache,
    layer: I32[Array, ""],
) -> tuple[F32[Array, "B N M"], Tail]:
    """Returns this device's part of one layer's attention, and its new rows.

    Args:
      p: Parameters of this layer, without a layer axis.
      cache: Pages of all layers.
      layer: Which of them to read.
    """
    h = rms_norm(x, p.input_norm[...], c.rms_norm_eps)
    query_low = rms_norm(
        project("bnm,qm->bnq", h, p.q_a[...]), p.q_a_norm[...], c.latent_norm_eps
    )
    query = project("bnq,hdq->bnhd", query_low, p.q_b[...])
    q_nope, q_rope = jnp.split(query, [c.qk_nope_head_dim], axis=-1)
    latent, rope = jnp.split(
        project("bnm,lm->bnl", h, p.kv_a[...]), [c.kv_lora_rank], axis=-1
    )
    tail = Tail(
        latent=rms_norm(latent, p.kv_a_norm[...], c.latent_norm_eps),
        rope=rotate_interleaved(rope, nodes.cos, nodes.sin),
    )
    # All layers' pages in one array; this layer's begin at layer · num_pages.
    pages = cache.latent.shape[1]
    attended, _ = tree_mla_attention(
        project("bnhd,hdl->bnhl", q_nope, p.k_up[...]),
        rotate_interleaved(q_rope, nodes.cos[:, :, None], nodes.sin[:, :, None]),
        cache.latent.reshape(-1, *cache.latent.shape[2:]),
        cache.rope.reshape(-1, *cache.rope.shape[2:]),
        nodes.page_table + layer * pages,
        nodes.context_len,
        tail_latent=tail.latent,
        tail_rope=tail.rope,
        ancestor_bits=nodes.ancestor_bits,
        softmax_scale=c.softmax_scale,
    )
    value = project("bnhl,hdl->bnhd", attended, p.v_up[...])
    out = contract("bnhd,mhd->bnm", value, p.o[...])
    return out, tail
