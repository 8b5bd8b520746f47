"""Owns the kernel of a product with one INT4 weight.

A unit of work is 16 outputs of up to 8 tokens; the warps of a warpgroup share its
inputs. Many tokens read the weight again, from the level-2 cache.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.arrays import BF16, Array
from ddtree_jax.pallas.int4_matmul.block import every, zeros
from ddtree_jax.pallas.int4_matmul.config import (
    COLUMNS,
    QUARTER_SCALES,
    QUARTER_WORDS,
    QUARTERS,
    GroupedConfig,
)
from ddtree_jax.pallas.int4_matmul.fragments import (
    load_activations,
    multiply,
    own_columns,
)
from ddtree_jax.pallas.int4_matmul.grouped import flat_tiles, with_registers
from ddtree_jax.pallas.int4_matmul.outputs import add_warps, store_tokens
from ddtree_jax.pallas.int4_matmul.ring import Ring, fill_rings, release
from ddtree_jax.pallas.int4_matmul.tiles import TILE_IN, TILE_OUT, Int4Tiles
from ddtree_jax.pallas.registers import THREADS
from ddtree_jax.pallas.warpgroup import WARPS, overlap_launches


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """What is known when a call is compiled; `config` without `row_tiles`."""

    tokens: int
    inputs: int
    outputs: int
    config: GroupedConfig
    interpret: bool

    @property
    def token_tiles(self) -> int:
        """Of 8 tokens."""
        return -(-self.tokens // COLUMNS)

    @property
    def parts(self) -> int:
        """Of the inputs: one tile for each warp."""
        return self.inputs // (TILE_IN * WARPS)

    @property
    def stages(self) -> int:
        """Slots' worth of 16 outputs."""
        return -(-self.parts // QUARTERS)

    def units(self, warpgroup: Any) -> tuple[Array, Array]:
        """Returns the first unit of a warpgroup of this block, and how many it has."""
        first = lax.axis_index("block") + warpgroup * self.config.blocks
        total = jnp.int32(self.outputs // TILE_OUT * self.token_tiles)
        return first, every(total, self.config.stride, first)


class Shared(NamedTuple):
    """Shared memory of a block, as `block.Shared`."""

    words: Any
    scales: Any
    scratch: Any
    full: Any
    free: Any


def dense(
    problem: Problem,
    x: BF16[Array, "T inputs"],
    weight: Int4Tiles,
    *,
    interpret: Any = None,
) -> BF16[Array, "T out"]:
    """Returns `x @ w.T`."""
    config = problem.config

    def body(x, words, scales, out, *refs):
        shared = Shared(*refs)
        overlap_launches(interpret=problem.interpret)
        with_registers(
            config,
            lambda warpgroup: _multiply(problem, x, shared, warpgroup, out),
            lambda: fill_rings(
                config, functools.partial(_load, problem, words, scales, shared)
            ),
        )

    barriers = config.warpgroups * config.slots
    slots = config.warpgroups, config.slots, QUARTERS
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((problem.tokens, problem.outputs), jnp.bfloat16),
        scratch_types=list(
            Shared(
                words=plgpu.SMEM((*slots, *QUARTER_WORDS), jnp.int32),
                scales=plgpu.SMEM((*slots, *QUARTER_SCALES), jnp.bfloat16),
                scratch=plgpu.SMEM((config.warpgroups, 1, WARPS, THREADS), jnp.float32),
                full=plgpu.Barrier(num_arrivals=2 * QUARTERS, num_barriers=barriers),
                free=plgpu.Barrier(num_barriers=barriers),
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
        kernel_name="int4_matmul",
    )
    return kernel(x, *flat_tiles(weight))


def _multiply(
    problem: Problem, x: Any, shared: Shared, warpgroup: Array, out: Any
) -> None:
    interpret, stages = problem.interpret, problem.stages
    first, units = problem.units(warpgroup)
    columns = own_columns(interpret=interpret)
    ring = Ring(problem.config, shared, warpgroup)

    def unit(i, place):
        number = first + i * problem.config.stride
        rows, tile = (
            f(number, jnp.int32(problem.token_tiles)) for f in (lax.div, lax.rem)
        )
        tokens = jnp.minimum(tile * COLUMNS + columns, problem.tokens - 1)

        def activations(stage):
            parts = [stage * QUARTERS + quarter for quarter in range(QUARTERS)]
            return tuple(
                load_activations(
                    x,
                    tokens,
                    jnp.minimum(part, problem.parts - 1) * WARPS,
                    1,
                    interpret=interpret,
                )
                for part in parts
            )

        def stage(k, carry):
            products, current, place = carry
            following = activations(k + 1)
            slot = ring.slot(place)
            plgpu.barrier_wait(slot.full)
            for quarter, activation in enumerate(current):
                added = multiply(
                    products,
                    slot.words,
                    slot.scales,
                    activation,
                    first=quarter * WARPS,
                    stride=1,
                    interpret=interpret,
                )
                exists = k * QUARTERS + quarter < problem.parts
                products = jnp.where(exists, added, products)
            release(slot, interpret=interpret)
            return products, following, ring.after(place)

        start = zeros(), activations(jnp.int32(0)), place
        products, _, place = lax.fori_loop(0, stages, stage, start)
        [sums] = add_warps(
            [products], shared.scratch.at[warpgroup], interpret=interpret
        )
        where = tile * COLUMNS, rows * TILE_OUT
        store_tokens(out, *where, sums, interpret=interpret)
        return place

    lax.fori_loop(0, units, unit, jnp.int32(0))


def _load(
    problem: Problem, words: Any, scales: Any, shared: Shared, warpgroup: Array
) -> None:
    """Fills the ring of a warpgroup, stage by stage, as soon as there is room."""
    first, units = problem.units(warpgroup)
    ring = Ring(problem.config, shared, warpgroup)

    def unit(i, place):
        number = first + i * problem.config.stride
        row = lax.div(number, jnp.int32(problem.token_tiles))

        def stage(k, place):
            slot = ring.free_slot(place, i * problem.stages + k)
            for quarter in range(QUARTERS):
                # Past the last part it is loaded again, and not used.
                part = jnp.minimum(k * QUARTERS + quarter, problem.parts - 1)
                for source, target in ((words, slot.words), (scales, slot.scales)):
                    plgpu.copy_gmem_to_smem(
                        source.at[row, part], target.at[quarter], slot.full
                    )
            return ring.after(place)

        return lax.fori_loop(0, problem.stages, stage, place)

    lax.fori_loop(0, units, unit, jnp.int32(0))
    ring.wait_until_read(units * problem.stages)
