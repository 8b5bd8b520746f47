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
    Outputs,
    Problem,
    Work,
    slot_columns,
    slot_of,
)
from ddtree_jax.pallas.tree_mla.config import GROWTH, TILE
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


def score(
    problem: Problem, w: Work, g: Inputs, s: Buffers, b: Barriers, out: Outputs
) -> None:
    """Gives `weigh` the probabilities of each tile, and stores how to combine them."""
    rows = problem.config.rows
    # Read where they are needed: they change seldom, and registers are short.
    s.peaks[0, :] = plgpu.layout_cast(jnp.full((rows,), LOWEST, jnp.float32), COLUMNS)
    total = plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), COLUMNS)

    total = score_tiles(problem, w, g, s, b, total, _logits, _probabilities)
    place = w.request, w.row_block, w.split, slice(None)
    out.peaks[place] = load_columns(s.peaks.at[0], interpret=problem.interpret)
    out.totals[place] = reduce_folded(
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
      logits: As `_logits`.
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


def _logits(problem: Problem, w: Work, s: Buffers, b: Barriers, i: Array) -> Array:
    """Returns the logits [keys, rows] of tile `i`, as exponents of 2."""
    shape = TILE, problem.config.rows
    zero = hidden_zero(w.context_len + i)

    def accumulate(acc):
        start_logits(problem, w, s, b, i, acc)
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


def start_logits(
    problem: Problem, w: Work, s: Buffers, b: Any, i: Array, acc: Any
) -> None:
    """Starts the products of queries and keys of tile `i`, as they come.

    Rows are on the axis that the config says, keys on the other.
    """
    zero = hidden_zero(w.context_len + i)

    def add(queries, keys):
        wide = problem.config.rows_axis == 0
        left, right = (queries, keys) if wide else (keys, queries)
        plgpu.wgmma(acc, left, right.T)

    def chunk(c, _):
        slot = slot_of(problem, i, c)
        plgpu.barrier_wait(b.slot_full.at[slot])
        add(s.q_latent.at[:, slot_columns(c)], s.ring.at[slot])

    lax.fori_loop(zero, zero + problem.chunks, chunk, None)
    plgpu.barrier_wait(b.rope_full.at[lax.rem(i, 2)])
    # At a place that is not known before: else its address is kept in registers.
    add(s.q_rope.at[zero], s.rope.at[zero])


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
