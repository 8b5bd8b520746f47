"""Owns the kernel that makes one result of the partial results of all splits."""

import math
from typing import Any, NamedTuple

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
    LAYOUT,
    load_columns,
    overlap_launches,
    relabel,
)

# Of a piece, by the axis of its rows: with 16 latent columns a row of the result is
# written in whole sectors of 32 bytes.
_WIDTHS = (16, 8)
# Splits of one warpgroup whose loads are in flight together.
_DEPTH = 4

type Partial = tuple[Array, Array, Array]


class Piece(NamedTuple):
    """What a block combines: 64 × `width` sums, as an accumulator holds them.

    Attributes:
      rows_axis: As of the config: 64 latent columns × some rows, or 64 rows × some.
      width: In groups of 8, which are 4 registers of each of 128 threads.
    """

    rows_axis: int
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        """Of the sums."""
        return HALF, self.width

    @property
    def rows(self) -> int:
        """How many rows of a row block a piece has."""
        return self.shape[self.rows_axis]

    @property
    def by_row(self) -> Any:
        """How a warpgroup holds an array of one element a row."""
        return LAYOUT.reduce(1 - self.rows_axis)

    def place(self, column: Array, group: Array) -> tuple[Any, Any]:
        """Returns where it is: rows of a row block, and latent columns."""
        first = column * HALF
        if self.rows_axis:
            return _part(group * self.width, self.width), _part(first, HALF)
        return pl.ds(0, HALF), _part(first + group * self.width, self.width)

    def spread(self, vector: Array) -> Array:
        """Returns an array of one element a row in the shape of the sums."""
        return lax.broadcast_in_dim(vector, self.shape, [self.rows_axis])

    def load_vector(self, ref: Any, *, interpret: bool) -> Array:
        """Returns an array of one element a row."""
        return load_columns(ref, layout=self.by_row, interpret=interpret)


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
    piece = Piece(config.rows_axis, _WIDTHS[config.rows_axis])
    groups = (HALF, config.rows)[config.rows_axis] // piece.width

    def body(*refs):
        _body(problem, piece, *refs)

    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((batch, rows, problem.latent), jnp.bfloat16),
            jax.ShapeDtypeStruct((batch, rows), jnp.float32),
        ),
        scratch_types=[
            plgpu.SMEM((warpgroups, *piece.shape), jnp.float32),
            plgpu.SMEM((warpgroups, 2, piece.rows), jnp.float32),
            plgpu.Barrier(num_arrivals=warpgroups),
        ],
        grid=(groups, problem.latent // HALF, batch * config.row_blocks),
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
    problem, piece, partial, peaks, totals, context_len, out, lse, sums, stats, barrier
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
        return piece.load_vector(ref, interpret=interpret)

    rows, columns = piece.place(column, group)

    def load(split) -> Partial:
        live = split < used
        at = request, row_block, jnp.where(live, split, 0)
        x = _load_sums(problem, piece, partial, (*at, column), group)
        peak, weight = vector(peaks.at[(*at, rows)]), vector(totals.at[(*at, rows)])
        # Past the last split in use the first is read again, and weighs nothing.
        return x, jnp.where(live, peak, LOWEST), jnp.where(live, weight, 0.0)

    stride = config.combine_warpgroups

    def step(k, carry):
        parts = [load((k * _DEPTH + d) * stride + warpgroup) for d in range(_DEPTH)]
        for part in parts:
            carry = _merge(piece, carry, part)
        return carry

    carry = _nothing(piece)
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
            result = _merge(piece, result, part)
        x, peak, weight = result
        x = (x * piece.spread(1.0 / weight)).astype(jnp.bfloat16)
        at = request, _part(row_block * config.rows + rows.start, piece.rows)
        _store(piece, out.at[(*at, columns)], x, interpret=interpret)

        @pl.when((column == 0) & ((group == 0) | (piece.rows_axis == 1)))
        def _():
            lse[at] = (peak + jnp.log2(weight)) * math.log(2.0)


def _part(first: Array, size: int) -> Any:
    """Returns `size` places from `first` on, a multiple of 8, as an index."""
    return pl.ds(pl.multiple_of(first, 8), size)


def _store(piece: Piece, ref: Any, x: Array, *, interpret: bool) -> None:
    """Stores a piece to rows × latent columns."""
    if not piece.rows_axis:
        ref[...] = x
    elif interpret:
        ref[...] = x.T
    else:
        ref.T[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)


def _load_sums(problem: Problem, piece: Piece, partial, at, group: Array) -> Array:
    """Returns a piece of one split."""
    if problem.interpret:
        x = partial[(*at, slice(None))].reshape(HALF, -1)
        return lax.dynamic_slice_in_dim(x, group * piece.width, piece.width, axis=1)
    size = HALF * piece.width
    strided = plgpu.Layout.WG_STRIDED((size,), vec_size=4)
    place = pl.ds(pl.multiple_of(group * size, size), size)
    x = plgpu.load(partial.at[(*at, place)], layout=strided)
    return relabel(x, strided, LAYOUT, piece.shape)


def _nothing(piece: Piece) -> Partial:
    def filled(value):
        vector = jnp.full((piece.rows,), value, jnp.float32)
        return plgpu.layout_cast(vector, piece.by_row)

    zeros = plgpu.layout_cast(jnp.zeros(piece.shape, jnp.float32), LAYOUT)
    return zeros, filled(LOWEST), filled(0.0)


def _merge(piece: Piece, a: Partial, b: Partial) -> Partial:
    """Returns the partial result over the keys of both."""
    peak = jnp.maximum(a[1], b[1])
    of_a, of_b = jnp.exp2(a[1] - peak), jnp.exp2(b[1] - peak)
    return (
        a[0] * piece.spread(of_a) + b[0] * piece.spread(of_b),
        peak,
        a[2] * of_a + b[2] * of_b,
    )
