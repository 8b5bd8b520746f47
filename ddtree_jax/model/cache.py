"""Owns the pages of committed tokens, of both models, and how rows enter them.

Token `t` of a request is row `t % S` of page `page_table[t // S]`, in every
layer and in both models, so a cached prefix is cached for both or for neither.
Pages hold committed tokens only; the rows of a running step are its tail.

Does not know which requests own which pages.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ddtree_jax.arrays import I32, Array, Float
from ddtree_jax.config import DraftConfig, ModelConfig


class LatentCache(NamedTuple):
    """The target's pages: normalised latents, and the shared rotary keys."""

    latent: Float[Array, "layers pages S L"]
    rope: Float[Array, "layers pages S R"]


class DraftCache(NamedTuple):
    """The drafter's pages: keys, normalised and rotated, and values."""

    key: Float[Array, "layers pages S kv_heads head_dim"]
    value: Float[Array, "layers pages S kv_heads head_dim"]


def _page_axes(*row: str) -> Any:
    return ("layer", "page", "page_row", *row)


LATENT_AXES = LatentCache(latent=_page_axes("latent"), rope=_page_axes("rope"))
DRAFT_AXES = DraftCache(
    key=_page_axes("kv_heads", "head_dim"), value=_page_axes("kv_heads", "head_dim")
)


def abstract_array(shape: tuple[int, ...], dtype) -> Any:
    """Returns a shape and dtype to stand where a pytree has an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def abstract_latent_cache(
    c: ModelConfig, *, num_pages: int, page_size: int, dtype
) -> LatentCache:
    """Returns the shapes of the target's pages."""
    shape = (c.num_hidden_layers, num_pages, page_size)
    return LatentCache(
        latent=abstract_array((*shape, c.kv_lora_rank), dtype),
        rope=abstract_array((*shape, c.qk_rope_head_dim), dtype),
    )


def abstract_draft_cache(
    c: DraftConfig, *, num_pages: int, page_size: int, dtype
) -> DraftCache:
    """Returns the shapes of the drafter's pages."""
    page = (page_size, c.num_key_value_heads, c.head_dim)
    shape = (c.num_hidden_layers, num_pages, *page)
    array = abstract_array(shape, dtype)
    return DraftCache(key=array, value=array)


def commit_rows[C: (LatentCache, DraftCache)](
    cache: C,
    rows: C,
    page_table: I32[Array, "B P"],
    start: I32[Array, "B"],
    count: I32[Array, "B"],
) -> C:
    """Returns the cache with `rows` written at tokens start .. start + count - 1.

    Args:
      rows: As `cache`, with `[layers, B, T, …]` in place of `[layers, pages, S, …]`.
      count: Rows of each request to write, 0 .. T; the others are dropped.
    """
    num_pages, page_size = cache[0].shape[1:3]
    offsets = jnp.arange(rows[0].shape[2])
    position = start[:, None] + offsets[None]
    page = jnp.take_along_axis(
        page_table, position // page_size, axis=1, mode="fill", fill_value=num_pages
    )
    # A page past the last one makes the scatter drop the row.
    page = jnp.where(offsets[None] < count[:, None], page, num_pages)
    row = position % page_size
    return type(cache)(
        *(
            pages.at[:, page, row].set(new.astype(pages.dtype), mode="drop")
            for pages, new in zip(cache, rows, strict=True)
        )
    )
