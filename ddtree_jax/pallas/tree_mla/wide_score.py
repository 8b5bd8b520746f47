"""Owns what the wide kernel's warpgroup makes of logits: P, references and sums."""

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
)
from ddtree_jax.pallas.tree_mla.mask import LOWEST
from ddtree_jax.pallas.tree_mla.score import GROWTH, make_logits, score_tiles
from ddtree_jax.pallas.warpgroup import any_above

# Of each row: the reference logit, and the sum of the probabilities.
type Rows = tuple[Array, Array]


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

    rows = filled(LOWEST), filled(0.0)
    rows = score_tiles(problem, w, g, s, b, rows, make_logits, _probabilities)
    out = (w.request, w.row_block, w.split, slice(None))
    peaks[out], totals[out] = rows


def _probabilities(
    problem: Problem, s: Buffers, b: Barriers, i: Array, x: Array, rows: Rows
) -> Rows:
    """Hands over P of a tile; returns references and sums with it."""
    peak, total = rows
    parity = lax.rem(i, 2)
    highest = x.max(axis=1)
    above = highest - peak
    grew = any_above(above, GROWTH, layout=problem.by_row, interpret=problem.interpret)

    def raised():
        new = jnp.where(above > GROWTH, highest, peak)
        growth = jnp.exp2(peak - new)
        # Free to write: tile i - 2 was weighed before tile i - 1 was handed over.
        s.growth[parity, :] = growth
        return new, total * growth

    peak, total = lax.cond(grew, raised, lambda: (peak, total))
    p = jnp.exp2(x - problem.spread(peak, x.shape))
    total = total + p.sum(axis=1)

    @pl.when(i > 0)
    def _():
        plgpu.barrier_wait(b.probabilities_free)

    s.grew[parity] = grew.astype(jnp.int32)
    s.probabilities[...] = p.astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.barrier_arrive(b.probabilities_full)
    return peak, total
