"""Owns the two warpgroups that sum values: O += Vᵀ P, each half of the columns."""

import functools
from collections.abc import Callable
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
from ddtree_jax.pallas.warpgroup import LAYOUT, hidden_zero, load_columns, relabel

# Of a warpgroup in a slot.
HALF = 64


def weigh(
    problem: Problem, w: Work, s: Buffers, b: Barriers, half: Array, partial: Any
) -> None:
    """Sums this half of the latent columns over the block's tiles, and stores it."""
    weigh_with(_product, LAYOUT, problem, w, s, b, half, partial)


def weigh_with(
    product: Callable[..., tuple[Array, ...]],
    layout: Any,
    problem: Problem,
    w: Work,
    s: Buffers,
    b: Barriers,
    half: Array,
    partial: Any,
) -> None:
    """Does what `weigh` does, with another product.

    Args:
      product: As `_product`.
      layout: Of the sums.
      half: 0 or 1.
      partial: Global memory of all splits, [B, row_blocks, splits, L / 64, 64 · rows]:
        unnormalised sums, in the order of registers.
    """
    rows, chunks = problem.config.rows, problem.chunks
    zeros = plgpu.layout_cast(jnp.zeros((HALF, rows), jnp.float32), layout)

    def tile(i, sums):
        zero = hidden_zero(w.context_len + i)

        def arrived(chunk, _):
            plgpu.barrier_wait(b.slot_full.at[slot_of(problem, i, chunk)])

        lax.fori_loop(0, zero + chunks, arrived, None)
        plgpu.barrier_wait(b.probabilities_full)
        parity = lax.rem(i, 2)
        grew = (s.grew[parity] > 0) & (i > 0)
        scaled = functools.partial(_scaled, problem, s, parity, layout)
        sums = lax.cond(grew, scaled, _same, *sums)
        return product(problem, s, b, i, half, sums)

    sums = lax.fori_loop(0, w.tiles, tile, (zeros,) * chunks)

    @pl.when(w.tiles > 0)
    def _():
        out = partial.at[w.request, w.row_block, w.split]
        for chunk, x in enumerate(sums):
            if problem.interpret:
                flat = x.reshape(HALF * rows)
            else:
                strided = plgpu.Layout.WG_STRIDED((HALF * rows,), vec_size=4)
                flat = relabel(x, layout, strided, (HALF * rows,))
            out[chunk * 2 + half, :] = flat


def _same(*sums: Array) -> tuple[Array, ...]:
    return sums


def _scaled(
    problem: Problem, s: Buffers, parity: Array, layout: Any, *sums: Array
) -> tuple[Array, ...]:
    growth = load_columns(
        s.growth.at[parity], layout=layout.reduce(0), interpret=problem.interpret
    )
    return tuple(x * lax.broadcast_in_dim(growth, x.shape, [1]) for x in sums)


def _product(problem: Problem, s: Buffers, b: Barriers, i: Array, half: Array, sums):
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
