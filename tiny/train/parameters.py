"""Owns parameter dictionaries: shapes, initial values, casts, INT4 rounding."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from ddtree_jax.arrays import Array
from ddtree_jax.model.params import named_parameters
from ddtree_jax.quant import GROUP_SIZE, NIBBLES_PER_WORD

type Params = dict[str, Array]
type Shape = tuple[int, ...]

EXPERTS = ("moe/experts/gate", "moe/experts/up", "moe/experts/down")
ROUTER_BIAS = "moe/router_bias"
# What feeds the residual stream begins small, so that depth does not add up.
_RESIDUAL = ("o", "down")
_RESIDUAL_GAIN = 0.2


def shapes(model: nnx.Module) -> dict[str, Shape]:
    """Returns the shape of every trained array of an abstract model."""
    result: dict[str, Shape] = {}
    for path, parameter in named_parameters(model).items():
        *outer, last = parameter.shape
        if path.endswith("/packed"):
            path, last = path.removesuffix("/packed"), last * NIBBLES_PER_WORD
        if not path.endswith("/scale"):
            result[path] = (*outer, last)
    return result


def matrix_shape(path: str, shape: Shape) -> Shape | None:
    """Returns `[…, out, in]` of a projection; None for what multiplies nothing.

    Heads belong to the outputs, in `o` to the inputs.
    """
    name = path.rpartition("/")[2]
    if name in ("q_b", "k_up", "v_up", "q", "k", "v") and len(shape) == 4:
        layers, heads, width, inputs = shape
        return (layers, heads * width, inputs)
    if name == "o":
        layers, out, heads, width = shape
        return (layers, out, heads * width)
    if name == "fc":
        return (shape[0], math.prod(shape[1:]))
    return None if name.endswith(("norm", "bias")) or name == "embed" else shape


def initialise(shapes: dict[str, Shape], seed: int) -> Params:
    """Returns random float32 parameters; projections keep the size of their input."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))

    def value(path: str, shape: Shape, key: Array) -> Array:
        name = path.rpartition("/")[2]
        if name.endswith("norm"):
            return jnp.ones(shape)
        if name.endswith("bias"):
            return jnp.zeros(shape)
        matrix = matrix_shape(path, shape)
        std = 0.5 if matrix is None else matrix[-1] ** -0.5
        if name in _RESIDUAL:
            std *= _RESIDUAL_GAIN
        return std * jax.random.normal(key, shape)

    return {
        path: value(path, shape, key)
        for (path, shape), key in zip(sorted(shapes.items()), keys, strict=True)
    }


def cast(params: Params, dtype) -> Params:
    """Returns the parameters in `dtype`; the router's bias stays float32."""
    return {
        path: value if path == ROUTER_BIAS else value.astype(dtype)
        for path, value in params.items()
    }


def layer(params: Params, prefix: str, index: int) -> Params:
    """Returns one layer of the stacks below `prefix`, by the rest of their paths."""
    return {
        path.removeprefix(prefix): value[index]
        for path, value in params.items()
        if path.startswith(prefix)
    }


def straight_through(weight: Array, amount: Array) -> Array:
    """Returns the weight moved to its INT4 rounding; the gradient is its own.

    Args:
      amount: 0 for the weight as it is, 1 for the rounded one.
    """
    groups = weight.reshape(*weight.shape[:-1], -1, GROUP_SIZE)
    amax = jnp.max(jnp.abs(groups), axis=-1, keepdims=True)
    scale = jnp.maximum(amax / 7.5, 1e-12)
    rounded = jnp.clip(jnp.rint(groups / scale), -8, 7) * scale
    error = rounded.reshape(weight.shape) - weight
    return weight + amount * jax.lax.stop_gradient(error)


def quantise(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the packed INT4 words and bfloat16 scales of `[…, out, in]`.

    The scale of 32 inputs is max |w| / 7.5, and q = w / scale to the nearest of
    -8 .. 7, each quotient rounded to bfloat16: compressed-tensors' rule. On the
    host, since XLA may leave such roundings out.
    """
    groups = weight.astype(ml_dtypes.bfloat16).astype(np.float32)
    groups = groups.reshape(*weight.shape[:-1], -1, GROUP_SIZE)
    amax = np.abs(groups).max(axis=-1, keepdims=True)
    scale = (amax / np.float32(7.5)).astype(ml_dtypes.bfloat16)
    if not amax.all():
        raise ValueError("a group of 32 weights is zero; expected trained weights")
    quotient = (groups / scale.astype(np.float32)).astype(ml_dtypes.bfloat16)
    q = np.rint(quotient.astype(np.float32)).clip(-8, 7)
    nibbles = (q.reshape(weight.shape) + 8).astype(np.uint8)
    pairs = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    return pairs.view("<i4"), scale[..., 0]
