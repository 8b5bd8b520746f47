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
    Slot,
    share_of,
    slot_of,
)
from ddtree_jax.pallas.int4_matmul.config import ROWS
from ddtree_jax.pallas.int4_matmul.tiles import TILE_OUT
from ddtree_jax.pallas.warpgroup import synchronise_warpgroup


def load(problem: Problem, inputs: Inputs, shared: Shared) -> None:
    """Fills the rings of all warpgroups, stage by stage, as soon as there is room.

    A warpgroup that has no more units waits for all others, so none of theirs may wait
    for room in its ring: at first only as much is loaded as there will be room for.
    """
    config, count = problem.config, inputs.count[0]
    slots = jnp.int32(config.slots)
    _share_experts(problem, inputs, shared)
    shares = [share_of(problem, jnp.int32(g), count) for g in range(config.warpgroups)]
    of_units = [s.units * s.stages for s in shares]
    totals = [n + s.groups * s.items for n, s in zip(of_units, shares, strict=True)]
    early = [
        jnp.minimum(n + slots, total) for n, total in zip(of_units, totals, strict=True)
    ]

    def stage(g, k):
        slot = slot_of(problem.config, shared, g, k)

        @pl.when(k >= slots)
        def _():
            plgpu.barrier_wait(slot.free)

        @pl.when(k < of_units[g])
        def _():
            _load_unit_stage(problem, inputs, shared, shares[g], k, slot)

        @pl.when(k >= of_units[g])
        def _():
            _load_item(problem, inputs, shared, shares[g], g, k - of_units[g], slot)

    def wait(g, k):
        plgpu.barrier_wait(slot_of(problem.config, shared, g, k).free)

    def in_turn(begins, ends, act):
        """Acts on stages of all warpgroups, one each at a time."""

        def step(k, _):
            for g, (begin, end) in enumerate(zip(begins, ends, strict=True)):
                pl.when(begin + k < end)(functools.partial(act, g, begin + k))

        lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
        lax.fori_loop(0, functools.reduce(jnp.maximum, lengths), step, None)

    begins = [jnp.int32(0)] * config.warpgroups
    if config.shared_units:
        _in_turn_by_unit(shares, stage)
        begins = of_units
    in_turn(begins, early, stage)

    def group(i, _):
        begins = [
            jnp.maximum(after, n + i * s.items)
            for after, n, s in zip(early, of_units, shares, strict=True)
        ]
        ends = [n + (i + 1) * s.items for n, s in zip(of_units, shares, strict=True)]
        in_turn(begins, ends, stage)

    # The warpgroups of a block do a group of rows together, some of more items.
    lax.fori_loop(0, shares[0].groups, group, None)
    # Each completion of a barrier has to be observed.
    rest = [jnp.maximum(total - slots, 0) for total in totals]
    in_turn(rest, totals, wait)


def _in_turn_by_unit(shares: list[Share], act: Callable[[int, Array], None]) -> None:
    """Acts on stages of units that all share: on one unit's before the next one's.

    A warpgroup that has done its part of a unit waits for the others.
    """
    most = shares[0].stages

    def step(number, _):
        i = lax.div(number, most)
        k = number - i * most
        for g, share in enumerate(shares):
            part = functools.partial(act, g, i * share.stages + k)
            pl.when(k < share.stages)(part)

    lax.fori_loop(0, shares[0].units * most, step, None)


def _load_unit_stage(
    problem: Problem, inputs: Inputs, shared: Shared, share: Share, k: Array, slot: Slot
) -> None:
    row_tiles = problem.config.row_tiles
    i = lax.div(k, share.stages)
    stage = share.offset + (k - i * share.stages) * share.step
    number = share.unit(i)
    tile, rows = (f(number, jnp.int32(problem.units)) for f in (lax.div, lax.rem))
    row = shared.experts[tile] * (problem.inner // TILE_OUT) + rows * row_tiles
    column = stage * (2 // row_tiles)
    # Two quarters: of two row tiles, or of twice the columns.
    which = (pl.ds(row, 2), column) if row_tiles == 2 else (row, pl.ds(column, 2))
    gate, up = inputs.gate_words, inputs.up_words
    _copy(gate.at[which], inputs.gate_scales.at[which], slot, 0)
    _copy(up.at[which], inputs.up_scales.at[which], slot, 2)


def _load_item(
    problem: Problem,
    inputs: Inputs,
    shared: Shared,
    share: Share,
    warpgroup: int,
    k: Array,
    slot: Slot,
) -> None:
    i = lax.div(k, share.items)
    group = lax.axis_index("block") + i * problem.config.blocks
    number = (k - i * share.items) * problem.config.warpgroups + warpgroup
    tile, part = (f(number, jnp.int32(problem.items)) for f in (lax.div, lax.rem))
    row = shared.experts[tile] * (problem.hidden // TILE_OUT)
    row = row + group * (ROWS // TILE_OUT)
    for quarter in (0, 2):
        which = pl.ds(row + quarter, 2), part
        words, scales = inputs.down_words.at[which], inputs.down_scales.at[which]
        _copy(words, scales, slot, quarter)


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
