"""Owns the walk: which nodes the target's own choices accept."""

from typing import NamedTuple

import jax.numpy as jnp

from ddtree_jax.arrays import I32, Array
from ddtree_jax.spec.tree import DraftTree


class Accepted(NamedTuple):
    """The path that the target's choices take through each tree.

    Attributes:
      accepted_path: Node ids from the root on, padded with 0.
      num_accepted: Drafted tokens accepted, 0 .. D; the path has one node more.
      tokens: Accepted tokens and then the bonus token, padded with 0; the
        first `num_accepted + 1` are new.
    """

    accepted_path: I32[Array, "B D1"]
    num_accepted: I32[Array, "B"]
    tokens: I32[Array, "B D1"]


def walk(
    tree: DraftTree, choice: I32[Array, "B N"], room: I32[Array, "B"], *, horizon: int
) -> Accepted:
    """Returns the longest path whose tokens the target chose itself.

    From the root, the child that carries the chosen token is entered as long as
    there is one; the choice that has no child is the bonus token. Siblings have
    distinct tokens, so at most one child matches.

    Args:
      choice: The target's token after each node.
      room: Most nodes that may be committed, at least 1; the path is cut there.
      horizon: D, the greatest depth of the tree; static.
    """
    n = tree.parent.shape[1]
    # match[b, i, j]: j is the child of i that carries i's chosen token.
    match = (tree.parent[:, None] == jnp.arange(n)[None, :, None]) & (
        tree.tokens[:, None] == choice[..., None]
    )
    match &= tree.used[:, None]
    child = jnp.where(jnp.any(match, axis=-1), jnp.argmax(match, axis=-1), -1)

    current = jnp.zeros_like(room)
    alive = jnp.ones(room.shape, bool)
    path, tokens, accepted = [], [], jnp.zeros_like(room)
    for depth in range(horizon + 1):
        chosen = jnp.take_along_axis(choice, current[:, None], axis=1)[:, 0]
        following = jnp.take_along_axis(child, current[:, None], axis=1)[:, 0]
        path.append(jnp.where(alive, current, 0))
        tokens.append(jnp.where(alive, chosen, 0))
        alive &= (following >= 0) & (depth + 1 < room)
        accepted += alive.astype(jnp.int32)
        current = jnp.where(alive, following, current).astype(jnp.int32)
    return Accepted(
        accepted_path=jnp.stack(path, axis=1),
        num_accepted=accepted,
        tokens=jnp.stack(tokens, axis=1),
    )
