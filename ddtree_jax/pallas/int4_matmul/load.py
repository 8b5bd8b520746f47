"""Owns when tiles are loaded, and from where."""

import functools
from collections.abc import Callable
from typing import Any

from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.arrays import Array
from ddtree_jax.pallas.int4_matmul.block import (
    Inputs,
    Problem,
    Share,
    Shared,
    share_of,
)
from ddtree_jax.pallas.int4_matmul.config import ROWS
from ddtree_jax.pallas.int4_matmul.ring import Ring, Slot, fill_rings
from ddtree_jax.pallas.int4_matmul.tiles import TILE_OUT
from ddtree_jax.pallas.warpgroup import synchronise_warpgroup


def load(problem: Problem, inputs: Inputs, shared: Shared) -> None:
    """Fills the rings of all warpgroups, stage by stage, as soon as there is room."""
    _share_experts(problem, inputs, shared)
    fill_rings(problem.config, functools.partial(_fill, problem, inputs, shared))


def _fill(problem: Problem, inputs: Inputs, shared: Shared, warpgroup: Array) -> None:
    share = share_of(problem, warpgroup, inputs.count[0])
    of_units = share.units * share.stages
    ring = Ring(problem.config, shared, warpgroup)

    def unit(i, place):
        load_stage = _unit_loader(problem, inputs, shared, share, i)

        def stage(k, place):
            load_stage(k, ring.free_slot(place, i * share.stages + k))
            return ring.after(place)

        return lax.fori_loop(0, share.stages, stage, place)

    def group(i, place):
        load_item = _item_loader(problem, inputs, shared, warpgroup, i)

        def item(k, place):
            load_item(k, ring.free_slot(place, of_units + i * share.items + k))
            return ring.after(place)

        return lax.fori_loop(0, share.items, item, place)

    place = lax.fori_loop(0, share.units, unit, jnp.int32(0))
    lax.fori_loop(0, share.groups, group, place)
    ring.wait_until_read(of_units + share.groups * share.items)


def _unit_loader(
    problem: Problem, inputs: Inputs, shared: Shared, share: Share, i: Array
) -> Callable[[Array, Slot], None]:
    """Returns what loads a stage of a warpgroup's unit `i` into a slot."""
    row_tiles = problem.config.row_tiles
    number = share.unit(i)
    tile, rows = (f(number, jnp.int32(problem.units)) for f in (lax.div, lax.rem))
    row = shared.experts[tile] * (problem.inner // TILE_OUT) + rows * row_tiles

    def load_stage(k, slot):
        column = (share.offset + k * share.step) * (2 // row_tiles)
        # Two quarters: of two row tiles, or of twice the columns.
        which = (pl.ds(row, 2), column) if row_tiles == 2 else (row, pl.ds(column, 2))
        gate, up = inputs.gate_words, inputs.up_words
        _copy(gate.at[which], inputs.gate_scales.at[which], slot, 0)
        _copy(up.at[which], inputs.up_scales.at[which], slot, 2)

    return load_stage


def _item_loader(
    problem: Problem, inputs: Inputs, shared: Shared, warpgroup: Array, i: Array
) -> Callable[[Array, Slot], None]:
    """Returns what loads an item of a block's group `i` of rows into a slot."""
    group = lax.axis_index("block") + i * problem.config.blocks

    def load_item(k, slot):
        number = k * problem.config.warpgroups + warpgroup
        tile, part = (f(number, jnp.int32(problem.items)) for f in (lax.div, lax.rem))
        row = shared.experts[tile] * (problem.hidden // TILE_OUT)
        row = row + group * (ROWS // TILE_OUT)
        for quarter in (0, 2):
            which = pl.ds(row + quarter, 2), part
            words, scales = inputs.down_words.at[which], inputs.down_scales.at[which]
            _copy(words, scales, slot, quarter)

    return load_item


def _copy(words: Any, scales: Any, slot: Slot, quarter: int) -> None:
    """Copies eight tiles to two quarters of a slot."""
    where = pl.ds(quarter, 2)
    plgpu.copy_gmem_to_smem(words, slot.words.at[where], slot.full)
    plgpu.copy_gmem_to_smem(scales, slot.scales.at[where], slot.full)


def _share_experts(problem: Problem, inputs: Inputs, shared: Shared) -> None:
    """Puts the experts' places in the stacks where reading them takes no time."""
    if problem.interpret:
        experts = inputs.experts[...]
    else:
        layout = plgpu.Layout.WG_STRIDED(inputs.experts.shape, vec_size=1)
        experts = plgpu.load(inputs.experts, layout=layout)
    shared.experts[...] = experts + inputs.layer[0] * problem.experts
    if not problem.interpret:
        synchronise_warpgroup()
