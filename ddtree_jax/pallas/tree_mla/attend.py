"""Owns the Hopper kernel that reads pages and tail, in row blocks and splits.

The product is transposed: keys, and later latent columns, are the 64-row operand
of `wgmma`, and query rows are its N. So 8 rows cost what 8 rows need, where rows
as the 64-row operand would be padded: 72 rows (8 heads, 9 nodes) fill 56 % of two
such tiles. For many rows, `wide.py` is the other way round.

Four warpgroups work on a tile of 64 keys in turn, and on different tiles at once:

    load    fills a ring of slots
    score   S = K Qᵀ, masks, P = 2^(S - m)
    weigh   two of them, each half of the latent columns: O += Vᵀ P

K and V are the same bytes: a slot holds 64 keys × 128 latent columns, and is freed
when both `weigh` have summed it. The reference m of a row is its largest logit so
far, raised only when a new one exceeds it by much: then O and the sums are scaled,
else no maximum has to be found. Softmax does not depend on the choice of m.

Source: split-KV attention with online softmax (FlashDecoding, FlashMLA); the
transposed product of FlashMLA-ETAP (arXiv 2506.01969); lazy rescaling as in
FlashAttention-4.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.arrays import F32, Array
from ddtree_jax.pallas.tree_mla.block import (
    Barriers,
    Buffers,
    Inputs,
    Problem,
    barriers,
    buffers,
    work,
)
from ddtree_jax.pallas.tree_mla.load import Loader
from ddtree_jax.pallas.tree_mla.score import score
from ddtree_jax.pallas.tree_mla.weigh import HALF, weigh
from ddtree_jax.pallas.warpgroup import overlap_launches


class Variant(NamedTuple):
    """What differs between GPUs.

    Attributes:
      scratch: Makes the shared memory of a block, for a problem.
      buffers: Gives its pieces their names.
      barriers: Makes the barriers of a block, for a problem.
      registers: Of a thread of the warpgroups that score, weigh and load; None leaves
        them what they start with, 128.
      options: Of `CompilerParams`.
    """

    name: str
    score: Callable[..., None]
    weigh: Callable[..., None]
    scratch: Callable[[Problem], Sequence[Any]]
    buffers: Callable[..., Buffers]
    barriers: Callable[[Problem], Barriers]
    registers: tuple[int, int, int] | None
    options: Mapping[str, Any]


# What one warpgroup gives up, others take.
HOPPER = Variant(
    name="tree_mla_attend",
    score=score,
    weigh=weigh,
    scratch=buffers,
    buffers=Buffers,
    barriers=barriers,
    registers=(136, 176, 24),
    options={},
)


def attend(
    variant: Variant, problem: Problem, inputs: Inputs, *, interpret: Any = None
) -> tuple[
    F32[Array, "B blocks splits C X"],
    F32[Array, "B blocks splits rows"],
    F32[Array, "B blocks splits rows"],
]:
    """Returns the unnormalised sums of every split, their references and totals.

    The sums of 64 latent columns are in the order of registers, which `combine`
    knows. Splits without tiles write nothing but references and totals.

    Args:
      inputs: Queries as [B, rows, columns], rows a multiple of 8; tails as
        [B, tokens, columns], tokens a multiple of a tile's keys.
      interpret: Parameters of the interpreter.
    """
    config = problem.config
    batch = inputs.q_latent.shape[0]
    splits = (batch, config.row_blocks, config.splits)
    sums = (*splits, problem.latent // HALF, HALF * config.rows)
    rows = (*splits, config.rows)
    scratch = variant.scratch(problem)

    def set_registers(which, action):
        if variant.registers:
            plgpu.set_max_registers(variant.registers[which], action=action)

    def body(*refs):
        inputs, outputs = Inputs(*refs[:9]), refs[9:12]
        s = variant.buffers(*refs[12 : 12 + len(scratch)])
        b = Barriers(*refs[12 + len(scratch) :])
        partial, peaks, totals = outputs
        overlap_launches(interpret=problem.interpret)
        w = work(problem, inputs.context_len)
        warpgroup = lax.axis_index("warpgroup")

        def scorer():
            set_registers(0, "increase")
            variant.score(problem, w, inputs, s, b, peaks, totals)

        def weigher():
            set_registers(1, "increase")
            variant.weigh(problem, w, s, b, warpgroup - 1, partial)

        def loader():
            set_registers(2, "decrease")
            Loader(problem, w, inputs, s, b).run()

        # Not one condition after another: what those ask would take registers.
        others = functools.partial(lax.cond, warpgroup == 3, loader, weigher)
        lax.cond(warpgroup == 0, scorer, others)

    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(sums, jnp.float32),
            jax.ShapeDtypeStruct(rows, jnp.float32),
            jax.ShapeDtypeStruct(rows, jnp.float32),
        ),
        scratch_types=[*scratch, *variant.barriers(problem)],
        grid=(config.splits, config.row_blocks, batch),
        grid_names=("split", "row_block", "request"),
        num_threads=4,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # A thread reads in shared memory only what it wrote itself, or what a
            # barrier announced, so none is needed around each access.
            unsafe_no_auto_barriers=interpret is None,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            **variant.options,
        ),
        interpret=interpret,
        kernel_name=variant.name,
    )
    return kernel(*inputs)
