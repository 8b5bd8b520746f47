"""Owns the second half of the experts: the weighted sum of down (…)."""

from typing import Any, NamedTuple

from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.arrays import Array
from ddtree_jax.pallas.int4_matmul.arrivals import wait_for_late_units
from ddtree_jax.pallas.int4_matmul.block import (
    Inputs,
    Problem,
    Share,
    Shared,
    zeros,
)
from ddtree_jax.pallas.int4_matmul.config import ITEM_TILES, ROWS
from ddtree_jax.pallas.int4_matmul.fragments import (
    load_activations,
    multiply,
    own_columns,
)
from ddtree_jax.pallas.int4_matmul.outputs import (
    add_to_rows,
    clear_rows,
    load_slots,
    store_rows,
)
from ddtree_jax.pallas.int4_matmul.ring import Ring, release


class Item(NamedTuple):
    """A token tile and a part of the inner width: its activations and its tokens."""

    x: tuple[Array, ...]
    slots: Array
    weights: Array


def add_down(
    problem: Problem,
    share: Share,
    inputs: Inputs,
    shared: Shared,
    warpgroup: Array,
    place: Array,
    hidden: Any,
    out: Any,
) -> None:
    """Writes the rows of the result that are this block's.

    Its warpgroups take the items in turn, and add what they get in that order, so
    that equal inputs give equal sums.

    Args:
      place: In the ring, of the first stage.
    """
    interpret, warpgroups = problem.interpret, problem.config.warpgroups

    def meet():
        plgpu.barrier_arrive(shared.met)
        plgpu.barrier_wait(shared.met)

    def group(i, place):
        clear_rows(shared.rows, warpgroup, warpgroups, interpret=interpret)
        meet()
        place = _add_items(problem, share, inputs, shared, warpgroup, place, hidden)
        meet()
        first = (lax.axis_index("block") + i * problem.config.blocks) * ROWS
        store_rows(out, shared.rows, first, warpgroup, warpgroups, interpret=interpret)
        return place

    lax.fori_loop(0, share.groups, group, place)


def _add_items(
    problem: Problem,
    share: Share,
    inputs: Inputs,
    shared: Shared,
    warpgroup: Array,
    place: Array,
    hidden: Any,
) -> Array:
    """Adds this warpgroup's items; returns the place that follows theirs."""
    interpret, warpgroups = problem.interpret, problem.config.warpgroups
    ring, count = Ring(problem.config, shared, warpgroup), inputs.count[0]
    total = count * problem.items
    on_time = count * problem.units - problem.late_units(count)
    # From this item on some of the activations come from late units.
    late = lax.div(on_time, jnp.int32(problem.units)) * problem.items
    columns = own_columns(interpret=interpret)

    def load(k):
        number = jnp.minimum(k * warpgroups + warpgroup, total - 1)

        @pl.when((number >= late) & (number < late + warpgroups))
        def _():
            wait_for_late_units(problem, inputs)

        tile, part = (f(number, jnp.int32(problem.items)) for f in (lax.div, lax.rem))
        return Item(
            tuple(
                load_activations(
                    hidden.at[tile],
                    columns,
                    part * ITEM_TILES + i,
                    0,
                    interpret=interpret,
                )
                for i in range(ITEM_TILES)
            ),
            load_slots(inputs.slots, tile, interpret=interpret),
            load_slots(inputs.weights, tile, interpret=interpret),
        )

    def add(k, carry):
        item, place = carry
        following = load(k + 1)
        slot = ring.slot(place)
        plgpu.barrier_wait(slot.full)
        products = zeros()
        for i, x in enumerate(item.x):
            products = multiply(
                products,
                slot.words,
                slot.scales,
                x,
                first=i,
                stride=ITEM_TILES,
                interpret=interpret,
            )
        release(slot, interpret=interpret)
        number = k * warpgroups + warpgroup

        @pl.when(number > 0)
        def _():
            plgpu.barrier_wait(shared.turn.at[warpgroup])

        add_to_rows(
            shared.rows,
            item.slots,
            item.weights,
            products,
            interpret=interpret,
        )

        @pl.when(number + 1 < total)
        def _():
            following = lax.rem(warpgroup + 1, jnp.int32(warpgroups))
            plgpu.barrier_arrive(shared.turn.at[following])

        return following, ring.after(place)

    def add_all(place):
        return lax.fori_loop(0, share.items, add, (load(jnp.int32(0)), place))[1]

    return lax.cond(share.items > 0, add_all, lambda place: place, place)
