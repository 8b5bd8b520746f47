"""Owns the DFlash drafter (arXiv 2602.06036). Per-device code: heads are split.

The drafter fills a block [root, MASK …] at once. Its context keys and values
come from the target's features, one row per committed token and layer.
"""

import jax
import jax.numpy as jnp

from ddtree_jax.arrays import I32, Array, Float
from ddtree_jax.config import DraftConfig
from ddtree_jax.mesh import TENSOR
from ddtree_jax.model.cache import DraftCache
from ddtree_jax.model.layers import (
    all_reduce,
    contract,
    embed,
    project,
    rms_norm,
    swiglu_partial,
)
from ddtree_jax.model.params import DFlash, DraftLayers
from ddtree_jax.model.rope import cos_sin, rotate_halves, yarn_inv_freq


def _rotation(c: DraftConfig, positions: I32[Array, "B T"]) -> tuple[Array, Array]:
    """Returns cos and sin with an axis for the heads."""
    cos, sin = cos_sin(positions, yarn_inv_freq(c.rope, c.head_dim), c.rope_amplitude)
    return cos[:, :, None], sin[:, :, None]


def context_rows(
    draft: DFlash,
    c: DraftConfig,
    features: Float[Array, "B T F M"],
    positions: I32[Array, "B T"],
) -> DraftCache:
    """Returns the keys and values of T tokens, `[layers, B, T, kv_heads, head_dim]`.

    Args:
      features: The target's, in the order of `target_layer_ids`.
      positions: Absolute positions of those tokens.
    """
    rotation = _rotation(c, positions)
    local = project("btfm,ofm->bto", features, draft.fc[...])
    context = jax.lax.all_gather(local, TENSOR, axis=2, tiled=True)
    context = rms_norm(context, draft.hidden_norm[...], c.rms_norm_eps)

    def layer(_, p: DraftLayers):
        return None, _keys_values(context, p, c, rotation)

    return jax.lax.scan(layer, None, draft.layers)[1]


def _keys_values(h: Array, p: DraftLayers, c: DraftConfig, rotation) -> DraftCache:
    key = rms_norm(project("btm,kdm->btkd", h, p.k[...]), p.k_norm[...], c.rms_norm_eps)
    value = project("btm,kdm->btkd", h, p.v[...])
    return DraftCache(rotate_halves(key, *rotation), value)


def draft_hidden(
    draft: DFlash,
    c: DraftConfig,
    embedding: Float[Array, "V_local M"],
    *,
    root_token: I32[Array, "B"],
    cache: DraftCache,
    page_table: I32[Array, "B P"],
    context_len: I32[Array, "B"],
) -> Float[Array, "B D M"]:
    """Returns hidden states of the D positions after the root, ready for the head.

    Position `j` of the result belongs to the token at `context_len + 1 + j`.

    Args:
      embedding: The target's.
      root_token: Known token at position `context_len`, not yet in the pages.
    """
    block = jnp.full(
        (root_token.shape[0], c.draft_block_size), c.mask_token_id, jnp.int32
    )
    block = block.at[:, 0].set(root_token)
    positions = context_len[:, None] + jnp.arange(c.draft_block_size)[None]
    rotation = _rotation(c, positions)
    capacity = page_table.shape[1] * cache.key.shape[2]
    committed = jnp.arange(capacity)[None] < context_len[:, None]

    def layer(x, xs):
        p, pages = xs
        h = rms_norm(x, p.input_norm[...], c.rms_norm_eps)
        query = rms_norm(
            project("btm,hdm->bthd", h, p.q[...]), p.q_norm[...], c.rms_norm_eps
        )
        query = rotate_halves(query, *rotation)
        context = DraftCache(*(_rows(a, page_table, committed) for a in pages))
        mixed = _attend(query, context, _keys_values(h, p, c, rotation), committed)
        out = contract("bthd,mhd->btm", mixed, p.o[...])
        x += all_reduce(out, x.dtype)
        h = rms_norm(x, p.post_norm[...], c.rms_norm_eps)
        return x + all_reduce(swiglu_partial(h, p.mlp), x.dtype), None

    x, _ = jax.lax.scan(layer, embed(embedding, block), (draft.layers, cache))
    return rms_norm(x, draft.norm[...], c.rms_norm_eps)[:, 1:]


def _rows(pages: Array, page_table: Array, committed: Array) -> Array:
    """Returns `[B, P·S, kv_heads, head_dim]`, 0 where no token is committed."""
    rows = pages.at[page_table].get(mode="fill", fill_value=0)
    rows = rows.reshape(page_table.shape[0], -1, *pages.shape[2:])
    return jnp.where(committed[..., None, None], rows, 0)


def _attend(
    query: Float[Array, "B T H head_dim"],
    context: DraftCache,
    block: DraftCache,
    committed: Array,
) -> Float[Array, "B T H head_dim"]:
    """Returns grouped-query attention: every slot sees all context and the block."""
    b, t, heads, head_dim = query.shape
    keys, values = (
        jnp.concatenate(pair, axis=1).astype(jnp.float32)
        for pair in zip(context, block, strict=True)
    )
    kv_heads = keys.shape[2]
    grouped = query.reshape(b, t, kv_heads, heads // kv_heads, head_dim)
    logits = jnp.einsum("btkgd,bskd->btkgs", grouped.astype(jnp.float32), keys)
    visible = jnp.concatenate([committed, jnp.ones((b, t), bool)], axis=1)
    logits = jnp.where(visible[:, None, None, None], logits * head_dim**-0.5, -jnp.inf)
    out = jnp.einsum("btkgs,bskd->btkgd", jax.nn.softmax(logits, axis=-1), values)
    return out.reshape(query.shape).astype(query.dtype)
