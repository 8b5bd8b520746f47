"""Owns what becomes of a warpgroup's products: sums of warps, and rows of results.

The functions do not exist on a CPU: with `interpret`, each does what it means.
"""

from typing import Any

from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from ddtree_jax.arrays import Array
from ddtree_jax.pallas import registers as reg
from ddtree_jax.pallas.int4_matmul.config import COLUMNS, ROWS
from ddtree_jax.pallas.int4_matmul.tiles import TILE_OUT
from ddtree_jax.pallas.warpgroup import LAYOUT, WARPS


def add_warps(products: list[Array], scratch: Any, *, interpret: bool) -> list[Array]:
    """Returns the sums over the four warps, [128] each, always in one order.

    Thread 8 i + n holds row i of 16 and column n of 8.

    Args:
      products: As `multiply` makes them.
      scratch: Shared memory, float32 [arrays, 4, 128], for this warpgroup alone.
    """
    if interpret:
        return [p.reshape(WARPS, -1).sum(axis=0) for p in products]

    @reg.inline(
        arg_types=(*[LAYOUT] * len(products), reg.REF),
        return_type=[reg.per_thread_type(1, jnp.float32)] * len(products),
    )
    def run(_, *arguments):
        *products, scratch = arguments
        mine = reg.at(reg.times(reg.lane(), 4))
        mgpu.utils.warpgroup_barrier()  # scratch may still be in use
        for number, array in enumerate(products):
            quad = reg.vector_of(reg.values(array))
            vector.store(quad, scratch, [reg.at(number), reg.at(reg.warp()), mine])
        mgpu.utils.warpgroup_barrier()
        source = reg.at(_place_of_output())
        sums = []
        for number in range(len(products)):
            parts = [
                memref.load(scratch, [reg.at(number), reg.at(w), source])
                for w in range(WARPS)
            ]
            left, right = arith.addf(*parts[:2]), arith.addf(*parts[2:])
            total = arith.addf(left, right)
            sums.append(reg.fragment([total], reg.per_thread(1), (reg.THREADS,)))
        return sums

    return run(*products, scratch)


def store_hidden(
    out: Any, tile: Array, first: Array, sums: Array, *, interpret: bool
) -> None:
    """Writes sums as bfloat16 to `out[tile, column, first + row]`."""
    if interpret:
        value = sums.reshape(TILE_OUT, COLUMNS).T.astype(out.dtype)
        out[tile, :, pl.ds(first, TILE_OUT)] = value
        return

    @reg.inline(arg_types=(reg.REF, reg.SPLAT, reg.SPLAT, reg.per_thread(1)))
    def run(_, out, tile, first, sums):
        row, column = _output()
        inner = reg.at(arith.addi(reg.scalar(first), row))
        [value] = reg.values(sums)
        rounded = arith.truncf(ir.BF16Type.get(), value)
        memref.store(rounded, out, [reg.at(reg.scalar(tile)), reg.at(column), inner])

    run(out, tile, first, sums)


def store_tokens(
    out: Any, token: Array, first: Array, sums: Array, *, interpret: bool
) -> None:
    """Writes sums as bfloat16 to `out[token + column, first + row]`, where that is."""
    if interpret:
        value = sums.reshape(TILE_OUT, COLUMNS).T.astype(out.dtype)
        rows = pl.ds(first, TILE_OUT)
        for column in range(COLUMNS):

            @pl.when(token + column < out.shape[0])
            def _(column=column):
                out[token + column, rows] = value[column]

        return

    @reg.inline(arg_types=(reg.REF, reg.SPLAT, reg.SPLAT, reg.per_thread(1)))
    def run(_, out, token, first, sums):
        row, column = _output()
        token = arith.addi(reg.scalar(token), column)
        place = reg.at(arith.addi(reg.scalar(first), row))
        tokens = reg.i32(ir.MemRefType(out.type).shape[0])
        [value] = reg.values(sums)
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ult, token, tokens)):
            rounded = arith.truncf(ir.BF16Type.get(), value)
            memref.store(rounded, out, [reg.at(token), place])

    run(out, token, first, sums)


def load_slots(table: Any, tile: Array, *, interpret: bool) -> Array:
    """Returns the entries of each lane's two columns of products, 2 (lane % 4) + 0, 1.

    Args:
      table: Global memory, int32 or float32 [tiles, 8].
      tile: Index into it.
    """
    if interpret:
        return table[tile]
    dtype = table.dtype

    @reg.inline(
        arg_types=(reg.REF, reg.SPLAT), return_type=reg.per_thread_type(2, dtype)
    )
    def load(_, table, tile):
        first = reg.times(arith.remui(reg.lane(), reg.i32(4)), 2)
        row = reg.at(reg.scalar(tile))
        loaded = [
            memref.load(table, [row, reg.at(reg.plus(first, i))]) for i in range(2)
        ]
        signed = True if dtype == jnp.int32 else None
        shape = (2 * reg.THREADS,)
        return reg.fragment(loaded, reg.per_thread(2), shape, signed=signed)

    return load(table, tile)


