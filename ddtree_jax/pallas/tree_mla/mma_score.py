"""Owns the warpgroup of the `mma` kernel that scores tiles and exponentiates."""

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
from ddtree_jax.pallas.tree_mla.config import GROWTH, SLOT_COLUMNS
from ddtree_jax.pallas.tree_mla.mask import (
    LOWEST,
)
from ddtree_jax.pallas.tree_mla.mma_config import TILE, TILE_WARPS
from ddtree_jax.pallas.tree_mla.mma_registers import load_left, load_right, multiply
from ddtree_jax.pallas.tree_mla.score import score_tiles
from ddtree_jax.pallas.warpgroup import any_above, hidden_zero, load_columns

# Columns of a row of swizzled shared memory.
_PART = 64


def score(
    problem: Problem, w: Work, g: Inputs, s: Buffers, b: Barriers, out: Outputs
) -> None:
    """Gives `weigh` the probabilities of each tile, and stores how to combine them."""
    rows, layout = problem.config.rows, problem.layout
    lowest = jnp.full((rows,), LOWEST, jnp.float32)
    s.peaks[0, :] = plgpu.layout_cast(lowest, layout.reduce(0))
    total = plgpu.layout_cast(jnp.zeros((TILE, rows), jnp.float32), layout)

    total = score_tiles(problem, w, g, s, b, total, _logits, _probabilities)
    place = w.request, w.row_block, w.split, slice(None)
    out.peaks[place] = _vector(problem, s.peaks.at[0])
    out.totals[place] = total.sum(axis=0)


def _vector(problem: Problem, ref: Any) -> Array:
    layout = problem.layout.reduce(0)
    return load_columns(ref, layout=layout, interpret=problem.interpret)


def _logits(problem: Problem, w: Work, s: Buffers, b: Barriers, i: Array) -> Array:
    """Returns the logits [keys, rows] of tile `i`, as exponents of 2."""
    interpret = problem.interpret
    zero = hidden_zero(w.context_len + i)

    def product(x, keys, queries):
        left = load_left(keys, TILE_WARPS, interpret=interpret)
        right = load_right(queries.T, TILE_WARPS, interpret=interpret)
        return multiply(x, left, right, interpret=interpret)

    def chunk(c, x):
        slot = slot_of(problem, i, c)
        plgpu.barrier_wait(b.slot_full.at[slot])
        for part in range(0, SLOT_COLUMNS, _PART):
            first = pl.multiple_of(c * SLOT_COLUMNS + part, _PART)
            keys = s.ring.at[slot, :, pl.ds(part, _PART)]
            x = product(x, keys, s.q_latent.at[:, pl.ds(first, _PART)])
        return x

    x = jnp.zeros((TILE, problem.config.rows), jnp.float32)
    x = plgpu.layout_cast(x, problem.layout)
    x = lax.fori_loop(zero, zero + problem.chunks, chunk, x)
    plgpu.barrier_wait(b.rope_full.at[lax.rem(i, 2)])
    x = product(x, s.rope.at[0], s.q_rope.at[0])
    # TMA overwrites the rotary keys. Here warps meet as well, so masks can zero
    # latents of which another warp has made its logits.
    plgpu.commit_smem()
    plgpu.barrier_arrive(b.rope_free)
    return x * problem.log2_scale


def _probabilities(
    problem: Problem, s: Buffers, b: Barriers, i: Array, x: Array, total: Array
) -> Array:
    """Hands over P of a tile; returns the sums with it, still one a key and row."""
    interpret = problem.interpret
    parity = lax.rem(i, 2)

    def across(vector):
        same = lax.broadcast_in_dim(vector, x.shape, [1])
        return plgpu.layout_cast(same, problem.layout)

    def above():
        return x - across(_vector(problem, s.peaks.at[0]))

    grew = any_above(above(), GROWTH, layout=problem.layout, interpret=interpret)

    def raised():
        # Before the maximum, in which warps meet: one may write the new peaks after it
        # while another has not gone on.
        old = _vector(problem, s.peaks.at[0])
        new = jnp.maximum(old, x.max(axis=0))
        growth = jnp.exp2(old - new)
        s.peaks[0, :] = new
        # Free to write: tile i - 2 was weighed before tile i - 1 was handed over.
        s.growth[parity, :] = growth
        return total * across(growth)

    total = lax.cond(grew, raised, lambda: total)
    p = jnp.exp2(above())
    total = total + p
    p = p.astype(jnp.bfloat16)

    @pl.when(i > 0)
    def _():
        plgpu.barrier_wait(b.probabilities_free)

    s.grew[parity] = grew.astype(jnp.float32)
    if interpret:
        s.probabilities[...] = p.T
    else:
        s.probabilities.T[...] = p
    # Also what was read and zeroed of the slots, before `weigh` frees them.
    plgpu.commit_smem()
    plgpu.barrier_arrive(b.probabilities_full)
    return total
