"""Owns the order in which the kernels want INT4 weights, and the way to it and back.

A tile is 16 outputs × 64 inputs, the left operand of four `mma.m16n8k16`; the tiles of
16 outputs follow each other. Lane 4 r + c of a warp multiplies outputs r and r + 8 with
inputs 16 c .. 16 c + 15: which 16 of the 64 inputs a product takes is free, as long as
both operands agree, and so each lane reads its part of an activation row as 32
consecutive bytes. A tile is

    128 words: word 16 r + 4 c + j has inputs 16 c + 4 j + 0 .. 3 of both outputs; the
      nibble of output r + 8 h, input 16 c + 4 j + 2 p + e is number h + 2 p + 4 e, so
      that a shift and a mask give two neighbours in the halves of a register
    32 scales: number 4 r + 2 g + h is of output r + 8 h, inputs 32 g .. 32 g + 31
"""

import dataclasses

import jax

from ddtree_jax.arrays import BF16, I32, Array
from ddtree_jax.quant import GROUP_SIZE, NIBBLES_PER_WORD, Int4Weight, pack, unpack

TILE_OUT, TILE_IN = 16, 64
TILE_WORDS = TILE_OUT * TILE_IN // NIBBLES_PER_WORD
TILE_SCALES = TILE_OUT * TILE_IN // GROUP_SIZE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int4Tiles:
    """An `Int4Weight` in the order of the kernels: the same bits, moved.

    The arrays have the shapes of an `Int4Weight`'s, so that these can be converted in
    place; `[16, inputs]` of a weight are `[inputs / 64]` tiles here.
    """

    words: I32[Array, "*lead out words"]
    scales: BF16[Array, "*lead out groups"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight that this stands for, `[..., out, in]`."""
        return Int4Weight(self.words, self.scales).shape

    def validate(self) -> None:
        """Raises ValueError where the arrays are no weight, or do not fill tiles."""
        Int4Weight(self.words, self.scales).validate()
        _check_tiles(self.shape)


def to_tiles(weight: Int4Weight) -> Int4Tiles:
    """Returns the weight in the order of the kernels, exactly.

    Raises:
      ValueError: Outputs or inputs do not fill tiles.
    """
    _check_tiles(weight.shape)
    *lead, out, inputs = weight.shape
    rows, columns = out // TILE_OUT, inputs // TILE_IN
    # Axes: row, h, r, column, c, j, p, e.
    q = unpack(weight.packed).reshape(*lead, rows, 2, 8, columns, 4, 4, 2, 2)
    words = pack(_moved(q, len(lead), 0, 3, 2, 4, 5, 7, 6, 1).reshape(*lead, out, -1))
    # Axes: row, h, r, column, g.
    scales = weight.scale.reshape(*lead, rows, 2, 8, columns, 2)
    scales = _moved(scales, len(lead), 0, 3, 2, 4, 1)
    return Int4Tiles(words, scales.reshape(weight.scale.shape))


def from_tiles(tiles: Int4Tiles) -> Int4Weight:
    """Returns the weight in canonical order; the inverse of `to_tiles`."""
    *lead, out, inputs = tiles.shape
    rows, columns = out // TILE_OUT, inputs // TILE_IN
    # Axes: row, column, r, c, j, e, p, h.
    q = unpack(tiles.words).reshape(*lead, rows, columns, 8, 4, 4, 2, 2, 2)
    packed = pack(_moved(q, len(lead), 0, 7, 2, 1, 3, 4, 6, 5).reshape(*lead, out, -1))
    # Axes: row, column, r, g, h.
    scales = tiles.scales.reshape(*lead, rows, columns, 8, 2, 2)
    scales = _moved(scales, len(lead), 0, 4, 2, 1, 3)
    return Int4Weight(packed, scales.reshape(tiles.scales.shape))


def _check_tiles(shape: tuple[int, ...]) -> None:
    if shape[-2] % TILE_OUT or shape[-1] % TILE_IN:
        raise ValueError(
            f"the INT4 kernels expect outputs in {TILE_OUT}s and inputs in {TILE_IN}s, "
            f"got a weight {shape}"
        )


def _moved(x: Array, lead: int, *order: int) -> Array:
    """Returns `x` with the axes after the first `lead` in another order."""
    return x.transpose(*range(lead), *(lead + i for i in order))
