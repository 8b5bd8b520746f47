"""Owns the arrays that tree-MLA calls are timed with, and a baseline by XLA."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.tree_mla_cases import BenchCase
from ddtree_jax.arrays import BF16, F32, I32, U32, Array
from ddtree_jax.pallas.tree_mla import pack_bits, unpack_bits

# 302 MB of 64 Kimi tokens each: calls that walk through it find nothing in L2.
POOL_PAGES = 4096
# Parents are among the nodes this far before; what the peers were timed with.
_REACH = 6
_TAIL_MULTIPLE = 64
# Logits of normal queries and keys then have a standard deviation of 1.7.
SOFTMAX_SCALE = 0.07


class Pool(NamedTuple):
    """Pages of committed tokens that all calls share."""

    latent: BF16[Array, "pages S L"]
    rope: BF16[Array, "pages S R"]


class Shared(NamedTuple):
    """What all calls of a case share; only page tables, and so pages, rotate."""

    q_latent: BF16[Array, "B N H L"]
    q_rope: BF16[Array, "B N H R"]
    pool: Pool
    context_len: I32[Array, "B"]
    tail_latent: BF16[Array, "B T L"]
    tail_rope: BF16[Array, "B T R"]
    ancestor_bits: U32[Array, "B N W"]


def make_pool(case: BenchCase, pages: int = POOL_PAGES) -> Pool:
    """Returns normal numbers in pages of the case's widths."""

    def normal(key, width):
        shape = pages, case.shape.page_size, width
        return jax.random.normal(key, shape, jnp.bfloat16)

    latent, rope = jax.random.split(jax.random.key(0))
    return Pool(normal(latent, case.shape.latent), normal(rope, case.shape.rope))


def make_shared(case: BenchCase, pool: Pool) -> Shared:
    """Returns the case's other arrays; tail rows that belong to no node are NaN."""
    shape, batch = case.shape, len(case.shape.context_len)
    rng = np.random.default_rng(1)
    tail = -(-shape.nodes // _TAIL_MULTIPLE) * _TAIL_MULTIPLE

    def normal(*sizes: int) -> np.ndarray:
        return rng.standard_normal(sizes, np.float32)

    def padded(x: np.ndarray) -> np.ndarray:
        missing = (0, 0), (0, tail - shape.nodes), (0, 0)
        return np.pad(x, missing, constant_values=np.nan)

    heads = batch, shape.nodes, shape.heads
    return Shared(
        q_latent=jnp.asarray(normal(*heads, shape.latent), jnp.bfloat16),
        q_rope=jnp.asarray(normal(*heads, shape.rope), jnp.bfloat16),
        pool=pool,
        context_len=jnp.asarray(shape.context_len, jnp.int32),
        tail_latent=jnp.asarray(
            padded(normal(batch, shape.nodes, shape.latent)), jnp.bfloat16
        ),
        tail_rope=jnp.asarray(
            padded(normal(batch, shape.nodes, shape.rope)), jnp.bfloat16
        ),
        ancestor_bits=pack_bits(jnp.asarray(ancestors(case))),
    )


def ancestors(case: BenchCase) -> np.ndarray:
    """Returns for each node [B, N, N] which nodes it sees, itself included."""
    nodes, batch = case.shape.nodes, len(case.shape.context_len)
    rng = np.random.default_rng(2)
    seen = np.zeros((batch, nodes, nodes), bool)
    for request, node in itertools.product(range(batch), range(nodes)):
        if node:
            nearest = node - 1 if case.form == "chain" else max(0, node - _REACH)
            parent = rng.integers(nearest, node)
            seen[request, node] = seen[request, parent]
        seen[request, node, node] = True
    return seen


def page_tables(case: BenchCase, pages: int, calls: int) -> list[I32[Array, "B P"]]:
    """Returns the table of each of `calls` calls, on a walk through shuffled pages.

    A page comes again only when all others have been read.
    """
    shape = len(case.shape.context_len), case.shape.pages_per_request
    used = shape[0] * shape[1]
    if used > pages:
        raise ValueError(f"{case.name} needs {used} pages; the pool has {pages}")
    order = np.random.default_rng(3).permutation(pages).astype(np.int32)
    walk = np.resize(order, calls * used).reshape(calls, *shape)
    return [jnp.asarray(table) for table in walk]


def xla_attention(
    q_latent: BF16[Array, "B N H L"],
    q_rope: BF16[Array, "B N H R"],
    latent_cache: BF16[Array, "pages S L"],
    rope_cache: BF16[Array, "pages S R"],
    page_table: I32[Array, "B P"],
    context_len: I32[Array, "B"],
    *,
    tail_latent: BF16[Array, "B T L"],
    tail_rope: BF16[Array, "B T R"],
    ancestor_bits: U32[Array, "B N W"],
    softmax_scale: float,
) -> tuple[BF16[Array, "B N H L"], F32[Array, "B N H"]]:
    """Returns what `tree_mla_attention` does, as plain XLA is written for speed.

    Gathers pages and multiplies in bfloat16, with float32 logits and sums. Unlike
    the reference it reads what must not be read, so pages have to be finite.
    """
    batch, nodes = q_latent.shape[:2]

    def keys(pages, tail):
        context = pages[page_table].reshape(batch, -1, pages.shape[-1])
        return jnp.concatenate([context, tail[:, :nodes]], axis=1)

    def product(spec, a, b):
        return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)

    latent, rope = keys(latent_cache, tail_latent), keys(rope_cache, tail_rope)
    place = jnp.arange(latent.shape[1] - nodes)
    committed = place[None] < context_len[:, None]
    committed = jnp.broadcast_to(committed[:, None], (batch, nodes, len(place)))
    tree = unpack_bits(ancestor_bits, nodes)
    visible = jnp.concatenate([committed, tree], axis=-1)[:, :, None]
    logits = product("bnhl,bkl->bnhk", q_latent, latent)
    logits += product("bnhr,bkr->bnhk", q_rope, rope)
    logits = jnp.where(visible, logits * softmax_scale, -jnp.inf)
    peak = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    output = product("bnhk,bkl->bnhl", weights.astype(jnp.bfloat16), latent) / total
    return output.astype(q_latent.dtype), (peak + jnp.log(total))[..., 0]
