"""Owns the warpgroup of the wide kernel that scores tiles, masks and exponentiates.

While it makes P of one tile, tensor cores make the logits of the next.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

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
from ddtree_jax.pallas.tree_mla.score import GROWTH
from ddtree_jax.pallas.tree_mla.wide_config import TILES_AHEAD
from ddtree_jax.pallas.warpgroup import LAYOUT, any_above, hidden_zero

# Of each row: the reference logit, and the sum of the probabilities.
type Rows = tuple[Array, Array]
# Products of a tile's keys, and rows.
type Carry = tuple[Array, Array, Array]


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

    def filled(value):
        vector = jnp.full((problem.config.rows,), value, jnp.float32)
        return plgpu.layout_cast(vector, problem.by_row)

    @pl.when(w.tiles > 0)
    def _():
        plgpu.barrier_wait(b.queries)

    def tile(i, carry, *, tail):
        x, *rows = carry
        if tail:
            # Not beside products, whose sums take registers.
            stage_words(problem, w, g, s, i)

        def exponentiate(*rows):
            mask = mask_tail if tail else mask_context
            logits = mask(problem, w, s, i, x * problem.log2_scale)
            return _probabilities(problem, s, b, i, logits, rows)

        return _Products(problem, w, s, b, i + 1).run(exponentiate, tuple(rows))

    rows = filled(LOWEST), filled(0.0)
    first = _Products(problem, w, s, b, hidden_zero(w.tiles))
    carry = first.run(lambda *rows: rows, rows)
    context = jnp.clip(w.context_tiles - w.first, 0, w.tiles)
    for begin, end, tail in ((0, context, False), (context, w.tiles, True)):
        carry = lax.fori_loop(begin, end, functools.partial(tile, tail=tail), carry)
    out = (w.request, w.row_block, w.split, slice(None))
    _, peaks[out], totals[out] = carry

    def observe(i, _):
        plgpu.barrier_wait(b.probabilities_free.at[lax.rem(i, TILES_AHEAD)])

    unobserved = jnp.maximum(w.tiles - TILES_AHEAD, 0)
    lax.fori_loop(unobserved, w.tiles, observe, None)


class _Products(NamedTuple):
    """Makes the logits of tile `i`; past the last tile, none."""

    problem: Problem
    w: Work
    s: Buffers
    b: Barriers
    i: Array

    def run(self, meanwhile: Callable[..., Rows], rows: Rows) -> Carry:
        """Returns the products, and what `meanwhile` makes of `rows` beside them."""
        shape = self.problem.config.rows, TILE
        result: Any
        if self.problem.interpret:

            def scoped(acc):
                after = self._multiply(acc, meanwhile, rows)
                return acc[...], *after

            acc = plgpu.WGMMAAccumulatorRef(shape, jnp.float32)
            result = pl.run_scoped(scoped, acc)
        else:

            def state(refs):
                acc, *kept = refs
                after = self._multiply(acc, meanwhile, [ref[...] for ref in kept])
                for ref, value in zip(kept, after, strict=True):
                    ref[...] = value

            start = lax.broadcast_in_dim(self._zero.astype(jnp.float32), shape, [])
            start = plgpu.layout_cast(start, LAYOUT)
            start = plgpu.WGMMAAccumulatorRef.init(start)
            result = pl.run_state(state)((start, *rows))

        @pl.when(self.i < self.w.tiles)
        def _():
            plgpu.barrier_arrive(self.b.rope_free)

        return result

    @property
    def _zero(self) -> Array:
        return hidden_zero(self.w.context_len + self.i)

    def _multiply(self, acc: Any, meanwhile: Callable[..., Rows], rows) -> Rows:
        """Starts the products that need not wait long, then the others."""
        config: Any = self.problem.config
        chunks, zero = self.problem.chunks, self._zero
        # No more than the ring can hold beside the tile before.
        early = min(config.early_chunks, chunks, config.slots - chunks)
        # Loops of no step past the last tile: a condition would copy the sums.
        more = (self.i < self.w.tiles).astype(jnp.int32)

        def latents(c, _):
            slot = slot_of(self.problem, self.i, c)
            plgpu.barrier_wait(self.b.slot_full.at[slot])
            queries = self.s.q_latent.at[:, slot_columns(c)]
            plgpu.wgmma(acc, queries, self.s.ring.at[slot].T)

        def rotary(*_):
            plgpu.barrier_wait(self.b.rope_full)
            plgpu.wgmma(acc, self.s.q_rope, self.s.rope.T)

        lax.fori_loop(zero, early * more, latents, None)
        rows = meanwhile(*rows)
        begin = zero + early
        lax.fori_loop(begin, begin + (chunks - early) * more, latents, None)
        # Last, since it is loaded last, when the one of the tile before is free.
        lax.fori_loop(zero, more, rotary, None)
        return rows


def _probabilities(
    problem: Problem, s: Buffers, b: Barriers, i: Array, x: Array, rows: Rows
) -> Rows:
    """Hands over P of a tile; returns references and sums with it."""
    peak, total = rows
    turn = lax.rem(i, TILES_AHEAD)

    # P and growth of the tile before the last are to be written over.
    @pl.when(i >= TILES_AHEAD)
    def _():
        plgpu.barrier_wait(b.probabilities_free.at[turn])

    highest = x.max(axis=1)
    above = highest - peak
    grew = any_above(above, GROWTH, layout=problem.by_row, interpret=problem.interpret)

    def raised():
        new = jnp.where(above > GROWTH, highest, peak)
        growth = jnp.exp2(peak - new)
        s.growth[turn, :] = growth
        return new, total * growth

    peak, total = lax.cond(grew, raised, lambda: (peak, total))
    p = jnp.exp2(x - problem.spread(peak, x.shape))
    total = total + p.sum(axis=1)
    s.grew[turn] = grew.astype(jnp.float32)
    s.probabilities[turn] = p.astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.barrier_arrive(b.probabilities_full.at[turn])
    return peak, total
