"""Owns the sizes of the `mma` kernel's tiles, and how its work is cut."""

import dataclasses
from typing import ClassVar

from ddtree_jax.pallas.tree_mla.config import (
    SLOT_COLUMNS,
    TreeMlaConfig,
    combine_warpgroups,
)

TILE = 32
# Warps of a warpgroup that share the keys of a tile, 16 each.
TILE_WARPS = TILE // 16
# A product with so many of them has rows by sixteens.
ROWS_STEP = 8 * (4 // TILE_WARPS)
MAX_ROWS = 32
SHARED_MEMORY = 101_376  # bytes a block may have on sm_120
# Vectors, ancestor bits, room for reductions (1,024 each), barriers.
_RESERVED = 3 * 1_024 + 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeMlaMmaConfig(TreeMlaConfig):
    """How one call is cut, for the kernel that needs `mma` and 99 KB only.

    Rows are a multiple of 16; a slot has 32 keys × 128 columns.
    """

    tile: ClassVar[int] = TILE


def choose_mma(
    *, batch: int, rows: int, latent: int, rope: int, max_tiles: int, cores: int
) -> TreeMlaMmaConfig:
    """Returns the cut of a call; static, whatever the lengths turn out to be.

    Args:
      rows: Of one request: nodes × heads.
      max_tiles: Of one request: what its page table can hold, and its tail.
      cores: Streaming multiprocessors of the device.
    """
    row_blocks = -(-rows // MAX_ROWS)
    block_rows = -(-rows // (ROWS_STEP * row_blocks)) * ROWS_STEP
    row_blocks = -(-rows // block_rows)
    splits = max(1, min(_splits(batch * row_blocks, cores), max_tiles))
    queries = block_rows * (latent + rope) * 2
    probabilities, rotary = block_rows * TILE * 2, TILE * rope * 2
    ring = SHARED_MEMORY - _RESERVED - queries - probabilities - rotary
    return TreeMlaMmaConfig(
        rows=block_rows,
        row_blocks=row_blocks,
        splits=splits,
        slots=min(ring // (TILE * SLOT_COLUMNS * 2), 2 * latent // SLOT_COLUMNS),
        combine_warpgroups=combine_warpgroups(splits),
    )


def _splits(blocks: int, cores: int) -> int:
    """Returns how many times `blocks` fill a device: in one wave, or in two.

    Two where a quarter more of it has work then, as 96 blocks of 188 have.
    """
    one, two = cores // blocks, 2 * cores // blocks
    return two if 2 * two >= 5 * one else one
