"""Random parameters: INT4 pairs, and whole modules of `model.params`."""

from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from ddtree_jax.model.params import map_parameters
from ddtree_jax.quant import Int4Weight

GOLDEN = Path(__file__).parents[1] / "golden"


def random_int4(rng: np.random.Generator, shape: tuple[int, ...]) -> Int4Weight:
    """Returns any words and positive scales; the weights are of order 0.5."""
    *lead, inputs = shape
    words = rng.integers(-(2**31), 2**31, (*lead, inputs // 8)).astype(np.int32)
    scale = rng.uniform(0.02, 0.2, (*lead, inputs // 32)).astype(ml_dtypes.bfloat16)
    return Int4Weight(jnp.asarray(words), jnp.asarray(scale))


def dequantised(weight: Int4Weight) -> np.ndarray:
    """Returns bfloat16(q · scale) as float64, in NumPy and from the formula."""
    packed = np.asarray(weight.packed).view(np.uint32)
    scale = np.asarray(weight.scale)
    shape = (*packed.shape[:-1], packed.shape[-1] * 8)
    out = np.empty(shape, ml_dtypes.bfloat16)
    for i in range(shape[-1]):
        nibble = packed[..., i // 8] >> np.uint32(4 * (i % 8)) & np.uint32(15)
        q = nibble.astype(np.float64) - 8
        out[..., i] = q * scale[..., i // 32].astype(np.float64)
    return out.astype(np.float64)


def random_parameters[M: nnx.Module](model: M, rng: np.random.Generator) -> M:
    """Returns the abstract `model` with normal values, float32 for bfloat16."""

    def draw(path: str, p: nnx.Param):
        if p.dtype == jnp.int32:
            words = rng.integers(-(2**31), 2**31, p.shape)
            return jnp.asarray(words.astype(np.int32))
        if path.endswith("scale"):
            return jnp.asarray(rng.uniform(0.01, 0.05, p.shape), p.dtype)
        return jnp.asarray(0.2 * rng.standard_normal(p.shape), jnp.float32)

    return map_parameters(draw, model)
