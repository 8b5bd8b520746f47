"""Owns the kernel that does a layer's routed experts in one launch.

A block has four warpgroups that multiply, and one that loads for them. First they share
out the units of gate and up: some rows of one expert, for one tile of its tokens. Then
all blocks wait for each other, and share out the rows of the result: the warpgroups of
a block take the experts in turn and add what each contributes, in one order and without
atomics. The loading warpgroup does not wait: by then it has filled the rings with
weights of the down projection. Where there are fewer groups of rows than blocks, the
blocks that would have none do the last units meanwhile, for which the others wait when
they come to them.

Source: weights as the left operand of the product, tokens as its right one, is the
"swap AB" of SGLang's and TensorRT-LLM's mixtures of experts.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.arrays import BF16, F32, I32, Array
from ddtree_jax.pallas.int4_matmul.add_down import add_down
from ddtree_jax.pallas.int4_matmul.arrivals import wait_for_units
from ddtree_jax.pallas.int4_matmul.block import Inputs, Problem, Shared, share_of
from ddtree_jax.pallas.int4_matmul.config import (
    COLUMNS,
    PADDED_ROWS,
    QUARTER_SCALES,
    QUARTER_WORDS,
    QUARTERS,
    GroupedConfig,
)
from ddtree_jax.pallas.int4_matmul.gate_up import gate_up
from ddtree_jax.pallas.int4_matmul.load import load
from ddtree_jax.pallas.int4_matmul.route import Routing
from ddtree_jax.pallas.int4_matmul.tiles import TILE_IN, Int4Tiles
from ddtree_jax.pallas.registers import THREADS
from ddtree_jax.pallas.warpgroup import WARPS, overlap_launches

# Of a stage: words and scales of two halves of a slot.
_COPIES = 4


class Registers(NamedTuple):
    """Of a thread, by what its warpgroup does."""

    multiply: int
    load: int


# By warpgroups that multiply. Five warpgroups start with 96; four with 128, which is as
# many as they need.
_REGISTERS = {4: Registers(112, 32)}


def grouped_swiglu(
    problem: Problem,
    x: BF16[Array, "T M"],
    gate: Int4Tiles,
    up: Int4Tiles,
    down: Int4Tiles,
    layer: I32[Array, ""],
    routing: Routing,
    *,
    interpret: Any = None,
) -> F32[Array, "T M"]:
    """Returns each token's weighted sum of its experts' SwiGLU feed-forwards."""
    config = problem.config
    tiles = routing.experts.shape[0]

    def body(*refs):
        inputs, (hidden, out) = Inputs(*refs[:13]), refs[13:15]
        shared = Shared(*refs[15:])
        overlap_launches(interpret=problem.interpret)

        def multiply(warpgroup):
            share = share_of(problem, warpgroup, inputs.count[0])
            place = gate_up(problem, share, inputs, shared, warpgroup, hidden)
            wait_for_units(problem, inputs)
            add_down(problem, share, inputs, shared, warpgroup, place, hidden, out)

        with_registers(config, multiply, lambda: load(problem, inputs, shared))

    barriers = config.warpgroups * config.slots
    slots = config.warpgroups, config.slots, QUARTERS
    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((tiles, COLUMNS, problem.inner), jnp.bfloat16),
            jax.ShapeDtypeStruct((problem.tokens, problem.hidden), jnp.float32),
        ),
        scratch_types=list(
            Shared(
                words=plgpu.SMEM((*slots, *QUARTER_WORDS), jnp.int32),
                scales=plgpu.SMEM((*slots, *QUARTER_SCALES), jnp.bfloat16),
                scratch=plgpu.SMEM((config.warpgroups, 2, WARPS, THREADS), jnp.float32),
                rows=plgpu.SMEM((problem.tokens, PADDED_ROWS), jnp.float32),
                experts=plgpu.SMEM(routing.experts.shape, jnp.int32),
                full=plgpu.Barrier(num_arrivals=_COPIES, num_barriers=barriers),
                free=plgpu.Barrier(num_barriers=barriers),
                turn=plgpu.Barrier(num_barriers=config.warpgroups),
                met=plgpu.Barrier(num_arrivals=config.warpgroups),
            )
        ),
        grid=(config.blocks,),
        grid_names=("block",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=interpret is None,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret,
        kernel_name="int4_grouped_swiglu",
    )
    inputs = Inputs(
        x,
        *flat_tiles(gate),
        *flat_tiles(up),
        *flat_tiles(down),
        layer.reshape(1),
        *routing,
    )
    _, out = kernel(*inputs)
    return out


def with_registers(
    config: GroupedConfig,
    multiply: Callable[[Array], None],
    load: Callable[[], None],
) -> None:
    """Runs one function in the warpgroups that multiply, and the other in the last."""
    warpgroup = lax.axis_index("warpgroup")
    registers = _REGISTERS.get(config.warpgroups)

    @pl.when(warpgroup < config.warpgroups)
    def _():
        if registers:
            plgpu.set_max_registers(registers.multiply, action="increase")
        multiply(warpgroup)

    @pl.when(warpgroup == config.warpgroups)
    def _():
        if registers:
            plgpu.set_max_registers(registers.load, action="decrease")
        load()


def flat_tiles(weight: Int4Tiles) -> tuple[Array, Array]:
    """Returns words and scales, [rows of tiles, columns of tiles / 4, …]."""
    columns = weight.shape[-1] // (QUARTERS * TILE_IN)
    return (
        weight.words.reshape(-1, columns, *QUARTER_WORDS),
        weight.scales.reshape(-1, columns, *QUARTER_SCALES),
    )
