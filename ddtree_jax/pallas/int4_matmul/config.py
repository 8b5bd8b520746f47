"""Owns how the grouped product is cut into work. No arrays."""

import dataclasses

from ddtree_jax.pallas.int4_matmul.tiles import TILE_OUT, TILE_SCALES, TILE_WORDS
from ddtree_jax.pallas.warpgroup import WARPS

# Tokens of one expert that are multiplied at once.
COLUMNS = 8
# Tiles of one warp in a slot, and of the four.
QUARTERS = 4
SLOT_TILES = 16
# Rows of the result that a block does at a time, and their distance in shared memory.
ROWS = 64
PADDED_ROWS = 72
# Inputs of one item of the down projection, in tiles.
ITEM_TILES = 4
# Words of four tiles, in the 256s that TMA takes at most, and their scales.
QUARTER_WORDS, QUARTER_SCALES = (2, 256), (128,)

# Bytes of shared memory: of a slot with its barriers, of a sum over warps, and for the
# table of experts and other barriers.
_SLOT = SLOT_TILES * (TILE_WORDS * 4 + TILE_SCALES * 2) + 16
_SCRATCH = WARPS * TILE_OUT * COLUMNS * 4
_SPARE = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedConfig:
    """How one call is cut.

    Attributes:
      row_tiles: Rows of gate, and of up, of one unit of work, in 16s: 1 or 2.
      warpgroups: Of a block, that multiply, at most 4; one more loads, a warp for each.
      slots: Of the ring of each warpgroup.
      blocks: All resident at the same time, since they wait for each other.
      shared_units: Whether the warpgroups of a block share the inputs of a unit: where
        there are not enough units for all of them.
      late_blocks: The last so many, which have a group of rows less than the others to
        do, and do more units instead: late ones, while the others add.
    """

    row_tiles: int
    warpgroups: int
    slots: int
    blocks: int
    shared_units: bool = False
    late_blocks: int = 0

    def __post_init__(self):
        if self.warpgroups > WARPS:
            raise ValueError(
                f"GroupedConfig: warpgroups is {self.warpgroups}; expected at most "
                f"{WARPS}, since each has a warp that loads for it"
            )

    @property
    def stride(self) -> int:
        """Warpgroups that multiply."""
        return self.blocks * self.warpgroups


def choose(
    *, tokens: int, hidden: int, blocks: int, memory: int, warpgroups: int
) -> GroupedConfig:
    """Returns a configuration for a number of tokens.

    Args:
      hidden: Rows of the result.
      blocks: Multiprocessors of the device.
      memory: Bytes of shared memory of one.
      warpgroups: As in `GroupedConfig`.
    """
    scratch = 2 * _SCRATCH * warpgroups
    rest = memory - tokens * PADDED_ROWS * 4 - scratch - _SPARE
    shared_units = tokens <= 2
    return GroupedConfig(
        row_tiles=1 if tokens <= 8 else 2,
        warpgroups=warpgroups,
        slots=rest // (warpgroups * _SLOT),
        blocks=blocks,
        shared_units=shared_units,
        late_blocks=0 if shared_units else -(hidden // ROWS) % blocks,
    )


def choose_dense(*, blocks: int, memory: int, warpgroups: int) -> GroupedConfig:
    """Returns a configuration of the product with one weight, as `choose`."""
    rest = memory - _SCRATCH * warpgroups - _SPARE
    slots = rest // (warpgroups * _SLOT)
    return GroupedConfig(row_tiles=1, warpgroups=warpgroups, slots=slots, blocks=blocks)