def clear_rows(
    rows: Any, warpgroup: Array, warpgroups: int, *, interpret: bool
) -> None:
    """Sets one of `warpgroups` shares of shared memory, [tokens, 72], to zero."""
    if interpret:

        @pl.when(warpgroup == 0)
        def _():
            rows[...] = jnp.zeros(rows.shape, rows.dtype)

        return

    @reg.inline(arg_types=(reg.REF, reg.SPLAT))
    def run(_, rows, warpgroup):
        zero = reg.vector_of([mgpu.utils.c(0.0, ir.F32Type.get())] * 4)
        for token, place, exists in _quads(rows, warpgroup, warpgroups):
            with mgpu.utils.when(exists):
                vector.store(zero, rows, [token, place])

    run(rows, warpgroup)


def add_to_rows(
    rows: Any, slots: Array, weights: Array, products: Array, *, interpret: bool
) -> None:
    """Adds weight · product to `rows[token, row]` for each column that has a token.

    Args:
      rows: Shared memory, float32 [tokens, 72]; the last 8 keep banks apart.
      slots: Tokens; negative where there is none. No token is there twice.
      weights: Of the columns, like `slots`.
      products: Of 64 rows, a fourth of them of each warp.
    """
    if interpret:
        hit = slots[:, None] == jnp.arange(rows.shape[0])[None]
        value = weights[:, None] * products.T
        added = jnp.where(hit[..., None], value[:, None], 0.0).sum(axis=0)
        rows[:, pl.ds(0, ROWS)] = rows[:, pl.ds(0, ROWS)] + added
        return

    @reg.inline(arg_types=(reg.REF, reg.per_thread(2), reg.per_thread(2), LAYOUT))
    def run(_, rows, slots, weights, products):
        low = arith.addi(
            reg.times(reg.warp(), TILE_OUT), arith.divui(reg.lane(), reg.i32(4))
        )
        places = [reg.at(low), reg.at(reg.plus(low, TILE_OUT // 2))]
        mine = reg.values(products)
        columns = zip(reg.values(slots), reg.values(weights), strict=True)
        for column, (slot, weight) in enumerate(columns):
            used = arith.cmpi(arith.CmpIPredicate.sge, slot, reg.i32(0))
            with mgpu.utils.when(used):
                for place, value in zip(places, mine[column::2], strict=True):
                    where = [reg.at(slot), place]
                    old = memref.load(rows, where)
                    total = arith.addf(old, arith.mulf(weight, value))
                    memref.store(total, rows, where)

    run(rows, slots, weights, products)


def store_rows(
    out: Any,
    rows: Any,
    first: Array,
    warpgroup: Array,
    warpgroups: int,
    *,
    interpret: bool,
) -> None:
    """Writes one of `warpgroups` shares of [tokens, 64] to `out[token, first ..]`."""
    if interpret:

        @pl.when(warpgroup == 0)
        def _():
            out[:, pl.ds(first, ROWS)] = rows[:, pl.ds(0, ROWS)]

        return

    @reg.inline(arg_types=(reg.REF, reg.REF, reg.SPLAT, reg.SPLAT))
    def run(_, out, rows, first, warpgroup):
        kind = ir.VectorType.get((4,), ir.F32Type.get())
        begin = reg.at(reg.scalar(first))
        for token, place, exists in _quads(rows, warpgroup, warpgroups):
            with mgpu.utils.when(exists):
                value = vector.load(kind, rows, [token, place])
                vector.store(value, out, [token, arith.addi(begin, place)])

    run(out, rows, first, warpgroup)


def _output() -> tuple[ir.Value, ir.Value]:
    """Returns the row and the column of this thread's output."""
    columns = reg.i32(COLUMNS)
    return arith.divui(reg.thread(), columns), arith.remui(reg.thread(), columns)


def _place_of_output() -> ir.Value:
    """Returns where this thread's output is among a warp's products, lane by lane."""
    row, column = _output()
    lane = arith.addi(
        reg.times(arith.remui(row, reg.i32(8)), 4), arith.divui(column, reg.i32(2))
    )
    of_row = reg.times(arith.divui(row, reg.i32(8)), 2)
    of_column = arith.remui(column, reg.i32(2))
    return arith.addi(reg.times(lane, 4), arith.addi(of_row, of_column))


def _quads(rows, warpgroup, warpgroups: int):
    """Yields this thread's share of [tokens, 64], 4 rows at a time; if it exists."""
    tokens = ir.MemRefType(rows.type).shape[0]
    quads = ROWS // 4
    place = reg.at(reg.times(arith.remui(reg.thread(), reg.i32(quads)), 4))
    each = reg.THREADS // quads
    first = arith.addi(
        reg.times(reg.scalar(warpgroup), each),
        arith.divui(reg.thread(), reg.i32(quads)),
    )
    for begin in range(0, tokens, each * warpgroups):
        token = reg.plus(first, begin)
        exists = arith.cmpi(arith.CmpIPredicate.ult, token, reg.i32(tokens))
        yield reg.at(token), place, exists
