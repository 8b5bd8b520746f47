"""Owns the kernel that makes one result of the partial results of all splits."""

import math
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.arrays import BF16, F32, I32, Array
from ddtree_jax.pallas.tree_mla.block import Problem
from ddtree_jax.pallas.tree_mla.config import tiles_per_split
from ddtree_jax.pallas.tree_mla.mask import LOWEST
from ddtree_jax.pallas.tree_mla.weigh import HALF
from ddtree_jax.pallas.warpgroup import (
    COLUMNS,
    LAYOUT,
    load_columns,
    overlap_launches,
    relabel,
)

# Rows of a block here: a group of 8 columns of an accumulator.
_ROWS = 8
# Splits of one warpgroup whose loads are in flight together.
_DEPTH = 4

type Partial = tuple[Array, Array, Array]


def combine(
    problem: Problem,
    partial: F32[Array, "B blocks splits C X"],
    peaks: F32[Array, "B blocks splits rows"],
    totals: F32[Array, "B blocks splits rows"],
    context_len: I32[Array, "B"],
    *,
    interpret: Any = None,
) -> tuple[BF16[Array, "B R L"], F32[Array, "B R"]]:
    """Returns the attention output, and the natural log-sum-exp of the logits.

    R counts the rows of all row blocks, those past the last node included.

    Args:
      partial: What `attend` returned, like `peaks` and `totals`.
    """
    config = problem.config
    batch, warpgroups = partial.shape[0], config.combine_warpgroups
    rows = config.row_blocks * config.rows

    def body(*refs):
        _body(problem, *refs)

    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((batch, rows, problem.latent), jnp.bfloat16),
            jax.ShapeDtypeStruct((batch, rows), jnp.float32),
        ),
        scratch_types=[
            plgpu.SMEM((warpgroups, HALF, _ROWS), jnp.float32),
            plgpu.SMEM((warpgroups, 2, _ROWS), jnp.float32),
            plgpu.Barrier(num_arrivals=warpgroups),
        ],
        grid=(config.rows // _ROWS, problem.latent // HALF, batch * config.row_blocks),
        grid_names=("group", "column", "block"),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
        kernel_name="tree_mla_combine",
    )
    return kernel(partial, peaks, totals, context_len)


def _body(
    problem, partial, peaks, totals, context_len, out, lse, sums, stats, barrier
) -> None:
    config, interpret = problem.config, problem.interpret
    overlap_launches(interpret=interpret)
    group, column, block, warpgroup = (
        lax.axis_index(name) for name in ("group", "column", "block", "warpgroup")
    )
    request, row_block = (
        f(block, jnp.int32(config.row_blocks)) for f in (lax.div, lax.rem)
    )
    tile = problem.tile
    total = lax.div(context_len[request] + (tile - 1), jnp.int32(tile))
    total = total + problem.tail_tiles
    share = tiles_per_split(total, config.splits)
    used = lax.div(total + share - 1, share)

    def vector(ref):
        return load_columns(ref, interpret=interpret)

    def load(split) -> Partial:
        live = split < used
        at = request, row_block, jnp.where(live, split, 0)
        rows = pl.ds(pl.multiple_of(group * _ROWS, _ROWS), _ROWS)
        x = _load_sums(problem, partial, (*at, column), group)
        peak, weight = vector(peaks.at[(*at, rows)]), vector(totals.at[(*at, rows)])
        # Past the last split in use the first is read again, and weighs nothing.
        return x, jnp.where(live, peak, LOWEST), jnp.where(live, weight, 0.0)

    stride = config.combine_warpgroups

    def step(k, carry):
        parts = [load((k * _DEPTH + d) * stride + warpgroup) for d in range(_DEPTH)]
        for part in parts:
            carry = _merge(carry, part)
        return carry

    carry = _nothing()
    steps = lax.div(used + (stride * _DEPTH - 1), jnp.int32(stride * _DEPTH))
    carry = lax.fori_loop(0, steps, step, carry)
    if stride > 1:
        sums[warpgroup], stats[warpgroup, 0, :], stats[warpgroup, 1, :] = carry
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)

    @pl.when(warpgroup == 0)
    def _():
        result = carry
        for other in range(1, stride):
            if interpret:
                x = sums[other]
            else:
                x = plgpu.load(sums.at[other], layout=LAYOUT, optimized=False)
            part = x, vector(stats.at[other, 0]), vector(stats.at[other, 1])
            result = _merge(result, part)
        x, peak, weight = result
        x = (x * _across(1.0 / weight)).astype(jnp.bfloat16)
        first = row_block * config.rows + group * _ROWS
        rows = pl.ds(pl.multiple_of(first, _ROWS), _ROWS)
        columns = pl.ds(pl.multiple_of(column * HALF, HALF), HALF)
        if interpret:
            out[request, rows, columns] = x.T
        else:
            x = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)
            out.at[request, rows, columns].T[...] = x

        @pl.when(column == 0)
        def _():
            lse[request, rows] = (peak + jnp.log2(weight)) * math.log(2.0)


def _load_sums(problem: Problem, partial, at, group: Array) -> Array:
    """Returns 64 latent columns × 8 rows of one split."""
    if problem.interpret:
        x = partial[(*at, slice(None))].reshape(HALF, problem.config.rows)
        return lax.dynamic_slice_in_dim(x, group * _ROWS, _ROWS, axis=1)
    # A group of 8 columns is 4 registers of each of 128 threads.
    size = HALF * _ROWS
    strided = plgpu.Layout.WG_STRIDED((size,), vec_size=4)
    place = pl.ds(pl.multiple_of(group * size, size), size)
    x = plgpu.load(partial.at[(*at, place)], layout=strided)
    return relabel(x, strided, LAYOUT, (HALF, _ROWS))


def _nothing() -> Partial:
    cast = plgpu.layout_cast
    return (
        cast(jnp.zeros((HALF, _ROWS), jnp.float32), LAYOUT),
        cast(jnp.full((_ROWS,), LOWEST, jnp.float32), COLUMNS),
        cast(jnp.zeros((_ROWS,), jnp.float32), COLUMNS),
    )


def _merge(a: Partial, b: Partial) -> Partial:
    """Returns the partial result over the keys of both."""
    peak = jnp.maximum(a[1], b[1])
    of_a, of_b = jnp.exp2(a[1] - peak), jnp.exp2(b[1] - peak)
    return (
        a[0] * _across(of_a) + b[0] * _across(of_b),
        peak,
        a[2] * of_a + b[2] * of_b,
    )


def _across(vector: Array) -> Array:
    return lax.broadcast_in_dim(vector, (HALF, _ROWS), [1])
