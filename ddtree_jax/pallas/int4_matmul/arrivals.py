"""Owns how blocks wait for each other's units.

Each warpgroup of every block adds one to a count in global memory when its units that
are not late are done, and those of late blocks to another when all are. The routing
kernel clears both. They are inputs that are written to: nobody else reads them, and
Mosaic GPU's own semaphores cost a copy, behind which no launch overlaps.

The interpreter has no atomics, and so runs one block only, which meets at a barrier.
"""

from jax import lax
from jax import numpy as jnp

from ddtree_jax.pallas.int4_matmul.block import Inputs, Problem
from ddtree_jax.pallas.shared_count import (
    add_to_shared_count,
    load_shared_count,
    wait_for_shared_count,
    wait_for_shared_rounds,
)
from ddtree_jax.pallas.warpgroup import synchronise_warpgroup

ON_TIME, LATE = 0, 1


def arrive(problem: Problem, inputs: Inputs, which: int) -> None:
    """Says that this warpgroup has written what its units, late or not, give."""
    if not problem.interpret:
        synchronise_warpgroup()
        add_to_shared_count(inputs.arrived, which)


def wait_for_units(problem: Problem, inputs: Inputs) -> None:
    """Returns when all units are done that are not late.

    Launches with one routing count on: this one has arrived, so that only its last
    arrival makes a whole number of rounds.
    """
    if not problem.interpret:
        wait_for_shared_rounds(inputs.arrived, ON_TIME, problem.config.stride)


def wait_for_late_units(problem: Problem, inputs: Inputs) -> None:
    """Returns when all units are done; `wait_for_units` has returned before."""
    config = problem.config
    if problem.interpret or not config.late_blocks:
        return
    before = load_shared_count(inputs.arrived, ON_TIME)
    launches = lax.div(before, jnp.int32(config.stride))
    late = config.late_blocks * config.warpgroups
    wait_for_shared_count(inputs.arrived, LATE, launches * late)
