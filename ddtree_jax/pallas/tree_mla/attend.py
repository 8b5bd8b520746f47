"""Owns the kernel that reads pages and tail, in row blocks and splits.

Warpgroups that compute are followed by one whose first warp loads. What they do is a
variant's: `transposed.py` and `wide.py` for Hopper, `mma.py` for little shared memory.

K and V are the same bytes: a slot of the ring holds a tile's keys × 128 latent columns,
and is freed when it has been summed. The reference m of a row is its largest logit so
far, raised only when a new one exceeds it by much: then O and the sums are scaled,
else no maximum has to be found. Softmax does not depend on the choice of m.

Source: split-KV attention with online softmax (FlashDecoding, FlashMLA); lazy
rescaling as in FlashAttention-4.
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
    Buffers,
    Inputs,
    Outputs,
    Problem,
    work,
)
from ddtree_jax.pallas.tree_mla.load import Loader
from ddtree_jax.pallas.tree_mla.weigh import HALF
from ddtree_jax.pallas.warpgroup import overlap_launches

# What a warpgroup does: (problem, work, inputs, buffers, barriers, outputs).
type Role = Callable[..., None]


class Variant(NamedTuple):
    """What differs between GPUs.

    Attributes:
      roles: Of all warpgroups but the last, which loads; equal ones are neighbours.
      scratch: Makes the shared memory of a block, for a problem.
      buffers: Gives its pieces their names.
      barriers: Makes the barriers of a block, for a problem.
      registers: Of a thread of each warpgroup; None leaves them what they start with.
      options: Of `CompilerParams`.
    """

    name: str
    roles: Sequence[Role]
    scratch: Callable[[Problem], Sequence[Any]]
    buffers: Callable[..., Buffers]
    barriers: Callable[[Problem], Any]
    registers: Sequence[int] | None
    options: Mapping[str, Any]


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
    memory, made = variant.scratch(problem), variant.barriers(problem)

    def body(*refs):
        inputs, outputs = Inputs(*refs[:9]), Outputs(*refs[9:12])
        s = variant.buffers(*refs[12 : 12 + len(memory)])
        b = type(made)(*refs[12 + len(memory) :])
        overlap_launches(interpret=problem.interpret)
        w = work(problem, inputs.context_len)
        warpgroup = lax.axis_index("warpgroup")

        def loader(*_):
            Loader(problem, w, inputs, s, b).run()

        def run(number, role):
            if variant.registers:
                mine = variant.registers[number]
                action = "increase" if mine > min(variant.registers) else "decrease"
                plgpu.set_max_registers(mine, action=action)
            role(problem, w, inputs, s, b, outputs)

        roles = [*variant.roles, loader]
        start = functools.partial(run, len(variant.roles), loader)
        # Each in the other branch of the one before: what conditions one after
        # another ask would take registers.
        for number, role in reversed([*enumerate(variant.roles)]):
            # Warpgroups that do the same run the same instructions.
            if role is not roles[number + 1]:
                this = functools.partial(run, number, role)
                start = functools.partial(lax.cond, warpgroup <= number, this, start)
        start()

    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(sums, jnp.float32),
            jax.ShapeDtypeStruct(rows, jnp.float32),
            jax.ShapeDtypeStruct(rows, jnp.float32),
        ),
        scratch_types=[*memory, *made],
        grid=(config.splits, config.row_blocks, batch),
        grid_names=("split", "row_block", "request"),
        num_threads=len(variant.roles) + 1,
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
