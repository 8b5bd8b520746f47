"""Owns the warpgroup that loads tiles, scores them, masks and exponentiates."""

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
    Inputs,
    Problem,
    Work,
    slot_columns,
    slot_of,
)
from ddtree_jax.pallas.tree_mla.config import TILE
from ddtree_jax.pallas.tree_mla.load import Loader
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
    reduce_folded,
)

# Binary logarithm of how far a logit may exceed the reference before that is raised.
_GROWTH = 16.0


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
    loader = Loader(problem, w, g, s, b)
    peak = plgpu.layout_cast(jnp.full((rows,), LOWEST, jnp.float32), COLUMNS)
    total = plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), COLUMNS)
    pages = loader.pages(w.first), loader.pages(w.first + 1)

    @pl.when(w.tiles > 0)
    def _():
        loader.start(*pages)
        plgpu.barrier_wait(b.queries)

    def tile(i, carry, *, tail):
        peak, total, here, following = carry
        later = loader.pages(w.first + i + 2)
        if tail:
            stage_words(problem, w, g, s, i)
        x = _logits(problem, w, s, b, i, lambda: loader.refill(i, here, following))
        loader.next_rope(i, following)
        x = (mask_tail if tail else mask_context)(problem, w, s, i, x)
        peak, total = _probabilities(problem, s, b, i, x, peak, total)
        return peak, total, following, later

    context = jnp.clip(w.context_tiles - w.first, 0, w.tiles)
    carry = (peak, total, *pages)
    carry = lax.fori_loop(0, context, functools.partial(tile, tail=False), carry)
    carry = lax.fori_loop(context, w.tiles, functools.partial(tile, tail=True), carry)
    peak, total = carry[:2]

    @pl.when(w.tiles > 0)
    def _():
        plgpu.barrier_wait(b.probabilities_free)
        loader.finish()

    out = w.request, w.row_block, w.split
    peaks[(*out, slice(None))] = peak
    totals[(*out, slice(None))] = reduce_folded(
        total, "sum", s.scratch, interpret=problem.interpret
    )


def _logits(problem: Problem, w: Work, s: Buffers, b: Barriers, i, refill) -> Array:
    """Returns the logits [64, rows] of tile `i`, as exponents of 2."""
    rows, chunks = problem.config.rows, problem.chunks
    zero = hidden_zero(w.context_len + i)
    # Chunks that were loaded while the tile before was in work.
    ahead = min(problem.config.slots - chunks, chunks)

    def accumulate(acc):
        def chunk(c, _):
            slot = slot_of(problem, i, c)
            columns = slot_columns(c)
            plgpu.barrier_wait(b.slot_full.at[slot])
            plgpu.wgmma(acc, s.ring.at[slot], s.q_latent.at[:, columns].T)

        lax.fori_loop(zero, zero + ahead, chunk, None)

        @pl.when(i > 0)
        def _():
            refill()

        lax.fori_loop(zero + ahead, zero + chunks, chunk, None)
        plgpu.barrier_wait(b.rope_full)
        plgpu.wgmma(acc, s.rope, s.q_rope.T)
        if problem.interpret:
            return acc[...]

    acc: Any
    if problem.interpret:
        acc = pl.run_scoped(
            accumulate, plgpu.WGMMAAccumulatorRef((TILE, rows), jnp.float32)
        )
    else:
        start = lax.broadcast_in_dim(zero.astype(jnp.float32), (TILE, rows), [])
        start = plgpu.layout_cast(start, LAYOUT)
        acc = pl.run_state(accumulate)(plgpu.WGMMAAccumulatorRef.init(start))
    return acc * problem.log2_scale


def _probabilities(problem: Problem, s: Buffers, b: Barriers, i, x, peak, total):
    """Hands over P of a tile; returns the reference and the sums with it."""
    interpret = problem.interpret
    parity = lax.rem(i, 2)

    def above(peak):
        return x - lax.broadcast_in_dim(peak, x.shape, [1])

    grew = any_above(above(peak), _GROWTH, interpret=interpret)

    def raised():
        folded = fold_rows(x, "max", interpret=interpret)
        highest = reduce_folded(folded, "max", s.scratch, interpret=interpret)
        new = jnp.maximum(peak, highest)
        growth = jnp.exp2(peak - new)
        # Free to write: tile i - 2 was weighed before tile i - 1 was handed over.
        s.growth[parity, :] = growth
        return new, total * growth

    peak, total = lax.cond(grew, raised, lambda: (peak, total))
    p = jnp.exp2(above(peak))
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
    return peak, total
