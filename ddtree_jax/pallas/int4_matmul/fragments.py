"""Owns products of INT4 tiles and activations in the registers of a warpgroup.

Lane 4 r + c of a warp is what `tiles` calls thread 4 r + c. The warps of a warpgroup
multiply tiles of different inputs, so what they get are partial sums of the same
outputs. "Products" below is an array [64, 8] in `Layout.WGMMA`: rows 16 w .. 16 w + 15
are the sums of warp w, a column is a token.

The functions do not exist on a CPU: with `interpret`, each does what it means.

Source of the conversion: a nibble u in the mantissa of 128.0 makes 128 + u, as in
FasterTransformer and Marlin.
"""

from typing import Any

from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from ddtree_jax.arrays import Array
from ddtree_jax.pallas import registers as reg
from ddtree_jax.pallas.int4_matmul.config import COLUMNS, SLOT_TILES
from ddtree_jax.pallas.int4_matmul.tiles import (
    TILE_IN,
    TILE_OUT,
    TILE_SCALES,
    TILE_WORDS,
    Int4Tiles,
    from_tiles,
)
from ddtree_jax.pallas.warpgroup import LAYOUT, WARPS
from ddtree_jax.quant import dequantise

# Activations of one lane: of one token, a quarter of a tile's inputs, in 16 bytes.
_MINE, _VECTOR = TILE_IN // 4, 8


def load_tokens(slots: Any, tile: Array, *, interpret: bool) -> Array:
    """Returns the token of each lane's column, lane // 4.

    Args:
      slots: Global memory, int32 [tiles, 8]: tokens; ~token where the slot is unused
        and may stand for that token as well as for any other.
      tile: Index into it.
    """
    if interpret:
        tokens = slots[tile]
        return jnp.maximum(tokens, ~tokens)

    @reg.inline(
        arg_types=(reg.REF, reg.SPLAT), return_type=reg.per_thread_type(1, jnp.int32)
    )
    def load(_, slots, tile):
        column = arith.divui(reg.lane(), reg.i32(4))
        token = memref.load(slots, [reg.at(reg.scalar(tile)), reg.at(column)])
        token = arith.maxsi(token, arith.xori(token, reg.i32(-1)))
        return reg.fragment([token], reg.per_thread(1), (reg.THREADS,), signed=True)

    return load(slots, tile)


def own_columns(*, interpret: bool) -> Array:
    """Returns the number of each lane's column, as `load_tokens` does tokens."""
    if interpret:
        return jnp.arange(COLUMNS)

    @reg.inline(return_type=reg.per_thread_type(1, jnp.int32))
    def make(_):
        column = arith.divui(reg.lane(), reg.i32(4))
        return reg.fragment([column], reg.per_thread(1), (reg.THREADS,), signed=True)

    return make()


def load_activations(
    x: Any, tokens: Array, first: Array, stride: int, *, interpret: bool
) -> Array:
    """Returns each warp's activations, of the inputs of one tile.

    Args:
      x: Global memory, bfloat16 [rows, inputs].
      tokens: Rows of x, as `load_tokens` gave them.
      first: Which 64 inputs warp 0 takes.
      stride: What each further warp adds to that.
    """
    if interpret:
        starts = [(first + stride * w) * TILE_IN for w in range(WARPS)]
        return jnp.stack([x[:, pl.ds(start, TILE_IN)][tokens] for start in starts])

    @reg.inline(
        arg_types=(reg.REF, reg.per_thread(1), reg.SPLAT),
        return_type=reg.per_thread_type(_MINE, jnp.bfloat16, _VECTOR),
    )
    def load(_, x, tokens, first):
        kind = ir.VectorType.get((_VECTOR,), ir.BF16Type.get())
        [token] = reg.values(tokens)
        tile = arith.addi(reg.scalar(first), reg.times(reg.warp(), stride))
        quarter = arith.remui(reg.lane(), reg.i32(4))
        begin = arith.addi(reg.times(tile, TILE_IN), reg.times(quarter, _MINE))
        places = [reg.at(reg.plus(begin, i)) for i in range(0, _MINE, _VECTOR)]
        loaded = [vector.load(kind, x, [reg.at(token), place]) for place in places]
        layout = reg.per_thread(_MINE, _VECTOR)
        return reg.fragment(loaded, layout, (reg.THREADS * _MINE,))

    return load(x, tokens, first)


