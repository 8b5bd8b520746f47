"""Owns the draft tree: its invariants, and how it is built under a budget.

DDTree (arXiv 2604.12989): the drafter's positions are independent, so the best
tree of `budget` nodes is the set of the most probable prefixes. Here it is
built without a heap, with static shapes.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.arrays import F32, I32, U32, Array, Bool
from ddtree_jax.pallas import pack_bits


class DraftTree(NamedTuple):
    """Token trees of B requests, N nodes each.

    Attributes:
      tokens: Node tokens; the root's is the known token.
      parent: Index of each node's parent; -1 for the root, 0 for padding.
      depth: 0 for the root and for padding.
      used: False for padding nodes.

    Invariants (of used nodes):
      1. Node 0 is the root; every other parent has a smaller index.
      2. depth = depth of the parent + 1.
      3. Siblings have distinct tokens.
      4. Probability does not increase with the index, so the first nodes are
         the best tree of any smaller budget.
    """

    tokens: I32[Array, "B N"]
    parent: I32[Array, "B N"]
    depth: I32[Array, "B N"]
    used: Bool[Array, "B N"]


def chain(tokens: I32[Array, "B N"], count: I32[Array, "B"]) -> DraftTree:
    """Returns trees without branches, of the first `count` tokens each."""
    index = jnp.broadcast_to(
        jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape
    )
    used = index < count[:, None]
    return DraftTree(
        tokens=jnp.where(used, tokens, 0),
        parent=jnp.where(used, index - 1, 0),
        depth=jnp.where(used, index, 0),
        used=used,
    )


def ancestor_mask(parent: I32[Array, "B N"], *, max_depth: int) -> Bool[Array, "B N N"]:
    """Says which tree nodes each tree node may attend to.

    Entry `[b, i, j]` is true when `j` is `i` itself or lies on the path from
    `i` up to the root. Padding nodes point at the root, so they see
    only it and themselves; nobody sees them.

    Args:
      parent: Index of each node's parent. Node 0 is the root, with parent -1;
        every other parent has a smaller index than its child.
      max_depth: Upper bound on depth; static, it is the number of passes.

    Example:
      >>> parent = jnp.array([[-1, 0, 0, 1]])
      >>> print(ancestor_mask(parent, max_depth=2)[0].astype(int))
      [[1 0 0 0]
       [1 1 0 0]
       [1 0 1 0]
       [1 1 0 1]]
    """
    n = parent.shape[1]
    mask = jnp.broadcast_to(jnp.eye(n, dtype=bool)[None], (*parent.shape, n))
    for _ in range(max_depth):
        above = jnp.take_along_axis(mask, jnp.maximum(parent, 0)[..., None], axis=1)
        mask = mask | jnp.where((parent >= 0)[..., None], above, False)
    return mask


def chain_bits(batch: int, n: int) -> U32[Array, "B N W"]:
    """Returns the packed ancestor mask of chains of N nodes."""
    mask = jnp.tril(jnp.ones((n, n), bool))
    return jnp.broadcast_to(pack_bits(mask)[None], (batch, n, -(-n // 32)))


@functools.cache
def _level_pairs(budget: int, kept: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the (prefix rank, token rank) pairs that can be among the best.

    The i-th best prefix of a level extended by its k-th best token is beaten by
    (i + 1)(k + 1) - 1 others, so only pairs within the budget matter.
    """
    pairs = [
        (i, k)
        for i in range(budget)
        for k in range(min(kept, budget))
        if (i + 1) * (k + 1) <= budget
    ]
    prefix, token = zip(*pairs, strict=True)
    return np.asarray(prefix, np.int32), np.asarray(token, np.int32)


class _Pool(NamedTuple):
    """Candidate nodes of one request, all depths, before the choice."""

    score: F32[Array, "C"]
    parent: I32[Array, "C"]
    depth: I32[Array, "C"]
    token: I32[Array, "C"]


def _candidates(
    log_probs: F32[Array, "D K"], token_ids: I32[Array, "D K"], budget: int
) -> _Pool:
    """Returns the best `budget` prefixes of every depth; ids are 1 + pool index."""
    horizon, kept = log_probs.shape
    prefix, rank = (jnp.asarray(a) for a in _level_pairs(budget, kept))
    frontier = jnp.full(budget, -jnp.inf, jnp.float32).at[0].set(0.0)
    ids = jnp.zeros(budget, jnp.int32)
    levels = []
    for level in range(horizon):
        scores = frontier[prefix] + log_probs[level, rank]
        # Stable: among equals the better prefix, then the better token.
        frontier, order = jax.lax.top_k(scores, budget)
        levels.append(
            _Pool(
                score=frontier,
                parent=ids[prefix[order]],
                depth=jnp.full(budget, level + 1, jnp.int32),
                token=token_ids[level, rank[order]],
            )
        )
        ids = 1 + level * budget + jnp.arange(budget, dtype=jnp.int32)
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *levels)


def build(
    log_probs: F32[Array, "B D K"],
    token_ids: I32[Array, "B D K"],
    root_token: I32[Array, "B"],
    tree_budget: I32[Array, "B"],
    *,
    num_nodes: int,
) -> DraftTree:
    """Returns the tree of the most probable prefixes, best first.

    Ties go to the shallower node, then to the better prefix, then to the better
    token, so a parent always precedes its children.

    Args:
      log_probs: The K largest log-probabilities of each position, descending.
      token_ids: Their tokens. K = min(num_nodes - 1, vocabulary) is enough.
      root_token: Known token at the root.
      tree_budget: Draft nodes wanted, without the root; at most num_nodes - 1.
      num_nodes: Static size of the tree, root included.
    """
    budget = num_nodes - 1
    if budget == 0:
        return chain(root_token[:, None], jnp.ones_like(root_token))
    # Rounding can lift a log-probability above 0, and then a child over its parent.
    pool = jax.vmap(functools.partial(_candidates, budget=budget))(
        jnp.minimum(log_probs, 0.0), token_ids
    )
    return jax.vmap(_select, in_axes=(0, 0, 0, None))(
        pool, root_token, tree_budget, budget
    )


def _select(pool: _Pool, root_token: Array, tree_budget: Array, budget: int):
    """Returns one request's tree: the `tree_budget` best of the pool."""
    # Stable, and levels come in depth order: a parent wins a tie with its child.
    score, order = jax.lax.top_k(pool.score, budget)
    used = (jnp.arange(budget) < tree_budget) & (score > -jnp.inf)
    node_of = jnp.zeros(pool.score.shape[0] + 1, jnp.int32)
    node_of = node_of.at[1 + order].set(1 + jnp.arange(budget, dtype=jnp.int32))

    def with_root(root: Array | int, nodes: Array) -> Array:
        root = jnp.asarray(root, nodes.dtype).reshape(1)
        return jnp.concatenate([root, jnp.where(used, nodes, 0)])

    return DraftTree(
        tokens=with_root(root_token, pool.token[order]),
        parent=with_root(-1, node_of[pool.parent[order]]),
        depth=with_root(0, pool.depth[order]),
        used=jnp.concatenate([jnp.ones(1, bool), used]),
    )
