"""Owns Hopper's kernel for many rows: as `transposed.py`, the other way round.

Query rows are the 64-row operand of `wgmma`, so a block has 64 of them, however many
are used. What that buys: a thread has two rows, so a maximum over keys is found within
four lanes.

Two warpgroups take turns at tiles, see `turns.py`; one warp of a third loads, and asks
the second-level cache for tiles before the ring has room for them.

Source: queries as the 64-row operand are FlashMLA's, and so are the turns.
"""

import functools
from typing import Any

from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.pallas.tree_mla import block
from ddtree_jax.pallas.tree_mla.attend import Variant
from ddtree_jax.pallas.tree_mla.block import Buffers, Problem, swizzled
from ddtree_jax.pallas.tree_mla.config import SLOT_COLUMNS, TILE
from ddtree_jax.pallas.tree_mla.turns import TurnBarriers, take_turns


def _scratch(problem: Problem) -> tuple[Any, ...]:
    """Returns the shared memory of a block, of which each starts at 1,024 bytes.

    Raises:
      ValueError: The ring is not two tiles: a warpgroup would wait for ever.
    """
    rows, slots = problem.config.rows, problem.config.slots
    if slots != 2 * problem.chunks:
        raise ValueError(
            f"tree_mla_attention: the wide kernel got a ring of {slots} slots; "
            f"expected two tiles, {2 * problem.chunks}"
        )
    return (
        swizzled(rows, problem.latent),
        swizzled(1, rows, problem.rope),
        swizzled(slots, TILE, SLOT_COLUMNS),
        swizzled(1, TILE, problem.rope),
        swizzled(2, rows, TILE),
        plgpu.SMEM((4, rows), jnp.float32),
        plgpu.SMEM((3, rows), jnp.int32),
    )


def _buffers(q_latent, q_rope, ring, rope, probabilities, vectors, words) -> Buffers:
    """Returns the buffers by name; arrays of one element a row share memory."""
    return Buffers(
        q_latent=q_latent,
        q_rope=q_rope,
        ring=ring,
        rope=rope,
        probabilities=probabilities,
        peaks=vectors.at[pl.ds(0, 1)],
        growth=vectors.at[pl.ds(1, 2)],
        grew=words.at[2],
        words=words.at[pl.ds(0, 2)],
        scratch=vectors.at[3],
    )


def _barriers(problem: Problem) -> TurnBarriers:
    """Returns the barriers of a block."""
    loading = block.barriers(problem, slot_readers=1)
    return TurnBarriers(
        queries=loading.queries,
        slot_full=loading.slot_full,
        slot_free=loading.slot_free,
        rope_full=loading.rope_full,
        rope_free=loading.rope_free,
        probabilities_full=plgpu.Barrier(num_barriers=2),
        totals_full=plgpu.Barrier(),
    )


VARIANT = Variant(
    name="tree_mla_attend_wide",
    roles=tuple(functools.partial(take_turns, number) for number in range(2)),
    scratch=_scratch,
    buffers=_buffers,
    barriers=_barriers,
    registers=(240, 240, 24),
    options={"reduction_scratch_bytes": 0},
)
