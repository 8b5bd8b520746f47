"""Owns what the warpgroups of a block share: memory, barriers, and their work."""

import dataclasses
from typing import Any, NamedTuple

from jax import lax
from jax import numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.arrays import Array
from ddtree_jax.pallas.int4_matmul.config import (
    COLUMNS,
    ITEM_TILES,
    ROWS,
    SLOT_TILES,
    GroupedConfig,
)
from ddtree_jax.pallas.int4_matmul.tiles import TILE_IN, TILE_OUT
from ddtree_jax.pallas.warpgroup import LAYOUT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """What is known when a call is compiled.

    Attributes:
      experts: Of one layer.
      interpret: Whether the kernel runs in the interpreter, on a CPU.
    """

    tokens: int
    experts: int
    hidden: int
    inner: int
    config: GroupedConfig
    interpret: bool

    @property
    def units(self) -> int:
        """Of one token tile: groups of rows of gate and up."""
        return self.inner // (TILE_OUT * self.config.row_tiles)

    @property
    def unit_stages(self) -> int:
        """Slots' worth of one unit: 16 tiles, half of them gate."""
        return self.hidden // TILE_IN * 2 * self.config.row_tiles // SLOT_TILES

    @property
    def items(self) -> int:
        """Of one token tile: parts of the inner width, for 64 rows of the result."""
        return self.inner // (ITEM_TILES * TILE_IN)

    def late_units(self, count: Array) -> Array:
        """Returns how many units are late ones, the last, of `count` token tiles.

        As a rule an eighth fewer than have as many slots as a group of rows, so that
        nobody should have to wait for them. Up to a quarter of a unit for each of
        their warpgroups more than that, where else some warpgroups of all blocks
        would have a unit more than the others, for which all would wait longer.
        """
        config, units = self.config, count * self.units
        slots = count * (self.items * config.late_blocks)
        even = lax.div(slots, jnp.int32(self.unit_stages))
        late = jnp.minimum(lax.div(even * 7, jnp.int32(8)), units)
        rest = lax.rem(units - late, jnp.int32(config.stride))
        most = even + config.late_blocks * config.warpgroups // 4
        saves = (late + rest <= most) & (units - late >= config.stride)
        return late + jnp.where(saves, rest, 0)


class Inputs(NamedTuple):
    """Arrays in global memory; weights as words and scales.

    These are [layers · experts · rows, columns / 4, …], rows and columns of tiles.
    """

    x: Any
    gate_words: Any
    gate_scales: Any
    up_words: Any
    up_scales: Any
    down_words: Any
    down_scales: Any
    layer: Any
    count: Any
    experts: Any
    slots: Any
    weights: Any
    arrived: Any


class Shared(NamedTuple):
    """Shared memory of a block, and its barriers.

    Attributes:
      words: Rings of tiles, [warpgroup, slot, quarter, …].
      scales: Theirs.
      scratch: For sums over warps, by warpgroup.
      rows: Of the result that are being added up, [tokens, 72].
      experts: Of the token tiles, as places in the stacks.
      full: Loaded; one for each slot of each warpgroup.
      free: No longer read; likewise.
      turn: Each warpgroup's, to add to `rows`.
      met: All warpgroups have come this far.
    """

    words: Any
    scales: Any
    scratch: Any
    rows: Any
    experts: Any
    full: Any
    free: Any
    turn: Any
    met: Any


class Share(NamedTuple):
    """What one warpgroup does.

    Attributes:
      first: Unit of gate and up that it begins with.
      stride: It does every so many-th.
      units: How many, late ones included.
      late: Which of its units is the first late one.
      is_late: Whether its block does late ones.
      first_late: The number of that among all units.
      late_stride: It does every so many-th of the late ones; 0 where nobody does any.
      stages: Slots' worth of each unit that it does, the `offset`-th and every
        `step`-th further one.
      groups: Of 64 rows of the result that its block does, every `blocks`-th.
      items: Of each group that it does, every fourth: parts of the inner width.
    """

    first: Array
    stride: int
    units: Array
    late: Array
    is_late: Array
    first_late: Array
    late_stride: int
    stages: Array
    offset: Array
    step: int
    groups: Array
    items: Array

    def unit(self, i: Array) -> Array:
        """Returns the number of this warpgroup's unit `i` among all."""
        if not self.late_stride:
            return self.first + i * self.stride
        past = i - self.late
        late = self.first_late + past * self.late_stride
        # A select has the compiler spill registers in the loop over units.
        on_time = lax.shift_right_arithmetic(past, 31)
        return late + lax.bitwise_and(on_time, self.first + i * self.stride - late)


def share_of(problem: Problem, warpgroup: Array, count: Array) -> Share:
    """Returns the share of a warpgroup of this block."""
    config, block = problem.config, lax.axis_index("block")
    stages = jnp.int32(problem.unit_stages)
    if config.shared_units:
        first, stride = block, config.blocks
        offset, step = warpgroup, config.warpgroups
    else:
        first, stride = block + warpgroup * config.blocks, config.stride
        offset, step = jnp.int32(0), 1
    late = problem.late_units(count)
    on_time = count * problem.units - late
    units = every(on_time, stride, first)
    place = block - (config.blocks - config.late_blocks)
    is_late = place >= 0
    late_first = place + warpgroup * config.late_blocks
    late_stride = config.late_blocks * config.warpgroups
    more = every(late, late_stride, late_first) if late_stride else jnp.int32(0)
    return Share(
        first=first,
        stride=stride,
        units=units + jnp.where(is_late, more, 0),
        late=units,
        is_late=is_late,
        first_late=on_time + late_first,
        late_stride=late_stride,
        stages=every(stages, step, offset),
        offset=offset,
        step=step,
        groups=every(jnp.int32(problem.hidden // ROWS), config.blocks, block),
        items=every(count * problem.items, config.warpgroups, warpgroup),
    )


def every(total: Array, stride: int, first: Array) -> Array:
    """Returns how many of `first`, `first + stride`, … are below `total`."""
    rest = jnp.maximum(total - first, 0) + (stride - 1)
    return lax.div(rest, jnp.int32(stride))


def zeros() -> Array:
    """Returns products without summands."""
    return plgpu.layout_cast(jnp.zeros((ROWS, COLUMNS), jnp.float32), LAYOUT)
