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


class Ring(NamedTuple):
    """The slots of one warpgroup, which its stages take in turn.

    Attributes:
      shared: Shared memory of a block, with `words`, `scales`, `full` and `free`.
    """

    config: GroupedConfig
    shared: Any
    warpgroup: Array

    def slot(self, place: Array) -> Slot:
        """Returns the slot at a place."""
        number = self.warpgroup * self.config.slots + place
        return Slot(
            self.shared.words.at[self.warpgroup, place],
            self.shared.scales.at[self.warpgroup, place],
            self.shared.full.at[number],
            self.shared.free.at[number],
        )

    def after(self, place: Array) -> Array:
        """Returns the place of the next stage.

        Carried from stage to stage: a remainder by the slots takes some thirty
        instructions of the few hundred of a stage.
        """
        return jnp.where(place == self.config.slots - 1, 0, place + 1)

    def free_slot(self, place: Array, stage: Array) -> Slot:
        """Returns the slot at the place of a stage, as soon as that can be loaded."""
        slot = self.slot(place)

        @pl.when(stage >= self.config.slots)
        def _():
            plgpu.barrier_wait(slot.free)

        return slot

    def wait_until_read(self, stages: Array) -> None:
        """Waits until the last of so many stages are read.

        Each completion of a barrier has to be observed.
        """
        slots = jnp.int32(self.config.slots)

        def wait(stage, _):
            plgpu.barrier_wait(self.slot(lax.rem(stage, slots)).free)

        lax.fori_loop(jnp.maximum(stages - slots, 0), stages, wait, None)


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
