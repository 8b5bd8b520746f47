"""Defines what tree-masked MLA attention means: plain jnp, float32, no tiling."""

import jax.numpy as jnp

from ddtree_jax.arrays import F32, I32, U32, Array, Bool, Float, along_last

WORD_BITS = 32


def pack_bits(mask: Bool[Array, "*lead N"]) -> U32[Array, "*lead W"]:
    """Returns the mask as words: bit `j % 32` of word `j // 32` is `mask[..., j]`."""
    n = mask.shape[-1]
    words = -(-n // WORD_BITS)
    padding = [(0, 0)] * (mask.ndim - 1) + [(0, words * WORD_BITS - n)]
    bits = jnp.pad(mask, padding).reshape(*mask.shape[:-1], words, WORD_BITS)
    one_bit = jnp.uint32(1) << jnp.arange(WORD_BITS, dtype=jnp.uint32)
    weights = along_last(one_bit, bits.ndim)
    # The bits do not overlap, so the sum is the bitwise or.
    return jnp.sum(jnp.where(bits, weights, jnp.uint32(0)), axis=-1, dtype=jnp.uint32)


def unpack_bits(bits: U32[Array, "*lead W"], n: int) -> Bool[Array, "*lead n"]:
    """Returns the first `n` bits as booleans; the inverse of `pack_bits`."""
    shifts = along_last(jnp.arange(WORD_BITS, dtype=jnp.uint32), bits.ndim + 1)
    flat = (bits[..., None] >> shifts) & jnp.uint32(1)
    return flat.reshape(*bits.shape[:-1], -1)[..., :n].astype(bool)


def gather_pages(
    pages: Float[Array, "pages S X"], page_table: I32[Array, "B P"], used: Array
) -> F32[Array, "B PS X"]:
    """Returns the rows of each request in token order, 0 where not `used`."""
    rows = pages.at[page_table].get(mode="fill", fill_value=0)
    rows = rows.reshape(page_table.shape[0], -1, pages.shape[-1])
    # A select, not a product: what is not used may be NaN.
    return jnp.where(used[..., None], rows.astype(jnp.float32), 0.0)


def tree_mla_attention_reference(
    q_latent: Float[Array, "B N H L"],
    q_rope: Float[Array, "B N H R"],
    latent_cache: Float[Array, "pages S L"],
    rope_cache: Float[Array, "pages S R"],
    page_table: I32[Array, "B P"],
    context_len: I32[Array, "B"],
    *,
    tail_latent: Float[Array, "B T L"],
    tail_rope: Float[Array, "B T R"],
    ancestor_bits: U32[Array, "B N W"],
    softmax_scale: float,
) -> tuple[Float[Array, "B N H L"], F32[Array, "B N H"]]:
    """Returns what `tree_mla_attention` documents, computed in float32."""
    n = q_latent.shape[1]
    tail_latent, tail_rope = tail_latent[:, :n], tail_rope[:, :n]
    capacity = page_table.shape[1] * latent_cache.shape[1]
    committed = jnp.arange(capacity)[None] < context_len[:, None]
    ancestors = unpack_bits(ancestor_bits, n)

    # Keys in the order [context | tail].
    latent = jnp.concatenate(
        [
            gather_pages(latent_cache, page_table, committed),
            tail_latent.astype(jnp.float32),
        ],
        axis=1,
    )
    rope = jnp.concatenate(
        [
            gather_pages(rope_cache, page_table, committed),
            tail_rope.astype(jnp.float32),
        ],
        axis=1,
    )
    in_context = jnp.broadcast_to(committed[:, None], (*ancestors.shape[:2], capacity))
    visible = jnp.concatenate([in_context, ancestors], axis=-1)[:, :, None]

    logits = jnp.einsum("bnhl,bkl->bnhk", q_latent.astype(jnp.float32), latent)
    logits += jnp.einsum("bnhr,bkr->bnhk", q_rope.astype(jnp.float32), rope)
    # A row that is not finite spoils the nodes that see it, by their logits, and no
    # others, as 0 · NaN in the value product would.
    finite = jnp.all(jnp.isfinite(latent), axis=-1)
    logits = jnp.where(finite[:, None, None], logits * softmax_scale, jnp.nan)
    logits = jnp.where(visible, logits, -jnp.inf)
    peak = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.where(visible, jnp.exp(logits - peak), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    latent = jnp.where(finite[..., None], latent, 0.0)
    output = jnp.einsum("bnhk,bkl->bnhl", weights / total, latent)
    lse = (peak + jnp.log(total))[..., 0]
    return output.astype(q_latent.dtype), lse