def multiply(
    products: Array,
    words: Any,
    scales: Any,
    x: Array,
    *,
    first: int,
    stride: int,
    interpret: bool,
) -> Array:
    """Returns `products` with one tile's product added, another tile for each warp.

    Weights are rounded to bfloat16(q · scale), sums are float32.

    Args:
      words: Shared memory, int32 [4, 2, 256]: of sixteen tiles.
      scales: Shared memory, bfloat16 [4, 128].
      x: Activations of these tiles' inputs.
      first: Tile of warp 0.
      stride: What each further warp adds to it.
    """
    if interpret:
        places = [first + stride * w for w in range(WARPS)]
        tiles = [ref[...].reshape(SLOT_TILES, TILE_OUT, -1) for ref in (words, scales)]
        tiles = [jnp.stack([all_[i] for i in places]) for all_ in tiles]
        weights = dequantise(from_tiles(Int4Tiles(*tiles))).astype(jnp.float32)
        added = jnp.einsum("woi,wni->won", weights, x.astype(jnp.float32))
        return products + added.reshape(products.shape)

    @reg.inline(
        arg_types=(LAYOUT, reg.REF, reg.REF, reg.per_thread(_MINE, _VECTOR)),
        return_type=plgpu.ShapeDtypeStruct(products.shape, jnp.float32, LAYOUT),
    )
    def run(_, products, words, scales, x):
        tile = reg.plus(reg.times(reg.warp(), stride), first)
        nibbles, factors = _load_tile(words, scales, tile)
        # Two neighbouring activations each.
        pairs = [pair for quad in x.registers.flat for pair in _words(quad)]
        sums = reg.values(products)
        for step, word in enumerate(nibbles):
            sums = _mma(sums, _weights(word, factors), pairs[2 * step : 2 * step + 2])
        doubled = [reg.vector_of(sums[i : i + 2]) for i in range(0, len(sums), 2)]
        return reg.fragment(doubled, LAYOUT, products.shape)

    return run(products, words, scales, x)


def _load_tile(words, scales, tile: ir.Value) -> tuple[reg.Values, reg.Values]:
    """Returns a lane's four words, and the scales of its two outputs, each twice."""
    lane, kind = reg.lane(), ir.IntegerType.get_signless(32)
    place = arith.addi(reg.times(tile, TILE_WORDS), reg.times(lane, 4))
    quad = ir.VectorType.get((4,), kind)
    nibbles = vector.load(quad, mgpu.utils.memref_fold(words, 0, 3), [reg.at(place)])
    # Lanes 4 r + 2 g and 4 r + 2 g + 1 share outputs and group.
    pair = reg.times(arith.divui(lane, reg.i32(2)), 2)
    place = reg.at(arith.addi(reg.times(tile, TILE_SCALES), pair))
    two = ir.VectorType.get((2,), ir.BF16Type.get())
    both = vector.load(two, mgpu.utils.memref_fold(scales, 0, 2), [place])
    both = mgpu.utils.bitcast(both, kind)
    twice = [
        reg.asm(f"prmt.b32 $0, $1, 0, {bytes_};", both)
        for bytes_ in ("0x1010", "0x3232")
    ]
    return reg.elements(nibbles), twice


def _words(register: ir.Value) -> reg.Values:
    kind = ir.IntegerType.get_signless(32)
    return reg.elements(vector.bitcast(ir.VectorType.get((4,), kind), register))


def _weights(word: ir.Value, scales: reg.Values) -> reg.Values:
    """Returns the left operand of one product: bfloat16(q · scale), in pairs."""
    # 0x4300 is 128, 0x4308 is 136.
    code = (
        "{\n.reg .b32 a, b;\nlop3.b32 a, $1, 0x000F000F, 0x43004300, 0xEA;\n"
        "mov.b32 b, 0x43084308;\nsub.rn.bf16x2 a, a, b;\nmul.rn.bf16x2 $0, a, $2;\n}"
    )
    shifted = [word, *(arith.shrui(word, reg.i32(4 * i)) for i in range(1, 4))]
    return [reg.asm(code, s, scales[i % 2]) for i, s in enumerate(shifted)]


def _mma(sums: reg.Values, a: reg.Values, b: reg.Values) -> reg.Values:
    f32 = ir.F32Type.get()
    result = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * 4),
        [*a, *b, *sums],
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        has_side_effects=False,
    )
    return [llvm.extractvalue(f32, result, [i]) for i in range(4)]
