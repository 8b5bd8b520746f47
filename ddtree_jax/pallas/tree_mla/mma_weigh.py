"""Owns the products of the `mma` kernel that sum values: O += Vᵀ P."""

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.arrays import Array
from ddtree_jax.pallas.tree_mla.block import (
    Barriers,
    Buffers,
    Problem,
    slot_of,
)
from ddtree_jax.pallas.tree_mla.mma_registers import (
    load_left,
    load_right,
    multiply,
    sums_layout,
)
from ddtree_jax.pallas.tree_mla.weigh import HALF, Sums
from ddtree_jax.pallas.warpgroup import WARPS

LAYOUT = sums_layout(WARPS)


def add_product(
    problem: Problem, s: Buffers, b: Barriers, i: Array, half: Array, sums: Sums
) -> Sums:
    """Returns the sums with tile `i` added.

    P and the slots are free as soon as registers hold what is in them.
    """
    interpret = problem.interpret
    p = load_right(s.probabilities.T, WARPS, interpret=interpret)
    plgpu.barrier_arrive(b.probabilities_free)
    columns = pl.ds(pl.multiple_of(half * HALF, HALF), HALF)
    slots = [slot_of(problem, i, chunk) for chunk in range(problem.chunks)]
    values = [
        load_left(s.ring.at[slot, :, columns].T, WARPS, interpret=interpret)
        for slot in slots
    ]
    # TMA overwrites what was read.
    plgpu.commit_smem()
    for slot in slots:
        plgpu.barrier_arrive(b.slot_free.at[slot])
    return tuple(
        multiply(x, left, p, interpret=interpret)
        for x, left in zip(sums, values, strict=True)
    )
