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
from typing import Any

from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.pallas.tree_mla.attend import Variant
from ddtree_jax.pallas.tree_mla.block import Buffers, Problem, barriers, swizzled
from ddtree_jax.pallas.tree_mla.config import SLOT_COLUMNS, TILE
from ddtree_jax.pallas.tree_mla.wide_config import TILES_AHEAD
from ddtree_jax.pallas.tree_mla.wide_score import score
from ddtree_jax.pallas.tree_mla.wide_weigh import weigh


def _scratch(problem: Problem) -> tuple[Any, ...]:
    """Returns the shared memory of a block, of which each starts at 1,024 bytes."""
    rows, slots = problem.config.rows, problem.config.slots
    return (
        swizzled(rows, problem.latent),
        swizzled(rows, problem.rope),
        swizzled(slots, TILE, SLOT_COLUMNS),
        swizzled(TILE, problem.rope),
        swizzled(TILES_AHEAD, rows, TILE),
        plgpu.SMEM((3, rows), jnp.float32),
        plgpu.SMEM((2, rows), jnp.int32),
    )


def _buffers(q_latent, q_rope, ring, rope, probabilities, vectors, words) -> Buffers:
    """Returns the buffers by name; the vectors share one piece of memory."""
    return Buffers(
        q_latent=q_latent,
        q_rope=q_rope,
        ring=ring,
        rope=rope,
        probabilities=probabilities,
        peaks=None,
        growth=vectors.at[pl.ds(0, 2)],
        grew=vectors.at[2],
        words=words,
        scratch=None,
    )


VARIANT = Variant(
    name="tree_mla_attend_wide",
    score=score,
    weigh=weigh,
    scratch=_scratch,
    buffers=_buffers,
    barriers=functools.partial(barriers, slot_readers=1, tiles_ahead=TILES_AHEAD),
    registers=(160, 160, 32),
    options={"reduction_scratch_bytes": 0},
)
