"""Owns the sizes of the tree-MLA kernels' tiles, and how work is cut.

Terms: a *tile* is 64 keys on Hopper. A *row* is one head of one node. A *split* is a
run of a request's tiles that one block reads; blocks of several splits are combined.
"""

import dataclasses
from typing import ClassVar

from jax import lax
from jax import numpy as jnp

from ddtree_jax.arrays import I32, Array

TILE = 64
# Binary logarithm of how far a logit may exceed the reference before that is raised.
GROWTH = 16.0
# Latent columns of one slot of the ring, loaded and freed together.
SLOT_COLUMNS = 128
MAX_ROWS = 72
SHARED_MEMORY = 232_448  # bytes a block may have on sm_90
# Barriers, flags, scratch and alignment.
_RESERVED = 4_096
# Requests of more tiles give each split two at least: a split of one tile writes
# more (its partial result) than it reads.
SHORT_TILES = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeMlaConfig:
    """How one call is cut.

    Attributes:
      rows: Of a block, a multiple of 8.
      row_blocks: Blocks that share a request's rows.
      splits: Blocks at most that share a request's tiles.
      slots: Of the ring of latents, each 64 keys × 128 columns; at most two tiles.
      combine_warpgroups: That share a request's splits when they are combined.
      tile: Keys of a tile; it also says which kernel: this one is Hopper's.
      rows_axis: Of logits and of sums; the other one has keys, and latent columns.
      tiles_ahead: How far ahead the second-level cache is asked for tiles.
    """

    tile: ClassVar[int] = TILE
    rows_axis: ClassVar[int] = 1
    tiles_ahead: ClassVar[int] = 0

    rows: int
    row_blocks: int
    splits: int
    slots: int
    combine_warpgroups: int


def choose(
    *,
    batch: int,
    rows: int,
    latent: int,
    rope: int,
    max_tiles: int,
    cores: int,
    max_rows: int = MAX_ROWS,
) -> TreeMlaConfig:
    """Returns the cut of a call; static, whatever the lengths turn out to be.

    Args:
      rows: Of one request: nodes × heads.
      max_tiles: Of one request: what its page table can hold, and its tail.
      cores: Streaming multiprocessors of the device.
      max_rows: Of a block.
    """
    blocks = -(-rows // max_rows)
    block_rows = -(-rows // (8 * blocks)) * 8
    splits = max(1, min(cores // (batch * blocks), max_tiles))
    queries = block_rows * (latent + rope) * 2
    probabilities, rotary = block_rows * TILE * 2, TILE * rope * 2
    ring = SHARED_MEMORY - _RESERVED - queries - probabilities - rotary
    return TreeMlaConfig(
        rows=block_rows,
        row_blocks=-(-rows // block_rows),
        splits=splits,
        slots=min(ring // (TILE * SLOT_COLUMNS * 2), 2 * latent // SLOT_COLUMNS),
        combine_warpgroups=combine_warpgroups(splits),
    )


def combine_warpgroups(splits: int) -> int:
    """Returns how many warpgroups share so many splits when they are combined."""
    return 8 if splits > 32 else 4 if splits > 8 else 1


def tiles_per_split(total: I32[Array, ""], splits: int) -> I32[Array, ""]:
    """Returns how many of `total` tiles (an int32 scalar ≥ 1) each split reads."""
    even = lax.div(total + (splits - 1), jnp.int32(splits))
    least = 1 + (total > SHORT_TILES).astype(jnp.int32)
    return jnp.maximum(even, least)
