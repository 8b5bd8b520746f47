"""Owns which tokens go to which expert, as lists that the grouped kernel works off."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from ddtree_jax.arrays import F32, I32, Array, along_last

# Tables are read by warpgroups.
_MULTIPLE = 128


class Routing(NamedTuple):
    """Token tiles: up to `columns` tokens of one expert each, by ascending expert.

    Attributes:
      count: Tiles in use. What follows is meaningless past them.
      experts: Of the tiles.
      slots: Tokens, ascending; ~t in unused places, t the expert's first.
      weights: Of the tokens for this expert.
      arrived: The grouped kernel's counts, over all of its launches with this
        routing; zero at first.
    """

    count: Any
    experts: Any
    slots: Any
    weights: Any
    arrived: Any


def max_tiles(tokens: int, choices: int, experts: int, columns: int) -> int:
    """Returns a bound for the number of token tiles, a multiple of 128."""
    pairs = tokens * choices
    most = min(pairs, experts)
    if tokens > columns:
        most = min(pairs, most + pairs // columns)
    return -(-most // _MULTIPLE) * _MULTIPLE


def route(
    expert_ids: I32[Array, "T k"],
    expert_weights: F32[Array, "T k"],
    *,
    experts: int,
    columns: int,
) -> Routing:
    """Returns the token tiles; ids outside 0 .. experts - 1 are in none."""
    tokens, choices = expert_ids.shape
    tiles = max_tiles(tokens, choices, experts, columns)
    picked = expert_ids[..., None] == along_last(
        jnp.arange(experts, dtype=jnp.int32), 3
    )
    by_token = jnp.any(picked, axis=1).astype(jnp.int32)
    counts = jnp.sum(by_token, axis=0)
    needed = -(-counts // columns)
    ends = jnp.cumsum(needed, dtype=jnp.int32)
    earlier = jnp.cumsum(by_token, axis=0, dtype=jnp.int32) - by_token
    first = (ends - needed) * columns
    place = jnp.sum(jnp.where(picked, (first[None] + earlier)[:, None], 0), axis=-1)
    place = jnp.where(jnp.any(picked, axis=-1), place, tiles * columns)

    def scattered(values: Array, fill: Array) -> Array:
        empty = jnp.full((tiles * columns,), fill, values.dtype)
        filled = empty.at[place.reshape(-1)].set(values.reshape(-1), mode="drop")
        return filled.reshape(tiles, columns)

    tile = jnp.arange(tiles, dtype=jnp.int32)
    expert = jnp.sum(tile[:, None] >= ends[None], axis=1, dtype=jnp.int32)
    experts_of = jnp.minimum(expert, experts - 1)
    token = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[:, None], place.shape)
    slots = scattered(token, jnp.int32(-1))
    first = jnp.argmax(by_token, axis=0)[experts_of]
    slots = jnp.where(slots < 0, ~first[:, None].astype(jnp.int32), slots)
    return Routing(
        count=ends[-1:],
        experts=experts_of,
        slots=slots,
        weights=scattered(expert_weights, jnp.float32(0)),
        arrived=jnp.zeros((2,), jnp.int32),
    )
