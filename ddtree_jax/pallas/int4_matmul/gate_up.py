"""Owns the first half of an expert: silu(gate x) · up x."""

import functools
from collections.abc import Callable
from typing import Any

from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.arrays import Array
from ddtree_jax.pallas.int4_matmul.arrivals import LATE, ON_TIME, arrive
from ddtree_jax.pallas.int4_matmul.block import (
    Inputs,
    Problem,
    Share,
    Shared,
    zeros,
)
from ddtree_jax.pallas.int4_matmul.config import QUARTERS
from ddtree_jax.pallas.int4_matmul.fragments import (
    load_activations,
    load_tokens,
    multiply,
)
from ddtree_jax.pallas.int4_matmul.outputs import add_warps, store_hidden
from ddtree_jax.pallas.int4_matmul.ring import Ring, release
from ddtree_jax.pallas.int4_matmul.tiles import TILE_OUT
from ddtree_jax.pallas.registers import per_thread
from ddtree_jax.pallas.warpgroup import WARPS, synchronise_warpgroup

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
    """Writes what this warpgroup's units give to `hidden`; returns where in its
    ring the next stage is.

    Tells of it when those are done that are not late, and when all are.
    """
    row_tiles, interpret = problem.config.row_tiles, problem.interpret
    scratch = shared.scratch.at[warpgroup]

    def unit(i, place):
        pl.when(i == share.late)(lambda: arrive(problem, inputs, ON_TIME))
        number = share.unit(i)
        tile, rows = (f(number, jnp.int32(problem.units)) for f in (lax.div, lax.rem))
        products, place = _products(
            problem, share, inputs, shared, warpgroup, tile, place
        )
        for part in range(row_tiles):
            both = [products[part], products[row_tiles + part]]
            sums = add_warps(both, scratch, interpret=interpret)
            store = functools.partial(
                _store, problem, hidden, tile, rows * row_tiles + part
            )
            if problem.config.shared_units:
                _add_warpgroups(problem, shared, warpgroup, sums, store)
            else:
                store(*sums)
        return place

    place = lax.fori_loop(0, share.units, unit, jnp.int32(0))
    pl.when(share.units == share.late)(lambda: arrive(problem, inputs, ON_TIME))
    pl.when(share.is_late)(lambda: arrive(problem, inputs, LATE))
    return place


def _store(
    problem: Problem, hidden: Any, tile: Array, row_tile: Array, gate: Array, up: Array
) -> None:
    value = gate / (1.0 + jnp.exp(-gate)) * up
    first = row_tile * TILE_OUT
    store_hidden(hidden, tile, first, value, interpret=problem.interpret)


def _add_warpgroups(
    problem: Problem,
    shared: Shared,
    warpgroup: Array,
    sums: list[Array],
    use: Callable[..., None],
) -> None:
    """Uses, in the first warpgroup, the sums over all of them, in one order."""
    interpret = problem.interpret

    def meet():
        plgpu.barrier_arrive(shared.met)
        plgpu.barrier_wait(shared.met)

    def load(source, number):
        ref = shared.scratch.at[source, number, 0]
        if interpret:
            return ref[...]
        return plgpu.load(ref, layout=per_thread(1))

    if not interpret:
        synchronise_warpgroup()  # the sums are in registers everywhere
    for number, value in enumerate(sums):
        shared.scratch[warpgroup, number, 0] = value
    meet()

    @pl.when(warpgroup == 0)
    def _():
        totals = []
        for number, total in enumerate(sums):
            for other in range(1, problem.config.warpgroups):
                total = total + load(other, number)
            totals.append(total)
        use(*totals)

    meet()


def _products(
    problem: Problem,
    share: Share,
    inputs: Inputs,
    shared: Shared,
    warpgroup: Array,
    tile: Array,
    place: Array,
) -> tuple[tuple[Array, ...], Array]:
    """Returns the products of one unit, of gate's row tiles, then of up's.

    And the place that follows those of its stages, of which `place` is the first.
    """
    row_tiles, interpret = problem.config.row_tiles, problem.interpret
    last = problem.unit_stages - 1
    ring = Ring(problem.config, shared, warpgroup)
    tokens = load_tokens(inputs.slots, tile, interpret=interpret)
    # Of a stage, the inputs of one or two tiles of each warp.
    parts = 2 // row_tiles

    def activations(stage):
        stage = jnp.minimum(share.offset + stage * share.step, last)
        first = stage * (parts * WARPS)
        return tuple(
            load_activations(
                inputs.x, tokens, first + WARPS * part, 1, interpret=interpret
            )
            for part in range(parts)
        )

    def stage(k, carry):
        products, (x, *later), place = carry
        following = activations(k + _AHEAD)
        slot = ring.slot(place)
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
        return tuple(products), (*later, following), ring.after(place)

    start = tuple(zeros() for _ in range(2 * row_tiles))
    first = tuple(activations(jnp.int32(k)) for k in range(_AHEAD))
    carry = start, first, place
    products, _, place = lax.fori_loop(0, share.stages, stage, carry)
    return products, place
