"""Owns the sizes of the wide kernel's tiles, and how its work is cut."""

import dataclasses
from typing import ClassVar

from ddtree_jax.pallas.tree_mla.config import (
    SHARED_MEMORY,
    SLOT_COLUMNS,
    TILE,
    TreeMlaConfig,
    combine_warpgroups,
)

# Of every block: they are the 64-row operand of `wgmma`.
ROWS = 64
# Tiles of which P has room, so that one is made while another is weighed.
TILES_AHEAD = 2
# Vectors and ancestor bits, 1,024 bytes each, and barriers.
_RESERVED = 3 * 1_024


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeMlaWideConfig(TreeMlaConfig):
    """How one call is cut, for Hopper's kernel of many rows.

    Attributes:
      early_chunks: Slots of the next tile whose products start before the softmax of
        this one, which waits until they are loaded; the others start after it.
    """

    rows_axis: ClassVar[int] = 0

    early_chunks: int = 2


def choose_wide(
    *,
    batch: int,
    rows: int,
    latent: int,
    rope: int,
    max_tiles: int,
    cores: int,
    early_chunks: int = 2,
) -> TreeMlaWideConfig:
    """Returns the cut of a call; static, whatever the lengths turn out to be.

    Args:
      rows: Of one request: nodes × heads.
      max_tiles: Of one request: what its page table can hold, and its tail.
      cores: Streaming multiprocessors of the device.
      early_chunks: As of the config.
    """
    row_blocks = -(-rows // ROWS)
    splits = max(1, min(cores // (batch * row_blocks), max_tiles))
    queries = ROWS * (latent + rope) * 2
    probabilities, rotary = TILES_AHEAD * ROWS * TILE * 2, TILE * rope * 2
    ring = SHARED_MEMORY - _RESERVED - queries - probabilities - rotary
    return TreeMlaWideConfig(
        rows=ROWS,
        row_blocks=row_blocks,
        splits=splits,
        slots=min(ring // (TILE * SLOT_COLUMNS * 2), 2 * latent // SLOT_COLUMNS),
        combine_warpgroups=combine_warpgroups(splits),
        early_chunks=early_chunks,
    )
