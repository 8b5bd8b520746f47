"""Owns the first half of an expert: silu(gate x) · up x."""

from typing import Any

from jax import lax
from jax import numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.arrays import Array
from ddtree_jax.pallas.int4_matmul.block import (
    Inputs,
    Problem,
    Share,
    Shared,
    release,
    slot_of,
    zeros,
)
from ddtree_jax.pallas.int4_matmul.config import QUARTERS
from ddtree_jax.pallas.int4_matmul.fragments import (
    load_activations,
    load_tokens,
    multiply,
)
from ddtree_jax.pallas.int4_matmul.outputs import add_warps, store_hidden
from ddtree_jax.pallas.int4_matmul.tiles import TILE_OUT
from ddtree_jax.pallas.warpgroup import WARPS

# Stages for which activations are on their way.
_AHEAD = 2


def gate_up(
    problem: Problem,
    share: Share,
    inputs: Inputs,
    shared: Shared,
    warpgroup: Array,
    hidden: Any,
) -> Array:
    """Writes what this warpgroup's units give to `hidden`; returns stages used."""
    row_tiles, interpret = problem.config.row_tiles, problem.interpret
    scratch = shared.scratch.at[warpgroup]

    def unit(i, used):
        number = share.first + i * problem.config.stride
        tile, rows = (f(number, jnp.int32(problem.units)) for f in (lax.div, lax.rem))
        products = _products(problem, inputs, shared, warpgroup, tile, used)
        for part in range(row_tiles):
            both = [products[part], products[row_tiles + part]]
            gate, up = add_warps(both, scratch, interpret=interpret)
            value = gate / (1.0 + jnp.exp(-gate)) * up
            first = (rows * row_tiles + part) * TILE_OUT
            store_hidden(hidden, tile, first, value, interpret=interpret)
        return used + problem.unit_stages

    return lax.fori_loop(0, share.units, unit, jnp.int32(0))


def _products(
    problem: Problem,
    inputs: Inputs,
    shared: Shared,
    warpgroup: Array,
    tile: Array,
    used: Array,
) -> tuple[Array, ...]:
    """Returns the products of one unit: of gate's row tiles, then of up's."""
    row_tiles, interpret = problem.config.row_tiles, problem.interpret
    stages = problem.unit_stages
    tokens = load_tokens(inputs.slots, tile, interpret=interpret)
    # Of a stage, the inputs of one or two tiles of each warp.
    parts = 2 // row_tiles

    def activations(stage):
        first = jnp.minimum(stage, stages - 1) * (parts * WARPS)
        return tuple(
            load_activations(
                inputs.x, tokens, first + WARPS * part, 1, interpret=interpret
            )
            for part in range(parts)
        )

    def stage(k, carry):
        products, (x, *later) = carry
        following = activations(k + _AHEAD)
        slot = slot_of(problem.config, shared, warpgroup, used + k)
        plgpu.barrier_wait(slot.full)
        products = list(products)
        for quarter in range(QUARTERS):
            matrix, part = divmod(quarter, 2)
            which = matrix * row_tiles + part % row_tiles
            products[which] = multiply(
                products[which],
                slot.words,
                slot.scales,
                x[part % parts],
                first=quarter * WARPS,
                stride=1,
                interpret=interpret,
            )
        release(slot, interpret=interpret)
        return tuple(products), (*later, following)

    start = tuple(zeros() for _ in range(2 * row_tiles))
    first = tuple(activations(jnp.int32(k)) for k in range(_AHEAD))
    products, _ = lax.fori_loop(0, stages, stage, (start, first))
    return products
