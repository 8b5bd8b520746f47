"""Owns Hopper's kernel for many rows: as `attend.py`, not transposed.

Query rows are the 64-row operand of `wgmma`, so a block has 64 of them, however many
are used. What that buys: a thread has two rows, so it keeps a reference and a sum for
each in registers, and a maximum over keys is found within four lanes.

    score   S = Q Kᵀ     of the next tile, while this one's P = 2^(S - m) is made
    weigh   O += P V     two of them, each every other slot of a tile

Two tiles are in the ring, one that is weighed and one that is scored, and P has room
for two. A reference is raised only for the rows that need it, so what a row gets does
not depend on the other rows of its block.

Source: as `attend.py`; the order of products is that of FlashAttention-3 and FlashMLA.
"""

import functools

from ddtree_jax.pallas.tree_mla.attend import Variant
from ddtree_jax.pallas.tree_mla.block import barriers, packed_buffers, packed_scratch
from ddtree_jax.pallas.tree_mla.wide_config import TILES_AHEAD
from ddtree_jax.pallas.tree_mla.wide_score import score
from ddtree_jax.pallas.tree_mla.wide_weigh import weigh

VARIANT = Variant(
    name="tree_mla_attend_wide",
    score=score,
    weigh=weigh,
    scratch=functools.partial(packed_scratch, tiles_ahead=TILES_AHEAD),
    buffers=packed_buffers,
    barriers=functools.partial(barriers, slot_readers=1, tiles_ahead=TILES_AHEAD),
    registers=(160, 160, 32),
    options={"reduction_scratch_bytes": 0},
)
