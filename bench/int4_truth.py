"""Owns what INT4 products should give, by the references in float32.

A reference is compiled once for all numbers of tokens of the same weights.
"""

import dataclasses
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from bench.int4_baselines import Draw, Experts
from bench.int4_inputs import dense_weights, grouped_weights
from ddtree_jax.arrays import BF16, F32, Array
from ddtree_jax.pallas.int4_matmul import int4_grouped_swiglu, int4_matmul
from ddtree_jax.pallas.int4_matmul.cases import DenseCase, GroupedCase
from ddtree_jax.quant import Int4Weight

# Tokens of a call of a reference; of fewer the rest is padding.
ROWS = 65

type Exacts = dict[DenseCase | GroupedCase, jax.stages.Compiled]


def kind_of[C: DenseCase | GroupedCase](shape: C) -> C:
    """Returns the case that stands for all those with the same weights."""
    return dataclasses.replace(shape, tokens=1)


def submit_exact(
    compilers: ThreadPoolExecutor, kind: DenseCase | GroupedCase
) -> Future[jax.stages.Compiled]:
    """Returns the reference of a kind to come, for `ROWS` tokens."""
    width = kind.hidden if isinstance(kind, GroupedCase) else kind.inputs
    x = np.zeros((1, width), jnp.bfloat16)
    if isinstance(kind, GroupedCase):
        chosen = np.zeros((1, kind.experts_per_token))
        draw = (chosen.astype(np.int32), chosen.astype(np.float32))
        lowered = jax.jit(_grouped).lower(*_padded(x, draw), _first_weight(kind))
    else:
        lowered = jax.jit(_dense).lower(*_padded(x, ()), _first_weight(kind))
    # The fastest algorithms are not sought for what is not timed.
    return compilers.submit(lowered.compile, {"xla_gpu_autotune_level": 0})


def truth(
    exact: jax.stages.Compiled,
    kind: DenseCase | GroupedCase,
    x: BF16[Array, "T width"],
    draw: Draw | tuple,
) -> F32[np.ndarray, "T out"]:
    """Returns what the first weight of a kind gives."""
    parts = []
    for i in range(0, x.shape[0], ROWS):
        part = slice(i, i + ROWS)
        drawn = tuple(np.asarray(values)[part] for values in draw)
        rows = np.asarray(x)[part]
        result = exact(*_padded(rows, drawn), _first_weight(kind))
        parts.append(np.asarray(result)[: len(rows)])
    return np.concatenate(parts)


def _first_weight(kind: DenseCase | GroupedCase) -> Experts[Int4Weight] | Int4Weight:
    if isinstance(kind, GroupedCase):
        return grouped_weights(kind).layers[0]
    return dense_weights(kind).canonical[0]


def _padded(x: np.ndarray, draw: tuple[np.ndarray, ...]) -> tuple:
    """Returns `ROWS` rows; those added pick no expert."""

    def padded(rows: np.ndarray, fill: int) -> np.ndarray:
        missing = (0, ROWS - len(rows)), (0, 0)
        return np.pad(rows, missing, constant_values=fill)

    fills = (-1, 0)[: len(draw)]
    return padded(x, 0), tuple(map(padded, draw, fills))


def _grouped(x, draw: tuple, experts: Experts[Int4Weight]) -> Array:
    gate, up, down = (jax.tree.map(lambda w: w[None], weight) for weight in experts)
    with jax.default_matmul_precision("highest"):
        return int4_grouped_swiglu(
            x,
            gate,
            up,
            down,
            jnp.int32(0),
            *draw,
            implementation="reference",
        )


def _dense(x, _: tuple, weight: Int4Weight) -> Array:
    with jax.default_matmul_precision("highest"):
        return int4_matmul(x.astype(jnp.float32), weight, implementation="reference")
