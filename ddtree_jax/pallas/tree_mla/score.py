"""Owns the warpgroup that scores tiles, masks and exponentiates."""

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
    Inputs,
    Problem,
    Work,
    slot_columns,
    slot_of,
)
from ddtree_jax.pallas.tree_mla.config import TILE
from ddtree_jax.pallas.tree_mla.mask import (
    LOWEST,
    mask_context,
    mask_tail,
    stage_words,
)
from ddtree_jax.pallas.warpgroup import (
    COLUMNS,
    LAYOUT,
    any_above,
    fold_rows,
    hidden_zero,
    load_columns,
    reduce_folded,
    synchronise_warpgroup,
)

# Binary logarithm of how far a logit may exceed the reference before that is raised.
GROWTH = 16.0


def score(
    problem: Problem,
    w: Work,
    g: Inputs,
    s: Buffers,
    b: Barriers,
    peaks: Any,
    totals: Any,
) -> None:
    """Gives `weigh` the probabilities of each tile, and stores how to combine them.

    Args:
      peaks: Global memory of all splits, [B, row_blocks, splits, rows]: the
        reference logits, as exponents of 2.
      totals: Likewise: sums of the probabilities.
    """
    rows = problem.config.rows
    # Read where they are needed: they change seldom, and registers are short.
    s.peaks[0, :] = plgpu.layout_cast(jnp.full((rows,), LOWEST, jnp.float32), COLUMNS)
    total = plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), COLUMNS)

    total = score_tiles(problem, w, g, s, b, total, make_logits, _probabilities)
    out = w.request, w.row_block, w.split
    peaks[(*out, slice(None))] = load_columns(
        s.peaks.at[0], interpret=problem.interpret
    )
    totals[(*out, slice(None))] = reduce_folded(
        total, "sum", s.scratch, interpret=problem.interpret
    )


def score_tiles[Kept](
    problem: Problem,
    w: Work,
    g: Inputs,
    s: Buffers,
    b: Barriers,
    kept: Kept,
    logits: Callable[..., Array],
    probabilities: Callable[..., Kept],
) -> Kept:
    """Scores all tiles of the block; returns what `probabilities` keeps of them.

    Args:
      kept: Of none.
      logits: As `make_logits`.
      probabilities: As `_probabilities`.
    """

    @pl.when(w.tiles > 0)
    def _():
        plgpu.barrier_wait(b.queries)

    def tile(i, kept, *, tail):
        if tail:
            stage_words(problem, w, g, s, i)
        x = logits(problem, w, s, b, i)
        x = (mask_tail if tail else mask_context)(problem, w, s, i, x)
        return probabilities(problem, s, b, i, x, kept)

    context = jnp.clip(w.context_tiles - w.first, 0, w.tiles)
    kept = lax.fori_loop(0, context, functools.partial(tile, tail=False), kept)
    kept = lax.fori_loop(context, w.tiles, functools.partial(tile, tail=True), kept)

    @pl.when(w.tiles > 0)
    def _():
        plgpu.barrier_wait(b.probabilities_free)

    return kept


def make_logits(problem: Problem, w: Work, s: Buffers, b: Barriers, i: Array) -> Array:
    """Returns the logits of tile `i`, as exponents of 2.

    Rows are on the axis that the config says, keys on the other.
    """
    rows, rows_axis = problem.config.rows, problem.config.rows_axis
    shape = (rows, TILE) if rows_axis == 0 else (TILE, rows)
    zero = hidden_zero(w.context_len + i)

    def accumulate(acc):
        def add(queries, keys):
            left, right = (queries, keys) if rows_axis == 0 else (keys, queries)
            plgpu.wgmma(acc, left, right.T)

        def chunk(c, _):
            slot = slot_of(problem, i, c)
            plgpu.barrier_wait(b.slot_full.at[slot])
            add(s.q_latent.at[:, slot_columns(c)], s.ring.at[slot])

        lax.fori_loop(zero, zero + problem.chunks, chunk, None)
        plgpu.barrier_wait(b.rope_full)
        add(s.q_rope, s.rope)
        if problem.interpret:
            return acc[...]

    acc: Any
    if problem.interpret:
        acc = pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
    else:
        start = lax.broadcast_in_dim(zero.astype(jnp.float32), shape, [])
        start = plgpu.layout_cast(start, LAYOUT)
        acc = pl.run_state(accumulate)(plgpu.WGMMAAccumulatorRef.init(start))
    plgpu.barrier_arrive(b.rope_free)
    return acc * problem.log2_scale


def _probabilities(
    problem: Problem, s: Buffers, b: Barriers, i: Array, x: Array, total: Array
) -> Array:
    """Hands over P of a tile; returns the sums with it."""
    interpret = problem.interpret
    parity = lax.rem(i, 2)

    def peaks():
        return load_columns(s.peaks.at[0], interpret=interpret)

    def above():
        return x - lax.broadcast_in_dim(peaks(), x.shape, [1])

    grew = any_above(above(), GROWTH, interpret=interpret)

    def raised():
        folded = fold_rows(x, "max", interpret=interpret)
        highest = reduce_folded(folded, "max", s.scratch, interpret=interpret)
        old = peaks()
        if not interpret:
            # All warps have to have read the old ones before one writes the new.
            synchronise_warpgroup()
        new = jnp.maximum(old, highest)
        growth = jnp.exp2(old - new)
        s.peaks[0, :] = new
        # Free to write: tile i - 2 was weighed before tile i - 1 was handed over.
        s.growth[parity, :] = growth
        return total * growth

    total = lax.cond(grew, raised, lambda: total)
    p = jnp.exp2(above())
    total = total + fold_rows(p, "sum", interpret=interpret)
    p = p.astype(jnp.bfloat16)

    @pl.when(i > 0)
    def _():
        plgpu.barrier_wait(b.probabilities_free)

    s.grew[parity] = grew.astype(jnp.int32)
    if interpret:
        s.probabilities[...] = p.T
    else:
        s.probabilities.T[...] = p
    plgpu.commit_smem()
    plgpu.barrier_arrive(b.probabilities_full)
    return total
