"""Owns the two warpgroups of the wide kernel that sum values: O += P V."""

import functools
from typing import Any

from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.arrays import Array
from ddtree_jax.pallas.tree_mla.block import (
    Barriers,
    Buffers,
    Problem,
    Work,
    slot_of,
)
from ddtree_jax.pallas.tree_mla.config import SLOT_COLUMNS
from ddtree_jax.pallas.tree_mla.weigh import HALF, Sums, store_sums, sum_tiles
from ddtree_jax.pallas.warpgroup import LAYOUT


def weigh(
    problem: Problem, w: Work, s: Buffers, b: Barriers, half: Array, partial: Any
) -> None:
    """Sums every other chunk of the latent columns, and stores it.

    So the first slots of a tile are free soonest. An odd number of chunks leaves one
    more to the first half.

    Args:
      half: 0 or 1.
      partial: As of `weigh_with`.
    """
    first, second = (
        functools.partial(_weigh_chunks, problem, w, s, b, chunks, partial)
        for chunks in (range(start, problem.chunks, 2) for start in range(2))
    )
    lax.cond(half == 0, first, second)


def _weigh_chunks(
    problem: Problem, w: Work, s: Buffers, b: Barriers, chunks: range, partial: Any
) -> None:
    zeros = jnp.zeros((problem.config.rows, SLOT_COLUMNS), jnp.float32)
    sums = (plgpu.layout_cast(zeros, LAYOUT),) * len(chunks)

    def wait(i):
        # Says of the slots as well that they are full. It is not for a warpgroup to
        # wait for slots that the other one frees: it might come too late.
        plgpu.barrier_wait(b.probabilities_full)

    add = functools.partial(_add, problem, s, b, chunks)
    sums = sum_tiles(problem, w, s, LAYOUT, sums, wait, add)
    parts = SLOT_COLUMNS // HALF
    numbered = [
        (chunk * parts + part, x[:, part * HALF : (part + 1) * HALF])
        for chunk, x in zip(chunks, sums, strict=True)
        for part in range(parts)
    ]
    store_sums(problem, w, LAYOUT, numbered, partial)


def _add(
    problem: Problem, s: Buffers, b: Barriers, chunks: range, i: Array, sums: Sums
) -> Sums:
    """Returns the sums with tile `i` added; frees its slots one by one, and P."""
    slots = [slot_of(problem, i, chunk) for chunk in chunks]

    def multiply(refs):
        for slot, ref in zip(slots, refs, strict=True):
            plgpu.wgmma(ref, s.probabilities, s.ring.at[slot])
        for pending, slot in zip(reversed(range(len(slots))), slots, strict=True):
            plgpu.wgmma_wait(pending)
            plgpu.barrier_arrive(b.slot_free.at[slot])

    if problem.interpret:
        p = s.probabilities[...]
        sums = tuple(
            x + lax.dot(p, s.ring[slot], preferred_element_type=jnp.float32)
            for slot, x in zip(slots, sums, strict=True)
        )
        # The interpreter sees ordinary reads, which a load may overtake.
        plgpu.commit_smem()
        for slot in slots:
            plgpu.barrier_arrive(b.slot_free.at[slot])
    elif slots:
        starts = tuple(plgpu.WGMMAAccumulatorRef.init(x) for x in sums)
        added: Any = pl.run_state(multiply)(starts)
        sums = added
    plgpu.barrier_arrive(b.probabilities_free)
    return sums
