"""Owns the drafter's forward pass in training: many blocks of a sequence at once.

The same function of the same parameters as `ddtree_jax.model.draft`: a block at an
anchor sees the features of the tokens before its anchor, and all of its own slots.
"""

import jax
import jax.numpy as jnp

from ddtree_jax.arrays import I32, Array, Float
from ddtree_jax.config import DraftConfig
from ddtree_jax.model.layers import rms_norm
from ddtree_jax.model.rope import cos_sin, rotate_halves, yarn_inv_freq
from tiny.train.parameters import Params, layer
from tiny.train.target_model import swiglu


def draft_blocks(
    params: Params,
    c: DraftConfig,
    embedding: Float[Array, "V M"],
    features: Float[Array, "B T F M"],
    roots: I32[Array, "B A"],
    anchors: I32[Array, "B A"],
) -> Float[Array, "B A D M"]:
    """Returns hidden states of the D positions after each root, ready for the head.

    Args:
      embedding: The target's.
      features: Of all tokens; those at an anchor and after it are not looked at.
      roots: Tokens at the anchors.
      anchors: Positions of the roots.
    """
    batch, num_blocks = roots.shape
    size = c.draft_block_size
    masks = jnp.full((batch, num_blocks, size - 1), c.mask_token_id, jnp.int32)
    blocks = jnp.concatenate([roots[..., None], masks], axis=-1)
    slots = anchors[..., None] + jnp.arange(size, dtype=jnp.int32)[None, None]
    context = jnp.einsum("btfm,ofm->bto", features, params["fc"])
    context = rms_norm(context, params["hidden_norm"], c.rms_norm_eps)
    position = jnp.arange(features.shape[1], dtype=jnp.int32)
    rotation = draft_rotation(c, position[None])
    block_rotation = draft_rotation(c, slots.reshape(batch, -1))
    visible = position[None, None] < anchors[..., None]
    x = embedding[blocks.reshape(batch, -1)]
    for index in range(c.num_hidden_layers):
        p = layer(params, "layers/", index)
        h = rms_norm(x, p["input_norm"], c.rms_norm_eps)
        query = jnp.einsum("btm,hdm->bthd", h, p["q"])
        query = rms_norm(query, p["q_norm"], c.rms_norm_eps)
        query = rotate_halves(query, *block_rotation)
        mixed = _attend(
            query.reshape(batch, num_blocks, size, *query.shape[2:]),
            keys_values(context, p, c, rotation),
            [
                rows.reshape(batch, num_blocks, size, *rows.shape[2:])
                for rows in keys_values(h, p, c, block_rotation)
            ],
            visible,
        )
        mixed = mixed.reshape(query.shape)
        x += jnp.einsum("bthd,mhd->btm", mixed, p["o"])
        x += swiglu(rms_norm(x, p["post_norm"], c.rms_norm_eps), p, "mlp/")
    x = rms_norm(x, params["norm"], c.rms_norm_eps)
    return x.reshape(batch, num_blocks, size, -1)[:, :, 1:]


def draft_rotation(c: DraftConfig, positions: I32[Array, "B T"]) -> tuple[Array, Array]:
    """Returns cos and sin with an axis for the heads."""
    cos, sin = cos_sin(positions, yarn_inv_freq(c.rope, c.head_dim), c.rope_amplitude)
    return cos[:, :, None], sin[:, :, None]


def keys_values(
    h: Float[Array, "B T M"], p: Params, c: DraftConfig, rotation
) -> tuple[Float[Array, "B T K d"], Float[Array, "B T K d"]]:
    """Returns one layer's keys and values."""
    key = jnp.einsum("btm,kdm->btkd", h, p["k"])
    key = rms_norm(key, p["k_norm"], c.rms_norm_eps)
    return rotate_halves(key, *rotation), jnp.einsum("btm,kdm->btkd", h, p["v"])


def _attend(query: Array, context, block, visible: Array) -> Array:
    """Returns grouped-query attention over context and block.

    Args:
      query: `[B, A, S, H, d]`.
      context: Keys and values `[B, T, K, d]`.
      block: Keys and values `[B, A, S, K, d]`.
      visible: `[B, A, T]`, which context each block sees.
    """
    *outer, heads, width = query.shape
    kv_heads = context[0].shape[2]
    grouped = query.reshape(*outer, kv_heads, heads // kv_heads, width)
    grouped = grouped * jnp.asarray(width**-0.5, query.dtype)
    # In the order in which the large product comes out, so that it is not moved.
    before = jnp.einsum("baskgd,btkd->bkasgt", grouped, context[0])
    within = jnp.einsum("baskgd,baukd->bkasgu", grouped, block[0])
    hidden = jnp.where(visible[:, None, :, None, None], 0.0, -1e30)
    before = before.astype(jnp.float32) + hidden
    logits = jnp.concatenate([before, within.astype(jnp.float32)], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1).astype(query.dtype)
    length = before.shape[-1]
    mixed = jnp.einsum("bkasgt,btkd->baskgd", weights[..., :length], context[1])
    mixed += jnp.einsum("bkasgu,baukd->baskgd", weights[..., length:], block[1])
    return mixed.reshape(query.shape)
