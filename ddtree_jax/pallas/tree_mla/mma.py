"""Owns the kernel for GPUs without `wgmma`: as `transposed.py`, with `mma`, in 99 KB.

Roles, order and results are those of the Hopper kernel, in tiles of 32 keys. Both
products stay transposed: keys, and later latent columns, are the rows of the
product, query rows its columns.

    score   S = K Qᵀ     two warps on 16 keys each, two on half of the rows each
    weigh   O += Vᵀ P    four warps on 16 latent columns each, all rows

`mma` reads registers. The queries' come from shared memory for each tile again, P's
once a tile, and each key and value is loaded twice by `score` and once by `weigh`.

Every warpgroup has the 128 registers a thread that it starts with: for sm_120,
`ptxas` ignores a change of them in a kernel with TMA loads as Mosaic GPU writes them.
"""

import functools
from typing import Any

from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.pallas.tree_mla.attend import Variant
from ddtree_jax.pallas.tree_mla.block import Buffers, Problem, barriers, swizzled
from ddtree_jax.pallas.tree_mla.config import SLOT_COLUMNS
from ddtree_jax.pallas.tree_mla.mma_score import score
from ddtree_jax.pallas.tree_mla.mma_weigh import LAYOUT, add_product
from ddtree_jax.pallas.tree_mla.reference import WORD_BITS
from ddtree_jax.pallas.tree_mla.weigh import weigh


def _scratch(problem: Problem) -> tuple[Any, ...]:
    """Returns the shared memory of a block, of which each starts at 1,024 bytes."""
    rows, slots, tile = problem.config.rows, problem.config.slots, problem.tile
    return (
        swizzled(rows, problem.latent),
        swizzled(1, rows, problem.rope),
        swizzled(slots, tile, SLOT_COLUMNS),
        swizzled(1, tile, problem.rope),
        swizzled(rows, tile),
        plgpu.SMEM((4, rows), jnp.float32),
        plgpu.SMEM((tile // WORD_BITS, rows), jnp.int32),
    )


def _buffers(q_latent, q_rope, ring, rope, probabilities, vectors, words) -> Buffers:
    """Returns the buffers by name; the vectors share one piece of memory."""
    return Buffers(
        q_latent=q_latent,
        q_rope=q_rope,
        ring=ring,
        rope=rope,
        probabilities=probabilities,
        peaks=vectors.at[pl.ds(0, 1)],
        growth=vectors.at[pl.ds(1, 2)],
        grew=vectors.at[3],
        words=words,
        scratch=None,
    )


_WEIGH = functools.partial(weigh, product=add_product, layout=LAYOUT)

VARIANT = Variant(
    name="tree_mla_attend_mma",
    roles=(score, _WEIGH, _WEIGH),
    scratch=_scratch,
    buffers=_buffers,
    barriers=barriers,
    registers=None,
    options={"reduction_scratch_bytes": 1_024},
)
