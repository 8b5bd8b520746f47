"""Owns the sizes of the wide kernel's tiles, and how its work is cut."""

import dataclasses
from typing import ClassVar

from ddtree_jax.pallas.tree_mla.config import TreeMlaConfig, choose

# Of every block: they are the 64-row operand of `wgmma`.
ROWS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeMlaWideConfig(TreeMlaConfig):
    """How one call is cut, for Hopper's kernel of many rows; slots are two tiles."""

    rows_axis: ClassVar[int] = 0
    tiles_ahead: ClassVar[int] = 2


def choose_wide(
    *, batch: int, rows: int, latent: int, rope: int, max_tiles: int, cores: int
) -> TreeMlaWideConfig:
    """Returns the cut of a call, as `choose` does with blocks of 64 rows."""
    cut = choose(
        batch=batch,
        rows=-(-rows // ROWS) * ROWS,
        latent=latent,
        rope=rope,
        max_tiles=max_tiles,
        cores=cores,
        max_rows=ROWS,
    )
    return TreeMlaWideConfig(**dataclasses.asdict(cut))
