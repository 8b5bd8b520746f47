"""Owns the arrays that INT4 products are timed with."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.int4_baselines import Draw, Experts
from bench.int4_cases import BenchCase, Load
from ddtree_jax.arrays import BF16, Array
from ddtree_jax.pallas.int4_matmul.cases import DenseCase, GroupedCase
from ddtree_jax.pallas.int4_matmul.tiles import Int4Tiles, to_tiles
from ddtree_jax.quant import GROUP_SIZE, NIBBLES_PER_WORD, Int4Weight, dequantise

# Of a dense shape: 264 MB of INT4, more than L2 holds.
DENSE_WEIGHTS = 32


class GroupedWeights(NamedTuple):
    """Weights of one stack.

    Attributes:
      layers: In canonical order, a layer each.
      stacks: For the kernel, gate, up and down.
    """

    layers: tuple[Experts[Int4Weight], ...]
    stacks: Experts[Int4Tiles]


class DenseWeights(NamedTuple):
    """Weights of one shape, each in canonical order and for the kernel."""

    canonical: tuple[Int4Weight, ...]
    tiles: tuple[Int4Tiles, ...]


def random_weight(key: Array, *shape: int) -> Int4Weight:
    """Returns a weight of all nibbles, that keeps the size of what it multiplies."""
    *lead, inputs = shape
    bits, scales = jax.random.split(key)
    packed = jax.random.bits(bits, (*lead, inputs // NIBBLES_PER_WORD), jnp.uint32)
    scale = jax.random.uniform(
        scales, (*lead, inputs // GROUP_SIZE), jnp.float32, 0.5, 1.5
    )
    scale *= 0.4 / inputs**0.5
    return Int4Weight(
        jax.lax.bitcast_convert_type(packed, jnp.int32), scale.astype(jnp.bfloat16)
    )


@functools.cache
def grouped_weights(shape: GroupedCase) -> GroupedWeights:
    """Returns random weights of a stack, packed a layer at a time, made once."""

    @jax.jit
    def layer(key: Array) -> tuple[Experts[Int4Weight], Experts[Int4Tiles]]:
        wide = shape.experts, shape.inner, shape.hidden
        narrow = shape.experts, shape.hidden, shape.inner
        keys = jax.random.split(key, 3)
        made = Experts(
            *(
                random_weight(key, *sizes)
                for key, sizes in zip(keys, (wide, wide, narrow), strict=True)
            )
        )
        return made, Experts(*map(to_tiles, made))

    keys = jax.random.split(jax.random.key(0), shape.layers)
    layers, tiles = zip(*map(layer, keys), strict=True)
    stack = jax.jit(lambda *x: jax.tree.map(lambda *y: jnp.stack(y), *x))
    return GroupedWeights(layers, stack(*tiles))


@functools.cache
def dense_weights(shape: DenseCase) -> DenseWeights:
    """Returns random weights of a shape, made once."""

    @jax.jit
    def weight(key: Array) -> tuple[Int4Weight, Int4Tiles]:
        made = random_weight(key, shape.outputs, shape.inputs)
        return made, to_tiles(made)

    keys = jax.random.split(jax.random.key(1), DENSE_WEIGHTS)
    canonical, tiles = zip(*map(weight, keys), strict=True)
    return DenseWeights(canonical, tiles)


@functools.cache
def bfloat16_layers(shape: GroupedCase) -> tuple[Experts[Array], ...]:
    """Returns what `grouped_weights` stand for, made once."""
    layer = jax.jit(lambda experts: Experts(*map(dequantise, experts)))
    return tuple(map(layer, grouped_weights(shape).layers))


@functools.cache
def bfloat16_dense(shape: DenseCase) -> tuple[Array, ...]:
    """Returns what `dense_weights` stand for, made once."""
    return tuple(map(jax.jit(dequantise), dense_weights(shape).canonical))


def activations(tokens: int, width: int) -> BF16[Array, "T width"]:
    """Returns normal numbers."""
    rng = np.random.default_rng(2)
    return jnp.asarray(rng.standard_normal((tokens, width), np.float32), jnp.bfloat16)


def draws(case: BenchCase, calls: int) -> list[Draw]:
    """Returns a uniform draw for each call.

    Ids of experts that are elsewhere remain; a draw without any that is here is given
    one.
    """
    shape = case.shape
    assert isinstance(shape, GroupedCase)
    rng = np.random.default_rng(3)
    made = []
    for _ in range(calls):
        ids = np.stack(
            [
                rng.permutation(shape.routed_experts)[: shape.experts_per_token]
                for _ in range(shape.tokens)
            ]
        ).astype(np.int32)
        if ids.min() >= shape.experts:
            ids[0, 0] = rng.integers(shape.experts)
        weights = rng.uniform(0.1, 0.5, ids.shape).astype(np.float32)
        made.append(Draw(jnp.asarray(ids), jnp.asarray(weights)))
    return made


def load_of(shape: GroupedCase, made: Sequence[Draw]) -> Load:
    """Returns the mean load of the draws."""
    ids = [np.asarray(draw.expert_ids) for draw in made]
    picked = [i[i < shape.experts] for i in ids]
    return Load(
        experts=float(np.mean([len(np.unique(i)) for i in picked])),
        pairs=float(np.mean([i.size for i in picked])),
    )
