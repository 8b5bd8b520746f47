"""Every weight that the kernel of the experts multiplies with is bfloat16(q · scale).

All but one of the three matrices are such that the result is that one's weights, times
128: activations with one input each, silu(x) = x for x ≥ 128 and 0 for x ≤ -128.
"""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ddtree_jax.quant import Int4Weight, pack
from tests.pallas.machines import on_every_machine
from tests.pallas.test_int4_grouped import Routed
from tests.pallas.test_int4_kernel import BF16, cut, run
from tests.support.weights import dequantised

TOKENS, HIDDEN, INNER = 64, 512, 256
SHAPE = cut(tokens=TOKENS, experts=1, choices=1, hidden=HIDDEN, inner=INNER)
FACTOR = 128


def constant(q: np.ndarray, scale: float) -> Int4Weight:
    """Returns the weight q · scale."""
    scales = jnp.full((*q.shape[:-1], q.shape[-1] // 32), scale, jnp.bfloat16)
    return Int4Weight(pack(jnp.asarray(q, jnp.int32)), scales)


def diagonal(out: int, inputs: int) -> Int4Weight:
    """Returns the weight that copies its inputs."""
    return constant(np.eye(out, inputs), 1)


def full(out: int, inputs: int, value: float) -> Int4Weight:
    return constant(np.ones((out, inputs)), value)


def any_weight(out: int, inputs: int, *, low: int, high: int) -> Int4Weight:
    """Returns random nibbles, and scales of all mantissas and many exponents."""
    rng = np.random.default_rng(1)
    words = rng.integers(-(2**31), 2**31, (out, inputs // 8)).astype(np.int32)
    groups = out, inputs // 32
    exponent = rng.integers(low, high, groups)
    scale = np.ldexp(1 + rng.integers(0, 128, groups) / 128, exponent)
    return Int4Weight(jnp.asarray(words), jnp.asarray(scale.astype(ml_dtypes.bfloat16)))


def multiply(machine: str, inputs: np.ndarray, sign: int, **weights: Int4Weight):
    """Returns the results of tokens that have one input each, `sign`."""
    x = np.zeros((TOKENS, HIDDEN), BF16)
    x[np.arange(TOKENS), inputs] = sign
    stacks = {
        name: Int4Weight(weight.packed[None, None], weight.scale[None, None])
        for name, weight in weights.items()
    }
    a = Routed(
        x,
        **stacks,
        layer=np.int32(0),
        expert_ids=np.zeros((TOKENS, 1), np.int32),
        expert_weights=np.ones((TOKENS, 1), np.float32),
    )
    blocks = {"interpreter": 1, "gpu": 132}[machine]
    return run(machine, a, dataclasses.replace(SHAPE.config, blocks=blocks))


def chosen(machine: str, inputs: int) -> list[np.ndarray]:
    """Returns inputs for each call: on a GPU all; else all places of a tile."""
    if machine == "gpu":
        return list(np.arange(inputs).reshape(-1, TOKENS))
    t = np.arange(TOKENS)
    return [t + TOKENS * (t % (inputs // TOKENS))]


_SLOW_INTERPRETER = pytest.param(
    "interpreter", id="interpreter", marks=pytest.mark.slow
)
_GPU = pytest.param("gpu", id="gpu", marks=pytest.mark.gpu)


@on_every_machine
def test_up(machine):
    up = any_weight(INNER, HIDDEN, low=-60, high=60)
    want = FACTOR * dequantised(up)
    for inputs in chosen(machine, HIDDEN):
        got = multiply(
            machine,
            inputs,
            1,
            gate=full(INNER, HIDDEN, FACTOR),
            up=up,
            down=diagonal(HIDDEN, INNER),
        )
        np.testing.assert_array_equal(got[:, :INNER], want[:, inputs].T)
        np.testing.assert_array_equal(got[:, INNER:], 0)


@pytest.mark.parametrize("machine", [_SLOW_INTERPRETER, _GPU], indirect=True)
@pytest.mark.parametrize("sign", [1, -1])
def test_gate(machine, sign):
    """One sign shows positive weights, the other one negative ones."""
    gate = any_weight(INNER, HIDDEN, low=7, high=60)
    want = np.maximum(sign * dequantised(gate), 0)
    for inputs in chosen(machine, HIDDEN):
        got = multiply(
            machine,
            inputs,
            sign,
            gate=gate,
            up=full(INNER, HIDDEN, sign),
            down=diagonal(HIDDEN, INNER),
        )
        np.testing.assert_array_equal(got[:, :INNER], want[:, inputs].T)


@pytest.mark.parametrize("machine", [_SLOW_INTERPRETER, _GPU], indirect=True)
def test_down(machine):
    down = any_weight(HIDDEN, INNER, low=-60, high=60)
    want = FACTOR * dequantised(down)
    for inputs in chosen(machine, INNER):
        got = multiply(
            machine,
            inputs,
            1,
            gate=full(INNER, HIDDEN, FACTOR),
            up=diagonal(INNER, HIDDEN),
            down=down,
        )
        np.testing.assert_array_equal(got, want[:, inputs].T)
