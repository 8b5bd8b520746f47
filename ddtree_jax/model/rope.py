"""Owns YaRN frequencies (arXiv 2309.00071) and the two rotation conventions.

The target rotates interleaved pairs, the drafter rotates halves; the two must
not share a helper.
"""

import math

import jax.numpy as jnp
import numpy as np

from ddtree_jax.arrays import F32, I32, Array, Float, along_last
from ddtree_jax.config import YarnConfig


def yarn_inv_freq(rope: YarnConfig, dim: int) -> np.ndarray:
    """Returns the `dim / 2` angular frequencies in float64, highest first.

    Frequencies that turn more than `beta_fast` times within the original
    context are kept, those below `beta_slow` are divided by `factor`, and a
    linear ramp joins them.
    """
    frequency = rope.theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)

    def dimension_of(rotations: float) -> float:
        length = rope.original_max_position_embeddings
        return (
            dim
            * math.log(length / (rotations * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low = max(math.floor(dimension_of(rope.beta_fast)), 0)
    high = min(math.ceil(dimension_of(rope.beta_slow)), dim - 1)
    # Equal bounds would divide by zero; the published rule widens them so.
    width = high - low if high != low else 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float64) - low) / width, 0.0, 1.0)
    return frequency * (1.0 - ramp) + frequency / rope.factor * ramp


def cos_sin(
    positions: I32[Array, "*lead"], inv_freq: np.ndarray, amplitude: float
) -> tuple[F32[Array, "*lead half"], F32[Array, "*lead half"]]:
    """Returns amplitude · cos and amplitude · sin of position · frequency."""
    frequency = along_last(jnp.asarray(inv_freq, jnp.float32), positions.ndim + 1)
    angle = positions[..., None].astype(jnp.float32) * frequency
    return amplitude * jnp.cos(angle), amplitude * jnp.sin(angle)


def rotate_interleaved(
    x: Float[Array, "*lead R"], cos: F32[Array, "*#lead half"], sin: Array
) -> Float[Array, "*lead R"]:
    """Returns x with its pairs (2i, 2i + 1) rotated, as [all first | all second].

    The order of the result differs from that of x; queries and keys agree in
    it, and so does every row of the rope cache.
    """
    first, second = x[..., 0::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)


def rotate_halves(
    x: Float[Array, "*lead R"], cos: F32[Array, "*#lead half"], sin: Array
) -> Float[Array, "*lead R"]:
    """Returns x with its pairs (i, i + R / 2) rotated, in the order of x."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)
