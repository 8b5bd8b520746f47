"""Owns how a token is chosen from logits whose vocabulary is split over devices.

Sampling is Gumbel-max with noise keyed by (request seed, absolute position) and
by nothing else. What a request samples is then the same with and without
speculation, for every tree shape, budget, batch and mesh.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ddtree_jax.arrays import F32, I32, U32, Array, along_last
from ddtree_jax.mesh import TENSOR


class Sampling(NamedTuple):
    """Sampling parameters of each request.

    Attributes:
      temperature: 0 means greedy.
      top_k: Tokens kept; 0 means all.
      top_p: Probability mass kept, after top-k; 1 means all.
      min_p: Least probability kept, relative to the largest; 0 means all.
      seed: Of the request's noise.
    """

    temperature: F32[Array, "B"]
    top_k: I32[Array, "B"]
    top_p: F32[Array, "B"]
    min_p: F32[Array, "B"]
    seed: U32[Array, "B"]


def gumbel_noise(
    seed: U32[Array, "B"], position: I32[Array, "B J"], token_ids: I32[Array, "V_local"]
) -> F32[Array, "B J V_local"]:
    """Returns the noise of each token id at each absolute position of a request."""

    def of_position(seed: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        # Folding the token id in gives each id its own bits, on every mesh alike.
        bits = jax.vmap(jax.random.fold_in, (None, 0))(key, token_ids)
        return jax.random.key_data(bits)[:, 0]

    bits = jax.vmap(jax.vmap(of_position, (None, 0)))(seed, position)
    # Uniform in (0, 1), finely resolved near 0, where the largest noise comes from.
    uniform = (bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    uniform = jnp.minimum(uniform, jnp.float32(1.0 - 2.0**-24))
    return -jnp.log(-jnp.log1p(-uniform))


def keep_threshold(
    scaled: F32[Array, "B N V"], sampling: Sampling
) -> F32[Array, "B N"]:
    """Returns the least scaled logit that top-k, top-p and min-p leave allowed.

    In the order of Hugging Face's logits processors: top-k of the scaled logits,
    top-p of what is left, renormalised, then min-p. Tokens that tie with the
    last one kept are kept.

    Args:
      scaled: Logits divided by the temperature, whole vocabulary.
    """
    v = scaled.shape[-1]
    ordered = -jnp.sort(-scaled, axis=-1)
    rank = along_last(jnp.arange(v, dtype=jnp.int32), 3)
    top_k = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, v), v)
    kth = jnp.take_along_axis(ordered, top_k[:, None, None] - 1, axis=-1)
    kept = ordered >= kth
    weight = jnp.where(kept, jnp.exp(ordered - ordered[..., :1]), 0.0)
    probability = weight / jnp.sum(weight, axis=-1, keepdims=True)
    # A token stays while the mass before it is below top_p; the first always does.
    before = jnp.cumsum(probability, axis=-1) - probability
    top_p = sampling.top_p[:, None, None]
    # Sums can round up to 1, so "all" cannot be left to the comparison.
    kept &= (before < top_p) | (top_p >= 1) | (rank == 0)
    kept &= weight >= sampling.min_p[:, None, None]
    last = jnp.sum(kept, axis=-1, keepdims=True) - 1
    return jnp.take_along_axis(ordered, last, axis=-1)[..., 0]


def choose(
    logits: F32[Array, "B N V_local"], position: I32[Array, "B N"], sampling: Sampling
) -> I32[Array, "B N"]:
    """Returns the token that each node's logits choose for absolute `position`.

    Greedy where the temperature is 0: the largest logit, and of equals the
    smallest id. Runs inside `shard_map`; collective.
    """
    v_local = logits.shape[-1]
    first_id = jax.lax.axis_index(TENSOR) * v_local
    token_ids = first_id + jnp.arange(v_local, dtype=jnp.int32)
    greedy = (sampling.temperature <= 0)[:, None, None]
    scaled = logits / jnp.where(greedy, 1.0, sampling.temperature[:, None, None])

    def filtered(_) -> Array:
        whole = jax.lax.all_gather(scaled, TENSOR, axis=2, tiled=True)
        return keep_threshold(whole, sampling)

    def unfiltered(_) -> Array:
        return jnp.full(position.shape, -jnp.inf, jnp.float32)

    filters = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    samples = sampling.temperature > 0
    threshold = jax.lax.cond(jnp.any(filters & samples), filtered, unfiltered, None)

    def noisy(_) -> Array:
        noise = gumbel_noise(sampling.seed, position, token_ids)
        return jnp.where(scaled >= threshold[..., None], scaled + noise, -jnp.inf)

    score = jax.lax.cond(jnp.any(samples), noisy, lambda _: scaled, None)
    return _argmax(jnp.where(greedy, scaled, score), first_id)


def _argmax(score: F32[Array, "B N V_local"], first_id: Array) -> I32[Array, "B N"]:
    """Returns the id of the largest score over all devices, the smallest of equals."""
    local = jnp.argmax(score, axis=-1)
    best = jnp.take_along_axis(score, local[..., None], axis=-1)
    ids = (first_id + local).astype(jnp.int32)[..., None]
    best = jax.lax.all_gather(best, TENSOR, axis=2, tiled=True)
    ids = jax.lax.all_gather(ids, TENSOR, axis=2, tiled=True)
    winner = jnp.argmax(best, axis=-1, keepdims=True)
    return jnp.take_along_axis(ids, winner, axis=-1)[..., 0]


def top_log_probs(
    logits: F32[Array, "B D V_local"], count: int
) -> tuple[F32[Array, "B D K"], I32[Array, "B D K"]]:
    """Returns the `count` largest log-probabilities and their ids, descending.

    K = min(count, vocabulary); among equals the smaller id comes first.
    Normalised over the whole vocabulary. Runs inside `shard_map`; collective.
    """
    v_local = logits.shape[-1]
    value, index = jax.lax.top_k(logits, min(count, v_local))
    ids = index.astype(jnp.int32) + jax.lax.axis_index(TENSOR) * v_local
    log_total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    log_total = jax.nn.logsumexp(
        jax.lax.all_gather(log_total, TENSOR, axis=2, tiled=True),
        axis=-1,
        keepdims=True,
    )
    value = jax.lax.all_gather(value, TENSOR, axis=2, tiled=True)
    ids = jax.lax.all_gather(ids, TENSOR, axis=2, tiled=True)
    value, order = jax.lax.top_k(value, min(count, value.shape[-1]))
    return value - log_total, jnp.take_along_axis(ids, order, axis=-1)
