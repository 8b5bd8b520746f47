"""Owns the rings of slots, one for each warpgroup that multiplies."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.arrays import Array
from ddtree_jax.pallas.int4_matmul.config import GroupedConfig


class Slot(NamedTuple):
    """A stage in the ring of a warpgroup."""

    words: Any
    scales: Any
    full: Any
    free: Any


def slot_of(config: GroupedConfig, shared: Any, warpgroup: Any, stage: Array) -> Slot:
    """Returns where a stage of a warpgroup is."""
    slot = lax.rem(stage, jnp.int32(config.slots))
    number = warpgroup * config.slots + slot
    return Slot(
        shared.words.at[warpgroup, slot],
        shared.scales.at[warpgroup, slot],
        shared.full.at[number],
        shared.free.at[number],
    )


def release(slot: Slot, *, interpret: bool) -> None:
    """Says that this warpgroup will not read the slot again.

    The interpreter asks for a fence between reads and a TMA that overwrites. As in
    CUTLASS's pipelines there is none: the reads have returned before a thread arrives,
    and the fence would wait for activations that are on their way.
    """
    if interpret:
        plgpu.commit_smem()
    plgpu.barrier_arrive(slot.free)


def fill_rings(config: GroupedConfig, fill: Callable[[Array], None]) -> None:
    """Runs `fill` for each ring, in a warp of its own of this warpgroup.

    So none waits until there is room in another's, and what filling takes of the
    multiprocessor it takes once: a warpgroup would do all of it in four warps, and in
    time that multiplying ones need.

    Args:
      fill: Of the number of the warpgroup whose ring it is.
    """

    def run(warp):
        pl.when(warp < config.warpgroups)(lambda: fill(warp))

    plgpu.warp_map(run)


def free_slot(
    config: GroupedConfig, shared: Any, warpgroup: Array, stage: Array
) -> Slot:
    """Returns where a stage is to be loaded, as soon as there is room."""
    slot = slot_of(config, shared, warpgroup, stage)

    @pl.when(stage >= config.slots)
    def _():
        plgpu.barrier_wait(slot.free)

    return slot


def wait_until_read(
    config: GroupedConfig, shared: Any, warpgroup: Array, stages: Array
) -> None:
    """Waits until the last of so many stages are read.

    Each completion of a barrier has to be observed.
    """

    def wait(stage, _):
        plgpu.barrier_wait(slot_of(config, shared, warpgroup, stage).free)

    lax.fori_loop(jnp.maximum(stages - config.slots, 0), stages, wait, None)
