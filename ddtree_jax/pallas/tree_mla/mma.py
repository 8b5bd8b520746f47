"""Owns the kernel for GPUs without `wgmma`: as `attend.py`, with `mma`, in 99 KB.

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

from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.arrays import F32
from ddtree_jax.pallas.tree_mla.block import (
    Barriers,
    Buffers,
    Inputs,
    Problem,
    barriers,
    swizzled,
    work,
)
from ddtree_jax.pallas.tree_mla.config import SLOT_COLUMNS
from ddtree_jax.pallas.tree_mla.load import Loader
from ddtree_jax.pallas.tree_mla.mma_score import score
from ddtree_jax.pallas.tree_mla.mma_weigh import weigh
from ddtree_jax.pallas.tree_mla.weigh import HALF
from ddtree_jax.pallas.warpgroup import overlap_launches


def attend(
    problem: Problem, inputs: Inputs, *, interpret: Any = None
) -> tuple[
    F32[jax.Array, "B blocks splits C X"],
    F32[jax.Array, "B blocks splits rows"],
    F32[jax.Array, "B blocks splits rows"],
]:
    """Returns what the Hopper kernel does, in the same order.

    Args:
      inputs: Queries as [B, rows, columns], rows a multiple of 8; tails as
        [B, tokens, columns], tokens a multiple of 32.
      interpret: Parameters of the interpreter.
    """
    config = problem.config
    batch = inputs.q_latent.shape[0]
    splits = (batch, config.row_blocks, config.splits)
    sums = (*splits, problem.latent // HALF, HALF * config.rows)
    rows = (*splits, config.rows)
    scratch = _scratch(problem)

    def body(*refs):
        inputs, outputs = Inputs(*refs[:9]), refs[9:12]
        s = _buffers(*refs[12 : 12 + len(scratch)])
        b = Barriers(*refs[12 + len(scratch) :])
        partial, peaks, totals = outputs
        overlap_launches(interpret=problem.interpret)
        w = work(problem, inputs.context_len)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _():
            score(problem, w, inputs, s, b, peaks, totals)

        @pl.when((warpgroup == 1) | (warpgroup == 2))
        def _():
            weigh(problem, w, s, b, warpgroup - 1, partial)

        @pl.when(warpgroup == 3)
        def _():
            Loader(problem, w, inputs, s, b).run()

    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(sums, jnp.float32),
            jax.ShapeDtypeStruct(rows, jnp.float32),
            jax.ShapeDtypeStruct(rows, jnp.float32),
        ),
        scratch_types=[*scratch, *barriers(problem)],
        grid=(config.splits, config.row_blocks, batch),
        grid_names=("split", "row_block", "request"),
        num_threads=4,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # A thread reads in shared memory only what it wrote itself, or what a
            # barrier announced, so none is needed around each access.
            unsafe_no_auto_barriers=interpret is None,
            reduction_scratch_bytes=1_024,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret,
        kernel_name="tree_mla_attend_mma",
    )
    return kernel(*inputs)


def _scratch(problem: Problem) -> tuple[Any, ...]:
    """Returns the shared memory of a block, of which each starts at 1,024 bytes."""
    rows, slots = problem.config.rows, problem.config.slots
    tile = problem.tile
    return (
        swizzled(rows, problem.latent),
        swizzled(rows, problem.rope),
        swizzled(slots, tile, SLOT_COLUMNS),
        swizzled(tile, problem.rope),
        swizzled(rows, tile),
        plgpu.SMEM((4, rows), jnp.float32),
        plgpu.SMEM((1, rows), jnp.int32),
    )


def _buffers(q_latent, q_rope, ring, rope, probabilities, vectors, words) -> Buffers:
    """Returns the buffers by name; all vectors share one piece of memory."""
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
