"""Owns the two warpgroups of the `mma` kernel that sum values: O += Vᵀ P."""

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
from ddtree_jax.pallas.tree_mla.mma_registers import (
    load_left,
    load_right,
    multiply,
    sums_layout,
)
from ddtree_jax.pallas.tree_mla.weigh import HALF
from ddtree_jax.pallas.warpgroup import WARPS, hidden_zero, load_columns, relabel

_LAYOUT = sums_layout(WARPS)


def weigh(
    problem: Problem, w: Work, s: Buffers, b: Barriers, half: Array, partial: Any
) -> None:
    """Sums this half of the latent columns over the block's tiles, and stores it.

    Args:
      half: 0 or 1.
      partial: Global memory of all splits, [B, row_blocks, splits, L / 64, 64 · rows]:
        unnormalised sums, in the order of registers.
    """
    rows, chunks = problem.config.rows, problem.chunks
    zeros = plgpu.layout_cast(jnp.zeros((HALF, rows), jnp.float32), _LAYOUT)

    def tile(i, sums):
        zero = hidden_zero(w.context_len + i)

        def arrived(chunk, _):
            plgpu.barrier_wait(b.slot_full.at[slot_of(problem, i, chunk)])

        lax.fori_loop(0, zero + chunks, arrived, None)
        plgpu.barrier_wait(b.probabilities_full)
        parity = lax.rem(i, 2)
        grew = (s.grew[parity] > 0) & (i > 0)
        sums = lax.cond(grew, lambda *a: _scaled(problem, s, parity, a), _same, *sums)
        p = load_right(s.probabilities.T, WARPS, interpret=problem.interpret)
        plgpu.barrier_arrive(b.probabilities_free)
        return _product(problem, s, b, i, half, p, sums)

    sums = lax.fori_loop(0, w.tiles, tile, (zeros,) * chunks)

    @pl.when(w.tiles > 0)
    def _():
        out = partial.at[w.request, w.row_block, w.split]
        for chunk, x in enumerate(sums):
            if problem.interpret:
                flat = x.reshape(HALF * rows)
            else:
                strided = plgpu.Layout.WG_STRIDED((HALF * rows,), vec_size=4)
                flat = relabel(x, _LAYOUT, strided, (HALF * rows,))
            out[chunk * 2 + half, :] = flat


def _same(*sums: Array) -> tuple[Array, ...]:
    return sums


def _scaled(problem: Problem, s: Buffers, parity: Array, sums) -> tuple[Array, ...]:
    growth = load_columns(
        s.growth.at[parity], layout=_LAYOUT.reduce(0), interpret=problem.interpret
    )
    return tuple(x * lax.broadcast_in_dim(growth, x.shape, [1]) for x in sums)


def _product(
    problem: Problem, s: Buffers, b: Barriers, i: Array, half: Array, p: Array, sums
) -> tuple[Array, ...]:
    """Returns the sums with tile `i` added.

    Its slots are free as soon as registers hold the values, before they are multiplied.
    """
    interpret = problem.interpret
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
