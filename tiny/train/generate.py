"""Owns text by the target itself: a batched decode that the drafter learns from."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ddtree_jax.arrays import F32, I32, Array, Float
from ddtree_jax.config import ModelConfig
from ddtree_jax.model.layers import rms_norm
from tiny.train.parameters import Params
from tiny.train.target_model import (
    Rows,
    feed_forward,
    query_rows,
    target_layer,
    target_rotation,
)


class WritingPlan(NamedTuple):
    """How each text is written.

    Attributes:
      prompt_lengths: How many of the given tokens come first.
      chance_until: Up to which token temperature 1 rules, for prompts of its own.
      temperatures: Of the tokens after that; at 0 the most probable one follows.
    """

    prompt_lengths: I32[Array, "B"]
    chance_until: I32[Array, "B"]
    temperatures: F32[Array, "B"]


class _Cache(NamedTuple):
    """One layer's rows of all places."""

    latent: Float[Array, "B T L"]
    rope: Float[Array, "B T R"]


@functools.cache
def make_generator(c: ModelConfig, length: int, *, end: int):
    """Returns `generate(params, given, plan, key)` → `[B, length]` tokens.

    The result is the prompts and what the target says; after a text that it ended
    the given one goes on, since a greedy target would begin the same text each time.

    Args:
      end: The token that ends a text.
    """

    @jax.jit
    def generate(
        params: Params,
        given: I32[Array, "B T"],
        plan: WritingPlan,
        key: Array,
    ) -> I32[Array, "B T"]:
        batch = given.shape[0]
        dtype = params["embed"].dtype
        empty = _Cache(
            jnp.zeros((batch, length, c.kv_lora_rank), dtype),
            jnp.zeros((batch, length, c.qk_rope_head_dim), dtype),
        )

        def step(carry, place):
            caches, token, ended = carry
            logits, caches = _decode(params, c, token, place, caches)
            at_chance = place + 1 < plan.chance_until
            temperatures = jnp.where(at_chance, 1.0, plan.temperatures)
            drawn = _sample(logits, temperatures, jax.random.fold_in(key, place))
            follows = given[:, jnp.minimum(place + 1, length - 1)]
            forced = (place + 1 < plan.prompt_lengths) | ended
            ended = ended | (~forced & (drawn == end))
            return (caches, jnp.where(forced, follows, drawn), ended), token

        start = ([empty] * c.num_hidden_layers, given[:, 0], jnp.zeros(batch, bool))
        places = jnp.arange(length, dtype=jnp.int32)
        return jax.lax.scan(step, start, places)[1].T

    return generate


def _sample(logits: F32[Array, "B V"], temperatures: F32[Array, "B"], key: Array):
    noise = jax.random.gumbel(key, logits.shape)
    noisy = logits + temperatures[:, None] * noise
    return jnp.argmax(noisy, axis=-1).astype(jnp.int32)


def _decode(
    params: Params,
    c: ModelConfig,
    token: I32[Array, "B"],
    place: I32[Array, ""],
    caches: list[_Cache],
) -> tuple[F32[Array, "B V"], list[_Cache]]:
    """Returns the next tokens' logits, and the caches with one row more."""
    rotation = target_rotation(c, place[None, None])
    x = params["embed"][token][:, None]
    caches = list(caches)
    for index in range(c.num_hidden_layers):
        p = target_layer(params, c, index)
        rows = query_rows(x, p, c, rotation)
        cache = _Cache(
            *(
                jax.lax.dynamic_update_slice_in_dim(old, new, place, axis=1)
                for old, new in zip(caches[index], rows[2:], strict=True)
            )
        )
        x += _attend_absorbed(rows, cache, place, p, c)
        x, _ = feed_forward(x, p, c)
        caches[index] = cache
    hidden = rms_norm(x[:, 0], params["norm"], c.rms_norm_eps)
    return jnp.einsum("bm,vm->bv", hidden, params["head"]).astype(jnp.float32), caches


def _attend_absorbed(
    rows: Rows,
    cache: _Cache,
    place: I32[Array, ""],
    p: Params,
    c: ModelConfig,
) -> Float[Array, "B 1 M"]:
    """Returns attention to the rows up to `place`, in the latents' space."""
    query = jnp.einsum("bhd,hdl->bhl", rows.q_nope[:, 0], p["attention/k_up"])
    logits = jnp.einsum("bhl,btl->bht", query, cache.latent).astype(jnp.float32)
    rope = jnp.einsum("bhr,btr->bht", rows.q_rope[:, 0], cache.rope)
    logits += rope.astype(jnp.float32)
    seen = jnp.arange(logits.shape[-1], dtype=jnp.int32) <= place
    logits = jnp.where(seen[None, None], c.softmax_scale * logits, -1e30)
    weights = jax.nn.softmax(logits, axis=-1).astype(query.dtype)
    latent = jnp.einsum("bht,btl->bhl", weights, cache.latent)
    value = jnp.einsum("bhl,hdl->bhd", latent, p["attention/v_up"])
    return jnp.einsum("bhd,mhd->bm", value, p["attention/o"])[:, None]


@functools.partial(jax.jit, static_argnames="size")
def distinct_share(tokens: I32[Array, "B T"], size: int) -> F32[Array, "B"]:
    """Returns which share of each row's runs of `size` tokens is there once only."""
    windows = jnp.stack(
        [tokens[:, i : tokens.shape[1] - size + 1 + i] for i in range(size)], axis=-1
    ).astype(jnp.uint32)
    # A polynomial hash; a collision costs one run.
    hashes = jnp.zeros(windows.shape[:2], jnp.uint32)
    for place in range(size):
        hashes = hashes * jnp.uint32(1_000_003) + windows[..., place]
    ordered = jnp.sort(hashes, axis=-1)
    fresh = jnp.sum(ordered[:, 1:] != ordered[:, :-1], axis=-1) + 1
    return fresh.astype(jnp.float32) / ordered.shape[1]
