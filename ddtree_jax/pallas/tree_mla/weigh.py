"""Owns the two warpgroups that sum values: O += Vᵀ P, each half of the columns."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.arrays import Array
from ddtree_jax.pallas.tree_mla.block import (
    Barriers,
    Buffers,
    Inputs,
    Outputs,
    Problem,
    Work,
    slot_of,
)
from ddtree_jax.pallas.warpgroup import hidden_zero, load_columns, relabel

# Of a warpgroup in a slot.
HALF = 64

type Sums = tuple[Array, ...]
type Numbered = Sequence[tuple[int | Array, Array]]


def weigh(
    problem: Problem,
    w: Work,
    g: Inputs,
    s: Buffers,
    b: Barriers,
    out: Outputs,
    *,
    product: Callable[..., Sums],
    layout: Any,
) -> None:
    """Sums a half of the latent columns over the block's tiles, and stores it.

    The first warpgroup scores, the second has the first half, the third the other.

    Args:
      product: As `add_product`.
      layout: Of the sums.
    """
    rows, chunks = problem.config.rows, problem.chunks
    half = lax.axis_index("warpgroup") - 1
    zeros = plgpu.layout_cast(jnp.zeros((HALF, rows), jnp.float32), layout)

    def wait(i):
        zero = hidden_zero(w.context_len + i)

        def arrived(chunk, _):
            plgpu.barrier_wait(b.slot_full.at[slot_of(problem, i, chunk)])

        lax.fori_loop(0, zero + chunks, arrived, None)
        plgpu.barrier_wait(b.probabilities_full)

    def tile(i, sums):
        wait(i)
        parity = lax.rem(i, 2)
        grew = (s.grew[parity] > 0) & (i > 0)
        grown = functools.partial(scaled, problem, s, parity, layout)
        sums = lax.cond(grew, grown, lambda sums: sums, sums)
        return product(problem, s, b, i, half, sums)

    sums = lax.fori_loop(0, w.tiles, tile, (zeros,) * chunks)
    numbered = [(chunk * 2 + half, x) for chunk, x in enumerate(sums)]
    store_sums(problem, w, layout, numbered, out.partial)


def store_sums(
    problem: Problem, w: Work, layout: Any, sums: Numbered, partial: Any
) -> None:
    """Stores sums [64, rows or latent columns], if there is any tile.

    Args:
      layout: Of the sums.
      sums: Each after the number of its 64 latent columns.
      partial: Global memory of all splits, [B, row_blocks, splits, L / 64, 64 · rows]:
        unnormalised sums, in the order of registers.
    """

    @pl.when(w.tiles > 0)
    def _():
        out = partial.at[w.request, w.row_block, w.split]
        for number, x in sums:
            if problem.interpret:
                flat = x.reshape(x.size)
            else:
                strided = plgpu.Layout.WG_STRIDED((x.size,), vec_size=4)
                flat = relabel(x, layout, strided, (x.size,))
            out[number, :] = flat


def scaled(
    problem: Problem, s: Buffers, parity: int | Array, layout: Any, sums: Sums
) -> Sums:
    """Returns sums times the growth of the tiles of a parity.

    Args:
      layout: Of the sums.
    """
    growth = load_columns(
        s.growth.at[parity],
        layout=layout.reduce(1 - problem.config.rows_axis),
        interpret=problem.interpret,
    )
    return tuple(x * problem.spread(growth, x.shape) for x in sums)


def add_product(
    problem: Problem, s: Buffers, b: Barriers, i: Array, half: Array, sums: Sums
) -> Sums:
    """Returns the sums with tile `i` added; frees its slots one by one, and P."""
    columns = pl.ds(pl.multiple_of(half * HALF, HALF), HALF)
    slots = [slot_of(problem, i, chunk) for chunk in range(problem.chunks)]

    if problem.interpret:
        p = s.probabilities[...]
        added = tuple(
            x + _dot_rows(s.ring[slot, :, columns], p)
            for slot, x in zip(slots, sums, strict=True)
        )
        # The interpreter sees ordinary reads, which a load may overtake.
        plgpu.commit_smem()
        for slot in slots:
            plgpu.barrier_arrive(b.slot_free.at[slot])
        plgpu.barrier_arrive(b.probabilities_free)
        return added

    def multiply(refs):
        for slot, ref in zip(slots, refs, strict=True):
            values = s.ring.at[slot, :, columns]
            plgpu.wgmma(ref, values.T, s.probabilities.T)
        for pending, slot in zip(reversed(range(len(slots))), slots, strict=True):
            plgpu.wgmma_wait(pending)
            plgpu.barrier_arrive(b.slot_free.at[slot])

    starts = tuple(plgpu.WGMMAAccumulatorRef.init(x) for x in sums)
    added: Any = pl.run_state(multiply)(starts)
    plgpu.barrier_arrive(b.probabilities_free)
    return added


def _dot_rows(values: Array, p: Array) -> Array:
    """Returns Vᵀ Pᵀ for values [keys, columns] and p [rows, keys]."""
    contracted = (((0,), (1,)), ((), ()))
    return lax.dot_general(values, p, contracted, preferred_element_type=jnp.float32)
