"""Owns the optimiser: Muon for projections, Adam for the rest, one learning rate.

Muon steps along the nearest orthogonal matrix to the momentum (Newton-Schulz), at
the size of an Adam step, as in Moonlight (arXiv 2502.16982): Kimi K2's own rule.
"""

import jax
import jax.numpy as jnp
import optax

from ddtree_jax.arrays import Array
from tiny.train.parameters import matrix_shape

_NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)
_STEPS = 5
_ADAM_SIZE = 0.2  # Root mean square of a usual Adam step.
_WEIGHT_DECAY = 0.1


def make_optimiser() -> optax.GradientTransformation:
    """Returns the direction to subtract, to be multiplied by the learning rate."""
    muon = optax.chain(
        optax.trace(0.95, nesterov=True),
        optax.stateless(_orthogonal),
        optax.add_decayed_weights(_WEIGHT_DECAY),
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.partition({"muon": muon, "adam": optax.scale_by_adam(0.9, 0.95)}, _kinds),
    )


def _kinds(params: dict[str, Array]) -> dict[str, str]:
    # Rows of the router and the head are looked at one by one, as the embedding's.
    return {
        path: "adam"
        if matrix_shape(path, value.shape) is None or path.endswith(("head", "router"))
        else "muon"
        for path, value in params.items()
    }


def _orthogonal(updates: optax.Updates, _) -> optax.Updates:
    def one(key_path, update: Array) -> Array:
        shape = matrix_shape(key_path[-1].key, update.shape)
        assert shape is not None
        size = _ADAM_SIZE * max(shape[-2:]) ** 0.5
        matrix = orthogonalise(update.reshape(shape))
        return size * matrix.reshape(update.shape).astype(update.dtype)

    return jax.tree_util.tree_map_with_path(one, updates)


def orthogonalise(matrix: Array) -> Array:
    """Returns about U Vᵀ of each `[…, out, in]` matrix U S Vᵀ, in bfloat16."""
    a, b, c = _NEWTON_SCHULZ
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = jnp.swapaxes(matrix, -1, -2) if tall else matrix
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-12)
    x = x.astype(jnp.bfloat16)
    for _ in range(_STEPS):
        gram = x @ jnp.swapaxes(x, -1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return jnp.swapaxes(x, -1, -2) if tall else x
